"""Merging is independent of order and shows conflicts; verify retires what no longer holds; nothing is lost on the way."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cublaslt_fakes import algorithm_of
from dispatch_fakes import CONFIG, H200, PROVENANCE, SKINNY, binary_of, key_of, measured, predicted, with_algorithm
from hypothesis import given, settings
from hypothesis import strategies as st

from autogemm.algorithm import Algorithm
from autogemm.database import Database
from autogemm.database_tools import better, diff, export, merge, migrate, prune
from autogemm.decision import Table, decide
from autogemm.errors import CompileError, DatabaseError, InputError, LaunchError, MissingDependency, NothingFound
from autogemm.kernel_store import MemoryKernels
from autogemm.measure.admission import Admitted, Searched
from autogemm.measure.timer import BASELINE
from autogemm.problem import Problem
from autogemm.record import Row
from autogemm.results import Outcome
from autogemm.verify import DeviceMeasure, Remeasured, Verified, select, verify
from autogemm.verify import measured as measure_rounds


def database(folder: Path, *rows: Row) -> Database:
    found = Database(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found.put_many(rows)
    return found


def text_of(found: Database) -> str:
    return "".join(path.read_text() for path in found.paths())


def test_merge_adds_what_is_new_and_keeps_the_better_measurement_with_its_provenance(tmp_path: Path) -> None:
    old = measured(64, 128, 256, ratio=1.05, date="2026-11-10T00:00:00Z")
    worse = measured(64, 128, 256, ratio=1.02, config=SKINNY, date="2026-11-20T00:00:00Z")
    target = database(tmp_path / "target", old)
    report = merge([database(tmp_path / "other", worse, measured(8, 128, 256))], target)
    assert (report.added, report.replaced, report.unchanged) == (1, 0, 1)
    held = target.lookup(old.key)
    assert held == old.rounded() and held is not None and held.provenance == old.provenance
    (conflict,) = report.conflicts
    assert conflict.kept.row.config == CONFIG and [c.row.config for c in conflict.dropped] == [SKINNY]
    assert "1.050" in str(conflict) and "1.020" in str(conflict) and str(tmp_path / "other") in str(conflict)


def test_merge_by_newest_keeps_the_later_measurement(tmp_path: Path) -> None:
    old = measured(64, 128, 256, ratio=1.05, date="2026-11-10T00:00:00Z")
    new = measured(64, 128, 256, ratio=1.02, config=SKINNY, date="2026-11-20T00:00:00Z")
    target = database(tmp_path / "target", old)
    report = merge([database(tmp_path / "other", new)], target, prefer="newest")
    assert report.replaced == 1 and target.lookup(old.key) == new.rounded()


def test_merge_never_replaces_a_measurement_by_a_prediction(tmp_path: Path) -> None:
    row = measured(64, 128, 256, ratio=0.8)
    late = replace(
        predicted(64, 128, 256, config=SKINNY), provenance=replace(PROVENANCE, driver=None, date="2030-01-01T00:00:00Z")
    )
    for prefer in ("best", "newest"):
        target = database(tmp_path / prefer, row)
        merge([database(tmp_path / f"{prefer}-other", late)], target, prefer=prefer)  # type: ignore[arg-type]
        assert target.lookup(row.key) == row.rounded()


def test_merge_of_per_rank_files_does_not_depend_on_order_or_grouping(tmp_path: Path) -> None:
    ranks = [
        database(
            tmp_path / f"rank{i}",
            *(measured(m, 128, 256, ratio=1 + ((i * 7 + m) % 5) / 100, config=CONFIG if (i + m) % 2 else SKINNY,
                       date=f"2026-11-{10 + (i * 3 + m) % 4}T00:00:00Z") for m in (8, 16, 24)),
        )
        for i in range(4)
    ]  # fmt: skip
    texts = set()
    for n, order in enumerate(itertools.permutations(ranks)):
        target = database(tmp_path / f"all{n}")
        merge(order, target)
        texts.add(text_of(target))
    stepwise = database(tmp_path / "stepwise")
    for rank in reversed(ranks):
        merge([rank], stepwise)
    assert texts == {text_of(stepwise)}


def test_a_dry_merge_reports_and_writes_nothing(tmp_path: Path) -> None:
    target = database(tmp_path / "target", measured(64, 128, 256))
    before = text_of(target)
    report = merge([database(tmp_path / "other", measured(8, 128, 256))], target, dry_run=True)
    assert report.added == 1 and text_of(target) == before


def test_merge_refuses_damaged_and_missing_sources_before_writing(tmp_path: Path) -> None:
    target = database(tmp_path / "target", measured(64, 128, 256))
    before = text_of(target)
    broken = database(tmp_path / "broken", measured(8, 128, 256))
    broken.paths()[0].write_text("{")
    with pytest.raises(DatabaseError, match="damaged"):
        merge([database(tmp_path / "good", measured(16, 128, 256)), Database(tmp_path / "broken")], target)
    with pytest.raises(InputError, match="no database at"):
        merge([Database(tmp_path / "missing")], target)
    with pytest.raises(InputError, match="preference"):
        merge([], target, prefer="fastest")  # type: ignore[arg-type]
    assert text_of(target) == before


_ROWS = st.builds(
    lambda ratio, config, day, is_measured: measured(
        64, 128, 256, ratio=ratio, config=config, date=f"2026-11-{day}T00:00:00Z"
    ) if is_measured else predicted(64, 128, 256, config=config),
    st.sampled_from([0.9, 1.0, 1.1]), st.sampled_from([CONFIG, SKINNY]), st.integers(10, 12), st.booleans(),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(_ROWS, min_size=3, max_size=3))
def test_better_is_a_total_order(rows: list[Row]) -> None:
    a, b, c = rows
    assert better(a, b) == better(b, a)
    assert better(better(a, b), c) == better(a, better(b, c))


def test_diff_says_what_changed_in_words(tmp_path: Path) -> None:
    old = database(tmp_path / "old", measured(64, 128, 256), measured(8, 128, 256), measured(16, 128, 256))
    changed = measured(64, 128, 256, ratio=0.9, config=CONFIG.with_knob("l2_group_size", 16), date="2026-12-01T00:00:00Z")
    new = database(tmp_path / "new", changed, measured(8, 128, 256), measured(24, 128, 256))
    difference = diff(old, new)
    assert [row.key.m for row in difference.added] == [24] and [row.key.m for row in difference.removed] == [16]
    assert difference.unchanged == 1
    (change,) = difference.changed
    assert "l2_group_size 8 -> 16" in change.what and "runs autogemm -> cublas" in change.what
    assert "1.100 -> 0.900 x cuBLAS" in change.what and any(what.startswith("date ") for what in change.what)
    assert json.loads(json.dumps(difference.to_json()))["unchanged"] == 1
    assert diff(old, old).changed == ()


def test_prune_removes_by_criterion_and_says_why(tmp_path: Path) -> None:
    rows = [
        measured(64, 128, 256), measured(8, 128, 256, ratio=0.9), predicted(16, 128, 256),
        replace(measured(24, 128, 256), provenance=replace(PROVENANCE, generator="gen-0")),
    ]  # fmt: skip
    found = database(tmp_path, *rows)
    dry = prune(found, generator="gen-1", predicted=True, outdone=True, dry_run=True)
    assert {p.row.key.m: p.reasons for p in dry} == {
        8: ("cuBLAS is faster",), 16: ("predicted",), 24: ("generator was gen-0, is gen-1",)
    }  # fmt: skip
    assert len(found.rows()) == 4
    assert [p.row.key.m for p in prune(found, predicted=True)] == [16]
    prune(found, generator="gen-1")
    assert {row.key.m for row in found.rows()} == {64, 8}
    with pytest.raises(InputError, match="nothing to prune by"):
        prune(found)


def test_export_gives_one_line_per_row_with_every_knob(tmp_path: Path) -> None:
    rows = [measured(64, 128, 256), predicted(8, 128, 256, config=SKINNY)]
    first, second = csv.DictReader(io.StringIO(export(rows)))
    assert (first["m"], first["BLK_N"], first["status"], first["ratio_to_cublas"]) == ("64", "256", "measured", "1.1")
    assert (second["status"], second["ratio_to_cublas"], second["config_id"]) == ("predicted", "", SKINNY.id)
    assert json.loads(export(rows, "json"))[0]["time_us"] == pytest.approx(100.1)
    with pytest.raises(InputError, match="unknown form"):
        export(rows, "xml")  # type: ignore[arg-type]


def test_migrate_steps_old_files_up_and_keeps_them(tmp_path: Path) -> None:
    found = database(tmp_path, measured(64, 128, 256))
    (path,) = found.paths()
    present = path.read_bytes()
    steps = {1: lambda d: {**d, "two": True}, 2: lambda d: {**d, "three": True}}
    assert migrate(tmp_path) == ()
    assert migrate(tmp_path, steps=steps, target=3, dry_run=True) == (path,) and path.read_bytes() == present
    assert migrate(tmp_path, steps=steps, target=3) == (path,)
    document = json.loads(path.read_text())
    assert (document["schema"], document["two"], document["three"]) == (3, True, True)
    assert path.with_name("float16.json.schema1").read_bytes() == present
    with pytest.raises(DatabaseError, match="newer than 1"):
        migrate(tmp_path)
    with pytest.raises(DatabaseError, match="no step leads from it to 4"):
        migrate(tmp_path, steps=steps, target=4)
    path.write_text("{}")
    with pytest.raises(DatabaseError, match="damaged"):
        migrate(tmp_path)


def _again(**ratios: float | Exception) -> Callable[[Row], Remeasured]:
    """Return a measure that finds ``m64=0.9`` times cuBLAS for the row of M=64, or raises."""

    def measure(row: Row) -> Remeasured:
        found = ratios[f"m{row.key.m}"]
        if isinstance(found, Exception):
            raise found
        again = measured(*(getattr(row.key, e) for e in "mnk"), ratio=found, date="2026-12-01T00:00:00Z").measurement
        assert again is not None
        environment = replace(again.environment, driver="590.2", torch="2.12.0")
        return Remeasured(
            measurement=replace(again, environment=environment), binary=binary_of(row.config, generator="gen-2")
        )  # fmt: skip

    return measure


def test_verify_renews_what_holds_and_retires_what_does_not(tmp_path: Path) -> None:
    rows = {m: measured(m, 128, 256, ratio=0.95 if m == 40 else 1.1) for m in (8, 16, 24, 32, 40, 48)}
    found = database(tmp_path, *rows.values(), predicted(56, 128, 256))
    told: list[Verified] = []
    results = verify(
        found, _again(m8=1.11, m16=1.2, m24=0.93, m32=NothingFound("wrong"), m40=1.05, m48=MissingDependency("no compiler")),
        device=H200, told=told.append,
    )  # fmt: skip
    assert {r.row.key.m: r.verdict for r in results} == {
        8: "holds", 16: "moved", 24: "slower", 32: "failed", 40: "faster", 48: "skipped"
    }  # fmt: skip
    assert told == results
    assert [r.row.key.m for r in results if r.stale] == [24, 32]
    table = Table.of(found.rows())
    now = {m: decide(Problem(m=m, n=128, k=256), H200, table) for m in rows}
    assert {m: d.source for m, d in now.items() if m != 32} == {8: "exact", 16: "exact", 24: "torch", 40: "exact", 48: "exact"}
    assert found.lookup(rows[32].key) is None
    renewed = found.lookup(rows[8].key)
    assert renewed is not None and renewed.provenance.driver == "590.2" and renewed.provenance.generator == "gen-2"
    assert found.lookup(rows[48].key) == rows[48].rounded()
    assert json.loads(json.dumps([r.to_json() for r in results]))[2]["stale"] is True


def test_verify_times_an_algorithm_again_and_says_what_runs_now(tmp_path: Path) -> None:
    rows = {m: with_algorithm(measured(m, 128, 256), lead=1.1) for m in (8, 16, 24, 32)}
    found = database(tmp_path, *rows.values())
    leads = {8: 1.1, 16: 1.0, 24: 0.5, 32: None}

    def again(row: Row) -> Remeasured:
        m, ratio = row.key.m, 0.9 if row.key.m == 24 else 1.1
        now = measured(m, 128, 256, ratio=ratio)
        now = now if leads[m] is None else with_algorithm(now, lead=leads[m])
        assert now.measurement is not None
        return Remeasured(measurement=now.measurement, binary=binary_of(row.config), cublaslt=now.cublaslt)

    results = {r.row.key.m: r for r in verify(found, again, device=H200)}
    assert {m: r.verdict for m, r in results.items()} == {8: "holds", 16: "moved", 24: "slower", 32: "moved"}
    assert "cuBLASLt's algorithm 1.210 -> 1.100; dispatch runs autogemm" in results[16].reason
    assert "1.210 -> unusable; dispatch runs autogemm" in results[32].reason
    assert {row.key.m: row.choice for row in found.rows()} == {8: "cublaslt", 16: "autogemm", 24: "cublas", 32: "autogemm"}


def test_merge_diff_and_export_know_algorithms(tmp_path: Path) -> None:
    plain, better_one = measured(8, 128, 256), with_algorithm(measured(8, 128, 256, ratio=1.05), lead=1.2)
    other = with_algorithm(measured(8, 128, 256, ratio=1.05), lead=1.2, algorithm=algorithm_of(9))
    target = database(tmp_path / "into", plain)
    report = merge([database(tmp_path / "from", better_one)], target)
    assert report.replaced == 1 and target.rows() == [better_one.rounded()]
    assert "cuBLASLt's algorithm 1.260" in str(report.conflicts[0])
    (change,) = diff(database(tmp_path / "one", better_one), database(tmp_path / "two", other)).changed
    assert change.what == (f"algorithm {algorithm_of()} -> {algorithm_of(9)}",)
    (changed,) = diff(database(tmp_path / "old", plain), target).changed
    assert "runs autogemm -> cublaslt" in changed.what
    with_it, without = csv.DictReader(io.StringIO(export([better_one, measured(16, 128, 256)])))
    assert (with_it["choice"], with_it["cublaslt_version"]) == ("cublaslt", "130100")
    assert with_it["cublaslt_algorithm"] == algorithm_of().name
    assert float(with_it["cublaslt_ratio_to_cublas"]) == pytest.approx(1.26) and float(with_it["ratio_to_cublas"]) == 1.05
    assert without["choice"] == "autogemm" and without["cublaslt_us"] == without["cublaslt_algorithm"] == ""


def test_a_dry_verify_writes_nothing_and_an_empty_one_is_an_error(tmp_path: Path) -> None:
    found = database(tmp_path, measured(64, 128, 256), predicted(8, 128, 256))
    before = text_of(found)
    (result,) = verify(found, _again(m64=0.5), device=H200, dry_run=True)
    assert result.stale and text_of(found) == before
    with pytest.raises(NothingFound, match="no measured row"):
        verify(found, _again(), device=replace(H200, gpu="nvidia-h100"))
    with pytest.raises(LaunchError):  # a host that can't measure at all retires nothing
        verify(found, _again(m64=LaunchError("the worker did not come up")), device=H200)
    assert text_of(found) == before


def test_select_finds_rows_by_shape_and_names_what_is_missing() -> None:
    rows = [measured(64, 128, 256), measured(8, 128, 256)]
    assert select(rows, ["8x128x256"]) == [rows[1]]
    with pytest.raises(InputError, match="1x2x3"):
        select(rows, ["1x2x3"])


class FakeBench:
    """A DeviceBench whose kernel takes 100 us and whose baseline takes 110, until it fails."""

    def __init__(self, fails_after: int = 10**6, admitted: Admitted | None = None) -> None:
        self.left = fails_after
        self.admitted_algorithm = Admitted(outcome=Outcome.OK, relative_error={"kernel": 1e-4, "baseline": 1e-4})
        self.admitted = admitted or Admitted(outcome=Outcome.OK, relative_error={"kernel": 1e-4, "baseline": 1e-4})

    def open(self, problem: Problem) -> None:
        self.problem = problem

    def admit(self, name: str, binary: object, config: object) -> Admitted:
        return self.admitted

    def round(self, names: list[str]) -> dict[str, float]:
        self.left -= 1
        return {BASELINE: 110e-6, **({name: 100e-6 - 1e-5 * i for i, name in enumerate(names)} if self.left >= 0 else {})}

    def admit_algorithm(self, algorithm: Algorithm) -> Admitted:
        self.algorithms = [*getattr(self, "algorithms", []), algorithm]
        return self.admitted_algorithm

    def admit_cublaslt(self) -> Searched:
        return Searched(algorithm=algorithm_of(99, version=130200), tried=5, relative_error={})

    cold_round = round

    def environment(self) -> object:
        found = measured(64, 128, 256).measurement
        assert found is not None
        return found.environment

    def close(self) -> None:
        pass


def test_measuring_a_row_pairs_it_with_the_baseline() -> None:
    found, beside = measure_rounds("x", FakeBench(), {"kernel": 1e-4, "baseline": 1e-4})
    assert beside is None
    assert len(found.warm.kernel_s) == 21 and found.cold is not None and len(found.cold.kernel_s) == 9
    assert found.warm.baseline_s[0] / found.warm.kernel_s[0] == pytest.approx(1.1)
    assert len(measure_rounds("x", FakeBench(fails_after=5), {})[0].warm.kernel_s) == 5
    with pytest.raises(NothingFound, match="failed while it was timed"):
        measure_rounds("x", FakeBench(fails_after=0), {})


def test_device_measure_takes_the_kernel_of_the_row_or_the_present_one(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measured(64, 128, 256)
    bench = FakeBench()
    monkeypatch.setattr("autogemm.measure.device_bench.DeviceBench", lambda problem, **options: bench)
    for generators, expected in ((("gen-1", "gen-2"), "gen-1"), (("gen-2",), "gen-2")):
        kernels = MemoryKernels([binary_of(CONFIG, generator=g) for g in generators])
        with DeviceMeasure(kernels=kernels, compiling=False) as measure:
            assert measure(row).binary.manifest.generator == expected
    with DeviceMeasure(kernels=MemoryKernels([]), compiling=False) as measure, pytest.raises(MissingDependency):
        measure(row)
    bench.admitted = Admitted(outcome=Outcome.INCORRECT, reason="row 3 is wrong")
    with DeviceMeasure(kernels=MemoryKernels([binary_of(CONFIG)])) as measure, pytest.raises(NothingFound, match="row 3"):
        measure(row)


def test_a_row_is_timed_with_its_algorithm_or_the_best_of_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    row, bench = with_algorithm(measured(64, 128, 256)), FakeBench()
    monkeypatch.setattr("autogemm.measure.device_bench.DeviceBench", lambda problem, **options: bench)
    with DeviceMeasure(kernels=MemoryKernels([binary_of(CONFIG)])) as measure:
        for version, algorithm in ((130100, algorithm_of()), (130200, algorithm_of(99, version=130200))):
            monkeypatch.setattr("autogemm.runtime.cublaslt.library_version", lambda version=version: version)
            again = measure(row)
            assert again.cublaslt is not None and again.cublaslt.algorithm == algorithm
            assert again.cublaslt.warm_s == (9e-5,) * 21 and again.cublaslt.cold_s == (9e-5,) * 9
            assert again.measurement.warm.kernel_s == (1e-4,) * 21
        assert bench.algorithms == [algorithm_of()]
        monkeypatch.setattr("autogemm.runtime.cublaslt.library_version", lambda: 130100)
        bench.admitted_algorithm = Admitted(outcome=Outcome.INCORRECT, reason="wrong")
        assert measure(row).cublaslt is None
        assert measure(measured(64, 128, 256)).cublaslt is None


def test_a_kernel_that_no_longer_compiles_is_retired(tmp_path: Path) -> None:
    found = database(tmp_path, measured(64, 128, 256))
    (result,) = verify(found, _again(m64=CompileError("spills")), device=H200)
    assert result.verdict == "failed" and found.lookup(key_of(64, 128, 256)) is None
