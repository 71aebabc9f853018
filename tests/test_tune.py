"""Tuning as a whole, on recorded H200 times: what it chooses, what it repeats, what it writes and what it refuses."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import landscape
import pytest
from cublaslt_fakes import algorithm_of
from search_fakes import H200, PROBLEM, FakeBench, fake_binary, space_of, write_candidates

from autogemm.arch import gpu
from autogemm.config import Config
from autogemm.database import Database
from autogemm.errors import DatabaseError, IllegalConfig, InputError, NothingFound
from autogemm.measure.timer import CUBLASLT
from autogemm.problem import Problem
from autogemm.results import Outcome
from autogemm.search.candidates import entrants, ranked
from autogemm.search.progress import Budget, Done, Event, Note, Planned, Rejected, Tried
from autogemm.search.storage import read_trials
from autogemm.search.tune import Options, Tuner

CONFIGS, SHAPES = landscape.load()
BASELINE_S = 1e-4


@pytest.fixture(scope="session")
def candidates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The landscape's Configs as a folder of compiled, checked kernels."""
    return write_candidates(tmp_path_factory.mktemp("candidates"), CONFIGS)


class Run:
    """One tuning with a scripted bench, and everything it reported."""

    def __init__(
        self, folder: Path, candidates: Path, times: dict[Config, float], *, problem: Problem = PROBLEM,
        budget: Budget | None = None, fresh: bool = False, configs: Sequence[Config] = CONFIGS, seed: int = 0, **bench: Any,
    ) -> None:  # fmt: skip
        self.events: list[Event] = []
        self.bench = FakeBench(times, bench.pop("baseline_s", BASELINE_S), seed=seed, **bench)
        self.database = Database(folder)
        options = Options(space=space_of(configs), candidates=candidates, fresh=fresh)
        with Tuner(H200, evaluator="device", db=self.database, options=options, bench=lambda problem: self.bench) as tuner:
            self.row = tuner.tune(problem, budget, self.events.append)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture(autouse=True)
def own_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOGEMM_CACHE", str(tmp_path / "cache"))


def entrants_of(problem: Problem, configs: Sequence[Config] = CONFIGS) -> list[Config]:
    """Return the Configs that the model lets into the search."""
    return entrants(problem, ranked(problem, configs, gpu("nvidia-h200")), gpu("nvidia-h200"))


def times_of(index: int) -> tuple[Problem, dict[Config, float]]:
    problem, seconds = SHAPES[index]
    return problem, dict(zip(CONFIGS, seconds, strict=True))


def test_a_measured_row_holds_the_winner_its_samples_and_how_it_won(tmp_path: Path, candidates: Path) -> None:
    problem, times = times_of(2)
    best = min(times.values())
    run = Run(tmp_path / "db", candidates, times, problem=problem, baseline_s=1.05 * best)
    row = run.database.lookup(run.row.key)
    assert row == run.row and row.status == "measured" and row.choice == "autogemm"
    assert times[row.config] <= 1.01 * best
    assert row.ratio() == pytest.approx(1.05 * best / times[row.config], rel=0.01)
    assert row.race is not None and row.config.id in row.race.tied and row.race.entered == len(entrants_of(problem))
    assert row.race.finalists[0].config == row.config and row.race.finalists[0].kernel_s == row.evidence.warm.kernel_s
    assert row.check is not None and row.check.passed
    assert (row.provenance.generator, row.provenance.compiler, row.provenance.driver) == ("gen-1", "fake 1", "580.1")
    assert run.of(Planned)[0].candidates == len(entrants_of(problem)) and isinstance(run.events[-1], Done)
    assert run.bench.closed


def test_a_kernel_slower_than_cublas_becomes_a_row_that_chooses_cublas(tmp_path: Path, candidates: Path) -> None:
    problem, times = times_of(0)
    run = Run(tmp_path / "db", candidates, times, problem=problem, baseline_s=0.9 * min(times.values()))
    assert run.row.choice == "cublas" and run.row.ratio() == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(
    ("baseline", "cublaslt", "choice"),
    [(1.05, 0.95, "cublaslt"), (1.05, 1.0, "autogemm"), (1.05, 1.02, "autogemm"), (0.97, 0.9, "cublaslt"),
     (0.97, 0.97, "cublas"), (0.97, 0.985, "cublas")],
)  # fmt: skip
def test_the_row_names_the_algorithm_only_where_it_is_fastest(
    tmp_path: Path, candidates: Path, baseline: float, cublaslt: float, choice: str
) -> None:
    problem, times = times_of(2)
    best = min(times.values())
    for seed in range(4):
        run = Run(
            tmp_path / f"db{seed}", candidates, times, problem=problem, baseline_s=baseline * best, cublaslt_s=cublaslt * best,
            seed=seed, fresh=True, noise=0.002,
        )  # fmt: skip
        row = run.database.lookup(run.row.key)
        assert row == run.row and row.choice == choice and row.cublaslt is not None and row.measurement is not None
        assert row.cublaslt.algorithm == algorithm_of() and row.cublaslt.tried == 8
        # Our best kernel and the algorithm stand side by side, each against torch.matmul in the same rounds.
        assert times[row.config] <= 1.01 * best and len(row.cublaslt.warm_s) == len(row.measurement.warm.kernel_s) >= 8
        assert row.ratio() == pytest.approx(baseline * best / times[row.config], rel=0.006)
        assert row.ratio("cublaslt") == pytest.approx(baseline / cublaslt, rel=0.006)
        assert row.cublaslt.cold_s is not None and row.measurement.cold is not None
        assert {finalist.config for finalist in row.race.finalists} <= set(CONFIGS) if row.race else False


