"""``autogemm worker``: one GPU's share of the studies in a database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError, MissingDependency
from . import live, options, render


def worker(
    storage: Annotated[str, typer.Option("--storage", metavar="URL", help="Database of the studies: postgresql://…")],
    gpu: Annotated[int, typer.Option("--gpu", min=0, metavar="I", help="GPU of this machine to measure on.")] = 0,
    candidates: Annotated[
        Path | None,
        typer.Option("--candidates", metavar="DIR", help="Use kernels made by compile --space; no compiler needed."),
    ] = None,
    workers: options.WorkersOption = None,
    idle: Annotated[
        float | None, typer.Option("--idle", metavar="S", help="Stop after so long without work. Default: wait for ever.")
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Run trials of every study that autogemm tune --storage has opened there and that is for this kind of GPU.

    Start one per GPU, on any number of hosts. One that is killed costs at most the trial it was running, which is run again.
    """
    if idle is not None and idle < 0:
        raise InputError(f"--idle must not be negative, got {idle}")

    from ..search.storage import study_names
    from ..search.tune import STUDY_PREFIX, Options
    from ..search.worker import run_worker

    study_names(storage, STUDY_PREFIX)  # unreachable storage is found out first

    from ..local import local_device

    device = local_device(gpu)
    if device is None:
        raise MissingDependency(f"--gpu {gpu}: a worker measures, and no GPU is usable here")
    view = live.TuneView()
    try:
        chosen = Options(candidates=candidates, workers=workers, storage=storage)
        finished = run_worker(storage, device, device_index=gpu, options=chosen, idle_s=idle, progress=view)
    finally:
        view.stop()
    if as_json:
        render.document({"finished": finished, "gpu": device.gpu, "index": gpu})
    else:
        render.line(f"{finished} trials finished on GPU {gpu} ({device.name})")
