"""The report page: self-contained, complete, and never mixing predictions with measurements."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from dispatch_fakes import with_algorithm

from autogemm.config import named_config
from autogemm.errors import InputError
from autogemm.problem import Problem
from autogemm.record import Finalist, Key, Provenance, RaceRecord, Row
from autogemm.report import render_report
from autogemm.results import Environment, Measurement, Outcome, Prediction, Samples
from autogemm.search.trial import Trial

COOPERATIVE, PINGPONG = named_config("cooperative", "sm_90a"), named_config("pingpong", "sm_90a")
PROVENANCE = Provenance(
    autogemm="0.1.0", generator="0" * 16, compiler="nvrtc 13.0", driver="580", tvm=None, torch=None, date="2026-01-02T03:04:05Z"
)
ENVIRONMENT = Environment(
    gpu="NVIDIA H200", slug="nvidia-h200", sm_count=132, driver="580", cuda="13.0", torch="2.13", power_limit_w=700.0,
    sm_clock_hz=None, power_w=None, throttle_reasons=(), date="2026-01-02T03:04:05Z",
)  # fmt: skip


def key(m: int) -> Key:
    return Key.of(Problem(m=m, n=4096, k=4096), arch="sm_90a", gpu="nvidia-h200", sm_count=132)


def measured(m: int = 4096) -> Row:
    samples = Samples(kernel_s=(1e-4, 1e-4, 1e-4), baseline_s=(1.1e-4, 1.2e-4, 1.04e-4), cold_l2=False)
    race = RaceRecord(
        finalists=(Finalist(config=COOPERATIVE, kernel_s=(1e-4,) * 3), Finalist(config=PINGPONG, kernel_s=(1.001e-4,) * 3)),
        tied=(COOPERATIVE.id, PINGPONG.id), margin=0.01, error_level=0.05, flip_rate=0.03, regret=0.0012, entered=40, rounds=9,
        ended="tied",
    )  # fmt: skip
    evidence = Measurement(
        warm=samples, cold=replace(samples, cold_l2=True), relative_error={"kernel": 1e-4, "baseline": 1e-4},
        environment=ENVIRONMENT,
    )  # fmt: skip
    return Row(key=key(m), config=COOPERATIVE, evidence=evidence, provenance=PROVENANCE, race=race)


def predicted(m: int = 128) -> Row:
    evidence = Prediction(time_s=2e-5, model="closed-form-1", gpu="nvidia-h200", clock_hz=1.7e9)
    return Row(key=key(m), config=PINGPONG, evidence=evidence, provenance=replace(PROVENANCE, driver=None))


TRIALS = [
    Trial(config=COOPERATIVE, outcome=Outcome.OK, value=0.95),
    Trial(config=PINGPONG, outcome=Outcome.OK, value=0.9),
    Trial(config=PINGPONG.with_knob("PIPE_DEPTH", 5), outcome=Outcome.REJECTED, reason="spills <16> bytes"),
]


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = render_report([measured(), predicted()], {"study": TRIALS}, title="t")
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", page.split("</head>")[1])
    assert not re.search(r"<(script|link)[^>]+(src|href)=", page.split("</head>")[0].split("<script>")[0])


def test_rows_show_spread_baseline_tie_set_and_status() -> None:
    page = render_report([measured(), predicted()], {}, title="t").split("<h2>Rows</h2>")[1]
    assert "1.100 ± 0.040" in page and "110.00" in page  # ratio to cuBLAS, its median time
    assert '<span class="measured">measured</span>' in page and '<span class="predicted">predicted</span>' in page
    assert "by closed-form-1" in page and "0.12%" in page and "3.0%" in page


def test_the_algorithm_that_a_row_names_stands_beside_its_kernel() -> None:
    page = render_report([with_algorithm(measured(), lead=1.02)], {}, title="t")
    assert "1.100 ± 0.040" in page and "1.122 ± 0.041" in page and "<td>cublaslt</td>" in page
    assert "of what dispatch runs 1.122 x cuBLAS" in page and "lt66_t393_s35_c0" in page


def test_predictions_alone_get_no_comparison_with_cublas() -> None:
    page = render_report([predicted()], {}, title="t")
    assert "Against cuBLAS" not in page and "Tie sets" not in page and "Roofline" in page


def test_trials_give_landscape_regret_and_escaped_reasons() -> None:
    page = render_report([], {"a study": TRIALS}, title="t")
    for heading in ("Landscape", "Regret", "Rejected candidates"):
        assert f"<h2>{heading}</h2>" in page
    assert "spills &lt;16&gt; bytes" in page


def test_nothing_to_report_is_an_error() -> None:
    with pytest.raises(InputError, match="nothing to report"):
        render_report([], {"empty": []}, title="t")
