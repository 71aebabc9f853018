"""Databases as wholes: merge, compare, prune and export them, and bring files of an older schema up to date."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from . import database as database_module
from .binary import write_whole
from .config import KNOBS
from .database import Database
from .errors import DatabaseError, InputError
from .record import SCHEMA as ROW_SCHEMA
from .record import Key, Row

Preference = Literal["best", "newest"]
ExportFormat = Literal["csv", "json"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One of several rows for a key, and the database it came from."""

    row: Row
    source: str

    def __str__(self) -> str:
        ratio, library = self.row.ratio(), self.row.ratio("cublaslt")
        what = "predicted" if ratio is None else f"{ratio:.3f} x cuBLAS"
        if library is not None:
            what += f", cuBLASLt's algorithm {library:.3f}"
        return f"{self.row.config.id} ({what}, {self.row.provenance.date}) from {self.source}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """Rows of one key that disagree on the Config, on its status or on what runs.

    Attributes:
        kept: the row that stays.
        dropped: the others, best first.
    """

    key: Key
    kept: Candidate
    dropped: tuple[Candidate, ...]

    def __str__(self) -> str:
        return f"{self.key}: kept {self.kept}; dropped {'; '.join(map(str, self.dropped))}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeReport:
    """What ``merge`` did to the target.

    Attributes:
        added, replaced, unchanged: keys that are new in it, hold another row now, or hold the row they held.
        conflicts: disagreements, in order of their keys.
    """

    added: int
    replaced: int
    unchanged: int
    conflicts: tuple[Conflict, ...]


def better(one: Row, other: Row) -> Row:
    """Return which of two Rows of one key has the better evidence.

    Measured before predicted; of two measured ones, the higher median of paired ratios to cuBLAS, the kernel's or that of
    cuBLASLt's algorithm, since times of different runs do not compare; of two predicted ones, the later. What is still equal is
    decided by date, then content: a total order.
    """
    return max(one, other, key=_merit)


def _merit(row: Row) -> tuple[Any, ...]:
    ratio = row.ratio()
    return (ratio is not None, max(ratio or 0.0, row.ratio("cublaslt") or 0.0), *_recency(row))


def _recency(row: Row) -> tuple[Any, ...]:
    content = json.dumps(row.to_json(), sort_keys=True)
    return (row.provenance.date, hashlib.sha256(content.encode()).hexdigest())


def merge(sources: Sequence[Database], into: Database, *, prefer: Preference = "best", dry_run: bool = False) -> MergeReport:
    """Put the rows of ``sources`` into ``into``, keeping one per key; rows keep their provenance.

    The result does not depend on the order of ``sources``, nor on whether they are merged at once or one after the other.

    Args:
        prefer: ``best`` keeps the better evidence (see ``better``), ``newest`` the later measurement.
        dry_run: only report.

    Raises:
        DatabaseError: a file can't be understood or written; then nothing is written.
        InputError: a source does not exist.
    """
    if prefer not in get_args(Preference):
        raise InputError(f"unknown preference {prefer!r}; give one of {', '.join(get_args(Preference))}")
    for source in sources:
        if not source.folder.is_dir():
            raise InputError(f"no database at {source.folder}")
    offered: dict[Key, list[Candidate]] = {}
    for origin in (into, *sources):
        for row in origin.rows():
            offered.setdefault(row.key, []).append(Candidate(row=row.rounded(), source=str(origin.folder)))
    before = {row.key: row for row in into.rows()}
    merit: Callable[[Row], tuple[Any, ...]] = (
        _merit if prefer == "best" else lambda row: (row.status == "measured", *_recency(row))
    )
    kept: dict[Key, Row] = {}
    conflicts = []
    for key in sorted(offered, key=str):
        ranked = sorted(offered[key], key=lambda c: (merit(c.row), c.source), reverse=True)
        kept[key] = ranked[0].row
        # One of equal rows, as where a database was copied, is enough to show.
        others = {merit(c.row): c for c in reversed(ranked[1:]) if _disagree(c.row, ranked[0].row)}
        if others:
            conflicts.append(Conflict(key=key, kept=ranked[0], dropped=tuple(reversed(others.values()))))
    if not dry_run:
        into.put_many(
            [row for key, row in kept.items() if before.get(key) != row],
            choose=lambda held, given: max(held, given, key=merit),
        )
    changed = [key for key, row in kept.items() if before.get(key) != row]
    added = sum(key not in before for key in changed)
    return MergeReport(
        added=added, replaced=len(changed) - added, unchanged=len(kept) - len(changed), conflicts=tuple(conflicts)
    )


def _disagree(one: Row, other: Row) -> bool:
    return _answer(one) != _answer(other)


def _answer(row: Row) -> tuple[Any, ...]:
    return (row.config, row.status, row.choice, row.cublaslt.algorithm if row.cublaslt and row.choice == "cublaslt" else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A key whose rows differ between two databases.

    Attributes:
        what: what differs, in words.
    """

    before: Row
    after: Row
    what: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How one database differs from another; rows in order of their keys."""

    added: tuple[Row, ...]
    removed: tuple[Row, ...]
    changed: tuple[Change, ...]
    unchanged: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict of keys and words."""
        return {
            "added": [str(row.key) for row in self.added], "removed": [str(row.key) for row in self.removed],
            "changed": [{"key": str(c.before.key), "what": list(c.what)} for c in self.changed], "unchanged": self.unchanged,
        }  # fmt: skip


