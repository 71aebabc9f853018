"""Execute legal kernels under random schedules and shapes until there are enough runs: none may be reported.

Usage: python scripts/false_alarms.py [--runs 500] [--draw 1] [--ptx 0.2] [--results FILE.json]
A run is one execution of one kernel under one schedule. Kernels are drawn from the spaces of both archs alike, and both data
types; shapes are ragged, from less than a tile to several tiles per cluster. ``--ptx`` is the share of kernels executed as
lowered. Exit status 1 on any finding. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path

from autogemm.arch import ArchName
from autogemm.binary import write_whole
from autogemm.config import Config
from autogemm.kernel.generate import generator_hash, prim_func
from autogemm.results import Level
from autogemm.search.gate import simulator_hash
from autogemm.simulate.check import check_config, exercising_shape
from autogemm.space import load_space

ARCHS: tuple[ArchName, ...] = ("sm_100a", "sm_90a")
SCHEDULES = 5  # per kernel and shape: tracing costs more than a run


def shape_of(config: Config, arch_name: ArchName, draw: random.Random) -> tuple[int, int, int, int]:
    """Return (M, N, K, sm_count): mostly near the exercising shape, sometimes small in one extent."""
    m, n, k, sms = exercising_shape(config, arch_name)
    m = draw.randint(1, m) if draw.random() < 0.5 else m
    n = draw.randrange(8, n + 1, 8) if draw.random() < 0.5 else n
    k = draw.randrange(8, k + 1, 8) if draw.random() < 0.3 else k
    return m, n, k, sms


def main() -> int:
    """Run, print every alarm and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--draw", type=int, default=1, help="seed of everything that is drawn")
    parser.add_argument("--ptx", type=float, default=0.2, help="share of kernels executed as lowered")
    parser.add_argument("--results", type=Path, help="file for the list of runs")
    given = parser.parse_args()
    draw = random.Random(given.draw)
    spaces = {name: load_space(name).binaries() for name in ARCHS}
    counts: Counter[str] = Counter()
    rows, alarms, started = [], 0, time.process_time()
    while sum(counts.values()) < given.runs:
        arch_name = ARCHS[len(rows) % 2]
        config, dtype = draw.choice(spaces[arch_name]), draw.choice(("float16", "bfloat16"))
        level: Level = "ptx" if draw.random() < given.ptx else "tile"
        m, n, k, sms = shape_of(config, arch_name, draw)
        seeds = tuple(draw.sample(range(1, 1_000_000), SCHEDULES))
        report = check_config(
            config, arch_name, shape=(m, n, k), dtype=dtype, level=level, seeds=seeds, sm_count=sms,
            func=prim_func(config, arch_name, dtype),
        )  # fmt: skip
        counts[f"{arch_name} {level}"] += len(seeds)
        findings = [f"{f.kind}: {f.text}" for f in report.findings]
        alarms += bool(findings)
        for text in findings:
            print(f"{arch_name} {config.id} {dtype} {level} {m}x{n}x{k} seeds {seeds}: {text}", flush=True)
        rows.append({"arch": arch_name, "config_id": config.id, "dtype": dtype, "level": level, "shape": [m, n, k],
                     "seeds": seeds, "findings": findings})  # fmt: skip
        if given.results is not None:
            stamp = f"{generator_hash()}/{simulator_hash()}"
            write_whole(given.results, json.dumps({"stamp": stamp, "draw": given.draw, "runs": rows}, indent=1).encode())
    parts = ", ".join(f"{number} at {what}" for what, number in sorted(counts.items()))
    print(
        f"{sum(counts.values())} runs of {len(rows)} kernels ({parts}): {alarms} kernels reported, "
        f"{time.process_time() - started:.0f} s of CPU"
    )
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