def test_an_algorithm_that_fails_while_it_is_timed_leaves_the_row_as_without_one(tmp_path: Path, candidates: Path) -> None:
    problem, times = times_of(2)

    class Failing(FakeBench):
        def round(self, names: Sequence[str]) -> dict[str, float]:
            return {name: t for name, t in super().round(names).items() if name != CUBLASLT}

    bench = Failing(times, BASELINE_S, cublaslt_s=1e-6)
    options = Options(space=space_of(CONFIGS), candidates=candidates)
    with Tuner(H200, evaluator="device", db=Database(tmp_path / "db"), options=options, bench=lambda p: bench) as tuner:
        row = tuner.tune(problem)
    assert row.cublaslt is None and CUBLASLT in bench.admitted
    assert row.race is not None and row.race.finalists[0].kernel_s == row.evidence.warm.kernel_s


def test_algorithms_are_left_out_where_they_are_not_wanted_or_keep_to_no_budget(tmp_path: Path, candidates: Path) -> None:
    problem, times = times_of(2)
    for name, options, sm_count in (("off", {"cublaslt": False}, None), ("budget", {}, 100)):
        bench = FakeBench(times, BASELINE_S, cublaslt_s=1e-6)
        chosen = Options(space=space_of(CONFIGS), candidates=candidates, **options)
        with Tuner(
            H200,
            evaluator="device",
            db=Database(tmp_path / name),
            options=chosen,
            bench=lambda p, b=bench: b,
            sm_count=sm_count,
        ) as tuner:
            assert tuner.tune(problem).cublaslt is None
        assert CUBLASLT not in bench.admitted


def test_a_row_of_another_cublaslt_is_tuned_again(tmp_path: Path, candidates: Path) -> None:
    problem, times = times_of(2)
    first = Run(tmp_path / "db", candidates, times, problem=problem, cublaslt_s=1e-6)
    options = Options(space=space_of(CONFIGS), candidates=candidates)
    for version, again in ((130100, False), (130200, True)):
        bench, events = FakeBench(times, BASELINE_S, cublaslt_s=1e-6), []
        device = replace(H200, cublaslt=version)
        with Tuner(device, evaluator="device", db=first.database, options=options, bench=lambda p, b=bench: b) as tuner:
            tuner.tune(problem, None, events.append)
        assert events[-1].reused is not again
        assert any("cublaslt was 130100, is 130200" in e.text for e in events if isinstance(e, Note)) is again


def test_ten_seeds_choose_configs_within_one_percent(tmp_path: Path, candidates: Path) -> None:
    problem, times = times_of(2)
    chosen = []
    for seed in range(10):
        run = Run(tmp_path / f"db{seed}", candidates, times, problem=problem, seed=seed, fresh=True, baseline_s=2e-4)
        chosen.append(times[run.row.config])
    assert max(chosen) <= 1.01 * min(chosen)
    assert max(chosen) <= 1.02 * min(times.values())


def test_over_the_recorded_shapes_the_choice_is_within_two_percent_at_a_fraction_of_the_work(
    tmp_path: Path, candidates: Path
) -> None:
    regrets, shares = [], []
    for index, (problem, seconds) in enumerate(SHAPES):
        _, times = times_of(index)
        run = Run(tmp_path / "db", candidates, times, problem=problem, baseline_s=statistics.median(seconds), seed=index)
        regrets.append(times[run.row.config] / min(seconds) - 1)
        # Exhaustive: every Config gets the rounds of a full final.
        shares.append(run.bench.samples / (len(CONFIGS) * 40))
    assert sum(regret <= 0.02 for regret in regrets) >= 0.95 * len(regrets)
    assert statistics.mean(shares) <= 0.15


