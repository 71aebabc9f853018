"""Verify: time tuned rows again on the GPU, driver and libraries of today, and retire those that no longer hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Literal

from . import __version__
from .binary import Binary
from .bundle import kernel_key
from .database import Database
from .device import Device
from .errors import CompileError, InputError, MissingDependency, NothingFound
from .kernel_store import ChainedKernels, FolderKernels, KernelSource, keep
from .record import Row
from .results import Measurement, Outcome, Samples

Verdict = Literal["holds", "moved", "slower", "faster", "failed", "skipped"]

WARM_ROUNDS: Final = 21
COLD_ROUNDS: Final = 9
# A ratio has moved if it is further from the recorded one than this, and than three times the spread of both.
TOLERANCE: Final = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What became of one row.

    Attributes:
        verdict: ``holds``; ``moved``: the ratio is another, the choice the same; ``slower``: cuBLAS is faster now;
            ``faster``: the kernel is faster now, where cuBLAS was; ``failed``: it does not compile, is wrong or crashes;
            ``skipped``: the kernel is not there and can't be compiled here.
        row: as it was.
        now: as it is, with the new measurement; None if there is none.
        reason: in words.
    """

    verdict: Verdict
    row: Row
    now: Row | None
    reason: str

    @property
    def stale(self) -> bool:
        """Whether the row made dispatch run a kernel that it should not."""
        return self.verdict in ("slower", "failed")

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {
            "key": str(self.row.key), "config_id": self.row.config.id, "verdict": self.verdict, "stale": self.stale,
            "ratio_before": self.row.ratio(), "ratio_now": None if self.now is None else self.now.ratio(),
            "reason": self.reason,
        }  # fmt: skip


# Times one row again; the Binary is what was timed. Raises MissingDependency if the kernel can't be had here, CompileError or
# NothingFound if the kernel itself is at fault.
Measure = Callable[[Row], tuple[Measurement, Binary]]


def verify(
    database: Database, measure: Measure, *, device: Device, rows: Sequence[Row] | None = None, dry_run: bool = False,
    told: Callable[[Verified], None] = lambda verified: None,
) -> list[Verified]:  # fmt: skip
    """Time the measured rows of ``device`` again, and write what is found.

    A row that can be timed gets its new measurement, whatever that says: where cuBLAS is faster now, dispatch runs cuBLAS from
    then on. A row whose kernel fails is removed, one whose kernel can't be had here is left alone. Each row is written as soon
    as it is known.

    Args:
        rows: which to verify; by default all measured rows of ``device`` with its SM count or fewer.
        dry_run: write nothing.
        told: called with each result.

    Raises:
        NothingFound: no row to verify.
        DatabaseError: a file can't be understood or written.
    """
    chosen = rows if rows is not None else database.rows(device.gpu)
    chosen = [row for row in chosen if row.measurement is not None and row.key.sm_count <= device.sm_count]
    if not chosen:
        raise NothingFound(f"no measured row of {device.gpu} to verify")
    results = []
    for row in chosen:
        verified = _verified(row, measure)
        if not dry_run:
            if verified.verdict == "failed":
                database.remove([row.key])
            elif verified.now is not None:
                database.put_many([verified.now], choose=lambda held, given: given)
        results.append(verified)
        told(verified)
    return results


def _verified(row: Row, measure: Measure) -> Verified:
    try:
        measurement, binary = measure(row)
    except MissingDependency as error:
        return Verified(verdict="skipped", row=row, now=None, reason=str(error))
    except (CompileError, NothingFound) as error:
        return Verified(verdict="failed", row=row, now=None, reason=str(error))
    environment = measurement.environment
    now = replace(
        row, evidence=measurement,
        provenance=replace(
            row.provenance, autogemm=__version__, generator=binary.manifest.generator, compiler=binary.compiler,
            driver=environment.driver, torch=environment.torch, date=environment.date,
        ),
    ).rounded()  # fmt: skip
    was, ratio = row.ratio(), now.ratio()
    assert was is not None and ratio is not None
    what = f"{was:.3f} -> {ratio:.3f} x cuBLAS"
    if row.choice != now.choice:
        return Verified(
            verdict="slower" if now.choice == "cublas" else "faster",
            row=row,
            now=now,
            reason=f"{what}; dispatch runs {now.choice}",
        )
    slack = max(TOLERANCE, 3 * math.hypot(row.spread() or 0.0, now.spread() or 0.0))
    return Verified(verdict="moved" if abs(ratio - was) > slack else "holds", row=row, now=now, reason=what)


