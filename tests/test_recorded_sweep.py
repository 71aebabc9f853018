"""The predictor on the sweep its constants are fitted to: tests/data/h200_sweep.json (see landscape.py)."""

from __future__ import annotations

import statistics

import landscape
import pytest

from autogemm.arch import gpu
from autogemm.predict.closed_form import predict
from autogemm.problem import Problem

Shape = tuple[Problem, list[tuple[float, float]]]


@pytest.fixture(scope="module")
def shapes() -> list[Shape]:
    """Each problem with (predicted, measured) seconds of its kernels."""
    device = gpu("nvidia-h200")
    return [(p, [(predict(p, config, device).time_s, t) for config, t in times.items()]) for p, times in landscape.sweep()]


def test_the_file_is_whole(shapes: list[Shape]) -> None:
    assert len(shapes) == 21
    assert sum(len(pairs) for _, pairs in shapes) > 2400


def test_times_are_predicted_within_3_percent_in_the_median_and_within_8_on_every_shape(shapes: list[Shape]) -> None:
    errors = [statistics.median(abs(p / t - 1) for p, t in pairs) for _, pairs in shapes]
    assert statistics.median(errors) <= 0.03
    assert max(errors) <= 0.08


def test_the_first_eight_hold_one_within_2_percent_of_the_best_on_all_shapes_but_one(shapes: list[Shape]) -> None:
    held = [min(t for _, t in sorted(pairs)[:8]) <= 1.02 * min(t for _, t in pairs) for _, pairs in shapes]
    assert sum(held) >= 20


def test_the_first_choice_is_within_5_percent_of_the_best_on_17_shapes_of_21(shapes: list[Shape]) -> None:
    assert sum(min(pairs)[1] <= 1.05 * min(t for _, t in pairs) for _, pairs in shapes) >= 17


def test_the_order_is_right(shapes: list[Shape]) -> None:
    """0.85 is reached on 18 shapes of 21; what limits the others is in docs/prediction.md."""
    ranks = [landscape.spearman(*zip(*pairs, strict=True)) for _, pairs in shapes]
    assert sum(r >= 0.85 for r in ranks) >= 18
    assert min(ranks) >= 0.8
    assert statistics.median(ranks) >= 0.92