def diff(old: Database, new: Database) -> Difference:
    """Return what turns ``old`` into ``new``.

    Raises:
        DatabaseError: a file can't be understood.
    """
    before, after = ({row.key: row for row in database.rows()} for database in (old, new))
    changed = []
    for key in sorted(before.keys() & after.keys(), key=str):
        what = _changes(before[key], after[key])
        if what:
            changed.append(Change(before=before[key], after=after[key], what=what))
    return Difference(
        added=tuple(after[key] for key in sorted(after.keys() - before.keys(), key=str)),
        removed=tuple(before[key] for key in sorted(before.keys() - after.keys(), key=str)),
        changed=tuple(changed), unchanged=len(before.keys() & after.keys()) - len(changed),
    )  # fmt: skip


def _changes(one: Row, other: Row) -> tuple[str, ...]:
    if one == other:
        return ()
    what = []
    if one.config != other.config:
        old, new = one.config.to_knobs(), other.config.to_knobs()
        what += [f"{name} {old[name]} -> {new[name]}" for name in KNOBS if old[name] != new[name]]
    if one.status != other.status:
        what.append(f"{one.status} -> {other.status}")
    if one.choice != other.choice:
        what.append(f"runs {one.choice} -> {other.choice}")
    old_algorithm, new_algorithm = (None if r.cublaslt is None else r.cublaslt.algorithm for r in (one, other))
    if old_algorithm != new_algorithm:
        what.append(f"algorithm {old_algorithm} -> {new_algorithm}")
    was, now = one.ratio(), other.ratio()
    if was != now and was is not None and now is not None:
        what.append(f"{was:.3f} -> {now:.3f} x cuBLAS")
    elif one.time_s != other.time_s:
        what.append(f"{one.time_s * 1e6:.1f} -> {other.time_s * 1e6:.1f} us")
    pairs = zip(asdict(one.provenance).items(), asdict(other.provenance).values(), strict=True)
    what += [f"{name} {old} -> {new}" for (name, old), new in pairs if old != new]
    return tuple(what) or ("samples",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """A row that was removed, and why."""

    row: Row
    reasons: tuple[str, ...]


def prune(
    database: Database, *, generator: str | None = None, driver: str | None = None, gpu: str | None = None,
    predicted: bool = False, outdone: bool = False, dry_run: bool = False,
) -> tuple[Pruned, ...]:  # fmt: skip
    """Remove rows that no longer say anything, and return them with the reasons.

    Args:
        generator, driver: the present ones; rows of others are removed.
        gpu: look only at the rows of this GPU.
        predicted: remove predictions.
        outdone: remove rows whose measurement favours cuBLAS; dispatch does without them, but then can't say why.
        dry_run: only report.

    Raises:
        InputError: no criterion was given.
        DatabaseError: a file can't be understood or written.
    """
    if generator is None and driver is None and not predicted and not outdone:
        raise InputError("nothing to prune by; give a generator, a driver, predicted or outdone")
    found = []
    for row in database.rows(gpu):
        reasons = list(row.stale(generator=generator, driver=driver))
        if predicted and row.status == "predicted":
            reasons.append("predicted")
        if outdone and row.choice == "cublas":
            reasons.append("cuBLAS is faster")
        if reasons:
            found.append(Pruned(row=row, reasons=tuple(reasons)))
    if found and not dry_run:
        database.remove(pruned.row.key for pruned in found)
    return tuple(found)


_COLUMNS: Final = (
    "gpu", "arch", "sm_count", "dtype", "layout", "epilogue", "m", "n", "k", "status", "choice", "config_id", "time_us",
    "tflops", "ratio_to_cublas", "spread", "ratio_cold", "cublaslt_us", "cublaslt_ratio_to_cublas", "cublaslt_ratio_cold",
    "cublaslt_algorithm", "cublaslt_version", "generator", "driver", "torch", "date",
)  # fmt: skip


def export(rows: Iterable[Row], form: ExportFormat = "csv") -> str:
    """Return ``rows`` as one table for spreadsheets and scripts, one line or object per row, without the samples.

    Raises:
        InputError: unknown form.
    """
    records = [_record(row) for row in rows]
    if form == "json":
        return json.dumps(records, indent=1) + "\n"
    if form != "csv":
        raise InputError(f"unknown form {form!r}; give one of {', '.join(get_args(ExportFormat))}")
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=[*_COLUMNS, *KNOBS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _record(row: Row) -> dict[str, Any]:
    key, library = row.key, row.cublaslt
    values: dict[str, Any] = {
        "gpu": key.gpu, "arch": key.arch, "sm_count": key.sm_count, "dtype": key.dtype, "layout": key.layout,
        "epilogue": key.epilogue, "m": key.m, "n": key.n, "k": key.k, "status": row.status, "choice": row.choice,
        "config_id": row.config.id, "time_us": round(row.time_s * 1e6, 3),
        "tflops": round(key.problem.flops / row.time_s / 1e12, 1),
        "ratio_to_cublas": _four(row.ratio()), "spread": _four(row.spread()), "ratio_cold": _four(row.ratio(cold=True)),
        "cublaslt_us": None if library is None else round(library.time_s * 1e6, 3),
        "cublaslt_ratio_to_cublas": _four(row.ratio("cublaslt")),
        "cublaslt_ratio_cold": _four(row.ratio("cublaslt", cold=True)),
        "cublaslt_algorithm": None if library is None else library.algorithm.name,
        "cublaslt_version": None if library is None else library.algorithm.version, "generator": row.provenance.generator,
        "driver": row.provenance.driver, "torch": row.provenance.torch, "date": row.provenance.date,
    }  # fmt: skip
    return {**values, **row.config.to_knobs()}


def _four(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


# A step turns a database document of one schema into one of the next: {1: step} leads from 1 to 2.
Step = Callable[[dict[str, Any]], dict[str, Any]]
STEPS: Final[dict[int, Step]] = {}


def migrate(
    folder: Path, *, steps: Mapping[int, Step] | None = None, target: int | None = None, dry_run: bool = False
) -> tuple[Path, ...]:
    """Bring every file under ``folder`` to the present schema; return those that were older, kept as ``*.json.schemaN``.

    Args:
        steps: what leads from a schema to the next; by default those that autogemm knows.
        target: schema to reach; by default the present one.

    Raises:
        DatabaseError: a file can't be read, is newer than ``target``, or no step leads on from its schema; nothing is written.
    """
    known = STEPS if steps is None else steps
    wanted = database_module.SCHEMA if target is None else target
    documents: dict[Path, tuple[bytes, int, dict[str, Any]]] = {}
    for path in Database(folder).paths():
        content = path.read_bytes()
        try:
            document = json.loads(content.decode("utf-8"))
            schema = document["schema"]
            if type(schema) is not int:
                raise TypeError("schema is no integer")
        except (ValueError, KeyError, TypeError) as error:
            raise DatabaseError(f"{path} is damaged: {error}; it is left as it is") from error
        if schema > wanted:
            raise DatabaseError(f"{path} has schema {schema}, newer than {wanted}; upgrade autogemm")
        if schema < wanted:
            documents[path] = (content, schema, _stepped(document, path, schema, wanted, known))
    if not dry_run:
        for path, (content, schema, document) in documents.items():
            write_whole(path.with_name(f"{path.name}.schema{schema}"), content)
            write_whole(path, (json.dumps(document, indent=1) + "\n").encode())
    return tuple(documents)


def _stepped(document: dict[str, Any], path: Path, schema: int, wanted: int, steps: Mapping[int, Step]) -> dict[str, Any]:
    for version in range(schema, wanted):
        if version not in steps:
            raise DatabaseError(f"{path} has schema {version}; no step leads from it to {version + 1}; tune again")
        document = {**steps[version](document), "schema": version + 1}
    return document


assert set(STEPS) == set(range(1, database_module.SCHEMA)), "every older schema needs a step"
assert ROW_SCHEMA >= 1
