"""Compilation: what is kept, what is refused, and what a dying worker costs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autogemm.arch import ArchName
from autogemm.binary import Binary
from autogemm.compile import cache, children, compiler
from autogemm.compile.cache import Compiled
from autogemm.compile.compiler import cached_binary, compile_config, compile_many, compile_source, emit
from autogemm.compile.pool import WorkerPool, close_shared_pools, shared_pool
from autogemm.compile.toolchain import compile_cuda, toolchain, usage
from autogemm.config import Config, named_config
from autogemm.errors import AutogemmError, CompileError, IllegalConfig, InputError
from autogemm.kernel.generate import KernelSource
from autogemm.search.gate import SimulatorGate

ARCH: ArchName = "sm_100a"
V7 = named_config("v7", ARCH)

SMALL = 'extern "C" __global__ void gemm_kernel(int* p) { *p = 1; }'
# 200 values live across a barrier at 1024 threads a block, which leaves 64 registers each.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 1) gemm_kernel(float* p) {
  float v[200];
  #pragma unroll
  for (int i = 0; i < 200; ++i) v[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 200; ++i) p[i * 1024 + threadIdx.x] = v[i] * v[(i * 7 + 3) % 200];
}
"""


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOGEMM_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def fake_generator(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, named_binary: Callable[[str, ArchName], Binary]
) -> list[str]:
    """Replace generator and compiler by fast ones; the list grows by one word per use."""
    log: list[str] = []
    real = named_binary("v7", ARCH)

    def generate(config: Config, arch_name: ArchName, dtype: str) -> KernelSource:
        log.append("generate")
        return KernelSource(
            arch=arch_name, dtype=dtype, layout="NT", epilogue="none", config=config.binary, cuda=f"// {config.pipe_depth}",
            manifest=replace(real.manifest, knobs=config.binary.to_knobs()),
        )  # fmt: skip

    def compile_text(cuda: str, arch_name: ArchName, tools: object) -> Compiled:
        log.append("compile")
        return Compiled(cubin=b"\x7fELF" + cuda.encode(), usage=real.usage, compiler="fake 1.0")

    monkeypatch.setattr(compiler, "generate", generate)
    monkeypatch.setattr(compiler, "compile_source", compile_text)
    return log


def test_a_kernel_is_generated_and_compiled_once(fake_generator: list[str]) -> None:
    first = compile_config(V7, ARCH)
    assert compile_config(V7.with_knob("l2_group_size", 16), ARCH) == first == cached_binary(V7, ARCH)
    assert fake_generator == ["generate", "compile"]
    assert compile_config(V7.with_knob("PIPE_DEPTH", 3), ARCH).cubin != first.cubin
    assert fake_generator == ["generate", "compile"] * 2


