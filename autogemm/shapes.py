"""Lists of shapes worth tuning: the shapes file, its order, and recording shapes from a running PyTorch model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .arch import Gpu
from .binary import write_whole
from .constraints import problem_violations, violations
from .decision import DEFAULT_CONFIG
from .dtypes import DTYPES
from .errors import InputError
from .problem import Problem, parse_shape
from .space import load_space


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One product of a workload: A ``[m, k]`` times W ``[n, k]`` transposed.

    Attributes:
        count: times it runs per unit of work (one forward pass, one recording).
        source: where it comes from, for people.
        saved_s: predicted seconds that tuning saves over all ``count`` runs; None where it was not predicted.
    """

    m: int
    n: int
    k: int
    count: int = 1
    source: str = ""
    saved_s: float | None = None

    def __post_init__(self) -> None:
        self.problem()
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise InputError(f"count of {self.m}x{self.n}x{self.k} must be a positive integer, got {self.count!r}")

    def problem(self, dtype: str = "float16") -> Problem:
        """Return it as a Problem of element type ``dtype``."""
        return Problem(m=self.m, n=self.n, k=self.k, dtype=dtype)


def merged(shapes: Iterable[Shape]) -> list[Shape]:
    """Return one Shape per (m, n, k) in order of appearance: counts added, sources joined."""
    found: dict[tuple[int, int, int], Shape] = {}
    for shape in shapes:
        key = (shape.m, shape.n, shape.k)
        known = found.get(key)
        if known is None:
            found[key] = shape
        else:
            sources = [s for s in (*known.source.split(", "), shape.source) if s]
            found[key] = replace(known, count=known.count + shape.count, source=", ".join(dict.fromkeys(sources)))
    return list(found.values())


