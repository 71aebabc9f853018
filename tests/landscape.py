"""Recorded H200 times of 66 sm_90a configs on 24 shapes, and how to score a ranking against them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from autogemm.config import Config
from autogemm.problem import Problem


def load() -> tuple[list[Config], list[tuple[Problem, list[float]]]]:
    """Return the Configs, and per shape the measured seconds of each."""
    document = json.loads((Path(__file__).parent / "data" / "h200_landscape.json").read_text())
    configs = [Config.from_knobs(dict(zip(document["config_columns"], row, strict=True))) for row in document["configs"]]
    return configs, [(Problem(m=s["m"], n=s["n"], k=s["k"]), [t * 1e-6 for t in s["config_us"]]) for s in document["shapes"]]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the rank correlation of two sequences; equal values share their mean rank."""
    ra, rb = _ranks(a), _ranks(b)
    mean = (len(a) + 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(ra, rb, strict=True))
    return float(covariance / (sum((x - mean) ** 2 for x in ra) * sum((y - mean) ** 2 for y in rb)) ** 0.5)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    first = {v: ordered.index(v) for v in set(values)}
    return [first[v] + (ordered.count(v) + 1) / 2 for v in values]
