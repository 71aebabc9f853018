"""Kernels executed on the CPU: clean ones pass with exact numbers, faulty ones are reported, bad input is one clear error."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

from mutate import mutant
from seed_kernels import BARRIER_NAMES, seed_kernel
from typer.testing import CliRunner

from autogemm.arch import arch
from autogemm.cli.main import app
from autogemm.config import NAMED, Config
from autogemm.errors import InputError, UnsupportedOp
from autogemm.kernel import generate
from autogemm.results import CheckReport
from autogemm.simulate.check import (
    Binding,
    check_config,
    check_primfunc,
    compile_program,
    exercising_shape,
    integer_inputs,
    launch_scalars,
)
from autogemm.simulate.cost import cost_table
from autogemm.simulate.machine import Machine
from autogemm.space import load_space

# Small relatives of the named kernels: every role and buffer, little to multiply.
V7 = Config(blk_m=128, blk_n=64, pipe_depth=2, epi_n=64)
V9 = Config(blk_m=128, blk_n=16, pipe_depth=3, cta_group=2, num_consumer=2, epi_n=16)
BUFFERED = replace(V9, num_consumer=1, tmem_buffers=2, epi_n=32)
COOPERATIVE = Config(blk_m=128, blk_n=64, pipe_depth=3, cta_group=2, num_consumer=2, epi_n=32)
PINGPONG = Config(blk_m=64, blk_n=64, pipe_depth=3, num_consumer=2, epi_n=32, pingpong=True)
SPLIT = Config(blk_m=64, blk_n=64, pipe_depth=3, epi_n=32, split_k=2)
SWAPPED = Config(blk_m=64, blk_n=64, pipe_depth=3, epi_n=32, swap_ab=True)


def explain(report: CheckReport) -> str:
    return "\n".join(f"{f.kind}: {f.text}" for f in report.findings)


def assert_clean(report: CheckReport) -> None:
    assert report.passed, explain(report)
    assert report.wrong_elements == 0 and report.max_error == 0.0


@pytest.mark.parametrize("level", ["tile", "ptx"])
@pytest.mark.parametrize("name", ["v7", "v8", "v9"])
def test_named_sm100_kernels_are_clean_at_ragged_shapes(name: str, level: Any) -> None:
    assert_clean(check_config(NAMED["sm_100a"][name], "sm_100a", level=level, seeds=(0, 1)))


@pytest.mark.parametrize("config", [COOPERATIVE, PINGPONG, SPLIT, SWAPPED], ids=lambda c: c.id)
def test_sm90_kernels_are_clean_under_several_schedules(config: Config) -> None:
    assert_clean(check_config(config, "sm_90a", seeds=(0, 1, 2, 3)))


@pytest.mark.parametrize("config", [PINGPONG, SPLIT], ids=lambda c: c.id)
def test_lowered_sm90_kernels_are_clean_in_bfloat16(config: Config) -> None:
    report = check_config(config, "sm_90a", level="ptx", dtype="bfloat16", seeds=(0,))
    assert report.passed and report.wrong_elements == 0, explain(report)
    assert report.max_error is not None and report.max_error <= 1  # integers up to 512 are rounded to even ones


@pytest.mark.parametrize("shape", [(1, 8, 8), (129, 72, 200), (300, 8, 64)])
def test_extents_far_from_the_tile_are_clean(shape: tuple[int, int, int]) -> None:
    assert_clean(check_config(BUFFERED, "sm_100a", shape=shape, seeds=(0, 5)))
    assert_clean(check_config(COOPERATIVE, "sm_90a", shape=shape, seeds=(0, 5)))


@pytest.mark.parametrize("arch_name", ["sm_90a", "sm_100a"])
def test_a_sample_of_the_space_is_clean(arch_name: Any) -> None:
    sample = random.Random(7).sample(load_space(arch_name).binaries(), 4)
    for number, config in enumerate(sample):
        level: Any = ("tile", "ptx")[number % 2]
        assert_clean(check_config(config, arch_name, level=level, seeds=(number,)))


@pytest.mark.slow
@pytest.mark.parametrize("arch_name", ["sm_90a", "sm_100a"])
def test_a_larger_sample_of_the_space_is_clean(arch_name: Any) -> None:
    for number, config in enumerate(random.Random(8).sample(load_space(arch_name).binaries(), 30)):
        assert_clean(check_config(config, arch_name, seeds=(0, number + 1)))


def execute(config: Config, arch_name: Any, level: Any, dtype: str) -> np.ndarray:
    """Return D as the kernel leaves it, for random normal inputs."""
    m, n, k, sms = exercising_shape(config, arch_name)
    draw = np.random.default_rng(3)
    inputs = {name: draw.standard_normal(size).astype(np.float16) for name, size in (("A", (m, k)), ("B", (n, k)))}
    func = generate.prim_func(config, arch_name, dtype)
    program = compile_program(func, arch(arch_name), level)
    scalars = launch_scalars(config, arch_name, dtype, (m, n, k), sms)
    binding = Binding(program, inputs, scalars, sms, True)
    machine = Machine(
        program, arch=arch(arch_name), parameters=binding.parameters, arrays=binding.fresh(), shapes=binding.shapes,
        costs=cost_table("nvidia-b200"),
    )  # fmt: skip
    machine.run()
    result = machine.arrays["D"]
    assert result is not None
    return result


@pytest.mark.parametrize(("config", "arch_name"), [(BUFFERED, "sm_100a"), (PINGPONG, "sm_90a")])
def test_both_levels_compute_the_same(config: Config, arch_name: Any) -> None:
    tile, ptx = (execute(config, arch_name, level, "float16").view(np.float16) for level in ("tile", "ptx"))
    np.testing.assert_allclose(tile.astype(np.float64), ptx.astype(np.float64), rtol=2e-3, atol=2e-3)
    assert not np.isnan(tile).any()


# ---- the article's own kernels


@pytest.mark.parametrize("level", ["tile", "ptx"])
@pytest.mark.parametrize("step", ["v7", "v8", "v9"])
def test_the_articles_faults_are_reported(step: str, level: Any) -> None:
    shape = {"v7": (256, 256, 256), "v8": (512, 256, 320), "v9": (1024, 256, 320)}[step]
    inputs = {name: bits.view(np.float16) for name, bits in integer_inputs(shape, "float16").items()}
    report = check_primfunc(
        seed_kernel(step, *shape, 2), arch="sm_100a", inputs=inputs, sm_count=2, level=level, barrier_names=BARRIER_NAMES
    )
    text = explain(report)
    assert report.wrong_elements == 0, text
    assert "tcgen05.dealloc of TMEM column 0, which is not allocated" in text
    assert "no tcgen05.fence::before_thread_sync" in text
    assert ("with no ordering after its mbarrier.init (needs a cluster barrier" in text) == (step != "v7")


# ---- planted faults

_SYNC = "T.cuda.warpgroup_sync(warpgroup_barrier(wg_id))\n"
SM100_FAULTS = {
    "no transaction bytes": ("tma2mma_cta0.arrive(tma_ps.stage, STAGE_BYTES)", "T.evaluate(0)", "deadlock"),
    "producer starts one phase late": (
        "tma_ps = PipelineState(PIPE_DEPTH, phase=1)",
        "tma_ps = PipelineState(PIPE_DEPTH, phase=0)",
        "deadlock",
    ),
    "stage released to one CTA of the pair": (
        "mma2tma.arrive(mma_ps.stage, cta_group=CTA_GROUP, cta_mask=PAIR_MASK)",
        "mma2tma.arrive(mma_ps.stage, cta_group=CTA_GROUP, cta_mask=1)",
        "deadlock",
    ),
    "accumulator freed by half its readers": (
        "ld2mma.init(WARPGROUP_THREADS * CTA_GROUP)",
        "ld2mma.init(WARPGROUP_THREADS)",
        "race",
    ),
    "registers used before the load": ("T.ptx.tcgen05.wait__ld.sync.aligned()\n", "T.evaluate(0)\n", "race"),
    "accumulates into the last tile": ("accum=(k != 0)", "accum=(k >= 0)", "uninitialized"),
    "no fence before the signal": ("T.ptx.tcgen05.fence__before_thread_sync()\n", "T.evaluate(0)\n", "protocol"),
    "barriers of a peer used at once": (
        "        sync_all()\n        tmem = T.decl",
        "        T.cuda.cta_sync()\n        tmem = T.decl",
        "race",
    ),
    "no cluster barrier at the end": (
        "        # --- Cleanup ---\n        sync_all()\n",
        "        # --- Cleanup ---\n",
        "protocol",
    ),
    "TMEM never freed": ("T.ptx[DEALLOC](tmem_addr[0], T.uint32(TMEM_COLUMNS))", "T.evaluate(0)", "protocol"),
}
SM90_FAULTS = {
    "bytes of one operand missing": (
        "tma2mma.arrive(stage, stage_bytes)",
        "tma2mma.arrive(stage, stage_bytes - 64)",
        "deadlock",
    ),
    "peer not told that a stage is free": ("if thread < GROUP:", "if thread < 1:", "deadlock"),
    "released while MMAs read": ("T.ptx.wgmma.wait_group.sync.aligned(1)", "T.ptx.wgmma.wait_group.sync.aligned(2)", "race"),
    "accumulators read too early": ("T.ptx.wgmma.wait_group.sync.aligned(0)", "T.ptx.wgmma.wait_group.sync.aligned(1)", "race"),
    "no wgmma.fence": ("T.ptx.wgmma.fence.sync.aligned()", "T.evaluate(0)", "protocol"),
    "wrong swizzle in a descriptor": (
        "rhs_smem.ptr_to([0, 0]), 1, 64, 3)",
        "rhs_smem.ptr_to([0, 0]), 1, 64, 2)",
        "wrong_result",
    ),
    "too many registers asked for": (
        "T.ptx.setmaxnreg.inc.sync.aligned.u32(REGISTERS[1])",
        "T.ptx.setmaxnreg.inc.sync.aligned.u32(240)",
        "deadlock",
    ),
    "no proxy fence before the store": ("T.ptx.fence.proxy.async_.shared__cta()\n                    T.cuda", "T.cuda", "race"),
    "multicast to oneself": ("T.uint16((1 << GROUP) - 1)", "T.uint16(1)", "deadlock"),
}


def check_mutant(module: Any, config: Config, arch_name: Any, level: Any, seed: int, func: Any = None) -> CheckReport:
    m, n, k, sms = exercising_shape(config, arch_name)
    return check_primfunc(
        module.build(config.binary, "float16") if func is None else func,
        arch=arch_name,
        sm_count=sms,
        level=level,
        seeds=(seed,),
        inputs={name: bits.view(np.float16) for name, bits in integer_inputs((m, n, k), "float16").items()},
        scalars=launch_scalars(config, arch_name, "float16", (m, n, k), sms),
        barrier_names=module.barrier_names(config),
    )


@pytest.mark.parametrize("fault", SM100_FAULTS)
def test_faults_planted_in_the_sm100_kernel_are_found(fault: str, tmp_path: Path) -> None:
    old, new, kind = SM100_FAULTS[fault]
    module = mutant("sm100.py", [(old, new)], tmp_path)
    func = module.build(V9.binary, "float16")
    for level, seed in (("tile", 0), ("ptx", 2)):
        report = check_mutant(module, V9, "sm_100a", level, seed, func)
        assert kind in {f.kind for f in report.findings}, (level, explain(report))


@pytest.mark.parametrize("fault", SM90_FAULTS)
def test_faults_planted_in_the_sm90_kernel_are_found(fault: str, tmp_path: Path) -> None:
    old, new, kind = SM90_FAULTS[fault]
    report = check_mutant(mutant("sm90.py", [(old, new)], tmp_path), COOPERATIVE, "sm_90a", "tile", 1)
    assert kind in {f.kind for f in report.findings}, explain(report)


SPLIT_FAULTS = {
    "sums looked at without waiting": ("while least[0] == T.uint32(0):", "while least[0] != least[0]:", "race"),
    "half of a sum waited for": ("T.unroll(CHUNK - 1):", "T.unroll(CHUNK // 2 - 1):", "race"),
    "a sum of zero taken for none": ("T.float32(-0.0)", "T.float32(0.0)", "deadlock"),
    "sums left for the next launch": ("T.ptx[_EMPTY](at, T.uint32(0)", "T.ptx[_EMPTY](at, T.uint32(1)", "protocol"),
    "counter left for the next launch": (
        "T.ptx[_CLEAR](workspace.ptr_to([tile0 * CONSUMERS + consumer]), T.uint32(0))",
        "T.evaluate(0)",
        "protocol",
    ),
}


@pytest.mark.parametrize("fault", SPLIT_FAULTS)
def test_faults_planted_where_slices_are_added_are_found(fault: str, tmp_path: Path) -> None:
    old, new, kind = SPLIT_FAULTS[fault]
    report = check_mutant(mutant("sm90.py", [(old, new)], tmp_path), SPLIT, "sm_90a", "tile", 0)
    assert kind in {f.kind for f in report.findings}, explain(report)


def test_a_deadlock_names_the_barrier_and_who_should_have_arrived(tmp_path: Path) -> None:
    module = mutant("sm100.py", [("tma2mma.init(1)", "tma2mma.init(2)")], tmp_path)
    report = check_mutant(module, V7, "sm_100a", "tile", 0)
    text = explain(report)
    assert "wg1.w0 (MMA issuer)" in text and "tma2mma[0] parity 0" in text
    assert "1 of 2 arrivals" in text and "should arrive: wg1 TMA producer of cta0" in text


def test_a_race_names_both_roles_and_the_tile(tmp_path: Path) -> None:
    wait = "                            mma2tma.wait(tma_ps.stage, tma_ps.phase)\n                            tma_load"
    module = mutant("sm100.py", [(wait, "                            tma_load")], tmp_path)
    text = explain(check_mutant(module, V7, "sm_100a", "tile", 0))
    assert "Asmem[0, 0, 0:128, 0:64]: write by TMA load of cta0.wg1.w3 (TMA producer) is not ordered after" in text


def test_the_command_line_reports_findings_and_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So does --json, whose document holds the findings."""
    module = mutant("sm100.py", [("tma2mma.init(1)", "tma2mma.init(2)")], tmp_path)
    monkeypatch.setattr(generate, "prim_func", lambda config, arch_name, dtype: module.build(config.binary, dtype))
    for extra in ((), ("--json",)):
        result = CliRunner().invoke(app, ["check", "--config", "v7", "--seeds", "1", *extra])
        assert result.exit_code == 1 and "1 of 2 arrivals" in result.stdout, result.stdout
    verdict = json.loads(result.stdout)[0]
    assert verdict["passed"] is False and [f["kind"] for f in verdict["findings"]] == ["deadlock"]


