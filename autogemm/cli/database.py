"""``autogemm merge``, ``diff``, ``prune`` and ``export``: databases as wholes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from ..binary import write_whole
from ..database import Database
from ..database_tools import ExportFormat, Preference
from ..database_tools import diff as compare
from ..database_tools import export as exported
from ..database_tools import merge as merged
from ..database_tools import prune as pruned
from ..errors import InputError
from . import options, render

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]


def _existing(folder: Path) -> Database:
    if not folder.is_dir():
        raise InputError(f"no database at {folder}")
    return Database(folder)


def merge(
    sources: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Databases to take rows from.")],
    db: options.DbOption = None,
    prefer: Annotated[
        str, typer.Option("--prefer", metavar="best|newest", help="Which of two measured rows to keep.")
    ] = "best",
    dry_run: DryRun = False,
    as_json: options.JsonOption = False,
) -> None:
    """Put the rows of other databases into this one, keeping one per shape and GPU; the order does not matter."""
    if prefer not in get_args(Preference):
        raise InputError(f"unknown preference {prefer!r}; --prefer takes {' or '.join(get_args(Preference))}")
    into = options.database(db)
    preference: Preference = prefer  # type: ignore[assignment]
    report = merged([_existing(folder) for folder in sources], into, prefer=preference, dry_run=dry_run)
    if as_json:
        render.document(
            {
                "database": str(into.folder), "dry_run": dry_run, "added": report.added, "replaced": report.replaced,
                "unchanged": report.unchanged, "conflicts": [str(conflict) for conflict in report.conflicts],
            }
        )  # fmt: skip
        return
    for conflict in report.conflicts:
        render.note(f"conflict: {conflict}")
    verb = "would be " if dry_run else ""
    render.line(f"{into.folder}: {report.added} rows {verb}added, {report.replaced} replaced, {report.unchanged} unchanged")


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Database before.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Database after.")],
    as_json: options.JsonOption = False,
) -> None:
    """Say what turns one database into another. Exit status 1 if they differ."""
    difference = compare(_existing(old), _existing(new))
    if as_json:
        render.document(difference.to_json())
    else:
        for row in difference.removed:
            render.line(f"- {row.key}", "red")
        for row in difference.added:
            render.line(f"+ {row.key}", "green")
        for change in difference.changed:
            render.line(f"~ {change.before.key}: {'; '.join(change.what)}", "yellow")
        render.note(f"{difference.unchanged} rows unchanged")
    if difference.added or difference.removed or difference.changed:
        raise typer.Exit(1)


def prune(
    stale: Annotated[bool, typer.Option("--stale", help="Rows of another kernel generator than the present one.")] = False,
    driver: Annotated[
        str | None, typer.Option("--driver", metavar="VERSION", help="Rows measured under another driver than this.")
    ] = None,
    predicted: Annotated[bool, typer.Option("--predicted", help="Predictions.")] = False,
    outdone: Annotated[bool, typer.Option("--outdone", help="Rows whose measurement favours cuBLAS.")] = False,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="SLUG", help="Look only at rows of this GPU.")] = None,
    dry_run: DryRun = False,
    db: options.DbOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Remove rows that no longer say anything, by the criteria given."""
    database = options.database(db)
    generator = None
    if stale:
        from ..kernel.generate import generator_hash

        generator = generator_hash()
    found = pruned(database, generator=generator, driver=driver, gpu=gpu, predicted=predicted, outdone=outdone, dry_run=dry_run)
    if as_json:
        render.document([{"key": str(p.row.key), "reasons": list(p.reasons)} for p in found])
        return
    for p in found:
        render.line(f"{p.row.key}: {'; '.join(p.reasons)}")
    render.note(f"{len(found)} rows {'would be ' if dry_run else ''}removed from {database.folder}")


def export(
    form: Annotated[str, typer.Option("--format", metavar="csv|json", help="What to write.")] = "csv",
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="SLUG", help="Only rows of this GPU.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write to this file, not to stdout.")] = None,
    db: options.DbOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Print one line per row, without samples, for spreadsheets and scripts."""
    chosen = "json" if as_json else form
    if chosen not in get_args(ExportFormat):
        raise InputError(f"unknown form {form!r}; --format takes {' or '.join(get_args(ExportFormat))}")
    kind: ExportFormat = chosen  # type: ignore[assignment]
    text = exported(options.database(db).rows(gpu), kind)
    if out is None:
        render.raw(text)
        return
    try:
        write_whole(out, text.encode())
    except OSError as error:
        raise InputError(f"can't write {out}: {error.strerror}") from error
    render.note(f"wrote {out}")
