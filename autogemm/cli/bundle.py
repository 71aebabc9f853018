"""``autogemm bundle``: rows, kernels and their loader for hosts with nothing but torch and the CUDA driver."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..device import Device
from ..errors import InputError
from . import options, render


def bundle(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR|FILE.zip", help="Where to write; must not exist yet.")],
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="SLUG", help="GPU that will run it.")] = None,
    arch: options.ArchOption = None,
    shape: options.ShapeList = None,
    shapes: options.ShapesFile = None,
    dtype: options.DtypeOption = "float16",
    sm_count: Annotated[int | None, typer.Option("--sm-count", min=1, metavar="N", help="SM budget of the rows.")] = None,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Take only kernels that are compiled already.")] = False,
    workers: options.WorkersOption = None,
    db: options.DbOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Write tuned rows and their kernels into one folder or zip file, with hashes, to be loaded by autogemm.load_bundle.

    Without shapes: every row of the GPU.
    """
    if gpu is not None and arch is not None:
        raise InputError("give --gpu or --arch, not both")
    problems = options.problems(shape, shapes, dtype) if shape or shapes is not None else None
    device = Device.of_gpu(gpu) if gpu is not None else Device.of_arch(arch or "sm_90a")

    from ..bundle import make_bundle

    report = make_bundle(
        problems, device=device, database=options.database(db), out=out, sm_count=sm_count, compiling=not no_compile,
        workers=workers,
    )  # fmt: skip
    for missing in report.missing:
        render.warn(f"{missing} has no row and will run torch.matmul")
    if as_json:
        render.document({**asdict(report), "path": str(report.path)})
        return
    render.line(f"{report.path}: {report.rows} rows, {report.kernels} kernels, {report.bytes >> 10} KiB")
    if report.cublas:
        render.line(f"  cuBLAS is faster on {', '.join(report.cublas)}")
    if report.cublaslt:
        render.line(f"  an algorithm of cuBLASLt is fastest on {', '.join(report.cublaslt)}")
    render.line(f"  identity {report.sha256}")
