"""OptunaStore: trials kept in an Optuna study, claimed and finished through ask and tell.

A local study is a journal file that one process at a time owns; a shared one is a database (PostgreSQL) that workers on many
GPUs and hosts claim from, with heartbeats. Either way a killed process costs at most the trials it was running: they are run
again, and the result of a trial that was taken away is dropped, so that no trial finishes twice.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from ..config import Config
from ..errors import InputError
from .storage import (
    GRACE_S,
    HEARTBEAT_S,
    PATIENCE_S,
    Sampler,
    finished_trials,
    first_line,
    hide_password,
    local_study,
    shared_study,
    transient_errors,
)
from .trial import LOCAL_ATTEMPTS, MAX_ATTEMPTS, Ticket, Trial

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """The values a sampler may combine, and which combinations count.

    Attributes:
        values: knob name to values, for knobs with more than one.
        members: the legal combinations.
    """

    values: Mapping[str, Sequence[int | bool]]
    members: frozenset[Config]

    @classmethod
    def of(cls, configs: Iterable[Config]) -> Axes:
        """Return the axes that span ``configs``."""
        members = frozenset(configs)
        knobs = [config.to_knobs() for config in members]
        values = {name: sorted({k[name] for k in knobs}) for name in (knobs[0] if knobs else {})}
        return cls(values={name: v for name, v in values.items() if len(v) > 1}, members=members)


class OptunaStore:
    """A TrialStore (see ``trial.py``) over one Optuna study."""

    def __init__(
        self, study: Any, storage: Any, *, lock: FileLock | None = None, sampler: Sampler = "order", axes: Axes | None = None,
        grace_s: float = GRACE_S, patience_s: float = PATIENCE_S, where: str = "",
    ) -> None:  # fmt: skip
        """Use ``open_local`` or ``open_shared``."""
        self._study, self._storage, self._lock = study, storage, lock
        self._sampler, self._axes = sampler, axes
        self._grace_s, self._patience_s, self._where = grace_s, patience_s, where
        self._study_id = storage.get_study_id_from_name(study.study_name)
        self._beats: dict[int, threading.Event] = {}
        self._adopted: set[int] = set()
        self._last_contact = self._last_sweep = time.monotonic()
        self._quiet_until = 0.0
        if not self._shared:
            self._fail_orphans()

    @property
    def _shared(self) -> bool:
        return self._lock is None

    @property
    def name(self) -> str:
        """Name of the study."""
        return str(self._study.study_name)

    @property
    def attributes(self) -> dict[str, Any]:
        """What was attached to the study."""
        return dict(self._patiently(lambda: self._study.user_attrs))

    def set_attribute(self, name: str, value: Any) -> None:
        """Attach a JSON-ready value to the study."""
        self._patiently(lambda: self._study.set_user_attr(name, value))

    def enqueue(self, configs: Iterable[Config]) -> int:
        """See TrialStore."""
        from optuna.trial import TrialState, create_trial

        attempts: dict[str, int] = {}
        settled: set[str] = set()
        for trial in self._trials():
            config_id = trial.user_attrs.get("id")
            if config_id is not None:
                attempts[config_id] = attempts.get(config_id, 0) + 1
                if trial.state != TrialState.FAIL:
                    settled.add(config_id)
        added = 0
        for config in configs:
            if config.id in settled or attempts.get(config.id, 0) >= (MAX_ATTEMPTS if self._shared else LOCAL_ATTEMPTS):
                continue
            settled.add(config.id)
            attrs = {"id": config.id, "knobs": config.to_knobs()}
            self._patiently(self._study.add_trial, create_trial(state=TrialState.WAITING, user_attrs=attrs))
            added += 1
        return added

    def ask(self) -> Ticket | None:
        """See TrialStore. With a sampler, suggests a new Config when nothing is queued."""
        from optuna.trial import TrialState

        self._sweep()
        if self._trials(TrialState.WAITING):
            ticket = self._claim()
            if ticket is not None:
                return ticket
        return self._suggest() if self._sampler != "order" and self._axes is not None else None

    def tell(self, ticket: Ticket, trial: Trial) -> bool:
        """See TrialStore."""
        from optuna.trial import TrialState

        state = TrialState.COMPLETE if trial.value is not None else TrialState.PRUNED
        token = f"{os.uname().nodename}-{os.getpid()}-{ticket.number}-{time.time_ns()}"
        try:
            return self._patiently(self._finish, ticket.number, trial, state, token)
        finally:
            self._stop_heartbeat(ticket.number)

    def finished(self) -> list[Trial]:
        """See TrialStore."""
        return self._patiently(finished_trials, self._study)

    def open_trials(self) -> int:
        """See TrialStore."""
        from optuna.trial import TrialState

        self._sweep()
        return len(self._trials(TrialState.WAITING, TrialState.RUNNING))

    def close(self) -> None:
        """See TrialStore."""
        for number in list(self._beats):
            self._stop_heartbeat(number)
        if self._lock is not None:
            self._lock.release()
        else:
            self._storage.engine.dispose()

    def _finish(self, number: int, trial: Trial, state: Any, token: str) -> bool:
        from optuna.exceptions import UpdateFinishedTrialError

        frozen = self._storage.get_trial(self._trial_id(number))
        if frozen.state.is_finished():
            # Either an earlier attempt of this call got through before the connection broke, or the trial was taken away.
            return bool(frozen.state == state and frozen.user_attrs.get("by") == token)
        try:
            self._set_attribute(number, "result", trial.to_json())
            self._set_attribute(number, "by", token)
            self._study.tell(number, trial.value, state)
        except (UpdateFinishedTrialError, ValueError):
            return False
        return True

    def _trials(self, *states: Any) -> list[Any]:
        return list(self._patiently(lambda: self._study.get_trials(deepcopy=False, states=states or None)))

    def _trial_id(self, number: int) -> int:
        return int(self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number))

    def _set_attribute(self, number: int, name: str, value: Any) -> None:
        self._storage.set_trial_user_attr(self._trial_id(number), name, value)

    def _claim(self) -> Ticket | None:
        trial = self._patiently(self._ask_study, {})
        knobs = trial.user_attrs.get("knobs")
        if knobs is None:
            # Others emptied the queue between the look and the claim; Optuna then makes a trial of its own.
            self._patiently(self._drop, trial.number, "nothing was queued")
            return None
        self._start_heartbeat(trial.number)
        return Ticket(number=trial.number, config=Config.from_knobs(knobs))

    def _ask_study(self, distributions: dict[str, Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Heartbeat is supposed to be used with optimize": this class beats itself
            return self._study.ask(distributions)

    def _drop(self, number: int, why: str) -> None:
        from optuna.trial import TrialState

        if not self._storage.get_trial(self._trial_id(number)).state.is_finished():
            self._set_attribute(number, "empty", why)
            self._study.tell(number, state=TrialState.FAIL)

    def _suggest(self) -> Ticket | None:
        from optuna.distributions import CategoricalDistribution

        assert self._axes is not None
        known = {t.user_attrs.get("id") for t in self._trials()}
        untried = [config for config in self._axes.members if config.id not in known]
        if not untried:
            return None
        distributions = {name: CategoricalDistribution(values) for name, values in self._axes.values.items()}
        trial = self._patiently(self._ask_study, distributions)
        # Most combinations of knob values are illegal: take the nearest Config that is a member and was not tried.
        wanted = Config.from_knobs(trial.params, base=untried[0])
        config = min(untried, key=lambda c: (_apart(c, wanted), c.id))
        self._patiently(self._set_attribute, trial.number, "knobs", config.to_knobs())
        self._patiently(self._set_attribute, trial.number, "id", config.id)
        self._start_heartbeat(trial.number)
        return Ticket(number=trial.number, config=config)

    def _fail_orphans(self) -> None:
        """Queue again what a killed owner of a local study was running; holding its lock shows that it is gone."""
        from optuna.trial import TrialState

        orphans = self._trials(TrialState.RUNNING)
        for trial in orphans:
            self._study.tell(trial.number, state=TrialState.FAIL)
        self.enqueue(Config.from_knobs(t.user_attrs["knobs"]) for t in orphans if "knobs" in t.user_attrs)

    def _sweep(self) -> None:
        """Let trials whose worker fell silent be run again; after an outage only once all workers could speak up."""
        if not self._shared:
            return
        from optuna.storages import fail_stale_trials
        from optuna.trial import TrialState

        now = time.monotonic()
        if now < max(self._last_sweep + self._grace_s / 4, self._quiet_until):
            return
        self._last_sweep = now
        for trial in self._trials(TrialState.RUNNING):
            # A worker killed between claim and first heartbeat would never count as silent: beat once on its behalf.
            if trial.number not in self._adopted and trial.number not in self._beats:
                self._adopted.add(trial.number)
                self._patiently(self._beat, trial.number)
        if time.monotonic() >= self._quiet_until:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # experimental API of Optuna
                self._patiently(fail_stale_trials, self._study)

    def _beat(self, number: int) -> None:
        self._storage.record_heartbeat(self._trial_id(number))

    def _start_heartbeat(self, number: int) -> None:
        if not self._shared:
            return
        stop = threading.Event()
        interval = self._storage.get_heartbeat_interval()

        def run() -> None:
            while not stop.is_set():
                with contextlib.suppress(*transient_errors()):  # the main thread meets an outage too, and reports it
                    self._beat(number)
                    self._last_contact = time.monotonic()
                stop.wait(interval)

        self._beats[number] = stop
        threading.Thread(target=run, name=f"heartbeat-{number}", daemon=True).start()

    def _stop_heartbeat(self, number: int) -> None:
        stop = self._beats.pop(number, None)
        if stop is not None:
            stop.set()

    def _patiently(self, action: Callable[..., _T], *args: Any) -> _T:
        """Return ``action(*args)``, waiting out a database that is not reachable for up to ``patience_s``."""
        if not self._shared:
            return action(*args)
        began, pause = time.monotonic(), 0.1
        while True:
            try:
                result = action(*args)
            except transient_errors() as error:
                waited = time.monotonic() - began
                self._quiet_until = time.monotonic() + self._grace_s
                if waited > self._patience_s:
                    raise InputError(
                        f"storage {self._where} has not answered for {waited:.0f} s: {first_line(error)}; finished trials are "
                        "safe in it; start it again and repeat the command"
                    ) from error
                time.sleep(pause)
                pause = min(2 * pause, 2.0)
                continue
            if time.monotonic() - self._last_contact > self._grace_s / 2:
                self._quiet_until = time.monotonic() + self._grace_s
            self._last_contact = time.monotonic()
            return result


def _apart(one: Config, other: Config) -> float:
    """Return a distance in knob space: octaves between integers, 1 between truth values."""
    pairs = zip(one.to_knobs().values(), other.to_knobs().values(), strict=True)
    return sum(abs(math.log2(a / b)) if not isinstance(a, bool) else float(a != b) for a, b in pairs)


def open_local(
    folder: Path, name: str, *, sampler: Sampler = "order", axes: Axes | None = None, seed: int = 0, fresh: bool = False,
    waiting: Callable[[], None] = lambda: None,
) -> OptunaStore:  # fmt: skip
    """Return the study ``name`` in a journal file under ``folder``; errors and ``waiting`` as in ``storage.local_study``."""
    study, storage, lock = local_study(folder, name, sampler=sampler, seed=seed, fresh=fresh, waiting=waiting)
    return OptunaStore(study, storage, lock=lock, sampler=sampler, axes=axes)


def open_shared(
    url: str, name: str, *, create: bool = True, sampler: Sampler = "order", axes: Axes | None = None, seed: int = 0,
    heartbeat_s: int = HEARTBEAT_S, grace_s: int = GRACE_S, patience_s: float = PATIENCE_S,
) -> OptunaStore:  # fmt: skip
    """Return the study ``name`` in the database at ``url``, for any number of workers; errors as in ``storage.shared_study``.

    Args:
        heartbeat_s, grace_s: seconds between signs of life, and of silence after which a trial is run again.
        patience_s: how long an unreachable database is waited for before giving up with one InputError.
    """
    study, storage = shared_study(
        url, name, create=create, sampler=sampler, seed=seed, heartbeat_s=heartbeat_s, grace_s=grace_s
    )
    return OptunaStore(
        study, storage, sampler=sampler, axes=axes, grace_s=grace_s, patience_s=patience_s, where=hide_password(url)
    )
