"""Time every compiled candidate on every shape of a file, all samples kept: the landscape that a search is judged by.

Usage: python scripts/sweep.py --candidates DIR --shapes FILE --out FILE [--dtype float16] [--within 3] [--rounds 3] [--cold]
           [--split 2 3 4 6 8] [--group 8 2 --group-within 1.25] [--points N] [--dry-run]
Needs a GPU of the candidates' arch; ``--dry-run`` only lists how many points there are. Candidates predicted to take more than
``--within`` times the predicted best are left out. A point costs about 30 ms, nearly all of it for checking the kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from autogemm.arch import DEFAULT_GPU, gpu
from autogemm.binary import Binary, read_folder, write_whole
from autogemm.config import Config
from autogemm.manifest import ceildiv, evaluate
from autogemm.measure.device_bench import DeviceBench
from autogemm.measure.sweep import SCHEMA, sweep
from autogemm.predict.closed_form import rank
from autogemm.problem import Problem
from autogemm.resources import geometry
from autogemm.shapes import read_shapes


def workspace(binary: Binary, config: Config, problem: Problem) -> int:
    """Return bytes of device memory the kernel needs beside the operands."""
    sizes = {"M": problem.m, "N": problem.n, "K": problem.k, "lda": problem.k, "ldb": problem.k, "ldd": problem.n}
    knobs = config.launch._asdict()
    sms = gpu(DEFAULT_GPU[binary.manifest.arch]).sm_count  # type: ignore[index]
    return evaluate(binary.manifest.workspace_bytes, binary.manifest.scalar_values({**sizes, **knobs, "sm_count": sms}))


def points(problem: Problem, binaries: dict[Config, Binary], given: argparse.Namespace) -> list[Config]:
    """Return what to measure on ``problem``, launch-time knobs included, fastest predicted first.

    Every kernel within ``--within`` runs with the first of ``--group``; those within ``--group-within`` with the others too,
    unless the tile grid has so few rows that the order of tiles is the same.
    """
    target = gpu(DEFAULT_GPU[next(iter(binaries.values())).manifest.arch])  # type: ignore[index]
    every = [replace(c, split_k=s) for c in binaries for s in (given.split if c.split_k > 1 else (1,))]
    ranked = rank(problem, [replace(c, l2_group_size=given.group[0]) for c in every], target)
    best, room = ranked[0][1].time_s, given.workspace_mib << 20
    chosen = []
    for config, predicted in ranked:
        if predicted.time_s > given.within * best or workspace(binaries[config.binary], config, problem) > room:
            continue
        cluster = geometry(config, target.arch).cluster_rows
        rows = ceildiv(problem.n if config.swap_ab else problem.m, cluster)
        groups = given.group if predicted.time_s <= given.group_within * best else given.group[:1]
        chosen += [replace(config, l2_group_size=g) for g in {min(g, rows): g for g in reversed(groups)}.values()]
    return chosen[: given.points]


def main() -> int:
    """Write the landscape after every shape, so that a broken run keeps what it has."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--candidates", type=Path, required=True)
    parser.add_argument("--shapes", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--within", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--group", type=int, nargs="+", default=[8], help="values of l2_group_size")
    parser.add_argument("--group-within", type=float, default=3.0, help="like --within, for all values but the first")
    parser.add_argument("--points", type=int, help="at most so many points per shape, fastest predicted first")
    parser.add_argument("--dry-run", action="store_true", help="list the number of points; needs no GPU")
    parser.add_argument(
        "--split", type=int, nargs="+", default=list(range(2, 9)), help="values of SPLIT_K where a kernel splits"
    )
    parser.add_argument("--workspace-mib", type=int, default=64, help="leave out what needs more, since all stay in memory")
    parser.add_argument("--cold", action="store_true")
    given = parser.parse_args()
    binaries = {b.config: b for b in read_folder(given.candidates) if b.manifest.dtype == given.dtype}
    shapes, found, started = [], [], time.perf_counter()
    bench: DeviceBench | None = None
    for shape in read_shapes(given.shapes):
        problem = Problem(m=shape.m, n=shape.n, k=shape.k, dtype=given.dtype)
        configs = points(problem, binaries, given)
        if given.dry_run:
            print(f"{problem.shape:18} {len(configs):4} points, {sum(c.split_k > 1 for c in configs)} of them with slices of K")
            continue
        bench = DeviceBench(problem) if bench is None else bench
        candidates = [(binaries[c.binary], c) for c in configs]
        for landscape in sweep([problem], candidates, rounds=given.rounds, cold=given.cold, bench=bench):
            found.append(landscape.to_json())
            base = sorted(landscape.baseline_s)[len(landscape.baseline_s) // 2]
            times = sorted((sorted(s)[len(s) // 2], name) for name, s in landscape.samples_s.items())
            best = "  ".join(f"{name} {base / t:.3f}" for t, name in times[:3])
            shapes.append(base / times[0][0] if times else 0.0)
            print(f"{problem.shape:18} {len(configs):4} tried, {len(landscape.failed)} failed, cuBLAS {base * 1e6:9.2f} us  "
                  f"{best}  [{time.perf_counter() - started:.0f} s]", flush=True)  # fmt: skip
            for name, (outcome, reason) in landscape.failed.items():
                print(f"    {name}: {outcome.value} {reason[:120]}", flush=True)
            write_whole(given.out, json.dumps({"schema": SCHEMA, "shapes": found}).encode())
    if bench is not None:
        bench.close()
    return 0 if given.dry_run or (shapes and all(shapes)) else 1


if __name__ == "__main__":
    sys.exit(main())
