"""Timers, the correctness gate and the classes of failure, on the CPU."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable

import pytest
import torch

from autogemm.errors import InputError, LaunchError
from autogemm.measure import cuda_timer
from autogemm.measure.correctness import (
    GUARD_BYTES,
    GuardedOutput,
    Operands,
    check,
    error_limit,
    integer_operands,
    random_operands,
    relative_error,
)
from autogemm.measure.cuda_timer import (
    BASELINE_EVERY,
    COLD_L2_SIZES,
    LEAD_IN_RESTED_S,
    LEAD_IN_S,
    LONG_SAMPLE_S,
    MAX_SETS,
    REST_S,
    CudaTimer,
    cold_sets,
)
from autogemm.measure.faults import TrialFault, classify, death
from autogemm.measure.timer import BASELINE, ScriptedTimer
from autogemm.problem import Problem
from autogemm.results import Outcome
from autogemm.runtime.driver import DriverError

PROBLEM = Problem(m=70, n=104, k=136)


def operands(problem: Problem = PROBLEM, *, exact: bool, seed: int = 0) -> Operands:
    make = integer_operands if exact else random_operands
    return make(problem, getattr(torch, problem.dtype), torch.Generator().manual_seed(seed))


def good(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_((a.float() @ b.float().T).to(out.dtype))


def output(problem: Problem = PROBLEM) -> GuardedOutput:
    return GuardedOutput(problem, getattr(torch, problem.dtype), torch.device("cpu"))


def refused(run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object], *, exact: bool = True) -> str:
    with pytest.raises(TrialFault) as caught:
        check(run, operands(exact=exact), output())
    assert caught.value.fault.outcome is Outcome.INCORRECT and not caught.value.fault.sticky
    return caught.value.fault.detail


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_right_kernel_passes_with_its_error(dtype: str) -> None:
    problem = Problem(m=70, n=104, k=136, dtype=dtype)
    assert check(good, operands(problem, exact=True), output(problem)) == 0.0
    drawn = operands(problem, exact=False)
    error = check(good, drawn, output(problem))
    exact = drawn.a.double() @ drawn.b.double().T
    got = (drawn.a.float() @ drawn.b.float().T).to(drawn.a.dtype).double()
    assert error == pytest.approx(float((got - exact).norm() / exact.norm()), rel=1e-3)


def test_bfloat16_integers_beyond_256_must_match_once_rounded() -> None:
    problem = Problem(m=16, n=16, k=20000, dtype="bfloat16")
    drawn = operands(problem, exact=True)
    assert int(drawn.expected.float().abs().max()) > 256
    assert check(good, drawn, output(problem)) == 0.0


def test_columns_that_were_never_written_are_found_though_a_right_kernel_ran_before() -> None:
    reused = output()
    check(good, operands(exact=True), reused)

    def skips(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        out[:, :96] = (a.float() @ b.float().T).to(out.dtype)[:, :96]

    with pytest.raises(TrialFault, match=r"560 of 7280 integer results are wrong, first at \[0, 96\]; 560 were never written"):
        check(skips, operands(exact=True), reused)
    assert "560 elements hold NaN" in refused(skips, exact=False)


def test_one_wrong_integer_is_found() -> None:
    def off_by_one(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        good(a, b, out)
        out[69, 103] += 1

    assert refused(off_by_one) == "1 of 7280 integer results are wrong, first at [69, 103]"


def test_a_store_outside_of_the_output_is_found() -> None:
    for offset in (-2, -GUARD_BYTES, 70 * 104 * 2, 70 * 104 * 2 + GUARD_BYTES - 2):
        guarded = output()

        def strays(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, at: int = offset, into: GuardedOutput = guarded
        ) -> None:
            good(a, b, out)
            into._buffer[GUARD_BYTES + at] = 0

        with pytest.raises(TrialFault, match="stored outside the output"):
            check(strays, operands(exact=True), guarded)


def test_a_changed_operand_is_found() -> None:
    def changes(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        good(a, b, out)
        b[103, 135] += 1

    assert "changed its operands" in refused(changes)


def test_the_sum_of_too_few_products_is_found_in_random_operands() -> None:
    def misses(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        good(a[:, :128], b[:, :128], out)

    assert "relative error" in refused(misses, exact=False)


def test_the_error_may_be_little_more_than_that_of_torch() -> None:
    drawn = operands(exact=False)
    assert error_limit(drawn) == max(1.1 * drawn.baseline_error, 2.0**-11)
    assert 1e-4 < drawn.baseline_error < 3e-4


def test_relative_error_of_nan_is_nan_and_of_zero_expected_is_absolute() -> None:
    assert relative_error(torch.full((2, 2), float("nan")), torch.ones(2, 2)) != relative_error(
        torch.ones(2, 2), torch.ones(2, 2)
    )
    assert relative_error(torch.full((2, 2), 0.5), torch.zeros(2, 2)) == 1.0


def test_operands_are_the_same_for_a_seed_and_differ_otherwise() -> None:
    assert torch.equal(operands(exact=False, seed=3).a, operands(exact=False, seed=3).a)
    assert not torch.equal(operands(exact=False, seed=3).a, operands(exact=False, seed=4).a)


def test_cold_operand_sets_exceed_twice_the_cache_or_stop_at_the_limit() -> None:
    l2 = 60 << 20
    for size in (1 << 20, 5 << 20, 33 << 20, 200 << 20, 3 << 30):
        count = cold_sets(size, l2)
        assert 2 <= count <= MAX_SETS
        # Between two calls on one set, the others are touched.
        assert (count - 1) * size >= COLD_L2_SIZES * l2 or count == MAX_SETS
    assert cold_sets(1000, l2) == MAX_SETS


def test_a_gpu_that_rested_is_brought_back_to_what_it_can_sustain_before_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = CudaTimer.__new__(CudaTimer)
    timer._sample_long_s, timer._busy_until = 4e-4, 100.0
    monkeypatch.setattr(cuda_timer.time, "monotonic", lambda: 100.0 + REST_S / 2)
    assert timer._lead_in() * 4e-4 == pytest.approx(LEAD_IN_S, abs=4e-4) and timer._lead_in() >= 1
    monkeypatch.setattr(cuda_timer.time, "monotonic", lambda: 100.0 + REST_S * 2)
    assert timer._lead_in() * 4e-4 == pytest.approx(LEAD_IN_RESTED_S, abs=4e-4)
    timer._sample_long_s = LONG_SAMPLE_S * 2  # a sample that long is its own lead-in
    assert timer._lead_in() == 0


def test_a_pass_holds_every_name_once_in_changing_order_with_baselines_between() -> None:
    timer = CudaTimer.__new__(CudaTimer)
    timer._random, timer._sample_long_s = random.Random(0), 4e-4
    names = [str(i) for i in range(40)]
    first, second = timer._pass(names), timer._pass(names)
    assert first != second
    for order in (first, second):
        assert sorted(n for n in order if n != BASELINE) == sorted(names)
        at = [i for i, n in enumerate(order) if n == BASELINE]
        assert len(at) == 5 and all(b - a <= 2 * (BASELINE_EVERY + 1) for a, b in itertools.pairwise(at))
    assert sorted(timer._pass(["a"])) == ["a", BASELINE] and timer._pass([]) == [BASELINE]
    places = {timer._pass(["a"]).index(BASELINE) for _ in range(50)}
    assert places == {0, 1}


def test_few_names_are_sampled_in_several_passes_unless_they_take_long() -> None:
    timer = CudaTimer.__new__(CudaTimer)
    timer._sample_long_s = 4e-4
    assert [timer._passes(n) for n in (1, 2, 4, 9, 60)] == [8, 4, 2, 1, 1]
    timer._sample_long_s = 0.1
    assert timer._passes(2) == 1


def test_scripted_samples_repeat_for_a_seed_and_scatter_around_the_true_times() -> None:
    def rounds() -> list[dict[str, float]]:
        timer = ScriptedTimer({BASELINE: 1e-4, "a": 9e-5}, noise=0.01, seed=5, drift=lambda i: 1 + 0.01 * i)
        return [timer.round(["a"]) for _ in range(200)]

    first = rounds()
    assert first == rounds()
    assert statistics.median(r["a"] / r[BASELINE] for r in first) == pytest.approx(0.9, rel=0.003)
    assert first[-1][BASELINE] / first[0][BASELINE] == pytest.approx(2.99, rel=0.1)
    with pytest.raises(InputError, match="no kernel 'b'"):
        ScriptedTimer({BASELINE: 1.0}).round(["b"])
    with pytest.raises(InputError, match="needs a time for 'baseline'"):
        ScriptedTimer({"a": 1.0})


@pytest.mark.parametrize(
    ("error", "outcome", "sticky"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), Outcome.ILLEGAL_ACCESS, True),
        (RuntimeError("CUDA error: misaligned address"), Outcome.ILLEGAL_ACCESS, True),
        (RuntimeError("CUDA error: an illegal instruction was encountered"), Outcome.ILLEGAL_INSTRUCTION, True),
        (RuntimeError("CUDA error: unspecified launch failure"), Outcome.ABORT, True),
        (RuntimeError("CUDA error: device-side assert triggered"), Outcome.ABORT, True),
        (RuntimeError("CUDA error: invalid argument"), Outcome.LAUNCH_FAILED, False),
        (DriverError("could not launch", 700), Outcome.ILLEGAL_ACCESS, True),
        (DriverError("could not load", 209), Outcome.LAUNCH_FAILED, False),
        (LaunchError("another arch"), Outcome.LAUNCH_FAILED, False),
    ],
)
def test_cuda_errors_fall_into_classes(error: Exception, outcome: Outcome, sticky: bool) -> None:
    fault = classify(error)
    assert fault is not None and (fault.outcome, fault.sticky) == (outcome, sticky)
    assert "\n" not in fault.detail


def test_errors_that_are_not_cudas_are_no_trial_faults() -> None:
    for error in (ValueError("x"), InputError("bad"), RuntimeError("a mat1 and mat2 shape mismatch")):
        assert classify(error) is None


def test_a_dead_worker_names_its_signal_and_last_words() -> None:
    fault = death(-6, "first\nfree(): invalid pointer\n\n")
    assert fault.outcome is Outcome.ABORT and fault.detail == "the worker was ended by SIGABRT: free(): invalid pointer"
    assert death(3, "").detail == "the worker exited with 3"
