"""Fit the closed-form model's H200 constants to recorded times, and say how well they do on shapes left out.

Usage: python scripts/fit_predictor.py [--held-out] [--steps N]
Needs scipy; prints the constants and the scores of docs/prediction.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from autogemm.arch import gpu
from autogemm.config import Config
from autogemm.predict.closed_form import predict
from autogemm.predict.constants import Constants, constants
from autogemm.problem import Problem

Point = tuple[Problem, list[float]]  # a shape and the measured seconds of each config
LANDSCAPE = Path(__file__).resolve().parents[1] / "tests" / "data" / "h200_landscape.json"
# Constants that the data can't tell apart, or that have a source of their own, stay as they are.
FITTED = (
    "full_load_clock_hz", "clock_per_work", "launch_s", "cluster_launch_s", "load_cycles", "miss_cycles", "step_cycles",
    "pingpong_step_cycles", "least_step_cycles", "epilogue_column_cycles", "epilogue_step_cycles", "zero_fill_cycles",
    "l2_part", "l2_miss_bytes_per_s", "b_sharing", "dram_efficiency", "overlap",
)  # fmt: skip
# Where a fit starts: round numbers, not the shipped ones, so that shapes left out have left no trace.
GUESSES = {
    "full_load_clock_hz": 1.5e9, "clock_per_work": 0.03, "launch_s": 2e-6, "cluster_launch_s": 0.5e-6, "load_cycles": 1000.0,
    "miss_cycles": 500.0, "step_cycles": (30.0, 30.0, 30.0), "pingpong_step_cycles": 30.0, "least_step_cycles": 150.0,
    "epilogue_column_cycles": 4.0, "epilogue_step_cycles": 150.0, "zero_fill_cycles": 8.0, "l2_part": 0.4,
    "l2_miss_bytes_per_s": 1e13, "b_sharing": 2.0, "dram_efficiency": 0.8, "overlap": 5.0,
}  # fmt: skip


def load() -> tuple[list[Config], list[Point]]:
    """Return the recorded Configs and, per problem, their times in seconds."""
    document = json.loads(LANDSCAPE.read_text())
    configs = [Config.from_knobs(dict(zip(document["config_columns"], row, strict=True))) for row in document["configs"]]
    points = [(Problem(m=s["m"], n=s["n"], k=s["k"]), [t * 1e-6 for t in s["config_us"]]) for s in document["shapes"]]
    return configs, points


def scores(configs: Sequence[Config], points: Sequence[Point], use: Constants) -> list[dict[str, float]]:
    """Return per problem: Spearman correlation, median absolute error, best of the predicted top 8 over the best, first
    choice over the best.
    """
    from scipy.stats import spearmanr

    rows = []
    for problem, times in points:
        predicted = [predict(problem, c, gpu("nvidia-h200"), use=use).time_s for c in configs]
        top = sorted(range(len(configs)), key=predicted.__getitem__)[:8]
        rows.append({
            "spearman": float(spearmanr(predicted, times)[0]),
            "error": median(abs(p / t - 1) for p, t in zip(predicted, times, strict=True)),
            "top8": min(times[i] for i in top) / min(times),
            "top1": times[top[0]] / min(times),
        })  # fmt: skip
    return rows


def report(name: str, rows: Sequence[dict[str, float]]) -> None:
    """Print one line of scores."""
    sys.stdout.write(
        f"{name}: Spearman min {min(r['spearman'] for r in rows):.3f} median {median(r['spearman'] for r in rows):.3f}, "
        f"below 0.85 on {sum(r['spearman'] < 0.85 for r in rows)}; "
        f"median error {median(r['error'] for r in rows):.1%}; "
        f"top 8 within 2% of best {sum(r['top8'] <= 1.02 for r in rows)}/{len(rows)}; "
        f"first choice within 5% {sum(r['top1'] <= 1.05 for r in rows)}/{len(rows)}\n"
    )


def fit(configs: Sequence[Config], points: Sequence[Point], start: Constants, steps: int) -> Constants:
    """Return constants of least weighted squares of log(predicted / measured); slow configs weigh less."""
    from scipy.optimize import least_squares

    def flat(c: Constants) -> list[float]:
        return [
            v for name in FITTED for v in (getattr(c, name) if isinstance(getattr(c, name), tuple) else (getattr(c, name),))
        ]

    def built(scale: Sequence[float]) -> Constants:
        values = iter([s * v for s, v in zip(scale, flat(start), strict=True)])
        return replace(start, **{  # type: ignore[arg-type]
            name: tuple(next(values) for _ in getattr(start, name)) if isinstance(getattr(start, name), tuple) else next(values)
            for name in FITTED
        })  # fmt: skip

    def residuals(scale: Sequence[float]) -> np.ndarray:
        use = built(scale)
        return np.array([
            min(times) / t * math.log(predict(problem, c, gpu("nvidia-h200"), use=use).time_s / t)
            for problem, times in points for c, t in zip(configs, times, strict=True)
        ])  # fmt: skip

    ones = [1.0] * len(flat(start))
    found = least_squares(residuals, ones, loss="soft_l1", f_scale=0.1, bounds=(0.05, 5.0), diff_step=1e-3, max_nfev=steps)
    return built(list(found.x))


def main() -> None:
    """Fit, print constants and scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--held-out", action="store_true", help="fit on every second shape, score the others")
    parser.add_argument("--steps", type=int, default=25)
    given = parser.parse_args()
    configs, points = load()
    start = replace(constants(gpu("nvidia-h200")), pingpong_trims=False)  # as recorded
    report("shipped constants, all shapes", scores(configs, points, start))
    if not given.steps:
        return
    train = points[::2] if given.held_out else points
    found = fit(configs, train, replace(start, **GUESSES), given.steps)
    for name in FITTED:
        sys.stdout.write(f"  {name} = {getattr(found, name)}\n")
    report("fitted shapes", scores(configs, train, found))
    if given.held_out:
        report("held-out shapes", scores(configs, points[1::2], found))


if __name__ == "__main__":
    main()
