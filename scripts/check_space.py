"""Execute every kernel of an arch's search space on the CPU, at both levels and under several schedules: a nightly check.

Usage: python scripts/check_space.py [--arch sm_100a] [--dtype float16] [--level tile|ptx] [--seeds 3] [--part 1/4]
                                     [--results FILE.json]
Each kernel runs at a small shape with ragged M, N and K, several tiles per cluster and a ring that wraps, with integer inputs
that must come out exactly. Verdicts are added to the results file one by one and those already in it are not repeated, as long
as generator, simulator and seeds are the same; without a file, nothing is kept. Exit status 1 on any finding. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autogemm.arch import ArchName
from autogemm.binary import write_whole
from autogemm.config import Config
from autogemm.errors import InputError
from autogemm.kernel.generate import generator_hash, prim_func
from autogemm.results import Level
from autogemm.search.gate import simulator_hash
from autogemm.simulate.check import check_config
from autogemm.space import load_space

LEVELS: tuple[Level, ...] = ("tile", "ptx")


def part_of(configs: list[Config], part: str) -> list[Config]:
    """Return part ``i/n`` of ``configs``: every n-th from the i-th on, so that parts cost about the same.

    Raises:
        InputError: not ``i/n`` with 1 <= i <= n.
    """
    number, _, count = part.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise InputError(f"--part takes i/n with 1 <= i <= n, got {part!r}")
    return configs[int(number) - 1 :: int(count)]


def known(file: Path | None, stamp: str) -> dict[str, Any]:
    """Return the verdicts in ``file``, none if they are of another generator or simulator."""
    if file is None or not file.exists():
        return {}
    document = json.loads(file.read_text(encoding="utf-8"))
    verdicts: dict[str, Any] = document["verdicts"] if document.get("stamp") == stamp else {}
    return verdicts


def check(config: Config, arch_name: ArchName, dtype: str, levels: Iterable[Level], seeds: tuple[int, ...]) -> dict[str, Any]:
    """Return per level the seconds spent and the findings as texts."""
    func = prim_func(config, arch_name, dtype)
    verdicts = {}
    for level in levels:
        started = time.process_time()
        report = check_config(config, arch_name, dtype=dtype, level=level, seeds=seeds, func=func)
        seconds = round(time.process_time() - started, 2)
        verdicts[level] = {"shape": report.shape, "s": seconds, "findings": [f"{f.kind}: {f.text}" for f in report.findings]}
    return verdicts


def main() -> int:
    """Check what is missing in the results, print findings and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", choices=("sm_90a", "sm_100a"), default="sm_100a")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--level", choices=LEVELS, help="one level only; default: both")
    parser.add_argument("--seeds", type=int, default=3, help="schedules per kernel and level; the first has no random delays")
    parser.add_argument("--part", default="1/1", metavar="i/n", help="every n-th kernel from the i-th on")
    parser.add_argument("--results", type=Path, help="file of verdicts: continued if it exists")
    given = parser.parse_args()
    levels = LEVELS if given.level is None else (given.level,)
    stamp = f"{generator_hash()}/{simulator_hash()}/{given.arch}/{given.dtype}/{given.seeds}"
    verdicts = known(given.results, stamp)
    configs = part_of(load_space(given.arch).binaries(given.dtype), given.part)
    bad = 0
    for number, config in enumerate(configs, 1):
        done = verdicts.setdefault(config.id, {})
        missing = [level for level in levels if level not in done]
        done.update(check(config, given.arch, given.dtype, missing, tuple(range(given.seeds))) if missing else {})
        findings = [(level, text) for level in levels for text in done[level]["findings"]]
        bad += bool(findings)
        for level, text in findings:
            print(f"{given.arch} {config.id} {level}: {text}", flush=True)
        if given.results is not None and missing:
            write_whole(given.results, json.dumps({"stamp": stamp, "verdicts": verdicts}, indent=1).encode())
        if sys.stderr.isatty() or number % 10 == 0:
            sys.stderr.write(f"{number} of {len(configs)} kernels, {bad} with findings\n")
    spent = {level: sum(verdicts[c.id][level]["s"] for c in configs) for level in levels}
    print(
        f"{given.arch} {given.dtype}: {len(configs)} kernels, {' and '.join(levels)} level, {given.seeds} schedules each: "
        f"{bad} with findings ({', '.join(f'{level} {s:.0f} s' for level, s in spent.items())} of CPU)"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"check_space: {error}")
