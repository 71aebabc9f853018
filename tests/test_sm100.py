"""The sm_100a kernel: what its compiled code holds, and that its manifest says what its host code would do."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from autogemm.arch import ArchName
from autogemm.binary import Binary
from autogemm.compile.compiler import emit
from autogemm.compile.toolchain import compile_cuda
from autogemm.config import Config, named_config
from autogemm.constraints import violations
from autogemm.kernel.generate import KernelSource, barrier_names, generate, prim_func
from autogemm.manifest import evaluate
from autogemm.simulate.check import check_config, check_primfunc, integer_inputs, launch_scalars

ARCH: ArchName = "sm_100a"
SEED = ("v7", "v8", "v9")
DOUBLE_BUFFERED = named_config("v9", ARCH).with_knob("BLK_N", 64).with_knob("TMEM_BUFFERS", 2).with_knob("EPI_N", 32)


@cache
def ptx(name: str) -> str:
    """PTX text of a named point, as NVRTC compiles it."""
    return compile_cuda(source(named_config(name, ARCH)).cuda, ARCH, "ptx").code.decode()


@cache
def source(config: Config) -> KernelSource:
    return generate(config, ARCH)


@cache
def host_text(config: Config) -> str:
    """The host half of the lowered kernel: the tensor maps it would encode and the launch it would make."""
    import sys

    import tvm

    target = tvm.target.Target({"kind": "cuda", "arch": ARCH})
    with target:
        module = tvm.tirx.transform.BindTarget(target.with_host(tvm.target.Target("c")))(
            tvm.IRModule({"gemm": prim_func(config, ARCH)})
        )
        lower, _, _ = tvm.tirx.get_tir_pipeline("tirx")
        host, _ = sys.modules["tvm.tirx.build"].split_host_device_mods(lower(module))
    text = str(host.script())
    for name, value in re.findall(r"(cse_v\d+): T.let\[T.int32\] = (.*)", text):
        text = re.sub(rf"\b{name}\b", value, text)
    return text


@pytest.mark.parametrize("name", SEED)
def test_the_articles_kernels_compile_without_spills(name: str, named_binary: Callable[[str, ArchName], Binary]) -> None:
    used = named_binary(name, ARCH).usage
    assert used.spill_bytes == 0 and used.stack_bytes == 0
    assert used.registers <= 168


@pytest.mark.parametrize(("name", "group"), [("v7", 1), ("v8", 2), ("v9", 2)])
def test_compiled_mmas_and_loads_have_the_right_cta_group(name: str, group: int) -> None:
    mmas = re.findall(r"tcgen05\.mma\.cta_group::(\d)\.kind::f16", ptx(name))
    assert mmas == [str(group)] * 4  # a K step of 64 is four MMAs of K = 16
    loads = re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared::cluster\.global\.[\w:.]*?cta_group::(\d)", ptx(name))
    assert loads == [str(group)] * (named_config(name, ARCH).num_consumer + 1)


@pytest.mark.parametrize("name", SEED)
def test_compiled_stores_are_tma_stores(name: str) -> None:
    config = named_config(name, ARCH)
    stores = re.findall(r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\.tile\.bulk_group", ptx(name))
    assert len(stores) == config.cta_group * config.blk_n // 64  # boxes of 64 columns
    assert "st.global" not in ptx(name)


@pytest.mark.parametrize(("name", "multicast"), [("v7", False), ("v8", True), ("v9", True)])
def test_commits_reach_both_ctas_of_a_pair(name: str, multicast: bool) -> None:
    commits = re.findall(
        r"tcgen05\.commit\.cta_group::\d\.mbarrier::arrive::one\.shared::cluster(\.multicast::cluster)?", ptx(name)
    )
    assert commits == [".multicast::cluster" if multicast else ""] * 2


@pytest.mark.parametrize("name", ["v8", "v9"])
def test_a_cluster_barrier_stands_between_barrier_setup_and_any_use(name: str) -> None:
    text = ptx(name)
    last_init = text.rindex("mbarrier.init")
    barrier = text.index("barrier.cluster.wait", last_init)
    for use in ("mapa.u64", "cp.async.bulk.tensor", "mbarrier.try_wait", "mbarrier.arrive"):
        assert text.index(use) > barrier, use


@pytest.mark.parametrize("name", SEED)
def test_reading_the_accumulator_is_fenced_from_its_reuse(name: str) -> None:
    text = ptx(name)
    # writeback: the last load of the accumulator, then the fence, then the arrival that frees it
    last_load = text.rindex("tcgen05.wait::ld")
    fence = text.index("tcgen05.fence::before_thread_sync", last_load)
    assert fence < text.index("mbarrier.arrive.shared", last_load)
    # MMA warp: its first MMA comes after a wait and the fence that orders it
    first_mma = text.index("tcgen05.mma.")
    assert text.rindex("mbarrier.try_wait", 0, first_mma) < text.rindex("tcgen05.fence::after_thread_sync", 0, first_mma)


def test_tensor_memory_is_freed_by_one_warp_of_the_cta() -> None:
    cuda = source(named_config("v8", ARCH)).cuda
    (guard,) = re.findall(r"if \(([^{}]*)\) \{\s*tvm_builtin_ptx_tcgen05_dealloc", cuda)
    assert guard == "warp_id_in_cta == 0"  # not warp 0 of every warpgroup


def test_tmem_buffers_multiply_accumulator_barriers() -> None:
    text = compile_cuda(source(DOUBLE_BUFFERED).cuda, ARCH, "ptx").code.decode()
    ring, slots = 2 * DOUBLE_BUFFERED.pipe_depth, DOUBLE_BUFFERED.num_consumer * DOUBLE_BUFFERED.tmem_buffers
    assert text.count("mbarrier.init.") == ring + 2 * slots


def test_barriers_are_named_in_allocation_order() -> None:
    assert barrier_names(named_config("v9", ARCH), ARCH) == ("tma2mma", "mma2tma", "mma2ld", "ld2mma")


@pytest.mark.parametrize("config", [named_config("v8", ARCH), DOUBLE_BUFFERED], ids=lambda c: c.id)
def test_manifest_lists_the_tensor_maps_that_the_host_code_would_encode(config: Config) -> None:
    encoded = {
        name: (arguments.split(", "), int(swizzle), int(promotion))
        for name, arguments, swizzle, promotion in re.findall(
            r"tensormap_encode_tiled\((\w+), T\.handle_add_byte_offset\(\w+\.data, 0\), (.*?), "
            r"descriptor_dtype=\"float16\", rank=2, interleave=0, swizzle=(\d), l2_promotion=(\d)",
            host_text(config),
        )
    }
    manifest = source(config).manifest
    assert {m.name for m in manifest.tensor_maps} == set(encoded)
    for m in manifest.tensor_maps:
        (inner, outer, stride, box_inner, box_outer, *element_strides), swizzle, promotion = encoded[m.name]
        assert m.dims == (inner, outer)  # the true extents, so that TMA clips at them
        # The host code takes contiguous tensors, the manifest any row stride.
        assert m.strides_bytes == (re.sub(r"^[KN]", {"a": "lda", "b": "ldb", "d": "ldd"}[m.operand], stride),)
        assert m.box == (box_inner, box_outer) and element_strides == ["1", "1"]
        assert m.swizzle_bytes == {1: 32, 2: 64, 3: 128}[swizzle]
        assert m.l2_promotion_bytes == {0: 0, 1: 64, 2: 128, 3: 256}[promotion]


@pytest.mark.parametrize("config", [named_config("v8", ARCH), DOUBLE_BUFFERED], ids=lambda c: c.id)
def test_manifest_launches_what_the_host_code_would_launch(config: Config) -> None:
    manifest = source(config).manifest
    (arguments,) = re.findall(r"call_ffi_kernel\(\"gemm_kernel\", (.*?), launch_params=", host_text(config))
    *params, cluster, grid, block, smem = arguments.split(", ")
    assert params == [p.name for p in manifest.params]
    assert (cluster, grid, block, smem) == (
        str(manifest.cluster_ctas), manifest.grid, str(manifest.block_threads), str(manifest.smem_bytes)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape", "tiles"),
    [
        ("v7", (1000, 776, 1032), 8 * 7),
        ("v8", (1000, 776, 1032), 4 * 4),
        ("v9", (1, 8, 8), 1),
        ("v9", (4097, 4096, 64), 9 * 16),
    ],
)
def test_ragged_shapes_get_whole_tiles(
    name: str, shape: tuple[int, int, int], tiles: int, named_binary: Callable[[str, ArchName], Binary]
) -> None:
    m, n, k = shape
    manifest = named_binary(name, ARCH).manifest
    values = manifest.scalar_values({"M": m, "N": n, "K": k, "lda": k, "ldb": k, "ldd": n, "sm_count": 148, "l2_group_size": 8})
    group = manifest.cluster_ctas
    assert values["tile_count"] == tiles
    assert values["k_steps"] == -(-k // 64)
    assert evaluate(manifest.grid, values) == min(148 // group, tiles) * group


@pytest.mark.parametrize(
    "config",
    [
        named_config("v8", ARCH),
        DOUBLE_BUFFERED,
        Config(blk_m=128, blk_n=48, pipe_depth=3, num_consumer=2, epi_n=16, tmem_buffers=2),
        Config(blk_m=128, blk_n=256, pipe_depth=3, epi_n=128, tmem_buffers=2),
    ],
    ids=lambda c: c.id,
)
def test_ragged_products_are_exact_on_the_cpu(config: Config) -> None:
    report = check_config(config, ARCH, seeds=(0, 1))
    assert report.findings == () and report.wrong_elements == 0


@pytest.mark.parametrize("name", ["v7", "v9"])
def test_clusters_without_a_tile_do_no_harm(name: str) -> None:
    config = named_config(name, ARCH)
    shape = (24, 120, 72)  # one tile
    scalars = launch_scalars(config, ARCH, "float16", shape, sm_count=148)
    assert scalars["tile_count"] == scalars["cluster_count"] == 1
    scalars["cluster_count"] += 1
    scalars["grid"] += config.cta_group
    a, b = (bits.view(np.float16) for bits in integer_inputs(shape, "float16").values())
    report = check_primfunc(
        prim_func(config, ARCH), arch=ARCH, inputs={"A": a, "B": b}, sm_count=148, scalars=scalars,
        barrier_names=barrier_names(config, ARCH),
    )  # fmt: skip
    assert report.findings == () and report.wrong_elements == 0


def test_bfloat16_kernels_convert_to_bfloat16() -> None:
    text = emit(named_config("v7", ARCH), ARCH, "bfloat16", what="ptx")
    assert isinstance(text, str)
    assert "cvt.rn.bf16x2.f32" in text and "cvt.rn.f16x2.f32" not in text


@pytest.mark.parametrize(
    ("knobs", "rule"),
    [
        ({"EPI_N": 256}, "tmem-load"),
        ({"EPI_N": 96, "BLK_N": 96}, "tmem-load"),
        ({"BLK_N": 24, "EPI_N": 16}, "umma-shape"),
        ({"TMEM_BUFFERS": 2}, "tmem-columns"),
    ],
)
def test_what_the_generator_cannot_lower_is_a_rule(knobs: dict[str, int], rule: str) -> None:
    config = Config.from_knobs(knobs, base=named_config("v9", ARCH))
    assert any(f"[{rule}]" in text for text in violations(config, ARCH))
