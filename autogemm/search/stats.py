"""The statistics of a race: tests on paired log ratios, and what a repetition of the race would have chosen.

Everything is in plain Python, so that a host which only times kernels needs no scientific packages.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence


def slower_p(log_ratios: Sequence[float], *, noise_sd: float, noise_dof: float) -> float:
    """Return the p-value of "not slower" for paired log(candidate / leader), one entry per round.

    The smaller of two p-values, doubled (Bonferroni): a moderated paired t-test (Smyth, "Linear models and empirical Bayes
    methods", 2004: the variance is shrunk to a prior, so that one or two rounds can already tell 1.5x from 1x), and the
    exact signed-rank test (Wilcoxon, 1945), which a single disturbed round can't blind.

    Args:
        noise_sd: prior standard deviation of one paired log ratio.
        noise_dof: weight of the prior, in degrees of freedom.
    """
    return min(1.0, 2 * min(_moderated_t_p(log_ratios, noise_sd, noise_dof), signed_rank_p(log_ratios)))


def half_width(log_ratios: Sequence[float], alpha: float, *, noise_sd: float, noise_dof: float) -> float:
    """Return half the width of the two-sided 1-alpha interval of the mean log ratio, from the moderated t-test."""
    sd, dof = _moderated_sd(log_ratios, noise_sd, noise_dof)
    return student_quantile(alpha / 2, dof) * sd / math.sqrt(len(log_ratios))


def _moderated_sd(log_ratios: Sequence[float], noise_sd: float, noise_dof: float) -> tuple[float, float]:
    own_dof = len(log_ratios) - 1
    own = statistics.variance(log_ratios) if own_dof > 0 else 0.0
    dof = noise_dof + own_dof
    return math.sqrt((noise_dof * noise_sd**2 + own_dof * own) / dof), dof


def _moderated_t_p(log_ratios: Sequence[float], noise_sd: float, noise_dof: float) -> float:
    sd, dof = _moderated_sd(log_ratios, noise_sd, noise_dof)
    return student_tail(statistics.fmean(log_ratios) * math.sqrt(len(log_ratios)) / sd, dof)


def student_tail(t: float, dof: float) -> float:
    """Return P(T >= t) of Student's t with ``dof`` degrees of freedom (Abramowitz and Stegun, 26.5.27 and 26.7.1)."""
    half = _incomplete_beta(dof / (dof + t * t), dof / 2, 0.5) / 2
    return half if t >= 0 else 1 - half


def student_quantile(tail: float, dof: float) -> float:
    """Return t with P(T >= t) = ``tail`` for a tail below 0.5, by bisection."""
    low, high = 0.0, 1.0
    while student_tail(high, dof) > tail:
        low, high = high, high * 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, dof) > tail else (low, middle)
    return high


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b) (Abramowitz and Stegun, 26.5.8, by Lentz's recurrence)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only below the mean
        return 1 - _incomplete_beta(1 - x, b, a)
    front: float = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d)
            c = 1 + term / c
            fraction *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return float(front * fraction)


def signed_rank_p(values: Sequence[float]) -> float:
    """Return the one-sided exact p-value of "the median is not above 0" (Wilcoxon signed-rank; ties get mid-ranks)."""
    nonzero = sorted((v for v in values if v != 0), key=abs)
    # Ranks are doubled, so that mid-ranks stay integers.
    ranks: list[int] = []
    start = 0
    while start < len(nonzero):
        end = start
        while end < len(nonzero) and abs(nonzero[end]) == abs(nonzero[start]):
            end += 1
        ranks += [start + 1 + end] * (end - start)
        start = end
    observed = sum(rank for rank, value in zip(ranks, nonzero, strict=True) if value > 0)
    counts = [1]
    for rank in ranks:
        shifted = [0] * rank + counts
        counts = [a + b for a, b in zip(shifted, counts + [0] * rank, strict=True)]
    return float(sum(counts[observed:]) / 2 ** len(ranks))


def resampled(
    samples: Mapping[str, Sequence[float]], chosen: str, tied: Sequence[str], *, draws: int = 400
) -> tuple[float, float]:
    """Return (flip rate, regret) of choosing ``chosen``, from a bootstrap over the rounds that all entries share.

    The flip rate is the share of resampled races whose fastest entry is outside ``tied``; the regret is the mean of
    chosen/fastest - 1 over them, which noise makes too high rather than too low. The draws are seeded: same samples, same
    answer.
    """
    rounds = min(len(times) for times in samples.values())
    names = sorted(samples)
    logs = {name: [math.log(t) for t in samples[name][:rounds]] for name in names}
    # Differences to the round's mean, because the clock moves from round to round for all of them alike.
    means = [statistics.fmean(logs[name][r] for name in names) for r in range(rounds)]
    centred = {name: [logs[name][r] - means[r] for r in range(rounds)] for name in names}
    source = random.Random(0)
    flips, lost = 0, 0.0
    for _ in range(draws):
        picks = [source.randrange(rounds) for _ in range(rounds)]
        score = {name: statistics.median([centred[name][r] for r in picks]) for name in names}
        best = min(names, key=lambda name: score[name])
        flips += best not in tied
        lost += math.expm1(score[chosen] - score[best])
    return flips / draws, lost / draws
