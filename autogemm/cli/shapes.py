"""``autogemm shapes``: from a model's config to the list of shapes worth tuning."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..dtypes import dtype as lookup_dtype
from ..errors import InputError
from ..model_shapes import model_shapes
from ..shapes import by_time_saved, write_shapes
from . import options, render


def shapes(
    model: Annotated[Path, typer.Option("--model", metavar="FILE", help="config.json of a Hugging Face-style transformer.")],
    tokens: Annotated[
        str, typer.Option("--tokens", metavar="N,N,…", help="Rows of activations (batch times new tokens).")
    ] = "1,16,128,4096",
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="Tensor-parallel ranks.")] = 1,
    separate: Annotated[
        bool,
        typer.Option("--separate", help="q, k, v and gate, up as one product each, as the transformers library runs them."),
    ] = False,
    arch: options.ArchOption = "sm_90a",
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="SLUG", help="GPU to predict the time saved for.")] = None,
    dtype: options.DtypeOption = "float16",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write a shapes file for tune --shapes.")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """List the matrix products of a transformer on one rank, most time saved by tuning first (a prediction)."""
    target = options.parse_gpu(options.parse_arch(arch or "sm_90a"), gpu)
    kind = lookup_dtype(dtype).name
    found = model_shapes(model, tokens=_counts(tokens), tp=tp, fused=not separate)
    ordered = by_time_saved(found, target, kind)
    if out is not None:
        write_shapes(out, ordered)
    if as_json:
        render.document([asdict(shape) for shape in ordered])
        return
    render.shape_table(ordered)
    if out is not None:
        render.note(f"wrote {len(ordered)} shapes; tune them with: autogemm tune --shapes {out}")


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--tokens {text!r} is not a list of integers such as 1,16,128") from None
