"""``autogemm tune``: the main job, from shapes to rows in a database."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..arch import ArchName
from ..binary import read_folder
from ..config import NAMED, Config, knob, named_config
from ..constraints import require_legal, violations
from ..errors import IllegalConfig, InputError, NothingFound
from ..problem import Problem
from ..record import Row
from ..space import Space, load_space
from . import live, options, render, target

if TYPE_CHECKING:
    from ..search.progress import Done, Event

# Up to so many rows are printed at length, more as a table.
_SUMMARIES = 3


def tune(
    shape: options.ShapeList = None,
    shapes: options.ShapesFile = None,
    arch: options.ArchOption = None,
    dtype: options.DtypeOption = "float16",
    db: options.DbOption = None,
    trials: Annotated[int | None, typer.Option("--trials", metavar="N", help="Candidates to try at most, per shape.")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", metavar="S", help="Time to search at most, per shape.")] = None,
    ratio: Annotated[
        float | None,
        typer.Option("--target", metavar="X", help="Stop at this ratio of cuBLAS time to kernel time, such as 1.02."),
    ] = None,
    until_stable: Annotated[bool, typer.Option("--until-stable", help="Stop when more trials bring no gain.")] = False,
    settings: options.SetOption = None,
    config: options.ConfigOption = None,
    space: Annotated[
        Path | None, typer.Option("--space", metavar="FILE.yaml", help="Search space to use in place of the arch's own.")
    ] = None,
    candidates: Annotated[
        Path | None,
        typer.Option("--candidates", metavar="DIR", help="Use kernels made by compile --space; no compiler needed."),
    ] = None,
    storage: Annotated[
        str | None, typer.Option("--storage", metavar="URL", help="Share the study in a database: postgresql://…")
    ] = None,
    sampler: Annotated[
        str | None, typer.Option("--sampler", metavar="order|tpe|random", help="Default: model order where the space is small.")
    ] = None,
    gpu: Annotated[int | None, typer.Option("--gpu", min=0, metavar="I", help="GPU of this machine to measure on.")] = None,
    predict: Annotated[bool, typer.Option("--predict", help="Predict by model even where a GPU could measure.")] = False,
    sm_count: Annotated[int | None, typer.Option("--sm-count", min=1, metavar="N", help="SMs to occupy. Default: all.")] = None,
    no_check: Annotated[bool, typer.Option("--no-check", help="Do not execute candidates on the CPU first.")] = False,
    against: Annotated[
        str, typer.Option("--against", metavar="cublas|cublaslt", help="cublas leaves cuBLASLt's own algorithms out.")
    ] = "cublaslt",
    warm_up: options.WarmUpOption = 0.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Search again although a valid row is there.")] = False,
    workers: options.WorkersOption = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of a sampler that draws at random.")] = 0,
    as_json: options.JsonOption = False,
) -> None:
    """Find the best kernel for each shape and write it to the database.

    Measures on a GPU of the asked arch where there is one; otherwise predicts by model, and says so here and in the row.
    Killed or interrupted, the same command goes on where it stopped.
    """
    problems = options.problems(shape, shapes, dtype)
    database = options.database(db)
    if arch is not None:
        options.parse_arch(arch)
    restricted = any((settings, config, space))
    if restricted and candidates is not None:
        raise InputError("--candidates is a fixed set of kernels; leave out --set, --config and --space")
    if sampler not in (None, "order", "tpe", "random"):
        raise InputError(f"unknown sampler {sampler!r}; use order, tpe or random")
    options.require_baseline(against)
    _early(arch, config, options.knobs(settings), problems[0])
    where = target.resolve(arch, gpu, predict=predict)
    arch_name = where.device.arch
    assert arch_name is not None
    narrowed = _space(arch_name, space, config, options.knobs(settings), problems[0]) if restricted else None

    from ..search.progress import Budget
    from ..search.storage import study_names
    from ..search.tune import STUDY_PREFIX, Options, Tuner

    budget = Budget(seconds=seconds, trials=trials, target=ratio, until_stable=until_stable)
    # Both are found out before anything is locked, compiled or written.
    if candidates is not None and not any(candidates.glob("*.json")):
        read_folder(candidates)
    if storage is not None:
        study_names(storage, STUDY_PREFIX)
    chosen = Options(
        space=narrowed, candidates=candidates, storage=storage, sampler=sampler, seed=seed,  # type: ignore[arg-type]
        workers=workers, check=not no_check, fresh=fresh, cublaslt=against == "cublaslt", warm_up_s=warm_up,
    )  # fmt: skip
    opening = ""
    if where.index is None:
        opening = f"{where.reason}: predicting for {where.device.name or where.device.gpu} ({arch_name}) by model; not measured"
    view, failed = _View(opening), False
    kind: Literal["model", "device"] = "model" if where.index is None else "device"
    with Tuner(
        where.device, evaluator=kind, device_index=where.index or 0, sm_count=sm_count, db=database, options=chosen
    ) as tuner:
        for problem in problems:
            try:
                tuner.tune(problem, budget, view)
            except NothingFound as error:
                failed = True
                render.warn(f"{problem.shape}: {error}")
            finally:
                view.stop()
    if as_json:
        render.document({"database": str(database.folder), "rows": [_document(done) for done in view.done]})
    elif view.done:
        rows = [done.row for done in view.done]
        if len(rows) > _SUMMARIES:
            render.row_table(rows)
        else:
            for row in rows:
                render.row_summary(row)
        render.note(f"{len(view.done)} row{'s' if len(view.done) != 1 else ''} in {database.folder}")
    if failed:
        raise NothingFound(f"{len(problems) - len(view.done)} of {len(problems)} shapes have no usable kernel")


class _View(live.TuneView):
    """The live view, remembering what was done; ``opening`` is said once the work begins, so that bad input is one line."""

    def __init__(self, opening: str) -> None:
        super().__init__()
        self._opening = opening
        self.done: list[Done] = []

    def __call__(self, event: Event) -> None:
        from ..search.progress import Done

        if self._opening:
            render.note(self._opening)
            self._opening = ""
        super().__call__(event)
        if isinstance(event, Done):
            self.done.append(event)


def _document(done: Done) -> dict[str, Any]:
    row: Row = done.row
    return {**row.to_json(), "run": {"reused": done.reused, "compiled": done.compiled, "elapsed_s": round(done.elapsed_s, 3)}}


def _early(arch: str | None, config: str | None, changes: Mapping[str, str], problem: Problem) -> None:
    """Raise for names that no arch knows, before a GPU is looked for."""
    for name, value in changes.items():
        _typed(knob(name).name, value)
    if config is not None and arch is None and not any(config in points for points in NAMED.values()):
        named_config(config, "sm_100a")


def _typed(name: str, value: str) -> int | bool:
    some = next(iter(NAMED["sm_100a"].values()))
    typed: int | bool = getattr(some.with_knob(name, value), knob(name).field)
    return typed


def _space(arch_name: ArchName, file: Path | None, config: str | None, changes: Mapping[str, str], problem: Problem) -> Space:
    """Return the space with the knobs of ``changes`` fixed, or the one point that --config names.

    Raises:
        IllegalConfig: nothing legal is left.
    """
    if config is not None:
        point = Config.from_knobs(changes, base=named_config(config, arch_name))
        require_legal(point, arch_name, problem)
        return Space(arch_name=arch_name, blocks=({name: (value,) for name, value in point.to_knobs().items()},), source=config)
    base = load_space(arch_name, file)
    fixed = {name: (_typed(name, value),) for name, value in changes.items()}
    narrowed = Space(arch_name=arch_name, blocks=tuple({**block, **fixed} for block in base.blocks), source=base.source)
    if not narrowed.configs(problem.dtype):
        sample = base.configs(problem.dtype)[0]
        for name, value in changes.items():
            sample = sample.with_knob(name, value)
        broken = violations(sample, arch_name, problem)
        what = ", ".join(f"{name}={value}" for name, value in changes.items())
        raise IllegalConfig(f"every config of the {arch_name} space with {what}", broken or ["no legal combination is left"])
    return narrowed
