"""Racing: interleaved paired rounds that drop what is clearly slower, until the rest is separated or tied.

Sequential elimination as in Hoeffding races (Maron and Moore, 1993) and F-Race (Birattari et al., 2002), with paired tests on
log time ratios (see ``stats.slower_p``). The error level bounds the probability that the fastest candidate is dropped
anywhere in the race: each test runs at ``error_level / (candidates * looks)``, since the fastest can only be dropped by a
false positive against one of the others at one of the looks (Bonferroni), whatever the dependence between tests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..errors import NothingFound
from ..measure.timer import BASELINE, Timer
from .stats import half_width, resampled, slower_p

Ending = Literal["separated", "tied", "budget"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a race holds itself to.

    Attributes:
        error_level: probability of dropping the fastest candidate, at most.
        margin: relative time difference below which candidates count as equal.
        noise_sd, noise_dof: prior on the standard deviation of one paired log ratio, and its weight. Paired rounds on an H200
            under its power limit spread by 0.1 to 1 %; samples soon outweigh the prior.
        screening: rounds after which candidates are tested in the first heat.
        final: the same for the finalists.
        finalists: candidates that reach the final heat, at most.
    """

    error_level: float = 0.05
    margin: float = 0.003
    noise_sd: float = 0.01
    noise_dof: float = 4.0
    screening: tuple[int, ...] = (2, 4)
    final: tuple[int, ...] = (3, 5, 8, 12, 18, 27, 40)
    finalists: int = 8

    @property
    def looks(self) -> int:
        """Tests one candidate can meet in the whole race."""
        return len(self.screening) + len(self.final)


@dataclass(kw_only=True, slots=True)
class Heat:
    """Samples of one heat.

    Attributes:
        samples: seconds per call by candidate and round, ``baseline`` among them; a dropped candidate's list is shorter.
        survivors: candidates not dropped, fastest first.
        dropped: round at which each other candidate was dropped for being slower.
        failed: candidates that the timer stopped reporting.
        ended: why the heat ended.
    """

    samples: dict[str, list[float]] = field(default_factory=dict)
    survivors: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    ended: Ending = "budget"

    @property
    def rounds(self) -> int:
        """Interleaved rounds run."""
        return len(self.samples.get(BASELINE, ()))

    def ratio(self, name: str) -> float:
        """Return the median of candidate/baseline time over the candidate's rounds (below 1: faster than the baseline)."""
        return statistics.median(t / b for t, b in zip(self.samples[name], self.samples[BASELINE], strict=False))

    def value(self, name: str) -> float:
        """Return the ratio to the baseline by way of the leader: paired with the leader, whose own ratio has all the rounds.

        One disturbed baseline sample in the only round of a dropped candidate would otherwise make it look like the best.
        """
        leader = self.survivors[0]
        pairs = zip(self.samples[name], self.samples[leader], strict=False)
        return self.ratio(leader) * statistics.median(t / best for t, best in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Outcome of a final heat.

    Attributes:
        winner: the candidate that the preference order puts first among ``tied``.
        tied: candidates not separated from the fastest by more than the margin, the fastest first.
        flip_rate, regret: see ``stats.resampled``.
    """

    winner: str
    tied: tuple[str, ...]
    heat: Heat
    flip_rate: float
    regret: float


def run_heat(
    timer: Timer,
    candidates: Sequence[str],
    looks: Sequence[int],
    *,
    rules: Rules,
    entered: int,
    settle: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Heat:
    """Race ``candidates`` up to ``looks[-1]`` rounds, testing after each of ``looks``.

    Args:
        entered: candidates of the whole race, for the error level of each test.
        settle: end as soon as every survivor is tied with the fastest (the final heat).
        stop: asked before every round but the first; True ends the heat with what there is.

    Raises:
        NothingFound: no candidate is left that the timer can time.
    """  # fmt: skip
    heat = Heat(samples={name: [] for name in (BASELINE, *candidates)}, survivors=list(candidates))
    alpha = rules.error_level / max(1, entered * rules.looks)
    for rounds in looks:
        while heat.rounds < rounds:
            if heat.rounds and stop():
                heat.survivors = _by_speed(heat)
                return heat
            times = timer.round(tuple(heat.survivors))
            heat.failed += [name for name in heat.survivors if name not in times]
            heat.survivors = [name for name in heat.survivors if name in times]
            if not heat.survivors:
                raise NothingFound("every candidate of the race failed while it was timed")
            for name in (BASELINE, *heat.survivors):
                heat.samples[name].append(times[name])
        heat.survivors = _by_speed(heat)
        leader = heat.survivors[0]
        for name in heat.survivors[1:]:
            if _slower(heat, name, leader, rules) < alpha:
                heat.dropped[name] = rounds
        heat.survivors = [name for name in heat.survivors if name not in heat.dropped]
        if settle and all(_tied(heat, name, leader, rules) for name in heat.survivors[1:]):
            heat.ended = "tied" if len(heat.survivors) > 1 else "separated"
            return heat
    return heat


def run_final(
    timer: Timer, candidates: Sequence[str], *, rules: Rules, entered: int, stop: Callable[[], bool] = lambda: False
) -> Result:
    """Race the finalists, given in order of preference, on fresh samples until they are separated or tied.

    Fresh samples, because those that promoted a candidate flatter it. Among tied candidates the order of preference decides,
    not the last digit of noise, so that repetitions agree.
    """
    heat = run_heat(timer, candidates, rules.final, rules=rules, entered=entered, settle=True, stop=stop)
    leader = heat.survivors[0]
    if heat.ended == "budget":
        # Time ran out: what is slower than the margin on the evidence so far is no tie, separated or not.
        close = [n for n in heat.survivors if _mean(log_ratios(heat, n, leader)) <= rules.margin]
    else:
        close = list(heat.survivors)
    winner = min(close, key=candidates.index)
    raced = {name: heat.samples[name] for name in heat.survivors}
    flip_rate, regret = resampled(raced, winner, close)
    return Result(winner=winner, tied=tuple(close), heat=heat, flip_rate=flip_rate, regret=regret)


def log_ratios(heat: Heat, name: str, leader: str) -> list[float]:
    """Return log(candidate / leader) for the rounds that both ran in."""
    return [math.log(a / b) for a, b in zip(heat.samples[name], heat.samples[leader], strict=False)]


def _slower(heat: Heat, name: str, leader: str, rules: Rules) -> float:
    return slower_p(log_ratios(heat, name, leader), noise_sd=rules.noise_sd, noise_dof=rules.noise_dof)


def _tied(heat: Heat, name: str, leader: str, rules: Rules) -> bool:
    """Two one-sided tests (Schuirmann, 1987): the interval of the mean log ratio lies within the margin.

    At the error level, shared among the looks; the prior on the noise, made for one or two rounds, is left out. A wrong
    verdict costs no more than how far the pair is apart, which the tests above have failed to tell from nothing.
    """
    ratios = log_ratios(heat, name, leader)
    if len(ratios) < 3:
        return False
    width = half_width(ratios, 2 * rules.error_level / len(rules.final), noise_sd=0.0, noise_dof=0.0)
    return abs(_mean(ratios)) + width <= rules.margin


def _by_speed(heat: Heat) -> list[str]:
    score = {name: heat.ratio(name) for name in heat.survivors}
    return sorted(heat.survivors, key=lambda name: (score[name], name))


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)