def test_a_generator_change_that_keeps_the_text_compiles_nothing(
    fake_generator: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_config(V7, ARCH)
    monkeypatch.setattr(cache, "generator_hash", lambda: "another generation")
    assert cached_binary(V7, ARCH) is None
    compile_config(V7, ARCH)
    assert fake_generator == ["generate", "compile", "generate"]


@pytest.mark.parametrize("level", ["index", "code"])
@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"key"', None])
def test_a_damaged_cache_entry_is_compiled_anew(
    fake_generator: list[str], own_cache: Path, level: str, damage: bytes | None
) -> None:
    first = compile_config(V7, ARCH)
    (path,) = (own_cache / "kernels" / level).rglob("*.json")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + b"x" + whole[len(whole) // 2 + 1 :] if damage is None else damage)
    assert cached_binary(V7, ARCH) is None
    assert compile_config(V7, ARCH) == first
    assert path.read_bytes() == whole
    assert not list(own_cache.rglob(".*"))  # nothing left aside


def test_a_refusal_is_remembered(fake_generator: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Compiled:
        fake_generator.append("refuse")
        return Compiled(cubin=b"", usage=None, compiler="fake 1.0", refusal="spills 8 bytes")

    monkeypatch.setattr(compiler, "compile_source", refuse)
    for _ in range(2):
        with pytest.raises(CompileError, match="spills 8 bytes"):
            compile_config(V7, ARCH)
    assert fake_generator == ["generate", "refuse"]
    ((config, outcome),) = compile_many([V7], ARCH)
    assert config == V7 and isinstance(outcome, CompileError)


def test_a_cache_that_cannot_be_written_is_named(fake_generator: list[str], own_cache: Path) -> None:
    (own_cache / "kernels").write_text("a file where a folder should be")
    with pytest.raises(InputError, match="AUTOGEMM_CACHE"):
        compile_config(V7, ARCH)


def test_a_cached_kernel_needs_no_tvm(named_binary: Callable[[str, ArchName], Binary]) -> None:
    binary = named_binary("v7", ARCH)
    code = (
        "import sys; from autogemm.compile.compiler import compile_config; from autogemm.config import named_config;"
        "b = compile_config(named_config('v7', 'sm_100a'), 'sm_100a');"
        "print(b.sha256, 'tvm' in sys.modules, 'cuda.bindings' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [binary.sha256, "False", "False"]


def test_many_configs_share_binaries_and_come_back_each(named_binary: Callable[[str, ArchName], Binary]) -> None:
    binary = named_binary("v7", ARCH)
    configs = [V7.with_knob("l2_group_size", size) for size in (2, 4, 8)]
    assert list(compile_many(configs, ARCH)) == [(config, binary) for config in configs]


def test_workers_compile_what_the_cache_lacks(own_cache: Path) -> None:
    configs = [named_config("skinny", "sm_90a"), named_config("skinny", "sm_90a").with_knob("PIPE_DEPTH", 8)]
    results = dict(compile_many(configs, "sm_90a", workers=1))
    close_shared_pools()
    assert set(results) == set(configs)
    for config, outcome in results.items():
        assert isinstance(outcome, Binary)
        assert outcome.config == config and outcome.cubin.startswith(b"\x7fELF") and outcome.usage.spill_bytes == 0
        assert outcome == compile_config(config, "sm_90a")


def test_an_illegal_config_stops_a_batch_before_it_starts(own_cache: Path) -> None:
    with pytest.raises(IllegalConfig):
        compile_many([V7, V7.with_knob("PIPE_DEPTH", 99)], ARCH)


DYING_WORKER = """
import json, os, sys
for line in sys.stdin:
    depth = json.loads(line)["knobs"]["PIPE_DEPTH"]
    if depth == 3:
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(7)
    print(json.dumps({"error": "CompileError", "text": "too deep"} if depth == 4 else {}), flush=True)
"""


def test_a_dying_worker_costs_one_candidate() -> None:
    pool = WorkerPool(2, (sys.executable, "-c", DYING_WORKER))
    configs = [V7.with_knob("PIPE_DEPTH", depth) for depth in (2, 3, 4, 5, 6)]
    outcomes = {config.pipe_depth: outcome for config, outcome in pool.compile(configs, ARCH, "float16")}
    pool.close()
    assert outcomes[2] is outcomes[5] is outcomes[6] is None
    assert str(outcomes[4]) == "too deep"
    assert "exit code 7" in str(outcomes[3]) and "out of luck" in str(outcomes[3]) and "PIPE_DEPTH=3" in str(outcomes[3])


def test_a_closed_pool_starts_no_more_workers() -> None:
    pool = WorkerPool(1, (sys.executable, "-c", DYING_WORKER))
    outcomes = pool.compile([V7.with_knob("PIPE_DEPTH", depth) for depth in (2, 5, 6, 7)], ARCH, "float16")
    assert next(outcomes)[1] is None
    pool.close()
    assert all(outcome is None or isinstance(outcome, CompileError) for _, outcome in outcomes)
    ((_, outcome),) = pool.compile([V7], ARCH, "float16")
    assert "no process is left" in str(outcome)


def test_a_worker_that_misses_a_dependency_stops_the_batch() -> None:
    answer = '{"error": "InputError", "text": "cannot write there"}'
    pool = WorkerPool(1, (sys.executable, "-c", f"import sys\nfor line in sys.stdin: print('{answer}', flush=True)"))
    with pytest.raises(InputError, match="cannot write there"):
        list(pool.compile([V7], ARCH, "float16"))
    pool.close()


def test_at_least_one_worker_is_needed() -> None:
    with pytest.raises(InputError, match="workers=0"):
        shared_pool(0)


def test_register_use_is_read_from_the_assemblers_log() -> None:
    log = """ptxas info    : Compiling entry function 'gemm_kernel' for 'sm_100a'
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 16 bytes cumulative stack size, 1024 bytes smem"""
    used = usage(log)
    assert (used.registers, used.stack_bytes, used.spill_bytes, used.smem_bytes) == (168, 16, 20, 1024)
    with pytest.raises(CompileError, match="no register use"):
        usage("nothing here")


def test_spilling_code_is_refused() -> None:
    compiled = compile_source(SPILLING, ARCH, toolchain())
    assert compiled.usage is not None and compiled.usage.spill_bytes > 0 and compiled.usage.registers == 64
    assert compiled.refusal is not None and f"spills {compiled.usage.spill_bytes} bytes" in compiled.refusal
    small = compile_source(SMALL, ARCH, toolchain())
    assert small.refusal is None and small.usage is not None and small.usage.spill_bytes == 0
    assert small.cubin.startswith(b"\x7fELF")


def test_code_that_does_not_compile_is_refused_with_the_compilers_words() -> None:
    compiled = compile_source(SMALL.replace("*p = 1", "*q = 1"), ARCH, toolchain())
    assert compiled.refusal is not None and '"q" is undefined' in compiled.refusal


def test_ptx_is_for_the_asked_arch() -> None:
    assert ".target sm_100a" in compile_cuda(SMALL, "sm_100a", "ptx").code.decode()
    assert ".target sm_90a" in compile_cuda(SMALL, "sm_90a", "ptx").code.decode()


def test_a_system_nvcc_replaces_nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.99"; exit 0; fi
echo "$@" > "$(dirname "$0")/arguments"
while [ "$1" != -o ]; do shift; done
printf 'code' > "$2"
echo 'ptxas info : 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads' >&2
echo 'ptxas info : Used 12 registers' >&2
"""
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("AUTOGEMM_NVCC", str(nvcc))
    assert toolchain().compiler == "nvcc 13.0.99"
    compiled = compile_source(SMALL, ARCH, toolchain())
    assert (
        compiled.refusal is None and compiled.cubin == b"code" and compiled.usage is not None and compiled.usage.registers == 12
    )
    assert "-cubin -gencode=arch=compute_100a,code=sm_100a" in (tmp_path / "arguments").read_text()
    monkeypatch.setenv("AUTOGEMM_NVCC", str(tmp_path / "missing"))
    with pytest.raises(InputError, match="AUTOGEMM_NVCC"):
        toolchain()


def test_emit_returns_each_form(named_binary: Callable[[str, ArchName], Binary]) -> None:
    assert emit(V7, ARCH, what="cubin") == named_binary("v7", ARCH).cubin
    cuda, ptx, tir = (emit(V7, ARCH, what=what) for what in ("cuda", "ptx", "tir"))  # type: ignore[arg-type]
    assert isinstance(cuda, str) and 'extern "C" __global__ void __launch_bounds__(256, 1) gemm_kernel(' in cuda
    assert isinstance(ptx, str) and ".visible .entry gemm_kernel(" in ptx and ".target sm_100a" in ptx
    assert isinstance(tir, str) and "def gemm(" in tir


def test_a_closed_gate_starts_no_more_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(children, "_Child", started.append)
    gate = SimulatorGate(1, tmp_path)
    gate.close()
    with pytest.raises(AutogemmError, match="no process is left to check"):
        gate._verdict(V7, "sm_100a", "float16")
    assert started == []
