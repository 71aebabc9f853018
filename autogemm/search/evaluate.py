"""Evaluators: what a candidate is worth. ``model`` predicts; ``device`` times on a GPU and races the finalists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from ..arch import Gpu
from ..binary import Binary
from ..config import Config
from ..errors import InputError, NothingFound
from ..measure.admission import Admitted, Searched
from ..measure.faults import TrialFault
from ..measure.paired import Paired, complete, evidence
from ..measure.timer import BASELINE, CUBLASLT, Timer
from ..predict.closed_form import predict
from ..problem import Problem
from ..record import CheckSummary, CublasLtRecord, Finalist, RaceRecord
from ..results import Environment, Measurement, Outcome, Prediction
from .race import Rules, run_final, run_heat
from .trial import Trial

# Interleaved rounds with a flushed L2 that the winner gets for its Row; they decide nothing.
COLD_ROUNDS: Final = 9
# Rounds after which the winner and cuBLASLt's best algorithm are tested against each other.
PLAY_OFF: Final = (8, 12, 18, 27, 40)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A Config that may be tried.

    Attributes:
        binary: what runs it; launch-time knobs come from ``config``.
        check: verdict of the CPU execution, None if not checked.
    """

    config: Config
    binary: Binary
    check: CheckSummary | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The winner and its evidence."""

    candidate: Candidate
    evidence: Measurement | Prediction
    race: RaceRecord | None = None
    cublaslt: CublasLtRecord | None = None


class Evaluator(Protocol):
    """Tries candidates of one Problem and picks the best."""

    @property
    def kind(self) -> Literal["model", "device"]:
        """Whether the evidence is predicted or measured."""

    def screen(self, candidates: Sequence[Candidate], entered: int) -> list[Trial]:
        """Return one Trial per candidate, in order; ``entered`` candidates take part in the whole search."""

    def decide(self, candidates: Sequence[Candidate], *, entered: int, stop: Callable[[], bool]) -> Choice:
        """Return the best of the finalists, given in order of preference.

        Raises:
            NothingFound: none is usable.
        """

    def close(self) -> None:
        """Release what it holds."""


class ModelEvaluator:
    """Predicts with the closed-form model. Never says that it measured."""

    kind: Literal["model"] = "model"

    def __init__(self, problem: Problem, gpu: Gpu, sm_count: int | None = None) -> None:
        self._problem, self._gpu, self._sm_count = problem, gpu, sm_count

    def predict(self, config: Config) -> Prediction:
        """Return the prediction for one Config."""
        return predict(self._problem, config, self._gpu, sm_count=self._sm_count)

    def screen(self, candidates: Sequence[Candidate], entered: int) -> list[Trial]:
        """See Evaluator; a trial's value is the predicted time in seconds."""
        return [Trial(config=c.config, outcome=Outcome.OK, value=self.predict(c.config).time_s) for c in candidates]

    def decide(self, candidates: Sequence[Candidate], *, entered: int, stop: Callable[[], bool]) -> Choice:
        """See Evaluator."""
        if not candidates:
            raise NothingFound(f"no candidate for {self._problem} is usable")
        best = min(candidates, key=lambda c: self.predict(c.config).time_s)
        return Choice(candidate=best, evidence=self.predict(best.config))

    def close(self) -> None:
        """See Evaluator."""


class Bench(Timer, Protocol):
    """One Problem on one GPU, isolated from this process: kernels are admitted, then timed in rounds (measure.DeviceBench)."""

    def admit(self, name: str, binary: Binary, config: Config) -> Admitted:
        """Check a kernel for correctness and register it as ``name``."""

    def admit_cublaslt(self) -> Searched:
        """Search cuBLASLt's algorithms and register the fastest as CUBLASLT.

        Raises:
            InputError, TrialFault: there is none that could be used.
        """

    def cold_round(self, names: Sequence[str]) -> dict[str, float]:
        """Like ``round``, with the operands evicted from the L2 cache before every call."""

    def environment(self) -> Environment:
        """Return where the rounds so far were taken."""

    def close(self) -> None:
        """Free the GPU."""


