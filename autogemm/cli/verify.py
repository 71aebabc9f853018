"""``autogemm verify``: tuned rows timed again on the GPU, driver and libraries of today."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from ..errors import MissingDependency, NothingFound
from ..problem import parse_shape
from . import live, options, render

STALE = 1


def verify(
    shape: options.ShapeList = None,
    gpu: Annotated[int, typer.Option("--gpu", min=0, metavar="I", help="GPU of this machine to measure on.")] = 0,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Skip rows whose kernel is not there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, but leave the database as it is.")] = False,
    db: options.DbOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Time measured rows again against cuBLAS and write what is found. Exit status 1 if dispatch ran what it should not.

    Where cuBLAS is faster now, the row says so and dispatch runs cuBLAS; a row whose kernel fails is removed.
    """
    shapes = ["x".join(map(str, parse_shape(text))) for text in shape or ()]
    database = options.database(db)
    database.rows()  # a file that can't be understood is found out first

    from ..local import local_device

    device = local_device(gpu)
    if device is None:
        raise MissingDependency("verify measures and needs a GPU; none is usable here")

    from ..verify import DeviceMeasure, Verified, select
    from ..verify import verify as verified

    rows = [row for row in database.rows(device.gpu) if row.measurement is not None]
    rows = select(rows, shapes) if shapes else rows
    if not rows:
        raise NothingFound(f"no measured row of {device.gpu} in {database.folder}")
    results: list[Verified] = []
    with live.counter(device.gpu, len(rows)) as advance, DeviceMeasure(gpu, compiling=not no_compile) as measure:
        results = verified(
            database, measure, device=device, rows=rows, dry_run=dry_run, told=lambda v: advance(v.row.key.problem.shape)
        )
    if as_json:
        render.document([result.to_json() for result in results])
    else:
        for result in results:
            render.line(f"{result.row.key}: {result.verdict}: {result.reason}", "red" if result.stale else None)
        counts = Counter(result.verdict for result in results)
        render.note(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if any(result.stale for result in results):
        raise typer.Exit(STALE)
