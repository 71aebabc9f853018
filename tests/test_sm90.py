"""The sm_90a generator: legality of its space, the manifest's arithmetic, and the emitted kernels."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tvm")

from autogemm.arch import arch
from autogemm.config import NAMED, Config
from autogemm.constraints import violations
from autogemm.kernel import sm90
from autogemm.kernel.generate import generate
from autogemm.manifest import VARIABLES, evaluate
from autogemm.resources import accumulator_registers, geometry, slices_in_registers, smem_bytes, stage_bytes, store_box
from autogemm.space import load_space


def make(blk_m: int, blk_n: int, pipe_depth: int = 3, **knobs: Any) -> Config:
    """Return a Config whose EPI_N defaults to BLK_N."""
    knobs.setdefault("epi_n", blk_n)
    return Config(blk_m=blk_m, blk_n=blk_n, pipe_depth=pipe_depth, **knobs)


# One kernel per mechanism.
KERNELS = {
    "cooperative": make(128, 64, cta_group=2, num_consumer=2, epi_n=32),
    "ping-pong": make(64, 48, num_consumer=2, epi_n=16, pingpong=True),
    "three consumers": make(192, 32, num_consumer=3),
    "split": make(64, 96, epi_n=16, split_k=3),
    "split in parts": make(128, 96, num_consumer=1, split_k=4),  # more accumulators than are summed at once
    "swapped": make(128, 24, num_consumer=1, swap_ab=True),
    "swapped and split": make(128, 16, num_consumer=2, split_k=2, swap_ab=True),
}


@pytest.fixture(scope="module", params=list(KERNELS))
def kernel(request):
    return generate(KERNELS[request.param], "sm_90a")


def evaluated(config: Config, m: int, n: int, k: int, **given: int) -> dict[str, int]:
    """Return every scalar of the manifest for one problem on 132 SMs."""
    values = {"M": m, "N": n, "K": k, "lda": k, "ldb": k, "ldd": n, "sm_count": 132, **config.launch._asdict()} | given
    for scalar in sm90.manifest_parts(config.binary, "float16")[0]:
        values[scalar.name] = evaluate(scalar.value, values)
    return values


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_shipped_space_is_legal_and_of_a_size_that_compiles_in_minutes(dtype):
    binaries = load_space("sm_90a").binaries(dtype)
    assert 100 <= len(binaries) <= 200
    for config in binaries:
        assert violations(config, "sm_90a", dtype=dtype) == []
        assert smem_bytes(config, "sm_90a", dtype) <= arch("sm_90a").smem_bytes
        assert stage_bytes(config, "sm_90a", dtype) % 1024 == 0  # swizzle atoms stay aligned from stage to stage


def test_the_shipped_space_reaches_every_mechanism():
    binaries = load_space("sm_90a").binaries()
    assert {c.num_consumer for c in binaries} == {1, 2, 3}
    assert {c.cta_group for c in binaries} == {1, 2}
    assert {c.split_k for c in load_space("sm_90a").configs()} >= {1, 2, 3, 4}
    assert {c.split_k for c in binaries} == {1, 2}  # one Binary takes any number of slices
    assert {c.blk_n for c in binaries if c.blk_m == 128 and not c.swap_ab} >= set(range(96, 257, 16))
    assert {c.blk_n for c in binaries if c.swap_ab} >= {8, 16, 32, 64, 128}
    assert any(c.pingpong for c in binaries)


def test_every_value_of_the_space_file_is_used():
    space = load_space("sm_90a")
    used = [c.to_knobs() for c in space.configs()]
    for block in space.blocks:
        for name, values in block.items():
            if name != "PIPE_DEPTH":
                assert set(values) <= {knobs[name] for knobs in used}, (name, block)


def test_named_configs_are_legal():
    assert {name: violations(c, "sm_90a") for name, c in NAMED["sm_90a"].items() if violations(c, "sm_90a")} == {}


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (make(128, 128, num_consumer=2, cta_group=2, split_k=2), "split-k"),
        (make(128, 128, num_consumer=2, pingpong=True, split_k=2, epi_n=64), "split-k"),
        (make(64, 144, split_k=17), "split-k"),
        (make(64, 64, epi_n=24), "epilogue-divides"),
        (make(64, 48, epi_n=24), "epilogue-box"),
        (make(64, 24, epi_n=12, swap_ab=True), "epilogue-box"),
        (make(64, 264), "wgmma-shape"),
        (make(96, 64), "wgmma-shape"),
        (make(128, 24, cta_group=2, num_consumer=2, epi_n=8, swap_ab=True), "multicast-halves"),
        (make(128, 256, 2, epi_n=16, num_consumer=1), "accumulator-registers"),
        (make(128, 256, 4, split_k=2, epi_n=16, num_consumer=2), "accumulator-registers"),
        (make(128, 256, 5, epi_n=16, num_consumer=2), "shared-memory"),
    ],
)
def test_illegal_configs_are_named_by_their_rule(config, rule):
    assert any(text.endswith(f"[{rule}]") for text in violations(config, "sm_90a")), violations(config, "sm_90a")


def test_splitting_k_changes_neither_tile_nor_cluster_nor_shared_memory():
    plain, split = make(64, 64), make(64, 64, split_k=4)
    assert geometry(split, "sm_90a") == geometry(plain, "sm_90a")
    assert smem_bytes(split, "sm_90a", "float16") == smem_bytes(plain, "sm_90a", "float16")


def test_the_sums_of_slices_fit_beside_the_accumulators():
    for config in load_space("sm_90a").binaries():
        if config.split_k > 1:
            have = accumulator_registers(config)
            together, in_flight = slices_in_registers(config)
            assert have % together == together % 4 == 0 and in_flight >= 1
            assert have + together * (1 + in_flight) <= (224 if config.num_consumer == 1 else 192)


def test_the_workspace_holds_a_counter_per_tile_and_consumer_and_the_sums_of_every_slice():
    config = make(128, 64, num_consumer=2, split_k=5)
    values = evaluated(config, 200, 300, 1000)
    tiles, slices = 2 * 5, 4  # 16 steps in slices of 4: a fifth slice would be empty
    assert (values["tile_count"], values["slices"], values["item_count"]) == (tiles, slices, tiles * slices)
    assert values["counter_words"] == 32  # whole lines of 128 bytes
    sums = tiles * slices * 128 * 64
    assert evaluate(sm90.manifest_parts(config.binary, "float16")[3], values) == 4 * (32 + sums)
    assert sm90.manifest_parts(make(128, 64, num_consumer=2), "float16")[3] == "0"


@pytest.mark.parametrize(("epi_n", "box"), [(16, 16), (48, 16), (32, 32), (96, 32), (64, 64), (192, 64), (176, 16)])
def test_store_boxes_are_the_widest_that_divide_a_store_step(epi_n, box):
    assert store_box(make(64, epi_n)) == box


def test_boxes_are_cut_to_a_tensor_smaller_than_a_tile():
    tall = evaluated(make(128, 64, num_consumer=2), 13, 40, 512)
    assert (tall["lhs_box"], tall["rhs_box"], tall["out_box"]) == (16, 40, 16)
    assert tall["stage_bytes"] == (16 + 40) * 64 * 2
    whole = evaluated(make(128, 64, num_consumer=2), 4096, 4096, 512)
    assert (whole["lhs_box"], whole["rhs_box"], whole["out_box"]) == (128, 64, 64)


def test_multicast_boxes_keep_their_size_so_that_peers_can_count_bytes():
    small = evaluated(make(128, 64, cta_group=2, num_consumer=2), 13, 40, 512)
    assert (small["lhs_box"], small["rhs_box"]) == (128, 32)
    assert small["stage_bytes"] == (128 + 64) * 64 * 2


def test_swapping_exchanges_operands_extents_and_strides():
    config = make(128, 16, swap_ab=True)
    _, maps, grid, workspace = sm90.manifest_parts(config, "float16")
    assert [(m.name, m.operand, m.dims, m.strides_bytes) for m in maps] == [
        ("lhs_map", "b", ("K", "N"), ("ldb * 2",)),
        ("rhs_map", "a", ("K", "M"), ("lda * 2",)),
        ("out_map", "d", ("N", "M"), ("ldd * 2",)),
    ]
    values = evaluated(config, 5, 1000, 4096)
    assert (values["tile_rows"], values["tile_cols"]) == (8, 1)
    assert (values["lhs_box"], values["rhs_box"], values["out_box"]) == (128, 8, 8)
    assert evaluate(grid, values) == 8
    assert workspace == "0"


def test_row_strides_reach_the_tensor_maps():
    maps = sm90.manifest_parts(make(64, 64), "float16")[1]
    values = evaluated(make(64, 64), 64, 64, 64, lda=72, ldb=80, ldd=128)
    assert [evaluate(m.strides_bytes[0], values) for m in maps] == [144, 160, 256]


@pytest.mark.parametrize("config", [make(64, 64), make(64, 64, split_k=4), make(128, 32, swap_ab=True, split_k=2)])
def test_slices_of_k_cover_every_step_once(config):
    for k in (8, 64, 72, 128, 200, 448, 1000, 4096):
        values = evaluated(config, 64, 64, k)
        covered = []
        for part in range(values["slices"]):  # as the kernel computes it
            first = part * values["slice_steps"]
            steps = min(values["slice_steps"], values["k_steps"] - first)
            assert steps >= 1
            covered += range(first, first + steps)
        assert covered == list(range(values["k_steps"]))
        assert values["slices"] <= config.split_k


def test_the_grid_is_whole_clusters():
    for config in KERNELS.values():
        ctas = geometry(config, "sm_90a").cluster_ctas
        for m, n in ((1, 8), (300, 520), (8192, 8192)):
            values = evaluated(config, m, n, 64)
            assert values["grid"] % ctas == 0
            assert ctas <= values["grid"] <= 132


def test_manifest_matches_the_kernel(kernel):
    known = set(VARIABLES) | {s.name for s in kernel.manifest.scalars}
    assert {p.name for p in kernel.manifest.params if p.kind not in ("tensor_map", "workspace")} <= known
    assert [p.name for p in kernel.manifest.params if p.kind == "tensor_map"] == ["lhs_map", "out_map", "rhs_map"]
    assert kernel.manifest.cluster_ctas == geometry(kernel.config, "sm_90a").cluster_ctas
    assert any(p.kind == "workspace" for p in kernel.manifest.params) == (kernel.config.split_k > 1)
    assert (kernel.manifest.workspace_bytes == "0") == (kernel.config.split_k == 1)


def test_kernels_keep_to_their_plan(kernel):
    config, text = kernel.config, kernel.cuda
    assert f"__launch_bounds__({(config.num_consumer + 1) * 128}, 1)" in text
    assert f"m64n{config.blk_n}k16" in text
    assert ("stmatrix_sync_aligned_m8n8_x2_trans" in text or "x4_trans" in text) == config.swap_ab
    assert ("atom_relaxed_gpu_global_add" in text) == (config.split_k > 1)
    assert ("multicast" in text) == (config.cta_group > 1)
    # Nothing may be touched before the previous kernel ends, and only the end of this one starts the next.
    assert kernel.manifest.programmatic and "griddepcontrol.wait" in text and "launch_dependents" not in text
    # Loads that need no other thread come before the CTA's threads meet; in a cluster every load does.
    meeting = text.rindex("cluster_sync();" if config.cta_group > 1 else "cta_sync();")
    assert ("g2s" in text[text.index("gemm_kernel(") : meeting]) != (config.cta_group > 1) or config.cta_group > 1
    assert ("bar_arrive" in text) == config.pingpong
    assert f"float acc_ptr[{accumulator_registers(config)}]" in text
    inits = re.findall(r"mbarrier_init_init_shared_b64\(tvm_builtin_cuda_cvta", text)
    assert len(inits) == 2 * config.pipe_depth
    body = text[text.index("gemm_kernel(", text.index("gemm_kernel(") + 1) :]
    assert " % tile" not in body and " / tile" not in body and "/ group" not in body  # tiles are found without division


def test_bfloat16_differs_only_in_the_type():
    config = KERNELS["swapped and split"]
    half, brain = generate(config, "sm_90a", "float16"), generate(config, "sm_90a", "bfloat16")
    assert "f32.bf16.bf16" in brain.cuda and "cvt.rn.bf16x2.f32" in brain.cuda
    assert half.manifest.tensor_maps == brain.manifest.tensor_maps
    assert half.manifest.params == brain.manifest.params


def test_barrier_names_follow_allocation():
    assert sm90.barrier_names(KERNELS["cooperative"]) == ("tma2mma", "mma2tma")


# ---- executed on the CPU

SHAPES = {
    "cooperative": (300, 200, 264),
    "ping-pong": (264, 104, 200),
    "three consumers": (250, 72, 136),
    "split": (70, 200, 328),
    "split in parts": (130, 200, 264),
    "swapped": (40, 264, 200),
    "swapped and split": (21, 392, 200),
}


@cache
def built(name: str, dtype: str = "float16") -> Any:
    """Return the traced kernel, once."""
    return sm90.build(KERNELS[name].binary, dtype)


def execute(func: Any, config: Config, shape: tuple[int, int, int], dtype: str = "float16", seeds: Any = (0,)) -> Any:
    """Return the CheckReport of ``func`` on two or three clusters' worth of SMs, with exact integers."""
    np = pytest.importorskip("numpy")
    from autogemm.simulate.check import check_primfunc

    m, n, k = shape
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-3, 4, size) for size in ((m, k), (n, k)))
    if dtype == "bfloat16":  # small integers are exact in the upper half of a float32
        a, b = ((x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for x in (a, b))
    else:
        a, b = (x.astype(np.float16) for x in (a, b))
    sms = (2 if config.split_k == 1 else 3) * geometry(config, "sm_90a").cluster_ctas
    return check_primfunc(
        func, arch="sm_90a", inputs={"a": a, "b": b}, sm_count=sms, level="ptx", seeds=seeds,
        scalars=evaluated(config, m, n, k, sm_count=sms, l2_group_size=2), barrier_names=sm90.barrier_names(config),
        programmatic=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_ragged_problems_are_exact_and_free_of_races(name):
    report = execute(built(name), KERNELS[name], SHAPES[name], seeds=(0, 1))
    assert report.findings == ()
    assert report.max_error == 0.0


@pytest.mark.parametrize("shape", [(1, 8, 8), (8, 64, 512), (65, 24, 1000)])
@pytest.mark.parametrize("name", ["cooperative", "ping-pong", "split", "swapped and split"])
def test_tiny_and_lopsided_problems_are_exact(name, shape):
    report = execute(built(name), KERNELS[name], shape)
    assert report.findings == ()
    assert report.max_error == 0.0


@pytest.mark.parametrize("slices", [2, 5, 16])
def test_one_kernel_takes_any_number_of_slices(slices):
    config = replace(KERNELS["split"], split_k=slices)
    func = built("split")
    report = execute(func, config, (70, 200, 328))
    assert report.findings == ()
    assert report.max_error == 0.0


def test_sums_repeat_bit_for_bit_whoever_comes_last():
    np = pytest.importorskip("numpy")
    from autogemm.simulate.check import Binding, compile_program
    from autogemm.simulate.cost import cost_table
    from autogemm.simulate.machine import Machine

    m, n, k = 70, 200, 328
    config = KERNELS["split"]
    rng = np.random.default_rng(2)
    inputs = {name: rng.standard_normal(size).astype(np.float16) for name, size in (("a", (m, k)), ("b", (n, k)))}
    program = compile_program(built("split"), arch("sm_90a"), "ptx")
    binding = Binding(program, inputs, evaluated(config, m, n, k, sm_count=3), 3, True)
    outcomes = set()
    for seed in range(4):
        machine = Machine(
            program, arch=arch("sm_90a"), parameters=binding.parameters, arrays=binding.fresh(), shapes=binding.shapes,
            costs=cost_table("nvidia-h200"), seed=seed,
        )  # fmt: skip
        machine.run()
        outcomes.add(machine.arrays["D"].tobytes())
    assert len(outcomes) == 1


@pytest.mark.parametrize("name", ["ping-pong", "swapped and split"])
def test_bfloat16_is_exact(name):
    report = execute(built(name, "bfloat16"), KERNELS[name], SHAPES[name], dtype="bfloat16")
    assert report.findings == ()
    assert report.max_error == 0.0


# Faults put into the kernel's text, each with a kernel that the faulty part serves.
MUTATIONS = {
    "stage released before its MMAs are done":
        ("swapped", "wait_group.sync.aligned(1)", "wait_group.sync.aligned(2)"),
    "accumulators read under a running MMA":
        ("cooperative", "wait_group.sync.aligned(0)", "wait_group.sync.aligned(1)"),
    "a peer's stage is not waited for":
        ("cooperative", "if thread < GROUP:", "if thread < 1:"),
    "peers' barriers are used before they are initialised":
        ("cooperative", "T.cuda.cluster_sync()\n        else:", "T.cuda.cta_sync()\n        else:"),
    "staged rows are not made visible to TMA":
        ("swapped", "                    T.ptx.fence.proxy.async_.shared__cta()\n", ""),
    "staging is overwritten under a store":
        ("cooperative", "bulk.wait_group.read(0)\n                    T", "bulk.wait_group.read(1)\n                    T"),
    "no turns are taken":
        ("ping-pong", "order.pass_turn(consumer)", "order.pass_turn(0)"),
    "the other consumer's stages are not passed over":
        ("ping-pong", "skip(ring, steps, DEPTH)", "skip(ring, 0, DEPTH)"),
    "sums are not waited for":
        ("split", "while least[0] == T.uint32(0):", "while least[0] == T.uint32(1):"),
    "half of the sums are waited for":
        ("split", "for i in T.unroll(CHUNK - 1):", "for i in T.unroll(CHUNK // 2 - 1):"),
    "a sum of zero looks like none":
        ("split", "T.float32(-0.0)", "T.float32(0.0)"),
    "sums are left for the next launch":
        ("split", "T.ptx[_EMPTY](at, T.uint32(0)", "T.ptx[_EMPTY](at, T.uint32(1)"),
    "first loads do not wait for the previous kernel":
        ("swapped", "T.ptx.griddepcontrol.wait()\n                        for", "for"),
    "loads of a cluster do not wait for the previous kernel":
        ("cooperative", "T.ptx.griddepcontrol.wait()\n                    while", "pass\n                    while"),
    "early loads are repeated":
        ("swapped", "load(fill.stage, early + k)", "load(fill.stage, k)"),
    "early loads are taken off every tile":
        ("swapped", "                        early = 0\n                        sched", "                        sched"),
    "the sum is taken one slice early":
        ("split", 'T.Cast("uint32", slices - 1)', 'T.Cast("uint32", slices - 2)'),
    "counters are not cleared":
        ("split", "consumer]), T.uint32(0))", "consumer]), T.uint32(2))"),
    "own sums are left out":
        ("split", "if slice0 == slices - 1:", "if slice0 == slices:"),
    "parts are summed from one place":
        ("split in parts", "counter_words + chunk * (CHUNK * WARPGROUP)", "counter_words"),
}  # fmt: skip


@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_fault_put_into_the_kernel_is_found(fault, tmp_path):
    name, good, bad = MUTATIONS[fault]
    text = Path(sm90.__file__).read_text()
    assert good in text
    text = text.replace(good, bad).replace("from ..", "from autogemm.").replace("from .", "from autogemm.kernel.")
    path = tmp_path / "mutant.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("mutant", path)
    mutant = importlib.util.module_from_spec(spec)
    sys.modules["mutant"] = mutant
    try:
        spec.loader.exec_module(mutant)
        report = execute(mutant.build(KERNELS[name].binary, "float16"), KERNELS[name], SHAPES[name])
    finally:
        del sys.modules["mutant"]
    assert report.findings, fault
