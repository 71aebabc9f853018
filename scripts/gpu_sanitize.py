"""Run every kernel of a folder once on a ragged shape and check it: a small program for compute-sanitizer to watch.

Usage: compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \\
           python scripts/gpu_sanitize.py KERNELS [--shape 300x520x264 ...] [--only TEXT ...]
The same with --tool synccheck. Needs a GPU of the kernels' arch. Operands and results travel by copies, so no kernel but ours
runs and is instrumented. Prints each kernel's name before it runs, as its launch may be what the tool stops; exits with 1 if a
result is wrong. That the tool is awake shows on a kernel with a fault (tests/faults.py): FAULTS --only stray_store must fail.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# Every tensor gets an allocation of its own, so that the tool sees a store past its end. Read when torch is imported.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from autogemm.binary import Binary, read_folder
from autogemm.problem import parse_shape
from autogemm.runtime.launcher import Kernel


def run(binary: Binary, shape: tuple[int, int, int]) -> float:
    """Run ``binary`` once on exact integers.

    Returns:
        Seconds, loading included.

    Raises:
        ValueError: a result is wrong.
    """
    m, n, k = shape
    dtype = getattr(torch, binary.manifest.dtype)
    draw = torch.Generator().manual_seed(m * n + k)
    a, b = (torch.randint(-3, 4, (rows, k), generator=draw) for rows in (m, n))
    expected = (a.double() @ b.double().T).to(dtype)
    on_gpu = [x.to(dtype).cuda() for x in (a, b)]
    out = torch.full((m, n), float("nan"), dtype=dtype).cuda()
    start = time.perf_counter()
    Kernel(binary)(*on_gpu, out)
    result = out.cpu()
    seconds = time.perf_counter() - start
    wrong = int((result != expected).sum())
    if wrong:
        raise ValueError(f"{wrong} of {m * n} results are wrong")
    return seconds


def main() -> int:
    """Return 1 if a kernel is wrong or broke the context, which ends the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", type=Path)
    parser.add_argument("--shape", nargs="+", default=["300x520x264"])
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="parts of file names, or of what compiled them; kernels that hold any of them run",
    )
    given = parser.parse_args()
    binaries = [b for b in read_folder(given.kernels) if any(part in f"{b.name} {b.compiler}" for part in given.only)]
    failed, started = 0, time.perf_counter()
    torch.cuda.init()
    print(f"{len(binaries)} kernels; CUDA took {time.perf_counter() - started:.1f} s to start", flush=True)
    for binary in binaries:
        for shape in given.shape:
            print(f"{binary.name} {shape} ", end="", flush=True)
            try:
                print(f"{run(binary, parse_shape(shape)):.2f} s", flush=True)
            except ValueError as error:
                failed += 1
                print(error, flush=True)
            except Exception as error:
                print(f"{error}\nstopped: what follows an error of CUDA means nothing", flush=True)
                return 1
    print(f"{failed} of {len(binaries) * len(given.shape)} wrong, {time.perf_counter() - started:.1f} s", flush=True)
    return 1 if failed or not binaries else 0


if __name__ == "__main__":
    sys.exit(main())
