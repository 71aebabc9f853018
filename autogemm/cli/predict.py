"""``autogemm predict``: modelled times of some configs, or of the best few for a shape; optionally the timeline behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..arch import Gpu
from ..config import Config
from ..constraints import require_legal, violations
from ..errors import IllegalConfig, InputError
from ..predict.closed_form import predict as modelled
from ..predict.closed_form import rank
from ..problem import Problem
from ..results import Prediction
from ..space import load_space
from . import options, render


def predict(
    shape: options.OneShape,
    arch: options.ArchOption = "sm_100a",
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="SLUG", help="GPU of that arch. Default: H200 or B200.")] = None,
    dtype: options.DtypeOption = "float16",
    configs: Annotated[
        list[str] | None, typer.Option("--config", metavar="NAME", help="Named config; several are compared.")
    ] = None,
    config_id: options.IdOption = None,
    settings: options.SetOption = None,
    sm_count: Annotated[int | None, typer.Option("--sm-count", metavar="N", help="SMs to occupy. Default: all.")] = None,
    best: Annotated[int, typer.Option("--best", min=1, metavar="N", help="Without a config: how many to list.")] = 5,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Execute one cluster of each kernel in place of the closed form; needs TVM.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE.json", help="Write the executed timeline as Perfetto trace events.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", metavar="FILE.html", help="Write the executed timeline as a page.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Print modelled times. Nothing here is measured."""
    arch_name = options.parse_arch(arch or "sm_100a")
    target = options.parse_gpu(arch_name, gpu)
    problem = options.problems([shape], None, dtype)[0]
    for file in (trace, timeline):
        if file is not None and not file.resolve().parent.is_dir():
            raise InputError(f"can't write {file}: its folder does not exist")
    if len(configs or ()) > 1 and config_id is not None:
        raise InputError("give --config or --id, not both")
    chosen: dict[str, Config] = {}
    for name in configs or [None]:  # type: ignore[list-item]
        config = options.chosen_config(arch_name, name, config_id, settings)
        if config is not None:
            require_legal(config, arch_name, problem)
            chosen[name or config.id] = config
    if not chosen:
        chosen = {config.id: config for config in _best(problem, target, best, sm_count)}
    results = [(name, config, _predicted(problem, config, target, sm_count, simulate)) for name, config in chosen.items()]
    if trace is not None or timeline is not None:
        _draw(problem, chosen, target, sm_count, trace, timeline)
    if as_json:
        render.document(
            [
                {"shape": problem.shape, "config": c.to_knobs(), "config_id": c.id, "status": "predicted", **p.to_json()}
                for _, c, p in results
            ]
        )
    elif len(results) == 1:
        render.prediction(problem, results[0][0], results[0][2])
    else:
        render.prediction_table(problem, [(name, p) for name, _, p in results])


def _best(problem: Problem, gpu: Gpu, count: int, sm_count: int | None) -> list[Config]:
    candidates = load_space(gpu.arch).configs(problem.dtype)
    legal = [config for config in candidates if not violations(config, gpu.arch, problem)]
    if not legal:
        raise IllegalConfig(f"every config of the {gpu.arch} space", violations(candidates[0], gpu.arch, problem))
    return [config for config, _ in rank(problem, legal, gpu, sm_count=sm_count)[:count]]


def _predicted(problem: Problem, config: Config, gpu: Gpu, sm_count: int | None, simulate: bool) -> Prediction:
    if not simulate:
        return modelled(problem, config, gpu, sm_count=sm_count)
    from ..simulate.predict import predict as executed

    return executed(problem, config, gpu, sm_count=sm_count)


def _draw(
    problem: Problem, chosen: dict[str, Config], gpu: Gpu, sm_count: int | None, trace: Path | None, timeline: Path | None
) -> None:
    from ..simulate.predict import record
    from ..simulate.timeline import write_timeline
    from ..simulate.trace import write_trace

    recordings = [record(problem, config, gpu, sm_count=sm_count, name=name) for name, config in chosen.items()]
    try:
        if trace is not None:
            write_trace(trace, recordings)
            render.note(f"wrote {trace}; open it at ui.perfetto.dev or chrome://tracing")
        if timeline is not None:
            write_timeline(timeline, recordings)
            render.note(f"wrote {timeline}")
    except OSError as error:
        raise InputError(f"can't write the timeline: {error}") from error
