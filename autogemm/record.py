"""Row: one tuned answer with the evidence for it. The unit that the database stores, the tuner writes and dispatch reads.

The JSON form is strict: an unknown, missing or ill-typed field is an error, so that nothing is ever half understood.
"""

from __future__ import annotations

import math
import re
import statistics
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from .algorithm import Algorithm
from .arch import ARCH_NAMES, ArchName
from .config import Config
from .decoding import decode
from .errors import InputError
from .problem import Epilogue, Layout, Problem
from .results import CheckReport, Measurement, Prediction, Samples

SCHEMA: Final = 1

Status = Literal["measured", "predicted"]
# What dispatch runs: the Row's kernel, torch.matmul, or the cuBLASLt algorithm that the Row names.
Choice = Literal["autogemm", "cublas", "cublaslt"]

# A cuBLASLt algorithm runs where it is faster than torch.matmul and than the kernel by more than this, the difference below
# which a race counts two candidates as equal (search.race.Rules.margin). Within it, the simpler one runs.
ALGORITHM_MARGIN: Final = 0.003

# Samples are kept to this many significant digits: 0.05 % at worst, below the resolution of a timing, a third of the text.
SIGNIFICANT_DIGITS: Final = 4
# What a sample may be: from about a clock cycle to hours. Outside, ratios of samples overflow, and nothing was measured anyway.
LEAST_TIME_S: Final = 1e-9
LONGEST_TIME_S: Final = 1e4
MAX_TRIED: Final = 10_000

