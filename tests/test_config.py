"""Config: spelling, identity, named points."""

from dataclasses import replace

import pytest

from autogemm.arch import ARCH_NAMES
from autogemm.config import KNOBS, NAMED, Config, named_config
from autogemm.errors import InputError
from autogemm.space import load_space

V9 = NAMED["sm_100a"]["v9"]


def test_named_points_are_the_articles_kernels() -> None:
    rows = {n: (c.pipe_depth, c.cta_group, c.num_consumer, c.epi_n, c.l2_group_size) for n, c in NAMED["sm_100a"].items()}
    assert rows == {"v7": (2, 1, 1, 128, 8), "v8": (4, 2, 1, 128, 8), "v9": (4, 2, 2, 64, 8)}


def test_knobs_round_trip_under_their_public_spelling() -> None:
    for points in NAMED.values():
        for config in points.values():
            assert Config.from_knobs(config.to_knobs()) == config


def test_every_field_is_a_knob_and_the_other_way_round() -> None:
    assert {k.field for k in KNOBS.values()} == set(Config.__dataclass_fields__)


@pytest.mark.parametrize("arch", ARCH_NAMES)
def test_ids_tell_configs_apart(arch: str) -> None:
    configs = load_space(arch).configs()  # type: ignore[arg-type]
    assert len({c.id for c in configs}) == len(configs) > 60


def test_id_differs_when_any_knob_differs() -> None:
    for knob in KNOBS.values():
        value = getattr(V9, knob.field)
        other = replace(V9, **{knob.field: (not value) if isinstance(value, bool) else value + 1})
        assert other.id != V9.id, knob.name


def test_binary_forgets_launch_knobs_only() -> None:
    moved = V9.with_knob("l2_group_size", 4)
    assert moved.binary == V9.binary
    assert V9.with_knob("EPI_N", 32).binary != V9.binary


def test_reads_values_as_a_command_line_gives_them() -> None:
    assert V9.with_knob("PIPE_DEPTH", "5").pipe_depth == 5
    assert V9.with_knob("PINGPONG", "true").pingpong is True


@pytest.mark.parametrize(
    ("name", "value"), [("PIPE_DEPTH", "four"), ("PIPE_DEPTH", 4.0), ("PIPE_DEPTH", True), ("PINGPONG", 3)]
)
def test_refuses_values_of_the_wrong_type(name: str, value: object) -> None:
    with pytest.raises(InputError, match=name):
        V9.with_knob(name, value)


def test_refuses_unknown_and_missing_knobs() -> None:
    with pytest.raises(InputError, match=r"unknown knob 'pipe_depth'.*PIPE_DEPTH"):
        V9.with_knob("pipe_depth", 4)
    with pytest.raises(InputError, match="BLK_M, BLK_N, PIPE_DEPTH, EPI_N"):
        Config.from_knobs({})
    with pytest.raises(InputError, match="v10"):
        named_config("v10", "sm_100a")
    with pytest.raises(InputError, match="v9"):
        named_config("v9", "sm_90a")
