"""What checking, predicting and measuring yield: pure data, JSON-ready."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Literal

FindingKind = Literal["deadlock", "race", "uninitialized", "protocol", "resource", "wrong_result"]
Level = Literal["tile", "ptx"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault that the CPU execution found.

    Attributes:
        kind: class of fault.
        text: what happened, for people: who, on what, in which order.
        cycle: simulated cycle at which it was seen.
    """

    kind: FindingKind
    text: str
    cycle: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """Verdict of executing one kernel on the CPU.

    Attributes:
        findings: de-duplicated faults; empty means the kernel passed.
        level: ``tile`` (as traced) or ``ptx`` (after lowering).
        shape: (M, N, K) it ran at, None for a PrimFunc that is no GEMM.
        seeds: schedules explored.
        max_error: largest absolute difference from the float64 reference, None without a reference.
        wrong_elements: output elements outside the tolerance.
        cycles: simulated duration of the first schedule.
        model: version of the memory and timing model.
    """

    findings: tuple[Finding, ...]
    level: Level
    shape: tuple[int, int, int] | None
    seeds: tuple[int, ...]
    max_error: float | None
    wrong_elements: int
    cycles: float
    model: str

    @property
    def passed(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {**asdict(self), "passed": self.passed}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A modelled time; never a measurement.

    Attributes:
        time_s: predicted kernel time.
        model: which model, with its version (``closed-form-2``, ``simulator-1``).
        gpu: GPU slug it is for.
        clock_hz: SM clock assumed.
        parts_s: named contributions or bounds, in seconds.
        utilization: busy fraction per engine, where the model knows it.
    """

    time_s: float
    model: str
    gpu: str
    clock_hz: float
    parts_s: dict[str, float] = field(default_factory=dict)
    utilization: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)


class Outcome(Enum):
    """How a device trial ended; only OK carries a Measurement."""

    OK = "ok"
    REJECTED = "rejected"  # by a rule, the compiler or the CPU check, before any launch
    INCORRECT = "incorrect"
    TIMEOUT = "timeout"
    ILLEGAL_ACCESS = "illegal_access"
    ILLEGAL_INSTRUCTION = "illegal_instruction"
    ABORT = "abort"
    LAUNCH_FAILED = "launch_failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Where and when something was measured.

    Attributes:
        gpu: name the driver reports; ``slug`` is its folder name under tuned/.
        sm_clock_hz: lowest and highest SM clock seen during the run.
        power_w: lowest and highest board power seen.
        throttle_reasons: NVML clock-event reason names seen, sorted.
        date: ISO 8601, UTC.
    """

    gpu: str
    slug: str
    sm_count: int
    driver: str
    cuda: str
    torch: str
    power_limit_w: float | None
    sm_clock_hz: tuple[float, float] | None
    power_w: tuple[float, float] | None
    throttle_reasons: tuple[str, ...]
    date: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Paired samples of one kernel and its baseline from the same interleaved rounds.

    Attributes:
        kernel_s, baseline_s: seconds per call, one entry per round, same length and order.
        cold_l2: True if the L2 cache was flushed before each call.
    """

    kernel_s: tuple[float, ...]
    baseline_s: tuple[float, ...]
    cold_l2: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A measured, correct candidate.

    Attributes:
        warm, cold: paired samples against torch.matmul with a warm and a flushed L2; cold may be missing in early rounds.
        relative_error: Frobenius-norm error of the kernel against float64 (``kernel``) and of the baseline (``baseline``).
        environment: where it was measured.
    """

    warm: Samples
    cold: Samples | None
    relative_error: dict[str, float]
    environment: Environment

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)
