"""Trial: what became of one candidate, and where trials are kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..config import Config
from ..decoding import decode
from ..errors import InputError
from ..results import Outcome

# Runs of one trial that may end in the death of its process before it is given up. A worker runs one trial at a time, which
# is then the likely cause: the first run and one retry. A local tuner holds a batch, and mostly dies because someone stops it.
MAX_ATTEMPTS = 2
LOCAL_ATTEMPTS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A finished trial.

    Attributes:
        value: what is minimized, None unless the outcome is OK: predicted seconds (model) or the median paired ratio of kernel
            to baseline time (device), which compares across clocks and boards.
        reason: why it is not OK, for people.
        samples: paired (kernel, baseline) seconds of the screening rounds; empty for predictions.
        detail: what else the evaluator wants back on resume, JSON-ready.
    """

    config: Config
    outcome: Outcome
    value: float | None = None
    reason: str = ""
    samples: tuple[tuple[float, float], ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "config": self.config.to_knobs(), "outcome": self.outcome.value, "value": self.value, "reason": self.reason,
            "samples": [list(pair) for pair in self.samples], "detail": self.detail,
        }  # fmt: skip

    @classmethod
    def from_json(cls, document: Any) -> Trial:
        """Return the Trial in ``document``.

        Raises:
            InputError: not a trial.
        """
        try:
            return cls(
                config=decode(Config, document["config"], "config"), outcome=Outcome(document["outcome"]),
                value=document["value"], reason=document["reason"],
                samples=tuple((float(kernel), float(baseline)) for kernel, baseline in document["samples"]),
                detail=dict(document["detail"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"not a trial: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """The right and duty to run one trial.

    Attributes:
        number: the store's number for it.
    """

    number: int
    config: Config


class TrialStore(Protocol):
    """Queue and memory of trials. A Config finishes at most once per store, whoever runs it."""

    def enqueue(self, configs: Iterable[Config]) -> int:
        """Queue, in order, the Configs that are neither finished, open nor given up; return how many."""

    def ask(self) -> Ticket | None:
        """Claim the next trial, or return None if there is none to claim now."""

    def tell(self, ticket: Ticket, trial: Trial) -> bool:
        """Finish a claimed trial; False if it had been taken away and finished elsewhere, so that this result is dropped."""

    def finished(self) -> list[Trial]:
        """Return all finished trials in the order in which they were claimed."""

    def open_trials(self) -> int:
        """Return how many trials are queued or running, anywhere."""

    def close(self) -> None:
        """Release locks and connections."""


class MemoryStore:
    """A TrialStore that forgets: for hosts without Optuna, which time compiled candidates in seconds anyway."""

    def __init__(self) -> None:
        self._queue: deque[Ticket] = deque()
        self._known: set[Config] = set()
        self._running: set[int] = set()
        self._finished: dict[int, Trial] = {}

    def enqueue(self, configs: Iterable[Config]) -> int:
        """See TrialStore."""
        before = len(self._known)
        for config in configs:
            if config not in self._known:
                self._queue.append(Ticket(number=len(self._known), config=config))
                self._known.add(config)
        return len(self._known) - before

    def ask(self) -> Ticket | None:
        """See TrialStore."""
        if not self._queue:
            return None
        ticket = self._queue.popleft()
        self._running.add(ticket.number)
        return ticket

    def tell(self, ticket: Ticket, trial: Trial) -> bool:
        """See TrialStore."""
        self._running.discard(ticket.number)
        self._finished[ticket.number] = trial
        return True

    def finished(self) -> list[Trial]:
        """See TrialStore."""
        return [self._finished[number] for number in sorted(self._finished)]

    def open_trials(self) -> int:
        """See TrialStore."""
        return len(self._queue) + len(self._running)

    def close(self) -> None:
        """See TrialStore."""
