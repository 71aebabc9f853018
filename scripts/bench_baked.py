"""What run-time shapes cost: a kernel as shipped against itself with every integer parameter replaced by its constant.

Usage: python scripts/bench_baked.py make FOLDER [--sms 132]      (needs the compiler, no GPU)
       python scripts/bench_baked.py time FOLDER [--out FILE]     (needs a GPU with that many SMs, no compiler)
The baked kernel keeps its parameters, so that launches cost the same, and ignores their values. Both are checked, and timed in
the rounds of one interleaved race; the kernel as shipped also runs a second time as a control. Cost: its time over the baked
one's, minus 1, paired round by round. ``time`` exits with 1 if a cost beyond the control's deviation exceeds 1 %.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autogemm.binary import Binary, read_folder, write_whole
from autogemm.config import Config, named_config
from autogemm.errors import InputError
from autogemm.manifest import Manifest, Scalar
from autogemm.problem import Problem, parse_shape

ARCH = "sm_90a"
PAIRS = (
    ("cooperative", "4096x4096x4096"), ("cooperative", "8192x8192x8192"), ("pingpong", "2048x2048x2048"),
    ("pingpong", "4096x4096x4096"), ("skinny", "16x4096x7168"), ("skinny", "128x7168x2048"),
)  # fmt: skip
WARM_ROUNDS, COLD_ROUNDS = 61, 21
BAR = 0.01


def launch_values(manifest: Manifest, problem: Problem, sm_count: int) -> dict[str, int]:
    """Return what the host passes for the integer parameters of a kernel on dense operands."""
    values = manifest.scalar_values(
        {
            "M": problem.m, "N": problem.n, "K": problem.k, "lda": problem.k, "ldb": problem.k, "ldd": problem.n,
            "sm_count": sm_count, **Config.from_knobs(manifest.knobs).launch._asdict(),
        }
    )  # fmt: skip
    return {p.name: values[p.name] for p in manifest.params if p.kind in ("int32", "uint32")}


def bake(cuda: str, entry: str, values: Mapping[str, int]) -> str:
    """Return the text with each of the parameters ``values`` of kernel ``entry`` shadowed by a constant of its name."""
    head = re.search(rf"__global__ void[^;{{]*?\b{re.escape(entry)}\([^)]*\)\s*\{{", cuda)
    if head is None:
        raise ValueError(f"the CUDA text defines no kernel {entry}")
    kinds, signature = {}, head[0]
    for name in values:
        found = re.search(rf"\b(int|uint)\s+{name}\b", signature)
        if found is None:
            raise ValueError(f"kernel {entry} has no integer parameter {name}")
        kinds[name] = found[1]
        signature = re.sub(rf"\b{found[1]}\s+{name}\b", f"{found[1]} unused_{name}", signature)
    constants = "".join(f"\n  constexpr {kinds[name]} {name} = {value}u;" for name, value in values.items())
    return cuda[: head.start()] + signature + constants + cuda[head.end() :]


def make(folder: Path, sm_count: int) -> None:
    """Compile both kernels of every pair to ``folder``."""
    from autogemm.compile.compiler import compile_config, compile_source
    from autogemm.compile.toolchain import toolchain
    from autogemm.kernel.generate import generate

    for name, shape in PAIRS:
        config = named_config(name, ARCH)
        m, n, k = parse_shape(shape)
        plain, source = compile_config(config, ARCH), generate(config, ARCH)
        values = launch_values(source.manifest, Problem(m=m, n=n, k=k), sm_count)
        compiled = compile_source(bake(source.cuda, source.manifest.entry, values), ARCH, toolchain())
        # The manifest says what was baked, and so the launcher computes the same grid as for the other.
        scalars = tuple(Scalar(name=s.name, value=str(values.get(s.name, s.value))) for s in source.manifest.scalars)
        baked = compiled.binary(replace(source.manifest, scalars=scalars, generator=f"baked {shape}"))
        plain.write(folder)
        baked.write(folder)
        print(f"{name} {shape}: registers {plain.usage.registers} / {baked.usage.registers} baked, code "
              f"{len(plain.cubin)} / {len(baked.cubin)} bytes")  # fmt: skip


def pairs(folder: Path) -> list[tuple[Problem, Binary, Binary]]:
    """Return (problem, kernel as shipped, baked kernel) of what ``make`` wrote."""
    binaries = read_folder(folder)
    plain: dict[Config, Binary] = {b.config: b for b in binaries if not b.manifest.generator.startswith("baked ")}
    found = []
    for baked in binaries:
        if baked.manifest.generator.startswith("baked "):
            m, n, k = parse_shape(baked.manifest.generator.removeprefix("baked "))
            found.append((Problem(m=m, n=n, k=k), plain[baked.config], baked))
    return found


def time_pair(problem: Problem, plain: Binary, baked: Binary) -> dict[str, Any]:
    """Return samples and paired costs of one pair on this GPU.

    Raises:
        InputError: it was baked for another number of SMs.
        TrialFault: a kernel is wrong.
    """
    from autogemm.measure.device import DeviceSession
    from autogemm.runtime.launcher import Kernel

    resident = Kernel(plain).resident_ctas
    constants = launch_values(baked.manifest, problem, resident)
    if constants != launch_values(plain.manifest, problem, resident):
        raise InputError(f"{baked.name} was baked for another number of SMs than {resident}; make it with --sms {resident}")
    session = DeviceSession(problem)
    try:
        names = ("run-time", "baked", "control")
        for name, binary in zip(names, (plain, baked, plain), strict=True):
            session.admit(name, binary, binary.config.launch)
        rounds = {
            cold: [session.round(names, cold=cold) for _ in range(COLD_ROUNDS if cold else WARM_ROUNDS)]
            for cold in (False, True)
        }
        environment = session.environment()
    finally:
        session.close()
    row: dict[str, Any] = {
        "problem": problem.shape, "config": plain.config.id, "environment": environment.to_json(),
        "samples": {"warm": rounds[False], "cold": rounds[True]}, "constants": constants,
    }  # fmt: skip
    for cold, temperature in ((False, "warm"), (True, "cold")):
        for name in ("run-time", "control"):
            over = [r[name] / r["baked" if name == "run-time" else "run-time"] - 1 for r in rounds[cold]]
            quarters = statistics.quantiles(over, n=4, method="inclusive")
            row[f"{name}_{temperature}"] = {
                "cost": statistics.median(over), "half_iqr": (quarters[2] - quarters[0]) / 2,
                # of a median of normal samples, whose half interquartile range is 0.674 standard deviations
                "standard_error": 1.253 * (quarters[2] - quarters[0]) / 1.349 / len(over) ** 0.5,
            }  # fmt: skip
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the costs in percent, +- half the interquartile range of the rounds."""
    lines = [f"{'shape':16} {'kernel':32} {'us':>8}  {'warm cost %':>16} {'control':>8}  {'cold cost %':>16} {'control':>8}"]
    for row in rows:
        us = statistics.median(r["run-time"] for r in row["samples"]["warm"]) * 1e6
        cells = [
            f"{row[f'run-time_{t}']['cost'] * 100:+7.2f} +- {row[f'run-time_{t}']['half_iqr'] * 100:5.2f} "
            f"{row[f'control_{t}']['cost'] * 100:+8.2f}"
            for t in ("warm", "cold")
        ]
        lines.append(f"{row['problem']:16} {row['config']:32} {us:8.2f}  {'  '.join(cells)}")
    return "\n".join(lines)


def main() -> int:
    """Make or time; return 1 if a cost exceeds the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "time"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sms", type=int, default=132, help="SMs to bake for")
    parser.add_argument("--out", type=Path, default=Path("baked.json"))
    given = parser.parse_args()
    if given.what == "make":
        make(given.folder, given.sms)
        return 0
    rows = [time_pair(*pair) for pair in pairs(given.folder)]
    write_whole(given.out, json.dumps({"rows": rows}).encode())
    print(table(rows))
    costs = [row[f"run-time_{t}"]["cost"] - abs(row[f"control_{t}"]["cost"]) for row in rows for t in ("warm", "cold")]
    return 1 if max(costs) > BAR else 0


if __name__ == "__main__":
    sys.exit(main())
