"""``autogemm bench``: tuned kernels re-measured on the GPU here, through dispatch and raw, against cuBLAS."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..arch import ArchName
from ..binary import write_whole
from ..constraints import problem_violations
from ..database import Database
from ..device import Device
from ..dtypes import dtype as lookup_dtype
from ..errors import AutogemmError, InputError, MissingDependency, NothingFound
from ..problem import Problem
from . import live, options, render

if TYPE_CHECKING:
    from ..measure.bench import BenchResult
    from ..record import Choice

RAW = "raw"
DISPATCH = "dispatch"


def bench(
    shape: options.ShapeList = None,
    shapes: options.ShapesFile = None,
    dtype: options.DtypeOption = "float16",
    against: Annotated[
        str, typer.Option("--against", metavar="cublas|cublaslt", help="cublaslt also searches cuBLASLt's algorithms.")
    ] = "cublas",
    gpu: Annotated[int, typer.Option("--gpu", min=0, metavar="I", help="GPU to measure on.")] = 0,
    rounds: Annotated[int, typer.Option("--rounds", min=3, metavar="N", help="Interleaved rounds per shape.")] = 21,
    energy: Annotated[
        float, typer.Option("--energy", min=0.0, max=600.0, metavar="S", help="Seconds per kernel to count joules; 0: none.")
    ] = 0.0,
    warm_up: options.WarmUpOption = 0.0,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE.json", help="Write every sample to this file.")] = None,
    db: options.DbOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Measure tuned kernels again: raw and through autogemm.matmul, with a warm and a cold L2, paired with torch.matmul.

    Without shapes: every measured row of the GPU here. Nothing is written to the database.
    """
    options.require_baseline(against)
    if out is not None and not out.resolve().parent.is_dir():
        raise InputError(f"can't write {out}: its folder does not exist")
    database = options.database(db)
    asked = options.problems(shape, shapes, dtype) if shape or shapes is not None else None

    from ..local import local_device

    device = local_device(gpu)
    if device is None:
        raise MissingDependency("bench measures and needs a GPU; none is usable here (autogemm predict models times)")
    if device.arch is None:
        raise InputError(f"no kernels are generated for {device.name}; bench needs a Hopper or Blackwell GPU")
    problems = asked if asked is not None else _tuned(database, device, lookup_dtype(dtype).name)

    from ..dispatch import dispatcher, use_database
    from ..measure import device as gpu_device
    from ..measure.bench import geomean
    from ..measure.timer import CUBLASLT

    use_database(database.folder)
    if warm_up > 0:
        gpu_device.warm_up(gpu, warm_up)
    bandwidth = gpu_device.read_bandwidth(gpu)
    results: list[BenchResult] = []
    runs: list[Choice] = []
    failed = 0
    with live.counter(f"{device.gpu} {dtype}", len(problems)) as advance:
        for problem in problems:
            try:
                result = _measure(problem, device, device.arch, gpu, database, bandwidth, against == "cublaslt", rounds, energy)
            except AutogemmError as error:
                failed += 1
                render.warn(f"{problem.shape}: {error}")
            else:
                results.append(result)
                runs.append(dispatcher().decide(problem, gpu).runs)
            advance(problem.shape)
    if not results:
        raise NothingFound("nothing could be measured")
    baselines: list[str | None] = [None, *([CUBLASLT] if against == CUBLASLT else [])]
    means = {
        baseline: {
            f"{name} {'cold' if cold else 'warm'}": geomean(r.ratio(name, baseline, cold=cold) for r in results)
            for name in results[0].subjects if name != baseline
            for cold in (False, True)
        }
        for baseline in baselines
    }  # fmt: skip
    document = {
        "device": device.gpu, "geomean_vs_torch": means[None], "geomean_vs_cublaslt": means.get(CUBLASLT),
        "dispatch_runs": dict(Counter(runs)),
        "results": [{**result.to_json(), "dispatch_runs": ran} for result, ran in zip(results, runs, strict=True)],
    }  # fmt: skip
    if out is not None:
        _write(out, document)
    if as_json:
        render.document(document)
    else:
        render.bench_table(results, runs, means)
    if failed:
        raise NothingFound(f"{failed} of {len(problems)} shapes could not be measured")


def _tuned(database: Database, device: Device, dtype: str) -> list[Problem]:
    rows = [row for row in database.rows(device.gpu) if row.status == "measured" and row.key.dtype == dtype]
    found = {row.key.problem.shape: row.key.problem for row in rows if row.key.sm_count == device.sm_count}
    if not found:
        raise NothingFound(
            f"no measured {dtype} rows of {device.gpu} in {database.folder}; name shapes with --shape or --shapes"
        )
    return list(found.values())


def _measure(
    problem: Problem, device: Device, arch_name: ArchName, index: int, database: Database, bandwidth: float, cublaslt: bool,
    rounds: int, energy_s: float,
) -> BenchResult:  # fmt: skip
    from ..dispatch import matmul
    from ..loading import load
    from ..measure.bench import COLD_ROUNDS, bench, kernel_call

    assert not problem_violations(problem)
    loaded = load(problem.m, problem.n, problem.k, dtype=problem.dtype, database=database, device=device)
    calls: dict[str, Any] = {
        RAW: kernel_call(loaded.binary, loaded.config, device=index),
        DISPATCH: lambda a, b, out: matmul(a, b.t(), out),
    }
    return bench(
        problem, calls, arch_name=arch_name, bandwidth_bytes_per_s=bandwidth, device=index, cublaslt=cublaslt,
        warm_rounds=rounds, cold_rounds=min(rounds, COLD_ROUNDS), energy_seconds=energy_s,
    )  # fmt: skip


def _write(path: Path, document: dict[str, Any]) -> None:
    try:
        write_whole(path, (render.to_json(document) + "\n").encode())
    except OSError as error:
        raise InputError(f"can't write {path}: {error.strerror}") from error