def test_bad_candidates_cost_one_trial_each_and_never_win(tmp_path: Path, candidates: Path) -> None:
    problem, times = times_of(2)
    order = sorted(CONFIGS, key=lambda config: times[config])
    outcomes = (Outcome.INCORRECT, Outcome.TIMEOUT, Outcome.ILLEGAL_ACCESS, Outcome.ABORT)
    bad = dict(zip(order, outcomes, strict=False))
    run = Run(tmp_path / "db", candidates, times, problem=problem, bad=bad)
    assert run.row.config == order[4] or times[run.row.config] <= 1.01 * times[order[4]]
    assert [e.stage for e in run.of(Rejected)] == ["device"] * 4
    assert len(run.bench.admitted) == len(entrants_of(problem))


def test_a_candidate_that_failed_the_cpu_check_is_never_run(tmp_path: Path) -> None:
    problem, times = times_of(2)
    some = sorted(CONFIGS, key=lambda config: times[config])[:6]
    for i, config in enumerate(some):
        fake_binary(config, passed=i != 0).write(tmp_path / "candidates")
    run = Run(tmp_path / "db", tmp_path / "candidates", times, problem=problem, configs=some)
    assert some[0].id not in run.bench.admitted and run.row.config != some[0]
    assert [e.reason for e in run.of(Rejected)] == ["two roles write one tile"]


def test_launch_time_variants_of_the_best_are_tried_without_new_kernels(tmp_path: Path, candidates: Path) -> None:
    problem, times = times_of(2)
    best = min(CONFIGS, key=lambda config: times[config])
    variants = [best.with_knob("l2_group_size", group) for group in (2, 4, 16)]
    times[variants[1]] = 0.95 * times[best]
    times.update(dict.fromkeys((variants[0], variants[2]), times[best]))
    run = Run(tmp_path / "db", candidates, times, problem=problem, configs=[*CONFIGS, *variants])
    assert run.row.config == variants[1]


def test_a_valid_row_is_not_tuned_again_and_a_stale_one_is(tmp_path: Path, candidates: Path) -> None:
    problem, times = times_of(2)
    first = Run(tmp_path / "db", candidates, times, problem=problem)
    again = Run(tmp_path / "db", candidates, times, problem=problem)
    assert again.bench.admitted == [] and again.of(Done)[0].reused and again.row == first.row
    other_driver = Run.__new__(Run)
    other_driver.events, other_driver.bench = [], FakeBench(times, BASELINE_S)
    device = type(H200)(arch="sm_90a", gpu="nvidia-h200", sm_count=132, driver="999.9")
    options = Options(space=space_of(CONFIGS), candidates=candidates)
    with Tuner(device, evaluator="device", db=first.database, options=options, bench=lambda p: other_driver.bench) as tuner:
        tuner.tune(problem, None, other_driver.events.append)
    assert "driver was 580.1, is 999.9" in other_driver.of(Note)[0].text
    assert len(other_driver.bench.admitted) == len(entrants_of(problem))


