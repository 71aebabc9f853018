"""Compile every binary of an arch's search space and list registers, spills and what was refused.

Usage: python scripts/compile_space.py [sm_100a|sm_90a] [float16|bfloat16]
Kernels that the cache already holds are listed without being compiled again.
"""

from __future__ import annotations

import sys
import time

from autogemm.binary import Binary
from autogemm.compile.compiler import compile_many
from autogemm.space import load_space


def main(arch_name: str = "sm_100a", dtype: str = "float16") -> int:
    """Return the number of refused candidates."""
    configs = load_space(arch_name).binaries(dtype)  # type: ignore[arg-type]  # checked by load_space
    started, refused = time.perf_counter(), 0
    for config, outcome in compile_many(configs, arch_name, dtype):  # type: ignore[arg-type]
        if isinstance(outcome, Binary):
            used = outcome.usage
            print(f"{config.id:40} registers {used.registers:3} stack {used.stack_bytes:4} cubin {len(outcome.cubin):6} B")
        else:
            refused += 1
            print(f"{config.id:40} refused: {outcome}")
    print(f"{len(configs)} binaries, {refused} refused, {time.perf_counter() - started:.0f} s")
    return refused


if __name__ == "__main__":
    sys.exit(min(1, main(*sys.argv[1:])))
