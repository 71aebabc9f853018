"""A Row keeps what it was given, refuses what it does not understand and never says predicted where it means measured."""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace
from typing import Any

import pytest
from cublaslt_fakes import algorithm_of

from autogemm.config import NAMED
from autogemm.errors import InputError
from autogemm.problem import Problem
from autogemm.record import CheckSummary, CublasLtRecord, Finalist, Key, Provenance, RaceRecord, Row
from autogemm.results import CheckReport, Environment, Finding, Measurement, Prediction, Samples

CONFIG = NAMED["sm_90a"]["cooperative"]
OTHER = NAMED["sm_90a"]["pingpong"]


def make_key(**changes: Any) -> Key:
    key = Key.of(Problem(m=4096, n=4096, k=4096), arch="sm_90a", gpu="nvidia-h200", sm_count=132)
    return replace(key, **changes)


def make_measurement(kernel_s: tuple[float, ...], baseline_s: tuple[float, ...], slug: str = "nvidia-h200") -> Measurement:
    environment = Environment(
        gpu="NVIDIA H200", slug=slug, sm_count=132, driver="580.1", cuda="13.0", torch="2.13", power_limit_w=700.0,
        sm_clock_hz=(1.4e9, 1.98e9), power_w=(500.0, 700.0), throttle_reasons=("sw_power_cap",), date="2026-11-29T16:00:00Z",
    )  # fmt: skip
    return Measurement(
        warm=Samples(kernel_s=kernel_s, baseline_s=baseline_s, cold_l2=False), cold=None,
        relative_error={"kernel": 2.1e-4, "baseline": 2.0e-4}, environment=environment,
    )  # fmt: skip


def make_provenance(**changes: Any) -> Provenance:
    provenance = Provenance(
        autogemm="0.1.0", generator="abc", compiler="nvrtc 13.0", driver="580.1", tvm="0.27", torch="2.13",
        date="2026-11-29T16:00:00Z",
    )  # fmt: skip
    return replace(provenance, **changes)


def measured_row(ratio: float = 1.04, **changes: Any) -> Row:
    kernel = (2.0e-4, 2.1e-4, 2.05e-4)
    race = RaceRecord(
        finalists=(Finalist(config=CONFIG, kernel_s=kernel), Finalist(config=OTHER, kernel_s=kernel)),
        tied=(CONFIG.id, OTHER.id),
        margin=0.005, error_level=0.05, flip_rate=0.0, regret=0.001, entered=20, rounds=30, ended="tied",
    )  # fmt: skip
    row = Row(
        key=make_key(), config=CONFIG, evidence=make_measurement(kernel, tuple(t * ratio for t in kernel)),
        provenance=make_provenance(), race=race,
        check=CheckSummary(level="tile", shape=(256, 256, 256), schedules=2, model="machine-1"),
    )  # fmt: skip
    return replace(row, **changes)


def predicted_row(**changes: Any) -> Row:
    row = Row(
        key=make_key(), config=CONFIG, provenance=make_provenance(driver=None, torch=None),
        evidence=Prediction(
            time_s=2e-4, model="closed-form-1", gpu="nvidia-h200", clock_hz=1.98e9, parts_s={"tensor": 1.5e-4},
            utilization={"tensor": 0.8},
        ),
    )  # fmt: skip
    return replace(row, **changes)


def row_with_algorithm(ratio: float = 1.04, lead: float = 1.02) -> Row:
    """Return a row whose kernel is ``ratio`` times as fast as cuBLAS, and whose algorithm ``lead`` times as fast as that."""
    row = measured_row(ratio)
    assert row.measurement is not None
    kernel = row.measurement.warm.kernel_s
    evidence = replace(row.measurement, cold=replace(row.measurement.warm, cold_l2=True))
    record = CublasLtRecord(
        algorithm=algorithm_of(), tried=8, warm_s=tuple(t / lead for t in kernel), cold_s=kernel,
        relative_error={"kernel": 2e-4, "baseline": 2e-4},
    )  # fmt: skip
    return replace(row, evidence=evidence, cublaslt=record)


@pytest.mark.parametrize(
    "row", [measured_row(), row_with_algorithm(), predicted_row()], ids=["measured", "with algorithm", "predicted"]
)
def test_a_row_survives_json(row: Row) -> None:
    stored = row.rounded()
    assert Row.from_json(json.loads(json.dumps(row.to_json()))) == stored
    assert stored.rounded() == stored


def test_the_ratio_is_the_median_of_paired_rounds_not_of_medians() -> None:
    row = measured_row(evidence=make_measurement((1.0, 2.0, 4.0), (1.1, 2.4, 4.0)))
    assert row.ratio() == pytest.approx(1.1)  # ratios 1.1, 1.2, 1.0
    assert row.spread() == pytest.approx(0.05)  # quartiles 1.05 and 1.15
    assert row.time_s == 2.0
    assert row.ratio(cold=True) is None


