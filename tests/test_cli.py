"""The command line: exit codes, what goes where, and one clear error for bad input with nothing written."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cublaslt_fakes import algorithm_of
from dispatch_fakes import measured, with_algorithm
from typer.testing import CliRunner, Result

from autogemm.binary import Binary
from autogemm.cli import target
from autogemm.cli.main import app
from autogemm.config import named_config
from autogemm.database import Database
from autogemm.device import Device
from autogemm.errors import InputError
from autogemm.problem import Problem
from autogemm.record import Key, Provenance, Row
from autogemm.results import Prediction
from autogemm.space import load_space

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep cache and database of the person who runs the tests out of it, and notice anything written."""
    monkeypatch.setenv("AUTOGEMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("AUTOGEMM_DB", str(tmp_path / "db"))
    monkeypatch.delenv("AUTOGEMM_UNMEASURED", raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def row(m: int = 128) -> Row:
    config = load_space("sm_90a").configs()[0]
    key = Key.of(Problem(m=m, n=4096, k=4096), arch="sm_90a", gpu="nvidia-h200", sm_count=132)
    made = Provenance(
        autogemm="0.1.0", generator="0" * 16, compiler="nvrtc", driver=None, tvm=None, torch=None, date="2026-01-02T03:04:05Z"
    )
    evidence = Prediction(time_s=2e-5, model="closed-form-1", gpu="nvidia-h200", clock_hz=1.7e9)
    return Row(key=key, config=config, evidence=evidence, provenance=made)


TUNE = ("tune", "--shape", "4096x4096x4096", "--predict")
BAD = {
    "shape of two extents": (("tune", "--shape", "4096x4096"), "is not MxNxK"),
    "shape with a zero": (("tune", "--shape", "0x1x1"), "M must be between 1"),
    "negative shape": (("tune", "--shape", "-128x128x128"), "M must be between 1"),
    "enormous shape": (("tune", "--shape", "99999999999x8x8"), "M must be between 1"),
    "unaligned K": (("tune", "--shape", "4096x4096x4097"), "not a multiple of 16"),
    "unaligned N": (("tune", "--shape", "4096x4097x4096"), "pad N to 4104"),
    "no shape": (("tune",), "no shape given"),
    "unknown knob": ((*TUNE, "--set", "NONSENSE=1"), "unknown knob 'NONSENSE'"),
    "knob without value": ((*TUNE, "--set", "PIPE_DEPTH"), "is not KNOB=VALUE"),
    "knob that is no number": ((*TUNE, "--set", "PIPE_DEPTH=deep"), "PIPE_DEPTH must be an integer"),
    "knob given twice": ((*TUNE, "--set", "EPI_N=64", "--set", "EPI_N=32"), "given twice"),
    "ring deeper than shared memory": ((*TUNE, "--set", "PIPE_DEPTH=99"), "sm_100a allows 232448"),
    "EPI_N beyond a TMEM load": ((*TUNE, "--set", "EPI_N=256"), "EPI_N=256"),
    "knob of the other arch": ((*TUNE, "--set", "PINGPONG=true"), "has no meaning on sm_100a"),
    "unknown arch": ((*TUNE, "--arch", "sm_80"), "unknown arch 'sm_80'; supported: sm_90a, sm_100a"),
    "unknown dtype": ((*TUNE, "--dtype", "int4"), "unknown dtype 'int4'"),
    "unknown config": ((*TUNE, "--config", "v99"), "no config is named 'v99'"),
    "config of the other arch": ((*TUNE, "--arch", "sm_90a", "--config", "v9"), "no config is named 'v9' on sm_90a"),
    "no trials": ((*TUNE, "--trials", "0"), "--trials must be positive"),
    "negative time": ((*TUNE, "--seconds", "-1"), "--seconds must be positive"),
    "target for a prediction": ((*TUNE, "--target", "1.02"), "--target compares with cuBLAS"),
    "sampler": ((*TUNE, "--sampler", "magic"), "unknown sampler 'magic'"),
    "too many SMs": ((*TUNE, "--sm-count", "149"), "sm_count=149"),
    "no candidates": ((*TUNE, "--candidates", "{tmp}/none"), "no compiled kernels in"),
    "no space file": ((*TUNE, "--space", "{tmp}/none.yaml"), "can't read search space"),
    "candidates and knobs": ((*TUNE, "--candidates", "x", "--set", "EPI_N=64"), "leave out --set"),
    "no shapes file": (("tune", "--shapes", "{tmp}/none"), "can't read shapes file"),
    "database below a file": ((*TUNE, "--db", "/proc/version/db"), "can't write to"),
    "database on a read-only file system": ((*TUNE, "--db", "/proc/db"), "can't write to"),
    "storage that is no URL": ((*TUNE, "--storage", "nonsense"), "storage"),
    "unreachable storage": ((*TUNE, "--storage", "postgresql://nobody@127.0.0.1:1/none"), "can't reach storage"),
    "nothing to compile": (("compile",), "nothing to compile"),
    "form of a kernel": (("compile", "--config", "v9", "--emit", "sass"), "unknown form 'sass'"),
    "cubin to the terminal": (("compile", "--config", "v9", "--emit", "cubin"), "--out"),
    "space without a folder": (("compile", "--space", "sm_90a"), "--out"),
    "compile an illegal config": (("compile", "--config", "v9", "--set", "PIPE_DEPTH=99"), "try PIPE_DEPTH=4"),
    "compile half a config": (("compile", "--set", "BLK_M=128"), "config lacks"),
    "compile into a file system that is read-only": (("compile", "--config", "v9", "--out", "/proc/x"), "can't write to"),
    "check level": (("check", "--config", "v9", "--level", "sass"), "unknown level 'sass'"),
    "check an id of no config": (("check", "--id", "1x2x3"), "no config of the sm_100a space has id"),
    "explain a shape": (("explain", "--shape", "1x2"), "is not MxNxK"),
    "explain two GPUs": (("explain", "--shape", "8x8x8", "--gpu", "nvidia-h200", "--arch", "sm_90a"), "not both"),
    "explain for a GPU": (("explain", "--shape", "8x8x8", "--gpu", "tpu"), "unknown GPU 'tpu'"),
    "predict for the other arch": (("predict", "--shape", "8x8x8", "--gpu", "nvidia-h200"), "is sm_90a, not sm_100a"),
    "predict on too few SMs": (("predict", "--shape", "8x8x8", "--config", "v9", "--sm-count", "1"), "sm_count=1"),
    "no model config": (("shapes", "--model", "{tmp}/none"), "can't read model config"),
    "token counts": (("shapes", "--model", "{tmp}/none", "--tokens", "1,many"), "is not a list of integers"),
    "report into a folder that is not there": (("report", "--out", "{tmp}/none/page.html"), "an existing folder"),
    "report on nothing": (("report", "--out", "{tmp}/page.html"), "nothing to report"),
    "merge from nothing": (("merge", "{tmp}/none"), "no database at"),
    "merge by magic": (("merge", "{tmp}", "--prefer", "magic"), "unknown preference 'magic'"),
    "diff with nothing": (("diff", "{tmp}", "{tmp}/none"), "no database at"),
    "prune by nothing": (("prune",), "nothing to prune by"),
    "export to a form": (("export", "--format", "xml"), "unknown form 'xml'"),
    "bundle over something": (("bundle", "--out", "/proc"), "exists already"),
    "bundle for two GPUs": (("bundle", "--out", "x", "--gpu", "nvidia-h200", "--arch", "sm_90a"), "not both"),
    "worker without storage": (("worker", "--storage", "postgresql://nobody@127.0.0.1:1/none"), "can't reach storage"),
    "worker that idles backwards": (("worker", "--storage", "x", "--idle", "-1"), "--idle must not be negative"),
    "bench against nothing": (("bench", "--against", "nothing"), "unknown baseline 'nothing'"),
    "verify a shape": (("verify", "--shape", "1x2"), "is not MxNxK"),
    "unknown option": (("tune", "--nonsense"), "No such option"),
    "unknown command": (("nonsense",), "No such command"),
    "an option without its value": (("tune", "--shape"), "requires an argument"),
    "a command without what it needs": (("explain",), "Missing option '--shape'; see: autogemm explain --help"),
    "no processes": ((*TUNE, "--workers", "0"), "greater than or equal to 1, got '0'; see: autogemm tune --help"),
    "endless warming up": ((*TUNE, "--warm-up", "inf"), "less than or equal to 600, got 'inf'; see: autogemm tune --help"),
    "text for a number": ((*TUNE, "--warm-up=soon"), "got 'soon'; see: autogemm tune --help"),
    "more SMs than there are": ((*TUNE, "--sm-count", "999"), "sm_count=999 is outside 1 to 148"),
    "tuning against nothing": ((*TUNE, "--against", "nothing"), "unknown baseline 'nothing'"),
    "seed below zero": ((*TUNE, "--seed", "-1"), "seed=-1 is outside"),
    "seed of 33 bits": ((*TUNE, "--sampler", "random", "--seed", str(2**32)), "is outside 0 to 2**32 - 1"),
    "shape in other digits": (("tune", "--shape", "८x८x८"), "is not MxNxK"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error_and_writes_nothing(case: str, tmp_path: Path) -> None:
    arguments, message = BAD[case]
    result = run(*(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert files(tmp_path) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"schema": 99, "rows": []}', "newer than"),
        (b'{"schema": 1, "rows": [{"sch', "not JSON"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"[]", "no schema number"),
        (b"", "not JSON"),
    ],
)
@pytest.mark.parametrize("command", [("tune", "--arch", "sm_90a", "--predict", "--shape", "128x4096x4096"), ("show",)])
def test_a_database_that_cannot_be_understood_is_left_alone(
    content: bytes, message: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "db" / "nvidia-h200" / "float16.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    result = run(*command)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr
    assert path.read_bytes() == content
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no shapes"), ("[]", "holds no shapes"), ("4x5\n", "line 1"), ("[{}]", "lacks m, n, k")],
)
def test_a_shapes_file_without_shapes_is_one_clear_error(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "shapes").write_text(content)
    result = run("tune", "--shapes", str(tmp_path / "shapes"))
    assert result.exit_code == 2 and message in result.stderr
    assert files(tmp_path) == {"shapes": content.encode()}


def test_shapes_that_no_kernel_can_take_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "shapes").write_text("8x8x7\n8x8x9\n")
    result = run("tune", "--shapes", str(tmp_path / "shapes"))
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and "8x8x9" in result.stderr


@pytest.mark.parametrize("content", ["blocks: [", "\0\0", "!!python/object/apply:os.getcwd []", "a: &a [*b]"])
def test_a_search_space_that_is_no_yaml_is_one_clear_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(content)
    result = run(*TUNE, "--space", str(tmp_path / "space.yaml"))
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and "can't read search space" in result.stderr


@pytest.mark.parametrize("content", [b"garbage\ngarbage\n", b"[]\n", b"{}\n", b'{"op_code":0}\n', b"\xff\xfe\n"])
def test_a_report_of_what_is_no_study_is_one_clear_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "cache" / "studies").mkdir(parents=True)
    (tmp_path / "cache" / "studies" / "x.journal").write_bytes(content)
    result = run("report", "--out", str(tmp_path / "page.html"))
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and "is not a study journal" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = run("tune", "--shape", "4096x4096x4096", "--gpu", "97")
    assert result.exit_code == 2 and "97" in result.stderr
    assert files(tmp_path) == {}


def test_show_prints_rows_and_marks_predictions(tmp_path: Path) -> None:
    Database(tmp_path / "db").put_many([row(128), row(256)])
    text = run("show")
    assert text.exit_code == 0 and "predicted" in text.stdout and "128x4096x4096" in text.stdout
    assert "stale" in text.stdout  # its generator hash is made up
    document = json.loads(run("show", "--json", "--shape", "256x4096x4096").stdout)
    assert [(r["key"]["m"], r["status"]) for r in document] == [(256, "predicted")]


def test_show_of_an_empty_database_finds_nothing() -> None:
    result = run("show")
    assert result.exit_code == 1 and result.stdout == "" and "no such row" in result.stderr


def test_show_lists_the_search_space() -> None:
    document = json.loads(run("show", "--space", "sm_100a", "--json").stdout)
    assert {entry["id"] for entry in document} == {config.id for config in load_space("sm_100a").configs()}


def test_explain_gives_the_reason(tmp_path: Path) -> None:
    Database(tmp_path / "db").put(row())
    document = json.loads(run("explain", "--shape", "128x4096x4096", "--gpu", "nvidia-h200", "--json").stdout)
    assert document["source"] == "torch" and "not measured" in document["reason"]
    allowed = json.loads(run("explain", "--shape", "128x4096x4096", "--arch", "sm_90a", "--unmeasured", "--json").stdout)
    assert allowed["source"] == "exact" and allowed["config_id"] == row().config.id


def test_a_row_that_names_an_algorithm_shows_it_beside_its_kernel(tmp_path: Path) -> None:
    named = with_algorithm(measured(128, 4096, 4096), lead=1.05)
    Database(tmp_path / "db").put(named)
    explained = run("explain", "--shape", "128x4096x4096", "--gpu", "nvidia-h200")
    assert explained.stdout.startswith(f"128x4096x4096 float16 NT: runs {algorithm_of().name} of cuBLASLt 130100\n")
    assert "the best kernel measured 1.100" in explained.stdout
    shown = run("show").stdout
    assert "1.100 ± 0.000" in shown and "1.155 ± 0.000" in shown and "cublaslt" in shown and named.config.id in shown
    (document,) = json.loads(run("show", "--json").stdout)
    assert document["choice"] == "cublaslt" and document["summary"]["cublaslt_ratio_to_cublas"] == pytest.approx(
        1.155, abs=5e-4
    )


def test_predict_ranks_the_named_configs_as_the_seed_measured_them() -> None:
    times = []
    for name in ("v7", "v8", "v9"):
        document = json.loads(run("predict", "--shape", "4096x4096x4096", "--config", name, "--json").stdout)
        assert document[0]["status"] == "predicted"
        times.append(document[0]["time_s"])
    assert times[0] > times[1] > times[2]


def test_predict_lists_the_best_in_order() -> None:
    document = json.loads(run("predict", "--shape", "128x4096x4096", "--arch", "sm_90a", "--best", "4", "--json").stdout)
    times = [entry["time_s"] for entry in document]
    assert len(times) == 4 and times == sorted(times)


def test_shapes_writes_a_file_that_tune_reads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    out = tmp_path / "shapes.json"
    result = run("shapes", "--model", str(tmp_path / "config.json"), "--tp", "8", "--tokens", "16", "--out", str(out))
    assert result.exit_code == 0 and "768x4096" in result.stdout
    assert {(s["n"], s["k"]) for s in json.loads(out.read_text())} == {
        (768, 4096), (4096, 512), (3584, 4096), (4096, 1792), (16032, 4096),
    }  # fmt: skip


def test_report_writes_one_page(tmp_path: Path) -> None:
    Database(tmp_path / "db").put(row())
    result = run("report", "--out", str(tmp_path / "page.html"), "--json")
    assert json.loads(result.stdout) == {"file": str(tmp_path / "page.html"), "rows": 1, "studies": 0, "trials": 0}
    assert "128x4096x4096" in (tmp_path / "page.html").read_text()


def test_databases_are_compared_merged_pruned_and_exported(tmp_path: Path) -> None:
    Database(tmp_path / "db").put(row(128))
    Database(tmp_path / "other").put_many([row(128), row(256)])
    assert run("diff", str(tmp_path / "db"), str(tmp_path / "db")).exit_code == 0
    different = run("diff", str(tmp_path / "db"), str(tmp_path / "other"), "--json")
    assert different.exit_code == 1 and json.loads(different.stdout)["added"] == [str(row(256).key)]
    dry = json.loads(run("merge", str(tmp_path / "other"), "--dry-run", "--json").stdout)
    assert dry["added"] == 1 and len(Database(tmp_path / "db").rows()) == 1
    assert "1 rows added, 0 replaced, 1 unchanged" in run("merge", str(tmp_path / "other")).stdout
    lines = run("export").stdout.splitlines()
    assert lines[0].startswith("gpu,arch") and [line.split(",")[6] for line in lines[1:]] == ["128", "256"]
    assert len(json.loads(run("prune", "--stale", "--json").stdout)) == 2
    assert Database(tmp_path / "db").rows() == []


def test_a_bundle_without_rows_is_refused(tmp_path: Path) -> None:
    result = run("bundle", "--out", str(tmp_path / "bundle"))
    assert result.exit_code == 1 and "no row for nvidia-h200" in result.stderr
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("command", [("bench", "--shape", "128x4096x4096"), ("verify",)])
def test_commands_that_measure_say_that_they_need_a_gpu(command: tuple[str, ...]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    result = run(*command)
    assert result.exit_code == 2 and "needs a GPU" in result.stderr


def test_doctor_names_every_part() -> None:
    result = run("doctor", "--json")
    parts = {item["name"]: item["state"] for item in json.loads(result.stdout)["items"]}
    assert result.exit_code == 0
    assert {"python", "torch", "cache", "database", "space sm_90a", "NVRTC (compiles)"} <= set(parts)


def test_help_of_every_command_works() -> None:
    for command in app.registered_commands:
        assert command.name is not None
        assert run(command.name, "--help").exit_code == 0


def test_without_a_command_the_help_is_printed() -> None:
    result = run()
    assert result.exit_code == 2 and "tune" in result.stdout and result.stderr == ""


@pytest.mark.parametrize(
    ("redirection", "message"), [(">/dev/full", "can't write results to stdout: "), (">&-", "stdout is closed")]
)
@pytest.mark.parametrize("command", ["--version", "show --space sm_90a", "show --json", "export"])
def test_results_that_cannot_be_written_are_one_clear_error(
    command: str, redirection: str, message: str, tmp_path: Path
) -> None:
    Database(tmp_path / "db").put(row())
    line = f"exec {sys.executable} -m autogemm {command} {redirection}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert len([text for text in done.stderr.splitlines() if text.startswith(("error", "Traceback", "Exception"))]) == 1


def test_the_module_runs_and_tells_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "autogemm", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("autogemm ")


@pytest.mark.slow
def test_tune_without_a_gpu_writes_a_predicted_row_and_compiles_nothing_twice(
    tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOGEMM_CACHE", str(kernel_cache))
    arguments = ("--arch", "sm_100a", "--predict", "--config", "v9", "--json")
    first = run("tune", "--shape", "4096x4096x4096", *arguments)
    assert first.exit_code == 0, first.stderr
    assert "predicting for B200 (sm_100a) by model; not measured" in first.stderr
    tuned = json.loads(first.stdout)["rows"][0]
    assert tuned["status"] == "predicted" and tuned["check"]["findings"] == [] and "measurement" not in tuned
    assert [r.config.id for r in Database(tmp_path / "db").rows()] == [named_config("v9", "sm_100a").id]
    second = json.loads(run("tune", "--shape", "300x520x264", *arguments).stdout)
    assert second["rows"][0]["run"]["compiled"] == 0
    again = json.loads(run("tune", "--shape", "4096x4096x4096", *arguments).stdout)
    assert again["rows"][0]["run"]["compiled"] == 0
    assert len(Database(tmp_path / "db").rows()) == 2
    text = run("tune", "--shape", "4096x4096x4096", *arguments[:-1]).stdout
    assert "PREDICTED by closed-form-2 (not measured)" in text and "cuBLAS" not in text


@pytest.mark.slow
def test_an_interrupted_tune_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autogemm", *TUNE, "--no-check", "--workers", "2"]
    # A session of its own, to find its processes by; the signal reaches only the first of them.
    ordinary = "import signal, sys, os; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    tuning = subprocess.Popen(
        [sys.executable, "-c", ordinary, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert tuning.stderr is not None
    said = []
    while "candidates" not in (line := tuning.stderr.readline()):
        assert line, said
        said.append(line)
    deadline = time.monotonic() + 60
    while len(_session(tuning.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(_session(tuning.pid)) == 3
    tuning.send_signal(signal.SIGINT)
    out, errors = tuning.communicate(timeout=60)
    assert tuning.returncode == 130 and out == "" and "interrupted" in errors and "Traceback" not in errors
    assert _session(tuning.pid) == []
    assert not list((tmp_path / "db").rglob("*.json"))


def _session(leader: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = status.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(status.parent.name))
    return found


def test_compile_and_check_a_named_config(tmp_path: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOGEMM_CACHE", str(kernel_cache))
    described = json.loads(run("compile", "--config", "v9", "--out", str(tmp_path / "out"), "--json").stdout)
    assert described["spill_bytes"] == 0 and Binary.read(Path(described["file"])).config == named_config("v9", "sm_100a")
    assert "gemm_kernel" in run("compile", "--config", "v9", "--emit", "cuda").stdout
    assert "tcgen05.mma" in run("compile", "--config", "v9", "--emit", "ptx").stdout
    assert "T.prim_func" in run("compile", "--config", "v9", "--emit", "tir").stdout
    cubin = json.loads(run("compile", "--config", "v9", "--emit", "cubin", "--out", str(tmp_path / "out"), "--json").stdout)
    assert Path(cubin["file"]).read_bytes()[:4] == b"\x7fELF"
    verdict = json.loads(run("check", "--config", "v9", "--seeds", "1", "--json").stdout)[0]
    assert verdict["passed"] and verdict["wrong_elements"] == 0


@pytest.mark.slow
def test_timelines_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    names = ("--trace", str(tmp_path / "t.json"), "--timeline", str(tmp_path / "t.html"))
    result = run("predict", "--shape", "512x512x256", "--config", "v7", "--config", "v9", *names, "--json")
    assert result.exit_code == 0, result.stderr
    assert len(json.loads(result.stdout)) == 2
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "simulated, not measured" in (tmp_path / "t.html").read_text()


@pytest.mark.parametrize(
    ("arch", "gpu", "predict", "expected"),
    [
        (None, None, False, ("nvidia-h200", 0, "")),
        ("sm_90a", 1, False, ("nvidia-h200", 1, "")),
        ("sm_100a", None, False, ("nvidia-b200", None, "the GPU here is NVIDIA H200 (sm_90a)")),
        (None, None, True, ("nvidia-b200", None, "asked to predict")),
        ("sm_90a", None, True, ("nvidia-h200", None, "asked to predict")),
    ],
)
def test_tune_measures_where_the_gpu_here_is_of_the_asked_arch(
    arch: str | None, gpu: int | None, predict: bool, expected: tuple[str, int | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Device(arch="sm_90a", gpu="nvidia-h200", sm_count=132, name="NVIDIA H200")
    monkeypatch.setattr("autogemm.local.local_device", lambda index=0: here)
    found = target.resolve(arch, gpu, predict=predict)
    assert (found.device.gpu, found.index, found.reason) == expected


def test_asking_for_a_gpu_of_another_arch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Device(arch="sm_90a", gpu="nvidia-h200", sm_count=132, name="NVIDIA H200")
    monkeypatch.setattr("autogemm.local.local_device", lambda index=0: here)
    with pytest.raises(InputError, match=r"--gpu 0 is NVIDIA H200 \(sm_90a\), not sm_100a"):
        target.resolve("sm_100a", 0, predict=False)