def test_what_another_model_predicted_is_not_taken_for_the_present_ones(
    tmp_path: Path, candidates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finished_before() -> int:
        events: list[Event] = []
        options = Options(space=space_of(CONFIGS[:20]), candidates=candidates)
        with Tuner(H200, evaluator="model", db=Database(tmp_path / "db"), options=options) as tuner:
            tuner.tune(PROBLEM, None, events.append)
        return int(next(event for event in events if isinstance(event, Planned)).finished)

    assert finished_before() == 0
    assert finished_before() > 0
    monkeypatch.setattr("autogemm.search.tune.model_hash", lambda: "as if a constant had changed")
    assert finished_before() == 0


def test_a_new_knob_value_times_only_what_is_new(tmp_path: Path, candidates: Path) -> None:
    problem, times = times_of(2)
    some = write_candidates(tmp_path / "some", CONFIGS[:40])
    Run(tmp_path / "db", some, times, problem=problem, configs=CONFIGS[:40])
    more = Run(tmp_path / "db", candidates, times, problem=problem)
    before = set(entrants_of(problem, CONFIGS[:40]))
    assert more.of(Planned)[0].finished == len(before)
    assert {e.trial.config for e in more.of(Tried)} == set(entrants_of(problem)) - before


def test_what_won_on_a_near_shape_takes_part_whatever_the_model_says(tmp_path: Path, candidates: Path) -> None:
    problem, times = times_of(2)
    first = Run(tmp_path / "db", candidates, times, problem=problem)
    outsider = next(config for config in CONFIGS if config not in entrants_of(problem))
    proven = replace(first.row, key=replace(first.row.key, m=problem.m + 8), config=outsider)
    Database(tmp_path / "near").put(proven)
    times[outsider] = 0.9 * min(times.values())
    run = Run(tmp_path / "near", candidates, times, problem=problem, fresh=True)
    assert run.row.config == outsider


@pytest.mark.parametrize(
    ("budget", "most"),
    [
        (Budget(trials=10), 10),
        (Budget(target=0.5), 16),
        (Budget(until_stable=True), 40),
        (Budget(seconds=1e-6), 0),
    ],
    ids=["trials", "target", "stable", "seconds"],
)
def test_a_budget_ends_the_search(tmp_path: Path, candidates: Path, budget: Budget, most: int) -> None:
    problem, times = times_of(2)
    if most == 0:
        with pytest.raises(NothingFound, match="allow more seconds"):
            Run(tmp_path / "db", candidates, times, problem=problem, budget=budget)
        return
    run = Run(tmp_path / "db", candidates, times, problem=problem, budget=budget)
    assert 0 < len(run.of(Tried)) <= most
    assert any("the search ends" in note.text for note in run.of(Note)) or budget.trials is not None


@pytest.mark.slow
def test_fifty_random_kills_repeat_nothing_lose_nothing_and_tear_nothing(
    tmp_path: Path, candidates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, kills, length_s = random.Random(3), 0, 0.0
    for index in range(10 * len(SHAPES)):
        folder = tmp_path / str(index)
        monkeypatch.setenv("AUTOGEMM_CACHE", str(folder / "cache"))
        problem, times = times_of(index % len(SHAPES))
        database, log, whole = Database(folder / "db"), folder / "told", False
        folder.mkdir()
        while not whole:
            began = time.monotonic()
            pid = os.fork()  # a child with everything imported, so that a kill lands inside the search
            if pid == 0:
                _tune_and_log(folder / "db", candidates, problem, times, log)
            if index > 0 and source.random() < 0.9:
                time.sleep(source.random() * length_s)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status in (0, -signal.SIGKILL)
            kills, whole = kills + (status != 0), status == 0
            length_s = length_s or time.monotonic() - began  # of the first, which nobody disturbs
            database.rows()  # parses at every moment
        told = log.read_text().split()
        assert len(told) == len(set(told)), "a finished trial was repeated"
        ((_, trials),) = read_trials(folder / "cache" / "studies")
        ids = [trial.config.id for trial in trials]
        assert len(ids) == len(set(ids)) and {c.id for c in entrants_of(problem)} <= set(ids)
        assert [row.key.problem for row in database.rows()] == [problem]
        if kills >= 50:
            break
    assert kills >= 50


def _tune_and_log(folder: Path, candidates: Path, problem: Problem, times: dict[Config, float], log: Path) -> None:
    """Tune in a forked child, writing each finished trial's id to ``log``; never returns."""
    status = 1
    try:
        with log.open("a") as out:

            def told(event: Event) -> None:
                if isinstance(event, Tried):
                    out.write(event.trial.config.id + "\n")
                    out.flush()

            options = Options(space=space_of(CONFIGS), candidates=candidates)
            bench = FakeBench(times, BASELINE_S, pause_s=0.004)
            with Tuner(H200, evaluator="device", db=Database(folder), options=options, bench=lambda p: bench) as tuner:
                tuner.tune(problem, None, told)
        status = 0
    finally:
        os._exit(status)


@pytest.mark.parametrize(
    "options", [{"seed": -1}, {"seed": "a"}, {"seed": 2**32}, {"sampler": "magic"}, {"workers": 0}, {"workers": "a"}]
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        Tuner(H200, db=Database(tmp_path / "db"), options=Options(**options))
    assert not (tmp_path / "db").exists()


@pytest.mark.parametrize("named", [{"sm_count": 0}, {"sm_count": 133}, {"sm_count": 1.5}, {"evaluator": "oracle"}])
def test_a_tuner_says_what_it_cannot_do(named: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=next(iter(named))):
        Tuner(H200, db=Database(tmp_path / "db"), **named)


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path, candidates: Path) -> None:
    _, times = times_of(2)
    with pytest.raises(IllegalConfig, match="pad K to 4104"):
        Run(tmp_path / "db", candidates, times, problem=Problem(m=4096, n=4096, k=4097))
    with pytest.raises(InputError, match="no compiled kernels"):
        Run(tmp_path / "db", tmp_path / "nothing", times)
    with pytest.raises(InputError, match="--trials must be positive"):
        Budget(trials=0)
    for limits in ({"trials": 1.5}, {"trials": "3"}, {"seconds": "x"}, {"target": True}):
        with pytest.raises(InputError, match="must be a"):
            Budget(**limits)  # type: ignore[arg-type]
    assert not (tmp_path / "db").exists()
    (tmp_path / "db" / "nvidia-h200").mkdir(parents=True)
    torn = tmp_path / "db" / "nvidia-h200" / "float16.json"
    torn.write_text('{"schema": 1, "rows": [')
    with pytest.raises(DatabaseError, match="damaged"):
        Run(tmp_path / "db", candidates, times)
    assert torn.read_text() == '{"schema": 1, "rows": ['
    assert not (tmp_path / "cache" / "studies").exists()
