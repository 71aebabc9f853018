"""Prediction by execution: against the closed form, the article's table, and itself at full length."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("tvm")

from autogemm.arch import gpu
from autogemm.config import NAMED, Config
from autogemm.errors import IllegalConfig, InputError
from autogemm.predict import closed_form
from autogemm.problem import Problem
from autogemm.simulate.cost import COSTS, cost_table
from autogemm.simulate.predict import _first_touched, _Plan, predict, record
from autogemm.simulate.trace import trace_events

B200, H200 = gpu("nvidia-b200"), gpu("nvidia-h200")
CUBE = Problem(m=4096, n=4096, k=4096)
ARTICLE = {"v7": 0.23e-3, "v8": 0.104e-3, "v9": 0.094e-3}


def test_the_articles_kernels_come_out_in_order_and_within_a_tenth() -> None:
    found = {name: predict(CUBE, NAMED["sm_100a"][name], B200) for name in ARTICLE}
    times = {name: p.time_s for name, p in found.items()}
    assert times["v7"] > times["v8"] > times["v9"]
    assert all(abs(times[name] / ARTICLE[name] - 1) < 0.10 for name in ARTICLE)
    assert all(p.model == "simulator-1" and 0 < p.utilization["tensor_core"] < 1 for p in found.values())


@pytest.mark.parametrize(
    ("operands", "depths"), [("in L2", {2: 443.7, 3: 297.1, 4: 226.8}), ("out", {2: 582.1, 3: 393.0, 4: 299.9})]
)
def test_a_published_main_loop_takes_as_long_as_published(operands: str, depths: dict[int, float]) -> None:
    """SemiAnalysis' times, in microseconds, of 1024 steps of one CTA with 128x128 tiles and 128 bytes of K; 1.965 GHz."""
    for depth, published in depths.items():
        config = Config(blk_m=128, blk_n=128, pipe_depth=depth, epi_n=64)
        plan = _Plan.of(Problem(m=128, n=128, k=64 * 128), config, B200, 1)
        costs = replace(COSTS["nvidia-b200"], prewarmed=operands == "in L2")
        plan = replace(plan, costs=costs)
        step = (plan.run(1, 128).cycles - plan.run(1, 64).cycles) / 64
        assert 1024 * step / 1.965e3 == pytest.approx(published, rel=0.03)


def test_a_quarter_of_the_tiles_finds_row_and_column_in_l2() -> None:
    # 16 x 8 tiles in groups of 8 rows, 96 at once: the last 32 are columns 4 to 7 of the second group, all seen before.
    plan = _Plan.of(Problem(m=2048, n=1024, k=64), NAMED["sm_100a"]["v7"], B200, 96)
    assert (plan.tiles, plan.clusters) == (128, 96)
    assert _first_touched(plan.scalars) == 0.75


def test_a_long_problem_continued_from_short_runs_agrees_with_executing_all_of_it(monkeypatch) -> None:
    shape = Problem(m=4096, n=4096, k=2048)
    whole = predict(shape, NAMED["sm_100a"]["v8"], B200)
    monkeypatch.setattr("autogemm.simulate.predict._EXACT_STEPS", 60)
    continued = predict(shape, NAMED["sm_100a"]["v8"], B200)
    assert continued.time_s == pytest.approx(whole.time_s, rel=0.03)


def test_execution_and_closed_form_agree_within_a_fifth() -> None:
    for name in ("v8", "v9"):
        config = NAMED["sm_100a"][name]
        executed, modelled = predict(CUBE, config, B200).time_s, closed_form.predict(CUBE, config, B200).time_s
        assert executed == pytest.approx(modelled, rel=0.2)


def test_says_which_role_waits_for_which_barrier() -> None:
    parts = predict(CUBE, NAMED["sm_100a"]["v7"], B200).parts_s
    assert parts["MMA issuer waits for tma2mma"] > 0.5 * sum(ARTICLE.values()) / 3  # two stages starve the MMAs
    assert parts["launch"] > 0


def test_an_sm_90a_kernel_is_executed_too() -> None:
    config = Config(blk_m=128, blk_n=128, pipe_depth=4, num_consumer=2, epi_n=64)
    shape = Problem(m=2048, n=2048, k=1024)
    executed = predict(shape, config, H200)
    assert executed.time_s == pytest.approx(closed_form.predict(shape, config, H200).time_s, rel=0.3)


def test_a_recording_names_roles_engines_and_waits() -> None:
    recording = record(Problem(m=512, n=512, k=512), NAMED["sm_100a"]["v9"], B200, name="v9")
    kinds = {s.kind for s in recording.slices}
    assert {"wait", "work", "tma", "mma", "store"} <= kinds
    assert {"TMA producer", "MMA issuer", "epilogue"} <= set(recording.titles.values())
    assert any("tma2mma" in s.name for s in recording.slices)
    events = trace_events([recording])["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == len(recording.slices)


def test_refuses_what_it_cannot_predict() -> None:
    with pytest.raises(InputError, match="sm_count"):
        predict(CUBE, NAMED["sm_100a"]["v9"], B200, sm_count=149)
    with pytest.raises(IllegalConfig):
        predict(CUBE, replace(NAMED["sm_100a"]["v9"], pipe_depth=99), B200)
    sliced = Config(blk_m=64, blk_n=64, pipe_depth=4, epi_n=32, split_k=2)
    with pytest.raises(InputError, match="SPLIT_K=2"):
        predict(CUBE, sliced, H200)
    with pytest.raises(InputError, match="no cost table"):
        cost_table("nvidia-z1")


def test_every_cost_table_keeps_to_what_its_arch_can_do() -> None:
    for slug, costs in COSTS.items():
        device = gpu(slug)
        assert costs.clock_hz <= device.max_clock_hz
        assert costs.dram_bw * costs.clock_hz <= device.dram_bytes_per_s
        assert costs.mma_cycles(128, 256, 16) >= 2 * 128 * 256 * 16 / costs.mma_flops
        half = costs.share(0.5)
        assert (half.l2_bw, half.dram_bw) == (costs.l2_bw / 2, costs.dram_bw / 2)
