"""Host side of the raster: constants, order, coverage, and exactness of division by multiplication."""

from __future__ import annotations

import itertools
import random

import pytest

pytest.importorskip("tvm")

from autogemm.kernel.scheduler import RASTER_PARAMS, SLICE_PARAMS, divide, raster_scalars, tile_at
from autogemm.manifest import VARIABLES, evaluate, magic_multiplier, magic_shift


def evaluated(rows: int, cols: int, group: int, sm_count: int = 132, cluster_ctas: int = 1) -> dict[str, int]:
    """Return the scalars of a raster of ``rows`` x ``cols`` tiles of 128 x 64."""
    values = dict.fromkeys(VARIABLES, 1) | {
        "M": rows * 128 - 5, "N": cols * 64 - 1, "sm_count": sm_count, "l2_group_size": group,
    }  # fmt: skip
    for scalar in raster_scalars(cluster_rows=128, cluster_cols=64, cluster_ctas=cluster_ctas):
        values[scalar.name] = evaluate(scalar.value, values)
    return values


def group_major(rows: int, cols: int, group: int) -> list[tuple[int, int]]:
    """Return the raster by its definition."""
    return [
        (row, col)
        for start in range(0, rows, group)
        for col in range(cols)
        for row in range(start, min(start + group, rows))
    ]  # fmt: skip


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16, 64])
def test_visits_every_tile_once_in_group_major_order(group):
    for rows, cols in itertools.product((*range(1, 18), 33, 65, 127), (*range(1, 10), 31, 64)):
        values = evaluated(rows, cols, group)
        assert values["tile_count"] == rows * cols
        assert [tile_at(i, values) for i in range(rows * cols)] == group_major(rows, cols, group)


def test_clusters_share_all_tiles_without_overlap():
    for rows, cols, ctas, sms in itertools.product((1, 5, 16), (1, 7, 33), (1, 2, 4), (4, 114, 132)):
        values = evaluated(rows, cols, 8, sm_count=sms, cluster_ctas=ctas)
        assert values["grid"] == values["cluster_count"] * ctas <= max(sms, ctas)
        assert values["cluster_count"] <= values["tile_count"]
        taken = [t for c in range(values["cluster_count"]) for t in range(c, values["tile_count"], values["cluster_count"])]
        assert sorted(taken) == list(range(values["tile_count"]))


def test_grid_is_never_empty_when_fewer_sms_than_a_cluster_are_asked_for():
    assert evaluated(4, 4, 8, sm_count=1, cluster_ctas=4)["grid"] == 4


def test_constants_stay_in_range_at_the_largest_extents():
    values = dict.fromkeys(VARIABLES, 1) | {"M": 2**31 - 1, "N": 64, "sm_count": 132, "l2_group_size": 64}
    for scalar in raster_scalars(cluster_rows=64, cluster_cols=64, cluster_ctas=1):
        values[scalar.name] = evaluate(scalar.value, values)
    kinds = dict(RASTER_PARAMS)
    assert all(0 <= values[name] < 2 ** (32 if kind == "uint32" else 31) for name, kind in kinds.items())
    assert tile_at(values["tile_count"] - 1, values) == (values["tile_rows"] - 1, 0)


def test_division_by_multiplication_is_exact_at_every_boundary():
    rng = random.Random(0)
    divisors = [*range(1, 200), 2**15, 2**15 + 1, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1]
    divisors += [rng.randrange(1, 2**31) for _ in range(100)]
    for d in divisors:
        mul, shift = magic_multiplier(d), magic_shift(d)
        assert 0 <= mul < 2**32 and 0 <= shift < 32
        quotients = {0, 1, 2, (2**31 - 1) // d, *(rng.randrange((2**31 - 1) // d + 1) for _ in range(10))}
        for n in {q * d + r for q in quotients for r in (-1, 0, 1, d - 1)}:
            if 0 <= n < 2**31:
                assert divide(n, mul, shift) == n // d, (n, d)


def test_clusters_share_all_slices_of_all_tiles_and_a_tiles_slices_are_neighbours():
    values = dict.fromkeys(VARIABLES, 1) | {"M": 300, "N": 500, "sm_count": 13, "l2_group_size": 2}
    scalars = raster_scalars(cluster_rows=128, cluster_cols=64, cluster_ctas=1, slices="5")
    assert {name for name, _ in (*RASTER_PARAMS, *SLICE_PARAMS)} <= {scalar.name for scalar in scalars}
    for scalar in scalars:
        values[scalar.name] = evaluate(scalar.value, values)
    assert (values["tile_count"], values["item_count"], values["cluster_count"]) == (24, 120, 13)
    taken = []
    for cluster in range(values["cluster_count"]):
        for item in range(cluster, values["item_count"], values["cluster_count"]):
            tile = divide(item, values["slices_mul"], values["slices_shift"])
            taken.append((item, tile_at(tile, values), item - tile * values["slices"]))
    assert len({(tile, part) for _, tile, part in taken}) == len(taken) == 120
    assert [part for _, _, part in sorted(taken)] == [*range(5)] * 24


def test_the_grid_holds_every_slice_of_a_single_tile():
    values = dict.fromkeys(VARIABLES, 1) | {"M": 8, "N": 8, "sm_count": 132}
    for scalar in raster_scalars(cluster_rows=128, cluster_cols=64, cluster_ctas=1, slices="7"):
        values[scalar.name] = evaluate(scalar.value, values)
    assert values["grid"] == 7
