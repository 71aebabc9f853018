"""``autogemm check``: execute generated kernels on the CPU and report deadlocks, races and wrong numbers."""

from __future__ import annotations

from typing import Annotated

import typer

from ..config import NAMED
from ..constraints import require_legal
from ..dtypes import dtype as lookup_dtype
from ..errors import InputError
from ..problem import Problem, parse_shape
from ..results import Level
from . import options, render

FINDINGS = 1


def check(
    shape: options.OptionalShape = None,
    arch: options.ArchOption = "sm_100a",
    dtype: options.DtypeOption = "float16",
    config: options.ConfigOption = None,
    config_id: options.IdOption = None,
    settings: options.SetOption = None,
    level: Annotated[
        str,
        typer.Option(
            "--level", metavar="tile|ptx", help="Execute the traced kernel, or the lowered one with real descriptors."
        ),
    ] = "tile",
    seeds: Annotated[int, typer.Option("--seeds", min=1, metavar="N", help="Random schedules to explore.")] = 3,
    as_json: options.JsonOption = False,
) -> None:
    """Execute a kernel on the CPU: deadlocks, races, uninitialized reads, wrong results. Exit status 1 on findings.

    Without --shape, at a small shape that exercises every role, ring wrap and tail. Without a config, every named one.
    """
    arch_name, kind = options.parse_arch(arch or "sm_100a"), lookup_dtype(dtype).name
    levels: dict[str, Level] = {"tile": "tile", "ptx": "ptx"}
    if level not in levels:
        raise InputError(f"unknown level {level!r}; use {' or '.join(levels)}")
    extents = None if shape is None else parse_shape(shape)
    problem = None if extents is None else Problem(m=extents[0], n=extents[1], k=extents[2], dtype=kind)
    chosen = options.chosen_config(arch_name, config, config_id, settings)
    candidates = {config or chosen.id: chosen} if chosen is not None else NAMED[arch_name]
    for candidate in candidates.values():
        require_legal(candidate, arch_name, problem, dtype=kind)

    from ..simulate.check import check_config

    documents, found = [], False
    for name, candidate in candidates.items():
        report = check_config(candidate, arch_name, shape=extents, dtype=kind, level=levels[level], seeds=tuple(range(seeds)))
        found |= not report.passed
        documents.append({"config": candidate.to_knobs(), "config_id": candidate.id, "arch": arch_name, **report.to_json()})
        if not as_json:
            render.check_report(f"{arch_name} {name}", report)
    if as_json:
        render.document(documents)
    if found:
        raise typer.Exit(FINDINGS)
