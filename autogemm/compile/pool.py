"""Worker processes that compile: each imports TVM once, and one that dies costs a single candidate.

Requests and answers are those of worker.py; results travel through the kernel cache.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from ..arch import ArchName
from ..config import Config
from ..errors import AutogemmError, CompileError, InputError, MissingDependency
from ..settings import cache_folder, nvcc_path
from .children import ChildDied, Children, ChildrenClosed

WORKER_COMMAND: Final = (sys.executable, "-m", "autogemm.compile.worker")


def core_count() -> int:
    """Return the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class WorkerPool:
    """Up to ``size`` worker processes, started when needed and kept until ``close``. Its methods are thread-safe."""

    def __init__(self, size: int, command: Sequence[str] = WORKER_COMMAND) -> None:
        self.size = size
        self._children = Children(command)

    def compile(
        self, configs: Sequence[Config], arch_name: ArchName, dtype: str
    ) -> Iterator[tuple[Config, CompileError | None]]:
        """Yield each Config once it is in the cache (None), or with why it can't be.

        Raises:
            MissingDependency, InputError: what a worker raised that is about the installation, not about one candidate.
        """
        threads = ThreadPoolExecutor(min(self.size, len(configs)), thread_name_prefix="autogemm-compile")
        try:
            running = {threads.submit(self._compile_one, config, arch_name, dtype): config for config in configs}
            for done in as_completed(running):
                yield running[done], done.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """End all workers, for good; one that is compiling is killed."""
        self._children.close()

    def _compile_one(self, config: Config, arch_name: ArchName, dtype: str) -> CompileError | None:
        try:
            return _outcome(self._children.ask({"knobs": config.to_knobs(), "arch": arch_name, "dtype": dtype}))
        except ChildrenClosed:
            return CompileError(f"no process is left to compile {config}")
        except ChildDied as died:
            return CompileError(f"the compiling process died ({died}) on {config}")


def _outcome(answer: dict[str, Any]) -> CompileError | None:
    """Return or raise what a worker's answer says."""
    kind, text = answer.get("error"), str(answer.get("text"))
    if kind is None:
        return None
    if kind == "CompileError":
        return CompileError(text)
    raise {"MissingDependency": MissingDependency, "InputError": InputError}.get(str(kind), AutogemmError)(text)


# One pool per size and environment: workers inherit where the cache and the compiler are.
_pools: dict[tuple[int, Path, Path | None], WorkerPool] = {}
_pools_lock = threading.Lock()


def shared_pool(workers: int | None = None) -> WorkerPool:
    """Return this process's pool of ``workers`` processes (default: one per core).

    Raises:
        InputError: ``workers`` is below 1.
    """
    size = core_count() if workers is None else workers
    if size < 1:
        raise InputError(f"workers={workers}; use at least 1")
    key = (size, cache_folder(), nvcc_path())
    with _pools_lock:
        if key not in _pools:
            _pools[key] = WorkerPool(size)
        return _pools[key]


def close_shared_pools() -> None:
    """End this process's compile workers, if any; a later call starts new ones."""
    with _pools_lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()


atexit.register(close_shared_pools)
