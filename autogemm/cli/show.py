"""``autogemm show``: the rows of a database, or the configs of a search space."""

from __future__ import annotations

from typing import Annotated

import typer

from ..database import Database
from ..dtypes import dtype as lookup_dtype
from ..errors import NothingFound
from ..problem import parse_shape
from ..record import Row
from ..resources import geometry, smem_bytes, threads
from ..space import load_space
from . import options, render


def show(
    shape: options.ShapeList = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="SLUG", help="Only rows of this GPU.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="DTYPE", help="Only rows of this element type.")] = None,
    measured: Annotated[bool, typer.Option("--measured", help="Only measured rows.")] = False,
    space: Annotated[
        str | None, typer.Option("--space", metavar="ARCH", help="Show the legal configs of this arch's search space instead.")
    ] = None,
    db: options.DbOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Print tuned rows: config, measured or predicted time, ratio to cuBLAS with its spread, and what is out of date."""
    if space is not None:
        _show_space(space, dtype or "float16", as_json)
        return
    wanted = {parse_shape(text) for text in shape or ()}
    kind = None if dtype is None else lookup_dtype(dtype).name
    database = options.database(db)
    rows = [
        row
        for row in database.rows(gpu)
        if kind in (None, row.key.dtype)
        and (not wanted or (row.key.m, row.key.n, row.key.k) in wanted)
        and (not measured or row.status == "measured")
    ]
    if not rows:
        raise NothingFound(f"no such row in {database.folder}; make one with: autogemm tune --shape MxNxK")
    if as_json:
        render.document([row.to_json() for row in rows])
    else:
        render.row_table(rows, _stale(rows))
        render.note(f"{len(rows)} of {_total(database)} rows in {database.folder}")


def _total(database: Database) -> int:
    return len(database.rows())


def _stale(rows: list[Row]) -> dict[int, tuple[str, ...]]:
    from ..kernel.generate import generator_hash

    current = generator_hash()
    return {i: row.stale(generator=current) for i, row in enumerate(rows)}


def _show_space(arch: str, dtype: str, as_json: bool) -> None:
    arch_name, kind = options.parse_arch(arch), lookup_dtype(dtype).name
    space = load_space(arch_name)
    configs = space.configs(kind)
    if as_json:
        render.document([{"id": config.id, **config.to_knobs()} for config in configs])
        return
    lines = []
    for config in configs:
        tile = geometry(config, arch_name)
        lines.append(
            [
                config.id,
                f"{tile.cluster_rows}x{tile.cluster_cols}",
                str(threads(config)),
                str(smem_bytes(config, arch_name, kind)),
                str(config),
            ]
        )
    render.table(("id", "cluster tile", "threads", "smem bytes", "what"), lines, right=("threads", "smem bytes"))
    render.note(f"{len(configs)} configs, {len(space.binaries(kind))} kernels to compile, from {space.source}")
