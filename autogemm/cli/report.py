"""``autogemm report``: a database and its studies as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..binary import write_whole
from ..errors import InputError
from ..record import Row
from ..report import render_report
from ..search.trial import Trial
from ..settings import cache_folder
from . import options, render


def report(
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="Page to write.")] = Path("autogemm-report.html"),
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="SLUG", help="Only rows of this GPU.")] = None,
    study: Annotated[
        str | None,
        typer.Option("--study", metavar="TEXT", help="Only studies whose name contains this; without it, all that were kept."),
    ] = None,
    storage: Annotated[
        str | None, typer.Option("--storage", metavar="URL", help="Studies of this database, in place of those kept here.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--studies", metavar="DIR", help="Folder of study journals. Default: the one tune keeps.")
    ] = None,
    no_rows: Annotated[bool, typer.Option("--no-rows", help="Leave the database out: studies only.")] = False,
    db: options.DbOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Write one self-contained HTML page: rows with spread and baseline, roofline, tie sets, landscape, regret, rejections."""
    if out.is_dir() or not out.resolve().parent.is_dir():
        raise InputError(f"can't write the page {out}; name a file in an existing folder with --out")
    if storage is not None and folder is not None:
        raise InputError("give --storage or --studies, not both")
    database = options.database(db)
    rows: list[Row] = [] if no_rows else database.rows(gpu)
    studies = _shared(storage, study) if storage is not None else _kept(folder, study)
    page = render_report(rows, studies, title=f"autogemm: {gpu or 'all GPUs'}")
    try:
        write_whole(out, page.encode())
    except OSError as error:
        raise InputError(f"can't write the page {out}: {error.strerror}") from error
    trials = sum(map(len, studies.values()))
    if as_json:
        render.document({"file": str(out), "rows": len(rows), "studies": len(studies), "trials": trials})
    else:
        render.line(f"{out}: {len(rows)} rows, {trials} trials of {len(studies)} studies, {len(page) >> 10} KiB")


def _kept(folder: Path | None, text: str | None) -> dict[str, list[Trial]]:
    if folder is not None and not folder.is_dir():
        raise InputError(f"no folder of studies at {folder}")
    place = cache_folder() / "studies" if folder is None else folder
    if not place.is_dir():
        return {}
    from ..search.storage import read_trials

    return {name: trials for name, trials in read_trials(place) if trials and (text is None or text in name)}


def _shared(url: str, text: str | None) -> dict[str, list[Trial]]:
    from ..search.storage import study_names
    from ..search.study import open_shared
    from ..search.tune import STUDY_PREFIX

    found = {}
    for name in study_names(url, STUDY_PREFIX):
        if text is None or text in name:
            store = open_shared(url, name, create=False)
            try:
                found[name] = store.finished()
            finally:
                store.close()
    return {name: trials for name, trials in found.items() if trials}
