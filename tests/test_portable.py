"""Folders of kernels for other machines: every candidate comes out once, with its verdict or with why it is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest

from autogemm.arch import ArchName
from autogemm.binary import Binary
from autogemm.config import Config, named_config
from autogemm.errors import AutogemmError, CompileError
from autogemm.results import CheckReport, Finding
from autogemm.search import portable
from autogemm.search.progress import Rejected

V9 = named_config("v9", "sm_100a")
RACY, SPILLING, ODD = (V9.with_knob("EPI_N", n) for n in (16, 32, 128))


class Gate:
    """Passes everything but RACY; can't judge ODD."""

    closed = False

    def submit(self, config: Config, arch_name: ArchName, dtype: str) -> Future[CheckReport]:
        verdict: Future[CheckReport] = Future()
        if config == ODD:
            verdict.set_exception(AutogemmError("no model of that operation"))
            return verdict
        findings = (Finding(kind="race", text="two writers"),) if config == RACY else ()
        verdict.set_result(
            CheckReport(
                findings=findings, level="tile", shape=(8, 8, 8), seeds=(0,), max_error=0.0, wrong_elements=0, cycles=1.0,
                model="test",
            )
        )  # fmt: skip
        return verdict

    def close(self) -> None:
        self.closed = True


def test_each_kernel_comes_with_its_verdict_or_a_reason(
    named_binary: Callable[[str, ArchName], Binary], monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = named_binary("v9", "sm_100a")

    def compiled(configs: Sequence[Config], *_: object) -> Iterator[tuple[Config, Binary | CompileError]]:
        for config in configs:
            yield config, CompileError("spills 8 bytes") if config == SPILLING else binary

    monkeypatch.setattr(portable, "compile_many", compiled)
    gate = Gate()
    found = dict(portable.portable_binaries([V9, RACY, SPILLING, ODD], "sm_100a", "float16", gate=gate))
    assert gate.closed
    passed = found[V9]
    assert isinstance(passed, Binary) and passed.check is not None and passed.check["passed"]
    assert found[RACY] == Rejected(config=RACY, stage="check", reason="two writers")
    assert found[SPILLING] == Rejected(config=SPILLING, stage="compile", reason="spills 8 bytes")
    assert found[ODD] == Rejected(config=ODD, stage="check", reason="no model of that operation")
    unchecked = dict(portable.portable_binaries([V9, RACY], "sm_100a", "float16", check=False, gate=Gate()))
    assert [b.check for b in unchecked.values() if isinstance(b, Binary)] == [None, None]
