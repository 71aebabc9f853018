"""Accept cuBLASLt algorithms that rows name on a GPU host: restored from bytes alone, in graphs, streams, threads and compiled.

Usage: python scripts/gpu_cublaslt_acceptance.py [--json result.json] [--seconds 150]
Needs torch and cuda-bindings only. The algorithms are searched here; the rows that name them are made up so that dispatch must
run them, live in a temporary folder, and are read back from it. Their times are no measurements; the times printed are. Prints
a table; exits with 1 if a section failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_dispatch_acceptance import DEVICE, batches, matrix, run_sections, wrong

SHAPES = (
    (16, 4096, 7168), (8, 6144, 4096), (128, 2112, 7168), (64, 7168, 2048), (256, 4096, 14336), (1024, 1024, 1024),
    (2048, 2048, 2048), (4096, 6144, 4096), (1000, 1032, 520), (1, 4096, 4096),
)  # fmt: skip
DTYPES = ("float16", "bfloat16")


@dataclass
class Run:
    """What the sections share.

    Attributes:
        folders: databases by what their rows name: the ``best`` algorithm of each shape, or one with ``workspace``.
        problems: the shapes of each database, small ones first.
    """

    options: argparse.Namespace
    folders: dict[str, Path] = field(default_factory=dict)
    problems: dict[str, list[Any]] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--skip", default="", help="sections to leave out, separated by commas")
    parser.add_argument("--seconds", type=float, default=150, help="no new section begins after so long")
    parser.add_argument("--child", choices=("use", "damage"), help=argparse.SUPPRESS)
    parser.add_argument("--db", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU is available to torch; run this on a GPU host")
    if options.child is not None:
        print(json.dumps({"use": use, "damage": damage}[options.child](options.db)))
        return
    with tempfile.TemporaryDirectory() as folder:
        run = Run(options=options, folders={kind: Path(folder) / kind for kind in ("best", "workspace")})
        failed = run_sections(
            SECTIONS, run, run.results, skip=options.skip.split(","), out=options.json, seconds=options.seconds
        )
    sys.exit(1 if failed else 0)


def search(run: Run) -> dict[str, Any]:
    """Search every shape, race the best against torch.matmul, and write the rows."""
    import torch

    from autogemm.cuda_machine import CudaMachine
    from autogemm.database import Database
    from autogemm.measure.cublaslt import offered
    from autogemm.measure.device import DeviceSession
    from autogemm.measure.timer import BASELINE, CUBLASLT
    from autogemm.problem import Problem
    from autogemm.runtime.cublaslt import cublaslt

    device = CudaMachine().device(torch.cuda.current_device())
    lt, table, rows = cublaslt(torch.cuda.current_device()), {}, {"best": [], "workspace": []}
    spent, schemes = [], Counter()
    for (m, n, k), dtype in itertools.product(SHAPES, DTYPES):
        problem = Problem(m=m, n=n, k=k, dtype=dtype)
        session = DeviceSession(problem, seed=1)
        began = time.perf_counter()
        found = session.admit_cublaslt()
        spent.append(time.perf_counter() - began)
        rounds = [session.round([CUBLASLT]) for _ in range(11)]
        environment = session.environment()
        session.close()
        offers = offered(lt, problem)
        schemes.update(one.reduction_scheme for one in offers)
        best, ratios = found.algorithm, sorted(r[BASELINE] / r[CUBLASLT] for r in rounds)
        table[f"{problem.shape} {dtype}"] = {
            "algorithm": best.name, "workspace": best.workspace_bytes, "tried": found.tried, "offered": len(offers),
            "ratio": round(ratios[5], 4), "error": found.relative_error["kernel"], "torch": found.relative_error["baseline"],
        }  # fmt: skip
        rows["best"].append(row_of(problem, device, environment, best))
        needing = [one for one in offers if one.workspace_bytes]
        if needing:
            rows["workspace"].append(row_of(problem, device, environment, needing[0]))
    for kind, made in rows.items():
        Database(run.folders[kind]).put_many(made)
        run.problems[kind] = sorted((row.key.problem for row in made), key=lambda p: p.m * p.n * p.k)
    worst = max(entry["error"] / entry["torch"] for entry in table.values())
    return {
        "ok": bool(rows["best"]), "gpu": device.name, "torch": torch.__version__, "cublaslt": lt.version, "shapes": len(table),
        "with workspace": len(rows["workspace"]), "search ms, median": 1e3 * sorted(spent)[len(spent) // 2],
        "largest error over torch's": worst, "geomean ratio": geometric([entry["ratio"] for entry in table.values()]),
        "reduction schemes offered": {str(scheme): count for scheme, count in schemes.items()},
        "found": {
            name: f"{e['algorithm']} of {e['tried']}, {e['workspace'] >> 10} KiB, {e['ratio']}" for name, e in table.items()
        },
    }  # fmt: skip


def geometric(values: list[float]) -> float:
    from autogemm.measure.bench import geomean

    return geomean(values)


def row_of(problem: Any, device: Any, environment: Any, algorithm: Any) -> Any:
    """Return a row by which dispatch runs ``algorithm``, and torch.matmul where it can't; its times are made up."""
    from autogemm.decision import DEFAULT_CONFIG
    from autogemm.record import CublasLtRecord, Key, Provenance, Row
    from autogemm.results import Measurement, Samples

    key = Key.of(problem, arch=device.arch, gpu=device.gpu, sm_count=device.sm_count)
    error = {"kernel": 0.0, "baseline": 0.0}
    evidence = Measurement(
        warm=Samples(kernel_s=(2.0,), baseline_s=(1.0,), cold_l2=False),
        cold=None,
        relative_error=error,
        environment=environment,
    )
    made_by = Provenance(
        autogemm="acceptance", generator="none", compiler="none", driver=environment.driver, tvm=None, torch=environment.torch,
        date=environment.date,
    )  # fmt: skip
    record = CublasLtRecord(algorithm=algorithm, tried=1, warm_s=(0.5,), cold_s=None, relative_error=error)
    return Row(key=key, config=DEFAULT_CONFIG[device.arch], evidence=evidence, provenance=made_by, cublaslt=record)


