"""Local variables read before their first write: found where they are used, named, and not where they are only copied."""

from __future__ import annotations

import operator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tvm")

from mutants import run
from mutations import SM90, Mutation

from autogemm.results import Level
from autogemm.simulate.unwritten import Unwritten, merge

FAULTS = {m.name: m for m in SM90 if m.subject == "register"}


class Uses:
    """Counts the uses of ``value``."""

    def __init__(self) -> None:
        self.count = 0
        self.value = Unwritten(self._used)

    def _used(self) -> None:
        self.count += 1


@pytest.mark.parametrize("name", ["add", "sub", "mul", "floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift", "eq", "lt"])
def test_arithmetic_on_either_side_is_a_use_and_goes_on(name: str) -> None:
    compute, uses = getattr(operator, name), Uses()
    assert compute(uses.value, 3) == compute(0, 3)
    compute(12, uses.value)
    assert uses.count == 2
    lanes = compute(np.arange(32), uses.value)
    assert lanes.shape == (32,) and uses.count == 3


def test_conversions_are_uses() -> None:
    uses = Uses()
    assert int(uses.value) == 0 and float(uses.value) == 0.0 and not uses.value and list(range(uses.value)) == []
    assert np.broadcast_to(np.asarray(uses.value), (32,)).sum() == 0
    assert {uses.value: 1} and -uses.value == 0 and ~uses.value == -1
    assert uses.count >= 8


def test_copies_and_lanes_that_are_written_are_no_uses() -> None:
    uses = Uses()
    copied = [uses.value, uses.value]
    mask = np.arange(32) < 16
    assert (merge(mask, np.arange(32), copied[0]) == np.arange(32)).all()
    assert uses.count == 0
    assert (merge(mask, np.arange(32), -np.ones(32, int))[16:] == -1).all()


@pytest.mark.parametrize("level", ["tile", "ptx"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_dropped_first_write_is_found(name: str, level: Level, tmp_path: Path) -> None:
    (report,) = run(FAULTS[name], tmp_path, level=level, seeds=(0,))
    assert "uninitialized" in {f.kind for f in report.findings}


@pytest.mark.parametrize(
    ("name", "variable"),
    [("the previous stage is never noted", "previous"), ("A's descriptor is never made", "lhs_desc"),
     ("accumulators are never converted", "packed"), ("the sum starts from nothing", "total")],
)  # fmt: skip
def test_the_finding_names_variable_and_role(name: str, variable: str, tmp_path: Path) -> None:
    (report,) = run(FAULTS[name], tmp_path, level="tile", seeds=(0,))
    assert f"cta0.wg1.w0 (MMA consumer): reads '{variable}' before writing it" in [f.text for f in report.findings]


def test_accumulators_that_never_start_anew_are_named(tmp_path: Path) -> None:
    never: Mutation = next(m for m in SM90 if m.name == "accumulation never starts anew")
    (report,) = run(never, tmp_path, level="ptx", seeds=(0,))
    assert any("reads 'acc' before writing it" in f.text for f in report.findings)
