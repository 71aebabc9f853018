"""Studies keep every finished trial once, whoever is killed, and say clearly what they can't use."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import landscape
import pytest
from postgres import Postgres, find_binaries
from search_fakes import H200, FakeBench, space_of, write_candidates

from autogemm.config import Config
from autogemm.database import Database
from autogemm.errors import InputError
from autogemm.results import Outcome
from autogemm.search.progress import Done
from autogemm.search.storage import hide_password, read_trials
from autogemm.search.study import Axes, OptunaStore, open_local, open_shared
from autogemm.search.trial import LOCAL_ATTEMPTS, MemoryStore, Ticket, Trial, TrialStore
from autogemm.search.tune import STUDY_PREFIX, Options, Tuner

CONFIGS, SHAPES = landscape.load()
SOME = CONFIGS[:6]


def done(config: Config, value: float = 1.0) -> Trial:
    return Trial(config=config, outcome=Outcome.OK, value=value, samples=((1e-4, 1.1e-4),), detail={"dropped_after": 3})


def take(store: TrialStore) -> Ticket:
    ticket = store.ask()
    assert ticket is not None
    return ticket


@pytest.fixture(params=["memory", "journal"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrialStore]:
    made: TrialStore = MemoryStore() if request.param == "memory" else open_local(tmp_path, "study")
    yield made
    made.close()


def test_trials_come_in_the_queued_order_and_come_back_as_told(store: TrialStore) -> None:
    assert store.ask() is None
    assert store.enqueue(SOME) == len(SOME) and store.enqueue(SOME[:3]) == 0
    tickets = [take(store) for _ in SOME]
    assert [t.config for t in tickets] == SOME and store.ask() is None
    assert store.open_trials() == len(SOME)
    rejected = Trial(config=SOME[0], outcome=Outcome.REJECTED, reason="spills")
    assert store.tell(tickets[0], rejected)
    assert all(store.tell(ticket, done(ticket.config, i + 1.0)) for i, ticket in enumerate(tickets[1:]))
    assert store.finished() == [rejected, *(done(c, i + 1.0) for i, c in enumerate(SOME[1:]))]
    assert store.open_trials() == 0 and store.enqueue(SOME) == 0


def test_a_trial_survives_json() -> None:
    assert Trial.from_json(json.loads(json.dumps(done(SOME[0]).to_json()))) == done(SOME[0])
    with pytest.raises(InputError, match="not a trial"):
        Trial.from_json({"config": SOME[0].to_knobs()})


def _abandon(store: OptunaStore) -> None:
    """Let go of the lock as the end of a process does, without any other clean-up."""
    assert store._lock is not None
    store._lock.release()


def test_what_a_dead_owner_was_running_is_tried_again_and_at_last_given_up(tmp_path: Path) -> None:
    store = open_local(tmp_path, "study")
    store.enqueue(SOME[:2])
    assert store.tell(take(store), done(SOME[0]))
    for _ in range(LOCAL_ATTEMPTS):
        store.enqueue(SOME[:2])
        assert take(store).config == SOME[1] and store.ask() is None
        _abandon(store)
        store = open_local(tmp_path, "study")
    store.enqueue(SOME[:2])
    assert store.ask() is None and store.finished() == [done(SOME[0])]
    store.close()


def test_a_line_torn_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    store = open_local(tmp_path, "study")
    store.enqueue(SOME)
    assert store.tell(take(store), done(SOME[0]))
    store.close()
    (journal,) = tmp_path.glob("*.journal")
    whole = journal.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for keep in (last + 1, (last + len(whole)) // 2, len(whole) - 1):
        journal.write_bytes(whole[:keep])
        reopened = open_local(tmp_path, "study")
        # The torn line was the end of the trial, which therefore runs again.
        reopened.enqueue(SOME)
        configs = []
        while (ticket := reopened.ask()) is not None:
            configs.append(ticket.config)
            assert reopened.tell(ticket, done(ticket.config))
        assert set(configs) == set(SOME)
        reopened.close()
    assert {t.config for _, trials in read_trials(tmp_path) for t in trials} == set(SOME)


def test_a_file_that_is_no_journal_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "study.journal"
    path.write_bytes(b"\xff\xfe not a journal\nat all\n")
    with pytest.raises(InputError, match=r"study\.journal is not a study journal"):
        open_local(tmp_path, "study")
    assert path.read_bytes() == b"\xff\xfe not a journal\nat all\n"
    with pytest.raises(InputError, match="AUTOGEMM_CACHE"):
        open_local(path, "study")


def test_a_second_owner_waits_until_the_first_is_gone(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from autogemm.search.study import open_local\n"
        f"store = open_local(Path({str(tmp_path)!r}), 'study'); print('mine', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "mine\n"
    store = open_local(tmp_path, "study", waiting=owner.kill)  # called only because the owner lives
    owner.wait()
    store.close()


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_sampler_suggests_legal_new_configs_until_it_has_no_more(tmp_path: Path, sampler: str) -> None:
    store = open_local(tmp_path, "study", sampler=sampler, axes=Axes.of(CONFIGS), seed=1)  # type: ignore[arg-type]
    store.enqueue(SOME)
    seen = []
    for _ in range(15):
        ticket = store.ask()
        if ticket is None:
            break
        seen.append(ticket.config)
        assert store.tell(ticket, done(ticket.config, ticket.config.blk_n))
    store.close()
    assert seen[: len(SOME)] == SOME and len(seen) == len(set(seen)) > len(SOME) and set(seen) <= set(CONFIGS)


def test_shared_storage_that_is_not_there_is_one_clear_error_without_the_password() -> None:
    assert hide_password("postgresql://me:pw@host/db") == "postgresql://me:***@host/db"
    with pytest.raises(InputError, match="not a database URL"):
        open_shared("somewhere", "study")
    with pytest.raises(InputError, match="can't reach storage postgresql://me:") as caught:
        open_shared("postgresql://me:pw@127.0.0.1:1/db", "study")
    assert "pw" not in str(caught.value)


_WORKER = """
import sys
sys.path.insert(0, {tests!r})
from search_fakes import H200, FakeBench
import landscape
from pathlib import Path
from autogemm.binary import read_folder
from autogemm.search.evaluate import DeviceEvaluator
from autogemm.search.progress import Tried
from autogemm.search.supply import FolderSupply
from autogemm.search.worker import Worker
configs, shapes = landscape.load()
times = dict(zip(configs, shapes[2][1], strict=True))
def told(event):
    if isinstance(event, Tried):
        print(event.trial.config.id, flush=True)
