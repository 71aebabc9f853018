"""DeviceBench: times candidates of one Problem on a GPU from a process that survives whatever they do.

Every kernel first runs alone in the worker, with a synchronization after it: that run is both its correctness check and its
isolation, so the races that follow may put many kernels into one process. When something breaks all the same, the worker is
killed, the GPU awaited, and the round repeated one kernel at a time, so that the fault falls on the kernel it belongs to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final

from ..algorithm import Algorithm
from ..binary import Binary
from ..config import Config
from ..errors import InputError, LaunchError
from ..problem import Problem
from ..results import Environment, Outcome
from .admission import Admitted, Searched
from .faults import Fault, TrialFault
from .nvml import open_nvml, pci_bus_id
from .timer import BASELINE, CUBLASLT, Timer
from .worker import START_TIMEOUT_S, Worker

DEVICE_SERVICE: Final = "autogemm.measure.service:DeviceService"

# One trial, or one round of many. The largest public shapes take 10 ms per call and a round a few hundred calls.
TRIAL_TIMEOUT_S: Final = 20.0
ROUND_TIMEOUT_S: Final = 60.0
# After a kill: how long to wait for the GPU, and what still counts as the memory level and baseline time from before.
IDLE_TIMEOUT_S: Final = 15.0
_MEMORY_SLACK: Final = 256 << 20
_BASELINE_SLACK: Final = 1.5
# Rounds in which no single kernel could be blamed, before the evaluator gives up.
_MAX_UNEXPLAINED: Final = 3

# What is registered under a name: a kernel, or under CUBLASLT an algorithm of cuBLASLt.
_Candidate = tuple[Binary, Config] | Algorithm


class DeviceBench:
    """Admission and interleaved rounds for one Problem at a time, in an isolated worker. Not thread-safe."""

    def __init__(
        self, problem: Problem, *, device: int = 0, sm_count: int | None = None, seed: int | None = None,
        service: str = DEVICE_SERVICE, trial_timeout_s: float = TRIAL_TIMEOUT_S, round_timeout_s: float = ROUND_TIMEOUT_S,
        memory_used: Callable[[], int | None] | None = None,
    ) -> None:  # fmt: skip
        """Start a worker and open ``problem`` in it.

        Args:
            sm_count: SMs the kernels may occupy; all by default. The baseline always has all.
            seed: of the operands; fresh by default.
            service: what the worker runs; tests put a fake here.
            memory_used: bytes of device memory in use by all processes; NVML's answer by default.

        Raises:
            InputError: the problem can't be taken, or no GPU is there.
            LaunchError: the worker did not come up.
        """
        self.device = device
        self.sm_count = sm_count
        self.failures: dict[str, Fault] = {}
        self.notes: list[str] = []
        self.restarts = 0
        self._service = service
        self._trial_timeout_s, self._round_timeout_s = trial_timeout_s, round_timeout_s
        self._memory_used = memory_used if memory_used is not None else _nvml_memory(device)
        self._memory_before = self._memory_used()
        self._candidates: dict[str, _Candidate] = {}
        self._present: set[str] = set()
        self._baselines: list[float] = []
        self._careful = False
        self._unexplained = 0
        self._worker: Worker | None = None
        self._spare: Worker | None = None
        self._seed = seed
        self._given_seed = seed
        self.problem = problem
        self._ask_open()

    def open(self, problem: Problem) -> None:
        """Turn to another Problem, in the same worker if it lives; candidates, failures and samples start afresh."""
        self.problem = problem
        self.failures, self._candidates = {}, {}
        self._present = set()
        self._baselines = []
        self._careful, self._unexplained = False, 0
        self._seed = self._given_seed
        self._ask_open()

    def warm_up(self, seconds: float) -> None:
        """See measure.device.warm_up."""
        self._call("warm_up", seconds, timeout_s=self._trial_timeout_s + seconds)

    def admit(self, name: str, binary: Binary, config: Config) -> Admitted:
        """Run a kernel alone, with the launch-time knobs of ``config``, check it, and register it as ``name`` if it is right.

        Raises:
            InputError: the Binary is for another dtype or layout, or a launch-time knob is out of range.
        """
        if name in (BASELINE, CUBLASLT):
            raise InputError(f"{name!r} is reserved; choose another name")
        return self._admit(name, (binary, config))

    def admit_cublaslt(self) -> Searched:
        """Register the best of cuBLASLt's algorithms as ``CUBLASLT`` and return it.

        Raises:
            InputError: there is no library, or no algorithm is accurate.
            TrialFault: cuBLASLt failed.
        """
        self.failures.pop(CUBLASLT, None)
        found: Searched = self._call("admit_cublaslt", timeout_s=self._round_timeout_s)
        self._candidates[CUBLASLT] = found.algorithm
        self._present.add(CUBLASLT)
        return found

    def admit_algorithm(self, algorithm: Algorithm) -> Admitted:
        """Check one cuBLASLt algorithm and register it as ``CUBLASLT`` if it is right."""
        return self._admit(CUBLASLT, algorithm)

    def round(self, names: Sequence[str]) -> dict[str, float]:
        """Return one warm sample per name and of the baseline (the Timer protocol); failed candidates are left out."""
        return self._round(names, cold=False)

    def cold_round(self, names: Sequence[str]) -> dict[str, float]:
        """Like ``round``, with operands that are not in the L2 cache."""
        return self._round(names, cold=True)

    def timer(self, *, cold: bool = False) -> Timer:
        """Return a Timer of warm or of cold rounds."""
        return _Mode(self, cold)

    def environment(self) -> Environment:
        """Return the Environment with what the present worker saw so far."""
        found: Environment = self._call("environment", timeout_s=self._trial_timeout_s)
        return found

    def energy_j(self, name: str, seconds: float = 1.0) -> float | None:
        """Return joules per call of ``name`` (or of the baseline), or None where the GPU does not count energy."""
        self._make_present([name])
        found: float | None = self._call("energy_j", name, seconds, timeout_s=self._trial_timeout_s + 10 * seconds)
        return found

    def close(self) -> None:
        """End the workers."""
        self._drop_worker()
        if self._spare is not None:
            self._spare.kill()
            self._spare = None

    def __enter__(self) -> DeviceBench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _round(self, names: Sequence[str], *, cold: bool) -> dict[str, float]:
        while True:
            wanted = [name for name in dict.fromkeys(names) if name not in self.failures and name != BASELINE]
            unknown = [name for name in wanted if name not in self._candidates]
            if unknown:
                raise InputError(f"{', '.join(unknown)} was never admitted")
            wanted = self._make_present(wanted)
            at: list[str] = []
            method = "careful_round" if self._careful else "round"
            try:
                times: dict[str, float] = self._call(
                    method, wanted, cold, timeout_s=self._round_timeout_s, doing=at.append
                )  # fmt: skip
            except TrialFault as failed:
                self._blame(at[-1] if at else None, failed.fault)
                continue
            self._baselines.append(times[BASELINE])
            return times

    def _blame(self, name: str | None, fault: Fault) -> None:
        """Charge a fault of a round to the kernel that ran; where several ran, look closer from now on."""
        if name is not None and name in self._candidates:
            self._fail(name, fault)
            return
        self._careful = True
        self._unexplained += 1
        self.notes.append(f"a round failed ({fault.outcome.value}: {fault.detail}); repeating it one kernel at a time")
        if self._unexplained > _MAX_UNEXPLAINED:
            raise LaunchError(f"rounds keep failing and no kernel alone explains it: {fault.detail}")

    def _fail(self, name: str, fault: Fault) -> None:
        self.failures[name] = fault
        self._candidates.pop(name, None)
        self._present.discard(name)

    def _make_present(self, names: Sequence[str]) -> list[str]:
        """Register ``names`` in the present worker, each checked alone again if the worker is new; return those that passed."""
        usable = []
        for name in names:
            if name != BASELINE and (not self._live() or name not in self._present):
                try:
                    self._ask_admit(name, self._candidates[name])
                except TrialFault as failed:
                    self._fail(name, failed.fault)
                    # Those before it are gone with the worker if it died.
                    return self._make_present([n for n in names if n not in self.failures])
            usable.append(name)
        return usable

    def _admit(self, name: str, candidate: _Candidate) -> Admitted:
        self.failures.pop(name, None)
        try:
            error = self._ask_admit(name, candidate)
        except TrialFault as failed:
            self._fail(name, failed.fault)
            return Admitted(outcome=failed.fault.outcome, reason=failed.fault.detail)
        self._candidates[name] = candidate
        return Admitted(outcome=Outcome.OK, relative_error=error)

    def _ask_admit(self, name: str, candidate: _Candidate) -> dict[str, float]:
        error: dict[str, float]
        if isinstance(candidate, Algorithm):
            error = self._call("admit_algorithm", candidate, timeout_s=self._trial_timeout_s)
        else:
            binary, config = candidate
            error = self._call("admit", name, binary, config.launch, self.sm_count, timeout_s=self._trial_timeout_s)
        self._present.add(name)
        return error

    def _ask_open(self) -> None:
        try:
            found = self._started().call("open", self.problem, self.device, self._seed, timeout_s=START_TIMEOUT_S)
        except TrialFault as failed:
            # No kernel of ours has run: this is nobody's fault and must not be charged to a candidate.
            raise LaunchError(f"no worker could be started for {self.problem}: {failed.fault.detail}") from failed
        self._seed = int(found["seed"])

    def _call(self, method: str, *arguments: object, timeout_s: float, doing: Callable[[str], None] | None = None) -> Any:
        if not self._live():  # the problem is opened again, with the same operands
            self._ask_open()
            self._await_speed()
        assert self._worker is not None
        try:
            return self._worker.call(method, *arguments, timeout_s=timeout_s, doing=doing)
        except TrialFault as failed:
            if failed.fault.sticky:
                self._present.clear()
            raise

    def _live(self) -> bool:
        return self._worker is not None and self._worker.alive

    def _started(self) -> Worker:
        """Return the worker; in place of one that died, a new one, on a GPU that the old one has left."""
        if self._worker is not None and not self._live():
            self._drop_worker()
            self.restarts += 1
            self._await_memory()
        if self._worker is None:
            self._present.clear()
            spare, self._spare = self._spare, None
            self._worker = spare if spare is not None and spare.alive else Worker(self._service)
            if self.restarts:
                # Where one candidate was bad, others may be. The next worker imports its modules meanwhile, off the GPU.
                self._spare = Worker(self._service)
        return self._worker

    def _drop_worker(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _await_memory(self) -> None:
        """Wait until the dead worker's memory is back: its kernels have then left the GPU."""
        before = self._memory_before
        until = time.monotonic() + IDLE_TIMEOUT_S
        while before is not None:
            used = self._memory_used()
            if used is None or used <= before + _MEMORY_SLACK:
                return
            if time.monotonic() > until:
                self.notes.append(f"{used - before} bytes of device memory were not given back within {IDLE_TIMEOUT_S:g} s")
                return
            time.sleep(0.05)

    def _await_speed(self) -> None:
        """Wait until the baseline is as fast as before: nothing else runs on the GPU."""
        if not self._baselines:
            return
        before = statistics.median(self._baselines)
        until = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            assert self._worker is not None
            try:
                now: dict[str, float] = self._worker.call("round", [], False, timeout_s=self._round_timeout_s)
            except TrialFault as failed:
                raise LaunchError(f"a new worker can't time the baseline: {failed.fault.detail}") from failed
            if now[BASELINE] <= _BASELINE_SLACK * before:
                return
            if time.monotonic() > until:
                self.notes.append(f"after a restart the baseline takes {now[BASELINE] / before:.2f}x as long as before")
                return
            time.sleep(0.2)


class _Mode:
    """A Timer of one kind of rounds."""

    def __init__(self, bench: DeviceBench, cold: bool) -> None:
        self._bench, self._cold = bench, cold

    def round(self, names: Sequence[str]) -> dict[str, float]:
        return self._bench._round(names, cold=self._cold)


def _nvml_memory(device: int) -> Callable[[], int | None]:
    bus = pci_bus_id(device)
    nvml = open_nvml(bus) if bus is not None else None
    return lambda: None if nvml is None else nvml.memory_used()