_SLUG: Final = re.compile(r"[a-z0-9][a-z0-9._-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """What a Row answers; every field takes part in equality, so that no other question ever hits it.

    Attributes:
        gpu: GPU slug, the folder under ``tuned/``.
        sm_count: SMs the kernel may occupy; fewer than the GPU has under an SM budget.
        dtype_a, dtype_b, dtype_d: types of A, B and D.
        layout: row-major BLAS letters.
        m, n, k: extents in elements.
    """

    arch: ArchName
    gpu: str
    sm_count: int
    dtype_a: str
    dtype_b: str
    dtype_d: str
    layout: Layout
    epilogue: Epilogue
    m: int
    n: int
    k: int

    def __post_init__(self) -> None:
        if self.arch not in ARCH_NAMES:
            raise InputError(f"unknown arch {self.arch!r} in a key; supported: {', '.join(ARCH_NAMES)}")
        if not _SLUG.fullmatch(self.gpu):
            raise InputError(f"GPU name {self.gpu!r} in a key is no folder name; use lower-case letters, digits and '-'")
        if self.sm_count < 1:
            raise InputError(f"sm_count must be at least 1, got {self.sm_count}")
        Problem(m=self.m, n=self.n, k=self.k, dtype=self.dtype_a, layout=self.layout, epilogue=self.epilogue)

    @classmethod
    def of(cls, problem: Problem, *, arch: ArchName, gpu: str, sm_count: int) -> Key:
        """Return the Key of ``problem`` on ``sm_count`` SMs of a GPU."""
        return cls(
            arch=arch, gpu=gpu, sm_count=sm_count, dtype_a=problem.dtype, dtype_b=problem.dtype, dtype_d=problem.dtype,
            layout=problem.layout, epilogue=problem.epilogue, m=problem.m, n=problem.n, k=problem.k,
        )  # fmt: skip

    @property
    def dtype(self) -> str:
        """File stem under ``tuned/<gpu>/``: the one type, or the three of A, B and D joined by ``-``."""
        types_ = (self.dtype_a, self.dtype_b, self.dtype_d)
        return types_[0] if len(set(types_)) == 1 else "-".join(types_)

    @property
    def problem(self) -> Problem:
        """The Problem it asks; operand types are those of A."""
        return Problem(m=self.m, n=self.n, k=self.k, dtype=self.dtype_a, layout=self.layout, epilogue=self.epilogue)

    @property
    def family(self) -> tuple[str, ...]:
        """Fields in which a neighbouring Row must agree: arch, dtypes, layout and epilogue."""
        return (self.arch, self.dtype_a, self.dtype_b, self.dtype_d, self.layout, self.epilogue)

    def __str__(self) -> str:
        return f"{self.problem.shape} {self.dtype} {self.layout} on {self.gpu} ({self.sm_count} SMs)"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSummary:
    """What remains of a CheckReport in a Row.

    Attributes:
        level, shape, schedules, model: how it was executed on the CPU; ``schedules`` counts the seeds.
        findings: kinds of fault found; empty means the kernel passed.
    """

    level: str
    shape: tuple[int, int, int] | None
    schedules: int
    model: str
    findings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    @classmethod
    def of(cls, report: CheckReport) -> CheckSummary:
        """Return the summary of ``report``."""
        return cls(
            level=report.level, shape=report.shape, schedules=len(report.seeds), model=report.model,
            findings=tuple(sorted({f.kind for f in report.findings})),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Finalist:
    """One Config of a race's last heat.

    Attributes:
        kernel_s: seconds per call, one entry per round; entry i of every finalist comes from the same interleaved round.
    """

    config: Config
    kernel_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RaceRecord:
    """How the Config of a measured Row was chosen.

    Attributes:
        finalists: the winner first, then by median time.
        tied: ids of the Configs, winner included, not separated from the fastest by more than ``margin``.
        margin: relative difference below which Configs count as equal.
        error_level: probability of having dropped the best, at most.
        flip_rate: share of resampled races in which another Config outside the tie set wins.
        regret: expected relative time lost against the best finalist, from the same resampling.
        entered, rounds: Configs that entered and interleaved rounds run, over all heats.
        ended: ``separated``, ``tied`` or ``budget``.
    """

    finalists: tuple[Finalist, ...]
    tied: tuple[str, ...]
    margin: float
    error_level: float
    flip_rate: float
    regret: float
    entered: int
    rounds: int
    ended: Literal["separated", "tied", "budget"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CublasLtRecord:
    """The fastest of cuBLASLt's own algorithms on a measured Row's question, timed in the rounds of the Row's Measurement.

    Attributes:
        tried: algorithms of the search that it came from.
        warm_s, cold_s: seconds per call; entry i is of the same interleaved round as entry i of Measurement.warm (or cold).
        relative_error: as in Measurement.
    """

    algorithm: Algorithm
    tried: int
    warm_s: tuple[float, ...]
    cold_s: tuple[float, ...] | None
    relative_error: dict[str, float]

    @property
    def time_s(self) -> float:
        """Seconds per call: the median warm sample."""
        return statistics.median(self.warm_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """What made a Row.

    Attributes:
        autogemm, tvm, torch: package versions; None where the package took no part.
        generator: content hash of the kernel generator.
        compiler: name and version of what compiled the kernel.
        driver: CUDA driver the measurement ran on, None for a prediction.
        date: ISO 8601, UTC.
    """

    autogemm: str
    generator: str
    compiler: str
    driver: str | None
    tvm: str | None
    torch: str | None
    date: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The tuned answer to one Key.

    Attributes:
        config: winning Config.
        evidence: a Measurement or a Prediction; its kind is the Row's status.
        provenance: what made it.
        check: verdict of the CPU execution, None if it was switched off.
        race: how a measured Config was chosen.
        cublaslt: how the best cuBLASLt algorithm did beside it; None where none was timed.
    """

    key: Key
    config: Config
    evidence: Measurement | Prediction
    provenance: Provenance
    check: CheckSummary | None = None
    race: RaceRecord | None = None
    cublaslt: CublasLtRecord | None = None

    def __post_init__(self) -> None:
        if isinstance(self.evidence, Measurement):
            slug = self.evidence.environment.slug
            _require_samples(self.evidence.warm)
            if self.evidence.cold is not None:
                _require_samples(self.evidence.cold)
            if self.cublaslt is not None:
                _require_beside(self.cublaslt, self.evidence)
        else:
            slug = self.evidence.gpu
            if not (math.isfinite(self.evidence.time_s) and self.evidence.time_s > 0):
                raise InputError(f"a predicted time must be positive, got {self.evidence.time_s}")
            if self.race is not None or self.cublaslt is not None:
                raise InputError("a predicted row can't hold a race or a cuBLASLt algorithm: nothing was timed")
        if slug != self.key.gpu:
            raise InputError(f"evidence is for {slug}, the key for {self.key.gpu}")

    @property
    def status(self) -> Status:
        """``measured`` or ``predicted``."""
        return "measured" if isinstance(self.evidence, Measurement) else "predicted"

    @property
    def measurement(self) -> Measurement | None:
        """The evidence if measured."""
        return self.evidence if isinstance(self.evidence, Measurement) else None

    @property
    def prediction(self) -> Prediction | None:
        """The evidence if predicted."""
        return self.evidence if isinstance(self.evidence, Prediction) else None

    @property
    def time_s(self) -> float:
        """Seconds per call of the kernel: the median warm sample, or the predicted time."""
        if isinstance(self.evidence, Prediction):
            return self.evidence.time_s
        return statistics.median(self.evidence.warm.kernel_s)

    def ratio_text(self, of: Choice = "autogemm") -> str:
        """Return ``ratio`` with its spread, for people; a dash where not measured."""
        ratio, spread = self.ratio(of), self.spread(of)
        return "-" if ratio is None or spread is None else f"{ratio:.3f} ± {spread:.3f}"

    def ratio(self, of: Choice = "autogemm", *, cold: bool = False) -> float | None:
        """Return the median paired baseline/kernel time ratio (above 1: faster than cuBLAS); None where not measured.

        Args:
            of: what to compare in place of the kernel.
        """
        ratios = self._ratios(of, cold)
        return statistics.median(ratios) if ratios else None

    def spread(self, of: Choice = "autogemm", *, cold: bool = False) -> float | None:
        """Return half the interquartile range of the paired ratios; None where not measured."""
        ratios = self._ratios(of, cold)
        if not ratios:
            return None
        if len(ratios) < 2:
            return 0.0
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return (high - low) / 2

    @property
    def choice(self) -> Choice:
        """What dispatch should run: the fastest of kernel, torch.matmul and cuBLASLt's algorithm.

        The algorithm only if it leads both by more than ALGORITHM_MARGIN; torch.matmul where the kernel was measured slower.
        """
        least = 1 + ALGORITHM_MARGIN
        ratio = self.ratio("cublaslt")
        if self.cublaslt is None or ratio is None or ratio <= least or not isinstance(self.evidence, Measurement):
            return self.fallback
        lead = [kernel / mine for kernel, mine in zip(self.evidence.warm.kernel_s, self.cublaslt.warm_s, strict=True)]
        return "cublaslt" if self.fallback == "cublas" or statistics.median(lead) > least else self.fallback

    @property
    def fallback(self) -> Choice:
        """What dispatch should run where cuBLASLt's algorithm can't: ``cublas`` if the kernel was measured slower than it."""
        ratio = self.ratio()
        return "cublas" if ratio is not None and ratio < 1 else "autogemm"

    def _ratios(self, of: Choice, cold: bool) -> list[float]:
        if not isinstance(self.evidence, Measurement):
            return []
        samples = self.evidence.cold if cold else self.evidence.warm
        if samples is None:
            return []
        times: tuple[float, ...] | None = {"autogemm": samples.kernel_s, "cublas": samples.baseline_s}.get(of)
        if of == "cublaslt" and self.cublaslt is not None:
            times = self.cublaslt.cold_s if cold else self.cublaslt.warm_s
        return [] if times is None else [b / t for t, b in zip(times, samples.baseline_s, strict=True)]

    def rounded(self) -> Row:
        """Return the Row with its samples at the precision that is stored."""
        changes: dict[str, Any] = {}
        if isinstance(self.evidence, Measurement):
            cold = self.evidence.cold
            changes["evidence"] = replace(
                self.evidence, warm=_rounded_samples(self.evidence.warm),
                cold=None if cold is None else _rounded_samples(cold),
            )  # fmt: skip
        if self.race is not None:
            finalists = tuple(replace(f, kernel_s=_rounded(f.kernel_s)) for f in self.race.finalists)
            changes["race"] = replace(self.race, finalists=finalists)
        if self.cublaslt is not None:
            cold_s = self.cublaslt.cold_s
            changes["cublaslt"] = replace(
                self.cublaslt, warm_s=_rounded(self.cublaslt.warm_s), cold_s=None if cold_s is None else _rounded(cold_s)
            )
        return replace(self, **changes) if changes else self

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict; ``choice`` and ``summary`` repeat what follows from the samples, for readers of diffs."""
        row = self.rounded()
        document: dict[str, Any] = {
            "schema": SCHEMA, "key": asdict(row.key), "config": row.config.to_knobs(), "status": row.status,
            "choice": row.choice,
        }  # fmt: skip
        if isinstance(row.evidence, Measurement):
            ratio, spread = row.ratio(), row.spread()
            assert ratio is not None and spread is not None
            document["summary"] = {
                "time_us": round(row.time_s * 1e6, 3), "ratio_to_cublas": round(ratio, 4), "spread": round(spread, 4),
            }  # fmt: skip
            if row.cublaslt is not None:
                library, spread = row.ratio("cublaslt"), row.spread("cublaslt")
                assert library is not None and spread is not None
                document["summary"] |= {
                    "cublaslt_us": round(row.cublaslt.time_s * 1e6, 3), "cublaslt_ratio_to_cublas": round(library, 4),
                    "cublaslt_spread": round(spread, 4),
                }  # fmt: skip
            document["measurement"] = row.evidence.to_json()
        else:
            document["summary"] = {"time_us": round(row.time_s * 1e6, 3)}
            document["prediction"] = row.evidence.to_json()
        document["check"] = None if row.check is None else asdict(row.check)
        document["race"] = None if row.race is None else _race_json(row.race)
        if row.cublaslt is not None:  # left out otherwise, so that rows without one are what they were
            document["cublaslt"] = asdict(row.cublaslt)
        document["provenance"] = asdict(row.provenance)
        return document

    @classmethod
    def from_json(cls, document: Any) -> Row:
        """Return the Row in ``document``.

        Raises:
            InputError: newer schema, unknown, missing or ill-typed field, or a choice its samples do not support.
        """
        if not isinstance(document, dict) or type(document.get("schema")) is not int or document["schema"] < 1:
            raise InputError("not a row: no schema number")
        if document["schema"] > SCHEMA:
            raise InputError(f"row schema {document['schema']} is newer than {SCHEMA}; upgrade autogemm")
        status = document.get("status")
        if status not in typing.get_args(Status):
            raise InputError(f"row status must be measured or predicted, got {status!r}")
        kind = "measurement" if status == "measured" else "prediction"
        known = {"schema", "key", "config", "status", "choice", "summary", kind, "check", "race", "provenance"}
        optional = {"cublaslt"} if status == "measured" else set()
        odd = sorted((set(document) - optional) ^ known)
        if odd:
            raise InputError(f"row of status {status} lacks or should not have: {', '.join(odd)}")
        check, race, cublaslt = document["check"], document["race"], document.get("cublaslt")
        row = cls(
            key=decode(Key, document["key"], "key"),
            config=decode(Config, document["config"], "config"),
            evidence=decode(Measurement, document[kind], kind)
            if status == "measured"
            else decode(Prediction, document[kind], kind),
            check=None if check is None else decode(CheckSummary, check, "check"),
            race=None if race is None else decode(RaceRecord, race, "race"),
            cublaslt=None if cublaslt is None else decode(CublasLtRecord, cublaslt, "cublaslt"),
            provenance=decode(Provenance, document["provenance"], "provenance"),
        )
        if document["choice"] != row.choice:
            raise InputError(
                f"row for {row.key} says choice {document['choice']!r}, its samples say {row.choice!r}; "
                "re-tune it, or delete the row to dispatch to cuBLAS"
            )
        return row

    def stale(
        self, *, generator: str | None = None, compiler: str | None = None, driver: str | None = None,
        cublaslt: int | None = None,
    ) -> tuple[str, ...]:  # fmt: skip
        """Return why the Row no longer describes what would be built or run now, as sentences; empty if it does.

        What is given as None is not compared; a prediction does not depend on the driver.

        Args:
            cublaslt: version of the cuBLASLt library; compared if the Row holds one of its algorithms.
        """
        was = self.provenance
        pairs: list[tuple[str, Any, Any]] = [("generator", was.generator, generator), ("compiler", was.compiler, compiler)]
        if self.cublaslt is not None:
            pairs.append(("cublaslt", self.cublaslt.algorithm.version, cublaslt))
        if was.driver is not None:
            pairs.append(("driver", was.driver, driver))
        return tuple(f"{name} was {old}, is {new}" for name, old, new in pairs if new is not None and new != old)


def _race_json(race: RaceRecord) -> dict[str, Any]:
    document = asdict(race)
    document["finalists"] = [{"config": f.config.to_knobs(), "kernel_s": f.kernel_s} for f in race.finalists]
    return document


def _require_samples(samples: Samples) -> None:
    if not samples.kernel_s or len(samples.kernel_s) != len(samples.baseline_s):
        raise InputError(
            f"paired samples need equal, positive counts, got {len(samples.kernel_s)} and {len(samples.baseline_s)}"
        )
    _require_times((*samples.kernel_s, *samples.baseline_s))


def _require_beside(record: CublasLtRecord, measurement: Measurement) -> None:
    """Refuse an algorithm's samples that are not of the Measurement's rounds, one for one."""
    for name, times, samples in (("warm", record.warm_s, measurement.warm), ("cold", record.cold_s, measurement.cold)):
        if times is None:
            continue
        if samples is None or len(times) != len(samples.baseline_s):
            count = 0 if samples is None else len(samples.baseline_s)
            raise InputError(f"cublaslt has {len(times)} {name} samples beside the kernel's {count}; rounds must be the same")
        _require_times(times)
    if not 1 <= record.tried <= MAX_TRIED:
        raise InputError(f"cublaslt.tried must be 1 to {MAX_TRIED}, got {str(record.tried)[:20]}")
    _require_errors(record.relative_error)


def _require_times(times: Iterable[float]) -> None:
    wrong = next((t for t in times if not LEAST_TIME_S <= t <= LONGEST_TIME_S), None)
    if wrong is not None:
        raise InputError(f"a measured time must be {LEAST_TIME_S:g} to {LONGEST_TIME_S:g} s, got {wrong!r}")


def _require_errors(errors: Mapping[str, float]) -> None:
    if "kernel" not in errors or not all(math.isfinite(e) and e >= 0 for e in errors.values()):
        raise InputError(f"relative_error must hold the kernel's, and none below 0, got {dict(errors)!r}")


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in values)


def _rounded_samples(samples: Samples) -> Samples:
    return replace(samples, kernel_s=_rounded(samples.kernel_s), baseline_s=_rounded(samples.baseline_s))
