"""A bundle carries rows, kernels and its loader, is the same bytes each time, and is refused once anything is changed."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cublaslt_fakes import algorithm_of
from dispatch_fakes import CONFIG, H200, SKINNY, FakeMachine, binary_of, dispatcher_of, measured, operands, with_algorithm

import autogemm.bundle as bundle_module
import autogemm.dispatch as dispatch
from autogemm.bundle import BundleReport, load_bundle, make_bundle
from autogemm.database import Database
from autogemm.device import Device
from autogemm.errors import InputError, NothingFound
from autogemm.problem import Problem

SHAPES = [Problem(m=64, n=128, k=256), Problem(m=8, n=128, k=256), Problem(m=16, n=128, k=256), Problem(m=24, n=128, k=256)]


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    """Rows of three shapes, cuBLAS being faster on the last, and the kernels of the first two."""
    found = Database(tmp_path / "db")
    found.put_many(
        [
            measured(64, 128, 256),
            measured(8, 128, 256, config=SKINNY),
            measured(16, 128, 256, ratio=0.9),
            measured(4096, 4096, 4096),
        ]
    )
    for config in (CONFIG, SKINNY):
        binary_of(config).write(tmp_path / "kernels")
    monkeypatch.setenv("AUTOGEMM_KERNELS", str(tmp_path / "kernels"))
    monkeypatch.setenv("AUTOGEMM_CACHE", str(tmp_path / "cache"))
    return found


def make(database: Database, out: Path, problems: list[Problem] | None = SHAPES) -> BundleReport:
    return make_bundle(problems, device=H200, database=database, out=out, compiling=False)


@pytest.mark.parametrize("name", ["bundle", "bundle.zip"])
def test_a_bundle_holds_the_rows_and_kernels_of_its_shapes(database: Database, tmp_path: Path, name: str) -> None:
    report = make(database, tmp_path / name)
    assert (report.rows, report.kernels, report.cublas, report.missing) == (3, 2, ("16x128x256",), ("24x128x256",))
    bundle = load_bundle(report.path, install=False, sha256=report.sha256)
    assert {row.key.problem.shape for row in bundle.rows} == {"64x128x256", "8x128x256", "16x128x256"}
    assert {binary.config for binary in bundle.binaries} == {CONFIG.binary, SKINNY.binary}
    assert bundle.sha256 == report.sha256


def test_a_bundle_carries_algorithms_without_needing_their_kernels(database: Database, tmp_path: Path) -> None:
    lacking = CONFIG.with_knob("PIPE_DEPTH", 3)  # not compiled
    rows = [
        with_algorithm(measured(64, 128, 256, date="2026-12-01T00:00:00Z")),
        with_algorithm(measured(24, 128, 256, config=lacking), algorithm=algorithm_of(9)),
        with_algorithm(measured(16, 128, 256, ratio=0.9, config=lacking, date="2026-12-01T00:00:00Z"), lead=1.3),
    ]
    database.put_many(rows)
    report = make(database, tmp_path / "bundle.zip")
    assert report.cublaslt == ("64x128x256", "16x128x256", "24x128x256") and report.cublas == report.missing == ()
    bundle = load_bundle(report.path, install=False)
    assert {binary.config for binary in bundle.binaries} == {CONFIG.binary, SKINNY.binary}
    for version, expected in ((130100, [66, 9, 66]), (1, [CONFIG.binary, None, None])):
        machine = FakeMachine(gpu=replace(H200, cublaslt=version))
        dispatcher = dispatcher_of([], machine=machine)
        bundle.install(dispatcher)
        ran: list[object] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for m in (64, 24, 16):
                machine.launches.clear()
                dispatcher.matmul(*operands(m, 128, 256))
                launch = machine.launches[-1] if machine.launches else {"config": None}
                ran.append(launch["algorithm"].algo_id if "algorithm" in launch else launch["config"])
        assert ran == expected


def test_without_shapes_every_row_of_the_gpu_is_taken(database: Database, tmp_path: Path) -> None:
    assert make(database, tmp_path / "all", problems=None).rows == 4
    with pytest.raises(NothingFound, match="no row for nvidia-b200"):
        make_bundle(None, device=Device.of_gpu("nvidia-b200"), database=database, out=tmp_path / "none")


@pytest.mark.parametrize("name", ["a", "a.zip"])
def test_equal_input_gives_equal_bundles(database: Database, tmp_path: Path, name: str) -> None:
    first, second = make(database, tmp_path / "one" / name), make(database, tmp_path / "two" / name)
    assert first.sha256 == second.sha256
    if name.endswith(".zip"):
        assert first.path.read_bytes() == second.path.read_bytes()


def test_an_installed_bundle_serves_products_without_the_database(database: Database, tmp_path: Path) -> None:
    bundle = load_bundle(make(database, tmp_path / "bundle").path, install=False)
    machine = FakeMachine()
    dispatcher = dispatcher_of([], machine=machine)
    bundle.install(dispatcher)
    for m, config in ((64, CONFIG), (8, SKINNY)):
        a, b = operands(m, 128, 256)
        dispatcher.matmul(a, b)
        assert machine.launches[-1]["config"] == config.binary
    dispatcher.matmul(*operands(16, 128, 256))
    assert len(machine.launches) == 2 and "cuBLAS is faster" in dispatcher.explain(*operands(16, 128, 256)).reason


def test_load_bundle_installs_into_the_shared_dispatcher(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine()
    monkeypatch.setattr(dispatch, "_current", dispatcher_of([], machine=machine))
    load_bundle(make(database, tmp_path / "bundle").path)
    dispatch.matmul(*operands(64, 128, 256))
    assert len(machine.launches) == 1


def _edit(path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change one file of a bundle, in a folder or a zip."""
    if path.is_dir():
        (path / name).write_bytes(change((path / name).read_bytes()))
        return
    with zipfile.ZipFile(path) as archive:
        files = {entry: archive.read(entry) for entry in archive.namelist()}
    files[name] = change(files[name])
    with zipfile.ZipFile(path, "w") as archive:
        for entry, content in files.items():
            archive.writestr(entry, content)


