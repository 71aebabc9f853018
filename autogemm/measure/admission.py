"""What became of a kernel, or of cuBLASLt's algorithms, at the gate they must pass before they may be timed."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..algorithm import Algorithm
from ..results import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """Verdict of the first runs of a kernel: alone, on fresh operands, into poisoned output.

    Attributes:
        outcome: OK, or how it failed.
        reason: why it is not OK, for people.
        relative_error: Frobenius-norm errors against float64, of ``kernel`` and ``baseline``, on the same operands; empty
            unless OK.
    """

    outcome: Outcome
    reason: str = ""
    relative_error: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Searched:
    """The fastest of cuBLASLt's algorithms on one problem.

    Attributes:
        tried: algorithms that passed the gate and were compared.
        relative_error: as in Admitted.
    """

    algorithm: Algorithm
    tried: int
    relative_error: dict[str, float]
