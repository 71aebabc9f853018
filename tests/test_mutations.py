"""Every planted fault is found, under every schedule tried: a part of them here, all of them where slow tests run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from script_modules import load_script

pytest.importorskip("tvm")

from mutants import found, run, source_of
from mutations import CONFIGS, MUTATIONS, SM90, SM100, Mutation

from autogemm.arch import arch
from autogemm.constraints import violations
from autogemm.results import Level

LEVELS: tuple[Level, ...] = ("tile", "ptx")
# Every tenth, and never the same subject only: about 25 of them in less than a minute.
FAST = SM100[::9] + SM90[::11]


def identity(mutation: Mutation) -> str:
    return f"{mutation.arch_name}-{mutation.config}-{mutation.name}".replace(" ", "_")


def assert_found(mutation: Mutation, folder: Path, level: Level, seeds: tuple[int, ...]) -> None:
    verdicts = [found(v) for v in run(mutation, folder, level=level, seeds=seeds)]
    missed = [seed for seed, verdict in zip(seeds, verdicts, strict=True) if not verdict]
    assert not missed, f"not found under seeds {missed}: {mutation.name}"


def test_there_are_at_least_60_faults_over_both_archs_and_all_subjects() -> None:
    assert len(SM100) >= 60 and len(SM90) >= 60
    for part in (SM100, SM90):
        assert len({m.name for m in part}) == len(part)
    assert {m.subject for m in MUTATIONS} == {
        "role", "phase", "count", "bytes", "mask", "fence", "barrier", "allocation", "index", "store",
        "launch", "register",
    }  # fmt: skip


def test_every_fault_still_applies_to_the_generators_source() -> None:
    for mutation in MUTATIONS:
        text = source_of(mutation)
        changed = mutation.apply(text)
        assert changed != text
        ast.parse(changed)


def test_an_edit_whose_text_is_gone_fails_loudly() -> None:
    with pytest.raises(LookupError, match="no longer holds"):
        MUTATIONS[0].apply("nothing of a kernel")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_kernels_that_faults_are_planted_in_are_legal(name: str) -> None:
    arch_name = next(m.arch_name for m in MUTATIONS if m.config == name)
    assert violations(CONFIGS[name], arch(arch_name).name) == []


@pytest.mark.parametrize("mutation", FAST, ids=identity)
def test_a_planted_fault_is_found(mutation: Mutation, tmp_path: Path) -> None:
    assert_found(mutation, tmp_path, LEVELS[FAST.index(mutation) % 2], (0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=identity)
def test_every_planted_fault_is_found_under_every_seed(mutation: Mutation, level: Level, tmp_path: Path) -> None:
    assert_found(mutation, tmp_path, level, (0, 1, 2, 3, 4))


def test_the_table_of_planted_faults_tells_what_was_missed() -> None:
    script = load_script("mutation_table")
    assert script.cell(["race", "deadlock, race", "race"]) == "race (deadlock)"
    assert script.cell(["race", "", ""]) == "**missed** under 2 schedules"
    assert script.cell(None) == "not run"
    fault = SM90[0]
    document = script.table({script.key(fault): {"tile": ["race"], "ptx": ["", "race"]}}, 2)
    assert "1 of 1 at tile level, 0 of 1 at ptx level" in document
    assert f"| {fault.config} | {fault.subject} | {fault.name} | race | **missed** under 1 schedules |" in document
