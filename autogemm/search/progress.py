"""What a tuning may spend, and what it tells while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ..config import Config
from ..errors import InputError
from ..record import Key, Row
from .trial import Trial

# ``until_stable`` ends a search when this many trials in a row have not improved on the best by this much.
STABLE_TRIALS: Final = 24
STABLE_GAIN: Final = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """When to stop searching; whichever comes first. With nothing set, the whole space is tried.

    Attributes:
        seconds: wall-clock time for the search, compiling included.
        trials: candidates to try, those of earlier runs of the same study included.
        target: stop at this ratio of cuBLAS time to kernel time, such as 1.02.
        until_stable: stop when STABLE_TRIALS trials in a row brought no gain.
    """

    seconds: float | None = None
    trials: int | None = None
    target: float | None = None
    until_stable: bool = False

    def __post_init__(self) -> None:
        for name in ("seconds", "trials", "target"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int if name == "trials" else (int, float)):
                raise InputError(f"--{name} must be {'an integer' if name == 'trials' else 'a number'}, got {value!r}")
            if not value > 0:
                raise InputError(f"--{name} must be positive, got {value}")


class Meter:
    """Tells when a Budget is spent."""

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget, self._clock, self._began = budget, clock, clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return self._clock() - self._began

    @property
    def left_s(self) -> float | None:
        """Seconds left, None without a limit."""
        return None if self._budget.seconds is None else max(0.0, self._budget.seconds - self.elapsed_s)

    def trials_left(self, done: int) -> int:
        """Return how many more trials may be claimed."""
        return 1 << 30 if self._budget.trials is None else max(0, self._budget.trials - done)

    def out_of_time(self) -> bool:
        """Return whether the time is spent."""
        return self.left_s == 0.0

    def spent(self, trials: Sequence[Trial]) -> str | None:
        """Return why to stop after ``trials`` (in order), or None to go on."""
        budget = self._budget
        if self.out_of_time():
            return f"{budget.seconds:g} s are spent"
        if budget.trials is not None and len(trials) >= budget.trials:
            return f"{budget.trials} trials are spent"
        values = [trial.value for trial in trials if trial.value is not None]
        if budget.target is not None and values and 1 / min(values) >= budget.target:
            return f"the target of {budget.target:g} x cuBLAS is reached"
        if budget.until_stable and len(values) > STABLE_TRIALS:
            before, since = min(values[:-STABLE_TRIALS]), min(values[-STABLE_TRIALS:])
            if since > before * (1 - STABLE_GAIN):
                return f"{STABLE_TRIALS} trials in a row brought no gain"
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A search begins.

    Attributes:
        evaluator: ``model`` (predicts) or ``device`` (measures).
        candidates: how many will be tried unless the budget ends first.
        finished: how many of them an earlier run has finished.
    """

    key: Key
    evaluator: Literal["model", "device"]
    candidates: int
    finished: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """Something a person should know."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A candidate is out, and why."""

    config: Config
    stage: Literal["compile", "check", "device"]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A trial ended.

    Attributes:
        done, planned: trials finished so far and expected in all.
        best: the best trial so far, None if none is usable yet.
        left_s: seconds left of the budget, None without a limit.
    """

    trial: Trial
    done: int
    planned: int
    best: Trial | None
    left_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Racing:
    """The finalists are about to be raced."""

    finalists: tuple[Config, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A Row is in the database.

    Attributes:
        reused: True if it was there before and is still valid.
        compiled: kernels compiled in this run; the others came from the cache.
    """

    row: Row
    reused: bool
    compiled: int
    elapsed_s: float


Event = Planned | Note | Rejected | Tried | Racing | Done
Progress = Callable[[Event], None]
