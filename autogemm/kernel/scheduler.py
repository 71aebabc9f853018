"""The order in which persistent clusters visit output tiles: its host formulas, its device code, and a host model of it.

Tiles are numbered group by group: a group is ``l2_group_size`` tile rows (fewer in the last), and inside a group the row index
runs fastest, so that clusters working at the same time share rows of A and columns of B in L2. A tile may be split into slices
of K; a work item is then (tile, slice), slices running fastest, so that a tile's slices start, and end, at about the same time.
Cluster c takes items c, c + cluster_count, and so on. Every constant is computed on the host and passed as a kernel scalar: the
device divides by multiplying, and one binary serves all shapes, group sizes and numbers of slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tvm.script import tirx as T

from ..manifest import Scalar

# Kernel scalars a RasterScheduler takes, in the order of its constructor; (name, TIR type).
RASTER_PARAMS: Final[tuple[tuple[str, str], ...]] = (
    ("tile_count", "int32"),
    ("cluster_count", "int32"),
    ("full_tiles", "int32"),
    ("group_tiles", "int32"),
    ("group_tiles_mul", "uint32"),
    ("group_tiles_shift", "int32"),
    ("group_rows", "int32"),
    ("group_rows_mul", "uint32"),
    ("group_rows_shift", "int32"),
    ("tail_rows", "int32"),
    ("tail_rows_mul", "uint32"),
    ("tail_rows_shift", "int32"),
)
# Further ones where tiles are split.
SLICE_PARAMS: Final[tuple[tuple[str, str], ...]] = (
    ("item_count", "int32"),
    ("slices", "int32"),
    ("slices_mul", "uint32"),
    ("slices_shift", "int32"),
)


def raster_scalars(
    *, cluster_rows: int, cluster_cols: int, cluster_ctas: int, rows: str = "M", cols: str = "N", slices: str | None = None
) -> tuple[Scalar, ...]:
    """Return the Scalars of a raster over ``ceil(rows/cluster_rows) x ceil(cols/cluster_cols)`` tiles, in order of evaluation.

    Besides RASTER_PARAMS they hold ``tile_rows``, ``tile_cols`` and ``grid`` (CTAs to launch: whole clusters, at most one per
    ``cluster_ctas`` SMs and at most one per work item), and SLICE_PARAMS if the formula of slices per tile is given.
    """
    items = "tile_count" if slices is None else "item_count"
    formulas = [
        ("tile_rows", f"ceildiv({rows}, {cluster_rows})"),
        ("tile_cols", f"ceildiv({cols}, {cluster_cols})"),
        ("tile_count", "tile_rows * tile_cols"),
        *(() if slices is None else (("slices", slices), ("item_count", "tile_count * slices"))),
        ("cluster_count", f"max(1, min(sm_count // {cluster_ctas}, {items}))"),
        ("grid", f"cluster_count * {cluster_ctas}"),
        # A group larger than the tile grid would only make the products below overflow.
        ("group_rows", "min(l2_group_size, tile_rows)"),
        ("group_tiles", "group_rows * tile_cols"),
        ("full_tiles", "tile_rows // group_rows * group_tiles"),
        ("tail_rows", "tile_rows % group_rows"),
    ]
    for divisor in ("group_tiles", "group_rows", "tail_rows", *(() if slices is None else ("slices",))):
        formulas.append((f"{divisor}_mul", f"magic_multiplier({divisor})"))
        formulas.append((f"{divisor}_shift", f"magic_shift({divisor})"))
    return tuple(Scalar(name=name, value=value) for name, value in formulas)


def divide(n: int, mul: int, shift: int) -> int:
    """Return what the device's division yields for ``0 <= n < 2**31``: n over the divisor of (mul, shift)."""
    return n if mul == 0 else (n * mul >> 32) >> shift


def tile_at(linear: int, values: Mapping[str, int]) -> tuple[int, int]:
    """Return (tile row, tile column) of tile number ``linear``, by the device's arithmetic on evaluated scalars."""
    group = divide(linear, values["group_tiles_mul"], values["group_tiles_shift"])
    within = linear - group * values["group_tiles"]
    rows = "group_rows" if linear < values["full_tiles"] else "tail_rows"
    column = divide(within, values[f"{rows}_mul"], values[f"{rows}_shift"])
    return group * values["group_rows"] + within - column * values[rows], column


def _device_divide(n, mul, shift):
    """Build n over the divisor of (mul, shift): the high word of a 32 x 32 bit product, shifted; mul == 0 stands for 1."""
    wide = T.Cast("uint64", T.Cast("uint32", n)) * T.Cast("uint64", mul)  # through uint32, so that one mul.hi.u32 is enough
    high = T.Cast("uint32", T.shift_right(wide, T.uint64(32)))
    return T.Select(mul == T.uint32(0), n, T.Cast("int32", T.shift_right(high, T.Cast("uint32", shift))))


@T.meta_class
class RasterScheduler:
    """Device side of the raster: the current work item of one cluster, kept in a few registers of every thread.

    Use: ``init(cluster_id)``; ``while valid(): ... m_idx, n_idx (and tile_idx, k_slice) ...; next_tile()``. Every role decodes
    for itself, so no communication is needed. The last group differs only in its divisor; selecting that instead of branching
    keeps the decode short enough to hide under outstanding MMAs.

    Args:
        constants: the kernel parameters named in RASTER_PARAMS, in that order.
        slicing: those named in SLICE_PARAMS, if tiles are split.
    """

    def __init__(self, constants, slicing=()):
        names = RASTER_PARAMS + (SLICE_PARAMS if slicing else ())
        self.constants = dict(zip((name for name, _ in names), (*constants, *slicing), strict=True))
        self.split = bool(slicing)
        self.m_idx = T.local_scalar("int32")
        self.n_idx = T.local_scalar("int32")
        self.tile_idx = T.local_scalar("int32")
        if self.split:
            self.item_idx = T.local_scalar("int32")
            self.k_slice = T.local_scalar("int32")
        self._group = T.local_scalar("int32")
        self._within = T.local_scalar("int32")

    def _group_of(self, linear):
        c = self.constants
        return _device_divide(linear, c["group_tiles_mul"], c["group_tiles_shift"])

    def _tile_of(self, item):
        return _device_divide(item, self.constants["slices_mul"], self.constants["slices_shift"])

    def _pick(self, suffix):
        c = self.constants
        return T.Select(self.tile_idx < c["full_tiles"], c["group_rows" + suffix], c["tail_rows" + suffix])

    def _column(self):
        return _device_divide(self._within, self._pick("_mul"), self._pick("_shift"))

    @T.inline
    def _decode(self):
        if self.split:
            self.tile_idx = self._tile_of(self.item_idx)
            self.k_slice = self.item_idx - self.tile_idx * self.constants["slices"]
        self._group = self._group_of(self.tile_idx)
        self._within = self.tile_idx - self._group * self.constants["group_tiles"]
        self.n_idx = self._column()
        self.m_idx = self._group * self.constants["group_rows"] + self._within - self.n_idx * self._pick("")

    @T.inline
    def init(self, cluster_id):
        if self.split:
            self.item_idx = cluster_id
        else:
            self.tile_idx = cluster_id
        self._decode()

    @T.inline
    def next_tile(self):
        if self.split:
            self.item_idx = self.item_idx + self.constants["cluster_count"]
        else:
            self.tile_idx = self.tile_idx + self.constants["cluster_count"]
        self._decode()

    def valid(self):
        if self.split:
            return self.item_idx < self.constants["item_count"]
        return self.tile_idx < self.constants["tile_count"]
