"""The gate: no Config is measured or recommended before its kernel has been executed on the CPU without a finding.

Verdicts are kept under the cache folder, keyed by what they depend on: generator, simulator, arch, dtype and Config.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

from ..arch import ArchName
from ..binary import write_whole
from ..compile.children import ChildDied, Children, ChildrenClosed
from ..config import Config
from ..decoding import decode
from ..errors import AutogemmError, InputError
from ..fingerprint import fingerprint
from ..kernel.generate import generator_hash
from ..results import CheckReport
from ..settings import cache_folder

# Schedules explored per kernel: the deterministic one and two with random delays.
SEEDS: Final = (0, 1, 2)

_PACKAGE: Final = Path(__file__).resolve().parent.parent


class Gate(Protocol):
    """Decides whether a kernel may be tried."""

    def submit(self, config: Config, arch_name: ArchName, dtype: str) -> Future[CheckReport]:
        """Start checking; the Future raises an AutogemmError if the check itself can't be done."""

    def close(self) -> None:
        """Stop what is running."""


class SimulatorGate:
    """Executes kernels on the CPU in child processes (each imports TVM once), or takes the verdict of an earlier run."""

    def __init__(self, workers: int, folder: Path | None = None) -> None:
        self._folder = folder if folder is not None else cache_folder() / "verdicts"
        self._threads = ThreadPoolExecutor(max(1, workers), thread_name_prefix="autogemm-check")
        self._children = Children((sys.executable, "-m", "autogemm.search.gate"))

    def submit(self, config: Config, arch_name: ArchName, dtype: str) -> Future[CheckReport]:
        """See Gate."""
        return self._threads.submit(self._verdict, config.binary, arch_name, dtype)

    def close(self) -> None:
        """See Gate."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._children.close()

    def _verdict(self, config: Config, arch_name: ArchName, dtype: str) -> CheckReport:
        path = self._folder / f"{verdict_key(config, arch_name, dtype)}.json"
        known = _read(path)
        if known is not None:
            return known
        try:
            answer = self._children.ask({"knobs": config.to_knobs(), "arch": arch_name, "dtype": dtype, "seeds": SEEDS})
        except ChildrenClosed:
            raise AutogemmError(f"no process is left to check {config}") from None
        except ChildDied as died:
            raise AutogemmError(f"the checking process died ({died}) on {config}") from died
        if "error" in answer:
            raise AutogemmError(str(answer["error"]))
        report = report_from_json(answer)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, (json.dumps(report.to_json(), indent=1) + "\n").encode())
        except OSError as error:
            raise InputError(f"can't write to {self._folder}: {error.strerror}; set AUTOGEMM_CACHE") from error
        return report


def verdict_key(config: Config, arch_name: ArchName, dtype: str) -> str:
    """Return the file stem of a verdict: readable, then a hash of all that the verdict depends on."""
    parts = (generator_hash(), simulator_hash(), arch_name, dtype, config.binary.id, repr(SEEDS))
    return f"{arch_name}-{dtype}-{config.binary.id}-{hashlib.sha256('/'.join(parts).encode()).hexdigest()[:16]}"


@lru_cache(maxsize=1)
def simulator_hash() -> str:
    """Return the content hash of the simulator's source files."""
    return fingerprint(sorted((_PACKAGE / "simulate").glob("*.py")))


def report_from_json(document: dict[str, Any]) -> CheckReport:
    """Return the CheckReport that ``CheckReport.to_json`` wrote.

    Raises:
        InputError: it is none.
    """
    return decode(CheckReport, {name: value for name, value in document.items() if name != "passed"}, "check report")


def _read(path: Path) -> CheckReport | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return report_from_json(document) if isinstance(document, dict) else None
    except (OSError, ValueError, InputError):
        return None  # counts as missing and is written anew


def _serve() -> None:
    """Answer requests on stdin until it ends; what the check prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from ..simulate.check import check_config

    for line in sys.stdin:
        request = json.loads(line)
        try:
            report = check_config(
                Config.from_knobs(request["knobs"]), request["arch"], dtype=request["dtype"], seeds=tuple(request["seeds"])
            )
            answer = report.to_json()
        except AutogemmError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
