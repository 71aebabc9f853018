"""Isolation: real worker processes, with a service that hangs, dies or reports CUDA errors on request."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cublaslt_fakes import algorithm_of
from fakes import make_binary

from autogemm.config import Config
from autogemm.errors import InputError, LaunchError
from autogemm.measure.device_bench import DeviceBench
from autogemm.measure.faults import TrialFault
from autogemm.measure.timer import BASELINE, CUBLASLT
from autogemm.measure.worker import Worker, WorkerError
from autogemm.problem import Problem
from autogemm.results import Outcome

SERVICE = "fake_service:FakeService"
PROBLEM = Problem(m=4096, n=4096, k=4096)
CONFIG = Config(blk_m=128, blk_n=128, pipe_depth=4, epi_n=64)


@pytest.fixture
def bench() -> Iterator[DeviceBench]:
    made = DeviceBench(PROBLEM, service=SERVICE, trial_timeout_s=1.5, round_timeout_s=3.0, memory_used=lambda: None)
    yield made
    made.close()


def admit(bench: DeviceBench, name: str, behaviour: str) -> Outcome:
    return bench.admit(name, make_binary(behaviour.encode()), CONFIG).outcome


def gone(pid: int) -> bool:
    """Return whether the process has ended, reaped or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@pytest.mark.parametrize(
    ("behaviour", "outcome", "restarts"),
    [
        ("hang", Outcome.TIMEOUT, 1),
        ("abort", Outcome.ABORT, 1),
        ("segfault", Outcome.ABORT, 1),
        ("exit", Outcome.ABORT, 1),
        ("illegal_access", Outcome.ILLEGAL_ACCESS, 1),
        ("illegal_instruction", Outcome.ILLEGAL_INSTRUCTION, 1),
        ("trap", Outcome.ABORT, 1),
        ("bad_launch", Outcome.LAUNCH_FAILED, 0),
        ("bad_launch_broken", Outcome.ILLEGAL_ACCESS, 1),
        ("wrong", Outcome.INCORRECT, 0),
    ],
)
def test_a_bad_candidate_costs_one_trial_and_no_other(
    bench: DeviceBench, behaviour: str, outcome: Outcome, restarts: int
) -> None:
    assert admit(bench, "before", "ok:2e-5") is Outcome.OK
    assert admit(bench, "bad", behaviour) is outcome
    assert admit(bench, "after", "ok:3e-5") is Outcome.OK
    assert bench.round(["before", "bad", "after"]) == {BASELINE: 1e-5, "before": 2e-5, "after": 3e-5}
    assert bench.restarts == restarts and list(bench.failures) == ["bad"]


def test_says_what_the_worker_died_of(bench: DeviceBench) -> None:
    reason = bench.admit("bad", make_binary(b"abort"), CONFIG).reason
    assert "SIGABRT" in reason and "free(): invalid pointer" in reason
    assert "within 1.5 s" in bench.admit("slow", make_binary(b"hang"), CONFIG).reason


def test_a_hung_worker_is_killed_and_reaped(bench: DeviceBench) -> None:
    pid = bench._call("pid", timeout_s=5)
    start = time.monotonic()
    assert admit(bench, "bad", "hang") is Outcome.TIMEOUT
    assert gone(pid) and time.monotonic() - start < 30
    assert bench._call("pid", timeout_s=60) != pid


@pytest.mark.parametrize("behaviour", ["late_hang", "late_abort", "late_illegal_access"])
def test_a_candidate_that_fails_in_a_round_is_blamed_and_the_others_are_not(bench: DeviceBench, behaviour: str) -> None:
    for name, does in (("a", "ok:2e-5"), ("bad", behaviour), ("b", "ok:3e-5")):
        assert admit(bench, name, does) is Outcome.OK
    times = bench.round(["a", "bad", "b"])
    assert times == {BASELINE: 1e-5, "a": 2e-5, "b": 3e-5}
    assert list(bench.failures) == ["bad"]
    assert bench.round(["a", "bad", "b"]) == times
    assert len(bench.notes) == 1


def test_nobody_is_blamed_for_a_fault_that_no_kernel_shows_alone(bench: DeviceBench) -> None:
    for name, does in (("a", "ok:2e-5"), ("odd", "rare_illegal_access:3e-5")):
        assert admit(bench, name, does) is Outcome.OK
    assert bench.round(["a", "odd"]) == {BASELINE: 1e-5, "a": 2e-5, "odd": 3e-5}
    assert not bench.failures and "one kernel at a time" in bench.notes[0]


def test_the_gpu_is_warmed_up_in_the_worker(bench: DeviceBench) -> None:
    assert bench.round([]) == {BASELINE: 1e-5}
    bench.warm_up(0.25)
    assert bench.round([]) == {BASELINE: pytest.approx(0.25 + 1e-5)}


def test_the_algorithm_found_is_the_one_that_a_new_worker_times(bench: DeviceBench) -> None:
    found = bench.admit_cublaslt()
    assert found.tried == 8 and admit(bench, "ok", "ok:2e-5") is Outcome.OK
    expected = {BASELINE: 1e-5, "ok": 2e-5, CUBLASLT: pytest.approx(1e-6 * found.algorithm.algo_id)}
    assert bench.round(["ok", CUBLASLT]) == expected
    assert admit(bench, "bad", "abort") is Outcome.ABORT
    assert bench.round(["ok", CUBLASLT]) == expected and bench.restarts == 1


