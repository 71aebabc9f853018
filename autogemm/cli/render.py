"""All terminal output. Results go to stdout, notes and progress to stderr; nothing else in the package prints."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..binary import Binary
from ..decision import Decision
from ..doctor import Item
from ..errors import InputError
from ..problem import Problem
from ..record import Choice, Row
from ..results import CheckReport, Prediction
from ..shapes import Shape

if TYPE_CHECKING:
    from ..measure.bench import BenchResult

# Tables keep their columns when stdout is a file or a pipe, where there is no terminal to fit into.
_PIPE_WIDTH: Final = 200


def _console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream is not None and stream.isatty() else _PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


@contextmanager
def _stdout() -> Iterator[TextIO]:
    """Yield stdout and see to it that what is written arrives.

    Raises:
        InputError: stdout is closed, or can't be written to, such as on a full disk.
    """
    if sys.stdout is None:
        raise InputError("can't write results: stdout is closed")
    try:
        yield sys.stdout
        sys.stdout.flush()
    except OSError as problem:
        if problem.errno == errno.EPIPE:
            raise  # A reader that has seen enough, such as head.
        # What is still buffered would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise InputError(f"can't write results to stdout: {problem.strerror}") from problem


def stderr_console() -> Console:
    """Return the console on which live progress is drawn."""
    return _console(stderr=True)


def line(text: str, style: str | None = None) -> None:
    """Print one result line."""
    with _stdout():
        _console().print(Text(text, style=style or ""), soft_wrap=True)


def note(text: str) -> None:
    """Print one line of progress or advice."""
    _console(stderr=True).print(Text(text, style="dim"), soft_wrap=True)


def warn(text: str) -> None:
    """Print one line that should not be overlooked."""
    _console(stderr=True).print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)


def error(problem: Exception) -> None:
    """Print why the command stopped."""
    text = str(problem) or type(problem).__name__
    _console(stderr=True).print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)


def document(content: Any) -> None:
    """Print one JSON document, the whole of a --json command's stdout."""
    text = to_json(content)
    with _stdout() as stream:
        stream.write(text + "\n")


def to_json(content: Any) -> str:
    """Return ``content`` as JSON text; NaN and infinity, which JSON lacks, are an error."""
    return json.dumps(content, indent=1, allow_nan=False)


def raw(text: str) -> None:
    """Print text as it is, such as source code."""
    with _stdout() as stream:
        stream.write(text if text.endswith("\n") else text + "\n")


def table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], *, right: Sequence[str] = ()) -> None:
    """Print a table; the columns named in ``right`` hold numbers."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", no_wrap=column != "what", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    with _stdout():
        _console().print(grid)


def duration(seconds: float) -> str:
    """Return a time in the unit that fits: ``93.4 us``."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (float("inf"), 1.0, "s")):
        if seconds < limit:
            return f"{seconds * factor:.4g} {unit}"
    raise AssertionError(seconds)


def tflops(problem: Problem, seconds: float) -> str:
    """Return the rate in TFLOP/s."""
    return (
        f"{problem.flops / seconds / 1e12:.0f}" if problem.flops / seconds > 1e13 else f"{problem.flops / seconds / 1e12:.2f}"
    )


def row_table(rows: Sequence[Row], stale: Mapping[int, Sequence[str]] | None = None) -> None:
    """Print Rows, one a line; ``stale`` maps an index to the reasons why that Row is out of date.

    ``x cuBLAS`` is the kernel's ratio, ``cuBLASLt`` that of the best of cuBLASLt's own algorithms, to the same torch.matmul.
    """
    lines: list[list[str | Text]] = []
    for i, row in enumerate(rows):
        measured = row.status == "measured"
        tied = "" if row.race is None else str(len(row.race.tied))
        what = row.choice if measured else f"by {row.prediction.model}" if row.prediction else ""
        if stale and stale.get(i):
            what += f", stale {', '.join(reason.split()[0] for reason in stale[i])}"
        lines.append(
            [
                row.key.problem.shape, row.key.dtype, row.key.gpu, str(row.key.sm_count), row.config.id,
                Text(row.status, style="green" if measured else "yellow"), duration(row.time_s),
                tflops(row.key.problem, row.time_s), row.ratio_text(), row.ratio_text("cublaslt"), tied,
                row.provenance.date[:10], what,
            ]
        )  # fmt: skip
    columns = (
        "shape", "dtype", "gpu", "SMs", "config", "status", "time", "TFLOP/s", "x cuBLAS", "cuBLASLt", "tied", "date", "what",
    )  # fmt: skip
    table(columns, lines, right=("SMs", "time", "TFLOP/s", "x cuBLAS", "cuBLASLt", "tied"))


