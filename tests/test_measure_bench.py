"""Benchmarks and sweeps: the arithmetic of results, and a sweep through a worker whose kernels are scripted."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import make_binary

from autogemm.cli import render
from autogemm.config import Config
from autogemm.errors import InputError, NothingFound
from autogemm.measure.bench import BenchResult, Subject, bench, geomean, limit
from autogemm.measure.device_bench import DeviceBench
from autogemm.measure.sweep import Landscape, sweep
from autogemm.problem import Problem
from autogemm.results import Environment, Outcome, Samples

PROBLEM = Problem(m=4096, n=4096, k=4096)
CONFIG = Config(blk_m=128, blk_n=128, pipe_depth=4, epi_n=64)
ENVIRONMENT = Environment(
    gpu="NVIDIA H200", slug="nvidia-h200", sm_count=132, driver="580", cuda="13.0", torch="2.11", power_limit_w=700.0,
    sm_clock_hz=(1.4e9, 1.5e9), power_w=(600.0, 690.0), throttle_reasons=("sw_power_cap",), date="2026-01-01T00:00:00Z",
)  # fmt: skip


def samples(kernel_us: list[float], baseline_us: list[float], *, cold: bool = False) -> Samples:
    return Samples(kernel_s=tuple(t * 1e-6 for t in kernel_us), baseline_s=tuple(t * 1e-6 for t in baseline_us), cold_l2=cold)


def result() -> BenchResult:
    baseline = [200.0, 220.0, 210.0]
    ours = Subject(
        warm=samples([190.0, 200.0, 210.0], baseline), cold=samples([200.0, 200.0, 200.0], baseline, cold=True),
        relative_error={"kernel": 2e-4, "baseline": 2e-4},
    )  # fmt: skip
    library = Subject(
        warm=samples([200.0, 210.0, 205.0], baseline),
        cold=samples([210.0, 210.0, 210.0], baseline, cold=True),
        relative_error={},
    )
    return BenchResult(
        problem=PROBLEM, environment=ENVIRONMENT, limit=limit(PROBLEM, "sm_90a", 132, 1.5e9, 4.3e12),
        subjects={"raw": ours, "cublaslt": library},
    )  # fmt: skip


def test_ratios_are_medians_of_pairs_not_ratios_of_medians() -> None:
    assert result().subjects["raw"].ratio() == pytest.approx(200 / 190)
    assert result().subjects["raw"].ratio(cold=True) == pytest.approx(210 / 200)
    assert result().ratio("raw", "cublaslt") == pytest.approx(210 / 200)
    assert result().baseline_s() == pytest.approx(210e-6)


def test_the_limit_is_the_tensor_peak_at_the_clock_seen_or_the_bandwidth() -> None:
    big = limit(PROBLEM, "sm_90a", 132, 1.5e9, 4.3e12)
    assert big.bound == "tensor cores"
    assert big.time_s == pytest.approx(2 * 4096**3 / (132 * 4096 * 1.5e9))
    small = limit(Problem(m=8, n=6144, k=4096), "sm_90a", 132, 1.5e9, 4.3e12)
    assert small.bound == "memory"
    assert small.time_s == pytest.approx(2 * (8 * 4096 + 6144 * 4096 + 8 * 6144) / 4.3e12)
    assert limit(PROBLEM, "sm_90a", 132, None, 4.3e12).flops_per_s is None


def test_the_fraction_of_the_limit_compares_with_cold_time() -> None:
    assert result().fraction_of_limit("raw") == pytest.approx(result().limit.time_s / 200e-6)


def test_bench_results_keep_every_sample_in_json() -> None:
    document = json.loads(json.dumps(result().to_json()))
    assert document["subjects"]["raw"]["warm"]["kernel_s"] == pytest.approx([1.9e-4, 2e-4, 2.1e-4])
    assert document["subjects"]["raw"]["ratio_warm"] == pytest.approx(200 / 190)
    assert document["environment"]["throttle_reasons"] == ["sw_power_cap"]


def _over(subject: Subject, factor: float) -> Subject:
    """Return ``subject`` with times ``factor`` times as long."""
    warm, cold = (replace(s, kernel_s=tuple(t * factor for t in s.kernel_s)) for s in (subject.warm, subject.cold))
    return replace(subject, warm=warm, cold=cold)


def test_both_baselines_stand_side_by_side_for_kernels_and_for_dispatch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = result()
    one = replace(base, subjects={"raw": base.subjects["raw"], "dispatch": base.subjects["cublaslt"], **base.subjects})
    two = replace(one, subjects={**one.subjects, "dispatch": _over(base.subjects["raw"], 0.5)})
    means = {None: {"raw warm": 1.05}, "cublaslt": {"raw warm": 1.02, "dispatch warm": 1.5}}
    render.bench_table([one, two], ["cublaslt", "autogemm"], means)
    text = capsys.readouterr().out
    assert "x torch warm" in text and "x cublaslt warm" in text and "x cublaslt cold" in text
    assert "dispatch (cublaslt)" in text and "dispatch (autogemm)" in text
    assert (
        "raw warm: 1.0500 x torch.matmul (cuBLAS)" in text and "dispatch warm: 1.5000 x the best of a cublaslt search" in text
    )
    assert "a kernel on 1 of 2 shapes, an algorithm of cuBLASLt on 1, torch.matmul on 0" in text

    file = tmp_path / "bench.json"
    documents = [{**r.to_json(), "dispatch_runs": ran} for r, ran in ((one, "cublaslt"), (two, "autogemm"))]
    file.write_text(json.dumps({"results": documents}))
    script = Path(__file__).resolve().parent.parent / "scripts" / "measured_table.py"
    done = subprocess.run([sys.executable, str(script), str(file)], capture_output=True, text=True, check=True)
    assert "Of 2 rows, 1 run their kernel, 1 the cuBLASLt algorithm that they name, and 0 torch.matmul." in done.stdout
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("|")]
    head, first, second = next(cells for cells in lines if cells[0] == "shape"), *lines[-2:]
    found = [dict(zip(head, cells, strict=True)) for cells in (first, second)]
    kernel = {"over cuBLAS, warm": 200 / 190, "over cuBLAS, cold": 1.05, "over Lt, warm": 1.05, "over Lt, cold": 1.05}
    for cells, dispatched in zip(found, (1.0, 2.0 * 1.05), strict=True):
        for title, ratio in kernel.items():
            assert float(cells[f"kernel {title}"]) == pytest.approx(ratio, abs=6e-4)
        assert float(cells["dispatched over Lt, cold"]) == pytest.approx(dispatched, abs=6e-4)
    assert [cells["runs"] for cells in found] == ["cublaslt", "autogemm"]
    (all_,) = (dict(zip(lines[0], cells, strict=True)) for cells in lines if cells[0] == "all")
    assert float(all_["dispatched over Lt, cold"]) == pytest.approx((2.0 * 1.05) ** 0.5, abs=6e-4)


def test_the_geometric_mean_of_ratios() -> None:
    assert geomean([0.5, 2.0]) == pytest.approx(1.0)
    with pytest.raises(NothingFound):
        geomean([])


def test_refuses_a_benchmark_of_nothing() -> None:
    with pytest.raises(NothingFound, match="nothing to benchmark"):
        bench(PROBLEM, {}, arch_name="sm_90a", bandwidth_bytes_per_s=4e12, cublaslt=False)


def test_a_sweep_times_every_candidate_on_every_shape_and_says_which_failed() -> None:
    behaviours = {1: "ok:2e-5", 2: "wrong", 4: "ok:1.23456e-5", 8: "late_illegal_access", 16: "abort"}
    candidates = [(make_binary(does.encode()), replace(CONFIG, l2_group_size=g)) for g, does in behaviours.items()]
    problems = [PROBLEM, replace(PROBLEM, k=64)]
    progress = []
    with DeviceBench(PROBLEM, service="fake_service:FakeService", memory_used=lambda: None) as fake:
        found = list(sweep(problems, candidates, rounds=2, bench=fake, progress=lambda p, n: progress.append((p.k, n))))
    assert [one.problem for one in found] == problems and progress[:2] == [(4096, 1), (4096, 2)] and len(progress) == 10
    for one in found:
        ids = {g: replace(CONFIG, l2_group_size=g).id for g in behaviours}
        assert one.samples_s == {ids[1]: (2e-5, 2e-5), ids[4]: (1.23456e-5, 1.23456e-5)}
        assert {name: outcome for name, (outcome, _) in one.failed.items()} == {
            ids[2]: Outcome.INCORRECT, ids[8]: Outcome.ILLEGAL_ACCESS, ids[16]: Outcome.ABORT,
        }  # fmt: skip
        document = json.loads(json.dumps(one.to_json()))
        assert document["samples_us"][ids[4]] == [12.35, 12.35]
        assert Landscape.from_json(document).samples_s[ids[4]] == pytest.approx((1.235e-5, 1.235e-5))
        assert Landscape.from_json(document).environment == one.environment


def test_a_sweep_refuses_one_config_twice() -> None:
    with pytest.raises(InputError, match="same config"):
        list(sweep([PROBLEM], [(make_binary(b"ok"), CONFIG), (make_binary(b"wrong"), CONFIG)]))


def test_other_json_is_no_landscape() -> None:
    for document in (None, [], {}, {"problem": 3}):
        with pytest.raises(InputError, match="not a landscape"):
            Landscape.from_json(document)
