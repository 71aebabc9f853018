"""``autogemm explain``: what a matrix product runs, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from ..device import Device
from ..dtypes import dtype as lookup_dtype
from ..errors import InputError
from ..problem import Problem, parse_shape
from . import options, render


def explain(
    shape: options.OneShape,
    dtype: options.DtypeOption = "float16",
    arch: options.ArchOption = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="SLUG", help="Answer for this GPU. Default: the one here.")
    ] = None,
    sm_count: Annotated[int | None, typer.Option("--sm-count", metavar="N", help="SMs to occupy at most.")] = None,
    unmeasured: Annotated[
        bool, typer.Option("--unmeasured", help="As with AUTOGEMM_UNMEASURED=1: allow what no measurement backs.")
    ] = False,
    db: options.DbOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Say which kernel autogemm.matmul would run for a shape, from which row, and why."""
    m, n, k = parse_shape(shape)
    problem = Problem(m=m, n=n, k=k, dtype=lookup_dtype(dtype).name)
    if gpu is not None and arch is not None:
        raise InputError("give --gpu or --arch, not both")
    device = Device.of_gpu(gpu) if gpu is not None else Device.of_arch(arch) if arch is not None else None
    database = options.database(db)

    from ..dispatch import explain as explain_problem
    from ..dispatch import notices

    result = explain_problem(
        problem, device=device, database=None if db is None and device is None else database, sm_count=sm_count,
        unmeasured=True if unmeasured else None,
    )  # fmt: skip
    warnings = () if device is None else notices(device, database)
    if as_json:
        render.document({**result.to_json(), "notices": [notice.text for notice in warnings]})
        return
    render.decision(result)
    for notice in warnings:
        render.warn(notice.text)
    if device is None and result.source == "torch" and not result.sm_count:
        render.note("--gpu nvidia-h200 or --arch sm_100a says what such a GPU would run")