@pytest.mark.parametrize("form", ["bundle", "bundle.zip"])
@pytest.mark.parametrize("what", ["cubin", "manifest", "loader", "rows", "hashes"])
def test_a_bundle_with_anything_changed_is_refused(database: Database, tmp_path: Path, form: str, what: str) -> None:
    path = make(database, tmp_path / form).path
    kernel = f"kernels/{binary_of(CONFIG).name}"
    name, change = {
        "cubin": (f"{kernel}.cubin", lambda content: content[:-1] + b"?"),
        "manifest": (f"{kernel}.json", lambda content: content.replace(b'"smem_bytes": 200000', b'"smem_bytes": 100000')),
        "loader": ("python/autogemm/dispatch.py", lambda content: content + b"\n# more\n"),
        "rows": ("bundle.json", lambda content: content.replace(b'"m": 64', b'"m": 65')),
        "hashes": ("bundle.json", _forged_hash(f"{kernel}.cubin")),
    }[what]
    before = path.read_bytes() if path.is_file() else (path / name).read_bytes()
    _edit(path, name, change)
    assert (path.read_bytes() if path.is_file() else (path / name).read_bytes()) != before
    with pytest.raises(InputError, match="changed"):
        load_bundle(path, install=False)


def _forged_hash(name: str) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        document = json.loads(content)
        document["files"][name] = "0" * 64
        return json.dumps(document).encode()

    return change


def test_a_bundle_forged_as_a_whole_is_refused_by_its_identity(database: Database, tmp_path: Path) -> None:
    trusted = make(database, tmp_path / "bundle")
    forged = make(database, tmp_path / "forged", problems=SHAPES[:1])
    load_bundle(forged.path, install=False)
    with pytest.raises(InputError, match="identity"):
        load_bundle(forged.path, install=False, sha256=trusted.sha256)


