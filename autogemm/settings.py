"""Where things live: every AUTOGEMM_* environment variable is read here and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from .errors import InputError


def cache_folder() -> Path:
    """Return the folder of compiled binaries and verdicts: ``AUTOGEMM_CACHE``, or ``autogemm`` in the user's cache."""
    given = os.environ.get("AUTOGEMM_CACHE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "autogemm"


def kernel_folders() -> tuple[Path, ...]:
    """Return more folders in which dispatch looks for compiled kernels: ``AUTOGEMM_KERNELS``, separated as in ``PATH``."""
    return tuple(Path(part).expanduser() for part in os.environ.get("AUTOGEMM_KERNELS", "").split(os.pathsep) if part)


def nvcc_path() -> Path | None:
    """Return the nvcc to use in place of NVRTC: ``AUTOGEMM_NVCC``, or None."""
    given = os.environ.get("AUTOGEMM_NVCC")
    return Path(given).expanduser() if given else None


def database_folder() -> Path:
    """Return the tuned-config database: ``AUTOGEMM_DB``, or the rows that ship with the package."""
    given = os.environ.get("AUTOGEMM_DB")
    return Path(given).expanduser() if given else data_folder("tuned")


def allow_unmeasured() -> bool:
    """Return whether dispatch may run kernels that nothing measured backs: ``AUTOGEMM_UNMEASURED=1``; by default it may not."""
    return os.environ.get("AUTOGEMM_UNMEASURED", "").lower() in ("1", "true", "yes", "on")


def data_folder(name: Literal["search_spaces", "tuned"]) -> Path:
    """Return a folder that ships with the package: beside it in a checkout, inside it in an installed wheel.

    Raises:
        InputError: the installation lacks it.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "data" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise InputError(f"this installation lacks its {name} folder; reinstall autogemm")
