"""Search spaces: values only, legal Configs out, clear refusals."""

from pathlib import Path

import pytest

from autogemm.arch import ARCH_NAMES, ARCHS
from autogemm.config import NAMED
from autogemm.constraints import violations
from autogemm.errors import InputError
from autogemm.resources import smem_bytes
from autogemm.space import load_space


@pytest.mark.parametrize("arch", ARCH_NAMES)
def test_shipped_spaces_hold_only_legal_configs_and_the_named_points(arch: str) -> None:
    configs = load_space(arch).configs()  # type: ignore[arg-type]
    assert all(violations(c, arch) == [] for c in configs)  # type: ignore[arg-type]
    if arch == "sm_100a":
        assert {c.id for c in NAMED[arch].values()} <= {c.id for c in configs}


def test_max_depth_is_the_deepest_that_fits(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("blocks: [{BLK_M: [128], BLK_N: [128, 256], PIPE_DEPTH: [max], NUM_CONSUMER: [2], EPI_N: [64]}]")
    for config in load_space("sm_90a", file).configs():
        assert smem_bytes(config, "sm_90a", "float16") <= ARCHS["sm_90a"].smem_bytes
        assert smem_bytes(config.with_knob("PIPE_DEPTH", config.pipe_depth + 1), "sm_90a", "float16") > 232_448


def test_configs_that_differ_only_at_launch_share_a_binary() -> None:
    space = load_space("sm_90a")
    assert len(space.binaries()) < len(space.configs())
    assert {c.binary.id for c in space.configs()} == {c.id for c in space.binaries()}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "blocks: {}", "blocks: []", "blocks: [{}]", "blocks: [{BLK_M: 128}]", "blocks: [{WHAT: [1]}]", "blocks: [3]",
     "blocks: [{BLK_M: []}]", "blocks: [{BLK_M: [128]}]", ": :",
     "blocks: [{BLK_M: [1], BLK_N: [1], PIPE_DEPTH: [1], EPI_N: [1]}]"],
)  # fmt: skip
def test_a_file_that_is_no_space_gets_one_clear_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(InputError):
        load_space("sm_90a", file)


def test_a_missing_file_and_binary_junk_get_the_same(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none.yaml"):
        load_space("sm_90a", tmp_path / "none.yaml")
    (tmp_path / "junk.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="junk.yaml"):
        load_space("sm_90a", tmp_path / "junk.yaml")
