"""What this installation can do: each part that a job needs, whether it is there, and what to do where it is not."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from . import __version__
from .arch import ARCHS
from .database import Database
from .errors import AutogemmError
from .settings import cache_folder, nvcc_path
from .space import load_space

State = Literal["ok", "missing", "bad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One part of an installation.

    Attributes:
        state: ``bad`` is there but unusable.
        needed: True if tuning without a GPU can't do without it.
        detail: what was found, or what to do next.
    """

    name: str
    state: State
    needed: bool
    detail: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)


def examine(database: Database) -> list[Item]:
    """Return the state of everything autogemm uses; changes nothing but for a probe file that it removes again."""
    return [
        Item(name="python", state="ok", needed=True, detail=f"{platform.python_version()} at {sys.executable}"),
        Item(name="autogemm", state="ok", needed=True, detail=__version__),
        _package("TVM (generates kernels)", "apache-tvm", "tvm", True, "pip install autogemm[tune]"),
        _package("Optuna (searches)", "optuna", "optuna", True, "pip install autogemm[tune]"),
        _nvrtc(),
        _headers(),
        _nvcc(),
        _package("cuda-bindings (launches)", "cuda-bindings", "cuda.bindings", True, "pip install cuda-bindings"),
        _package("Plotly (reports)", "plotly", "plotly", False, "pip install autogemm[report]"),
        _package("PostgreSQL client", "psycopg2-binary", "psycopg2", False, "pip install autogemm[postgres]"),
        *_torch(),
        _writable("cache", cache_folder(), True),
        *_database(database),
        *_spaces(),
    ]


def _package(name: str, distribution: str, module: str, needed: bool, remedy: str) -> Item:
    try:
        if find_spec(module) is None:
            raise ModuleNotFoundError(module)
    except ModuleNotFoundError:
        return Item(name=name, state="missing", needed=needed, detail=f"install it with: {remedy}")
    try:
        found = version(distribution)
    except PackageNotFoundError:
        found = "version unknown"
    return Item(name=name, state="ok", needed=needed, detail=found)


def _nvrtc() -> Item:
    name, remedy = "NVRTC (compiles)", "install it with: pip install autogemm[tune]"
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return Item(name=name, state="missing", needed=True, detail=f"{error}; {remedy}")
    if int(status):
        return Item(name=name, state="bad", needed=True, detail=f"nvrtcVersion returned {status}")
    return Item(name=name, state="ok", needed=True, detail=f"{major}.{minor}")


def _headers() -> Item:
    name = "CUDA runtime headers"
    found = find_spec("nvidia.cu13") if find_spec("nvidia") is not None else None
    folders = [Path(p) / "include" for p in (found.submodule_search_locations or ())] if found is not None else []
    for folder in folders:
        if (folder / "cuda_runtime.h").is_file():
            return Item(name=name, state="ok", needed=True, detail=str(folder))
    return Item(name=name, state="missing", needed=True, detail="install them with: pip install autogemm[tune]")


def _nvcc() -> Item:
    name, asked = "nvcc (optional)", nvcc_path()
    if asked is None:
        on_path = shutil.which("nvcc")
        hint = f"; AUTOGEMM_NVCC={on_path} would use it instead" if on_path else ""
        return Item(name=name, state="missing", needed=False, detail=f"not used: NVRTC compiles{hint}")
    return _ran(name, [str(asked), "--version"], "AUTOGEMM_NVCC does not name a working nvcc")


def _ran(name: str, command: list[str], trouble: str) -> Item:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Item(name=name, state="bad", needed=True, detail=f"{trouble}: {error}")
    lines = [line for line in done.stdout.splitlines() if "release" in line] or done.stdout.splitlines() or [""]
    return Item(name=name, state="ok", needed=False, detail=lines[0].strip())


def _torch() -> list[Item]:
    try:
        import torch
    except ImportError as error:
        return [Item(name="torch", state="missing", needed=True, detail=f"{error}; install it with: pip install torch")]
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
    items = [Item(name="torch", state="ok", needed=True, detail=f"{torch.__version__}, {built}")]
    if not torch.cuda.is_available():
        return [
            *items,
            Item(name="GPU", state="missing", needed=False, detail="none usable by torch; tune predicts instead of measuring"),
        ]
    from .local import local_device

    for index in range(torch.cuda.device_count()):
        device = local_device(index)
        assert device is not None
        detail = f"{device.name} ({device.gpu}), {device.sm_count} SMs, {device.arch or 'no kernels are generated for it'}"
        detail += f", driver {device.driver}" if device.driver else ""
        detail += f", cuBLASLt {device.cublaslt}" if device.cublaslt else ", no cuBLASLt"
        items.append(Item(name=f"GPU {index}", state="ok" if device.arch else "bad", needed=False, detail=detail))
    return items


def _writable(name: str, folder: Path, needed: bool) -> Item:
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        size = "" if place == folder else " (will be made)"
        return Item(name=name, state="ok", needed=needed, detail=f"{folder}, writable{size}")
    return Item(name=name, state="bad", needed=needed, detail=f"{folder} can't be written to; set AUTOGEMM_{name.upper()[:5]}")


def _database(database: Database) -> list[Item]:
    items = []
    try:
        rows = database.rows()
    except AutogemmError as error:
        items.append(Item(name="database", state="bad", needed=True, detail=str(error)))
    else:
        measured = sum(row.status == "measured" for row in rows)
        detail = f"{database.folder}: {measured} measured rows, {len(rows) - measured} predicted"
        items.append(Item(name="database", state="ok", needed=True, detail=detail))
    access = _writable("db", database.folder, False)
    return [*items, access] if access.state != "ok" else items


def _spaces() -> list[Item]:
    def count(load: Callable[[], int], name: str) -> Item:
        try:
            return Item(name=f"space {name}", state="ok", needed=True, detail=f"{load()} kernels to compile")
        except AutogemmError as error:
            return Item(name=f"space {name}", state="bad", needed=True, detail=str(error))

    return [count(lambda a=name: len(load_space(a).binaries()), name) for name in ARCHS]  # type: ignore[misc]
