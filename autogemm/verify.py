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
from .measure.admission import Searched
from .measure.faults import TrialFault
from .measure.paired import complete, evidence
from .measure.timer import CUBLASLT
from .record import Choice, CublasLtRecord, Row
from .results import Measurement, Outcome

Verdict = Literal["holds", "moved", "slower", "faster", "failed", "skipped"]

WARM_ROUNDS: Final = 21
COLD_ROUNDS: Final = 9
# A ratio has moved if it is further from the recorded one than this, and than three times the spread of both.
TOLERANCE: Final = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What became of one row.

    Attributes:
        verdict: ``holds``; ``moved``: the ratio is another, or the lead of kernel or cuBLASLt algorithm over each other;
            ``slower``: cuBLAS is faster now; ``faster``: the kernel or the algorithm is faster now, where cuBLAS was;
            ``failed``: the kernel does not compile, is wrong or crashes;
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
            "runs_before": self.row.choice, "runs_now": None if self.now is None else self.now.choice,
            "ratio_before": self.row.ratio(), "ratio_now": None if self.now is None else self.now.ratio(),
            "reason": self.reason,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Remeasured:
    """What timing a row again gave.

    Attributes:
        binary: the kernel that was timed.
        cublaslt: the cuBLASLt algorithm beside it; None if the row has none, or none could be used.
    """

    measurement: Measurement
    binary: Binary
    cublaslt: CublasLtRecord | None = None


# Times one row again. Raises MissingDependency if the kernel can't be had here, CompileError or NothingFound if the kernel is
# itself at fault.
Measure = Callable[[Row], Remeasured]


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
        again = measure(row)
    except MissingDependency as error:
        return Verified(verdict="skipped", row=row, now=None, reason=str(error))
    except (CompileError, NothingFound) as error:
        return Verified(verdict="failed", row=row, now=None, reason=str(error))
    environment = again.measurement.environment
    now = replace(
        row, evidence=again.measurement, cublaslt=again.cublaslt,
        provenance=replace(
            row.provenance, autogemm=__version__, generator=again.binary.manifest.generator, compiler=again.binary.compiler,
            driver=environment.driver, torch=environment.torch, date=environment.date,
        ),
    ).rounded()  # fmt: skip
    was, ratio = row.ratio(), now.ratio()
    assert was is not None and ratio is not None
    what, moved = f"{was:.3f} -> {ratio:.3f} x cuBLAS", _moved(row, now, "autogemm")
    if row.cublaslt is not None:
        old, new = row.ratio("cublaslt"), now.ratio("cublaslt")
        what += f", cuBLASLt's algorithm {old:.3f} -> " + ("unusable" if new is None else f"{new:.3f}")
        moved = moved or _moved(row, now, "cublaslt")
    if row.choice == now.choice:
        return Verified(verdict="moved" if moved else "holds", row=row, now=now, reason=what)
    verdict: Verdict = "slower" if now.choice == "cublas" else "faster" if row.choice == "cublas" else "moved"
    return Verified(verdict=verdict, row=row, now=now, reason=f"{what}; dispatch runs {now.choice}")


def _moved(row: Row, now: Row, choice: Choice) -> bool:
    """Return whether a choice's ratio to cuBLAS is another than it was, beyond what both spreads explain."""
    was, ratio = row.ratio(choice), now.ratio(choice)
    slack = max(TOLERANCE, 3 * math.hypot(row.spread(choice) or 0.0, now.spread(choice) or 0.0))
    return was is not None and (ratio is None or abs(ratio - was) > slack)


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

    def __call__(self, row: Row) -> Remeasured:
        """Return a new measurement of ``row``'s kernel, and of its cuBLASLt algorithm if it has one.

        For a row whose algorithm is of another version of the library, the best of this library's takes its place.

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
        rival = _rival(row, bench)
        measurement, beside = measured(name, bench, admitted.relative_error, rival)
        return Remeasured(measurement=measurement, binary=binary, cublaslt=beside)

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


def _rival(row: Row, bench: Any) -> Searched | None:
    """Return the cuBLASLt algorithm to time beside ``row``'s kernel, admitted; None if there is none."""
    if row.cublaslt is None:
        return None
    from .runtime.cublaslt import library_version

    held = row.cublaslt.algorithm
    try:
        if library_version() not in (0, held.version):
            found: Searched = bench.admit_cublaslt()
            return found
        admitted = bench.admit_algorithm(held)
    except (InputError, TrialFault):
        return None
    if admitted.outcome is not Outcome.OK:
        return None
    return Searched(algorithm=held, tried=row.cublaslt.tried, relative_error=admitted.relative_error)


def measured(
    name: str, bench: Any, relative_error: dict[str, float], rival: Searched | None = None
) -> tuple[Measurement, CublasLtRecord | None]:
    """Return WARM_ROUNDS and COLD_ROUNDS of the admitted kernel ``name``, and of ``rival`` in the same rounds as the kernel.

    Raises:
        NothingFound: the kernel failed while it was timed.
    """
    names = [name] if rival is None else [name, CUBLASLT]
    warm = [bench.round(names) for _ in range(WARM_ROUNDS)]
    cold = [bench.cold_round(names) for _ in range(COLD_ROUNDS)]
    if not (complete(warm, names) and complete(cold, names)):
        rival, names = None, [name]
    if not complete(warm, names):
        raise NothingFound("the kernel failed while it was timed")
    return evidence(
        name, complete(warm, names), complete(cold, names), relative_error=relative_error, environment=bench.environment(),
        rival=rival,
    )  # fmt: skip


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
