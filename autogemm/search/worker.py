"""Worker: runs the trials of shared studies on one GPU, until there is nothing left to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..device import Device
from ..errors import InputError
from ..problem import Problem
from .evaluate import Evaluator
from .loop import Search
from .progress import Budget, Meter, Note, Progress
from .storage import GRACE_S, HEARTBEAT_S, PATIENCE_S, study_names
from .study import OptunaStore, open_shared
from .supply import Supply
from .tune import STUDY_PREFIX, Options, Tuner

# Seconds between looks for work.
_POLL_S: Final = 1.0


class Worker:
    """Claims trials from every open study at one storage that is for its kind of GPU."""

    def __init__(
        self, storage: str, device: Device, *, supply: Callable[[str], Supply], evaluator: Callable[[Problem, int], Evaluator],
        progress: Progress = lambda event: None, heartbeat_s: int = HEARTBEAT_S, grace_s: int = GRACE_S,
        patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        """Prepare; ``run`` connects.

        Args:
            supply: makes the source of candidates for a dtype.
            evaluator: makes what tries them, for one Problem on so many SMs.
        """
        self._storage, self._device, self._progress = storage, device, progress
        self._make_supply, self._make_evaluator = supply, evaluator
        self._supplies: dict[str, Supply] = {}
        self._timing: dict[str, Any] = {"heartbeat_s": heartbeat_s, "grace_s": grace_s, "patience_s": patience_s}
        self._refused: set[str] = set()

    def run(self, *, idle_s: float | None = None) -> int:
        """Work until no study has had anything to do for ``idle_s`` (None: for ever); return the trials finished.

        Raises:
            InputError: the storage can't be reached, at the start or for longer than ``patience_s``.
        """
        study_names(self._storage, STUDY_PREFIX)  # raises at once if the storage is not there
        finished, last = 0, time.monotonic()
        try:
            while True:
                done = sum(self._serve(name) for name in self._patiently(lambda: study_names(self._storage, STUDY_PREFIX)))
                finished += done
                if done:
                    last = time.monotonic()
                elif idle_s is not None and time.monotonic() - last >= idle_s:
                    return finished
                else:
                    time.sleep(_POLL_S)
        finally:
            for supply in self._supplies.values():
                supply.close()

    def _serve(self, name: str) -> int:
        """Run trials of one study until none is queued; return how many."""
        store = self._patiently(lambda: open_shared(self._storage, name, create=False, **self._timing))
        try:
            attributes = store.attributes
            task = attributes.get("task")
            if not attributes.get("open") or task is None or not self._fits(name, task) or not store.open_trials():
                return 0
            return self._work(store, task)
        finally:
            store.close()

    def _work(self, store: OptunaStore, task: Mapping[str, Any]) -> int:
        ticket = store.ask()
        if ticket is None:
            return 0
        problem = Problem(**{name: task[name] for name in ("m", "n", "k", "dtype", "layout", "epilogue")})
        evaluator = self._make_evaluator(problem, int(task["sm_count"]))
        search = Search(
            order=(), evaluator=evaluator, supply=self._supply(problem.dtype), store=store, meter=Meter(Budget()),
            progress=self._progress,
        )  # fmt: skip
        done = 0
        try:
            while ticket is not None:
                search.work([ticket], planned=int(task["candidates"]))
                done += 1
                ticket = store.ask()
        finally:
            evaluator.close()
        return done

    def _fits(self, name: str, task: Mapping[str, Any]) -> bool:
        reasons = [
            f"{field} {task.get(field)}, here {here}"
            for field, here in (("gpu", self._device.gpu), ("generator", self._generator(str(task.get("dtype")))))
            if task.get(field) != here
        ]
        if reasons and name not in self._refused:
            self._refused.add(name)
            self._progress(Note(text=f"leaving {name} to others: {'; '.join(reasons)}"))
        return not reasons

    def _generator(self, dtype: str) -> str:
        return self._supply(dtype).origin[0]

    def _supply(self, dtype: str) -> Supply:
        if dtype not in self._supplies:
            self._supplies[dtype] = self._make_supply(dtype)
        return self._supplies[dtype]

    def _patiently(self, action: Callable[[], Any]) -> Any:
        began = time.monotonic()
        while True:
            try:
                return action()
            except InputError:
                if time.monotonic() - began > self._timing["patience_s"]:
                    raise
                time.sleep(_POLL_S)


def run_worker(
    storage: str, device: Device, *, device_index: int = 0, options: Options | None = None, idle_s: float | None = None,
    progress: Progress = lambda event: None,
) -> int:  # fmt: skip
    """Run trials of the studies at ``storage`` on GPU ``device_index`` and return how many were finished.

    Raises:
        InputError: the storage can't be reached, or the device can't be used.
    """
    with Tuner(device, evaluator="device", device_index=device_index, options=options) as tuner:
        worker = Worker(storage, device, supply=tuner.supply, evaluator=tuner.evaluator, progress=progress)
        return worker.run(idle_s=idle_s)
