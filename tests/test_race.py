"""A race finds the fastest under noise, says when it can't tell, and keeps its stated error level."""

from __future__ import annotations

import math
import random

import pytest

from autogemm.errors import NothingFound
from autogemm.measure.timer import BASELINE, ScriptedTimer
from autogemm.search.race import Rules, run_final, run_heat
from autogemm.search.stats import half_width, resampled, signed_rank_p, slower_p, student_quantile, student_tail

RULES = Rules()


def throttle(index: int) -> float:
    """A clock that falls by a third and recovers, as an H200 under its power limit does."""
    return 1 + 0.35 * abs(math.sin(index / 7))


def test_student_and_signed_rank_agree_with_published_tables() -> None:
    # Abramowitz and Stegun, table 26.10; Wilcoxon (1945): n = 5, all positive is 1/32.
    assert student_tail(2.228, 10) == pytest.approx(0.025, abs=1e-5)
    assert student_tail(6.314, 1) == pytest.approx(0.05, abs=1e-5)
    assert student_tail(-1.812, 10) == pytest.approx(0.95, abs=1e-4)
    assert student_quantile(0.005, 4) == pytest.approx(4.604, abs=1e-3)
    assert signed_rank_p([1, 2, 3, 4, 5]) == 1 / 32
    assert signed_rank_p([-1, 2, 3, 4, 5]) == 2 / 32
    assert signed_rank_p([1, 1, -1, 2, 2, 3]) == 4 / 64  # mid-ranks 2, 2, 2, 4.5, 4.5, 6
    assert signed_rank_p([0.0, 0.0]) == 1.0


def test_the_test_holds_its_level_and_has_power() -> None:
    source = random.Random(5)
    level, rounds, repeats = 0.05, 8, 2000

    def rejected(shift: float) -> float:
        draws = ([source.gauss(shift, 0.005) for _ in range(rounds)] for _ in range(repeats))
        return sum(slower_p(d, noise_sd=RULES.noise_sd, noise_dof=RULES.noise_dof) < level for d in draws) / repeats

    assert rejected(0.0) <= level * 1.2
    assert rejected(0.01) > 0.95


def test_one_disturbed_round_does_not_blind_the_test() -> None:
    disturbed = [0.01 + 0.0005 * math.sin(i) for i in range(20)]
    disturbed[3] = -0.7
    assert slower_p(disturbed, noise_sd=0.01, noise_dof=4) < 1e-3


def test_intervals_narrow_with_rounds() -> None:
    widths = [half_width([0.001, -0.001] * n, 0.05, noise_sd=0.01, noise_dof=4) for n in (2, 8, 32)]
    assert widths[0] > 2 * widths[1] > 3 * widths[2]


def test_the_clearly_slower_get_few_rounds() -> None:
    times = {BASELINE: 1e-4, **{f"c{i}": 1e-4 * (1 + 0.05 * i) for i in range(40)}}
    timer = ScriptedTimer(times, noise=0.003, drift=throttle)
    heat = run_heat(timer, [n for n in times if n != BASELINE], RULES.screening, rules=RULES, entered=40)
    assert "c0" in heat.survivors and len(heat.survivors) <= 4
    assert timer.samples < 2 * 41 + 10  # after one round only the close ones go on


@pytest.mark.parametrize("noise", [0.001, 0.005, 0.01])
def test_the_best_survives_and_the_ratio_is_right_under_throttling(noise: float) -> None:
    times = {BASELINE: 1.04e-4, "best": 1e-4, "near": 1.02e-4, "far": 1.2e-4}
    for seed in range(10):
        timer = ScriptedTimer(times, noise=noise, outliers=0.02, seed=seed, drift=throttle)
        result = run_final(timer, ["far", "near", "best"], rules=RULES, entered=50)
        assert result.winner == "best"
        assert result.heat.ratio("best") == pytest.approx(1 / 1.04, rel=2 * noise)


