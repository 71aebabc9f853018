"""The choice of a kernel follows the order of evidence, states its bound, and depends on nothing but its arguments."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cublaslt_fakes import algorithm_of
from dispatch_fakes import CONFIG, H200, PROVENANCE, SKINNY, key_of, measured, predicted, with_algorithm

from autogemm.config import Config
from autogemm.decision import DEFAULT_CONFIG, TRANSFER_SLACK, Decision, Table, decide, screen
from autogemm.device import Device
from autogemm.errors import InputError
from autogemm.problem import Problem
from autogemm.record import CheckSummary, Row

SQUARE = Problem(m=4096, n=4096, k=4096)


def ask(*rows: Row, problem: Problem = SQUARE, device: Device = H200, **options: object) -> Decision:
    return decide(problem, device, Table.of(rows), **options)  # type: ignore[arg-type]


def test_a_measured_row_of_the_shape_is_run() -> None:
    decision = ask(measured(4096, 4096, 4096, ratio=1.04))
    assert (decision.source, decision.config, decision.status) == ("exact", CONFIG, "measured")
    assert decision.slowdown_bound == pytest.approx(1 / 1.04)
    assert "1.040" in decision.reason


def test_a_row_measured_slower_than_cublas_runs_cublas_and_says_so() -> None:
    decision = ask(measured(4096, 4096, 4096, ratio=0.97), unmeasured=True)
    assert (decision.source, decision.config) == ("torch", None)
    assert "cuBLAS is faster" in decision.reason and "0.970" in decision.reason


def test_the_algorithm_that_a_row_names_is_run() -> None:
    row = with_algorithm(measured(4096, 4096, 4096, ratio=1.05), lead=1.02)
    decision = ask(row)
    assert (decision.source, decision.runs, decision.config, decision.algorithm) == ("exact", "cublaslt", None, algorithm_of())
    assert decision.status == "measured" and decision.slowdown_bound == pytest.approx(1 / (1.05 * 1.02))
    assert "cuBLASLt's algorithm measured 1.071" in decision.reason and "the best kernel measured 1.050" in decision.reason
    assert str(decision).startswith("4096x4096x4096 float16 NT: exact -> lt66_t393_s35_c0 of cuBLASLt 130100")
    assert json.loads(json.dumps(decision.to_json()))["algorithm"]["data"] == algorithm_of().data


@pytest.mark.parametrize(("ratio", "runs"), [(1.05, "autogemm"), (0.95, "cublas")])
def test_without_the_library_of_its_version_the_next_best_runs_with_one_notice(ratio: float, runs: str) -> None:
    rows = [with_algorithm(measured(m, 4096, 4096, ratio=ratio), lead=1.1) for m in (64, 4096)]
    for version, what in ((130200, "is version 130200"), (0, "is missing")):
        device = replace(H200, cublaslt=version)
        decision = ask(*rows, device=device)
        assert decision.runs == runs and decision.algorithm is None and decision.row == rows[1]
        assert f"its cuBLASLt algorithm is of version 130100, the library here {what}" in decision.reason
        (notice,) = screen(Table.of(rows), device)
        assert notice.cause == "cublaslt" and notice.rows == 2 and what in notice.text and not notice.skipped
    # Where the version is not known, as for a GPU that is elsewhere, the row is believed.
    assert ask(*rows, device=replace(H200, cublaslt=None)).runs == "cublaslt"
    assert screen(Table.of(rows), H200) == ()


def test_an_algorithm_is_for_dense_rows_and_the_whole_gpu() -> None:
    row = with_algorithm(measured(4096, 4096, 4096, ratio=1.05), lead=1.02)
    assert ask(row, dense=False).runs == "cublas"
    budget = ask(replace(row, key=replace(row.key, sm_count=100)), sm_count=100)
    assert (budget.runs, budget.sm_count) == ("autogemm", 100) and "no SM budget" in budget.reason
    whole = ask(row, sm_count=100)
    assert (whole.source, whole.runs, whole.sm_count) == ("nearest", "autogemm", 100)


def test_an_algorithm_runs_although_the_kernel_beside_it_may_not() -> None:
    failed = CheckSummary(level="tile", shape=None, schedules=1, model="m", findings=("race",))
    row = replace(with_algorithm(measured(4096, 4096, 4096)), check=failed)
    assert ask(row).runs == "cublaslt"
    assert ask(row, device=replace(H200, cublaslt=1)).runs == "cublas"


def test_a_neighbour_bounds_by_its_kernels_own_time_not_by_its_algorithms() -> None:
    problem = Problem(m=40, n=4096, k=4096)
    plain = ask(*_around_decode(), problem=problem)
    assert plain.source == "nearest"
    same = ask(*(with_algorithm(row, lead=1.5) for row in _around_decode()), problem=problem)
    assert (same.runs, same.config, same.slowdown_bound) == ("autogemm", plain.config, plain.slowdown_bound)
    assert same.regret_bound is not None and plain.regret_bound is not None and same.regret_bound > plain.regret_bound


def test_measured_is_preferred_to_predicted_in_any_order() -> None:
    rows = [measured(4096, 4096, 4096, config=SKINNY), predicted(4096, 4096, 4096)]
    for order in (rows, rows[::-1]):
        decision = ask(*order, unmeasured=True)
        assert (decision.status, decision.config) == ("measured", SKINNY)


def test_a_measured_neighbour_with_a_bound_is_preferred_to_a_predicted_row_of_the_shape() -> None:
    rows = [predicted(32, 4096, 4096), *_around_decode()]
    decision = ask(*rows, problem=Problem(m=32, n=4096, k=4096), unmeasured=True)
    assert (decision.source, decision.status) == ("nearest", "measured")


def test_a_predicted_row_runs_only_if_unmeasured_picks_are_allowed() -> None:
    refused = ask(predicted(4096, 4096, 4096))
    assert (refused.source, refused.config, refused.status) == ("torch", None, "predicted")
    assert "predicted by closed-form-1, not measured" in refused.reason
    allowed = ask(predicted(4096, 4096, 4096), unmeasured=True)
    assert (allowed.source, allowed.config, allowed.slowdown_bound) == ("exact", CONFIG, None)


def test_without_rows_torch_runs_and_the_default_config_only_if_allowed() -> None:
    assert ask().source == "torch"
    decision = ask(unmeasured=True)
    assert (decision.source, decision.config, decision.row) == ("default", DEFAULT_CONFIG["sm_90a"], None)
    assert "not measured" in decision.reason


def _around_decode() -> list[Row]:
    # Measured on an H200: the kernel of M=128 takes 9.06 us where cuBLAS needs 10.28 us even for M=16.
    return [
        measured(128, 4096, 4096, kernel_us=9.06, ratio=1.482, config=SKINNY),
        measured(16, 4096, 4096, kernel_us=8.22, ratio=1.25, config=SKINNY),
    ]


def test_a_neighbour_is_run_where_its_time_is_bounded_by_cublas_on_a_smaller_shape() -> None:
    decision = ask(*_around_decode(), problem=Problem(m=40, n=4096, k=4096))
    assert (decision.source, decision.config) == ("nearest", SKINNY)
    assert decision.slowdown_bound == pytest.approx(9.07 * (1 + TRANSFER_SLACK) / (8.22 * 1.001 * 1.25), rel=2e-3)
    assert decision.slowdown_bound is not None and decision.slowdown_bound <= 1
    assert decision.regret_bound == pytest.approx(9.06 * (1 + TRANSFER_SLACK) / 8.22 - 1, rel=2e-2)
    assert "128x4096x4096" in decision.reason and "16x4096x4096" in decision.reason


@pytest.mark.parametrize(
    "problem", [Problem(m=200, n=4096, k=4096), Problem(m=8, n=4096, k=4096), Problem(m=40, n=4104, k=4096)]
)
def test_a_neighbour_that_bounds_nothing_leaves_the_shape_to_torch(problem: Problem) -> None:
    assert ask(*_around_decode(), problem=problem).source == "torch"


def test_neighbours_both_faster_than_cublas_are_no_evidence_if_they_are_far_apart() -> None:
    # The best Config of 4096 runs at 0.74 of cuBLAS's speed on 2048 though both rows are above 1.
    rows = [measured(4096, 4096, 4096, kernel_us=181, ratio=1.05), measured(1024, 4096, 4096, kernel_us=46, ratio=1.05)]
    assert ask(*rows, problem=Problem(m=2048, n=4096, k=4096)).source == "torch"


def test_a_neighbour_of_another_family_gpu_or_sm_count_is_never_used() -> None:
    problem = Problem(m=40, n=4096, k=4096)
    for changes in ({"sm_count": 114}, {"dtype_d": "bfloat16"}, {"dtype": "bfloat16"}):
        rows = [measured(m, 4096, 4096, kernel_us=9, ratio=1.5, **changes) for m in (16, 128)]  # type: ignore[arg-type]
        assert ask(*rows, problem=problem).source == "torch", changes


def test_a_neighbour_is_checked_for_legality_on_the_real_shape() -> None:
    rows = _around_decode()
    decision = ask(*rows, problem=Problem(m=40, n=4090, k=4096))
    assert decision.source == "torch" and "multiple of 16" in decision.reason


@pytest.mark.parametrize(
    "asked",
    [
        Problem(m=4096, n=4096, k=4096, layout="NN"),
        Problem(m=4096, n=4096, k=4096, dtype="bfloat16"),
        Problem(m=4096, n=8192, k=8192),
        Problem(m=8192, n=4096, k=4096),
        Problem(m=4096, n=4096, k=4104),
    ],
)
def test_a_row_that_differs_in_any_field_is_never_an_exact_hit(asked: Problem) -> None:
    decision = ask(measured(4096, 4096, 4096), problem=asked, unmeasured=True)
    assert decision.source != "exact"


def test_rows_apart_in_memory_are_not_an_exact_hit() -> None:
    row = measured(4096, 4096, 4096)
    refused = ask(row, dense=False)
    assert refused.source == "torch" and "strides" in refused.reason
    assert ask(row, dense=False, unmeasured=True).source == "nearest"


def test_a_row_that_fails_its_own_legality_or_check_is_refused_with_the_reason() -> None:
    illegal = Config(blk_m=128, blk_n=256, pipe_depth=40, num_consumer=2, epi_n=64)
    decision = ask(measured(4096, 4096, 4096, config=illegal))
    assert decision.source == "torch" and "PIPE_DEPTH=40" in decision.reason
    check = CheckSummary(level="tile", shape=(256, 256, 256), schedules=1, model="machine-1", findings=("race",))
    decision = ask(replace(measured(4096, 4096, 4096), check=check))
    assert decision.source == "torch" and "race" in decision.reason


def test_rows_of_another_sm_count_are_skipped_with_one_notice_that_names_them() -> None:
    small = replace(H200, sm_count=114)
    rows = [measured(4096, 4096, 4096), measured(8192, 8192, 8192)]
    (notice,) = screen(Table.of(rows), small)
    assert (notice.cause, notice.rows, notice.skipped) == ("sm-count", 2, True)
    assert "4096x4096x4096" in notice.text and "132 SMs" in notice.text and "114" in notice.text
    assert ask(*rows, device=small).source == "torch"
    # The reverse: rows of 114 SMs on a GPU of 132, none of which was tuned for the whole of it.
    few = [measured(4096, 4096, 4096, device=small)]
    assert [n.cause for n in screen(Table.of(few), H200)] == ["sm-count"]
    decision = ask(*few)
    assert decision.source == "torch" and "114 SMs" in decision.reason
    assert ask(*few, device=small).source == "exact"  # correcting the field is enough


def test_rows_of_an_sm_budget_beside_rows_of_the_whole_gpu_are_no_mismatch() -> None:
    rows = [measured(4096, 4096, 4096), measured(4096, 4096, 4096, sm_count=100, config=SKINNY)]
    assert screen(Table.of(rows), H200) == ()
    assert ask(*rows, sm_count=100).config == SKINNY
    assert ask(*rows).config == CONFIG


def test_a_budget_without_rows_runs_the_kernel_of_the_whole_gpu_within_the_budget() -> None:
    decision = ask(measured(4096, 4096, 4096), sm_count=100)
    assert (decision.source, decision.sm_count, decision.slowdown_bound) == ("nearest", 100, None)
    assert ask(measured(4096, 4096, 4096, ratio=0.9), sm_count=100).source == "torch"
    assert ask(measured(4096, 4096, 4096), sm_count=1).source == "torch"  # a cluster of 2 does not fit


@pytest.mark.parametrize("budget", [0, -1, 133, True, 1.5, "all"])
def test_an_impossible_budget_is_one_clear_error(budget: object) -> None:
    with pytest.raises(InputError, match="sm_count must be an integer from 1 to the 132 SMs"):
        ask(measured(4096, 4096, 4096), sm_count=budget)


def test_rows_of_another_gpu_are_a_notice_only_where_this_one_has_none() -> None:
    b200 = Device.of_gpu("nvidia-b200")
    other = predicted(4096, 4096, 4096, config=DEFAULT_CONFIG["sm_100a"], device=b200)
    assert screen(Table.of([other, measured(4096, 4096, 4096)]), H200) == ()
    (notice,) = screen(Table.of([other]), H200)
    assert notice.cause == "gpu" and "nvidia-b200" in notice.text
    assert ask(other).source == "torch"


def test_rows_measured_under_other_conditions_are_used_with_one_notice() -> None:
    now = replace(H200, driver="590.2", torch="2.12.0", power_limit_w=500.0)
    (notice,) = screen(Table.of([measured(4096, 4096, 4096)]), now)
    assert (notice.cause, notice.skipped) == ("environment", False)
    for part in ("driver was 580.1, is 590.2", "torch was 2.11.0, is 2.12.0", "700 W", "500 W"):
        assert part in notice.text
    assert ask(measured(4096, 4096, 4096), device=now).source == "exact"
    assert screen(Table.of([measured(4096, 4096, 4096)]), H200) == ()


def test_a_gpu_without_generated_kernels_runs_torch() -> None:
    decision = ask(measured(4096, 4096, 4096), device=Device(arch=None, gpu="nvidia-a100", sm_count=108, name="A100"))
    assert decision.source == "torch" and "A100" in decision.reason


def test_of_two_rows_for_one_key_the_later_wins_whatever_the_order() -> None:
    rows = [measured(4096, 4096, 4096, config=c, date=f"2026-11-{d}T00:00:00Z") for c, d in ((CONFIG, "10"), (SKINNY, "20"))]
    assert ask(*rows).config == ask(*rows[::-1]).config == SKINNY


def _ragged_rows() -> list[Row]:
    draw = random.Random(7)
    rows = []
    for _ in range(60):
        m, n, k = (draw.choice((16, 64, 128, 512, 1024, 4096)) for _ in range(3))
        rows.append(measured(m, n, k, kernel_us=draw.uniform(5, 50), ratio=draw.choice((0.9, 1.0, 1.3)),
                             config=draw.choice((CONFIG, SKINNY)), date=f"2026-11-{draw.randint(10, 29)}"))  # fmt: skip
    return rows


def test_the_choice_does_not_depend_on_the_order_of_rows() -> None:
    rows = _ragged_rows()
    problems = [Problem(m=m, n=n, k=k) for m in (16, 40, 100, 4096) for n in (64, 512, 1000) for k in (128, 2048)]
    expected = [ask(*rows, problem=p) for p in problems]
    for seed in range(5):
        random.Random(seed).shuffle(rows)
        assert [ask(*rows, problem=p) for p in problems] == expected


def test_processes_with_other_hash_seeds_choose_byte_for_byte_the_same() -> None:
    program = (
        "import json, sys; sys.path.insert(0, 'tests')\n"
        "from test_decision import _ragged_rows, ask\n"
        "from autogemm.problem import Problem\n"
        "rows = _ragged_rows()\n"
        "asked = [Problem(m=m, n=n, k=128) for m in (16, 40, 100) for n in (64, 1000)]\n"
        "print(json.dumps([ask(*rows, problem=p).to_json() for p in asked]))\n"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/".join(__file__.split("/")[:-2]),
            env={"PYTHONHASHSEED": str(seed), "PATH": ""},
        ).stdout
        for seed in range(2)
    }  # fmt: skip
    assert len(texts) == 1 and len(json.loads(texts.pop())) == 6


def test_a_pick_is_never_a_kernel_measured_slower_and_its_bound_never_above_one() -> None:
    rows = _ragged_rows()
    for m in (1, 16, 17, 64, 100, 512, 3000):
        for n in (8, 64, 1000, 4096):
            decision = ask(*rows, problem=Problem(m=m, n=n, k=512))
            if decision.config is not None:
                assert decision.row is not None and decision.row.choice == "autogemm" and decision.status == "measured"
                assert decision.slowdown_bound is not None and decision.slowdown_bound <= 1


def test_a_decision_says_everything_in_json() -> None:
    document = json.loads(json.dumps(ask(measured(4096, 4096, 4096)).to_json()))
    assert document["source"] == "exact" and document["config"]["BLK_N"] == 256 and document["config_id"] == CONFIG.id
    assert document["row"] == str(key_of(4096, 4096, 4096)) and document["status"] == "measured"
    assert PROVENANCE.generator not in document["reason"]


def _recorded() -> list[tuple[Problem, list[float], float]]:
    """Return (problem, seconds per config, cuBLAS seconds) of 24 shapes recorded on an H200."""
    document = json.loads((Path(__file__).parent / "data" / "h200_landscape.json").read_text())
    return [(Problem(m=s["m"], n=s["n"], k=s["k"]), s["config_us"], s["cublas_us"]) for s in document["shapes"]]


def _inside(one: Problem, other: Problem) -> bool:
    return one != other and one.m <= other.m and one.n <= other.n and one.k <= other.k


def test_recorded_times_grow_with_the_shape_up_to_the_slack_that_the_bound_allows() -> None:
    shapes = _recorded()
    pairs = [(one, other) for one in shapes for other in shapes if _inside(one[0], other[0])]
    assert len(pairs) > 100
    for (_, times, baseline), (_, larger_times, larger_baseline) in pairs:
        best = min(range(len(larger_times)), key=larger_times.__getitem__)
        assert times[best] <= larger_times[best] * (1 + TRANSFER_SLACK)
        assert baseline <= larger_baseline * 1.06


def test_the_nearest_shape_by_distance_would_make_recorded_products_slower() -> None:
    # Why a neighbour needs a bound: its best Config, though faster than cuBLAS at home, is slower than it here.
    def octaves(one: Problem, other: Problem) -> float:
        return sum(abs(math.log2(x / y)) for x, y in ((one.m, other.m), (one.n, other.n), (one.k, other.k)))

    slower = 0
    for problem, times, baseline in _recorded():
        others = [shape for shape in _recorded() if shape[0] != problem and min(shape[1]) <= shape[2]]
        _, near_times, _ = min(others, key=lambda shape: octaves(problem, shape[0]))
        slower += times[min(range(len(near_times)), key=near_times.__getitem__)] > baseline
    assert slower == 14


def test_of_the_recorded_shapes_no_neighbour_is_taken_that_is_slower_than_cublas() -> None:
    count = len(_recorded()[0][1])
    stand_ins = [replace(SKINNY, l2_group_size=1 + i % 64, epi_n=16 if i > 63 else 32) for i in range(count)]
    for problem, times, baseline in _recorded():
        rows = [
            measured(p.m, p.n, p.k, kernel_us=min(t), ratio=b / min(t), samples=1, config=stand_ins[t.index(min(t))])
            for p, t, b in _recorded()
            if p != problem
        ]
        decision = ask(*rows, problem=problem)
        if decision.config is not None:
            assert times[stand_ins.index(decision.config)] <= baseline, problem
