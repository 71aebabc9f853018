"""The predictor on a sweep it was not fitted to: tests/data/h200_sweep.json.

144 kernels of this generator on 21 shapes of an H200, three interleaved rounds each with torch.matmul, every sample kept; those
predicted within 2.2 times the best took part. Its split kernels exchanged sums through clusters, which is gone: left out here.
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from autogemm.arch import gpu
from autogemm.config import Config
from autogemm.measure.sweep import Landscape
from autogemm.predict.closed_form import predict
from autogemm.problem import Problem

FILE = Path(__file__).parent / "data" / "h200_sweep.json"
_ID = re.compile(r"(\d+)x(\d+)x(\d+)_d(\d+)_g(\d+)_c(\d+)_e(\d+)_l(\d+)(_pp)?(_swap)?")


def config(name: str) -> Config | None:
    found = _ID.fullmatch(name)
    if found is None:
        return None
    m, n, k, depth, group, consumers, epi, raster = (int(part) for part in found.groups()[:8])
    return Config(
        blk_m=m, blk_n=n, blk_k=k, pipe_depth=depth, cta_group=group, num_consumer=consumers, epi_n=epi, l2_group_size=raster,
        pingpong=found[9] is not None, swap_ab=found[10] is not None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def shapes() -> list[tuple[Problem, list[tuple[float, float]]]]:
    """Each problem with (predicted, measured) seconds of its kernels."""
    device, taken = gpu("nvidia-h200"), []
    for document in json.loads(FILE.read_text())["shapes"]:
        recorded = Landscape.from_json(document)
        known = [(config(name), statistics.median(times)) for name, times in recorded.samples_s.items()]
        pairs = [(predict(recorded.problem, c, device).time_s, t) for c, t in known if c is not None]
        taken.append((recorded.problem, pairs))
    return taken


def spearman(pairs: list[tuple[float, float]]) -> float:
    places = [{v: i for i, v in enumerate(sorted(column))} for column in zip(*pairs, strict=True)]
    ranks: list[list[float]] = [[place[p[i]] for p in pairs] for i, place in enumerate(places)]
    return statistics.correlation(*ranks)


def test_the_file_is_whole(shapes: list[tuple[Problem, Any]]) -> None:
    assert len(shapes) == 21
    assert sum(len(pairs) for _, pairs in shapes) > 1500


def test_times_are_predicted_within_8_percent_in_the_median(shapes: list[tuple[Problem, list[tuple[float, float]]]]) -> None:
    errors = [statistics.median(abs(p / t - 1) for p, t in pairs) for _, pairs in shapes]
    assert statistics.median(errors) <= 0.08


def test_the_first_eight_hold_one_within_2_percent_of_the_best_on_nine_shapes_of_ten(
    shapes: list[tuple[Problem, list[tuple[float, float]]]],
) -> None:
    held = [min(t for _, t in sorted(pairs)[:8]) <= 1.02 * min(t for _, t in pairs) for _, pairs in shapes]
    assert sum(held) / len(held) >= 0.9


def test_the_order_is_right_on_most_shapes(shapes: list[tuple[Problem, list[tuple[float, float]]]]) -> None:
    """0.85 is reached in the median over shapes, not on every shape: docs/prediction.md."""
    assert statistics.median(spearman(pairs) for _, pairs in shapes) >= 0.85
    assert min(spearman(pairs) for _, pairs in shapes) >= 0.75
