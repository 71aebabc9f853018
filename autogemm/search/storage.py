"""Where Optuna studies are kept: a journal file under the cache folder, or a database shared by many workers."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

from filelock import FileLock, Timeout

from ..errors import InputError, MissingDependency
from .trial import MAX_ATTEMPTS, Trial

Sampler = Literal["order", "random", "tpe"]

# A worker shows a sign of life every HEARTBEAT_S; silence for GRACE_S means that it is dead. A database that does not answer
# is waited for up to PATIENCE_S.
HEARTBEAT_S: Final = 10
GRACE_S: Final = 40
PATIENCE_S: Final = 120.0

# What Optuna raises, depending on where it trips, when it replays a file that is none of its journals.
_NOT_A_JOURNAL: Final = (ValueError, KeyError, TypeError, AssertionError)


def local_study(
    folder: Path, name: str, *, sampler: Sampler, seed: int, fresh: bool, waiting: Callable[[], None]
) -> tuple[Any, Any, FileLock]:
    """Return (study, storage, owner's lock) of the journal file for ``name`` under ``folder``.

    Args:
        fresh: put an existing journal aside (``.old``) and start an empty one.
        waiting: called once if another process owns the file, before waiting for it to end.

    Raises:
        MissingDependency: Optuna is not installed.
        InputError: the folder can't be written, or the file is no journal.
    """
    optuna = load_optuna()
    path = folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.journal"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.owner")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting()
            lock.acquire()
        if fresh and path.exists():
            path.replace(path.with_suffix(".old"))
        _cut_torn_tail(path)
    except OSError as error:
        raise InputError(
            f"can't use {folder} for studies: {error.strerror}; set AUTOGEMM_CACHE to a writable folder"
        ) from error
    try:
        storage = _journal(path)
        study = optuna.create_study(
            storage=storage, study_name=name, load_if_exists=True, direction="minimize", sampler=_make_sampler(sampler, seed)
        )
    except _NOT_A_JOURNAL as error:
        lock.release()
        raise _no_journal(path, error) from error
    return study, storage, lock


def _no_journal(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} is not a study journal: {error}; move it away to start anew")


def shared_study(
    url: str, name: str, *, create: bool, sampler: Sampler, seed: int, heartbeat_s: int, grace_s: int
) -> tuple[Any, Any]:
    """Return (study, storage) of the study ``name`` in the database at ``url`` (``postgresql://...``).

    Raises:
        MissingDependency: Optuna or the database driver is not installed.
        InputError: not a database URL, not reachable, or no such study.
    """
    optuna = load_optuna()
    storage = _database(url, heartbeat_s, grace_s)
    maker = _make_sampler(sampler, seed)
    try:
        if create:
            study = optuna.create_study(
                storage=storage, study_name=name, load_if_exists=True, direction="minimize", sampler=maker
            )
        else:
            study = optuna.load_study(storage=storage, study_name=name, sampler=maker)
    except KeyError as error:
        raise InputError(f"storage {hide_password(url)} holds no study {name!r}") from error
    except transient_errors() as error:
        raise InputError(f"can't reach storage {hide_password(url)}: {first_line(error)}; is it running?") from error
    return study, storage


def study_names(url: str, prefix: str = "") -> list[str]:
    """Return the names of the studies at ``url`` that start with ``prefix``, sorted.

    Raises:
        MissingDependency, InputError: as ``shared_study``.
    """
    optuna = load_optuna()
    storage = _database(url, HEARTBEAT_S, GRACE_S)
    try:
        return sorted(name for name in optuna.get_all_study_names(storage) if name.startswith(prefix))
    except transient_errors() as error:
        raise InputError(f"can't reach storage {hide_password(url)}: {first_line(error)}; is it running?") from error
    finally:
        storage.engine.dispose()


def read_trials(folder: Path) -> Iterator[tuple[str, list[Trial]]]:
    """Yield (study name, finished trials) of every journal under ``folder``, without disturbing its owner.

    Raises:
        MissingDependency: Optuna is not installed.
        InputError: a file is no journal.
    """
    optuna = load_optuna()
    for path in sorted(folder.glob("*.journal")):
        try:
            storage = _journal(path)
            studies = [optuna.load_study(storage=storage, study_name=name) for name in optuna.get_all_study_names(storage)]
        except _NOT_A_JOURNAL as error:
            raise _no_journal(path, error) from error
        for study in studies:
            yield study.study_name, finished_trials(study)


def finished_trials(study: Any) -> list[Trial]:
    """Return the Trials that ``study`` has finished, in the order in which they were made."""
    from optuna.trial import TrialState

    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    return [Trial.from_json(t.user_attrs["result"]) for t in done if "result" in t.user_attrs]


def hide_password(url: str) -> str:
    """Return a database URL that is fit to be shown."""
    return re.sub(r"://([^:/@]*):[^@]*@", r"://\1:***@", url)


def transient_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of a database that is gone for now."""
    from optuna.exceptions import StorageInternalError

    try:
        from sqlalchemy.exc import DBAPIError
    except ImportError:
        return (StorageInternalError,)
    return (StorageInternalError, DBAPIError)


def first_line(error: BaseException) -> str:
    """Return the first line of the driver's own message."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return str(cause).strip().split("\n")[0]


def load_optuna() -> Any:
    """Return the quietened Optuna package.

    Raises:
        MissingDependency: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise MissingDependency("resumable searches need Optuna; install autogemm[tune]") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class _NoLock:
    """For a journal whose owner's lock already keeps others out; Optuna's own lock outlives a killed holder."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _journal(path: Path) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    class Journal(JournalFileBackend):  # type: ignore[misc]  # Optuna's types are not followed
        """Leaves it to the system when the disk is written: Optuna waits for it five times per trial, 8 ms each.

        A killed process loses nothing by that; a machine that loses power loses the last trials, whole lines of them.
        """

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            with path.open("ab") as file:
                file.write("".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode())

    return JournalStorage(Journal(str(path), lock_obj=_NoLock()))


def _cut_torn_tail(path: Path) -> None:
    """Remove a last line that its writer was killed in the middle of; anything appended to it would be lost with it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        keep = size
        while keep > 0:
            block = max(0, keep - 4096)
            file.seek(block)
            end = file.read(keep - block).rfind(b"\n")
            if end >= 0:
                keep = block + end + 1
                break
            keep = block
        if keep < size:
            file.truncate(keep)


def _make_sampler(sampler: Sampler, seed: int) -> Any:
    import optuna

    if sampler == "tpe":
        # Start-up trials are the queued ones, the model's best.
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=8)
    return optuna.samplers.RandomSampler(seed=seed)


def _database(url: str, heartbeat_s: int, grace_s: int) -> Any:
    optuna = load_optuna()
    if "://" not in url:
        raise InputError(f"storage {url!r} is not a database URL; give postgresql://USER@HOST/DATABASE")
    try:
        import sqlalchemy.exc

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # heartbeats are an experimental argument
            return optuna.storages.RDBStorage(
                # The driver is named because what a bare postgresql:// stands for depends on SQLAlchemy's version.
                re.sub(r"^postgres(ql)?://", "postgresql+psycopg2://", url),
                engine_kwargs={"pool_pre_ping": True},
                heartbeat_interval=heartbeat_s,
                grace_period=grace_s,
                heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=MAX_ATTEMPTS - 1),
            )
    except ImportError as error:
        raise MissingDependency(f"no driver for {hide_password(url)}: {error}; install autogemm[postgres]") from error
    except sqlalchemy.exc.ArgumentError as error:
        raise InputError(f"storage {hide_password(url)!r} is not a database URL: {first_line(error)}") from error
    except transient_errors() as error:
        raise InputError(f"can't reach storage {hide_password(url)}: {first_line(error)}; is it running?") from error
