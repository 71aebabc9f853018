"""The search itself: claim trials, have candidates made, checked and tried, and decide. Knows no files, GPUs or compilers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..config import Config
from ..errors import NothingFound
from ..results import Outcome
from .candidates import variants
from .evaluate import Candidate, Choice, Evaluator
from .progress import Meter, Note, Progress, Racing, Rejected, Tried
from .supply import Supply
from .trial import Ticket, Trial, TrialStore

# Trials that are tried at once: enough for candidates to be paired with each other, few enough that a round ends before the
# clock of a power-capped GPU has moved (10 % within the first second of load on an H200), and that a killed process loses
# little.
BATCH = 10

# Seconds between looks at trials that other workers are running.
_POLL_S = 1.0


@dataclass(kw_only=True)
class Search:
    """One Problem's search.

    Attributes:
        order: all Configs in order of preference, the model's best first.
        pool: every Config of the space, from which launch-time variants of the best are drawn; empty for none.
        finalists: Configs that reach the decision, at most.
        batch: trials to claim at once; 1 where other workers claim too, so that they share the work evenly.
    """

    order: Sequence[Config]
    evaluator: Evaluator
    supply: Supply
    store: TrialStore
    meter: Meter
    progress: Progress
    pool: Sequence[Config] = ()
    finalists: int = 8
    batch: int = BATCH
    _varied: bool = field(default=False, init=False)
    _trials: list[Trial] = field(default_factory=list, init=False)

    def run(self) -> Choice:
        """Return the winner with its evidence.

        Raises:
            NothingFound: no candidate is usable, or the budget ended before one was.
        """
        done = {trial.config for trial in self.store.finished()}
        self.supply.prepare([config for config in self.order if config not in done])
        while True:
            trials = self._trials = self.store.finished()
            reason = self.meter.spent(trials)
            if reason is not None:
                self.progress(Note(text=f"the search ends: {reason}"))
                break
            tickets = self._claim(trials)
            if tickets:
                self.work(tickets, planned=len(trials) + self.store.open_trials())
            elif self.store.open_trials():
                time.sleep(_POLL_S)
            elif not self._vary(trials):
                break
        return self._decide(self.store.finished())

    def work(self, tickets: Sequence[Ticket], planned: int) -> None:
        """Run claimed trials and finish them in the store."""
        ready: list[tuple[Ticket, Candidate]] = []
        measured = self.evaluator.kind == "device"
        for ticket in tickets:
            made = self.supply.get(ticket.config, checked=measured)
            if isinstance(made, Candidate):
                ready.append((ticket, made))
                continue
            self.progress(made)
            reason = f"{made.stage}: {made.reason}"
            self._tell(ticket, Trial(config=ticket.config, outcome=Outcome.REJECTED, reason=reason), planned)
        if ready:
            results = self.evaluator.screen([candidate for _, candidate in ready], entered=max(planned, len(self.order)))
            for (ticket, _), trial in zip(ready, results, strict=True):
                self._tell(ticket, trial, planned)

    def _claim(self, trials: Sequence[Trial]) -> list[Ticket]:
        left = self.meter.trials_left(len(trials))
        tickets: list[Ticket] = []
        while len(tickets) < min(self.batch, left):
            ticket = self.store.ask()
            if ticket is None:
                break
            tickets.append(ticket)
        return tickets

    def _tell(self, ticket: Ticket, trial: Trial, planned: int) -> None:
        if not self.store.tell(ticket, trial):
            self.progress(Note(text=f"another worker had taken over {trial.config.id}; its result counts, not this one's"))
            return
        if trial.outcome not in (Outcome.OK, Outcome.REJECTED):
            self.progress(Rejected(config=trial.config, stage="device", reason=f"{trial.outcome.value}: {trial.reason}"))
        self._trials.append(trial)
        usable = [t for t in self._trials if t.value is not None]
        best = min(usable, key=_value) if usable else None
        self.progress(Tried(trial=trial, done=len(self._trials), planned=planned, best=best, left_s=self.meter.left_s))

    def _vary(self, trials: Sequence[Trial]) -> bool:
        """Queue the launch-time variants of the best Binaries, once; return whether there is anything new."""
        if self._varied or not self.pool:
            return False
        self._varied = True
        best = sorted((t for t in trials if t.value is not None), key=_value)
        return self.store.enqueue(variants([t.config for t in best], self.pool)) > 0

    def _decide(self, trials: Sequence[Trial]) -> Choice:
        usable = sorted((t for t in trials if t.value is not None), key=_value)
        if not usable:
            raise NothingFound(_why_nothing(trials))
        # Clearly slower ones come back only if nothing else is left.
        kept = [t for t in usable if "dropped_after" not in t.detail] or usable
        chosen = self._usable(kept)
        if not chosen:
            raise NothingFound("no candidate passed the CPU check; see the reasons above, or pass --no-check")
        place = {config: i for i, config in enumerate([*self.order, *self.pool])}
        chosen.sort(key=lambda c: place.get(c.config, len(place)))
        if self.evaluator.kind == "device":
            self.progress(Racing(finalists=tuple(c.config for c in chosen)))
        return self.evaluator.decide(chosen, entered=len(trials), stop=self.meter.out_of_time)

    def _usable(self, trials: Sequence[Trial]) -> list[Candidate]:
        """Return the first candidates that are made and checked: one for a prediction, ``finalists`` for a race."""
        wanted = self.finalists if self.evaluator.kind == "device" else 1
        chosen: list[Candidate] = []
        for trial in trials:
            made = self.supply.get(trial.config, checked=True)
            if isinstance(made, Candidate):
                chosen.append(made)
                if len(chosen) == wanted:
                    break
            else:
                self.progress(made)
        return chosen


def _value(trial: Trial) -> float:
    assert trial.value is not None
    return trial.value


def _why_nothing(trials: Sequence[Trial]) -> str:
    if not trials:
        return "the budget ended before any candidate was tried; allow more seconds"
    reasons = sorted({t.reason for t in trials if t.reason})
    return f"none of {len(trials)} candidates is usable: " + "; ".join(reasons[:3]) + ("; ..." if len(reasons) > 3 else "")
