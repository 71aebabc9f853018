"""Accept dispatch on a GPU host: a bundle against torch.matmul, in CUDA graphs, threads and torch.compile, with its CPU cost.

Usage: python scripts/gpu_dispatch_acceptance.py --bundle DIR [--calls 2000] [--json result.json]
Needs torch and cuda-bindings only; with a bundle, TVM, Optuna and NVRTC are refused. Prints a table; exits with 1 if a section
failed. ``--db DIR`` takes a database and the compiled kernels of this machine in place of a bundle.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEVICE = "cuda"
REFUSED = ("tvm", "optuna", "cuda.bindings.nvrtc")


class Refuse:
    """Import hook that makes the packages a serving host lacks unimportable, where they are there at all.

    For one that is not installed there is nothing to refuse, and PyTorch's compiler asks for TVM that way.
    """

    def __init__(self) -> None:
        self.present = [name for name in REFUSED if _installed(name)]

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if any(name == refused or name.startswith(refused + ".") for refused in self.present):
            raise ModuleNotFoundError(f"{name} is refused here: dispatch must not need it")


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@dataclass
class Run:
    """What the sections share: options, the rows that run a kernel or an algorithm here, and results by section."""

    options: argparse.Namespace
    device: int = 0
    shapes: list[tuple[int, int, int, str]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--bundle", type=Path, help="bundle folder or zip")
    source.add_argument("--db", type=Path, help="database folder; kernels come from the cache and AUTOGEMM_KERNELS")
    parser.add_argument("--calls", type=int, default=2000, help="random calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=150, help="limit of the random calls")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the transformer block")
    parser.add_argument("--unmeasured", action="store_true", help="let predicted rows run")
    parser.add_argument("--skip", default="", help="sections to leave out, separated by commas")
    parser.add_argument("--json", type=Path, help="file for the result")
    run = Run(options=parser.parse_args())

    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU is available to torch; run this on a GPU host")
    # cuBLAS may add partial sums in the operands' type, with errors beyond what one rounding explains; values are judged here.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if run.options.bundle is not None:
        sys.meta_path.insert(0, Refuse())
    failed = run_sections(SECTIONS, run, run.results, skip=run.options.skip.split(","), out=run.options.json)
    sys.exit(1 if failed else 0)


def run_sections(
    sections: Mapping[str, Callable[[Any], dict[str, Any]]], run: Any, results: dict[str, Any], *, skip: Sequence[str],
    out: Path | None, seconds: float = math.inf,
) -> list[str]:  # fmt: skip
    """Run ``sections`` in order, print a line of each and write all to ``out``; return the names of those that failed.

    Args:
        results: what each section found, filled as they end.
        seconds: no new section begins after so long.
    """
    import torch

    failed: list[str] = []
    began = time.monotonic()
    for name, section in sections.items():
        if name in skip or time.monotonic() - began > seconds:
            print(f"skipped {name}", flush=True)
            continue
        started = time.monotonic()
        try:
            result = section(run)
            ok = bool(result.pop("ok"))
        except Exception:
            result, ok = {"error": traceback.format_exc()}, False
            torch.cuda.synchronize()  # a sticky error ends the run here rather than blaming later sections
        failed += [] if ok else [name]
        results[name] = {"ok": ok, "seconds": round(time.monotonic() - started, 1), **result}
        print(f"{'ok    ' if ok else 'FAILED'} {name:12s} {summary(results[name])}", flush=True)
        if not ok:
            print(*(f"       {fault}" for fault in result.get("wrong", ())), sep="\n", flush=True)
        if out is not None:  # after each section, so that a crash costs one section
            out.write_text(json.dumps({"failed": failed, **results}, indent=1, default=str) + "\n")
    return failed


def summary(result: dict[str, Any]) -> str:
    """Return the result's scalars in one line, and its tables below."""
    if "error" in result:
        return str(result["error"]).strip().splitlines()[-1]
    words = [
        f"{k}={round(v, 3) if isinstance(v, float) else v}"
        for k, v in result.items()
        if not isinstance(v, (dict, list)) and k != "ok"
    ]
    tables = [
        f"\n       {key}: " + ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
        for key, value in result.items()
        if isinstance(value, dict)
    ]
    return " ".join(words) + "".join(tables)


