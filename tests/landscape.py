"""Recorded H200 times, and how to score a ranking against them.

h200_landscape.json: 66 sm_90a configs of a laboratory kernel on 24 shapes, medians. h200_sweep.json: 112 kernels of this
generator on 21 shapes, five interleaved rounds each with torch.matmul on a GPU under sustained load, every sample. Those that
an earlier model predicted within twice the best took part, the leaders with a second raster, at most 130 points of a shape.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from autogemm.config import Config
from autogemm.measure.sweep import Landscape
from autogemm.problem import Problem

_ID = re.compile(r"(\d+)x(\d+)x(\d+)_d(\d+)_g(\d+)_c(\d+)_e(\d+)_l(\d+)(_pp)?(?:_k(\d+))?(_swap)?")


def load() -> tuple[list[Config], list[tuple[Problem, list[float]]]]:
    """Return the Configs, and per shape the measured seconds of each."""
    document = json.loads((Path(__file__).parent / "data" / "h200_landscape.json").read_text())
    configs = [Config.from_knobs(dict(zip(document["config_columns"], row, strict=True))) for row in document["configs"]]
    return configs, [(Problem(m=s["m"], n=s["n"], k=s["k"]), [t * 1e-6 for t in s["config_us"]]) for s in document["shapes"]]


def laboratory() -> list[tuple[Problem, dict[Config, float]]]:
    """Return per shape the seconds of the laboratory's kernels, without ping-pong where M is smaller than a tile.

    Those loaded rows outside the tensor, which the generator's kernels do not.
    """
    configs, shapes = load()
    return [
        (p, {c: t for c, t in zip(configs, times, strict=True) if not (c.pingpong and p.m < c.blk_m)}) for p, times in shapes
    ]


def sweep() -> list[tuple[Problem, dict[Config, float]]]:
    """Return per shape the median measured seconds of each Config."""
    taken = []
    for document in json.loads((Path(__file__).parent / "data" / "h200_sweep.json").read_text())["shapes"]:
        recorded = Landscape.from_json(document)
        times = {_config(name): statistics.median(samples) for name, samples in recorded.samples_s.items()}
        taken.append((recorded.problem, times))
    return taken


def _config(name: str) -> Config:
    found = _ID.fullmatch(name)
    assert found is not None, name
    m, n, k, depth, group, consumers, epi, raster = (int(part) for part in found.groups()[:8])
    return Config(
        blk_m=m, blk_n=n, blk_k=k, pipe_depth=depth, cta_group=group, num_consumer=consumers, epi_n=epi, l2_group_size=raster,
        pingpong=found[9] is not None, split_k=int(found[10] or 1), swap_ab=found[11] is not None,
    )  # fmt: skip


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