def test_a_role_that_never_ends_is_a_deadlock(tmp_path: Path) -> None:
    change = "                            tma_ps.advance()\n                        tile_scheduler.next_tile()\n"
    module = mutant("sm100.py", [(change, change.replace("tile_scheduler.next_tile()", "T.evaluate(0)"))], tmp_path)
    text = explain(check_mutant(module, V7, "sm_100a", "tile", 0))
    assert text.startswith("deadlock: no progress") and "(TMA producer)" in text


# ---- bad input


def small() -> tuple[Any, dict[str, Any], dict[str, int]]:
    shape = (128, 64, 64)
    inputs = {name: bits.view(np.float16) for name, bits in integer_inputs(shape, "float16").items()}
    return generate.prim_func(V7, "sm_100a"), inputs, launch_scalars(V7, "sm_100a", "float16", shape, 1)


def test_wrong_arrays_and_scalars_are_refused() -> None:
    func, inputs, scalars = small()

    def run(**changes: Any) -> CheckReport:
        return check_primfunc(func, **{"arch": "sm_100a", "inputs": inputs, "sm_count": 1, "scalars": scalars, **changes})

    assert_clean(run())
    with pytest.raises(InputError, match=r"B has K=32 .* A has 64"):
        run(inputs={**inputs, "B": inputs["B"][:, :32].copy()})
    with pytest.raises(InputError, match="A is float32; the kernel takes float16"):
        run(inputs={**inputs, "A": inputs["A"].astype(np.float32)})
    with pytest.raises(InputError, match=r"no buffer 'C'; it takes A, B, D"):
        run(inputs={"C": inputs["A"]})
    with pytest.raises(InputError, match="needs scalars .*tile_count"):
        run(scalars={"M": 128, "N": 64})
    with pytest.raises(InputError, match="M=7 was given, but A has 128"):
        run(scalars={**scalars, "M": 7})
    with pytest.raises(InputError, match="unknown level 'sass'"):
        run(level="sass")
    with pytest.raises(InputError, match="expected D has shape"):
        run(expected=np.zeros((3, 3)))
    with pytest.raises(InputError, match="expected D is <U1; give an array of numbers"):
        run(expected="x")
    with pytest.raises(InputError, match="inputs is int; give arrays by name"):
        run(inputs=5)
    with pytest.raises(InputError, match="scalar tile_count must be an integer, got 'x'"):
        run(scalars={**scalars, "tile_count": "x"})
    for seeds in ((), 3, (-1,), (1.5,)):
        with pytest.raises(InputError, match="seeds must be one or more integers from 0 on"):
            run(seeds=seeds)
    with pytest.raises(InputError, match="sm_count must be at least 1, got 0"):
        run(sm_count=0)