class DeviceEvaluator:
    """Measures on a GPU. A trial's value is the median paired ratio of kernel to baseline time."""

    kind: Literal["device"] = "device"

    def __init__(
        self, bench: Bench, rules: Rules | None = None, *, owns_bench: bool = True, cublaslt: bool = False
    ) -> None:  # fmt: skip
        """Time on ``bench``, which ``close`` ends too unless it belongs to someone else.

        Args:
            cublaslt: let the winner meet the best of cuBLASLt's algorithms, where there are any.
        """
        self._bench, self.rules, self._owns_bench = bench, rules if rules is not None else Rules(), owns_bench
        self._cublaslt = cublaslt
        self._admitted: dict[str, Admitted] = {}
        self._leader: tuple[float, str] | None = None

    def screen(self, candidates: Sequence[Candidate], entered: int) -> list[Trial]:
        """See Evaluator. The candidates race each other and the best so far; the clearly slower get fewer rounds."""
        ready = [c.config.id for c in candidates if self._admit(c).outcome is Outcome.OK]
        if not ready:
            return [self._failed(c) for c in candidates]
        leader = None if self._leader is None or self._leader[1] in ready else self._leader[1]
        names = ready if leader is None else [*ready, leader]
        try:
            heat = run_heat(self._bench, names, self.rules.screening, rules=self.rules, entered=max(entered, len(names)))
        except NothingFound:
            return [self._failed(c) for c in candidates]
        if self._leader is not None and self._leader[1] in heat.dropped:
            self._leader = None  # beaten by one of these
        trials = []
        for candidate in candidates:
            name = candidate.config.id
            if name not in ready or name in heat.failed:
                trials.append(self._failed(candidate))
                continue
            value = heat.value(name)
            if name not in heat.dropped and (self._leader is None or value < self._leader[0]):
                self._leader = (value, name)
            pairs = tuple(zip(heat.samples[name], heat.samples[BASELINE], strict=False))
            detail = {"dropped_after": heat.dropped[name]} if name in heat.dropped else {}
            trials.append(Trial(config=candidate.config, outcome=Outcome.OK, value=value, samples=pairs, detail=detail))
        return trials

    def decide(self, candidates: Sequence[Candidate], *, entered: int, stop: Callable[[], bool]) -> Choice:
        """See Evaluator."""
        ready = {c.config.id: c for c in candidates if self._admit(c).outcome is Outcome.OK}
        if not ready:
            raise NothingFound("no candidate passed its correctness check on the GPU")
        result = run_final(self._bench, list(ready), rules=self.rules, entered=max(entered, len(ready)), stop=stop)
        winner, samples = result.winner, result.heat.samples
        order = sorted(result.heat.survivors + list(result.heat.dropped), key=lambda n: (n != winner, result.heat.ratio(n)))
        race = RaceRecord(
            finalists=tuple(Finalist(config=ready[name].config, kernel_s=tuple(samples[name])) for name in order),
            tied=result.tied, margin=self.rules.margin, error_level=self.rules.error_level, flip_rate=result.flip_rate,
            regret=result.regret, entered=entered, rounds=result.heat.rounds, ended=result.heat.ended,
        )  # fmt: skip
        rival = self._rival()
        warm = None if rival is None else self._play_off(winner, stop)
        if warm is None:  # no algorithm, or one that failed while it was timed
            rival, count = None, len(samples[winner])
            warm = {winner: samples[winner], BASELINE: samples[BASELINE][:count]}
        names = [winner] if rival is None else [winner, CUBLASLT]
        measurement, beside = evidence(
            winner, warm, complete([self._bench.cold_round(names) for _ in range(COLD_ROUNDS)], names), rival=rival,
            relative_error=self._admitted[winner].relative_error, environment=self._bench.environment(),
        )  # fmt: skip
        return Choice(candidate=ready[winner], evidence=measurement, race=race, cublaslt=beside)

    def _rival(self) -> Searched | None:
        """Return the best of cuBLASLt's algorithms, admitted; None where none is wanted, or none can be used."""
        try:
            return self._bench.admit_cublaslt() if self._cublaslt else None
        except (InputError, TrialFault):
            return None

    def _play_off(self, winner: str, stop: Callable[[], bool]) -> Paired | None:
        """Return samples of the winner, of cuBLASLt's algorithm and of the baseline from the same rounds; None if one failed.

        Fresh rounds: those that made it the winner flatter it, and those of its search the algorithm.
        """
        names = [winner, CUBLASLT]
        try:
            heat = run_heat(self._bench, names, PLAY_OFF, rules=self.rules, entered=2, settle=True, stop=stop)
        except NothingFound:
            return None
        return None if heat.failed else heat.samples

    def close(self) -> None:
        """See Evaluator."""
        if self._owns_bench:
            self._bench.close()

    def _admit(self, candidate: Candidate) -> Admitted:
        name = candidate.config.id
        if name not in self._admitted:
            self._admitted[name] = self._bench.admit(name, candidate.binary, candidate.config)
        return self._admitted[name]

    def _failed(self, candidate: Candidate) -> Trial:
        admitted = self._admitted[candidate.config.id]
        if admitted.outcome is Outcome.OK:
            return Trial(config=candidate.config, outcome=Outcome.LAUNCH_FAILED, reason="it failed while it was timed")
        return Trial(config=candidate.config, outcome=admitted.outcome, reason=admitted.reason)
