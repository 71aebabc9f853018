"""Turn files of ``autogemm bench --out`` into the Markdown tables of docs/results.md.

Usage: python scripts/measured_table.py BENCH.json [BENCH.json ...] > docs/results.md
Every number is recomputed from the samples in the files: medians of paired ratios, never ratios of medians.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from autogemm.measure.bench import geomean

CLASSES = ("squares", "prefill (M >= 1024)", "16 < M <= 256", "M <= 16", "other")

LEGEND = """\
Ratios are torch.matmul's (cuBLAS default) time over the kernel's: medians of paired, interleaved rounds of one process, random
normal data; above 1 is faster. `lt`: the same against the best algorithm of a cuBLASLt search. `dispatched`: through
`autogemm.matmul`. `limit`: the least time this GPU could take (bytes at the same run's read bandwidth, or FLOPs at the tensor
peak of the clock seen) over the kernel's time with a cold L2.
"""


def shape_class(m: int, n: int, k: int) -> str:
    """Return the class a shape is reported in."""
    if m == n == k:
        return CLASSES[0]
    if m >= 1024:
        return CLASSES[1]
    if 16 < m <= 256:
        return CLASSES[2]
    return CLASSES[3] if m <= 16 else CLASSES[4]


def ratios(samples: dict[str, Any]) -> list[float]:
    """Return torch.matmul's time over the subject's, one per round."""
    return [b / k for b, k in zip(samples["baseline_s"], samples["kernel_s"], strict=True)]


def over(mine: dict[str, Any], its: dict[str, Any]) -> float:
    """Return the median paired speed of one subject over another of the same rounds."""
    return statistics.median(slow / fast for fast, slow in zip(mine["kernel_s"], its["kernel_s"], strict=True))


def line(result: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of one shape."""
    problem, raw = result["problem"], result["subjects"]["raw"]
    quarter = statistics.quantiles(ratios(raw["warm"]), n=4, method="inclusive")
    searched = result["subjects"].get("cublaslt")
    dispatched = result["subjects"].get("dispatch")
    return {
        "shape": f"{problem['m']}x{problem['n']}x{problem['k']}", "dtype": problem["dtype"],
        "class": shape_class(problem["m"], problem["n"], problem["k"]),
        "us": statistics.median(raw["warm"]["kernel_s"]) * 1e6, "warm": statistics.median(ratios(raw["warm"])),
        "spread": (quarter[2] - quarter[0]) / 2, "cold": statistics.median(ratios(raw["cold"])),
        "lt_warm": over(raw["warm"], searched["warm"]) if searched else None,
        "lt_cold": over(raw["cold"], searched["cold"]) if searched else None,
        "dispatch": statistics.median(ratios(dispatched["warm"])) if dispatched else None,
        "limit": result["limit"]["time_s"] / statistics.median(raw["cold"]["kernel_s"]), "bound": result["limit"]["bound"],
    }  # fmt: skip


def shown(value: float | None) -> str:
    """Return a ratio as text."""
    return "" if value is None else f"{value:.3f}"


def main(paths: list[str]) -> int:
    """Print the document."""
    results = [r for path in paths for r in json.loads(Path(path).read_text())["results"]]
    if not results:
        print("no results", file=sys.stderr)
        return 2
    lines, env = [line(r) for r in results], results[0]["environment"]
    clocks = [c for r in results for c in (r["environment"]["sm_clock_hz"] or ())]
    watts = [w for r in results for w in (r["environment"]["power_w"] or ())]
    watt, mhz = f"{min(watts):.0f} to {max(watts):.0f} W", f"{min(clocks) / 1e6:.0f} to {max(clocks) / 1e6:.0f} MHz"
    print("# Measured results\n")
    print(f"{env['gpu']}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, {env['date'][:10]};")
    print(f"power limit {env['power_limit_w']:.0f} W, {watt} and SM clocks of {mhz} seen.\n")
    print(LEGEND)
    print("| class | shapes | warm | cold | lt warm | lt cold | dispatched |\n|---|---|---|---|---|---|---|")
    for name in (*CLASSES, "all"):
        part = [x for x in lines if name in (x["class"], "all")]
        if part:
            means = [
                shown(geomean(x[f] for x in part)) if all(x[f] for x in part) else ""
                for f in ("warm", "cold", "lt_warm", "lt_cold", "dispatch")
            ]
            print(f"| {name} | {len(part)} | " + " | ".join(means) + " |")
    print("\n| shape | dtype | us | warm | ± | cold | lt warm | lt cold | dispatched | limit | bound |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for x in lines:
        cells = [
            x["shape"],
            x["dtype"],
            f"{x['us']:.2f}",
            *(shown(x[f]) for f in ("warm", "spread", "cold", "lt_warm", "lt_cold")),
        ]
        print(f"| {' | '.join(cells)} | {shown(x['dispatch'])} | {x['limit']:.2f} | {x['bound']} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
