"""Compare the closed-form ranking with NVIDIA's nvMatmulHeuristics (nvidia-matmul-heuristics) on recorded H200 times.

Usage: python scripts/compare_heuristics.py
Both see the same 66 configs on the same 24 shapes. nvMatmulHeuristics rates kernels of CUTLASS 3, which differ from ours, so it
is asked for what they have in common: tile, stages, cluster and raster group. It can't tell ping-pong from cooperative.
Needs nvidia-matmul-heuristics and scipy, which autogemm itself does not use.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from fit_predictor import load
from scipy.stats import spearmanr

from autogemm.arch import gpu
from autogemm.config import Config
from autogemm.predict.closed_form import predict
from autogemm.predict.constants import constants
from autogemm.problem import Problem

H200 = gpu("nvidia-h200")
RECORDED = replace(constants(H200), pingpong_trims=False)


def heuristics() -> Callable[[Problem, Config], float]:
    """Return a function that yields nvMatmulHeuristics' seconds for a Config's nearest CUTLASS 3 kernel."""
    import nvMatmulHeuristics as nv

    interface = nv.NvMatmulHeuristicsInterfaceEx(
        backend=nv.NvMatmulHeuristicsTarget.CUTLASS3,
        flags=nv.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        load_discovery_implicitly=True,
        gpu=nv.NvMatmulHeuristicsNvidiaGpu.H200_SXM,
    )
    # Row-major D = A . B^T: A is not transposed, B is.
    layout = nv.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR
    interface.loadInternalDiscoverySet(layout, "HSH")

    def seconds(problem: Problem, config: Config) -> float:
        kernel: Any = nv.NvMatmulHeuristicsInterface.nvmmhKernelConfiguration()
        rows = config.blk_m if config.pingpong or config.num_consumer == 1 else config.blk_m // config.num_consumer
        kernel.cta[:] = (config.blk_m, config.blk_n, config.blk_k)
        kernel.warp[:] = (rows, config.blk_n, config.blk_k)
        kernel.instr[:] = (64, config.blk_n, 16)
        kernel.splitK, kernel.loadStages, kernel.gridSwizzle, kernel.ctaOrder = 1, config.pipe_depth, config.l2_group_size, 0
        kernel.cluster[:] = (config.cta_group, 1)
        question = interface.makeNvMatmulHeuristicsProblem(problem.m, problem.n, problem.k, layout)
        # The C call itself: the Python wrapper's estimate methods of version 0.1.0.27 crash or call a missing one.
        estimate = interface.nvMatmulHeuristicsEstimateRuntime
        return float(
            estimate(
                interface.handle, b"HSH", ctypes.c_int(interface.target), ctypes.byref(question), ctypes.byref(kernel),
                interface.hardware_descriptor,
            )
        )  # fmt: skip

    return seconds


def main() -> None:
    """Print, per model, rank correlation and what its first choices cost."""
    configs, points = load()
    library = heuristics()
    models: dict[str, Callable[[Problem, Config], float]] = {
        "closed-form-1": lambda p, c: predict(p, c, H200, use=RECORDED).time_s,
        "nvMatmulHeuristics": library,
    }
    for name, model in models.items():
        rows = []
        for problem, times in points:
            predicted = [model(problem, c) for c in configs]
            order = sorted(range(len(configs)), key=predicted.__getitem__)
            rows.append((
                float(spearmanr(predicted, times)[0]),
                min(times[i] for i in order[:8]) / min(times),
                times[order[0]] / min(times),
                median(abs(p / t - 1) for p, t in zip(predicted, times, strict=True)),
            ))  # fmt: skip
        spearman, top8, first, error = (list(column) for column in zip(*rows, strict=True))
        sys.stdout.write(
            f"{name} ({len(rows)} shapes): Spearman min {min(spearman):.3f} median {median(spearman):.3f}; "
            f"median error {median(error):.1%}; top 8 within 2% of best {sum(t <= 1.02 for t in top8)}, worst {max(top8):.2f}x; "
            f"first choice within 5% {sum(t <= 1.05 for t in first)}, worst {max(first):.2f}x\n"
        )


if __name__ == "__main__":
    main()
