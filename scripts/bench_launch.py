"""What launching a kernel before its predecessor ends brings: alone, after another kernel, in a CUDA graph and on a stream.

Usage: python scripts/bench_launch.py KERNELS --shapes FILE --db DIR [--dtype float16] [--out FILE]
KERNELS is a folder of compiled kernels that holds those of DIR's rows. Needs a GPU of their arch; neither TVM nor a compiler.
Each shape's tuned kernel runs as it is launched (``overlapping``) and with programmatic dependent launch switched off
(``plain``), beside torch.matmul, in interleaved rounds: back to back, and each call after a small elementwise kernel of
torch's (``after``), whose time is part of what is shown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from autogemm.binary import read_folder
from autogemm.config import Config
from autogemm.database import Database
from autogemm.runtime.launcher import Kernel
from autogemm.shapes import read_shapes

CALLS, ROUNDS = 40, 9
LEAD_IN_REPLAYS = 3
GRAPHS = 3
LEAD_IN_CYCLES = 6_000_000  # how long the GPU is kept busy while the CPU fills the stream

Step = Callable[[], object]


def on_stream(step: Step) -> float:
    """Return microseconds per step of CALLS steps launched one by one behind a long kernel."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(LEAD_IN_CYCLES)
    start.record()
    for _ in range(CALLS):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / CALLS


def captured(step: Step) -> Callable[[], float]:
    """Return a function that replays CALLS steps as one graph and returns microseconds per step.

    Graphs of one and the same step differ by up to 0.35 us per step (H200, CUDA 13.0), so each call replays another of GRAPHS.
    """
    step()
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in range(GRAPHS)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                step()
    turns = itertools.cycle(graphs)

    def replay() -> float:
        graph = next(turns)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(LEAD_IN_REPLAYS):
            graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / CALLS

    return replay


def measure(kernels: dict[str, Kernel], config: Config, m: int, n: int, k: int, dtype: torch.dtype) -> dict[str, float]:
    """Return medians of microseconds per step by ``<graph|stream> <alone|after> <name>``."""
    a, b = (torch.randn(rows, k, device="cuda").to(dtype) for rows in (m, n))
    out, other = torch.empty(m, n, device="cuda", dtype=dtype), torch.empty_like(a)
    products: dict[str, Step] = {"torch.matmul": lambda: torch.matmul(a, b.T, out=out)}
    for name, kernel in kernels.items():
        products[name] = lambda kernel=kernel: kernel(a, b, out, launch=config.launch)
    ways: dict[str, Callable[[], float]] = {}
    for name, product in products.items():

        def after(product: Step = product) -> None:
            torch.mul(a, 1.0, out=other)
            product()

        for where, step in (("alone", product), ("after", after)):
            ways[f"graph {where} {name}"] = captured(step)
            ways[f"stream {where} {name}"] = lambda step=step: on_stream(step)
    taken: dict[str, list[float]] = {way: [] for way in ways}
    order = random.Random(0)
    for _ in range(ROUNDS):
        for way in order.sample(list(ways), len(ways)):
            taken[way].append(ways[way]())
    return {way: statistics.median(values) for way, values in taken.items()}


def main() -> int:
    """Measure every shape that has a row and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", type=Path)
    parser.add_argument("--shapes", type=Path, required=True)
    parser.add_argument("--db", type=Path, required=True)
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    binaries = {b.config: b for b in read_folder(given.kernels) if b.manifest.dtype == given.dtype}
    rows = {(r.key.m, r.key.n, r.key.k): r for r in Database(given.db).rows() if r.key.dtype_a == given.dtype}
    results = {}
    print("us per step: torch.matmul / plain / overlapping")
    for shape in read_shapes(given.shapes):
        row = rows.get((shape.m, shape.n, shape.k))
        binary = None if row is None else binaries.get(row.config.binary)
        if row is None or binary is None:
            print(f"{shape.m}x{shape.n}x{shape.k}: no row or no kernel", file=sys.stderr)
            continue
        plain = replace(binary, manifest=replace(binary.manifest, programmatic=False))
        kernels = {"plain": Kernel(plain), "overlapping": Kernel(binary)}
        found = measure(kernels, row.config, shape.m, shape.n, shape.k, getattr(torch, given.dtype))
        results[f"{shape.m}x{shape.n}x{shape.k}"] = {"config": row.config.id, "us": found}
        cells = [
            f"{way} " + " / ".join(f"{found[f'{way} {name}']:.2f}" for name in ("torch.matmul", "plain", "overlapping"))
            for way in ("graph alone", "graph after", "stream alone", "stream after")
        ]  # fmt: skip
        print(f"{shape.m}x{shape.n}x{shape.k} {row.config.id}: " + "; ".join(cells), flush=True)
    if given.out is not None:
        given.out.write_text(
            json.dumps({"gpu": torch.cuda.get_device_name(), "dtype": given.dtype, "shapes": results}, indent=1)
        )
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
