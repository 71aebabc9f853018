"""Put what an H200 showed into docs/memory-model.md: a column of its first table, and a table of planted faults.

Usage: python scripts/memory_model_table.py tests/data/memory_model_h200.json
The file is what scripts/gpu_memory_model.py wrote.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
DOCUMENT: Final = ROOT / "docs" / "memory-model.md"
COLUMN: Final = "seen on an H200"
HEADING: Final = "## Planted faults on an H200"


def share(line: dict[str, Any]) -> str:
    """Return ``12 of 200``: launches with anything wrong, and whether waits gave up or an error ended it."""
    text = f"{line['wrong_launches']} of {line['launches']}" + (" (waits gave up)" if line["stuck"] else "")
    if line["error"]:
        return f"{text}, then {line['error']}" if line["launches"] else str(line["error"])
    return text


def observed(rules: list[dict[str, Any]]) -> dict[str, str]:
    """Return the column's text by row subject; an experiment whose kept rule was not run says nothing."""
    cells: dict[str, list[str]] = {}
    for kept in rules:
        if kept["variant"] == 0:
            broken = [r for r in rules if r["kernel"] == kept["kernel"] and r["variant"]]
            text = ", ".join(f"{r['how']}: {share(r)}" for r in broken)
            cells.setdefault(kept["subject"], []).append(f"{text}; kept: {share(kept)}")
    return {subject: "<br>".join(texts) for subject, texts in cells.items()}


def with_column(text: str, cells: dict[str, str]) -> str:
    """Return the document with the first table's column set.

    Raises:
        ValueError: the table has no row for one of ``cells``.
    """
    lines, seen, inside = text.split("\n"), set(), False
    for i, line in enumerate(lines):
        if line.startswith("| subject | choice |"):
            inside = True
            lines[i] = f"| subject | choice | PTX ISA section | {COLUMN} |"
        elif inside and line.startswith("|---"):
            lines[i] = "|---|---|---|---|"
        elif inside and line.startswith("| "):
            parts = [part.strip() for part in line.strip().strip("|").split(" | ")][:3]
            seen.add(parts[0])
            lines[i] = f"| {' | '.join(parts)} | {cells.get(parts[0], '')} |"
        elif inside:
            break
    if set(cells) - seen:
        raise ValueError(f"the table has no row {', '.join(sorted(set(cells) - seen))}")
    return "\n".join(lines)


def faults_section(document: dict[str, Any]) -> str:
    """Return the section on planted faults."""
    unbroken = [f for f in document["faults"] if not f["subject"]]
    runs, bad = sum(f["launches"] for f in unbroken), sum(f["wrong_launches"] for f in unbroken)
    shape = "x".join(map(str, document["shape"]))
    lines = [
        HEADING, "",
        f"Kernels with a [planted fault](mutations.md) at {shape}, compared with float64 after every launch:",
        f"{document['gpu']}, {document['date']}, {document['compiler']}. The same kernels without the fault:",
        f"{bad} of {runs} launches wrong. Where the fault is about the previous kernel, that one writes A just before.", "",
        "| kernel | fault | the CPU check says | launches wrong |", "|---|---|---|---|",
    ]  # fmt: skip
    for fault in document["faults"]:
        if fault["subject"]:
            note = f"; ptxas: {fault['advisory'].split(' is ')[0]}" if fault.get("advisory") else ""
            lines.append(f"| {fault['config']} | {fault['name']} | {fault['found']} | {share(fault)}{note} |")
    return "\n".join(lines) + "\n"


def with_section(text: str, section: str) -> str:
    """Return the document with its section on planted faults replaced, or put before "What is not modelled"."""
    rest = re.sub(rf"{re.escape(HEADING)}\n.*?(?=\n## |\Z)", "", text, flags=re.DOTALL).replace("\n\n\n", "\n\n")
    before, after = rest.split("## What is not modelled")
    return f"{before}{section}\n## What is not modelled{after}"


def render(text: str, document: dict[str, Any]) -> str:
    """Return docs/memory-model.md with what ``document`` holds."""
    return with_section(with_column(text, observed(document["rules"])), faults_section(document))


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit(str(__doc__))
    data = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    DOCUMENT.write_text(render(DOCUMENT.read_text(encoding="utf-8"), data), encoding="utf-8")
