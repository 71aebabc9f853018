"""DeviceSession: everything one Problem needs on one GPU, in this process: operands, the correctness gate, kernels, timer."""

from __future__ import annotations

import math
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from ..algorithm import Algorithm
from ..binary import Binary
from ..config import LaunchKnobs
from ..constraints import problem_violations
from ..errors import IllegalConfig, InputError, LaunchError, NothingFound
from ..problem import Problem
from ..results import Environment, Outcome
from ..runtime.cublaslt import cublaslt
from ..runtime.driver import cuda_driver
from ..runtime.launcher import Kernel
from .admission import Searched
from .correctness import GuardedOutput, check, integer_operands, random_operands
from .cublaslt import offered
from .cuda_timer import Call, CudaTimer, OperandSet, timing_event
from .environment import Recorder
from .faults import TrialFault
from .timer import BASELINE, CUBLASLT

# Work before the first round, so that its samples don't show a clock and a voltage on their way up from idle: much after the
# GPU rested, a little where another session has just ended.
SETTLE_S: Final = 0.03
SETTLE_RESTED_S: Final = 0.4
RESTED_S: Final = 1.0
# Extent of the square products that warm a GPU up; one takes milliseconds and reaches the power limit.
WARM_UP_EXTENT: Final = 8192
# Rounds in which cuBLASLt's algorithms are compared.
SEARCH_ROUNDS: Final = 5


# When a round last ended in this process, by device.
_last_busy: dict[int, float] = {}