def test_a_row_measured_slower_than_cublas_chooses_cublas() -> None:
    assert measured_row(1.04).choice == "autogemm"
    assert measured_row(0.97).choice == "cublas"
    assert predicted_row().choice == "autogemm"


@pytest.mark.parametrize(
    ("ratio", "lead", "choice", "fallback"),
    [
        (1.04, 1.02, "cublaslt", "autogemm"),  # faster than both
        (1.04, 1.002, "autogemm", "autogemm"),  # within noise of the kernel
        (1.04, 0.98, "autogemm", "autogemm"),
        (0.97, 1.05, "cublaslt", "cublas"),  # faster than torch.matmul, which is faster than the kernel
        (0.97, 1.032, "cublas", "cublas"),  # within noise of torch.matmul
        (0.97, 1.0, "cublas", "cublas"),
        (1.001, 1.001, "autogemm", "autogemm"),
    ],
)
def test_an_algorithm_is_chosen_where_it_leads_both_by_more_than_noise(
    ratio: float, lead: float, choice: str, fallback: str
) -> None:
    row = row_with_algorithm(ratio, lead)
    assert (row.choice, row.fallback) == (choice, fallback)
    assert row.ratio("cublaslt") == pytest.approx(ratio * lead) and row.spread("cublaslt") == pytest.approx(0, abs=1e-9)
    assert row.ratio("cublaslt", cold=True) == pytest.approx(ratio) and row.ratio("cublas") == 1.0
    # What neighbours and tables read stays the kernel's own.
    assert row.ratio() == pytest.approx(ratio) and row.time_s == measured_row(ratio).time_s


def test_a_row_written_before_there_were_algorithms_is_read_and_written_as_it_was() -> None:
    document = measured_row().to_json()
    assert "cublaslt" not in document
    assert Row.from_json(document).to_json() == document


def test_an_algorithm_that_is_left_out_or_damaged_is_one_clear_error() -> None:
    whole = row_with_algorithm().to_json()
    without = {name: value for name, value in whole.items() if name != "cublaslt"}
    with pytest.raises(InputError, match="says choice 'cublaslt', its samples say 'autogemm'"):
        Row.from_json(without)
    assert Row.from_json({**without, "choice": "autogemm"}).cublaslt is None
    held = whole["cublaslt"]
    for damage, message in (
        ({"algorithm": {**held["algorithm"], "data": "00"}}, "128 hex digits, got 2 characters"),
        ({"algorithm": {**held["algorithm"], "tile_id": "20"}}, "cublaslt.algorithm.tile_id has the wrong type"),
        ({"warm_s": held["warm_s"][:2]}, "cublaslt has 2 warm samples beside the kernel's 3"),
        ({"warm_s": [0.0, 1.0, 1.0]}, "a measured time must be 1e-09 to 10000 s, got 0.0"),
        ({"warm_s": [1e-320] * 3}, "a measured time must be 1e-09 to 10000 s, got 1e-320"),  # its ratios would overflow
        ({"warm_s": [10**400] * 3}, r"cublaslt.warm_s\[0\] must be finite, got 1000"),
        ({"tried": 0}, "tried must be 1 to 10000, got 0"),
        ({"tried": 10**30}, "tried must be 1 to 10000, got 1000"),
        ({"relative_error": {}}, "relative_error must hold the kernel's"),
        ({"relative_error": {"kernel": -1.0}}, "relative_error must hold the kernel's, and none below 0"),
        ({"algorithm": {**held["algorithm"], "tile_id": -1}}, "tile_id must be 0 to 2147483647, got -1"),
        ({"algorithm": {**held["algorithm"], "custom_option": 10**30}}, "custom_option must be 0 to"),
        ({"algorithm": {**held["algorithm"], "version": 10**30}}, "a cuBLASLt version is a positive number"),
        ({"surprise": 1}, "cublaslt has unknown surprise"),
    ):
        with pytest.raises(InputError, match=message):
            Row.from_json({**whole, "cublaslt": {**held, **damage}})
    with pytest.raises(InputError, match="nothing was timed"):
        predicted_row(cublaslt=row_with_algorithm().cublaslt)
    with pytest.raises(InputError, match="should not have: cublaslt"):
        Row.from_json({**predicted_row().to_json(), "cublaslt": held})


def test_a_choice_edited_against_the_samples_is_refused() -> None:
    document = measured_row(0.97).to_json()
    document["choice"] = "autogemm"
    with pytest.raises(InputError, match="its samples say 'cublas'"):
        Row.from_json(document)


def test_status_and_evidence_can_not_disagree() -> None:
    document = predicted_row().to_json()
    document["status"] = "measured"
    with pytest.raises(InputError, match="lacks or should not have: measurement, prediction"):
        Row.from_json(document)
    with pytest.raises(InputError, match="nothing was timed"):
        predicted_row(race=measured_row().race)


