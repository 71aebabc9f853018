"""DeviceSession's arithmetic, with a timer and a clock that are scripted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from cublaslt_fakes import algorithm_of

from autogemm.algorithm import Algorithm
from autogemm.errors import LaunchError, NothingFound
from autogemm.measure import device as module
from autogemm.measure.device import RESTED_S, SEARCH_ROUNDS, SETTLE_RESTED_S, SETTLE_S, DeviceSession
from autogemm.measure.faults import Fault, TrialFault
from autogemm.measure.service import DeviceService
from autogemm.measure.timer import BASELINE, CUBLASLT
from autogemm.problem import Problem
from autogemm.results import Outcome


class Clock:
    """Time that passes only while kernels run: 10 us per call, 700 W."""

    def __init__(self) -> None:
        self.now = 100.0
        self.settled: list[float] = []
        self.calls = 40
        self.counts = True

    def monotonic(self) -> float:
        return self.now

    def replay(self, name: str, seconds: float) -> int:
        self.settled.append(seconds)
        return self.replay_times(name, max(1, round(seconds / (self.calls * 1e-5))))

    def replay_times(self, name: str, repeats: int) -> int:
        self.now += repeats * self.calls * 1e-5
        return repeats * self.calls

    def sustain(self, name: str, seconds: float, watch: Callable[[], None]) -> tuple[int, float]:
        calls = 0
        until = self.now + seconds
        while self.now < until:
            calls += self.replay_times(name, 2)
            watch()
        return calls, calls * 1e-5

    def round(self, names: list[str], *, cold: bool, during: object) -> dict[str, float]:
        self.now += 1e-3
        return {BASELINE: 1e-5}

    def energy_j(self) -> float | None:
        return 700 * round(self.now // 0.07 * 0.07, 6) if self.counts else None  # moves every 70 ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module, "_last_busy", {})
    return made


class Algorithms(DeviceSession):
    """A session in which cuBLASLt's algorithms take times given by their ids; some are refused, some are wrong."""

    def __init__(self, refused: set[int], wrong: set[int]) -> None:
        self.device, self.problem = 0, Problem(m=64, n=128, k=256)
        self.refused, self.wrong = refused, wrong
        self.timed: dict[str, int] = {}
        self.timer = SimpleNamespace(remove=self.timed.pop)  # type: ignore[assignment]
        self.rounds = 0

    def restore(self, algorithm: Algorithm, problem: Problem) -> int:
        if algorithm.algo_id in self.refused:
            raise LaunchError("NOT_SUPPORTED")
        return algorithm.algo_id

    def admit_call(self, name: str, call: object) -> dict[str, float]:
        if call in self.wrong:
            raise TrialFault(Fault(outcome=Outcome.INCORRECT, detail="wrong", sticky=False))
        self.timed[name] = call  # type: ignore[assignment]
        return {"kernel": 2e-4, "baseline": 2e-4}

    def round(self, names: Sequence[str], *, cold: bool = False) -> dict[str, float]:
        self.rounds += 1
        # One disturbed round must not decide.
        return {name: 1e-6 * (1 if self.rounds == 1 else self.timed[name]) for name in names}


def test_the_fastest_accurate_algorithm_that_runs_here_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    offers = [algorithm_of(number) for number in (7, 3, 9, 5, 2)]
    by_hand = [algorithm_of(number) for number in (9, 1)]
    monkeypatch.setattr(module, "offered", lambda lt, problem, dispatchable=True: offers if dispatchable else by_hand)
    made = Algorithms(refused={2}, wrong={3})
    monkeypatch.setattr(module, "cublaslt", lambda device: made)
    found = made.admit_cublaslt()
    assert found.algorithm == algorithm_of(5) and found.tried == 3
    assert made.timed == {CUBLASLT: 5} and made.rounds == SEARCH_ROUNDS
    assert made.admit_algorithm(algorithm_of(9)) == {"kernel": 2e-4, "baseline": 2e-4} and made.timed == {CUBLASLT: 9}
    # A benchmark compares with whatever a user could pick, also where dispatch may not.
    everything = made.admit_cublaslt(dispatchable=False)
    assert everything.algorithm == algorithm_of(1) and everything.tried == 4
    with pytest.raises(NothingFound, match="none of 5 cuBLASLt algorithms"):
        made.wrong = {3, 5, 7, 9}
        made.admit_cublaslt()


def session(clock: Clock) -> DeviceSession:
    made = DeviceSession.__new__(DeviceSession)
    made.device = 0
    made.timer = clock  # type: ignore[assignment]
    made.recorder = SimpleNamespace(nvml=clock, sample=lambda: None)  # type: ignore[assignment]
    made._settled = False
    return made


def test_joules_per_call_are_counted_from_step_to_step_of_the_counter(clock: Clock) -> None:
    assert session(clock).energy_j("a", seconds=0.5) == pytest.approx(700 * 1e-5, rel=0.02)
    clock.now += 0.033
    assert session(clock).energy_j("a", seconds=0.3) == pytest.approx(700 * 1e-5, rel=0.02)
    assert session(clock).energy_j("a", seconds=0.05) is None  # the counter did not move twice


def test_there_are_no_joules_where_the_gpu_does_not_count_them(clock: Clock) -> None:
    clock.counts = False
    assert session(clock).energy_j("a") is None


def test_a_rested_gpu_works_longer_before_the_first_round(clock: Clock) -> None:
    first = session(clock)
    for _ in range(3):
        first.round([])
    session(clock).round([])
    clock.now += RESTED_S + 1
    first.round([])
    assert clock.settled == [SETTLE_RESTED_S, SETTLE_S, SETTLE_RESTED_S]


def test_a_kernel_whose_workspace_does_not_fit_costs_one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[str] = []
    freed: list[bool] = []

    def refuse(*arguments: object) -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    service = DeviceService()
    service._session = SimpleNamespace(admit=refuse, forget=forgotten.append)  # type: ignore[assignment]
    with pytest.raises(TrialFault, match="not enough device memory: CUDA out of memory. Tried to allocate 2.00 GiB") as caught:
        service.admit("x", None, None, None)  # type: ignore[arg-type]
    assert caught.value.fault.outcome is Outcome.LAUNCH_FAILED and not caught.value.fault.sticky
    assert forgotten == ["x"] and freed == [True]