def torch_matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The baseline: ``out = a . b^T`` by torch.matmul (cuBLAS with its own choice of algorithm)."""
    return torch.matmul(a, b.T, out=out)


class DeviceSession:
    """One Problem on one GPU. Not isolated: a kernel that hangs or faults takes this process's CUDA context with it.

    Sessions of other Problems may follow in the same process, one at a time; ``close`` frees the memory.
    """

    def __init__(self, problem: Problem, *, device: int = 0, seed: int | None = None) -> None:
        """Draw operands and compute references.

        Args:
            seed: of the operands and of the order within rounds; fresh by default.

        Raises:
            IllegalConfig: no generated kernel can take the problem.
            MissingDependency: no CUDA device.
        """
        broken = problem_violations(problem)
        if broken:
            raise IllegalConfig(f"problem {problem}", broken)
        cuda_driver()  # says clearly what is missing
        self.problem = problem
        self.device = device
        self.seed = secrets.randbits(48) if seed is None else seed
        self.recorder = Recorder.of(device)
        target = torch.device("cuda", device)
        dtype = getattr(torch, problem.dtype)
        with torch.cuda.device(device):
            generator = torch.Generator(target).manual_seed(self.seed)
            self._integers = integer_operands(problem, dtype, generator)
            self._operands = random_operands(problem, dtype, generator)
            self._output = GuardedOutput(problem, dtype, target)
            base = OperandSet(a=self._operands.a, b=self._operands.b, out=self._output.matrix)
            self.timer = CudaTimer(base, torch_matmul, seed=self.seed)
        self._settled = False

    @property
    def baseline_error(self) -> float:
        """Relative error of torch.matmul against float64."""
        return self._operands.baseline_error

    def admit(self, name: str, binary: Binary, launch: LaunchKnobs, sm_count: int | None = None) -> dict[str, float]:
        """Run a kernel alone, check it, register it as ``name`` for rounds, and return ``Admitted.relative_error``.

        Raises:
            TrialFault: it is wrong.
            InputError: it is for another dtype or layout.
            LaunchError: the driver refused it. CUDA errors of the run itself surface as torch's or the driver's exceptions.
        """
        manifest = binary.manifest
        if (manifest.dtype, manifest.layout, manifest.epilogue) != (
            self.problem.dtype,
            self.problem.layout,
            self.problem.epilogue,
        ):
            raise InputError(f"kernel {binary.name} computes {manifest.dtype} {manifest.layout}; the problem is {self.problem}")
        kernel = Kernel(binary, self.device)

        def call(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> object:
            return kernel(a, b, out, launch=launch, sm_count=sm_count)

        return self.admit_call(name, call)

    def admit_call(self, name: str, call: Call) -> dict[str, float]:
        """Check any ``call(a, b, out)`` and register it as ``name``; errors as ``admit``."""
        with torch.cuda.device(self.device):
            check(call, self._integers, self._output)
            error = check(call, self._operands, self._output)
        self.timer.add(name, call)
        return {"kernel": error, "baseline": self.baseline_error}

    def admit_cublaslt(self, *, dispatchable: bool = True) -> Searched:
        """Search cuBLASLt's algorithms, register the fastest as ``CUBLASLT`` and return it.

        Chosen by median in interleaved rounds, each restored from its bytes, as dispatch would run it.

        Args:
            dispatchable: only those that dispatch may run; False: also those a user could pick by hand for these operands.

        Raises:
            MissingDependency: no cuBLASLt library beside torch.
            LaunchError: cuBLASLt offers nothing for the problem.
            NothingFound: no algorithm passes the gate.
        """
        algorithms = offered(cublaslt(self.device), self.problem)
        if not dispatchable:
            algorithms = list(dict.fromkeys((*algorithms, *offered(cublaslt(self.device), self.problem, dispatchable=False))))
        usable: dict[str, Algorithm] = {}
        for i, algorithm in enumerate(algorithms):
            name = f"{CUBLASLT}-{i}"
            try:
                self._admit_restored(name, algorithm)
            except LaunchError:
                continue
            except TrialFault as failed:
                if failed.fault.outcome is not Outcome.INCORRECT:
                    raise
                continue
            usable[name] = algorithm
        if not usable:
            raise NothingFound(f"none of {len(algorithms)} cuBLASLt algorithms computes {self.problem} accurately")
        taken: dict[str, list[float]] = {name: [] for name in usable}
        for _ in range(SEARCH_ROUNDS):
            times = self.round(list(usable))
            for name, samples in taken.items():
                samples.append(times[name])
        best = usable[min(usable, key=lambda name: statistics.median(taken[name]))]
        for name in usable:
            self.timer.remove(name)
        return Searched(algorithm=best, tried=len(usable), relative_error=self.admit_algorithm(best))

    def admit_algorithm(self, algorithm: Algorithm) -> dict[str, float]:
        """Check one cuBLASLt algorithm and register it as ``CUBLASLT``; return its ``relative_error``.

        Raises:
            MissingDependency: no cuBLASLt library beside torch.
            LaunchError: it can't run here.
            TrialFault: it is wrong.
        """
        return self._admit_restored(CUBLASLT, algorithm)

    def _admit_restored(self, name: str, algorithm: Algorithm) -> dict[str, float]:
        return self.admit_call(name, cublaslt(self.device).restore(algorithm, self.problem))

    def round(self, names: Sequence[str], *, cold: bool = False) -> dict[str, float]:
        """Return one sample per name and of the baseline; see CudaTimer.round. Clocks and power are read meanwhile."""
        rested = time.monotonic() - _last_busy.get(self.device, -math.inf) > RESTED_S
        if rested or not self._settled:
            self.timer.replay(BASELINE, SETTLE_RESTED_S if rested else SETTLE_S)
            self._settled = True
        times = self.timer.round(names, cold=cold, during=self.recorder.sample)
        _last_busy[self.device] = time.monotonic()
        return times

    def careful_round(self, names: Sequence[str], started: Callable[[str], None], *, cold: bool = False) -> dict[str, float]:
        """Like ``round``, but one kernel after the other with a synchronization after each, announced through ``started``."""
        taken: dict[str, float] = {}
        for name in dict.fromkeys((BASELINE, *names)):
            started(name)
            sample = self.timer.round([] if name == BASELINE else [name], cold=cold, during=self.recorder.sample)
            taken[name] = sample[name]
        return taken

    def energy_j(self, name: str, seconds: float = 2.0) -> float | None:
        """Return joules per call, from running ``name`` without a gap for ``seconds``; None without NVML.

        The counter moves in steps of 20 to 100 ms (NVML, nvmlDeviceGetTotalEnergyConsumption): the power is taken from its
        first step to its last, and the time per call from the whole run. None too if ``seconds`` hold no two steps.
        """
        nvml = self.recorder.nvml
        last = None if nvml is None else nvml.energy_j()
        if nvml is None or last is None:
            return None
        steps: list[tuple[float, float]] = []

        def watch() -> None:
            nonlocal last
            now = nvml.energy_j()
            if now is not None and now != last:
                steps.append((time.monotonic(), now))
                last = now

        calls, elapsed_s = self.timer.sustain(name, seconds, watch)
        if len(steps) < 2:
            return None
        (begin, before), (end, after) = steps[0], steps[-1]
        return (after - before) / (end - begin) * elapsed_s / calls

    def environment(self) -> Environment:
        """Return the Environment with what was seen since the session began."""
        return self.recorder.environment()

    def forget(self, name: str) -> None:
        """Drop a registered kernel."""
        self.timer.remove(name)

    def close(self) -> None:
        """Free the session's device memory."""
        del self.timer, self._operands, self._integers, self._output
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


def warm_up(device: int, seconds: float) -> None:
    """Keep the GPU busy with large products for ``seconds``, so that it is as hot as in sustained use.

    For ratios the lead-in of a round (cuda_timer.py) does most: on an H200, 8 s before it changed them by less than 0.005.
    """
    a, b = (torch.randn(WARM_UP_EXTENT, WARM_UP_EXTENT, device=f"cuda:{device}").half() for _ in range(2))
    out = torch.empty_like(a)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(16):
            torch.matmul(a, b, out=out)
        torch.cuda.synchronize(device)
    _last_busy[device] = time.monotonic()


def read_bandwidth(device: int = 0, *, seconds: float = 0.3) -> float:
    """Return bytes per second that this GPU reads from its memory: the best of summing and copying a 4 GiB buffer."""
    free, _ = torch.cuda.mem_get_info(device)
    size = min(4 << 30, int(free // 3)) // 1024 * 1024
    source = torch.empty(size // 4, dtype=torch.float32, device=f"cuda:{device}").normal_()
    target = torch.empty_like(source)
    best = math.inf
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        works: tuple[tuple[Callable[[], object], int], ...] = (
            (lambda: torch.sum(source), size), (lambda: target.copy_(source), 2 * size),
        )  # fmt: skip
        for work, moved in works:
            start, end = timing_event(), timing_event()
            start.record()
            work()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) * 1e-3 / moved)
    return 1.0 / best
