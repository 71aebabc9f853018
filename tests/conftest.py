"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from autogemm.arch import ArchName
from autogemm.binary import Binary
from autogemm.config import named_config


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of compiled kernels for this test run: never the user's, and one for all of xdist's processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernel-cache"
    os.environ["AUTOGEMM_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def named_binary(kernel_cache: Path) -> Callable[[str, ArchName], Binary]:
    """Compile a named point of an arch's space, once per test run: ``named_binary("v9", "sm_100a")``."""
    from autogemm.compile.compiler import compile_config

    @cache
    def compiled(name: str, arch_name: ArchName) -> Binary:
        with pytest.MonkeyPatch.context() as patch:  # a test may have pointed this elsewhere
            patch.setenv("AUTOGEMM_CACHE", str(kernel_cache))
            return compile_config(named_config(name, arch_name), arch_name)

    return compiled