def test_evidence_of_another_gpu_is_refused() -> None:
    with pytest.raises(InputError, match="evidence is for nvidia-b200"):
        measured_row(evidence=make_measurement((1.0,), (1.0,), slug="nvidia-b200"))


@pytest.mark.parametrize("kernel_s", [(), (1.0, 2.0), (0.0,), (float("nan"),)])
def test_samples_must_be_paired_and_positive(kernel_s: tuple[float, ...]) -> None:
    with pytest.raises(InputError):
        measured_row(evidence=make_measurement(kernel_s, (1.0,)))


def _paths(document: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = []
    for name, value in document.items():
        found.append((*prefix, name))
        if isinstance(value, dict) and name not in ("summary", "relative_error", "parts_s", "utilization"):
            found += _paths(value, (*prefix, name))
    return found


@pytest.mark.parametrize(
    "row", [measured_row(), row_with_algorithm(), predicted_row()], ids=["measured", "with algorithm", "predicted"]
)
def test_every_field_is_required_and_typed_and_no_other_is_taken(row: Row) -> None:
    document = row.to_json()
    optional = ({"config"} | {"summary"},)  # left-out knobs take their default; the summary is for readers only
    for path in _paths(document):
        if path[0] in optional[0] or path[-1] in ("findings", "parts_s", "utilization"):
            continue
        for damage in ("drop", "retype", "extra"):
            if damage == "drop" and path == ("cublaslt",):
                continue  # the choice then is another, which has a test of its own
            broken = copy.deepcopy(document)
            holder = broken
            for name in path[:-1]:
                holder = holder[name]
            if damage == "drop":
                del holder[path[-1]]
            elif damage == "retype":
                holder[path[-1]] = {"unexpected": [1]}
            else:
                holder["surprise"] = 1
                if path[-2:-1] in (("relative_error",), ("parts_s",)):
                    continue
            with pytest.raises(InputError):
                Row.from_json(broken)


def test_a_newer_schema_is_named() -> None:
    document = predicted_row().to_json()
    document["schema"] = 99
    with pytest.raises(InputError, match="schema 99 is newer than 1; upgrade"):
        Row.from_json(document)


@pytest.mark.parametrize("schema", [True, 0, -1, "1", None])
def test_a_row_without_a_schema_number_is_refused(schema: object) -> None:
    with pytest.raises(InputError, match="no schema number"):
        Row.from_json({**predicted_row().to_json(), "schema": schema})


def test_every_field_of_the_key_separates_questions() -> None:
    other = {
        "arch": "sm_100a", "gpu": "nvidia-h100", "sm_count": 114, "dtype_a": "bfloat16", "dtype_b": "bfloat16",
        "dtype_d": "bfloat16", "layout": "NN", "m": 4104, "n": 4104, "k": 4104,
    }  # fmt: skip
    key = make_key()
    # The only epilogue so far is "none"; it is a field of the key all the same.
    assert {f.name for f in fields(Key)} == {*other, "epilogue"}
    variants = [replace(key, **{name: value}) for name, value in other.items()]
    assert len({key, *variants}) == 1 + len(variants)


def test_staleness_names_what_changed_and_ignores_the_driver_for_predictions() -> None:
    row = measured_row()
    assert row.stale(generator="abc", compiler="nvrtc 13.0", driver="580.1") == ()
    assert row.stale(generator="new") == ("generator was abc, is new",)
    assert len(row.stale(generator="new", compiler="nvcc", driver="1")) == 3
    assert predicted_row().stale(driver="1") == ()
    assert row.stale() == () and row.stale(cublaslt=1) == ()
    assert row_with_algorithm().stale(cublaslt=130200) == ("cublaslt was 130100, is 130200",)


def test_a_check_summary_keeps_the_kinds_of_fault() -> None:
    report = CheckReport(
        findings=(Finding(kind="race", text="x"), Finding(kind="race", text="y"), Finding(kind="deadlock", text="z")),
        level="tile", shape=(1, 2, 3), seeds=(0, 1), max_error=None, wrong_elements=0, cycles=1.0, model="m",
    )  # fmt: skip
    summary = CheckSummary.of(report)
    assert summary.findings == ("deadlock", "race") and not summary.passed and summary.schedules == 2


def test_21_rows_with_all_their_samples_stay_small() -> None:
    kernel = tuple(1.2345e-4 * (1 + 0.001 * i) for i in range(40))
    race = measured_row().race
    assert race is not None
    race = replace(race, finalists=tuple(Finalist(config=CONFIG, kernel_s=kernel) for _ in range(8)))
    measurement = make_measurement(kernel, kernel)
    measurement = replace(measurement, cold=replace(measurement.warm, cold_l2=True))
    assert 21 * len(json.dumps(measured_row(race=race, evidence=measurement).to_json())) < 300_000