def test_a_file_too_few_or_too_many_is_refused(database: Database, tmp_path: Path) -> None:
    path = make(database, tmp_path / "bundle").path
    (path / "python" / "autogemm" / "extra.py").write_text("")
    with pytest.raises(InputError, match=r"unlisted file python/autogemm/extra\.py"):
        load_bundle(path, install=False)
    (path / "python" / "autogemm" / "extra.py").unlink()
    cubin = path / "kernels" / f"{binary_of(CONFIG).name}.cubin"
    cubin.unlink()
    with pytest.raises(InputError, match="lacks file kernels"):
        load_bundle(path, install=False)


def test_what_is_no_bundle_or_of_a_newer_schema_is_one_clear_error(database: Database, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no bundle at"):
        load_bundle(tmp_path / "nowhere")
    (tmp_path / "text.zip").write_text("not a zip")
    with pytest.raises(InputError, match="can't read bundle"):
        load_bundle(tmp_path / "text.zip")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"lacks bundle\.json"):
        load_bundle(tmp_path / "empty")
    path = make(database, tmp_path / "bundle").path
    index = json.loads((path / "bundle.json").read_bytes())
    (path / "bundle.json").write_text(json.dumps({**index, "schema": 2}))
    with pytest.raises(InputError, match="newer than 1; upgrade autogemm"):
        load_bundle(path)


def test_an_index_that_matches_its_own_hash_is_still_read_with_care(database: Database, tmp_path: Path) -> None:
    path = make(database, tmp_path / "bundle").path
    index = json.loads((path / "bundle.json").read_bytes())
    broken = {**index["rows"][0], "status": "guessed"}
    for change, message in (
        ({"rows": None}, "rows must be a list and files an object"),
        ({"files": None}, "rows must be a list and files an object"),
        ({"schema": True}, "has no schema number"),
        ({"rows": [index["rows"][0]] * 2}, "holds two rows for"),
        ({"rows": [*index["rows"], broken]}, f"bundle, row {len(index['rows'])}: row status must be measured or predicted"),
    ):
        document = {**index, **change}
        document["sha256"] = bundle_module._self_hash(document)
        (path / "bundle.json").write_text(json.dumps(document))
        with pytest.raises(InputError, match=message):
            load_bundle(path, install=False)


def test_nothing_is_overwritten_and_nothing_is_left_behind(database: Database, tmp_path: Path) -> None:
    out = tmp_path / "place" / "bundle"
    make(database, out)
    with pytest.raises(InputError, match="exists already"):
        make(database, out)
    with pytest.raises(InputError, match="not compiled"):
        make_bundle(
            [Problem(m=64, n=128, k=264)], device=H200, database=_with_row_lacking_kernel(tmp_path),
            out=out.parent / "b", compiling=False,
        )  # fmt: skip
    assert [p.name for p in out.parent.iterdir()] == ["bundle"]


def _with_row_lacking_kernel(tmp_path: Path) -> Database:
    database = Database(tmp_path / "other")
    database.put(measured(64, 128, 264, config=CONFIG.with_knob("PIPE_DEPTH", 3)))
    return database


def test_a_bundle_runs_with_nothing_but_torch_and_the_driver_bindings(database: Database, tmp_path: Path) -> None:
    path = make(database, tmp_path / "bundle.zip").path
    program = f"""
import sys
class Refuse:
    names = ("tvm", "optuna", "yaml", "typer", "rich", "plotly", "cuda.bindings.nvrtc", "autogemm.compile", "autogemm.search",
             "autogemm.kernel", "autogemm.simulate", "autogemm.space")
    def find_spec(self, name, path=None, target=None):
        if any(name == refused or name.startswith(refused + ".") for refused in self.names):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import autogemm, torch
assert autogemm.__file__.startswith({str(path)!r}), autogemm.__file__
bundle = autogemm.load_bundle({str(path)!r})
a, b = torch.randn(64, 256).half(), torch.randn(128, 256).half().t()
assert torch.equal(autogemm.matmul(a, b), a @ b)
assert autogemm.linear(a, b.t()).shape == (64, 128)
from autogemm.dispatch import dispatcher
print(len(dispatcher().table.rows), len(bundle.binaries), autogemm.explain(a, b).reason)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(path / "python"), "PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 2 the tensors are on cpu")
