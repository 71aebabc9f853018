"""``autogemm predict``: modelled time of one config, or of the best few for a shape; optionally the timeline behind it."""

from __future__ import annotations

from typing import Annotated

import typer

from ..constraints import require_legal, violations
from ..errors import IllegalConfig
from ..predict.closed_form import predict as modelled
from ..predict.closed_form import rank
from ..space import load_space
from . import options, render


def predict(
    shape: options.OneShape,
    arch: options.ArchOption = "sm_100a",
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="SLUG", help="GPU of that arch. Default: H200 or B200.")] = None,
    dtype: options.DtypeOption = "float16",
    config: options.ConfigOption = None,
    config_id: options.IdOption = None,
    settings: options.SetOption = None,
    sm_count: Annotated[int | None, typer.Option("--sm-count", metavar="N", help="SMs to occupy. Default: all.")] = None,
    best: Annotated[int, typer.Option("--best", min=1, metavar="N", help="Without a config: how many to list.")] = 5,
    as_json: options.JsonOption = False,
) -> None:
    """Print modelled times. Nothing here is measured."""
    arch_name = options.parse_arch(arch or "sm_100a")
    target = options.parse_gpu(arch_name, gpu)
    problem = options.problems([shape], None, dtype)[0]
    chosen = options.chosen_config(arch_name, config, config_id, settings)
    if chosen is not None:
        require_legal(chosen, arch_name, problem)
        ranked = [(chosen, modelled(problem, chosen, target, sm_count=sm_count))]
    else:
        legal = [c for c in load_space(arch_name).configs(problem.dtype) if not violations(c, arch_name, problem)]
        if not legal:
            raise IllegalConfig(
                f"every config of the {arch_name} space", violations(load_space(arch_name).configs()[0], arch_name, problem)
            )
        ranked = rank(problem, legal, target)[:best]
    if as_json:
        render.document(
            [
                {"shape": problem.shape, "config": c.to_knobs(), "config_id": c.id, "status": "predicted", **p.to_json()}
                for c, p in ranked
            ]
        )
        return
    if len(ranked) == 1:
        render.prediction(problem, chosen.id if chosen is not None else ranked[0][0].id, ranked[0][1])
    else:
        render.prediction_table(problem, ranked)
