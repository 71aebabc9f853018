"""Legality rules: every one can fire, and none fires on what is known to run."""

import pytest

from autogemm.arch import ARCHS
from autogemm.config import NAMED, Config
from autogemm.constraints import RULES, problem_violations, require_legal, violations
from autogemm.errors import IllegalConfig
from autogemm.problem import Problem
from autogemm.resources import smem_bytes

V9 = NAMED["sm_100a"]["v9"]
COOP = NAMED["sm_90a"]["cooperative"]

# One Config per rule that breaks it (others may break with it).
BREAKERS: dict[str, tuple[Config, str]] = {
    "positive": (V9.with_knob("EPI_N", 0), "sm_100a"),
    "foreign-knob": (V9.with_knob("PINGPONG", True), "sm_100a"),
    "shared-memory": (V9.with_knob("PIPE_DEPTH", 99), "sm_100a"),
    "pipe-depth": (V9.with_knob("PIPE_DEPTH", 1), "sm_100a"),
    "cta-group": (V9.with_knob("CTA_GROUP", 4), "sm_100a"),
    "swizzle-span": (V9.with_knob("BLK_K", 32), "sm_100a"),
    "epilogue-divides": (V9.with_knob("EPI_N", 96), "sm_100a"),
    "epilogue-box": (V9.with_knob("EPI_N", 8), "sm_100a"),
    "tma-box": (COOP.with_knob("BLK_M", 384), "sm_90a"),
    "raster-group": (V9.with_knob("l2_group_size", 65), "sm_100a"),
    "umma-shape": (V9.with_knob("BLK_M", 64), "sm_100a"),
    "sm100-consumers": (V9.with_knob("NUM_CONSUMER", 3), "sm_100a"),
    "tmem-buffers": (V9.with_knob("TMEM_BUFFERS", 3), "sm_100a"),
    "tmem-columns": (V9.with_knob("TMEM_BUFFERS", 2), "sm_100a"),
    "tmem-load": (V9.with_knob("EPI_N", 256), "sm_100a"),
    "wgmma-shape": (COOP.with_knob("BLK_N", 260), "sm_90a"),
    "sm90-consumers": (COOP.with_knob("NUM_CONSUMER", 4), "sm_90a"),
    "accumulator-registers": (COOP.with_knob("BLK_M", 256), "sm_90a"),
    "split-k": (COOP.with_knob("SPLIT_K", 2), "sm_90a"),
    "multicast-halves": (COOP.with_knob("BLK_N", 248).with_knob("EPI_N", 248), "sm_90a"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_every_rule_fires_names_itself_and_has_a_source(rule: object) -> None:
    config, arch = BREAKERS[rule.name]  # type: ignore[attr-defined]
    assert any(f"[{rule.name}]" in text for text in violations(config, arch))  # type: ignore[attr-defined, arg-type]
    assert rule.source and rule.reason  # type: ignore[attr-defined]


def test_named_points_are_legal_for_both_dtypes() -> None:
    for arch, points in NAMED.items():
        for config in points.values():
            for dtype in ("float16", "bfloat16"):
                assert violations(config, arch, dtype=dtype) == []


def test_an_illegal_config_lists_all_rules_it_breaks() -> None:
    with pytest.raises(IllegalConfig) as caught:
        require_legal(V9.with_knob("PIPE_DEPTH", 99).with_knob("EPI_N", 256), "sm_100a")
    assert len(caught.value.violations) == 2
    assert "PIPE_DEPTH=99 needs" in str(caught.value) and "EPI_N=256" in str(caught.value)


def test_the_hint_of_the_shared_memory_rule_is_itself_legal_and_the_deepest() -> None:
    (text,) = violations(COOP.with_knob("PIPE_DEPTH", 9), "sm_90a")
    depth = int(text.split("try PIPE_DEPTH=")[1].split()[0])
    assert violations(COOP.with_knob("PIPE_DEPTH", depth), "sm_90a") == []
    assert smem_bytes(COOP.with_knob("PIPE_DEPTH", depth + 1), "sm_90a", "float16") > ARCHS["sm_90a"].smem_bytes


@pytest.mark.parametrize(("m", "n", "k", "bad"), [(1, 8, 8, ""), (4096, 4096, 4097, "K"), (3, 4097, 64, "N"), (7, 9, 9, "KN")])
def test_names_each_extent_that_tma_cant_stride(m: int, n: int, k: int, bad: str) -> None:
    assert [text[0] for text in problem_violations(Problem(m=m, n=n, k=k))] == list(bad)


def test_layouts_other_than_nt_are_refused_by_name() -> None:
    (text,) = problem_violations(Problem(m=8, n=8, k=8, layout="NN"))
    assert "layout NN" in text
