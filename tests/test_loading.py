"""load compiles one kernel ahead and keeps it where dispatch finds it; it is the only part of dispatch that compiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatch_fakes import CONFIG, H200, SKINNY, binary_of, measured, predicted

import autogemm
from autogemm.arch import ArchName
from autogemm.binary import Binary
from autogemm.config import NAMED, Config
from autogemm.database import Database
from autogemm.device import Device
from autogemm.dispatch import CompilerCache
from autogemm.errors import AutogemmError, IllegalConfig, InputError
from autogemm.kernel_store import FolderKernels, KernelKey, kept_folder
from autogemm.loading import compile_rows, load

V9 = NAMED["sm_100a"]["v9"]


@pytest.fixture
def empty(tmp_path: Path) -> Database:
    return Database(tmp_path / "db")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Put a fake in place of the compiler, and a cache of its own; return what it is asked for."""
    asked: list[str] = []

    def compile_config(config: Config, arch_name: str, dtype: str) -> Binary:
        asked.append(config.binary.id)
        return binary_of(config, arch=arch_name, dtype=dtype)

    def compile_many(configs: list[Config], arch_name: str, dtype: str, workers: int | None) -> Any:
        return ((config, compile_config(config, arch_name, dtype)) for config in configs)

    monkeypatch.setattr("autogemm.compile.compiler.compile_config", compile_config)
    monkeypatch.setattr("autogemm.compile.compiler.compile_many", compile_many)
    monkeypatch.setenv("AUTOGEMM_CACHE", str(tmp_path / "cache"))
    return asked


def test_a_loaded_kernel_shows_its_source_code_and_manifest(
    named_binary: Callable[[str, ArchName], Binary], empty: Database
) -> None:
    binary = named_binary("v9", "sm_100a")
    kernel = autogemm.load(4096, 4096, 4096, arch="sm_100a", config=V9, database=empty)
    assert kernel.binary.sha256 == binary.sha256 and kernel.cubin[:4] == b"\x7fELF"
    assert kernel.manifest.entry in kernel.cuda and "tcgen05" in kernel.cuda
    assert kernel.config == V9 and kernel.reason == "given by the caller"
    key = KernelKey(arch="sm_100a", dtype="float16", layout="NT", epilogue="none", config=V9.binary)
    for source in (FolderKernels(), CompilerCache()):
        found = source.find(key)
        assert found.binary is not None and found.binary.sha256 == binary.sha256


def test_the_compilers_cache_says_what_it_lacks(kernel_cache: Path) -> None:
    config = V9.with_knob("PIPE_DEPTH", 2)
    key = KernelKey(arch="sm_100a", dtype="bfloat16", layout="NT", epilogue="none", config=config)
    assert config.id in CompilerCache().find(key).reason
    assert (
        "sm_80"
        in CompilerCache().find(KernelKey(arch="sm_80", dtype="float16", layout="NT", epilogue="none", config=V9)).reason
    )


def test_load_takes_the_rows_config_and_compiles_it_once(empty: Database, compiled: list[str]) -> None:
    empty.put(measured(64, 128, 256, config=SKINNY))
    for _ in range(2):
        kernel = load(64, 128, 256, device=H200, database=empty)
        assert kernel.config == SKINNY and kernel.row is not None and "1.100" in kernel.reason
    assert compiled == [SKINNY.binary.id]
    assert [path.suffix for path in sorted(kept_folder().iterdir())] == [".cubin", ".json"]


def test_load_takes_a_predicted_row_and_one_that_favours_cublas_too(empty: Database, compiled: list[str]) -> None:
    empty.put_many([predicted(64, 128, 256, config=SKINNY), measured(8, 128, 256, config=SKINNY, ratio=0.9)])
    for m, words in ((64, "predicted"), (8, "cuBLAS is faster")):
        kernel = load(m, 128, 256, device=H200, database=empty)
        assert kernel.config == SKINNY and words in kernel.reason


def test_without_a_row_load_takes_the_models_best_and_says_that_it_is_a_prediction(
    empty: Database, compiled: list[str]
) -> None:
    kernel = load(4096, 4096, 4096, dtype="bf16", arch="sm_90a", database=empty)
    assert kernel.row is None and "prediction" in kernel.reason and kernel.manifest.dtype == "bfloat16"
    assert kernel.config.binary.id == compiled[0]
    unknown = Device(arch="sm_90a", gpu="nvidia-something", sm_count=120)
    assert load(4096, 4096, 4096, device=unknown, database=empty).row is None


def test_a_row_of_an_older_generator_is_compiled_anew(empty: Database, compiled: list[str]) -> None:
    empty.put(measured(64, 128, 256))
    kept = binary_of(CONFIG, generator="gen-0")
    kept.write(kept_folder())
    assert load(64, 128, 256, device=H200, database=empty).manifest.generator == "gen-1"
    assert compiled == [CONFIG.binary.id]


@pytest.mark.parametrize(
    "shape, options, error",
    [
        ((0, 128, 256), {}, InputError),
        ((64, 127, 256), {}, IllegalConfig),
        ((64, 128, 256), {"dtype": "float8"}, InputError),
        ((64, 128, 256), {"arch": "sm_70"}, InputError),
        ((64, 128, 256), {"config": CONFIG.with_knob("PIPE_DEPTH", 99), "arch": "sm_90a"}, IllegalConfig),
        ((64, 128, 256), {"config": CONFIG, "arch": "sm_100a"}, IllegalConfig),
    ],
)
def test_what_can_not_be_loaded_is_one_error_and_compiles_nothing(
    empty: Database, compiled: list[str], shape: tuple[int, int, int], options: dict[str, Any], error: type[AutogemmError]
) -> None:
    with pytest.raises(error):
        load(*shape, database=empty, **options)
    assert compiled == [] and not kept_folder().exists()


def test_calling_a_kernel_without_a_gpu_is_one_clear_error(empty: Database, compiled: list[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    kernel = load(64, 128, 256, arch="sm_90a", database=empty, config=CONFIG)
    with pytest.raises(AutogemmError, match="CUDA"):
        kernel(torch.zeros(64, 256).half(), torch.zeros(128, 256).half())


def test_compiling_the_rows_of_a_database_keeps_each_kernel_once(empty: Database, compiled: list[str]) -> None:
    rows = [measured(64, 128, 256), measured(8, 128, 256), measured(16, 128, 256, config=SKINNY),
            measured(24, 128, 256, ratio=0.9)]  # fmt: skip
    done = list(compile_rows(rows))
    assert sorted(row.key.m for row, _ in done) == [8, 16, 64]
    assert all(isinstance(result, Binary) for _, result in done)
    assert sorted(compiled) == sorted([CONFIG.binary.id, SKINNY.binary.id])
