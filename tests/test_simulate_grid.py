"""Programmatic dependent launch on the CPU: what a kernel may touch while the one before on the stream still runs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tvm")

from mutants import run, source_of
from mutate import mutant
from mutations import CONFIGS, MUTATIONS, NOTHING, Mutation

from autogemm.kernel.lower import quick_tracing
from autogemm.results import Level
from autogemm.simulate.check import check_config

WAIT = "T.ptx.griddepcontrol.wait()"
FAULTS = {m.name: m for m in MUTATIONS if m.subject == "launch"}


def races(mutation: Mutation, folder: Path, level: Level = "tile") -> list[str]:
    """Return the texts about the previous kernel, after requiring that they are all there is to say."""
    (report,) = run(mutation, folder, level=level, seeds=(0,))
    texts = [f.text for f in report.findings]
    assert all(f.kind == "race" for f in report.findings) and all("previous kernel (griddepcontrol.wait)" in t for t in texts)
    return texts


@pytest.mark.parametrize("level", ["tile", "ptx"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_misplaced_wait_is_a_race_with_the_previous_kernel(name: str, level: Level, tmp_path: Path) -> None:
    assert races(FAULTS[name], tmp_path, level)


def test_the_finding_names_role_region_and_who_waits_in_vain(tmp_path: Path) -> None:
    texts = races(FAULTS["another warp waits for the previous kernel"], tmp_path)
    assert any(
        t.startswith("A[0:256, 0:64]: read by TMA load of cta0.wg0.w0 (TMA producer) is not ordered after the previous kernel "
                     "(griddepcontrol.wait), which may still write it; nothing orders it after the wait of cta0.wg1.w0")
        for t in texts
    ), texts  # fmt: skip
    texts = races(FAULTS["the previous kernel is not waited for"], tmp_path)
    assert any(
        t.startswith("D[") and "write by TMA store" in t and "may still use it; no warp of this cluster waits" in t
        for t in texts
    )


def test_every_kind_of_access_to_global_memory_is_checked(tmp_path: Path) -> None:
    texts = races(FAULTS["one CTA waits for the previous kernel"], tmp_path)
    verbs = {verb for verb in ("TMA load", "TMA store", "st.global", "ld.global", "atom.add") if any(verb in t for t in texts)}
    assert {"TMA load", "st.global", "atom.add"} <= verbs


def edit(config: str, new: str, *also: tuple[str, str]) -> Mutation:
    return Mutation(
        name="legal", arch_name="sm_90a", config=config, subject="launch", old=WAIT, new=new, also=also, every=True
    )  # fmt: skip


START, WARP, CLUSTER = "T.device_entry()", "T.cuda.warp_sync()", "T.cuda.cluster_sync()"
# The wait stands elsewhere, but its place in the clock reaches every access.
LEGAL = {
    "every thread waits first": edit("cooperative", NOTHING, (START, f"{START}; {WAIT}")),
    "the whole warp waits": edit("split", NOTHING, (WARP, f"{WARP}; {WAIT}")),
    "one warp of a cluster waits before its barrier": edit(
        "cooperative", NOTHING, (CLUSTER, f"if (cta_rank == 1) & (wg_id == 1) & (warp_id == 2): {WAIT}\n            {CLUSTER}")
    ),
    "the producer waits twice": edit("ping-pong", f"{WAIT}; {WAIT}"),
}


@pytest.mark.parametrize("name", LEGAL)
def test_a_wait_that_reaches_every_access_is_enough(name: str, tmp_path: Path) -> None:
    assert races(LEGAL[name], tmp_path) == []


def test_a_kernel_without_the_wait_is_launched_after_the_previous_one(tmp_path: Path) -> None:
    dropped = edit("split", NOTHING)
    text = source_of(dropped)
    module = mutant("sm90.py", [(text, dropped.apply(text))], tmp_path)
    config = CONFIGS["split"]
    with quick_tracing():
        func = module.build(config.binary, "float16")
    report = check_config(config, "sm_90a", seeds=(0,), func=func)
    assert report.passed and report.wrong_elements == 0
