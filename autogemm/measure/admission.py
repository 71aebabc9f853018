"""What became of a kernel at the gate it must pass before it may be timed."""

from __future__ import annotations

from dataclasses import dataclass, field

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
