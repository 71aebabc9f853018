"""Config to CUDA text and manifest: what is shared by all archs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from autogemm.config import Config, named_config
from autogemm.errors import IllegalConfig
from autogemm.kernel import generate as generate_module
from autogemm.kernel.generate import barrier_names, generate, generator_hash, prim_func, tir_text
from autogemm.kernel.lower import kernel_params, quick_tracing, stand_alone

V7 = named_config("v7", "sm_100a")

TEXT = """
#include <cuda/barrier>
#include <cooperative_groups.h>
#ifdef __CUDACC_RTC__
#else
  #include <cuda.h>
#endif
__forceinline__ __device__ int tvm_builtin_cuda_thread_rank() {
    namespace cg = cooperative_groups;
    return cg::this_thread_block().thread_rank();
}
extern "C" __global__ void __launch_bounds__(256, 1) gemm_kernel(const __grid_constant__ CUtensorMap A_map, int k, uint mul);
extern "C" __global__ void __launch_bounds__(256, 1) gemm_kernel(const __grid_constant__ CUtensorMap A_map, int k, uint mul) {
}
"""


def test_importing_the_generator_does_not_import_tvm() -> None:
    code = "import sys, autogemm.kernel.generate as g; g.generator_hash(); sys.exit('tvm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_hash_follows_the_generators_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "autogemm"
    (package / "kernel").mkdir(parents=True)
    files = [package / "kernel" / "body.py", package / "resources.py", package / "manifest.py"]
    for file in files:
        file.write_text("one = 1\n")
    monkeypatch.setattr(generate_module, "_PACKAGE", package / "kernel")
    hashes = set()
    for file in [None, *files]:
        if file is not None:
            file.write_text("one = 2\n")
        generator_hash.cache_clear()
        hashes.add(generator_hash())
    generator_hash.cache_clear()
    assert len(hashes) == 4 and all(len(h) == 16 for h in hashes)


@pytest.mark.parametrize(("arch_name", "name"), [("sm_100a", "v7"), ("sm_90a", "skinny")])
def test_kernel_parameters_are_all_defined_and_in_the_order_of_the_signature(arch_name: str, name: str) -> None:
    source = generate(named_config(name, arch_name), arch_name)  # type: ignore[arg-type]
    manifest = source.manifest
    assert [(p.kind, p.name) for p in manifest.params] == kernel_params(source.cuda, manifest.entry)
    defined = {m.name for m in manifest.tensor_maps} | {s.name for s in manifest.scalars}
    assert {p.name for p in manifest.params} <= defined
    assert {m.name for m in manifest.tensor_maps} == {p.name for p in manifest.params if p.kind == "tensor_map"}
    values = manifest.scalar_values(
        {"M": 100, "N": 200, "K": 72, "lda": 72, "ldb": 72, "ldd": 200, "sm_count": 148, "l2_group_size": 8}
    )
    assert all(0 <= values[p.name] < 2**32 for p in manifest.params if p.kind == "uint32")
    assert all(-(2**31) <= values[p.name] < 2**31 for p in manifest.params if p.kind == "int32")
    assert manifest.generator == generator_hash()


def test_launch_time_knobs_leave_no_trace_in_the_kernel() -> None:
    one, other = generate(V7.with_knob("l2_group_size", 2), "sm_100a"), generate(V7.with_knob("l2_group_size", 16), "sm_100a")
    assert one == other and one.config == V7.binary


def test_an_illegal_config_is_refused_with_all_its_violations() -> None:
    with pytest.raises(IllegalConfig) as raised:
        generate(Config(blk_m=128, blk_n=512, pipe_depth=99, epi_n=256), "sm_100a")
    assert len(raised.value.violations) >= 3


def test_tir_text_is_the_traced_kernel_with_its_tile_primitives() -> None:
    text = tir_text(V7, "sm_100a")
    assert "def gemm(" in text
    for primitive in ("T.tile.copy_async(", "T.tile.gemm_async(", "T.wg.copy_async(", "T.tile.cast(", "T.tile.copy("):
        assert primitive in text


def test_every_arch_names_its_barriers() -> None:
    assert (
        barrier_names(V7, "sm_100a")[:2]
        == barrier_names(named_config("skinny", "sm_90a"), "sm_90a")[:2]
        == ("tma2mma", "mma2tma")
    )


def test_quick_tracing_changes_time_but_not_the_kernel() -> None:
    import tvm_ffi

    from autogemm.kernel import sm100

    before = inspect.getmodule
    with quick_tracing():
        assert inspect.getmodule is not before
    assert inspect.getmodule is before
    assert tvm_ffi.structural_equal(prim_func(V7, "sm_100a"), sm100.build(V7, "float16"))


def test_parameters_are_read_from_the_signature() -> None:
    assert kernel_params(TEXT, "gemm_kernel") == [("tensor_map", "A_map"), ("int32", "k"), ("uint32", "mul")]
    pointer = 'extern "C" __global__ void f_kernel(float* __restrict__ partial_sums) {'
    assert kernel_params(pointer, "f_kernel") == [("workspace", "partial_sums")]


@pytest.mark.parametrize("text", ["", 'extern "C" __global__ void gemm_kernel(double x) {'])
def test_a_signature_that_cannot_be_launched_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="gemm_kernel"):
        kernel_params(text, "gemm_kernel")


def test_headers_are_dropped_unless_the_text_uses_them() -> None:
    lean = stand_alone(TEXT)
    assert (
        "#include <cuda/barrier>" not in lean
        and "cooperative_groups" not in lean
        and "struct alignas(64) CUtensorMap_st" in lean
    )
    needy = TEXT + "cuda::std::plus<int> p;"
    kept = stand_alone(needy)
    assert kept.endswith(needy) and "struct alignas(64) CUtensorMap_st" in kept