def row_summary(row: Row) -> None:
    """Print what a tuning found, saying whether it is a measurement or a prediction."""
    problem = row.key.problem
    head = f"{problem.shape} {problem.dtype} {row.key.gpu}: {duration(row.time_s)}, {tflops(problem, row.time_s)} TFLOP/s"
    if row.prediction is not None:
        line(f"{head}, PREDICTED by {row.prediction.model} (not measured)", "yellow")
    else:
        tied = f", tied with {len(row.race.tied) - 1} other configs" if row.race is not None and len(row.race.tied) > 1 else ""
        line(f"{head}, measured, {row.ratio_text()} x cuBLAS{tied}", "green")
        if row.choice == "cublas":
            line("  cuBLAS was faster: dispatch uses torch.matmul for this shape")
        if row.cublaslt is not None:
            chosen = ": dispatch runs it" if row.choice == "cublaslt" else ""
            line(f"  best cuBLASLt algorithm ({row.cublaslt.algorithm}) {row.ratio_text('cublaslt')} x cuBLAS{chosen}")
    line(f"  config {row.config.id}: {row.config}")
    if row.check is not None:
        verdict = "passed" if row.check.passed else f"FAILED ({', '.join(row.check.findings)})"
        at = "" if row.check.shape is None else " at " + "x".join(map(str, row.check.shape))
        line(f"  CPU check {verdict}: level {row.check.level}{at}, {row.check.schedules} schedules")


def prediction(problem: Problem, config_id: str, result: Prediction) -> None:
    """Print one modelled time and what it is made of."""
    line(
        f"{problem.shape} {problem.dtype} {result.gpu} {config_id}: {duration(result.time_s)}, "
        f"{tflops(problem, result.time_s)} TFLOP/s, PREDICTED by {result.model} at {result.clock_hz / 1e9:.3g} GHz",
        "yellow",
    )
    for name, seconds in result.parts_s.items():
        line(f"  {name:<40} {duration(seconds):>10}")
    for name, share in result.utilization.items():
        line(f"  {name:<40} {share:>10.0%}")


def prediction_table(problem: Problem, results: Sequence[tuple[str, Prediction]]) -> None:
    """Print several modelled times for one shape."""
    first, fastest = results[0][1], min(result.time_s for _, result in results)
    line(f"{problem.shape} {problem.dtype} {first.gpu}, PREDICTED by {first.model}", "yellow")
    lines = [
        [name, duration(result.time_s), tflops(problem, result.time_s), f"{result.time_s / fastest - 1:.1%}"]
        for name, result in results
    ]
    table(("config", "time", "TFLOP/s", "over best"), lines, right=("time", "TFLOP/s", "over best"))


def check_report(name: str, report: CheckReport) -> None:
    """Print one verdict with every finding."""
    shape = "" if report.shape is None else " at " + "x".join(map(str, report.shape))
    how = f"level {report.level}{shape}, {len(report.seeds)} schedule{'s' if len(report.seeds) != 1 else ''}, {report.model}"
    if report.passed:
        worst = "" if report.max_error is None else f", largest error {report.max_error:.3g}"
        line(f"{name}: passed ({how}{worst})", "green")
        return
    line(f"{name}: {len(report.findings)} finding{'s' if len(report.findings) != 1 else ''} ({how})", "red")
    for finding in report.findings:
        first, *rest = finding.text.splitlines() or [""]
        line(f"  {finding.kind}: {first}")
        for more in rest:
            line(f"    {more}")


