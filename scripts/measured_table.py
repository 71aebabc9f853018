"""Turn files of ``autogemm bench --out`` into the Markdown tables of docs/results.md.

Usage: python scripts/measured_table.py BENCH.json [BENCH.json ...] > docs/results.md
Every number is recomputed from the samples in the files: medians of paired ratios, never ratios of medians.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from autogemm.measure.bench import geomean

CLASSES = ("squares", "prefill (M >= 1024)", "16 < M <= 256", "M <= 16", "other")

LEGEND = """\
Ratios are another's time over ours: medians of paired, interleaved rounds of one process, random normal data; above 1 ours is
faster. `kernel`: the row's generated kernel, launched raw. `dispatched`: what `autogemm.matmul` runs (`runs`): that kernel,
torch.matmul, or the cuBLASLt algorithm that the row names, as the row's own measurement has it. `over cuBLAS`: against
torch.matmul (cuBLAS's own choice). `over Lt`: against the best of a cuBLASLt search of up to 16 algorithms made anew in this
run, not the one in the row. `warm`, `cold`: operands in L2 as far as they fit, or flushed before each call. `limit`: the least
time this GPU could take (bytes at the same run's read bandwidth, or FLOPs at the tensor peak of the clock seen) over the
kernel's time with a cold L2.
"""

# (subject, baseline, cold) of each ratio column; baseline None is torch.matmul.
RATIOS = [(who, baseline, cold) for who in ("raw", "dispatch") for baseline in (None, "cublaslt") for cold in (False, True)]
TITLES = [
    f"{'kernel' if who == 'raw' else 'dispatched'} over {'cuBLAS' if baseline is None else 'Lt'}, {'cold' if cold else 'warm'}"
    for who, baseline, cold in RATIOS
]


def shape_class(m: int, n: int, k: int) -> str:
    """Return the class a shape is reported in."""
    if m == n == k:
        return CLASSES[0]
    if m >= 1024:
        return CLASSES[1]
    if 16 < m <= 256:
        return CLASSES[2]
    return CLASSES[3] if m <= 16 else CLASSES[4]


def ratios(subjects: dict[str, Any], who: str, baseline: str | None, cold: bool) -> list[float] | None:
    """Return the baseline's time over the subject's, one per round; None if one of the two was not measured."""
    state = "cold" if cold else "warm"
    if who not in subjects or (baseline is not None and baseline not in subjects):
        return None
    mine = subjects[who][state]
    other = mine["baseline_s"] if baseline is None else subjects[baseline][state]["kernel_s"]
    return [slow / fast for slow, fast in zip(other, mine["kernel_s"], strict=True)]


def line(result: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of one shape; ``ratios`` in the order of RATIOS."""
    problem, subjects = result["problem"], result["subjects"]
    found = [ratios(subjects, *column) for column in RATIOS]
    quarter = statistics.quantiles(found[0] or [], n=4, method="inclusive")
    return {
        "shape": f"{problem['m']}x{problem['n']}x{problem['k']}", "dtype": problem["dtype"],
        "class": shape_class(problem["m"], problem["n"], problem["k"]), "runs": result["dispatch_runs"],
        "us": statistics.median(subjects["raw"]["warm"]["kernel_s"]) * 1e6, "spread": (quarter[2] - quarter[0]) / 2,
        "ratios": [None if one is None else statistics.median(one) for one in found],
        "limit": result["limit"]["time_s"] / statistics.median(subjects["raw"]["cold"]["kernel_s"]),
        "bound": result["limit"]["bound"],
    }  # fmt: skip


def shown(value: float | None) -> str:
    """Return a ratio as text."""
    return "" if value is None else f"{value:.3f}"


def table(head: list[str], lines: list[list[str]]) -> None:
    """Print a Markdown table."""
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for cells in lines:
        print(f"| {' | '.join(cells)} |")


def conditions(results: list[dict[str, Any]]) -> str:
    """Return where and when the results were taken."""
    env = results[0]["environment"]
    clocks = [c for r in results for c in (r["environment"]["sm_clock_hz"] or ())]
    watts = [w for r in results for w in (r["environment"]["power_w"] or ())]
    watt, mhz = f"{min(watts):.0f} to {max(watts):.0f} W", f"{min(clocks) / 1e6:.0f} to {max(clocks) / 1e6:.0f} MHz"
    return (
        f"{env['gpu']}, driver {env['driver']}, CUDA {env['cuda']}, torch {env['torch']}, {env['date'][:10]};\n"
        f"power limit {env['power_limit_w']:.0f} W, {watt} and SM clocks of {mhz} seen.\n"
    )


def main(paths: list[str]) -> int:
    """Print the document."""
    results = [r for path in paths for r in json.loads(Path(path).read_text())["results"]]
    if not results:
        print("no results", file=sys.stderr)
        return 2
    lines = [line(r) for r in results]
    runs = Counter(x["runs"] for x in lines)
    print(f"# Measured results\n\n{conditions(results)}\n{LEGEND}")
    print(
        f"Of {len(lines)} rows, {runs['autogemm']} run their kernel, {runs['cublaslt']} the cuBLASLt algorithm that they name, "
        f"and {runs['cublas']} torch.matmul.\n"
    )
    means = []
    for name in (*CLASSES, "all"):
        part = [x for x in lines if name in (x["class"], "all")]
        if part:
            columns = zip(*(x["ratios"] for x in part), strict=True)
            means.append([name, str(len(part)), *(shown(geomean(c) if all(c) else None) for c in columns)])
    table(["class", "shapes", *TITLES], means)
    print()
    table(
        ["shape", "dtype", "kernel us", "±", *TITLES, "runs", "limit", "bound"],
        [
            [
                x["shape"], x["dtype"], f"{x['us']:.2f}", shown(x["spread"]), *map(shown, x["ratios"]), x["runs"],
                f"{x['limit']:.2f}", x["bound"],
            ]
            for x in lines
        ],
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