def read_shapes(path: Path) -> list[Shape]:
    """Return the shapes in a file: a JSON list of objects with m, n, k (count, source), or ``MxNxK`` lines (# comments).

    Raises:
        InputError: unreadable, empty, or an entry that is no shape; names the entry.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"can't read shapes file {path}: {error}") from error
    if text.lstrip().startswith(("[", "{")):
        try:
            document = json.loads(text)
        except ValueError as error:
            raise InputError(f"shapes file {path} is not valid JSON: {error}") from error
        entries = document.get("shapes") if isinstance(document, dict) else document
        if not isinstance(entries, list):
            raise InputError(f"shapes file {path} needs a JSON list of objects with m, n, k")
        shapes = [_parsed(entry, f"shapes file {path}, entry {i}") for i, entry in enumerate(entries, 1)]
    else:
        lines = [(i, line.split("#")[0].strip()) for i, line in enumerate(text.splitlines(), 1)]
        shapes = []
        for i, line in lines:
            if line:
                try:
                    m, n, k = parse_shape(line)
                except InputError as error:
                    raise InputError(f"shapes file {path}, line {i}: {error}") from error
                shapes.append(Shape(m=m, n=n, k=k))
    if not shapes:
        raise InputError(f"shapes file {path} holds no shapes; give a JSON list of objects with m, n, k, or MxNxK lines")
    return merged(shapes)


def _parsed(entry: Any, where: str) -> Shape:
    if not isinstance(entry, dict):
        raise InputError(f"{where}: expected an object with m, n, k, got {entry!r}")
    missing = [name for name in ("m", "n", "k") if name not in entry]
    if missing:
        raise InputError(f"{where} lacks {', '.join(missing)}")
    try:
        return Shape(m=entry["m"], n=entry["n"], k=entry["k"], count=entry.get("count", 1), source=str(entry.get("source", "")))
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def write_shapes(path: Path, shapes: Sequence[Shape]) -> None:
    """Write a shapes file that ``read_shapes`` and ``autogemm tune --shapes`` take.

    Raises:
        InputError: nothing to write, or the folder can't be written to.
    """
    if not shapes:
        raise InputError(f"no shapes to write to {path}")
    rows = [{name: value for name, value in asdict(shape).items() if value not in (None, "")} for shape in shapes]
    text = "[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n"
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise InputError(f"can't write {path}: {error}") from error


def by_time_saved(shapes: Sequence[Shape], gpu: Gpu, dtype: str = "float16") -> list[Shape]:
    """Return ``shapes`` with ``saved_s`` set, most first.

    A prediction: ``count`` times the modelled difference between the arch's default config, which untuned shapes would
    run, and the best legal one. Shapes that no generated kernel can take come last, with nothing saved.
    """
    from .predict.closed_form import predict

    configs = load_space(gpu.arch).configs(dtype)
    ordered = []
    for shape in shapes:
        problem = shape.problem(dtype)
        if problem_violations(problem):
            ordered.append((0.0, replace(shape, saved_s=0.0)))
            continue
        times = [predict(problem, config, gpu).time_s for config in configs if not violations(config, gpu.arch, problem)]
        best = min(times)
        saved = shape.count * max(0.0, predict(problem, DEFAULT_CONFIG[gpu.arch], gpu).time_s - best)
        ordered.append((shape.count * best, replace(shape, saved_s=saved)))
    ordered.sort(key=lambda pair: (pair[1].saved_s or 0.0, pair[0]), reverse=True)
    return [shape for _, shape in ordered]


@dataclass(slots=True)
class Recording:
    """What ``record_shapes`` saw; complete once its ``with`` block has ended.

    Attributes:
        counts: calls per (m, n, k) that a generated kernel can take.
        skipped: reason to calls, for products that none can take.
    """

    counts: dict[tuple[int, int, int], int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def shapes(self) -> list[Shape]:
        """The recorded shapes, most calls first."""
        rows = sorted(self.counts.items(), key=lambda item: -item[1])
        return [Shape(m=m, n=n, k=k, count=count, source="recorded") for (m, n, k), count in rows]

    def add(self, m: int, n: int, k: int, dtype: str, layout: str) -> None:
        """Count one product; ``dtype`` as torch prints it, ``layout`` in row-major BLAS letters."""
        name = dtype.removeprefix("torch.")
        if name not in DTYPES:
            reason = f"element type {name}"
        elif layout != "NT":
            reason = f"layout {layout}"
        elif min(m, n, k) < 1:
            reason = "an empty product"
        else:
            self.counts[m, n, k] = self.counts.get((m, n, k), 0) + 1
            return
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


@contextmanager
def record_shapes(path: str | Path | None = None) -> Iterator[Recording]:
    """Record the matrix products that PyTorch runs inside a ``with`` block, on this thread, forward and backward.

    ``with autogemm.record_shapes("shapes.json") as seen: model(tokens)`` writes a shapes file when the block ends without
    an error; ``seen.shapes`` holds the same. Compiled regions (``torch.compile``) are not seen: record in eager mode.

    Raises:
        InputError: ``path`` is given and nothing was recorded, or it can't be written.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    recording = Recording()

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket._qualified_op_name
            operands = {
                "aten::mm": args[:2], "aten::addmm": args[1:3], "aten::linear": args[:2], "autogemm::matmul": args[:2],
                "autogemm::linear": args[:2],
            }.get(name)  # fmt: skip
            if operands is not None and len(operands) == 2:
                a, b = operands
                _record(recording, a, b.t() if name.endswith("::linear") else b)
            return func(*args, **(kwargs or {}))

    def _record(into: Recording, a: torch.Tensor, b: torch.Tensor) -> None:
        rows = a.numel() // a.shape[-1] if a.shape[-1] else 0
        first = "N" if a.stride(-1) == 1 or a.shape[-1] == 1 else "T"
        second = "T" if b.stride(0) == 1 or b.shape[0] == 1 else "N"
        into.add(rows, b.shape[1], b.shape[0], str(a.dtype), first + second)

    with Recorder():  # type: ignore[no-untyped-call]
        yield recording
    if path is not None:
        write_shapes(Path(path), recording.shapes)
