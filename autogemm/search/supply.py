"""Where candidates come from: the compiler, working ahead of the evaluator, or a folder of compiled kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

from ..arch import ArchName
from ..binary import Binary
from ..compile.toolchain import toolchain
from ..config import Config
from ..errors import AutogemmError, CompileError
from ..kernel.generate import generator_hash
from ..record import CheckSummary
from ..results import CheckReport
from .evaluate import Candidate
from .gate import Gate, report_from_json
from .progress import Rejected

CompileMany = Callable[[Sequence[Config]], Iterator[tuple[Config, "Binary | CompileError"]]]


class Supply(Protocol):
    """Turns Configs into Candidates."""

    @property
    def origin(self) -> tuple[str, str]:
        """Generator hash and compiler of its kernels."""

    def prepare(self, configs: Iterable[Config]) -> None:
        """Start working on ``configs``, in this order, without waiting for them."""

    def get(self, config: Config, *, checked: bool) -> Candidate | Rejected:
        """Return the Candidate of ``config``, waiting for it, or why there is none.

        Args:
            checked: wait for the CPU check too and refuse what did not pass.
        """

    @property
    def compiled(self) -> int:
        """Kernels compiled so far; those from a cache or a folder don't count."""

    def close(self) -> None:
        """Stop working ahead."""


class CompilingSupply:
    """Compiles in the background, in the order given, and checks what is compiled if a gate is given."""

    def __init__(
        self, arch_name: ArchName, dtype: str, *, compile_many: CompileMany, is_cached: Callable[[Config], bool],
        gate: Gate | None, check_ahead: bool = False,
    ) -> None:  # fmt: skip
        """Prepare; ``prepare`` and ``get`` start compiling.

        Args:
            compile_many: yields every Config with its Binary or why there is none, as they get ready.
            is_cached: whether a Config needs no compilation; asked before it is compiled.
            gate: checks candidates; None lets them pass unchecked.
            check_ahead: check every candidate as soon as it is compiled, not only those asked for.
        """
        self._arch_name, self._dtype = arch_name, dtype
        self._gate, self._check_ahead = gate, check_ahead
        self._compile_many, self._is_cached = compile_many, is_cached
        self._ready: dict[Config, Binary | CompileError] = {}
        self._verdicts: dict[Config, Future[CheckReport]] = {}
        self._expected: set[Config] = set()
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._closed = False
        self.compiled = 0

    @property
    def origin(self) -> tuple[str, str]:
        """See Supply."""
        return generator_hash(), toolchain().compiler

    def prepare(self, configs: Iterable[Config]) -> None:
        """See Supply."""
        with self._changed:
            new = list(dict.fromkeys(c.binary for c in configs if c.binary not in self._expected))
            self._expected.update(new)
        if new:
            threading.Thread(target=self._feed, args=(new,), name="autogemm-supply", daemon=True).start()

    def get(self, config: Config, *, checked: bool) -> Candidate | Rejected:
        """See Supply."""
        self.prepare([config])
        with self._changed:
            while config.binary not in self._ready and self._failure is None:
                self._changed.wait()
            if config.binary not in self._ready:
                assert self._failure is not None
                raise self._failure
            result = self._ready[config.binary]
        if isinstance(result, CompileError):
            return Rejected(config=config, stage="compile", reason=str(result))
        if not checked or self._gate is None:
            return Candidate(config=config, binary=result)
        return _judged(config, result, self._verdict(config.binary))

    def close(self) -> None:
        """See Supply."""
        self._closed = True
        if self._gate is not None:
            self._gate.close()

    def _verdict(self, binary: Config) -> Future[CheckReport]:
        assert self._gate is not None
        with self._changed:
            if binary not in self._verdicts:
                self._verdicts[binary] = self._gate.submit(binary, self._arch_name, self._dtype)
            return self._verdicts[binary]

    def _feed(self, configs: list[Config]) -> None:
        try:
            new = {config for config in configs if not self._is_cached(config)}
            for config, result in self._compile_many(configs):
                if self._closed:
                    return
                with self._changed:
                    self._ready[config.binary] = result
                    self.compiled += config.binary in new
                    self._changed.notify_all()
                if self._check_ahead and self._gate is not None and isinstance(result, Binary):
                    self._verdict(config.binary)
        except BaseException as error:  # handed to whoever waits in get
            with self._changed:
                self._failure = error
                self._changed.notify_all()


class FolderSupply:
    """Kernels that were compiled and checked elsewhere; needs neither compiler nor TVM."""

    compiled = 0

    def __init__(self, binaries: Iterable[Binary], *, checked: bool = True) -> None:
        """Offer ``binaries``; with ``checked`` off, those that no check has cleared too."""
        self._binaries = {binary.config: binary for binary in binaries}
        self._checked = checked

    @property
    def configs(self) -> list[Config]:
        """The Configs in the folder, launch-time knobs at their default."""
        return list(self._binaries)

    @property
    def origin(self) -> tuple[str, str]:
        """See Supply; several where the folder is a mixture."""
        generators = {binary.manifest.generator for binary in self._binaries.values()}
        return "+".join(sorted(generators)), "+".join(sorted({binary.compiler for binary in self._binaries.values()}))

    def prepare(self, configs: Iterable[Config]) -> None:
        """See Supply; all is there."""

    def get(self, config: Config, *, checked: bool) -> Candidate | Rejected:
        """See Supply. A kernel counts as checked if its folder holds its verdict."""
        binary = self._binaries.get(config.binary)
        if binary is None:
            return Rejected(config=config, stage="compile", reason="the folder of candidates does not hold it")
        if not (checked and self._checked):
            return Candidate(config=config, binary=binary)
        if binary.check is None:
            return Rejected(config=config, stage="check", reason="its folder holds no verdict of the CPU check")
        verdict: Future[CheckReport] = Future()
        verdict.set_result(report_from_json(binary.check))
        return _judged(config, binary, verdict)

    def close(self) -> None:
        """See Supply."""


def _judged(config: Config, binary: Binary, verdict: Future[CheckReport]) -> Candidate | Rejected:
    try:
        report = verdict.result()
    except AutogemmError as error:
        return Rejected(config=config, stage="check", reason=str(error))
    if not report.passed:
        return Rejected(config=config, stage="check", reason="; ".join(finding.text for finding in report.findings))
    return Candidate(config=config, binary=binary, check=CheckSummary.of(report))
