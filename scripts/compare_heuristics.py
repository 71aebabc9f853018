"""Compare the closed-form ranking with NVIDIA's nvMatmulHeuristics (nvidia-matmul-heuristics) on recorded H200 times.

Usage: python scripts/compare_heuristics.py [--count 8]
nvMatmulHeuristics proposes kernels of CUTLASS 3, most promising first. A proposal stands here for every recorded config of the
same CTA tile, or its transpose, whatever its cluster, stages and schedule; the best of them counts, which favours the library.
Needs nvidia-matmul-heuristics, which autogemm itself does not use.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import landscape

from autogemm.arch import gpu
from autogemm.predict.closed_form import MODEL, predict

H200 = gpu("nvidia-h200")


def main() -> None:
    """Print, per model, how close the best of its first choices comes to the best recorded config."""
    import nvMatmulHeuristics as nv

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=8, help="choices to take from each model")
    count = parser.parse_args().count
    library = nv.NvMatmulHeuristicsInterfaceEx(
        backend=nv.NvMatmulHeuristicsTarget.CUTLASS3,
        flags=nv.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        gpu=nv.NvMatmulHeuristicsNvidiaGpu.H200_SXM,
    )
    layout = nv.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR  # D = A . B^T, all row-major
    library.loadInternalDiscoverySet(layout, "HSH")
    scores: dict[str, list[float]] = {MODEL: [], "nvMatmulHeuristics": []}
    errors: dict[str, list[float]] = {MODEL: [], "nvMatmulHeuristics": []}
    for problem, times in landscape.sweep():
        best = min(times.values())
        predicted = {config: predict(problem, config, H200).time_s for config in times}
        order = sorted(predicted, key=predicted.__getitem__)
        scores[MODEL].append(min(times[config] for config in order[:count]) / best)
        errors[MODEL].append(abs(predicted[order[0]] / times[order[0]] - 1))
        question = library.makeNvMatmulHeuristicsProblem(problem.m, problem.n, problem.k, layout)
        proposals = library.get(question, count, precision="HSH")
        same = [
            [
                t
                for c, t in times.items()
                if {(c.blk_m, c.blk_n), (c.blk_n, c.blk_m)} & {(p["kernel"].cta_tile_m, p["kernel"].cta_tile_n)}
            ]
            for p in proposals
        ]
        known = [min(found) for found in same if found]
        scores["nvMatmulHeuristics"].append(min(known) / best if known else float("inf"))
        if same[0]:
            errors["nvMatmulHeuristics"].append(abs(proposals[0]["runtime"] / min(same[0]) - 1))
    for name, reached in scores.items():
        sys.stdout.write(
            f"{name}: best of {count} choices within 2% of the best recorded on {sum(r <= 1.02 for r in reached)} of "
            f"{len(reached)} shapes, median {median(reached):.3f}x, worst {max(reached):.2f}x; "
            f"time of its first choice off by {median(errors[name]):.0%} (median)\n"
        )


if __name__ == "__main__":
    main()