def dispatcher(folder: Path) -> Any:
    """Return a Dispatcher over the rows of ``folder`` that has restored nothing; a warning is an error."""
    import autogemm
    from autogemm import dispatch

    warnings.simplefilter("error", dispatch.AutogemmWarning)
    autogemm.use_database(folder)
    return dispatch.dispatcher()


def tensors(problem: Any, integers: bool = False, shift: int = 0) -> tuple[Any, Any, Any]:
    """Return a [M,K], b [K,N] and an output full of NaN; ``shift`` elements from where an allocation starts."""
    import torch

    def at(rows: int, cols: int) -> Any:
        return matrix(1, rows * cols + shift, problem.dtype, integers)[0, shift:].view(rows, cols)

    out = torch.full((problem.m * problem.n + shift,), float("nan"), device=DEVICE, dtype=getattr(torch, problem.dtype))
    return at(problem.m, problem.k), at(problem.n, problem.k).t(), out[shift:].view(problem.m, problem.n)


def checked(here: Any, problem: Any) -> list[str]:
    """Return what is wrong with the product of ``problem``, by exact integers and by float64, in every way of calling."""
    import torch

    faults = []
    a, b, out = tensors(problem, integers=True)
    exact = torch.matmul(a.float(), b.float()).to(a.dtype)  # sums of K units stay below 2**24
    if not torch.equal(here.matmul(a, b, out), exact):
        faults.append(f"{int((out != exact).sum())} integers wrong")
    for shift in (0, 8):  # 8 elements are 16 bytes, the least alignment that is taken
        a, b, out = tensors(problem, shift=shift)
        if here.explain(a, b).runs != "cublaslt":
            faults.append(f"dispatch runs {here.explain(a, b)}")
        faults += [text for text in (wrong(here.matmul(a, b), a, b), wrong(here.matmul(a, b, out), a, b)) if text]
        a.normal_()
        faults += [text for text in (wrong(here.matmul(a, b, out), a, b),) if text]  # the remembered launch
    return [f"{problem}: {fault}" for fault in faults]


