"""Row: one tuned answer with the evidence for it. The unit that the database stores, the tuner writes and dispatch reads.

The JSON form is strict: an unknown, missing or ill-typed field is an error, so that nothing is ever half understood.
"""

from __future__ import annotations

import math
import re
import statistics
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal, TypeVar

from .arch import ARCH_NAMES, ArchName
from .config import Config
from .errors import InputError
from .problem import Epilogue, Layout, Problem
from .results import CheckReport, Measurement, Prediction, Samples

SCHEMA: Final = 1

Status = Literal["measured", "predicted"]
Choice = Literal["autogemm", "cublas"]

# Samples are kept to this many significant digits: 0.05 % at worst, below the resolution of a timing, a third of the text.
SIGNIFICANT_DIGITS: Final = 4

_SLUG: Final = re.compile(r"[a-z0-9][a-z0-9._-]*")
_T = TypeVar("_T")


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
    """

    key: Key
    config: Config
    evidence: Measurement | Prediction
    provenance: Provenance
    check: CheckSummary | None = None
    race: RaceRecord | None = None

    def __post_init__(self) -> None:
        if isinstance(self.evidence, Measurement):
            slug = self.evidence.environment.slug
            _require_samples(self.evidence.warm)
            if self.evidence.cold is not None:
                _require_samples(self.evidence.cold)
        else:
            slug = self.evidence.gpu
            if not (math.isfinite(self.evidence.time_s) and self.evidence.time_s > 0):
                raise InputError(f"a predicted time must be positive, got {self.evidence.time_s}")
            if self.race is not None:
                raise InputError("a predicted row can't hold a race: nothing was timed")
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
        """Seconds per call: the median warm sample, or the predicted time."""
        if isinstance(self.evidence, Prediction):
            return self.evidence.time_s
        return statistics.median(self.evidence.warm.kernel_s)

    def ratio(self, *, cold: bool = False) -> float | None:
        """Return the median paired baseline/kernel time ratio (above 1: faster than cuBLAS); None where not measured."""
        ratios = self._ratios(cold)
        return statistics.median(ratios) if ratios else None

    def spread(self, *, cold: bool = False) -> float | None:
        """Return half the interquartile range of the paired ratios; None where not measured."""
        ratios = self._ratios(cold)
        if not ratios:
            return None
        if len(ratios) < 2:
            return 0.0
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return (high - low) / 2

    @property
    def choice(self) -> Choice:
        """What dispatch should run: ``cublas`` where the kernel was measured slower than it."""
        ratio = self.ratio()
        return "cublas" if ratio is not None and ratio < 1 else "autogemm"

    def _ratios(self, cold: bool) -> list[float]:
        if not isinstance(self.evidence, Measurement):
            return []
        samples = self.evidence.cold if cold else self.evidence.warm
        return [] if samples is None else [b / k for k, b in zip(samples.kernel_s, samples.baseline_s, strict=True)]

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
            document["measurement"] = row.evidence.to_json()
        else:
            document["summary"] = {"time_us": round(row.time_s * 1e6, 3)}
            document["prediction"] = row.evidence.to_json()
        document["check"] = None if row.check is None else asdict(row.check)
        document["race"] = None if row.race is None else _race_json(row.race)
        document["provenance"] = asdict(row.provenance)
        return document

    @classmethod
    def from_json(cls, document: Any) -> Row:
        """Return the Row in ``document``.

        Raises:
            InputError: newer schema, unknown, missing or ill-typed field, or a choice its samples do not support.
        """
        if not isinstance(document, dict) or not isinstance(document.get("schema"), int):
            raise InputError("not a row: no schema number")
        if document["schema"] > SCHEMA:
            raise InputError(f"row schema {document['schema']} is newer than {SCHEMA}; upgrade autogemm")
        status = document.get("status")
        if status not in typing.get_args(Status):
            raise InputError(f"row status must be measured or predicted, got {status!r}")
        kind = "measurement" if status == "measured" else "prediction"
        known = {"schema", "key", "config", "status", "choice", "summary", kind, "check", "race", "provenance"}
        if set(document) != known:
            odd = sorted(set(document) ^ known)
            raise InputError(f"row of status {status} lacks or should not have: {', '.join(odd)}")
        check, race = document["check"], document["race"]
        row = cls(
            key=decode(Key, document["key"], "key"),
            config=decode(Config, document["config"], "config"),
            evidence=decode(Measurement, document[kind], kind)
            if status == "measured"
            else decode(Prediction, document[kind], kind),
            check=None if check is None else decode(CheckSummary, check, "check"),
            race=None if race is None else decode(RaceRecord, race, "race"),
            provenance=decode(Provenance, document["provenance"], "provenance"),
        )
        if document["choice"] != row.choice:
            raise InputError(
                f"row for {row.key} says choice {document['choice']!r}, its samples say {row.choice!r}; "
                "re-tune it, or delete the row to dispatch to cuBLAS"
            )
        return row

    def stale(self, *, generator: str | None = None, compiler: str | None = None, driver: str | None = None) -> tuple[str, ...]:
        """Return why the Row no longer describes what would be built or run now, as sentences; empty if it does.

        What is given as None is not compared; a prediction does not depend on the driver.
        """
        was = self.provenance
        pairs = [("generator", was.generator, generator), ("compiler", was.compiler, compiler)]
        if was.driver is not None:
            pairs.append(("driver", was.driver, driver))
        return tuple(f"{name} was {old}, is {new}" for name, old, new in pairs if new is not None and new != old)


def decode(cls: type[_T], document: Any, where: str) -> _T:
    """Return a dataclass (or Config) from its JSON form, strictly by its type hints.

    Raises:
        InputError: an unknown, missing or ill-typed field; the message names its path.
    """
    return typing.cast(_T, _decode(cls, document, where))


@lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(hint: Any, value: Any, where: str) -> Any:
    if hint is Config:
        if not isinstance(value, dict):
            raise InputError(f"{where} must be an object of knobs, got {value!r}")
        return Config.from_knobs(value)
    if is_dataclass(hint) and isinstance(hint, type):
        return _decode_dataclass(hint, value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _decode(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value not in args or isinstance(value, bool):
            raise InputError(f"{where} must be one of {', '.join(map(str, args))}, got {value!r}")
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(kinds) != len(value):
            raise InputError(f"{where} must have {len(kinds)} entries, got {len(value)}")
        return tuple(_decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))
    if origin is dict and isinstance(value, Mapping):
        return {str(name): _decode(args[1], item, f"{where}.{name}") for name, item in value.items()}
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise InputError(f"{where} must be finite, got {value!r}")
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise InputError(f"{where} has the wrong type: {str(value)[:60]!r}")


def _decode_dataclass(cls: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise InputError(f"{where} must be an object, got {str(value)[:60]!r}")
    hints = _hints(cls)
    required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    unknown, missing = sorted(set(value) - set(hints)), sorted(required - set(value))
    if unknown or missing:
        parts = [f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("has unknown", unknown)) if names]
        raise InputError(f"{where} {' and '.join(parts)}")
    return cls(**{name: _decode(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _race_json(race: RaceRecord) -> dict[str, Any]:
    document = asdict(race)
    document["finalists"] = [{"config": f.config.to_knobs(), "kernel_s": f.kernel_s} for f in race.finalists]
    return document


def _require_samples(samples: Samples) -> None:
    if not samples.kernel_s or len(samples.kernel_s) != len(samples.baseline_s):
        raise InputError(
            f"paired samples need equal, positive counts, got {len(samples.kernel_s)} and {len(samples.baseline_s)}"
        )
    if not all(math.isfinite(t) and t > 0 for t in (*samples.kernel_s, *samples.baseline_s)):
        raise InputError("a measured time must be positive and finite")


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in values)


def _rounded_samples(samples: Samples) -> Samples:
    return replace(samples, kernel_s=_rounded(samples.kernel_s), baseline_s=_rounded(samples.baseline_s))