def test_the_error_level_bounds_how_often_the_best_is_dropped() -> None:
    # Twenty candidates 0.4 % apart: at a level of 0.05, the best of 100 noisy races may be lost in about 5.
    times = {BASELINE: 1e-4, **{f"c{i:02}": 1e-4 * (1 + 0.004 * i) for i in range(20)}}
    names = [name for name in times if name != BASELINE]
    lost = 0
    for seed in range(100):
        timer = ScriptedTimer(times, noise=0.007, seed=seed, drift=throttle)
        heat = run_heat(timer, names, (1, 2, 3, 5, 8, 12), rules=RULES, entered=20)
        lost += "c00" in heat.dropped
    assert lost <= 5


def test_equal_candidates_are_declared_tied_and_the_preferred_one_wins_every_time() -> None:
    times = {BASELINE: 1e-4, "a": 1e-4, "b": 1.0003e-4, "c": 1e-4, "slow": 1.05e-4}
    winners = set()
    for seed in range(10):
        timer = ScriptedTimer(times, noise=0.002, seed=seed, drift=throttle)
        result = run_final(timer, ["b", "a", "c", "slow"], rules=RULES, entered=20)
        assert result.heat.ended == "tied" and set(result.tied) == {"a", "b", "c"}
        winners.add(result.winner)
        assert result.regret < RULES.margin and result.flip_rate == 0.0
    assert winners == {"b"}


def test_a_clear_winner_ends_the_race_early() -> None:
    timer = ScriptedTimer({BASELINE: 1e-4, "a": 1e-4, "b": 1.3e-4}, noise=0.002)
    result = run_final(timer, ["b", "a"], rules=RULES, entered=10)
    assert (result.winner, result.tied, result.heat.ended) == ("a", ("a",), "separated")
    assert timer.rounds == RULES.final[0]


def test_a_spent_budget_ends_the_race_with_the_best_so_far() -> None:
    timer = ScriptedTimer({BASELINE: 1e-4, "a": 1e-4, "b": 1.004e-4}, noise=0.02)
    result = run_final(timer, ["a", "b"], rules=RULES, entered=10, stop=lambda: timer.rounds >= 4)
    assert result.heat.ended == "budget" and timer.rounds == 4
    assert 0 <= result.flip_rate <= 1 and result.regret >= 0


def test_a_candidate_that_fails_while_timed_is_out_and_the_others_go_on() -> None:
    class Failing(ScriptedTimer):
        def round(self, names):  # type: ignore[no-untyped-def]
            times = super().round(names)
            if self.rounds >= 2:
                times.pop("a", None)
            return times

    timer = Failing({BASELINE: 1e-4, "a": 0.9e-4, "b": 1e-4})
    heat = run_heat(timer, ["a", "b"], (3,), rules=RULES, entered=2)
    assert heat.failed == ["a"] and heat.survivors == ["b"]
    with pytest.raises(NothingFound, match="every candidate"):
        run_heat(Failing({BASELINE: 1e-4, "a": 1e-4}), ["a"], (3,), rules=RULES, entered=1)


def test_a_disturbed_baseline_does_not_make_a_dropped_candidate_look_best() -> None:
    class Disturbed(ScriptedTimer):
        def round(self, names):  # type: ignore[no-untyped-def]
            times = super().round(names)
            return {**times, BASELINE: times[BASELINE] * (2 if self.rounds == 1 else 1)}

    heat = run_heat(Disturbed({BASELINE: 1e-4, "a": 1e-4, "b": 1.5e-4}), ["a", "b"], (1, 2, 3), rules=RULES, entered=2)
    assert heat.dropped == {"b": 1} and heat.ratio("b") == pytest.approx(0.75)
    assert heat.value("a") == pytest.approx(1.0) and heat.value("b") == pytest.approx(1.5)


def test_resampling_shows_a_coin_toss_and_a_sure_thing() -> None:
    source = random.Random(2)
    noisy = {name: [1 + source.gauss(0, 0.02) for _ in range(12)] for name in "ab"}
    sure = {"a": [1 + source.gauss(0, 0.001) for _ in range(12)], "b": [1.1 + source.gauss(0, 0.001) for _ in range(12)]}
    flips, regret = resampled(noisy, "a", ["a"])
    assert 0.02 < flips < 0.98 and regret > 0.001
    assert resampled(sure, "a", ["a"]) == (0.0, 0.0)
    assert resampled(sure, "b", ["b"])[1] == pytest.approx(0.1, abs=0.005)
    assert resampled(noisy, "a", ["a"]) == (flips, regret)