def values(run: Run) -> dict[str, Any]:
    """Every row: exact integers and float64, with and without out, at addresses that are just aligned."""
    bad: list[str] = []
    for kind, folder in run.folders.items():
        here = dispatcher(folder)
        for problem in run.problems[kind]:
            bad += checked(here, problem)
    return {"ok": not bad, "rows": sum(map(len, run.problems.values())), "wrong": bad[:10]}


def process(run: Run) -> dict[str, Any]:
    """A fresh process that can't search: the same, and a capture before anything has run."""
    found = {kind: child("use", folder) for kind, folder in run.folders.items() if run.problems[kind]}
    bad = [fault for result in found.values() for fault in result.pop("wrong")]
    return {"ok": not bad, **found, "wrong": bad[:10]}


def child(what: str, folder: Path) -> dict[str, Any]:
    arguments = [sys.executable, __file__, "--child", what, "--db", str(folder)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(f"a fresh process ended with {done.returncode}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def use(folder: Path) -> dict[str, Any]:
    """Use the rows of ``folder`` in this process, in which cuBLASLt's search is taken away."""
    import torch

    import autogemm
    from autogemm.problem import Problem
    from autogemm.runtime import cublaslt as runtime

    here = dispatcher(folder)
    assert "autogemm.measure.cublaslt" not in sys.modules, "dispatch has loaded the search"
    for name in ("cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulAlgoInit"):
        setattr(runtime.library(), name, None)  # calling it is an error
    problems: list[Problem] = [row.key.problem for row in here.table.rows]
    bad, graph, first = [], torch.cuda.CUDAGraph(), min(problems, key=lambda p: p.m * p.n * p.k)
    a, b, out = tensors(first)
    autogemm.prepare([first])  # restores; nothing of it has run before the capture
    with torch.cuda.graph(graph):
        here.matmul(a, b, out)
    graph.replay()
    torch.cuda.synchronize()
    bad += [f"captured before its first run: {fault}" for fault in (wrong(out, a, b),) if fault]
    for problem in problems:
        bad += checked(here, problem)
    return {"rows": len(problems), "wrong": bad}


def graphs(run: Run) -> dict[str, Any]:
    """Two graphs of several products, captured on one stream and replayed on two at once, with eager calls meanwhile."""
    import torch

    bad, captured = [], 0
    for kind, folder in run.folders.items():
        here, chosen = dispatcher(folder), run.problems[kind][:6]
        for problem in chosen:
            here.decide(problem, torch.cuda.current_device())
        made = []
        for _ in range(2):
            cases, graph = [tensors(problem) for problem in chosen], torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for a, b, out in cases:
                    here.matmul(a, b, out)
                    here.matmul(a, b)
            made.append((graph, cases, torch.cuda.Stream()))
            captured += 2 * len(cases)
        eager = [tensors(problem) for problem in chosen]
        for _ in range(3):
            for _, cases, _ in made:
                for a, _, out in cases:
                    a.normal_()
                    out.fill_(float("nan"))
            torch.cuda.synchronize()
            for graph, _, stream in made:
                with torch.cuda.stream(stream):
                    for _ in range(4):
                        graph.replay()
            for a, b, out in eager:
                here.matmul(a, b, out)
            torch.cuda.synchronize()
            for a, b, out in itertools.chain(eager, *(cases for _, cases, _ in made)):
                bad += [f"{kind} {tuple(out.shape)}: {fault}" for fault in (wrong(out, a, b),) if fault]
    return {"ok": not bad and captured > 0, "captured": captured, "wrong": bad[:10]}


def streams(run: Run) -> dict[str, Any]:
    """The same algorithm on two streams at once, with operands and outputs of their own."""
    import torch

    bad, calls = [], 0
    for kind, folder in run.folders.items():
        here = dispatcher(folder)
        for problem in run.problems[kind]:
            sides = [(torch.cuda.Stream(), *tensors(problem)) for _ in range(2)]
            torch.cuda.synchronize()
            for _ in range(20):
                for stream, a, b, out in sides:
                    with torch.cuda.stream(stream):
                        here.matmul(a, b, out)
                        calls += 1
            torch.cuda.synchronize()
            for _, a, b, out in sides:
                bad += [f"{kind} {problem}: {fault}" for fault in (wrong(out, a, b),) if fault]
    return {"ok": not bad, "calls": calls, "wrong": bad[:10]}


def threads(run: Run) -> dict[str, Any]:
    """Eight threads on streams of their own, from a dispatcher that has restored nothing; on a second GPU if there is one."""
    import torch

    bad: list[str] = []
    restored, calls = 0, 0
    for kind, folder in run.folders.items():
        here, chosen = dispatcher(folder), run.problems[kind][:8]
        start = threading.Barrier(8)

        def work(index: int, here: Any = here, chosen: Any = chosen, start: Any = start) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    start.wait()
                    for turn in range(24):
                        problem = chosen[(index // 2 + turn) % len(chosen)]
                        a, b, out = tensors(problem)
                        fault = wrong(here.matmul(a, b, out) if turn % 2 else here.matmul(a, b), a, b)
                        bad.extend([f"thread {index} {problem}: {fault}"] if fault else [])
            except BaseException:
                bad.append(traceback.format_exc())

        if chosen:
            workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            torch.cuda.synchronize()
            restored, calls = restored + len(here._restored), calls + 8 * 24
        if torch.cuda.device_count() > 1:
            for problem in chosen[:2]:
                a, b, _ = tensors(problem)
                a, b = a.to("cuda:1"), b.t().to("cuda:1").t()
                bad.extend(f"second GPU: {fault}" for fault in (wrong(here.matmul(a, b), a, b),) if fault)
    return {
        "ok": not bad,
        "threads": 8,
        "calls": calls,
        "restored": restored,
        "gpus": torch.cuda.device_count(),
        "wrong": bad[:5],
    }


def compiled(run: Run) -> dict[str, Any]:
    """autogemm.matmul in torch.compile, whole graphs, by default and as CUDA graphs, and its gradient."""
    import torch

    import autogemm

    # torch's own gradients may otherwise add partial sums in 16 bits.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    bad, modes, matmul = [], [], autogemm.matmul
    for kind, folder in run.folders.items():
        dispatcher(folder)
        chosen = run.problems[kind][:3]
        for mode in ("default", "reduce-overhead", "aot_eager"):
            torch._dynamo.reset()
            how = {"backend": mode} if mode == "aot_eager" else {"mode": mode}
            call = torch.compile(lambda a, b: matmul(a, b) * 2.0, fullgraph=True, **how)
            try:
                for problem in chosen:
                    a, b, _ = tensors(problem)
                    with torch.no_grad():
                        for _ in range(3):
                            got = call(a, b)
                        bad += [f"{kind} {mode} {problem}: {fault}" for fault in (wrong(got / 2, a, b),) if fault]
                modes.append(f"{kind} {mode}")
            except Exception as error:  # Triton needs a C compiler, which the host may lack
                if mode == "aot_eager" or not any(word in str(error).lower() for word in ("triton", "compiler", "gcc")):
                    bad.append(f"{kind} {mode}: {type(error).__name__}: {str(error)[:300]}")
        if chosen:
            a, b, _ = tensors(chosen[0])
            a.requires_grad_()
            matmul(a, b).sum().backward()
            ones = torch.ones(chosen[0].m, chosen[0].n, device=DEVICE, dtype=a.dtype)
            bad += [f"{kind} gradient: {fault}" for fault in (wrong(a.grad, ones, b.t()),) if fault]
    return {"ok": not bad and bool(modes), "modes": modes, "wrong": bad[:10]}


def versions(run: Run) -> dict[str, Any]:
    """Rows of another library version: one warning, and torch.matmul's own result."""
    import torch

    import autogemm
    from autogemm import dispatch
    from autogemm.database import Database

    held = Database(run.folders["best"]).rows()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for row in held:
            algorithm = replace(row.cublaslt.algorithm, version=row.cublaslt.algorithm.version + 1)
            Database(folder).put(replace(row, cublaslt=replace(row.cublaslt, algorithm=algorithm)))
        autogemm.use_database(folder)
        bad = []
        for problem in run.problems["best"][:4]:
            a, b, _ = tensors(problem)
            if not torch.equal(autogemm.matmul(a, b), torch.matmul(a, b)) or autogemm.explain(a, b).runs != "cublas":
                bad.append(f"{problem}: {autogemm.explain(a, b)}")
    said = [str(w.message) for w in caught if issubclass(w.category, dispatch.AutogemmWarning)]
    return {"ok": not bad and len(said) == 1, "warnings": said, "wrong": bad}


def bytes_(run: Run) -> dict[str, Any]:
    """Bytes changed at random, in a process that may die of it: what the restoring refuses, and what it lets through."""
    try:
        return {"ok": True, **child("damage", run.folders["best"])}
    except RuntimeError as died:
        return {"ok": True, "the process died": str(died).splitlines()[-1][:300]}


def damage(folder: Path) -> dict[str, Any]:
    """Restore and run an algorithm with one byte changed, many times over; count what comes of it. Nothing is judged here."""
    import torch

    from autogemm.database import Database
    from autogemm.errors import LaunchError
    from autogemm.runtime.cublaslt import cublaslt

    rows = Database(folder).rows()
    lt, draw, seen = cublaslt(torch.cuda.current_device()), random.Random(0), Counter()
    for _ in range(300):
        row = draw.choice([r for r in rows if r.key.m * r.key.n * r.key.k < 2**34])
        held = row.cublaslt.algorithm
        data = bytearray.fromhex(held.data)
        data[draw.randrange(64)] ^= 1 << draw.randrange(8)
        algorithm = replace(held, data=data.hex())
        a, b, out = tensors(row.key.problem)
        try:
            call = lt.restore(algorithm, row.key.problem)
        except LaunchError as error:
            seen["refused: other attributes" if " say " in str(error) else "refused by cuBLASLt"] += 1
            continue
        try:
            call(a, b.t(), out)
        except LaunchError:
            seen["refused when called"] += 1
            continue
        torch.cuda.synchronize()
        seen["ran, right" if not wrong(out, a, b) else "ran, WRONG"] += 1
    return {"changed": 300, "came of it": dict(seen)}


def cpu(run: Run) -> dict[str, Any]:
    """CPU microseconds per call beside torch.matmul's, without and with workspace."""
    import torch

    import autogemm
    from autogemm import dispatch

    table: dict[str, Any] = {}
    for kind, folder in run.folders.items():
        here = dispatcher(folder)
        chosen = [p for p in run.problems[kind] if bool(row_algorithm(here, p).workspace_bytes) == (kind == "workspace")]
        if not chosen:
            continue
        problem = chosen[0]
        a, b, out = tensors(problem)
        autogemm.matmul(a, b, out)
        bt, launch = b.t(), here._restored[row_algorithm(here, problem), problem, torch.cuda.current_device()]
        many = [torch.empty_like(out) for _ in range(min(5000, 2**30 // (out.numel() * 2)))]  # more than are remembered
        fresh = itertools.cycle(many)
        calls: dict[str, Callable[[], object]] = {
            "algorithm alone": lambda bt=bt, a=a, out=out, launch=launch: launch(a, bt, out),
            "matmul(out=)": lambda a=a, b=b, out=out: dispatch.matmul(a, b, out),
            "torch.matmul(out=)": lambda a=a, b=b, out=out: torch.matmul(a, b, out=out),
            "matmul(out=), new address": lambda a=a, b=b, fresh=fresh: dispatch.matmul(a, b, next(fresh)),
            "matmul": lambda a=a, b=b: dispatch.matmul(a, b),
            "torch.matmul": lambda a=a, b=b: torch.matmul(a, b),
        }
        with torch.no_grad():
            table[f"us, {problem.shape} {problem.dtype}, {'with' if kind == 'workspace' else 'no'} workspace"] = batches(calls)
    began = time.perf_counter()
    lt_rows = dispatcher(run.folders["best"])
    problem = run.problems["best"][0]
    lt_rows.decide(problem, torch.cuda.current_device())
    return {"ok": bool(table), "read rows and restore one, ms": 1e3 * (time.perf_counter() - began), **table}


def row_algorithm(here: Any, problem: Any) -> Any:
    import torch

    return here.decide(problem, torch.cuda.current_device()).algorithm


SECTIONS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "search": search, "values": values, "process": process, "graphs": graphs, "streams": streams, "threads": threads,
    "cpu": cpu, "versions": versions, "compile": compiled, "bytes": bytes_,
}  # fmt: skip

if __name__ == "__main__":
    main()
