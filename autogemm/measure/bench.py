"""Benchmarks: named kernels against torch.matmul and a searched cuBLASLt, cold and warm, with each shape's own limit.

Everything of one shape runs in this process, interleaved; use it for kernels that are known to be right (they are checked all
the same), and DeviceBench for candidates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ..arch import ARCHS, ArchName
from ..binary import Binary
from ..config import Config
from ..errors import NothingFound
from ..problem import Problem
from ..results import Environment, Samples
from ..runtime.launcher import Kernel
from .cuda_timer import Call
from .device import DeviceSession
from .timer import BASELINE, CUBLASLT

SCHEMA: Final = 1
WARM_ROUNDS: Final = 21
COLD_ROUNDS: Final = 11


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The least time one GEMM can take on one GPU.

    Attributes:
        bandwidth_bytes_per_s: read bandwidth measured in the same run.
        flops_per_s: tensor peak at ``clock_hz``, the median SM clock seen meanwhile.
        time_s: the larger of bytes over bandwidth and FLOPs over peak; each operand counted once.
        bound: which of the two it is.
    """

    bandwidth_bytes_per_s: float
    flops_per_s: float | None
    clock_hz: float | None
    time_s: float
    bound: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What one kernel, or cuBLASLt, did on one shape; samples are paired with torch.matmul's of the same rounds.

    Attributes:
        energy_j: joules per call, warm; None if not asked for or not counted by the GPU.
    """

    warm: Samples
    cold: Samples
    relative_error: dict[str, float]
    energy_j: float | None = None

    def time_s(self, *, cold: bool = False) -> float:
        """Return the median seconds per call."""
        return statistics.median((self.cold if cold else self.warm).kernel_s)

    def ratio(self, *, cold: bool = False) -> float:
        """Return the median paired ratio of torch.matmul's time to its own; above 1: faster than torch.matmul."""
        return statistics.median(_ratios(self.cold if cold else self.warm))

    def spread(self, *, cold: bool = False) -> float:
        """Return half the interquartile range of the paired ratios."""
        ratios = _ratios(self.cold if cold else self.warm)
        if len(ratios) < 2:
            return 0.0
        quarters = statistics.quantiles(ratios, n=4, method="inclusive")
        return (quarters[2] - quarters[0]) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """One shape.

    Attributes:
        subjects: by name, ``cublaslt`` among them where it was searched.
        baseline_energy_j: of torch.matmul, as in Subject.
        algorithms: cuBLASLt algorithms tried.
    """

    problem: Problem
    environment: Environment
    limit: Limit
    subjects: Mapping[str, Subject]
    baseline_energy_j: float | None = None
    algorithms: int = 0
    notes: tuple[str, ...] = field(default=())

    def baseline_s(self, *, cold: bool = False) -> float:
        """Return torch.matmul's median seconds per call."""
        samples = [x for s in self.subjects.values() for x in (s.cold if cold else s.warm).baseline_s]
        return statistics.median(samples)

    def fraction_of_limit(self, name: str, *, cold: bool = True) -> float:
        """Return the limit's time over the subject's: 1 is as fast as the GPU allows."""
        return self.limit.time_s / self.subjects[name].time_s(cold=cold)

    def ratio(self, name: str, other: str | None = None, *, cold: bool = False) -> float:
        """Return the speed of ``name`` over torch.matmul, or over subject ``other`` of the same rounds."""
        if other is None:
            return self.subjects[name].ratio(cold=cold)
        mine, its = self.subjects[name], self.subjects[other]
        pairs = zip((its.cold if cold else its.warm).kernel_s, (mine.cold if cold else mine.warm).kernel_s, strict=True)
        return statistics.median(slow / fast for slow, fast in pairs)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict with every sample."""
        return {
            "schema": SCHEMA, "problem": asdict(self.problem), "environment": self.environment.to_json(),
            "limit": asdict(self.limit), "baseline_energy_j": self.baseline_energy_j, "algorithms": self.algorithms,
            "notes": list(self.notes),
            "subjects": {
                name: {
                    **asdict(s), "ratio_warm": s.ratio(), "ratio_cold": s.ratio(cold=True), "spread_warm": s.spread(),
                    "spread_cold": s.spread(cold=True), "fraction_of_limit": self.fraction_of_limit(name),
                }
                for name, s in self.subjects.items()
            },
        }  # fmt: skip


def kernel_call(binary: Binary, config: Config, *, device: int = 0, sm_count: int | None = None) -> Call:
    """Return ``call(a, b, out)`` that launches ``binary`` with the launch-time knobs of ``config``."""
    kernel = Kernel(binary, device)
    return lambda a, b, out: kernel(a, b, out, launch=config.launch, sm_count=sm_count)


def bench(
    problem: Problem, calls: Mapping[str, Call], *, arch_name: ArchName, bandwidth_bytes_per_s: float, device: int = 0,
    cublaslt: bool = True, warm_rounds: int = WARM_ROUNDS, cold_rounds: int = COLD_ROUNDS, energy_seconds: float = 0.0,
    seed: int | None = None,
) -> BenchResult:  # fmt: skip
    """Measure ``calls`` on one shape.

    Args:
        calls: ``call(a, b, out)`` by name: raw kernels (``kernel_call``), or anything else that computes the product, such as
            dispatch.
        bandwidth_bytes_per_s: from ``device.read_bandwidth``, measured once per run.
        cublaslt: also search cuBLASLt's algorithms and time the best.
        energy_seconds: how long to run each for its joules per call; 0 for not at all.

    Raises:
        TrialFault: a kernel is wrong.
        NothingFound: nothing to measure.
    """
    if not calls and not cublaslt:
        raise NothingFound("nothing to benchmark: no kernel was named and cuBLASLt is off")
    session = DeviceSession(problem, device=device, seed=seed)
    try:
        errors = {name: session.admit_call(name, call) for name, call in calls.items()}
        tried = 0
        if cublaslt:
            searched = session.admit_cublaslt(dispatchable=False)
            tried, errors[CUBLASLT] = searched.tried, searched.relative_error
        names = list(errors)
        warm = [session.round(names) for _ in range(warm_rounds)]
        cold = [session.round(names, cold=True) for _ in range(cold_rounds)]
        energy = {n: session.energy_j(n, energy_seconds) if energy_seconds > 0 else None for n in (BASELINE, *names)}
        environment = session.environment()
        clocks = session.recorder.clocks_hz
        clock_hz = statistics.median(clocks) if clocks else None
    finally:
        session.close()
    subjects = {
        name: Subject(
            warm=_samples(warm, name, cold=False), cold=_samples(cold, name, cold=True), relative_error=errors[name],
            energy_j=energy[name],
        )
        for name in names
    }  # fmt: skip
    return BenchResult(
        problem=problem, environment=environment, subjects=subjects, baseline_energy_j=energy[BASELINE], algorithms=tried,
        limit=limit(problem, arch_name, environment.sm_count, clock_hz, bandwidth_bytes_per_s),
    )  # fmt: skip


def limit(
    problem: Problem, arch_name: ArchName, sm_count: int, clock_hz: float | None, bandwidth_bytes_per_s: float
) -> Limit:  # fmt: skip
    """Return the Limit of ``problem`` on ``sm_count`` SMs at ``clock_hz``; without a clock, memory alone bounds it."""
    peak = None if clock_hz is None else sm_count * ARCHS[arch_name].tensor_flops_per_clock * clock_hz
    memory_s = problem.bytes_moved / bandwidth_bytes_per_s
    math_s = problem.flops / peak if peak is not None else 0.0
    return Limit(
        bandwidth_bytes_per_s=bandwidth_bytes_per_s, flops_per_s=peak, clock_hz=clock_hz, time_s=max(memory_s, math_s),
        bound="memory" if memory_s >= math_s else "tensor cores",
    )  # fmt: skip


def geomean(values: Iterable[float]) -> float:
    """Return the geometric mean.

    Raises:
        NothingFound: no values.
    """
    logs = [math.log(v) for v in values]
    if not logs:
        raise NothingFound("no ratios to average: nothing was measured")
    return math.exp(math.fsum(logs) / len(logs))


def _samples(rounds: list[dict[str, float]], name: str, *, cold: bool) -> Samples:
    return Samples(
        kernel_s=tuple(r[name] for r in rounds), baseline_s=tuple(r[BASELINE] for r in rounds), cold_l2=cold
    )  # fmt: skip


def _ratios(samples: Samples) -> list[float]:
    return [b / k for k, b in zip(samples.kernel_s, samples.baseline_s, strict=True)]