def test_an_algorithm_that_is_wrong_fails_or_is_not_to_be_found_costs_the_kernels_nothing(bench: DeviceBench) -> None:
    assert admit(bench, "ok", "ok:2e-5") is Outcome.OK
    assert bench.admit_algorithm(algorithm_of(1235)).outcome is Outcome.INCORRECT
    assert bench.round(["ok", CUBLASLT]) == {BASELINE: 1e-5, "ok": 2e-5}
    assert bench.admit_algorithm(algorithm_of(1234)).outcome is Outcome.OK
    assert bench.round(["ok", CUBLASLT]) == {BASELINE: 1e-5, "ok": 2e-5}
    assert bench.failures[CUBLASLT].outcome is Outcome.ABORT
    bench.open(replace(PROBLEM, k=64))
    with pytest.raises(InputError, match="accurately"):
        bench.admit_cublaslt()
    with pytest.raises(InputError, match="never admitted"):
        bench.round([CUBLASLT])


def test_many_bad_candidates_among_good_ones(bench: DeviceBench) -> None:
    behaviours = ["ok:1e-5", "illegal_access", "ok:2e-5", "abort", "wrong", "ok:3e-5", "trap", "ok:4e-5"]
    outcomes = [admit(bench, str(i), does) for i, does in enumerate(behaviours)]
    assert [i for i, o in enumerate(outcomes) if o is Outcome.OK] == [0, 2, 5, 7]
    assert sorted(bench.round([str(i) for i in range(8)])) == ["0", "2", "5", "7", BASELINE]


def test_turning_to_another_problem_keeps_the_worker_and_forgets_the_candidates(bench: DeviceBench) -> None:
    pid = bench._call("pid", timeout_s=5)
    admit(bench, "a", "ok")
    bench.open(Problem(m=256, n=256, k=64))
    assert bench._call("pid", timeout_s=5) == pid
    with pytest.raises(InputError, match="a was never admitted"):
        bench.round(["a"])


def test_the_next_problem_begins_in_a_new_worker_if_the_last_candidate_killed_its_own(bench: DeviceBench) -> None:
    assert admit(bench, "bad", "abort") is Outcome.ABORT
    bench.open(Problem(m=256, n=256, k=64))
    assert not bench.failures and bench.restarts == 1
    assert admit(bench, "bad", "ok:2e-5") is Outcome.OK and bench.round(["bad"])["bad"] == 2e-5


def test_cold_rounds_are_told_from_warm_ones(bench: DeviceBench) -> None:
    admit(bench, "a", "ok:2e-5")
    assert bench.timer(cold=True).round(["a"])["a"] == pytest.approx(6e-5)
    assert bench.cold_round(["a"])["a"] == pytest.approx(6e-5)
    assert bench.timer().round(["a"])["a"] == pytest.approx(2e-5)


def test_input_errors_and_bugs_of_the_worker_are_not_trial_faults(bench: DeviceBench) -> None:
    with pytest.raises(InputError, match="for another dtype"):
        admit(bench, "a", "refused")
    with pytest.raises(WorkerError, match="ZeroDivisionError: a bug of ours"):
        admit(bench, "a", "bug")
    with pytest.raises(InputError, match="reserved"):
        admit(bench, BASELINE, "ok")
    assert admit(bench, "a", "ok") is Outcome.OK and bench.restarts == 0


def test_waits_until_the_dead_workers_memory_is_given_back() -> None:
    levels = iter([100 << 20, 9 << 30, 9 << 30, 120 << 20])
    asked = []

    def used() -> int:
        asked.append(next(levels))
        return asked[-1]

    with DeviceBench(PROBLEM, service=SERVICE, trial_timeout_s=1.5, memory_used=used) as bench:
        admit(bench, "bad", "abort")
        admit(bench, "good", "ok")
    assert asked == [100 << 20, 9 << 30, 9 << 30, 120 << 20]


def test_a_problem_that_is_refused_or_kills_the_worker_is_nobodys_fault() -> None:
    with pytest.raises(InputError, match="13 is not taken"):
        DeviceBench(replace(PROBLEM, m=13), service=SERVICE, memory_used=lambda: None)
    with pytest.raises(LaunchError, match="no worker could be started"):
        DeviceBench(replace(PROBLEM, m=14), service=SERVICE, memory_used=lambda: None)


def test_a_worker_ends_with_its_parents_handle() -> None:
    worker = Worker(SERVICE)
    pid = worker.call("pid", timeout_s=60)
    worker.kill()
    assert gone(pid) and not worker.alive


def test_a_worker_ends_when_its_parent_is_gone() -> None:
    """Even while it is busy: the pipe whose other end the parent held is watched by a thread."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        worker = Worker(SERVICE)
        os.write(writer, str(worker.call("pid", timeout_s=60)).encode())
        worker._connection.send(("admit", ("x", make_binary(b"hang"), 8, None)))
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    pid = int(os.read(reader, 20))
    os.waitpid(child, 0)
    until = time.monotonic() + 20
    while not gone(pid):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_fault_is_an_exception_that_says_what_it_is() -> None:
    worker = Worker(SERVICE)
    try:
        worker.call("open", PROBLEM, 0, None, timeout_s=60)
        with pytest.raises(TrialFault) as caught:
            worker.call("admit", "x", make_binary(b"illegal_instruction"), 8, None, timeout_s=10)
        assert caught.value.fault.outcome is Outcome.ILLEGAL_INSTRUCTION and caught.value.fault.sticky
        assert not worker.alive
    finally:
        worker.kill()