worker = Worker(
    {url!r}, H200, supply=lambda dtype: FolderSupply(read_folder(Path({candidates!r}))),
    evaluator=lambda problem, sms: DeviceEvaluator(FakeBench(times, 2e-4, pause_s={pause})),
    progress=told, heartbeat_s=1, grace_s=4,
)
print("begin", flush=True)
worker.run(idle_s=6)
"""


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL here; install Debian's package postgresql")
    pytest.importorskip("psycopg2", reason="no driver; install autogemm[postgres]")
    server = Postgres(binaries)
    yield server
    server.close()


@pytest.fixture(scope="module")
def candidates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_candidates(tmp_path_factory.mktemp("candidates"), CONFIGS)


def start_worker(postgres: Postgres, candidates: Path, log: Path, pause: float = 0.02) -> subprocess.Popen[bytes]:
    code = _WORKER.format(tests=str(Path(__file__).parent), url=postgres.url, candidates=str(candidates), pause=pause)
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-c", code], stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )


@pytest.mark.slow
def test_killed_workers_and_a_restarted_database_lose_and_repeat_nothing(
    postgres: Postgres, candidates: Path, tmp_path: Path
) -> None:
    source, log = random.Random(11), tmp_path / "log"
    store = open_shared(postgres.url, STUDY_PREFIX + "killed", heartbeat_s=1, grace_s=4)
    problem = SHAPES[2][0]
    task = {
        "m": problem.m, "n": problem.n, "k": problem.k, "dtype": "float16", "layout": "NT", "epilogue": "none",
        "gpu": "nvidia-h200", "sm_count": 132, "kind": "device", "generator": "gen-1", "candidates": len(CONFIGS),
    }  # fmt: skip
    store.set_attribute("task", task)
    store.enqueue(CONFIGS)
    store.set_attribute("open", True)
    workers = [start_worker(postgres, candidates, log, pause=0.15) for _ in range(8)]
    kills, stopped, deadline = 0, False, time.monotonic() + 240
    while store.open_trials() and time.monotonic() < deadline:
        time.sleep(0.5)
        finished = len(store.finished())
        if finished >= 10 and kills < 8 and source.random() < 0.5:
            victim = source.randrange(8)
            workers[victim].send_signal(signal.SIGKILL)
            workers[victim].wait()
            workers[victim] = start_worker(postgres, candidates, log, pause=0.15)
            kills += 1
        if finished >= 25 and not stopped:
            postgres.stop()
            time.sleep(2)
            postgres.start()
            stopped = True
    assert store.open_trials() == 0 and kills > 0 and stopped, log.read_text()[-2000:]
    for worker in workers:
        worker.kill()
        worker.wait()
    told = Counter(t.config for t in store.finished())
    assert max(told.values()) == 1
    # Only a trial that killed workers twice may be missing; told[...] of the rest is exactly one.
    assert len(CONFIGS) - len(told) <= max(0, kills - 1)
    assert all(t.outcome is Outcome.OK for t in store.finished())
    reported = Counter(line for line in log.read_text().split() if line in {c.id for c in CONFIGS})
    assert max(reported.values()) == 1
    store.close()


def test_a_result_for_a_trial_that_was_taken_away_is_dropped(postgres: Postgres) -> None:
    slow = open_shared(postgres.url, "taken", heartbeat_s=60, grace_s=1)
    quick = open_shared(postgres.url, "taken", heartbeat_s=60, grace_s=1)
    slow.enqueue(SOME[:1])
    ticket = take(slow)
    deadline = time.monotonic() + 30
    while (again := quick.ask()) is None and time.monotonic() < deadline:
        time.sleep(0.2)  # the slow one is silent for longer than the grace
    assert again is not None and again.config == ticket.config and again.number != ticket.number
    assert quick.tell(again, done(again.config, 2.0))
    assert not slow.tell(ticket, done(ticket.config, 1.0))
    assert [t.value for t in slow.finished()] == [2.0]
    slow.close()
    quick.close()


def test_a_database_that_stays_away_is_one_clear_error_and_what_was_finished_is_kept(postgres: Postgres) -> None:
    store = open_shared(postgres.url, "away", patience_s=1.0)
    store.enqueue(SOME)
    assert store.tell(take(store), done(SOME[0]))
    ticket = take(store)
    postgres.stop()
    try:
        with pytest.raises(InputError, match="has not answered for") as caught:
            store.tell(ticket, done(ticket.config))
        assert "secret" not in str(caught.value)
    finally:
        postgres.start()
    assert [t.config for t in store.finished()] == [SOME[0]]
    assert store.tell(ticket, done(ticket.config))
    store.close()


def test_tuning_over_a_shared_study_ends_with_a_row(
    postgres: Postgres, candidates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOGEMM_CACHE", str(tmp_path / "cache"))
    problem, seconds = SHAPES[4]
    times = dict(zip(CONFIGS, seconds, strict=True))
    options = Options(space=space_of(CONFIGS[:20]), candidates=candidates, storage=postgres.url)
    events: list[object] = []
    database = Database(tmp_path / "db")
    with Tuner(H200, evaluator="device", db=database, options=options, bench=lambda p: FakeBench(times, 1e-4)) as tuner:
        row = tuner.tune(problem, progress=events.append)
    assert times[row.config] <= 1.01 * min(times.values()) and database.lookup(row.key) == row
    assert isinstance(events[-1], Done) and not (tmp_path / "cache" / "studies").exists()
