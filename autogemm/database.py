"""Database: tuned Rows as JSON files ``<folder>/<gpu>/<dtype>.json``, made to be committed, reviewed and shipped.

Writers lock, read, merge and rename, so that concurrent tuners lose no row and a killed one leaves no torn file. A file that
can't be understood (truncated, not UTF-8, newer schema) is never overwritten: it stays as it is and every use of it is one
DatabaseError.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from .binary import write_whole
from .errors import DatabaseError, InputError
from .record import Key, Row
from .settings import database_folder

SCHEMA: Final = 1

# A writer holds the lock for the milliseconds of one read and one rename; longer means a stuck file system.
LOCK_TIMEOUT_S: Final = 60.0

# Weights of Key distance, in octaves: how far a Row's Config carries. See distance().
_EXTENT_WEIGHT: Final = {"m": 1.0, "n": 1.0, "k": 0.5}
_OTHER_GPU: Final = 8.0
_OTHER_SM_COUNT: Final = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """A Row of another question that may still answer this one.

    Attributes:
        distance: octaves between the two shapes, plus what differs in the machine; see ``distance``.
        differs: what differs from the question, in words; empty for an exact hit.
    """

    row: Row
    distance: float
    differs: tuple[str, ...]


class Database:
    """The Rows under one folder. Thread-safe; a file is read again when another process has replaced it."""

    def __init__(self, folder: Path | str | None = None) -> None:
        """Open ``folder`` (by default the one that settings name); it need not exist yet."""
        self.folder = Path(folder) if folder is not None else database_folder()
        self._loaded: dict[Path, tuple[tuple[int, int, int], dict[Key, Row]]] = {}
        self._mutex = threading.Lock()

    def path(self, key: Key) -> Path:
        """Return the file that holds ``key``."""
        return self.folder / key.gpu / f"{key.dtype}.json"

    def paths(self) -> list[Path]:
        """Return every file of the database, sorted."""
        return sorted(p for p in self.folder.glob("*/*.json") if not p.name.startswith("."))

    def rows(self, gpu: str | None = None) -> list[Row]:
        """Return all Rows, or those of one GPU slug, in file order.

        Raises:
            DatabaseError: a file can't be understood.
        """
        return [row for path in self.paths() if gpu in (None, path.parent.name) for row in self._read(path).values()]

    def lookup(self, key: Key) -> Row | None:
        """Return the Row of exactly ``key``, or None.

        Raises:
            DatabaseError: its file can't be understood.
        """
        return self._read(self.path(key)).get(key)

    def nearest(self, key: Key, limit: int | None = None) -> list[Neighbour]:
        """Return the Rows of the same family as ``key`` (arch, dtypes, layout, epilogue), nearest first.

        The order depends on nothing but the Rows and ``key``. Whether a neighbour's Config is legal for the new shape is
        for the caller to check.

        Raises:
            DatabaseError: a file can't be understood.
        """
        found = [
            Neighbour(row=row, distance=distance(key, row.key), differs=difference(key, row.key))
            for path in self.paths()
            if path.stem == key.dtype
            for row in self._read(path).values()
            if row.key.family == key.family
        ]
        found.sort(key=lambda n: (n.distance, n.row.status != "measured", _order(n.row.key)))
        return found[:limit]

    def put(self, row: Row) -> Row:
        """Store ``row`` unless what is there is preferred; return the Row that the database now holds for its key."""
        return self.put_many([row])[0]

    def put_many(self, rows: Iterable[Row], choose: Callable[[Row, Row], Row] | None = None) -> list[Row]:
        """Store Rows, merging with what other processes have written; return what is now held for each key.

        ``choose(held, given)`` decides which of two Rows of one key stays; by default ``preferred``.

        Raises:
            DatabaseError: a file can't be understood, or can't be written; files are then unchanged.
            InputError: a Row that could not be read back, such as one with an SM count of 1.5; files are then unchanged.
        """
        pick = choose if choose is not None else preferred
        by_path: dict[Path, list[Row]] = {}
        given = [_readable(row.rounded()) for row in rows]
        for row in given:
            by_path.setdefault(self.path(row.key), []).append(row)
        held: dict[Key, Row] = {}
        for path, news in by_path.items():
            with self._locked(path):
                merged = dict(self._parse(path))
                before = dict(merged)
                for row in news:
                    merged[row.key] = pick(merged[row.key], row) if row.key in merged else row
                if merged != before:
                    self._write(path, merged)
                held.update({row.key: merged[row.key] for row in news})
        return [held[row.key] for row in given]

    def remove(self, keys: Iterable[Key]) -> int:
        """Delete the Rows of ``keys`` and return how many there were.

        Raises:
            DatabaseError: a file can't be understood, or can't be written.
        """
        by_path: dict[Path, set[Key]] = {}
        for key in keys:
            by_path.setdefault(self.path(key), set()).add(key)
        removed = 0
        for path, gone in by_path.items():
            if path.exists():
                with self._locked(path):
                    before = self._parse(path)
                    after = {key: row for key, row in before.items() if key not in gone}
                    if len(after) < len(before):
                        self._write(path, after)
                        removed += len(before) - len(after)
        return removed

    def require_usable(self, key: Key) -> None:
        """Raise now what ``put`` of a Row for ``key`` would raise later; for use before work is spent.

        Raises:
            DatabaseError: the file can't be understood, or its folder can't be written.
        """
        path = self.path(key)
        self._parse(path)
        folder = path.parent
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent  # the first that is there; missing ones are made by the first put, not by a question
        probe = folder / f".{path.name}.probe-{os.getpid()}"
        try:
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise _unwritable(folder, error) from error

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path.parent / f".{path.name}.lock", timeout=LOCK_TIMEOUT_S)
            lock.acquire()
        except Timeout as error:
            raise DatabaseError(f"another process has locked {path} for {LOCK_TIMEOUT_S:.0f} s; is it stuck?") from error
        except (OSError, NotImplementedError) as error:
            raise _unwritable(path.parent, error) from error
        try:
            yield
        finally:
            lock.release()

    def _read(self, path: Path) -> dict[Key, Row]:
        try:
            stat = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise DatabaseError(f"can't read {path}: {error.strerror}; check its permissions") from error
        stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        with self._mutex:
            known = self._loaded.get(path)
            if known is None or known[0] != stamp:
                known = (stamp, self._parse(path))
                self._loaded[path] = known
            return known[1]

    @staticmethod
    def _parse(path: Path) -> dict[Key, Row]:
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise DatabaseError(f"can't read {path}: {error.strerror}; check its permissions") from error
        try:
            document = json.loads(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _damaged(path, f"byte {error.start} is not UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise _damaged(path, f"not JSON ({error})") from error
        if not isinstance(document, dict) or type(document.get("schema")) is not int:
            raise _damaged(path, "no schema number")
        if document["schema"] > SCHEMA:
            raise DatabaseError(
                f"{path} has schema {document['schema']}, newer than {SCHEMA}; it is left as it is; upgrade autogemm"
            )
        rows: dict[Key, Row] = {}
        if set(document) != {"schema", "rows"} or not isinstance(document["rows"], list):
            raise _damaged(path, f"its fields are {', '.join(map(str, document))}, not schema and rows")
        for i, entry in enumerate(document["rows"]):
            try:
                row = Row.from_json(entry)
            except InputError as error:
                raise _damaged(path, f"row {i}: {error}") from error
            if (row.key.gpu, row.key.dtype) != (path.parent.name, path.stem):
                raise _damaged(path, f"row {i} is for {row.key} and belongs in {row.key.gpu}/{row.key.dtype}.json")
            if row.key in rows:
                raise _damaged(path, f"row {i} repeats {row.key}")
            rows[row.key] = row
        return rows

    def _write(self, path: Path, rows: dict[Key, Row]) -> None:
        try:
            # Left behind by writers that were killed between creating and renaming; the lock says nobody uses them now.
            for leftover in path.parent.glob(f".{path.name}.*"):
                if not leftover.name.endswith(".lock"):
                    leftover.unlink(missing_ok=True)
            write_whole(path, render(rows.values()).encode())
        except OSError as error:
            raise _unwritable(path.parent, error) from error


def _readable(row: Row) -> Row:
    """Return ``row``, which must read back as itself: one that does not would make its whole file unreadable."""
    try:
        same = Row.from_json(json.loads(json.dumps(row.to_json()))) == row
    except (InputError, TypeError, ValueError) as error:
        raise InputError(f"the row for {row.key} can't be stored: {error}") from error
    if not same:
        raise InputError(f"the row for {row.key} can't be stored: it would not read back as the same row")
    return row


def distance(asked: Key, found: Key) -> float:
    """Return how far a Row's answer must carry, in octaves of the extents; 0 for the same question.

    M and N decide how many tiles there are and how full the last wave is, K only how long each tile takes, so K counts half.
    Another SM count or GPU of the same arch weighs as much as a shape some octaves away: such a Row is used only where
    nothing similar was tuned on this machine.
    """
    total = 0.0
    for extent, weight in _EXTENT_WEIGHT.items():
        total += weight * abs(math.log2(getattr(asked, extent) / getattr(found, extent)))
    if asked.gpu != found.gpu:
        total += _OTHER_GPU
    if asked.sm_count != found.sm_count:
        total += _OTHER_SM_COUNT
    return total


def difference(asked: Key, found: Key) -> tuple[str, ...]:
    """Return what differs between two Keys of one family, in words."""
    words = []
    if asked.problem.shape != found.problem.shape:
        words.append(f"shape {found.problem.shape}")
    if asked.gpu != found.gpu:
        words.append(f"GPU {found.gpu}")
    if asked.sm_count != found.sm_count:
        words.append(f"{found.sm_count} SMs instead of {asked.sm_count}")
    return tuple(words)


def preferred(one: Row, other: Row) -> Row:
    """Return which of two Rows of one key to keep: measured before predicted, then the later, then by content.

    A total order, so that merging files gives the same result in any order.
    """
    return max(one, other, key=lambda row: (row.status == "measured", row.provenance.date, _digest(row)))


def render(rows: Iterable[Row]) -> str:
    """Return the text of a database file: rows sorted by key, one line per part of a row, so that diffs are readable."""
    blocks = []
    for row in sorted(rows, key=lambda row: _order(row.key)):
        parts = [f"   {json.dumps(name)}: {_line(value)}" for name, value in row.to_json().items() if name != "race"]
        parts[-1:-1] = _race_lines(row.to_json()["race"])
        blocks.append("  {\n" + ",\n".join(parts) + "\n  }")
    return f'{{\n "schema": {SCHEMA},\n "rows": [' + ("\n" + ",\n".join(blocks) + "\n " if blocks else "") + "]\n}\n"


def _race_lines(race: dict[str, Any] | None) -> list[str]:
    if race is None:
        return ['   "race": null']
    rest = _line({name: value for name, value in race.items() if name != "finalists"})
    finalists = ",\n".join(f"     {_line(finalist)}" for finalist in race["finalists"])
    return [f'   "race": {{\n    "finalists": [\n{finalists}\n    ], {rest[1:]}']


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _order(key: Key) -> tuple[Any, ...]:
    return (*key.family, key.gpu, key.sm_count, key.m, key.n, key.k)


def _digest(row: Row) -> str:
    return hashlib.sha256(json.dumps(row.to_json(), sort_keys=True).encode()).hexdigest()


def _damaged(path: Path, why: str) -> DatabaseError:
    return DatabaseError(f"{path} is damaged: {why}; it is left as it is; repair it, or move it away to start a new file")


def _unwritable(folder: Path, error: Exception) -> DatabaseError:
    reason = getattr(error, "strerror", None) or str(error)
    return DatabaseError(f"can't write to {folder}: {reason}; name a writable folder with --db or AUTOGEMM_DB")
