"""The parts of the CPU execution: layouts, descriptors, tensor maps, number formats, regions, ordering."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autogemm.errors import InputError, UnsupportedOp
from autogemm.simulate.layout import (
    TensorMap,
    decode_descriptor,
    encode_descriptor,
    layout_offsets,
    swizzle_bytes,
)
from autogemm.simulate.race import INFINITE, Access, Region, RegionTable, Shadow, shared_region, tensor_region
from autogemm.simulate.registers import decode, encode


def test_swizzle_is_a_permutation_within_its_repeat() -> None:
    for mode, repeat in ((0, 128), (1, 256), (2, 512), (3, 1024)):
        addresses = np.arange(repeat, dtype=np.int64)
        assert sorted(swizzle_bytes(addresses, mode)) == list(addresses)
    # 128-byte swizzle: row r's 16-byte chunk c lies at chunk c ^ (r % 8).
    assert swizzle_bytes(np.array([5 * 128 + 2 * 16]), 3)[0] == 5 * 128 + (2 ^ 5) * 16
    with pytest.raises(UnsupportedOp, match="swizzle mode 4"):
        swizzle_bytes(np.array([0]), 4)


@pytest.mark.parametrize("mode", [1, 2, 3])
@pytest.mark.parametrize("kind", ["tcgen05", "wgmma"])
def test_descriptor_and_tensor_map_agree_on_where_a_row_lies(kind: Any, mode: int) -> None:
    span = 16 << mode
    bits = encode_descriptor(kind, 2048, 1, 8 * span // 16, mode)
    operand = decode_descriptor(kind, bits).offsets(64)
    box = TensorMap("A", None, (span // 2, 64), (span,), (span // 2, 64), mode).shared_offsets(2048)
    assert (operand == box[:, :16]).all()


def test_descriptors_without_a_model_are_refused() -> None:
    with pytest.raises(UnsupportedOp, match="layout type 1"):
        decode_descriptor("tcgen05", 1 << 61)
    with pytest.raises(UnsupportedOp, match="base offset"):
        decode_descriptor("wgmma", 1 << 49)


def test_layout_offsets_equal_tvms_own() -> None:
    pytest.importorskip("tvm")
    from tvm.tirx.cuda.tile_primitive.tma_utils import SwizzleMode, mma_shared_layout

    shape = (2, 64, 64)
    layout = mma_shared_layout("float16", SwizzleMode.SWIZZLE_128B_ATOM, shape)
    offsets = layout_offsets(layout, shape)
    assert sorted(offsets.reshape(-1)) == list(range(offsets.size))
    draw = np.random.default_rng(1)
    for _ in range(50):
        at = tuple(int(draw.integers(n)) for n in shape)
        linear = at[0] * 4096 + at[1] * 64
        assert offsets[at] == linear + (((at[2] // 8) ^ (at[1] % 8)) * 8 + at[2] % 8)


def test_boxes_outside_a_tensor_read_zero_and_write_nothing() -> None:
    array = np.arange(1, 5 * 16 + 1, dtype=np.uint16).reshape(5, 16)
    tensor_map = TensorMap("A", array.copy(), (16, 5), (32,), (8, 4), 0)
    box = tensor_map.load((12, 3))
    assert (box[:2, :4] == array[3:5, 12:16]).all() and box[2:].sum() == 0 and box[:, 4:].sum() == 0
    assert tensor_map.load((-4, 0))[:, :4].sum() == 0
    assert tensor_map.load((64, 64)).sum() == 0
    assert tensor_map.bytes == 64
    target = TensorMap("D", np.zeros((5, 16), np.uint16), (16, 5), (32,), (8, 4), 0)
    target.store((12, 3), np.full((4, 8), 7, np.uint16))
    assert target.view is not None and target.view.sum() == 7 * 8 and target.view[3, 12] == 7
    assert target.extent((12, 3)) == (3, 5, 12, 16)


def test_tensor_maps_the_driver_refuses_are_refused() -> None:
    for dims, stride, box, swizzle, reason in (
        ((16, 8), 24, (8, 8), 0, "multiple of 16"),
        ((16, 300), 32, (8, 257), 0, "1 to 256"),
        ((64, 8), 128, (64, 8), 2, "swizzle spans 64"),
    ):
        with pytest.raises(InputError, match=reason):
            TensorMap("A", None, dims, (stride,), box, swizzle)


def test_sixteen_bit_formats_round_to_nearest_even() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32) * 1000
    values[:4] = (0.0, -0.0, np.inf, 1 + 2**-8)
    assert (encode(values, "bfloat16") == values.astype(ml_dtypes.bfloat16).view(np.uint16)).all()
    assert (encode(values, "float16") == values.astype(np.float16).view(np.uint16)).all()
    for dtype in ("float16", "bfloat16"):
        bits = encode(values, dtype)
        assert (encode(decode(bits, dtype), dtype) == bits).all()
        assert np.isnan(decode(encode(np.array([np.nan], np.float32), dtype), dtype)).all()


# ---- ordering


class Recorder:
    """Two shadows' sinks, and access builders."""

    def __init__(self) -> None:
        self.races: list[tuple[str, str]] = []
        self.faults: list[str] = []
        self.table = RegionTable()
        self.shadow = Shadow(
            self.table,
            lambda region, other, access, earlier, ew, w: self.races.append((earlier.verb, access.verb)),
            lambda what, region, access, earlier: self.faults.append(what),
        )

    def region(self, start: int, stop: int) -> Region:
        units = np.arange(start // 2, stop // 2, dtype=np.int64).reshape(1, -1)
        return self.table.find((start, stop), lambda: shared_region(units, f"smem[{start}:{stop}]"))

    def access(self, agent: int, tick: int, verb: str, generic: bool = False) -> Access:
        made = Access(agent, tick, None, verb, 0.0)  # type: ignore[arg-type]
        made.generic = generic
        return made


def clock(**seen: int) -> Any:
    values = np.zeros(8, np.int32)
    for agent, tick in seen.items():
        values[int(agent[1:])] = tick
    return values


def test_regions_know_overlap_and_cover() -> None:
    table = RegionTable()
    whole = table.find(("w",), lambda: shared_region(np.arange(0, 64).reshape(1, -1), "whole"))
    part = table.find(("p",), lambda: shared_region(np.arange(0, 64, 4).reshape(1, -1), "part"))
    other = table.find(("o",), lambda: shared_region(np.arange(64, 80).reshape(1, -1), "other"))
    assert whole.relation(part) == (True, True, False)
    assert part.relation(whole) == (True, False, True)
    assert whole.relation(other) == (False, False, False)
    assert (part.id, True) in table.overlaps[whole.id] and (whole.id, False) in table.overlaps[part.id]
    left, right = tensor_region(0, 128, 0, 64), tensor_region(32, 32, 63, 2)
    assert left.relation(right)[0] and not left.relation(tensor_region(0, 128, 64, 64))[0]


def test_a_read_must_know_of_the_write() -> None:
    r = Recorder()
    region = r.region(0, 64)
    r.shadow.write(region, r.access(0, 3, "write"), clock())
    r.shadow.read(region, r.access(1, 1, "early"), clock(a0=2))
    r.shadow.read(region, r.access(2, 1, "late"), clock(a0=3))
    assert r.races == [("write", "early")]


def test_a_write_in_flight_is_ordered_before_nothing() -> None:
    r = Recorder()
    load = r.access(0, INFINITE, "load")
    r.shadow.write(r.region(0, 64), load, clock())
    r.shadow.read(r.region(32, 96), r.access(1, 1, "read"), clock(a0=9))
    load.tick = 4
    r.shadow.read(r.region(0, 32), r.access(1, 2, "again"), clock(a0=4))
    assert r.races == [("load", "read")]


def test_a_write_must_know_of_every_reader() -> None:
    r = Recorder()
    region = r.region(0, 64)
    r.shadow.write(region, r.access(0, 1, "write"), clock())
    r.shadow.read(region, r.access(1, 5, "first reader"), clock(a0=1))
    r.shadow.read(region, r.access(2, 5, "second reader"), clock(a0=1))
    r.shadow.write(r.region(60, 128), r.access(0, 2, "rewrite"), clock(a0=1, a1=5, a2=4))
    assert r.races == [("second reader", "rewrite")]


def test_generic_writes_need_a_proxy_fence_that_the_reader_knows_of() -> None:
    r = Recorder()
    region = r.region(0, 64)
    r.shadow.write(region, r.access(0, 1, "store", generic=True), clock(a0=1))
    r.shadow.read(region, r.access(1, 1, "tma"), clock(a0=1), proxy=True)
    assert r.faults == ["proxy"]
    r.shadow.fence_proxy(0, clock(a0=2))
    r.shadow.read(region, r.access(1, 2, "tma"), clock(a0=1), proxy=True)  # does not know of the fence
    assert r.faults == ["proxy", "proxy"]
    r.shadow.read(region, r.access(1, 3, "tma"), clock(a0=2), proxy=True)
    assert r.faults == ["proxy", "proxy"] and not r.races


def test_reading_what_no_one_wrote_is_noted() -> None:
    r = Recorder()
    r.shadow.write(r.region(0, 64), r.access(0, 1, "write"), clock())
    r.shadow.read(r.region(64, 128), r.access(0, 1, "read"), clock(a0=1))
    assert r.faults == ["blank"]
