"""Run every planted fault of tests/mutations.py through the check and write docs/mutations.md: as what each was found.

Usage: python scripts/mutation_table.py [--seeds 5] [--part sm_100a|sm_90a] [--results FILE.json] [--write]
Verdicts are added to the results file one by one, and those already in it are not repeated; --write makes the table of them.
Several minutes to half an hour of CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from mutants import found, run  # noqa: E402
from mutations import CONFIGS, MUTATIONS, Mutation  # noqa: E402

from autogemm.errors import UnsupportedOp  # noqa: E402

LEVELS = {"sm_100a": "tile", "sm_90a": "ptx"}


def key(mutation: Mutation) -> str:
    """Return what identifies a fault in the results file."""
    return f"{mutation.arch_name}/{mutation.config}/{mutation.name}"


def table(results: dict[str, list[str]], seeds: int) -> str:
    """Return the document."""
    missed = [k for k, verdicts in results.items() if not all(verdicts)]
    lines = [
        "# Planted faults",
        "",
        "What the CPU check says about kernels that are broken on purpose. Each fault is one edit of the generator's own",
        "source (`tests/mutations.py`), so the list follows the generator; the mutant is traced and executed at a small shape",
        "with ragged edges, several tiles per cluster and a ring that wraps. `scripts/mutation_table.py` writes this file.",
        "",
        f"{len(results)} of {len(MUTATIONS)} faults ran, under {seeds} schedules each.",
        f"{len(results) - len(missed)} of them were found under every schedule.",
        "sm_100a kernels run as traced (tile level), sm_90a kernels after lowering (ptx level). *Found as* lists the kinds of",
        "finding under the first schedule; where other schedules show further kinds, those follow in brackets.",
    ]
    for arch_name in LEVELS:
        lines += ["", f"## {arch_name}", "", "| kernel | subject | fault | found as |", "|---|---|---|---|"]
        for mutation in MUTATIONS:
            if mutation.arch_name == arch_name and key(mutation) in results:
                verdicts = results[key(mutation)]
                first = set(verdicts[0].split(", "))
                others = sorted({kind for v in verdicts[1:] for kind in v.split(", ")} - first - {""})
                text = ", ".join(sorted(first)) if all(verdicts) else f"**missed** under {verdicts.count('')} schedules"
                lines.append(
                    f"| {mutation.config} | {mutation.subject} | {mutation.name} | {text}"
                    + (f" ({', '.join(others)})" if others else "")
                    + " |"
                )
    lines += ["", "Kernels:", "", *(f"- {name}: `{config.id}`" for name, config in CONFIGS.items()), ""]
    return "\n".join(lines)


def main() -> None:
    """Run what is missing in the results, report misses, write the table if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="schedules per fault")
    parser.add_argument("--part", choices=tuple(LEVELS), help="faults of one arch only")
    parser.add_argument("--results", type=Path, default=Path("mutations.json"))
    parser.add_argument("--write", action="store_true", help="write docs/mutations.md")
    given = parser.parse_args()
    results: dict[str, list[str]] = json.loads(given.results.read_text()) if given.results.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for mutation in MUTATIONS:
            if key(mutation) in results or given.part not in (None, mutation.arch_name):
                continue
            level = LEVELS[mutation.arch_name]
            try:
                verdicts = [found(v) for v in run(mutation, Path(folder), level=level, seeds=tuple(range(given.seeds)))]
            except UnsupportedOp as error:
                sys.stderr.write(f"not run: {key(mutation)}: {error}\n")
                continue
            results[key(mutation)] = verdicts
            given.results.write_text(json.dumps(results, indent=1))
            if not all(verdicts):
                sys.stderr.write(f"missed: {key(mutation)}\n")
    known = {key(m): results[key(m)] for m in MUTATIONS if key(m) in results}
    sys.stderr.write(f"{sum(all(v) for v in known.values())} of {len(known)} found ({len(MUTATIONS)} in the list)\n")
    if given.write:
        (ROOT / "docs" / "mutations.md").write_text(table(known, given.seeds), encoding="utf-8")


if __name__ == "__main__":
    main()