def decision(result: Decision) -> None:
    """Print what dispatch runs and why."""
    line(f"{result.problem}: runs {'torch.matmul (cuBLAS)' if result.runs == 'cublas' else result.what}", "bold")
    line(f"  source: {result.source}; evidence: {result.status}")
    line(f"  because {result.reason}")
    if result.config is not None:
        line(f"  on {result.sm_count} SMs: {result.config}")


def shape_table(shapes: Sequence[Shape]) -> None:
    """Print shapes, one a line."""
    lines = [[f"{s.m}x{s.n}x{s.k}", str(s.count), "-" if s.saved_s is None else duration(s.saved_s), s.source] for s in shapes]
    table(("shape", "calls", "saved (predicted)", "what"), lines, right=("calls", "saved (predicted)"))


def items(found: Sequence[Item]) -> None:
    """Print the parts of an installation, one a line."""
    styles = {"ok": "green", "missing": "yellow", "bad": "red"}
    lines: list[list[str | Text]] = [
        [item.name, Text(item.state, style="red" if item.needed and item.state != "ok" else styles[item.state]), item.detail]
        for item in found
    ]
    table(("part", "state", "what"), lines)


def binary(compiled: Binary, path: Path | None) -> None:
    """Print what the compiler made of one config."""
    m, used = compiled.manifest, compiled.usage
    line(f"{m.arch} {m.dtype} {compiled.config.id}: {len(compiled.cubin)} bytes by {compiled.compiler}", "bold")
    line(f"  {compiled.config}")
    line(f"  {used.registers} registers, {used.spill_bytes} bytes spilled, {used.stack_bytes} bytes of stack per thread")
    line(f"  {m.block_threads} threads, {m.smem_bytes} bytes of shared memory, clusters of {m.cluster_ctas}")
    if path is not None:
        line(f"  written to {path}")


def bench_table(
    results: Sequence[BenchResult], runs: Sequence[Choice], means: Mapping[str | None, Mapping[str, float]]
) -> None:
    """Print measured ratios, one shape and kernel a line, and their geometric means.

    Args:
        runs: what dispatch runs on each shape.
        means: by baseline, None for torch.matmul and ``cublaslt`` where its algorithms were searched; then by kernel and L2.
    """
    searched = [baseline for baseline in means if baseline is not None]
    lines = []
    for result, ran in zip(results, runs, strict=True):
        for name, subject in result.subjects.items():
            lines.append(
                [
                    result.problem.shape, f"{name} ({ran})" if name == "dispatch" else name, duration(subject.time_s()),
                    tflops(result.problem, subject.time_s()), f"{subject.ratio():.3f} ± {subject.spread():.3f}",
                    f"{subject.ratio(cold=True):.3f} ± {subject.spread(cold=True):.3f}",
                    *(f"{result.ratio(name, other, cold=cold):.3f}" for other in searched for cold in (False, True)),
                    f"{result.fraction_of_limit(name):.0%}", result.limit.bound,
                ]
            )  # fmt: skip
    against = [f"x {other} {state}" for other in searched for state in ("warm", "cold")]
    columns = ("shape", "kernel", "time", "TFLOP/s", "x torch warm", "x torch cold", *against, "of limit", "limit")
    table(columns, lines, right=columns[2:-1])
    for baseline, found in means.items():
        for name, mean in found.items():
            what = "torch.matmul (cuBLAS)" if baseline is None else f"the best of a {baseline} search"
            line(f"geometric mean, {name}: {mean:.4f} x {what}", "bold")
    line(f"dispatch runs a kernel on {runs.count('autogemm')} of {len(runs)} shapes, an algorithm of cuBLASLt on "
         f"{runs.count('cublaslt')}, torch.matmul on {runs.count('cublas')}")  # fmt: skip
