"""The experiments behind docs/memory-model.md: they name what exists, hangs are results, the table shows what was recorded."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from script_modules import load_script

ROOT = Path(__file__).resolve().parents[1]


EXPERIMENTS, TABLE = load_script("gpu_memory_model"), load_script("memory_model_table")
CUDA = (ROOT / "scripts" / "gpu_memory_model.cu").read_text(encoding="utf-8")
DOCUMENT = (ROOT / "docs" / "memory-model.md").read_text(encoding="utf-8")


def test_every_experiment_has_its_kernels_and_a_row_of_the_table() -> None:
    entries = set(re.findall(r"^ENTRY\(\d+\) (\w+)\(", CUDA, re.MULTILINE))
    used = {name for e in EXPERIMENTS.EXPERIMENTS for name in (e.kernel, e.before, e.after) if name}
    assert entries == used | {"fill"}
    subjects = {line.split(" | ")[0].removeprefix("| ") for line in DOCUMENT.splitlines() if line.startswith("| ")}
    assert {e.subject for e in EXPERIMENTS.EXPERIMENTS} <= subjects


def test_every_fault_tried_on_a_gpu_is_one_of_the_planted_ones() -> None:
    from mutations import SM90

    assert set(EXPERIMENTS.MUTANTS) <= {(m.config, m.name) for m in SM90}


# A child that works, one item that hangs, one that dies.
CHILD = """
import json, sys, time
for item in sys.argv[1:]:
    print(json.dumps({"start": item}), flush=True)
    if item == "hang": time.sleep(60)
    if item == "die": raise SystemExit("something broke")
    print(json.dumps({"done": item, "launches": 1}), flush=True)
"""


def test_children_that_hang_or_die_cost_one_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EXPERIMENTS, "SILENCE_S", 1.0)
    said = list(EXPERIMENTS.reports([sys.executable, "-c", CHILD], ["a", "hang", "b", "die", "c"], time.monotonic() + 30))
    assert [line["done"] for line in said] == ["a", "hang", "b", "die", "c"]
    assert said[1]["error"] == "hang" and said[3]["error"] == "the process died: something broke"
    assert [line["launches"] for line in said] == [1, 0, 1, 0, 1]


def test_a_child_that_can_not_start_ends_the_run() -> None:
    said = list(EXPERIMENTS.reports([sys.executable, "-c", "raise SystemExit('no GPU')"], ["a", "b"], time.monotonic() + 30))
    assert said == [{"failed": "no GPU"}]


def counts(launches: int, wrong: int, error: str = "") -> dict[str, Any]:
    return {"launches": launches, "wrong_launches": wrong, "checked": 10, "wrong": wrong, "stuck": 0, "error": error}


RECORDED = {
    "gpu": "NVIDIA H200", "date": "2026-11-29", "compiler": "nvrtc 13.0.88", "shape": [2040, 2056, 1032],
    "rules": [
        {"kernel": "k", "subject": "previous kernel", "variant": 0, "how": "kept", **counts(200, 0)},
        {"kernel": "k", "subject": "previous kernel", "variant": 1, "how": "no wait", **counts(200, 7)},
        {"kernel": "x", "subject": "wgmma", "variant": 1, "how": "early", **counts(3, 1)},
    ],
    "faults": [
        {"config": "tall", "name": "unbroken", "subject": "", "found": "", **counts(400, 0)},
        {"config": "tall", "name": "no fence", "subject": "fence", "found": "race",
         "advisory": "(C7519) warpgroup.arrive is injected", **counts(0, 0, "hang")},
    ],
}  # fmt: skip


def test_the_table_is_rendered_from_what_was_recorded() -> None:
    once = TABLE.render(DOCUMENT, RECORDED)
    row = next(line for line in once.splitlines() if line.startswith("| previous kernel |"))
    assert row.endswith("| no wait: 7 of 200; kept: 0 of 200 |")
    assert next(line for line in once.splitlines() if line.startswith("| wgmma |")).endswith("|  |")  # nothing kept to compare
    assert "without the fault:\n0 of 400 launches wrong" in once
    assert "| tall | no fence | race | hang; ptxas: (C7519) warpgroup.arrive |" in once
    assert TABLE.render(once, RECORDED) == once  # again changes nothing
    with pytest.raises(ValueError, match="no row nothing"):
        TABLE.with_column(DOCUMENT, {"nothing": "x"})


def test_the_document_shows_the_recorded_data() -> None:
    recorded = json.loads((ROOT / "tests" / "data" / "memory_model_h200.json").read_text(encoding="utf-8"))
    assert TABLE.render(DOCUMENT, recorded) == DOCUMENT
    kept = [r for r in recorded["rules"] if r["variant"] == 0] + [f for f in recorded["faults"] if not f["subject"]]
    assert len(kept) >= 18 and sum(line["wrong_launches"] for line in kept) == 0