@pytest.mark.parametrize("level", ["tile", "ptx"])
def test_what_is_no_kernel_of_the_arch_is_refused(level: Any) -> None:
    func, inputs, scalars = small()
    with pytest.raises(InputError, match="func is str; give a traced PrimFunc"):
        check_primfunc("gemm", arch="sm_100a", inputs=inputs, sm_count=1, level=level)
    with pytest.raises(InputError, match="the kernel uses tcgen05, which sm_90a does not have"):
        check_primfunc(func, arch="sm_90a", inputs=inputs, sm_count=1, scalars=scalars, level=level)
    func = generate.prim_func(SWAPPED, "sm_90a")
    with pytest.raises(InputError, match="the kernel uses wgmma, which sm_100a does not have"):
        check_primfunc(func, arch="sm_100a", inputs=inputs, sm_count=1, level=level)


@pytest.mark.parametrize(
    ("shape", "said"),
    [((0, 8, 8), "M must be between 1"), ((8, 8), r"shape must be \(M, N, K\)"), ((1.5, 8, 8), "M must be an integer")],
)
def test_shapes_that_are_none_are_refused(shape: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_config(V7, "sm_100a", shape=shape)


def test_inputs_that_are_no_numbers_give_what_they_must() -> None:
    func, inputs, scalars = small()
    inputs["A"][3, 5], inputs["A"][4, 5] = np.nan, np.inf
    report = check_primfunc(func, arch="sm_100a", inputs=inputs, sm_count=1, scalars=scalars)
    assert report.passed, explain(report)


def test_a_shape_too_large_for_memory_is_refused_before_it_is_allocated() -> None:
    with pytest.raises(InputError, match=r"executing 2000000x2000000x64 needs about .* MiB"):
        check_config(V7, "sm_100a", shape=(2_000_000, 2_000_000, 64))


def test_an_unknown_operation_is_named(tmp_path: Path) -> None:
    module = mutant("sm100.py", [("T.ptx.tcgen05.wait__ld.sync.aligned()", "T.ptx.tcgen05.wait__st.sync.aligned()")], tmp_path)
    with pytest.raises(UnsupportedOp, match=r"tcgen05_wait.*wait::st"):
        check_mutant(module, V7, "sm_100a", "tile", 0)


def test_expected_values_are_compared_whatever_the_kernel_means() -> None:
    func, inputs, scalars = small()
    product = inputs["A"].astype(np.float64) @ inputs["B"].astype(np.float64).T
    product[5, 7] += 1
    report = check_primfunc(func, arch="sm_100a", inputs=inputs, sm_count=1, scalars=scalars, expected=product)
    assert report.wrong_elements == 1 and "first D[5, 7]" in explain(report)


def test_findings_over_schedules_are_kept_once(tmp_path: Path) -> None:
    module = mutant("sm100.py", [("T.ptx[DEALLOC](tmem_addr[0], T.uint32(TMEM_COLUMNS))", "T.evaluate(0)")], tmp_path)
    m, n, k, sms = exercising_shape(V7, "sm_100a")
    report = check_primfunc(
        module.build(V7, "float16"), arch="sm_100a", sm_count=sms, seeds=(0, 1, 2),
        inputs={name: bits.view(np.float16) for name, bits in integer_inputs((m, n, k), "float16").items()},
        scalars=launch_scalars(V7, "sm_100a", "float16", (m, n, k), sms),
    )  # fmt: skip
    assert [f.kind for f in report.findings] == ["protocol"] and "512 TMEM columns" in report.findings[0].text
    assert report.seeds == (0, 1, 2)
