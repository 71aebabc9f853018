"""Run every planted fault of tests/mutations.py through the check and write docs/mutations.md: as what each was found.

Usage: python scripts/mutation_table.py [--seeds 5] [--part sm_100a|sm_90a] [--level tile|ptx] [--results FILE.json] [--write]
Each fault runs at both levels. Verdicts are added to the results file one by one, and those already in it are not repeated, as
long as generator and simulator are the same; --write makes the table of them. About half an hour of CPU.
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
from autogemm.kernel.generate import generator_hash  # noqa: E402
from autogemm.results import Level  # noqa: E402
from autogemm.search.gate import simulator_hash  # noqa: E402

ARCHS = ("sm_100a", "sm_90a")
LEVELS: tuple[Level, ...] = ("tile", "ptx")
Verdicts = dict[str, dict[str, list[str]]]  # fault -> level -> one verdict per schedule


def key(mutation: Mutation) -> str:
    """Return what identifies a fault in the results file."""
    return f"{mutation.arch_name}/{mutation.config}/{mutation.name}"


def cell(verdicts: list[str] | None) -> str:
    """Return as what a fault was found at one level, or that it was missed."""
    if verdicts is None:
        return "not run"
    if not all(verdicts):
        return f"**missed** under {verdicts.count('')} schedules"
    first = set(verdicts[0].split(", "))
    others = sorted({kind for v in verdicts[1:] for kind in v.split(", ")} - first)
    return ", ".join(sorted(first)) + (f" ({', '.join(others)})" if others else "")


def table(results: Verdicts, seeds: int) -> str:
    """Return the document."""

    def count(level: str) -> str:
        runs = [levels[level] for levels in results.values() if level in levels]
        return f"{sum(all(v) for v in runs)} of {len(runs)}"

    lines = [
        "# Planted faults",
        "",
        "What the CPU check says about kernels that are broken on purpose. Each fault is one edit of the generator's own",
        "source (`tests/mutations.py`), so the list follows the generator; the mutant is traced and executed at a small shape",
        "with ragged edges, several tiles per cluster and a ring that wraps. `scripts/mutation_table.py` writes this file.",
        "",
        f"{len(MUTATIONS)} faults, under {seeds} schedules each, at both levels: as traced (tile) and after lowering (ptx).",
        f"Found under every schedule: {count('tile')} at tile level, {count('ptx')} at ptx level. The columns list the kinds",
        "of finding under the first schedule; where other schedules show further kinds, those follow in brackets. Bodies of",
        "sm_90a are PTX instructions at either level; lowering rewrites their control flow, addresses and tensor maps.",
        "The same faults on a GPU: [memory-model.md](memory-model.md).",
    ]
    for arch_name in ARCHS:
        lines += ["", f"## {arch_name}", "", "| kernel | subject | fault | tile | ptx |", "|---|---|---|---|---|"]
        for mutation in MUTATIONS:
            if mutation.arch_name == arch_name and key(mutation) in results:
                cells = " | ".join(cell(results[key(mutation)].get(level)) for level in LEVELS)
                lines.append(f"| {mutation.config} | {mutation.subject} | {mutation.name} | {cells} |")
    lines += ["", "Kernels:", "", *(f"- {name}: `{config.id}`" for name, config in CONFIGS.items()), ""]
    return "\n".join(lines)


def known(file: Path, stamp: str) -> Verdicts:
    """Return the verdicts in ``file``, none if they are of another generator, simulator or number of schedules."""
    document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    verdicts: Verdicts = document["verdicts"] if document.get("stamp") == stamp else {}
    return verdicts


def main() -> None:
    """Run what is missing in the results, report misses, write the table if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="schedules per fault and level")
    parser.add_argument("--part", choices=ARCHS, help="faults of one arch only")
    parser.add_argument("--level", choices=LEVELS, help="one level only")
    parser.add_argument("--results", type=Path, default=Path("mutations.json"))
    parser.add_argument("--write", action="store_true", help="write docs/mutations.md")
    given = parser.parse_args()
    stamp = f"{generator_hash()}/{simulator_hash()}/{given.seeds}"
    results = known(given.results, stamp)
    seeds = tuple(range(given.seeds))
    with tempfile.TemporaryDirectory() as folder:
        for mutation in MUTATIONS:
            done = results.setdefault(key(mutation), {})
            for level in LEVELS:
                if level in done or given.part not in (None, mutation.arch_name) or given.level not in (None, level):
                    continue
                try:
                    done[level] = [found(v) for v in run(mutation, Path(folder), level=level, seeds=seeds)]
                except UnsupportedOp as error:
                    sys.stderr.write(f"not run: {key(mutation)} at {level} level: {error}\n")
                    continue
                given.results.write_text(json.dumps({"stamp": stamp, "verdicts": results}, indent=1), encoding="utf-8")
                if not all(done[level]):
                    sys.stderr.write(f"missed: {key(mutation)} at {level} level\n")
    kept = {key(m): results[key(m)] for m in MUTATIONS if results[key(m)]}
    for level in LEVELS:
        runs = [levels[level] for levels in kept.values() if level in levels]
        sys.stderr.write(f"{level}: {sum(all(v) for v in runs)} of {len(runs)} found ({len(MUTATIONS)} in the list)\n")
    if given.write:
        (ROOT / "docs" / "mutations.md").write_text(table(kept, given.seeds), encoding="utf-8")


if __name__ == "__main__":
    main()
