"""Options that several commands share, and the turning of their text into typed values before any work starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..arch import ARCHS, DEFAULT_GPU, GPUS, ArchName, Gpu, arch, gpu
from ..config import NAMED, Config, named_config
from ..constraints import problem_violations
from ..database import Database
from ..dtypes import DTYPES, dtype
from ..errors import IllegalConfig, InputError
from ..problem import Problem, parse_shape
from ..shapes import read_shapes
from ..space import load_space
from . import render

_ARCHS = ", ".join(ARCHS)

ShapeList = Annotated[
    list[str] | None, typer.Option("--shape", metavar="MxNxK", help="Shape of the product; may be given several times.")
]
OneShape = Annotated[str, typer.Option("--shape", metavar="MxNxK", help="Shape of the product.")]
OptionalShape = Annotated[str | None, typer.Option("--shape", metavar="MxNxK", help="Shape of the product.")]
ShapesFile = Annotated[
    Path | None,
    typer.Option("--shapes", metavar="FILE", help="File of shapes: a JSON list of objects with m, n, k, or MxNxK lines."),
]
ArchOption = Annotated[str | None, typer.Option("--arch", metavar="ARCH", help=f"Compute architecture: {_ARCHS}.")]
DtypeOption = Annotated[str, typer.Option("--dtype", metavar="DTYPE", help=f"Element type: {', '.join(DTYPES)}.")]
DbOption = Annotated[
    Path | None,
    typer.Option("--db", metavar="DIR", help="Database folder. Default: AUTOGEMM_DB, else the rows that ship with autogemm."),
]
WarmUpOption = Annotated[
    float,
    typer.Option("--warm-up", min=0.0, max=600.0, metavar="S", help="Seconds to keep the GPU busy first, as in sustained use."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout instead of text.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KNOB=VALUE", help="Set one knob; may be given several times.")
]
ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="NAME",
        help="Named config: " + "; ".join(f"{', '.join(points)} ({name})" for name, points in NAMED.items()) + ".",
    ),
]  # fmt: skip
IdOption = Annotated[str | None, typer.Option("--id", metavar="ID", help="Config of the search space, by its id.")]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, metavar="N", help="Compile processes. Default: one per core.")
]


def parse_arch(name: str) -> ArchName:
    """Return ``name`` if it is an arch.

    Raises:
        InputError: it is none.
    """
    return arch(name).name


def parse_gpu(arch_name: ArchName, slug: str | None = None) -> Gpu:
    """Return the GPU called ``slug``, by default the one that predictions for ``arch_name`` are for.

    Raises:
        InputError: unknown, or of another arch.
    """
    found = gpu(slug or DEFAULT_GPU[arch_name])
    if found.arch != arch_name:
        raise InputError(f"{found.slug} is {found.arch}, not {arch_name}; GPUs: {', '.join(GPUS)}")
    return found


def problems(shapes: Sequence[str] | None, file: Path | None, dtype_name: str) -> list[Problem]:
    """Return the Problems that --shape and --shapes name, without repeats; all are shapes that kernels can take.

    A shape of a file that no kernel can take is left out with a note: a model's list may hold a few.

    Raises:
        InputError: none given, one malformed, or one on the command line (or all of a file) that TMA can't address.
    """
    kind = dtype(dtype_name).name
    found = {extents: _problem(extents, kind) for extents in map(parse_shape, shapes or ())}
    refused: list[IllegalConfig] = []
    for shape in read_shapes(file) if file is not None else ():
        extents = (shape.m, shape.n, shape.k)
        try:
            found.setdefault(extents, _problem(extents, kind))
        except IllegalConfig as error:
            refused.append(error)
    if not found:
        raise refused[-1] if refused else InputError("no shape given; use --shape MxNxK or --shapes FILE")
    for illegal in refused:
        render.note(f"left out: {illegal}")
    return list(found.values())


def _problem(extents: tuple[int, int, int], kind: str) -> Problem:
    m, n, k = extents
    problem = Problem(m=m, n=n, k=k, dtype=kind)
    broken = problem_violations(problem)
    if broken:
        raise IllegalConfig(f"shape {problem.shape} {problem.dtype}", broken)
    return problem


def require_baseline(against: str) -> None:
    """Refuse a value of --against that names nothing to compare with.

    Raises:
        InputError: neither cublas nor cublaslt.
    """
    if against not in ("cublas", "cublaslt"):
        raise InputError(f"unknown baseline {against!r}; --against takes cublas or cublaslt")


def knobs(settings: Sequence[str] | None) -> dict[str, str]:
    """Return KNOB=VALUE texts as a dict.

    Raises:
        InputError: one without ``=``, or a knob given twice.
    """
    found: dict[str, str] = {}
    for text in settings or ():
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise InputError(f"--set {text!r} is not KNOB=VALUE")
        if name in found:
            raise InputError(f"--set {name} is given twice")
        found[name] = value
    return found


def chosen_config(
    arch_name: ArchName, name: str | None, config_id: str | None, settings: Sequence[str] | None
) -> Config | None:
    """Return the Config that --config, --id and --set describe; None if none of them is given. Legality is not checked.

    Raises:
        InputError: unknown name, id or knob, a bad value, or --set alone without every knob that has no default.
    """
    if name is not None and config_id is not None:
        raise InputError("give --config or --id, not both")
    base = named_config(name, arch_name) if name is not None else None
    if config_id is not None:
        base = _by_id(config_id, arch_name)
    changes = knobs(settings)
    return Config.from_knobs(changes, base=base) if changes else base


def _by_id(config_id: str, arch_name: ArchName) -> Config:
    candidates = [*NAMED[arch_name].values(), *load_space(arch_name).configs()]
    for config in candidates:
        if config.id == config_id:
            return config
    raise InputError(
        f"no config of the {arch_name} space has id {config_id!r}; ids are printed by: autogemm show --space {arch_name}"
    )


def database(folder: Path | None) -> Database:
    """Return the database at ``folder``, or the default one.

    Raises:
        InputError: ``folder`` is a file.
    """
    found = Database(folder)
    if found.folder.exists() and not found.folder.is_dir():
        raise InputError(f"database {found.folder} is not a folder; name one with --db")
    return found
