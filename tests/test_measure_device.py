"""DeviceSession's arithmetic, with a timer and a clock that are scripted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autogemm.measure import device as module
from autogemm.measure.device import RESTED_S, SETTLE_RESTED_S, SETTLE_S, DeviceSession
from autogemm.measure.faults import TrialFault
from autogemm.measure.service import DeviceService
from autogemm.measure.timer import BASELINE
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
    assert session(clock).energy_j("a", seconds=0.1) == pytest.approx(700 * 1e-5, rel=0.1)


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
