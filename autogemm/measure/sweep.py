"""Sweep: every candidate on every shape, all samples kept. The landscape that a search is judged by, and slow to repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ..binary import Binary
from ..config import Config
from ..errors import InputError
from ..problem import Problem
from ..results import Environment, Outcome
from .device_bench import DeviceBench
from .timer import BASELINE

SCHEMA: Final = 1
ROUNDS: Final = 3
# Samples are kept to 4 significant digits: a tenth of what a timing resolves, and half the text.
_DIGITS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Landscape:
    """One shape's samples.

    Attributes:
        samples_s: seconds per call by Config id, one entry per round; entry i of all, and of ``baseline_s``, is from one round.
        failed: outcome and reason by Config id.
    """

    problem: Problem
    environment: Environment
    baseline_s: tuple[float, ...]
    samples_s: dict[str, tuple[float, ...]]
    failed: dict[str, tuple[Outcome, str]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict; times in microseconds, rounded, since there are many."""
        return {
            "problem": asdict(self.problem), "environment": self.environment.to_json(), "baseline_us": _us(self.baseline_s),
            "samples_us": {name: _us(times) for name, times in self.samples_s.items()},
            "failed": {name: [outcome.value, reason] for name, (outcome, reason) in self.failed.items()},
        }  # fmt: skip

    @classmethod
    def from_json(cls, document: Any) -> Landscape:
        """Return the Landscape in ``document``.

        Raises:
            InputError: not a landscape.
        """
        try:
            environment = document["environment"]
            for name in ("sm_clock_hz", "power_w", "throttle_reasons"):
                environment = {**environment, name: None if environment[name] is None else tuple(environment[name])}
            return cls(
                problem=Problem(**document["problem"]), environment=Environment(**environment),
                baseline_s=_seconds(document["baseline_us"]),
                samples_s={name: _seconds(times) for name, times in document["samples_us"].items()},
                failed={name: (Outcome(kind), reason) for name, (kind, reason) in document["failed"].items()},
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"not a landscape: {error}") from error


def sweep(
    problems: Iterable[Problem], candidates: Sequence[tuple[Binary, Config]], *, device: int = 0, rounds: int = ROUNDS,
    cold: bool = False, progress: Callable[[Problem, int], None] = lambda problem, done: None, bench: DeviceBench | None = None,
) -> Iterator[Landscape]:  # fmt: skip
    """Time every candidate on every problem, in an isolated worker; yield each shape as soon as it is done.

    Args:
        candidates: Binaries with the Config, launch-time knobs included, that each runs with.
        progress: told how many candidates of a problem were admitted.
        bench: one to use; by default one is opened on ``device`` and closed at the end.

    Raises:
        InputError: two candidates have the same Config, or a problem can't be taken.
    """
    names = [config.id for _, config in candidates]
    if len(set(names)) < len(names):
        raise InputError("two candidates of a sweep have the same config; give each once")
    used = bench
    try:
        for problem in problems:
            if used is None:
                used = DeviceBench(problem, device=device)
            else:
                used.open(problem)
            yield _landscape(problem, candidates, used, rounds, cold, progress)
    finally:
        if used is not None and bench is None:
            used.close()


def _landscape(
    problem: Problem, candidates: Sequence[tuple[Binary, Config]], bench: DeviceBench, rounds: int, cold: bool,
    progress: Callable[[Problem, int], None],
) -> Landscape:  # fmt: skip
    failed: dict[str, tuple[Outcome, str]] = {}
    names = []
    for done, (binary, config) in enumerate(candidates, 1):
        admitted = bench.admit(config.id, binary, config)
        if admitted.outcome is Outcome.OK:
            names.append(config.id)
        else:
            failed[config.id] = (admitted.outcome, admitted.reason)
        progress(problem, done)
    taken = [bench.cold_round(names) if cold else bench.round(names) for _ in range(rounds)]
    failed |= {name: (fault.outcome, fault.detail) for name, fault in bench.failures.items()}
    whole = [name for name in names if name not in failed]
    return Landscape(
        problem=problem, environment=bench.environment(), baseline_s=tuple(r[BASELINE] for r in taken),
        samples_s={name: tuple(r[name] for r in taken) for name in whole}, failed=failed,
    )  # fmt: skip


def _us(times_s: Iterable[float]) -> list[float]:
    return [float(f"{t * 1e6:.{_DIGITS}g}") for t in times_s]


def _seconds(times_us: Iterable[float]) -> tuple[float, ...]:
    return tuple(float(t) * 1e-6 for t in times_us)
