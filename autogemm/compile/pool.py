"""Worker processes that compile: each imports TVM once, and one that dies costs a single candidate.

A worker is a plain child interpreter that takes a request a line on stdin and answers a line on stdout (see worker.py). Unlike
``multiprocessing``, that never imports the caller's main module, so scripts and notebooks need no ``__main__`` guard. Results
travel through the kernel cache.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

from ..arch import ArchName
from ..config import Config
from ..errors import AutogemmError, CompileError, InputError, MissingDependency
from ..settings import cache_folder, nvcc_path

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
        self._command = command
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._all: set[_Worker] = set()
        self._closed = False
        self._lock = threading.Lock()

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
        with self._lock:
            self._closed = True
            workers, self._all = self._all, set()
            self._idle = queue.LifoQueue()
        for worker in workers:
            worker.kill()

    def _compile_one(self, config: Config, arch_name: ArchName, dtype: str) -> CompileError | None:
        worker = self._take()
        if worker is None:
            return CompileError(f"no process is left to compile {config}")
        try:
            answer = worker.ask({"knobs": config.to_knobs(), "arch": arch_name, "dtype": dtype})
        except (OSError, ValueError):
            with self._lock:
                self._all.discard(worker)
            return CompileError(f"the compiling process died ({worker.kill()}) on {config}")
        self._idle.put(worker)
        return _outcome(answer)

    def _take(self) -> _Worker | None:
        """Return an idle worker or a new one; None once the pool is closed, whose threads may still be at their queue."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            with self._lock:
                if self._closed:
                    return None
                worker = _Worker(self._command)
                self._all.add(worker)
            return worker


class _Worker:
    """One child process and the pipe to it."""

    def __init__(self, command: Sequence[str]) -> None:
        # One thread per worker: the linear algebra libraries that TVM's imports load would start one per core.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 -- lives as long as the worker
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment,
            text=True, encoding="utf-8",
        )  # fmt: skip

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())  # an empty line, at end of file, is no JSON
        if not isinstance(answer, dict):
            raise ValueError("not an answer")
        return answer

    def kill(self) -> str:
        """End the process if it still runs, and return how it ended and the last thing it said."""
        self._process.kill()
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        return (f"signal {-code}" if code < 0 else f"exit code {code}") + (f": {said[-1]}" if said else "")


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