def matrix(rows: int, cols: int, dtype: str, integers: bool = False) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if integers:
        return torch.randint(-1, 2, (rows, cols), device=DEVICE).to(kind)
    return torch.randn(rows, cols, device=DEVICE).to(kind)


def wrong(got: Any, a: Any, b: Any) -> str:
    """Return what is wrong with ``got`` as a product of ``a`` and ``b``, judged by float64; empty if nothing is."""
    import torch

    a64, b64 = a.detach().double(), b.detach().double()
    reference = torch.matmul(a64, b64)
    if got.shape != reference.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(reference.shape)}"
    if reference.numel() == 0:
        return ""
    # Rounding of the result, and float32 accumulation of K terms; elements near zero are measured against their terms.
    digits = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-13}.get(got.dtype, 2**-20)
    scale = torch.matmul(a64.abs(), b64.abs())
    error = (got.detach().double() - reference).abs()
    bad = ~(error <= 2 * digits * reference.abs() + 2**-18 * scale + 1e-7)
    return (
        f"{int(bad.sum())} of {bad.numel()} elements off, the worst by {float(error.nan_to_num(float('inf')).max()):.3g}"
        if bool(bad.any())
        else ""
    )


def load(run: Run) -> dict[str, Any]:
    """Load the bundle and find the shapes for which a kernel, or an algorithm of cuBLASLt, runs here."""
    import torch

    import autogemm
    from autogemm import dispatch

    run.device = torch.cuda.current_device()
    began = time.perf_counter()
    if run.options.db is not None:
        autogemm.use_database(run.options.db)
        version = "database"
    else:
        autogemm.use_database(tempfile.mkdtemp())  # no rows but the bundle's
        version = autogemm.load_bundle(run.options.bundle).sha256
    took = time.perf_counter() - began
    here = dispatch.dispatcher()
    here.unmeasured = here.unmeasured or run.options.unmeasured
    device = here.machine.device(run.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = [row for row in here.table.rows if row.key.gpu == device.gpu]
        decisions = [here.decide(row.key.problem, run.device) for row in rows]
    sources: dict[str, int] = {}
    for decision in decisions:
        what = f"{decision.source} {decision.runs}"
        sources[what] = sources.get(what, 0) + 1
        if decision.runs != "cublas" and decision.problem is not None:
            p = decision.problem
            run.shapes.append((p.m, p.n, p.k, p.dtype))
    run.shapes = sorted(set(run.shapes), key=lambda s: s[0] * s[1] * s[2])
    return {
        "ok": bool(run.shapes), "gpu": device.name, "torch": torch.__version__, "python": sys.version.split()[0],
        "source": version, "load_s": took, "rows": len(here.table.by_key), "kernel_shapes": len(run.shapes),
        "decisions": sources, "notices": [str(w.message) for w in caught], "device": str(device),
        "imported": [name for name in REFUSED if name in sys.modules],
        "reasons": [str(d) for d in decisions if d.runs == "cublas"][:20],
    }  # fmt: skip


def exact(run: Run) -> dict[str, Any]:
    """Every shape that does not run torch.matmul, on integers: the result must be equal everywhere, out of poisoned memory."""
    import torch

    import autogemm

    bad = []
    for m, n, k, dtype in run.shapes:
        a, b = matrix(m, k, dtype, integers=True), matrix(n, k, dtype, integers=True)
        out = torch.full((m, n), float("nan"), device=DEVICE, dtype=a.dtype)
        autogemm.matmul(a, b.t(), out)
        expected = torch.matmul(a.float(), b.float().t()).to(a.dtype)  # exact: sums of K units stay below 2**24
        if not torch.equal(out, expected):
            bad.append(f"{m}x{n}x{k} {dtype}: {int((out != expected).sum())} wrong")
        del a, b, out, expected
    return {"ok": not bad, "shapes": len(run.shapes), "wrong": bad}


def random_calls(run: Run) -> dict[str, Any]:
    """Random layouts, offsets, types and ranks: torch's value, or an error where torch errs."""
    import torch

    from autogemm import dispatch

    draw = random.Random(run.options.seed)
    torch.manual_seed(run.options.seed)
    small = [s for s in run.shapes if s[0] * s[1] * s[2] <= 2**33] or run.shapes[:1]
    kinds: dict[str, int] = {}
    bad: list[str] = []
    made = kernels = errors = 0
    deadline = time.monotonic() + run.options.seconds
    here = dispatch.dispatcher()
    while made < run.options.calls and time.monotonic() < deadline:
        made += 1
        a, b, out, kind = random_operands(draw, small)
        kinds[kind] = kinds.get(kind, 0) + 1
        keep = None if out is None else out.clone()
        try:
            expected = torch.matmul(a, b, out=None if keep is None else torch.empty_like(keep))
        except (RuntimeError, TypeError):
            expected = None
        try:
            kernels += here.explain(a, b).runs != "cublas"
            got = dispatch.matmul(a, b, out)
        except (RuntimeError, TypeError) as error:
            errors += 1
            if expected is not None:
                bad.append(f"{kind} {tuple(a.shape)} {tuple(b.shape)}: raised {error}")
            continue
        if expected is None:
            bad.append(f"{kind} {tuple(a.shape)} {tuple(b.shape)}: torch raises, matmul did not")
            continue
        fault = wrong(got, a, b) if got.is_floating_point() else ""
        if got.dtype != expected.dtype or got.requires_grad != expected.requires_grad or (out is not None and got is not out):
            fault = "type, gradient or identity of the result differs"
        if not fault and got.requires_grad:
            got.sum().backward()
            fault = (
                ""
                if all(t.grad is None or bool(torch.isfinite(t.grad).all()) for t in (a, b) if t.is_leaf)
                else "gradient is not finite"
            )
        if fault:
            bad.append(f"{kind} {tuple(a.shape)}{a.stride()} {tuple(b.shape)}{b.stride()} {a.dtype}: {fault}")
    return {
        "ok": not bad and kernels > 0,
        "calls": made,
        "ran_kernels": kernels,
        "torch_errors": errors,
        "kinds": kinds,
        "wrong": bad[:20],
    }


KINDS = ("dense",) * 8 + (
    "gaps", "offset", "aligned", "transposed", "row-major", "step", "expanded", "batch", "vector", "types", "mismatch", "grad",
    "parameter", "out", "out-offset", "out-transposed", "out-type", "host",
)  # fmt: skip


def random_operands(draw: random.Random, shapes: list[tuple[int, int, int, str]]) -> tuple[Any, Any, Any, str]:
    """Return a, b, out or None, and the name of what is special about them."""
    import torch

    m, n, k, dtype = draw.choice(shapes)
    if draw.random() < 0.35:
        m, n, k = (draw.choice((0, 1, 3, 8, 16, 40, 100, 129, 264, 1000, 2048)) for _ in range(3))
        dtype = draw.choice(("float16", "bfloat16", "float32"))
    kind = draw.choice(KINDS)
    a, b, out = matrix(m, k, dtype), matrix(n, k, dtype).t(), None
    if kind == "gaps":
        a = matrix(m, k + draw.choice((1, 8, 64)), dtype)[:, :k]
    elif kind in ("offset", "aligned"):
        shift = draw.randint(1, 7) if kind == "offset" else 8
        b = matrix(1, n * k + shift, dtype)[0, shift:].view(n, k).t()
    elif kind == "transposed":
        a = matrix(k, m, dtype).t()
    elif kind == "row-major":
        b = matrix(k, n, dtype)
    elif kind == "step":
        a = matrix(2 * m, 2 * k, dtype)[::2, ::2]
    elif kind == "expanded":
        a = matrix(1, k, dtype).expand(m, k)
    elif kind == "batch":
        a = a.expand(2, m, k) if m * k < 2**24 else a
    elif kind == "vector" and m:
        a = a[0]
    elif kind == "types":
        b = b.float() if dtype != "float32" else b.half()
    elif kind == "mismatch":
        b = matrix(n, k + 8, dtype).t()
    elif kind == "grad":
        a = a.requires_grad_()
    elif kind == "parameter":
        b = torch.nn.Parameter(matrix(n, k, dtype)).t()
    elif kind == "host":
        b = b.cpu()
    elif kind.startswith("out"):
        blank = torch.full((m * n + 3,), float("nan"), device=DEVICE, dtype=torch.float32 if kind == "out-type" else a.dtype)
        out = {
            "out": lambda: blank[: m * n].view(m, n), "out-type": lambda: blank[: m * n].view(m, n),
            "out-offset": lambda: blank[3:].view(m, n), "out-transposed": lambda: blank[: m * n].view(n, m).t(),
        }[kind]()  # fmt: skip
    return a, b, out, kind


def graphs(run: Run) -> dict[str, Any]:
    """Capture products in a CUDA graph and replay it on new values; and capture one whose kernel was never loaded."""
    import torch

    import autogemm
    from autogemm import dispatch

    bad = []
    shapes = run.shapes[:: max(1, len(run.shapes) // 6)][:6]
    cases = [(matrix(m, k, dtype), matrix(n, k, dtype)) for m, n, k, dtype in shapes]
    autogemm.prepare([dispatch.dispatcher().explain(a, b.t()).problem for a, b in cases])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [autogemm.matmul(a, b.t()) for a, b in cases]
    for _ in range(3):
        for a, b in cases:
            a.normal_()
            b.normal_()
        graph.replay()
        torch.cuda.synchronize()
        bad += [
            f"replay {tuple(a.shape)}: {fault}"
            for (a, b), out in zip(cases, outs, strict=True)
            if (fault := wrong(out, a, b.t()))
        ]

    cold = cold_dispatcher(run)
    a, b = cases[0]
    torch.matmul(a, b.t())  # cuBLAS makes its own workspace before capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cold.matmul(a, b.t())
    graph.replay()
    torch.cuda.synchronize()
    if fault := wrong(out, a, b.t()):
        bad.append(f"cold capture: {fault}")
    if cold.decide(cold.explain(a, b.t()).problem, run.device).runs == "cublas":
        bad.append("after the capture the kernel is still not used")
    return {"ok": not bad, "captured": len(cases), "wrong": bad}


def cold_dispatcher(run: Run) -> Any:
    """Return a Dispatcher of the same rows and kernels that has loaded nothing."""
    from autogemm import dispatch

    shared = dispatch.dispatcher()
    return dispatch.Dispatcher(
        read_rows=lambda: (shared.table.rows, []), kernels=shared.kernels, machine=shared.machine,
        unmeasured=run.options.unmeasured,
    )  # fmt: skip


def threads(run: Run) -> dict[str, Any]:
    """Eight threads on streams of their own, from a cold dispatcher, then on a second GPU if there is one."""
    import torch

    from autogemm import dispatch

    shared = dispatch.dispatcher()
    cold = cold_dispatcher(run)
    small = [s for s in run.shapes if s[0] * s[1] * s[2] <= 2**34] or run.shapes[:1]
    bad: list[str] = []
    start = threading.Barrier(8)

    def work(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait()
                for turn in range(20):
                    m, n, k, dtype = small[(index // 2 + turn) % len(small)]
                    a, b = matrix(m, k, dtype), matrix(n, k, dtype)
                    if fault := wrong(cold.matmul(a, b.t()), a, b.t()):
                        bad.append(f"thread {index}: {fault}")
        except BaseException:
            bad.append(traceback.format_exc())

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.cuda.synchronize()
    devices = torch.cuda.device_count()
    if devices > 1:
        m, n, k, dtype = small[0]
        a, b = matrix(m, k, dtype).to("cuda:1"), matrix(n, k, dtype).to("cuda:1")
        if fault := wrong(shared.matmul(a, b.t()), a, b.t()):  # the current device stays the first
            bad.append(f"second GPU: {fault}")
    loads, restored = len(cold._loaded), len(cold._restored)
    return {"ok": not bad, "threads": 8, "loads": loads, "restored": restored, "gpus": devices, "wrong": bad[:5]}


def block_module() -> Any:
    """Return a transformer block with Llama-3.1-8B's products: N x K = 6144x4096, 4096x4096, 28672x4096, 4096x14336."""
    import torch
    from torch.nn import functional

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = torch.nn.RMSNorm(4096), torch.nn.RMSNorm(4096)
            self.qkv = torch.nn.Linear(4096, 6144, bias=False)
            self.out = torch.nn.Linear(4096, 4096, bias=False)
            self.gate_up = torch.nn.Linear(4096, 28672, bias=False)
            self.down = torch.nn.Linear(14336, 4096, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            q, k, v = self.qkv(self.norm1(x)).split((4096, 1024, 1024), -1)
            q = q.view(batch, length, 32, 128).transpose(1, 2)
            k, v = (t.view(batch, length, 8, 128).transpose(1, 2).repeat_interleave(4, 1) for t in (k, v))
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
            gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
            return x + self.down(functional.silu(gate) * up)

    return Block


def compiled(run: Run) -> dict[str, Any]:
    """A transformer block, plain and patched, eager, compiled and as a CUDA graph: equal, unbroken, and how long each takes."""
    import torch

    import autogemm

    torch.manual_seed(1)
    with torch.device(DEVICE):
        block = block_module()().half()
        x = torch.randn(1, run.options.tokens, 4096).half()
    bad, notes, calls = [], [], {}
    with torch.no_grad():
        reference = block(x)
        double = block_module()().half().to(DEVICE)
        double.load_state_dict(block.state_dict())
        report = autogemm.patch(double)
        calls["eager"], calls["eager patched"] = (lambda: block(x)), (lambda: double(x))
        breaks = torch._dynamo.explain(double)(x)
        if breaks.graph_break_count:
            bad.append(f"{breaks.graph_break_count} graph breaks: {breaks.break_reasons}")
        for mode in ("default", "reduce-overhead"):
            try:
                torch._dynamo.reset()
                pair = [torch.compile(module, mode=mode, fullgraph=True) for module in (block, double)]
                for call in pair:
                    for _ in range(3):
                        call(x)
                calls[f"compiled {mode}"], calls[f"compiled {mode} patched"] = (
                    (lambda p=pair: p[0](x)),
                    (lambda p=pair: p[1](x)),
                )
                difference = relative(pair[1](x).clone(), reference)
            except Exception as error:
                if mode == "default" and "triton" not in str(error).lower() and "compiler" not in str(error).lower():
                    bad.append(f"torch.compile {mode}: {error}")
                notes.append(f"torch.compile {mode}: {type(error).__name__}: {str(error)[:300]}")
                continue
            if difference > 5e-3:
                bad.append(f"compiled {mode} differs by {difference:.3g}")
        if not any(name.startswith("compiled") for name in calls):  # no Triton here: the tracing is tested all the same
            torch._dynamo.reset()
            traced = torch.compile(double, backend="aot_eager", fullgraph=True)
            if relative(traced(x), reference) > 5e-3:
                bad.append("aot_eager differs")
        eager = relative(double(x), reference)
        if eager > 5e-3:
            bad.append(f"eager patched differs by {eager:.3g}")
        milliseconds = interleaved(calls)
    gradient = trained(block, double, x[:, : min(512, run.options.tokens)], bad)
    undone = report.undo()
    ratios = {
        name.removesuffix(" patched"): milliseconds[name.removesuffix(" patched")] / milliseconds[name]
        for name in milliseconds
        if name.endswith("patched")
    }
    return {
        "ok": not bad, "swapped": len(report.swapped), "kept": len(report.kept), "graph_breaks": breaks.graph_break_count,
        "graphs": breaks.graph_count, "difference": eager, "gradient_difference": gradient, "undone": undone,
        "ms": milliseconds, "plain over patched": ratios, "report": str(report).splitlines(), "wrong": bad, "notes": notes,
    }  # fmt: skip


def trained(block: Any, double: Any, x: Any, bad: list[str]) -> float:
    """Return the largest relative difference of a gradient between the plain and the patched block."""
    worst = 0.0
    for module in (block, double):
        module.zero_grad()
        module(x).float().square().mean().mul(1e3).backward()
    for (name, one), other in zip(block.named_parameters(), double.parameters(), strict=True):
        worst = max(worst, relative(other.grad, one.grad))
        if not relative(other.grad, one.grad) < 2e-2:
            bad.append(f"gradient of {name} differs by {relative(other.grad, one.grad):.3g}")
    return worst


def relative(got: Any, expected: Any) -> float:
    """Return the relative difference in Frobenius norm."""
    difference = (got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    return float(difference)


def interleaved(calls: dict[str, Callable[[], object]], rounds: int = 25) -> dict[str, float]:
    """Return the median milliseconds of each call by CUDA events, one of each per round in changing order."""
    import torch

    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for call in calls.values():
        call()
    draw = random.Random(0)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            calls[name]()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end))
    return {name: statistics.median(found) for name, found in samples.items()}


def cpu_cost(run: Run) -> dict[str, Any]:
    """CPU microseconds per call, in batches the launch queue holds, each followed by a synchronization that is not timed."""
    import torch

    import autogemm
    from autogemm import dispatch

    m, n, k, dtype = run.shapes[0]
    a, bt = matrix(m, k, dtype), matrix(n, k, dtype)
    b = bt.t()
    out = torch.empty(m, n, device=DEVICE, dtype=a.dtype)
    here = dispatch.dispatcher()
    autogemm.matmul(a, b, out)
    kinds, key = here._kinds, (a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, a.device, b.device, None)
    kind = kinds[key]
    odd_a, odd_b = matrix(m, k, dtype), matrix(k, n, dtype)  # a layout no kernel takes
    autogemm.matmul(odd_a, odd_b, out)
    product = torch.ops.autogemm.matmul.default
    many = [torch.empty_like(out) for _ in range(min(5000, 2**30 // (out.numel() * 2)))]  # more than are remembered
    fresh = itertools.cycle(many)
    calls: dict[str, Callable[[], object]] = {
        "lookup hit": lambda: kinds.get((a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, a.device, b.device, None)),
        "launch": lambda: kind.kernel(a, bt, out, launch=kind.launch, sm_count=kind.sm_count),
        "matmul(out=)": lambda: autogemm.matmul(a, b, out),
        "torch.matmul(out=)": lambda: torch.matmul(a, b, out=out),
        "matmul(out=), new address": lambda: autogemm.matmul(a, b, next(fresh)),
        "matmul": lambda: autogemm.matmul(a, b),
        "torch.matmul": lambda: torch.matmul(a, b),
        "known fallback(out=)": lambda: autogemm.matmul(odd_a, odd_b, out),
        "torch of that fallback(out=)": lambda: torch.matmul(odd_a, odd_b, out=out),
        "operator": lambda: product(a, b),
        "linear": lambda: autogemm.linear(a, bt),
        "torch linear": lambda: torch.nn.functional.linear(a, bt),
    }
    with torch.no_grad():
        table = batches(calls)
    with torch.inference_mode():
        table["operator, inference mode"] = batches({"x": lambda: product(a, b)})["x"]
    table["first call that falls back"] = first_calls(here)
    whole, torchs = table["matmul(out=)"], table["torch.matmul(out=)"]
    return {"ok": whole < torchs, "shape": f"{m}x{n}x{k} {dtype}", "saved_us": torchs - whole, "us": table}


def batches(calls: dict[str, Callable[[], object]], size: int = 200, rounds: int = 21) -> dict[str, float]:
    """Return the median over batches of microseconds per call; calls alternate, since the CPU's clock moves too."""
    import torch

    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            began = time.perf_counter_ns()
            for _ in range(size):
                call()
            samples[name].append((time.perf_counter_ns() - began) / size / 1e3)
    torch.cuda.synchronize()
    return {name: statistics.median(found) for name, found in samples.items()}


def first_calls(here: Any) -> float:
    """Return the median microseconds of the first call of shapes without a row, torch.matmul's own time taken off."""
    import torch

    samples = []
    for i in range(100):
        a, b = matrix(24 + i, 64, "float16"), matrix(48, 64, "float16").t()
        torch.matmul(a, b)
        torch.cuda.synchronize()
        began = time.perf_counter_ns()
        here.matmul(a, b)
        middle = time.perf_counter_ns()
        torch.matmul(a, b)
        samples.append((2 * middle - began - time.perf_counter_ns()) / 1e3)
    return statistics.median(samples)


SECTIONS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "load": load, "exact": exact, "random": random_calls, "graphs": graphs, "threads": threads, "cpu": cpu_cost,
    "compile": compiled,
}  # fmt: skip

if __name__ == "__main__":
    main()
