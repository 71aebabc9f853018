"""What a measured Row holds, from rounds that timed a kernel, torch.matmul and perhaps an algorithm of cuBLASLt together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..record import CublasLtRecord
from ..results import Environment, Measurement, Samples
from .admission import Searched
from .timer import BASELINE, CUBLASLT

# Seconds per call by name, BASELINE among them; entry i of each is of the same interleaved round.
Paired = Mapping[str, Sequence[float]]


def complete(taken: Sequence[Mapping[str, float]], names: Sequence[str]) -> Paired:
    """Return the samples of ``names`` and of the baseline from the rounds that timed all of them; empty if none did."""
    whole = [times for times in taken if all(name in times for name in names)]
    return {name: tuple(times[name] for times in whole) for name in (*names, BASELINE)} if whole else {}


def evidence(
    name: str, warm: Paired, cold: Paired, *, relative_error: dict[str, float], environment: Environment,
    rival: Searched | None = None,
) -> tuple[Measurement, CublasLtRecord | None]:  # fmt: skip
    """Return the measurement of kernel ``name``, and the record of ``rival``, which was timed as CUBLASLT in the same rounds.

    Args:
        cold: may be empty.
    """
    measurement = Measurement(
        warm=_samples(name, warm, cold=False), cold=_samples(name, cold, cold=True) if cold else None,
        relative_error=relative_error, environment=environment,
    )  # fmt: skip
    if rival is None:
        return measurement, None
    return measurement, CublasLtRecord(
        algorithm=rival.algorithm, tried=rival.tried, warm_s=tuple(warm[CUBLASLT]),
        cold_s=tuple(cold[CUBLASLT]) if cold else None, relative_error=rival.relative_error,
    )  # fmt: skip


def _samples(name: str, paired: Paired, *, cold: bool) -> Samples:
    return Samples(kernel_s=tuple(paired[name]), baseline_s=tuple(paired[BASELINE]), cold_l2=cold)
