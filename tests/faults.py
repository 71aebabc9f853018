"""Kernels that misbehave on purpose, in the product's own format: test-only.

Some are small CUDA sources; the others are a good Binary whose Manifest lies, so that the real kernel hangs or stores astray.
``python tests/faults.py GOOD.json OUT_DIR`` compiles and writes them all; that needs NVRTC, running them a GPU of the arch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autogemm.binary import Binary, Usage
from autogemm.manifest import Manifest
from autogemm.results import Outcome

_MARKER = 0x5EADBEEF

# Every source takes the three tensor maps that its manifest passes and ignores them.
_HEAD = """
struct alignas(64) Map { unsigned long long opaque[16]; };
extern "C" __global__ void gemm_kernel(
    const __grid_constant__ Map a, const __grid_constant__ Map b, const __grid_constant__ Map d) {
"""
SOURCES: dict[str, tuple[str, Outcome]] = {
    "hang": ("volatile int go = 1; while (go) __nanosleep(1000); }", Outcome.TIMEOUT),
    "stray_store": ("*(volatile int*)(16ull + threadIdx.x * 4) = 1; }", Outcome.ILLEGAL_ACCESS),
    "misaligned_store": ("__shared__ int s[8]; *(volatile int*)((char*)s + 1) = 1; }", Outcome.ILLEGAL_ACCESS),
    "trap": ('asm volatile("trap;"); }', Outcome.ABORT),
    # The instruction that loads the marker is overwritten in the cubin with one that does not exist.
    "illegal_instruction": (
        f"__shared__ volatile unsigned s[1]; s[0] = {_MARKER}u; }}",
        Outcome.ILLEGAL_INSTRUCTION,
    ),
    "writes_nothing": ("}", Outcome.INCORRECT),
}


def from_source(name: str, good: Binary) -> Binary:
    """Return the fault ``name`` of SOURCES, compiled for the arch of ``good``."""
    from autogemm.compile.toolchain import compile_cuda

    manifest = good.manifest
    code = compile_cuda(_HEAD + SOURCES[name][0], manifest.arch).code  # type: ignore[arg-type]
    if name == "illegal_instruction":
        code = _break_marked_instruction(code)
    return Binary(
        cubin=code, usage=Usage(registers=0, spill_bytes=0, stack_bytes=0, smem_bytes=0), compiler=f"fault {name}",
        manifest=replace(
            manifest, params=tuple(p for p in manifest.params if p.kind == "tensor_map"), grid="1", cluster_ctas=1,
            block_threads=32, smem_bytes=1024, workspace_bytes="0", generator=f"fault {name}",
        ),
    )  # fmt: skip


def _break_marked_instruction(cubin: bytes) -> bytes:
    at = cubin.find(_MARKER.to_bytes(4, "little"))
    assert at > 0, "the marker is not in the code"
    start = at // 16 * 16  # SASS instructions are 16 bytes, and so is the alignment of the code in the file
    return cubin[:start] + b"\xff" * 16 + cubin[start + 16 :]


def _change_output_map(good: Binary, **changes: tuple[str, ...]) -> Manifest:
    maps = tuple(replace(m, **changes) if m.operand == "d" else m for m in good.manifest.tensor_maps)  # type: ignore[arg-type]
    return replace(good.manifest, tensor_maps=maps)


def _skips_last_columns(good: Binary) -> Manifest:
    return _change_output_map(good, dims=("max(8, N - 64)", "M"))


def _stores_beside_output(good: Binary) -> Manifest:
    return _change_output_map(good, strides_bytes=("ldd * 2 + 16",))


def _stores_far_away(good: Binary) -> Manifest:
    return _change_output_map(good, strides_bytes=("ldd * 2 * 262144",))


def _waits_for_bytes_that_never_come(good: Binary) -> Manifest:
    scalars = tuple(replace(s, value=f"({s.value}) + 64") if s.name == "stage_bytes" else s for s in good.manifest.scalars)
    assert scalars != good.manifest.scalars, "the kernel has no scalar stage_bytes"
    return replace(good.manifest, scalars=scalars)


def _asks_for_too_much_shared_memory(good: Binary) -> Manifest:
    return replace(good.manifest, smem_bytes=1 << 20)


LIES: dict[str, tuple[Callable[[Binary], Manifest], Outcome]] = {
    "skips_last_columns": (_skips_last_columns, Outcome.INCORRECT),
    "stores_beside_output": (_stores_beside_output, Outcome.INCORRECT),
    "stores_far_away": (_stores_far_away, Outcome.ILLEGAL_ACCESS),
    "waits_forever": (_waits_for_bytes_that_never_come, Outcome.TIMEOUT),
    "too_much_smem": (_asks_for_too_much_shared_memory, Outcome.LAUNCH_FAILED),
}


def from_lie(name: str, good: Binary) -> Binary:
    """Return the fault ``name`` of LIES, made of ``good``."""
    return replace(good, manifest=replace(LIES[name][0](good), generator=f"fault {name}"), compiler=f"fault {name}")


def outcome(name: str) -> Outcome:
    """Return how a trial of the fault ``name`` must end."""
    return SOURCES[name][1] if name in SOURCES else LIES[name][1]


def all_faults(good: Binary) -> dict[str, Binary]:
    """Return every fault by name."""
    return {**{name: from_source(name, good) for name in SOURCES}, **{name: from_lie(name, good) for name in LIES}}


if __name__ == "__main__":
    for fault in all_faults(Binary.read(Path(sys.argv[1]))).values():
        fault.write(Path(sys.argv[2]))
