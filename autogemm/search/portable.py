"""Kernels for another machine: compiled here, checked here, with the verdict attached."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

from ..arch import ArchName
from ..binary import Binary
from ..compile.compiler import compile_many
from ..config import Config
from ..errors import AutogemmError, CompileError
from ..results import CheckReport
from .gate import Gate, SimulatorGate
from .progress import Rejected


def portable_binaries(
    configs: Sequence[Config], arch_name: ArchName, dtype: str, *, check: bool = True, workers: int | None = None,
    gate: Gate | None = None,
) -> Iterator[tuple[Config, Binary | Rejected]]:  # fmt: skip
    """Yield every Config with its Binary, or with why it has none, as they get ready.

    Args:
        check: execute each kernel on the CPU and attach the verdict; without one, no device tuning takes the kernel.
        workers: processes for compiling, and as many for checking; one per core by default.
        gate: what checks; by default the CPU execution in child processes.

    Raises:
        IllegalConfig: a Config breaks a rule of the arch.
        MissingDependency: TVM or the compiler is not installed.
    """
    judge = gate if gate is not None else SimulatorGate(workers or os.cpu_count() or 1)
    waiting: deque[tuple[Config, Binary, Future[CheckReport]]] = deque()
    try:
        for config, result in compile_many(configs, arch_name, dtype, workers):
            if isinstance(result, CompileError):
                yield config, Rejected(config=config, stage="compile", reason=str(result))
            elif not check:
                yield config, result
            else:
                waiting.append((config, result, judge.submit(config, arch_name, dtype)))
            while waiting and waiting[0][2].done():
                yield _judged(*waiting.popleft())
        while waiting:
            yield _judged(*waiting.popleft())
    finally:
        judge.close()


def _judged(config: Config, binary: Binary, verdict: Future[CheckReport]) -> tuple[Config, Binary | Rejected]:
    try:
        report = verdict.result()
    except AutogemmError as error:
        return config, Rejected(config=config, stage="check", reason=str(error))
    if not report.passed:
        return config, Rejected(config=config, stage="check", reason="; ".join(f.text for f in report.findings))
    return config, replace(binary, check=report.to_json())
