"""Live progress on stderr: a bar where it is a terminal, a line now and then where it is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ..results import Outcome
from ..search.progress import Done, Event, Note, Planned, Racing, Rejected, Tried
from ..search.trial import Trial
from . import render

# Seconds between lines where stderr is no terminal.
_QUIET_S: Final = 10.0


class _Bar:
    """One bar, or lines in its place."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done, self._said = title, total, 0, time.monotonic()
        console = render.stderr_console()
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TaskProgressColumn(), TimeElapsedColumn(),
                TextColumn("{task.fields[text]}"), console=console, transient=True,
            )  # fmt: skip
            self._task = self._progress.add_task(title, total=total, text="")
            self._progress.start()

    def show(self, done: int, text: str, total: int | None = None) -> None:
        self._done, self._total = done, self._total if total is None else total
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=self._total, text=text)
        elif time.monotonic() - self._said > _QUIET_S:
            self._said = time.monotonic()
            render.note(f"{self._title}: {done} of {self._total}, {text}")

    def advance(self, text: str) -> None:
        self.show(self._done + 1, text)

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def counter(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show ``title`` with a bar of ``total`` steps; the function it yields advances one step and shows a text."""
    bar = _Bar(title, total)
    try:
        yield bar.advance
    finally:
        bar.stop()


class TuneView:
    """Follows the events of a tuning."""

    def __init__(self) -> None:
        self._bar: _Bar | None = None
        self._evaluator = "model"
        self._rejected: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if isinstance(event, Planned):
            self._begin(event)
        elif isinstance(event, Note):
            render.note(event.text)
        elif isinstance(event, Rejected):
            self._rejected[event.stage] = self._rejected.get(event.stage, 0) + 1
        elif isinstance(event, Tried):
            self._tried(event)
        elif isinstance(event, Racing):
            self.stop()
            render.note(f"racing {len(event.finalists)} finalists")
        elif isinstance(event, Done):
            self._finish(event)

    def stop(self) -> None:
        """End the bar; safe to call more than once."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _begin(self, event: Planned) -> None:
        self.stop()
        self._evaluator, self._rejected = event.evaluator, {}
        verb = "measuring" if event.evaluator == "device" else "predicting"
        known = f", {event.finished} of them finished before" if event.finished else ""
        render.note(f"{event.key}: {verb} {event.candidates} candidates{known}")
        self._bar = _Bar(event.key.problem.shape, event.candidates)

    def _tried(self, event: Tried) -> None:
        left = "" if event.left_s is None else f", {event.left_s:.0f} s left"
        if self._bar is not None:
            self._bar.show(event.done, f"best {self._value(event.best)}{left}", event.planned)

    def _value(self, trial: Trial | None) -> str:
        if trial is None or trial.value is None or trial.outcome is not Outcome.OK:
            return "none yet"
        if self._evaluator == "device":
            return f"{1 / trial.value:.3f} x cuBLAS ({trial.config.id})"
        return f"{render.duration(trial.value)} predicted ({trial.config.id})"

    def _finish(self, event: Done) -> None:
        self.stop()
        out = "".join(f", {count} rejected by the {stage}" for stage, count in self._rejected.items())
        source = "the row was there and is still valid" if event.reused else f"{event.compiled} kernels compiled{out}"
        render.note(f"{event.row.key.problem.shape}: {source}; {event.elapsed_s:.1f} s")
