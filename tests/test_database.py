"""The database loses no row, tears no file, and overwrites nothing it does not understand."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from test_record import CONFIG, OTHER, make_key, make_measurement, make_provenance, measured_row, predicted_row

from autogemm.database import Database, distance, preferred, render
from autogemm.errors import DatabaseError, InputError
from autogemm.record import Key, Row

# A writer process: puts predicted rows for N = start, start + 8, ... and says after each that it is kept.
_WRITER = """
import sys
sys.path.insert(0, {tests!r})
from dataclasses import replace
from autogemm.database import Database
from test_record import make_key, predicted_row
database = Database({folder!r})
for i in range({count}):
    database.put(predicted_row(key=make_key(m={start} + i)))
    print({start} + i, flush=True)
"""


def start_writer(folder: Path, start: int, count: int) -> subprocess.Popen[str]:
    code = _WRITER.format(tests=str(Path(__file__).parent), folder=str(folder), start=start, count=count)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def file_of(database: Database) -> Path:
    return database.path(make_key())


def test_rows_come_back_as_they_were_put(tmp_path: Path) -> None:
    database = Database(tmp_path)
    rows = [measured_row().rounded(), predicted_row(key=make_key(m=16))]
    assert database.put_many(rows) == rows
    assert Database(tmp_path).lookup(make_key()) == rows[0]
    assert {row.key for row in Database(tmp_path).rows()} == {row.key for row in rows}
    assert database.lookup(make_key(k=8)) is None
    assert database.path(make_key()) == tmp_path / "nvidia-h200" / "float16.json"


@pytest.mark.parametrize(
    "row",
    [
        predicted_row(key=make_key(sm_count=1.5)),
        replace(predicted_row(), provenance=replace(make_provenance(), date=5)),  # type: ignore[arg-type]
        replace(predicted_row(), config=replace(CONFIG, blk_m=128.0)),  # type: ignore[arg-type]
    ],
)
def test_a_row_that_would_not_read_back_is_never_written(row: Row, tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.put(predicted_row(key=make_key(m=16)))
    before = file_of(database).read_bytes()
    with pytest.raises(InputError, match="can't be stored"):
        database.put_many([predicted_row(key=make_key(m=32)), row])
    assert file_of(database).read_bytes() == before


def test_the_text_is_sorted_and_a_row_changes_only_its_own_lines(tmp_path: Path) -> None:
    rows = [predicted_row(key=make_key(m=m)) for m in (512, 16, 4096)]
    text = render(rows)
    assert text == render(reversed(rows))
    assert json.loads(text)["rows"][0]["key"]["m"] == 16
    changed = render([replace(rows[0], config=OTHER), *rows[1:]])
    differing = [(a, b) for a, b in zip(text.splitlines(), changed.splitlines(), strict=True) if a != b]
    assert len(differing) == 1 and '"config"' in differing[0][0]
    assert max(map(len, render([measured_row()]).splitlines())) < 1000


def test_measured_beats_predicted_whatever_the_order_and_the_dates(tmp_path: Path) -> None:
    measured = measured_row(provenance=make_provenance(date="2026-01-01T00:00:00Z")).rounded()
    predicted = predicted_row(provenance=make_provenance(date="2026-12-31T00:00:00Z"))
    database = Database(tmp_path)
    assert database.put(predicted) == predicted
    assert database.put(measured) == measured
    assert database.put(predicted) == measured
    assert database.lookup(make_key()) == measured


def test_of_two_measured_rows_the_later_stays_and_merging_is_independent_of_order() -> None:
    old = measured_row(provenance=make_provenance(date="2026-01-01T00:00:00Z"))
    new = measured_row(config=OTHER, provenance=make_provenance(date="2026-02-01T00:00:00Z"))
    same_date = measured_row(config=OTHER, provenance=make_provenance(date="2026-01-01T00:00:00Z"))
    assert preferred(old, new) is new and preferred(new, old) is new
    assert preferred(old, same_date) is preferred(same_date, old)


def test_every_field_of_the_key_makes_a_miss(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.put(measured_row())
    for name, value in {
        "arch": "sm_100a", "gpu": "nvidia-b200", "sm_count": 114, "dtype_a": "bfloat16", "dtype_b": "bfloat16",
        "dtype_d": "bfloat16", "layout": "NN", "m": 8192, "n": 8192, "k": 8192,
    }.items():  # fmt: skip
        assert database.lookup(replace(make_key(), **{name: value})) is None, name
    assert {f.name for f in fields(Key)} == {
        "arch", "gpu", "sm_count", "dtype_a", "dtype_b", "dtype_d", "layout", "epilogue", "m", "n", "k",
    }  # fmt: skip


def test_neighbours_are_of_the_same_family_and_nearest_first(tmp_path: Path) -> None:
    database = Database(tmp_path)
    near, far = make_key(m=2048), make_key(m=16)
    other_sms, other_type = make_key(sm_count=114), make_key(dtype_a="bfloat16", dtype_b="bfloat16", dtype_d="bfloat16")
    database.put_many([predicted_row(key=key) for key in (far, near, other_sms, other_type)])
    found = database.nearest(make_key())
    assert [n.row.key for n in found] == [near, other_sms, far]
    assert found[1].differs == ("114 SMs instead of 132",)
    assert database.nearest(make_key(), limit=1)[0].distance == distance(make_key(), near) == 1.0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not JSON"),
        (b'{"schema": 1, "rows": [', "not JSON"),
        (b'\xff\xfe{"schema": 1}', "not UTF-8"),
        (b"[]", "no schema number"),
        (b'{"schema": "1", "rows": []}', "no schema number"),
        (b'{"schema": 2, "rows": []}', "newer than 1"),
        (b'{"schema": 1, "rows": {}}', "not schema and rows"),
        (b'{"schema": 1, "rows": [{}]}', "row 0"),
        (b"[" * 100_000, "not JSON"),
    ],
    ids=["empty", "truncated", "not-utf8", "list", "text-schema", "newer", "no-list", "no-row", "deep"],
)
def test_a_file_that_is_not_understood_is_named_and_never_touched(tmp_path: Path, content: bytes, why: str) -> None:
    database = Database(tmp_path)
    path = file_of(database)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    for action in (
        lambda: database.lookup(make_key()), lambda: database.rows(), lambda: database.put(measured_row()),
        lambda: database.require_usable(make_key()), lambda: database.remove([make_key()]),
    ):  # fmt: skip
        with pytest.raises(DatabaseError, match=why) as caught:
            action()
        assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_every_truncation_of_a_good_file_is_noticed(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.put_many([measured_row(), predicted_row(key=make_key(m=16))])
    whole = file_of(database).read_bytes()
    for keep in sorted(random.Random(0).sample(range(len(whole) - 1), 40)):
        file_of(database).write_bytes(whole[:keep])
        with pytest.raises(DatabaseError):
            Database(tmp_path).rows()


def test_a_row_in_the_wrong_file_and_a_repeated_row_are_refused(tmp_path: Path) -> None:
    database = Database(tmp_path)
    path = file_of(database)
    path.parent.mkdir(parents=True)
    path.write_text(render([predicted_row(), predicted_row()]))
    with pytest.raises(DatabaseError, match="repeats"):
        database.rows()
    path.write_text(render([predicted_row()]))
    elsewhere = tmp_path / "nvidia-h100" / "float16.json"
    elsewhere.parent.mkdir()
    path.rename(elsewhere)
    with pytest.raises(DatabaseError, match="belongs in nvidia-h200/float16.json"):
        database.rows()


def test_a_folder_that_can_not_be_written_is_an_error_before_any_work(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for folder in (blocked, Path("/proc/tuned")):
        with pytest.raises(DatabaseError, match="can't write to"):
            Database(folder).require_usable(make_key())


@pytest.mark.skipif(not hasattr(os, "fork") or os.geteuid() != 0, reason="needs to become a user without write permission")
def test_a_read_only_folder_can_be_read_and_says_so_when_written(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.put(measured_row())
    for folder in (tmp_path, *tmp_path.parents):  # pytest's folders are private
        folder.chmod(folder.stat().st_mode | 0o055)
        if folder == Path("/tmp"):
            break
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setuid(65534)
            reader = Database(tmp_path)
            if reader.lookup(make_key()) is not None:
                for write in (lambda: reader.require_usable(make_key()), lambda: reader.put(measured_row())):
                    try:
                        write()
                    except DatabaseError as error:
                        status = 0 if "can't write to" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_rows_that_another_process_wrote_are_seen(tmp_path: Path) -> None:
    reader, writer = Database(tmp_path), Database(tmp_path)
    assert reader.lookup(make_key()) is None
    writer.put(predicted_row())
    assert reader.lookup(make_key()) is not None
    writer.put(measured_row())
    found = reader.lookup(make_key())
    assert found is not None and found.status == "measured"
    assert writer.remove([make_key(), make_key(m=8)]) == 1
    assert reader.lookup(make_key()) is None


def test_eight_writers_lose_no_row(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, start=1 + 1000 * i, count=8) for i in range(8)]
    assert [writer.wait(timeout=120) for writer in writers] == [0] * 8
    assert {row.key.m for row in Database(tmp_path).rows()} == {1 + 1000 * i + j for i in range(8) for j in range(8)}


def test_a_killed_writer_leaves_a_whole_file_with_all_it_had_reported(tmp_path: Path) -> None:
    source = random.Random(1)
    reported: set[int] = set()
    for attempt in range(6):
        writer = start_writer(tmp_path, start=1 + 1000 * attempt, count=900)
        assert writer.stdout is not None
        for _ in range(source.randrange(1, 6)):
            reported.add(int(writer.stdout.readline()))
        time.sleep(source.random() * 0.01)
        writer.send_signal(signal.SIGKILL)
        reported |= {int(line) for line in writer.stdout.read().split()}
        writer.wait()
        assert reported <= {row.key.m for row in Database(tmp_path).rows()}
    # What the killed ones left half-written goes with the next write.
    Database(tmp_path).put(predicted_row())
    assert {p.name for p in (tmp_path / "nvidia-h200").iterdir()} <= {"float16.json", ".float16.json.lock"}


def test_stale_rows_are_kept_and_named(tmp_path: Path) -> None:
    database = Database(tmp_path)
    database.put(measured_row(evidence=make_measurement((1e-4, 1e-4), (1e-4, 1e-4)), config=CONFIG))
    found = database.lookup(make_key())
    assert isinstance(found, Row)
    assert found.stale(generator="another") == ("generator was abc, is another",)
