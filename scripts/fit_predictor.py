"""Fit the closed-form model's H200 constants to the recorded sweep, and say how well they do on shapes left out.

Usage: python scripts/fit_predictor.py [--folds 7] [--steps 30]
Prints the scores of docs/prediction.md (of the shipped constants, of the fit, and of cross-validation, in which each shape is
predicted by constants fitted to other shapes) and the constants of autogemm/predict/constants.py. ``--folds 0`` leaves out
cross-validation, ``--steps 0`` the fit. Needs scipy; takes about two minutes.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import landscape

from autogemm.arch import gpu
from autogemm.config import Config
from autogemm.predict.closed_form import predict
from autogemm.predict.constants import Constants, constants
from autogemm.problem import Problem

Point = tuple[Problem, dict[Config, float]]  # a shape and the measured seconds of each config
H200 = gpu("nvidia-h200")
# Where a fit starts: round numbers, not the shipped ones, so that shapes left out have left no trace. Constants that are not
# here have a source of their own and stay as they are.
GUESSES = {
    "full_load_clock_hz": 1.4e9, "clock_per_utilization": 0.1, "clock_per_work": 0.05, "launch_s": 2e-6,
    "cluster_launch_s": 0.5e-6, "consumer_cycles": 20.0, "least_step_cycles": 150.0, "epilogue_column_cycles": 4.0,
    "store_cycles": 300.0, "zero_fill_cycles": 8.0, "l2_bytes_per_s": 1e13, "sharing_sms": 2.0, "ragged_part": 0.02,
    "overlap": 5.0, "slice_cycles": 2000.0, "slice_miss_cycles": 3000.0, "slice_bytes_per_cycle": 30.0,
}  # fmt: skip


def predicted(problem: Problem, configs: Mapping[Config, float], use: Constants) -> list[float]:
    """Return the predicted seconds of each config."""
    return [predict(problem, config, H200, use=use).time_s for config in configs]


def scores(problem: Problem, times: Mapping[Config, float], use: Constants) -> dict[str, float]:
    """Return Spearman correlation, median absolute error, and best of the predicted top 8 and first choice over the best."""
    guessed, measured = predicted(problem, times, use), list(times.values())
    order = sorted(range(len(measured)), key=guessed.__getitem__)
    return {
        "spearman": landscape.spearman(guessed, measured),
        "error": median(abs(p / t - 1) for p, t in zip(guessed, measured, strict=True)),
        "top8": min(measured[i] for i in order[:8]) / min(measured),
        "top1": measured[order[0]] / min(measured),
    }


def report(name: str, rows: Sequence[Mapping[str, float]]) -> None:
    """Print one line of scores."""
    ranks, errors = [r["spearman"] for r in rows], [r["error"] for r in rows]
    sys.stdout.write(
        f"{name}: Spearman min {min(ranks):.3f} median {median(ranks):.3f}, below 0.85 on {sum(r < 0.85 for r in ranks)} of "
        f"{len(rows)}; error median {median(errors):.1%} max {max(errors):.1%}; "
        f"top 8 within 2% of best {sum(r['top8'] <= 1.02 for r in rows)}, worst {max(r['top8'] for r in rows):.3f}; "
        f"first choice within 5% {sum(r['top1'] <= 1.05 for r in rows)}\n"
    )


def fit(points: Sequence[Point], start: Constants, steps: int) -> Constants:
    """Return constants of least weighted squares of log(predicted / measured), from GUESSES; slow configs weigh less."""
    from scipy.optimize import least_squares

    weights = np.array([min(times.values()) / t for _, times in points for t in times.values()])
    measured = np.log([t for _, times in points for t in times.values()])

    def built(logarithms: Sequence[float]) -> Constants:
        return replace(start, **{n: guess * math.exp(x) for (n, guess), x in zip(GUESSES.items(), logarithms, strict=True)})

    def residuals(logarithms: Sequence[float]) -> np.ndarray:
        use = built(logarithms)
        return weights * (np.log([t for problem, times in points for t in predicted(problem, times, use)]) - measured)

    found = least_squares(
        residuals, [0.0] * len(GUESSES), loss="soft_l1", f_scale=0.1, bounds=(-4.0, 2.0), diff_step=1e-3, max_nfev=steps
    )
    return built(list(found.x))


def held_out(points: Sequence[Point], start: Constants, folds: int, steps: int) -> Iterator[tuple[Problem, dict[str, float]]]:
    """Yield the scores of each shape under constants fitted without it."""
    order = random.Random(0).sample(range(len(points)), len(points))
    for fold in range(folds):
        out = order[fold::folds]
        use = fit([points[i] for i in range(len(points)) if i not in out], start, steps)
        for i in out:
            yield points[i][0], scores(*points[i], use)


def main() -> None:
    """Fit, print constants and scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    points, laboratory, shipped = landscape.sweep(), landscape.laboratory(), constants(H200)
    report("shipped constants", [scores(*point, shipped) for point in points])
    report("  on the laboratory's kernels", [scores(*point, shipped) for point in laboratory])
    if given.steps:
        found = fit(points, shipped, given.steps)
        for name in GUESSES:
            sys.stdout.write(f"    {name}={getattr(found, name):.4g},\n")
        report("fitted constants", [scores(*point, found) for point in points])
        report("  on the laboratory's kernels", [scores(*point, found) for point in laboratory])
    if given.steps and given.folds:
        rows = dict(held_out(points, shipped, given.folds, given.steps))
        for problem, row in rows.items():
            shown = "  ".join(f"{name} {value:.3f}" for name, value in row.items())
            sys.stdout.write(f"    {problem.shape:18} {shown}\n")
        report("held-out shapes", list(rows.values()))


if __name__ == "__main__":
    main()
