"""A seeded sample of the sm_100a space, executed at both levels; scripts/check_space.py takes all of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType

import pytest
from script_modules import load_script

pytest.importorskip("tvm")

from autogemm.config import Config
from autogemm.errors import InputError
from autogemm.kernel import generate
from autogemm.resources import geometry
from autogemm.results import CheckReport, Level
from autogemm.simulate.check import check_config, exercising_shape
from autogemm.space import load_space

SPACE = load_space("sm_100a").binaries()
SAMPLE = random.Random(60).sample(SPACE, min(len(SPACE), 60))


def compact_shape(config: Config) -> tuple[int, int, int]:
    """Return the exercising shape cut to two by two ragged tiles, which one cluster works through."""
    m, n, k, _ = exercising_shape(config, "sm_100a")
    return m, n - 2 * geometry(config, "sm_100a").cluster_cols, k


def explain(report: CheckReport) -> str:
    return "\n".join(f"{f.kind}: {f.text}" for f in report.findings)


def test_the_sample_is_large_and_of_every_kind() -> None:
    assert len(SAMPLE) >= 60
    for name in ("blk_n", "cta_group", "num_consumer", "tmem_buffers", "pipe_depth", "epi_n"):
        assert {getattr(c, name) for c in SAMPLE} == {getattr(c, name) for c in SPACE}, name


@pytest.mark.parametrize("number", range(len(SAMPLE)), ids=lambda i: SAMPLE[i].id)
def test_a_kernel_of_the_space_is_clean_at_both_levels(number: int) -> None:
    config = SAMPLE[number]
    dtype = ("float16", "bfloat16")[number % 2]
    func = generate.prim_func(config, "sm_100a", dtype)
    levels: tuple[Level, ...] = ("tile", "ptx")
    for level in levels:
        report = check_config(
            config, "sm_100a", shape=compact_shape(config), dtype=dtype, level=level, seeds=(number,), func=func,
            sm_count=config.cta_group,
        )  # fmt: skip
        assert report.passed, f"{level} level: {explain(report)}"
        assert report.wrong_elements == 0 and report.max_error == 0.0


# ---- the script for all of it


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("check_space")


def test_parts_cover_the_space_once(script: ModuleType) -> None:
    parts = [script.part_of(SPACE, f"{i}/4") for i in (1, 2, 3, 4)]
    assert sorted(c.id for part in parts for c in part) == sorted(c.id for c in SPACE)
    for wrong in ("0/4", "5/4", "1", "a/b"):
        with pytest.raises(InputError, match="i/n"):
            script.part_of(SPACE, wrong)


def test_verdicts_are_kept_and_findings_fail_the_script(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "verdicts.json"
    monkeypatch.setattr("sys.argv", ["check_space.py", "--part", "1/93", "--seeds", "1", "--results", str(file)])
    assert script.main() == 0
    assert "1 kernels, tile and ptx level, 1 schedules each: 0 with findings" in capsys.readouterr().out
    document = json.loads(file.read_text())
    verdict = next(iter(document["verdicts"].values()))
    verdict["ptx"]["findings"] = ["race: planted"]
    file.write_text(json.dumps(document))
    assert script.main() == 1  # read from the file, not executed again
    assert "ptx: race: planted" in capsys.readouterr().out
    document["stamp"] = "another generator"
    file.write_text(json.dumps(document))
    assert script.main() == 0