class DeviceMeasure:
    """Times rows on one GPU in an isolated worker process; kernels come from where dispatch finds them, or are compiled."""

    def __init__(self, index: int = 0, *, kernels: KernelSource | None = None, compiling: bool = True) -> None:
        """Measure on GPU ``index``.

        Args:
            kernels: where kernels come from; by default as for dispatch.
            compiling: compile what is not there, with the present generator.
        """
        from .dispatch import CompilerCache

        self._index, self._compiling = index, compiling
        self._kernels = kernels if kernels is not None else ChainedKernels([FolderKernels(), CompilerCache()])
        self._bench: Any = None
        self._sm_count: int | None = None

    def __call__(self, row: Row) -> tuple[Measurement, Binary]:
        """Return a new measurement of ``row`` and the kernel that was measured.

        Raises:
            NothingFound: the kernel is wrong, hangs or crashes.
            CompileError: it does not compile.
            MissingDependency: it is not there, and can't or may not be compiled.
        """
        binary = self._binary(row)
        bench = self._opened(row)
        name = row.config.id
        admitted = bench.admit(name, binary, row.config)
        if admitted.outcome is not Outcome.OK:
            raise NothingFound(f"the kernel is refused on the GPU: {admitted.outcome.value}: {admitted.reason}")
        measurement = measured(name, bench, admitted.relative_error)
        return measurement, binary

    def _binary(self, row: Row) -> Binary:
        key = kernel_key(row)
        found = self._kernels.find(key)
        if found.binary is None:
            found = self._kernels.find(replace(key, generator=None))
        if found.binary is not None:
            return found.binary
        if not self._compiling:
            raise MissingDependency(found.reason)
        from .compile.compiler import compile_config

        binary = compile_config(row.config, row.key.arch, row.key.dtype_a)
        keep(binary)
        return binary

    def _opened(self, row: Row) -> Any:
        from .measure.device_bench import DeviceBench

        if self._bench is not None and self._sm_count != row.key.sm_count:
            self.close()
        if self._bench is None:
            self._bench = DeviceBench(row.key.problem, device=self._index, sm_count=row.key.sm_count)
            self._sm_count = row.key.sm_count
        else:
            self._bench.open(row.key.problem)
        return self._bench

    def close(self) -> None:
        """End the worker and free the GPU."""
        if self._bench is not None:
            self._bench.close()
            self._bench = None

    def __enter__(self) -> DeviceMeasure:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def measured(name: str, bench: Any, relative_error: dict[str, float]) -> Measurement:
    """Return WARM_ROUNDS and COLD_ROUNDS of the admitted kernel ``name``, paired with torch.matmul.

    Raises:
        NothingFound: it failed while it was timed.
    """
    from .measure.timer import BASELINE

    warm = _paired(name, BASELINE, (bench.round([name]) for _ in range(WARM_ROUNDS)), cold=False)
    cold = _paired(name, BASELINE, (bench.cold_round([name]) for _ in range(COLD_ROUNDS)), cold=True)
    if warm is None:
        raise NothingFound("the kernel failed while it was timed")
    return Measurement(warm=warm, cold=cold, relative_error=relative_error, environment=bench.environment())


def _paired(name: str, baseline: str, rounds: Iterable[dict[str, float]], *, cold: bool) -> Samples | None:
    pairs = [(times[name], times[baseline]) for times in rounds if name in times]
    if not pairs:
        return None
    return Samples(kernel_s=tuple(k for k, _ in pairs), baseline_s=tuple(b for _, b in pairs), cold_l2=cold)


def select(rows: Iterable[Row], shapes: Iterable[str]) -> list[Row]:
    """Return the rows whose shape is among ``shapes`` (``MxNxK``).

    Raises:
        InputError: a shape has no row.
    """
    wanted = set(shapes)
    found = [row for row in rows if row.key.problem.shape in wanted]
    missing = wanted - {row.key.problem.shape for row in found}
    if missing:
        raise InputError(f"no row of shape {', '.join(sorted(missing))}")
    return found
