"""Where elements live: swizzled shared memory, matrix descriptors and tensor maps, as arrays of physical offsets.

All shared-memory offsets here count 2-byte units from the start of the CTA's dynamic shared memory; both supported element
types are 16 bits wide, and 32-bit values take two units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ..errors import InputError, UnsupportedOp

Offsets = npt.NDArray[np.int64]

# CUtensorMapSwizzle (CUDA Driver API): enum value -> bits of the 16-byte chunk index that are XORed with the row.
# PTX ISA, "Tensor swizzling modes": 32 B flips 1 bit, 64 B flips 2, 128 B flips 3; the row counts in units of 128 bytes.
_SWIZZLE_BITS: Final = {0: 0, 1: 1, 2: 2, 3: 3}

# Layout-type field of a matrix descriptor -> the swizzle enum above.
# tcgen05: PTX ISA, "Shared memory descriptor" of tcgen05, bits 61-63. wgmma: PTX ISA, "Matrix-descriptor format", bits 62-63.
_TCGEN05_LAYOUT: Final = {0: 0, 6: 1, 4: 2, 2: 3}
_WGMMA_LAYOUT: Final = {0: 0, 3: 1, 2: 2, 1: 3}

MMA_K: Final = 16  # 16-bit elements along K of one tcgen05.mma kind::f16 or wgmma


def swizzle_bytes(address: Offsets, mode: int) -> Offsets:
    """Return byte addresses with the TMA/MMA swizzle ``mode`` (CUtensorMapSwizzle value) applied.

    Raises:
        UnsupportedOp: a mode other than none, 32 B, 64 B or 128 B.
    """
    if mode not in _SWIZZLE_BITS:
        raise UnsupportedOp(f"swizzle mode {mode}; modelled: 0 (none), 1 (32 B), 2 (64 B), 3 (128 B)")
    return address ^ (((address >> 7) & ((1 << _SWIZZLE_BITS[mode]) - 1)) << 4)


def layout_offsets(layout: Any, shape: Sequence[int]) -> Offsets:
    """Return the physical element offset of every logical coordinate of a TIRx buffer, as an array of ``shape``.

    Args:
        layout: ``TileLayout``, ``ComposeLayout`` (swizzle over a tile layout) or None for row-major.

    Raises:
        UnsupportedOp: any other layout.
    """
    count = int(np.prod(shape))
    linear = np.arange(count, dtype=np.int64)
    if layout is None:
        return linear.reshape(tuple(shape))
    kind = type(layout).__name__
    if kind not in ("TileLayout", "ComposeLayout"):
        raise UnsupportedOp(f"shared-memory layout {kind}; modelled: TileLayout, ComposeLayout")
    tile = layout.tile_layout if kind == "ComposeLayout" else layout
    out = np.zeros(count, np.int64)
    rest = linear
    for extent, stride in reversed([(int(i.extent), int(i.stride)) for i in tile.shard]):
        out += (rest % extent) * stride
        rest = rest // extent
    if kind == "ComposeLayout":
        if not layout.swizzle_inner:
            raise UnsupportedOp("ComposeLayout with swizzle_inner=False")
        per_element, bits, atom = layout.per_element, layout.swizzle_len, layout.atom_len
        out ^= (out & (((1 << bits) - 1) << (per_element + atom))) >> atom
    return out.reshape(tuple(shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class Descriptor:
    """A decoded shared-memory matrix descriptor of a K-major operand.

    Attributes:
        start: byte address of the first row.
        leading_bytes: between 16-byte columns of core matrices (only without swizzle).
        stride_bytes: between groups of 8 rows.
        swizzle: CUtensorMapSwizzle value.
    """

    start: int
    leading_bytes: int
    stride_bytes: int
    swizzle: int

    def offsets(self, rows: int) -> Offsets:
        """Return 2-byte-unit offsets [rows, MMA_K] of the operand slice it names."""
        row = np.arange(rows, dtype=np.int64)[:, None]
        column = np.arange(MMA_K, dtype=np.int64)[None, :] * 2
        if self.swizzle == 0:  # 8x16-byte core matrices, each 128 contiguous bytes
            address = self.start + row // 8 * self.stride_bytes + row % 8 * 16 + column // 16 * self.leading_bytes + column % 16
        else:
            span = 16 << self.swizzle  # bytes per row: 32, 64 or 128
            address = self.start + row // 8 * self.stride_bytes + row % 8 * span + column
        return swizzle_bytes(address, self.swizzle) // 2


def encode_descriptor(kind: Literal["tcgen05", "wgmma"], address: int, leading: int, stride: int, swizzle: int) -> int:
    """Return the 64-bit descriptor of byte ``address``; ``leading`` and ``stride`` in 16-byte units, as the device helper."""
    base = (address >> 4 & 0x3FFF) | (leading & 0x3FFF) << 16 | (stride & 0x3FFF) << 32
    if kind == "tcgen05":
        layout = {mode: code for code, mode in _TCGEN05_LAYOUT.items()}
        return base | 1 << 46 | layout[swizzle] << 61
    layout = {mode: code for code, mode in _WGMMA_LAYOUT.items()}
    return base | layout[swizzle] << 62


def decode_descriptor(kind: Literal["tcgen05", "wgmma"], bits: int) -> Descriptor:
    """Return the Descriptor that ``bits`` encode.

    Raises:
        UnsupportedOp: a layout type without a model (32-byte-atom 128 B swizzle), or a base offset.
    """
    code, layout = (bits >> 61 & 7, _TCGEN05_LAYOUT) if kind == "tcgen05" else (bits >> 62 & 3, _WGMMA_LAYOUT)
    if code not in layout:
        raise UnsupportedOp(f"{kind} matrix descriptor with layout type {code}; modelled: none, 32 B, 64 B, 128 B swizzle")
    if bits >> 49 & 7:
        raise UnsupportedOp(f"{kind} matrix descriptor with base offset {bits >> 49 & 7}; operands must be 1024-byte aligned")
    return Descriptor(
        start=(bits & 0x3FFF) << 4, leading_bytes=(bits >> 16 & 0x3FFF) << 4, stride_bytes=(bits >> 32 & 0x3FFF) << 4,
        swizzle=layout[code],
    )  # fmt: skip


class TensorMap:
    """A tensor map bound to a global array: dimensions from the innermost out, extents and boxes in elements.

    Attributes:
        name: global buffer.
        dims, box: extents of tensor and box.
        swizzle: CUtensorMapSwizzle value of the shared-memory side.
        view: the array, outermost dimension first, or None where no numbers are computed.
    """

    __slots__ = ("array", "box", "bytes", "dims", "elements", "name", "rows", "strides", "swizzle", "view")

    def __init__(
        self,
        name: str,
        array: npt.NDArray[np.uint16] | None,
        dims: Sequence[int],
        strides_bytes: Sequence[int],
        box: Sequence[int],
        swizzle: int,
        element_bytes: int = 2,
    ) -> None:
        if element_bytes != 2:
            raise UnsupportedOp(f"tensor map of {name} with {element_bytes}-byte elements; modelled: 2")
        self.name, self.array = name, array
        self.dims, self.box = tuple(map(int, dims)), tuple(map(int, box))
        self.strides = (2, *map(int, strides_bytes))
        self.swizzle = swizzle
        # CUDA Driver API, cuTensorMapEncodeTiled: box extents 1..256, strides multiples of 16, inner box within the swizzle.
        if any(not 1 <= extent <= 256 for extent in self.box):
            raise InputError(f"tensor map of {name}: box {self.box} (innermost first); each extent must be 1 to 256")
        if any(stride % 16 for stride in self.strides[1:]):
            raise InputError(f"tensor map of {name}: strides {self.strides[1:]} bytes; each must be a multiple of 16")
        if swizzle and self.box[0] * 2 > 16 << swizzle:
            raise InputError(
                f"tensor map of {name}: inner box of {self.box[0] * 2} bytes; its swizzle spans {16 << swizzle} bytes"
            )
        self.elements = int(np.prod(self.box))
        self.bytes = self.elements * 2  # the hardware counts the whole box, clipped or not
        self.rows = self.elements // self.box[0]
        self.view: npt.NDArray[np.uint16] | None = None
        if array is not None:
            self.view = np.lib.stride_tricks.as_strided(array.reshape(-1), self.dims[::-1], self.strides[::-1])

    def shared_offsets(self, address: int) -> Offsets:
        """Return 2-byte-unit offsets [rows, inner] at which a box whose byte address is ``address`` lies."""
        linear = address + np.arange(self.elements, dtype=np.int64) * 2
        return (swizzle_bytes(linear, self.swizzle) // 2).reshape(self.rows, self.box[0])

    def _inside(self, coords: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...], bool]:
        source, target, whole = [], [], True
        for coordinate, extent, dim in zip(reversed(coords), reversed(self.box), reversed(self.dims), strict=True):
            low, high = max(coordinate, 0), min(coordinate + extent, dim)
            high = max(high, low)
            whole = whole and high - low == extent
            source.append(slice(low, high))
            target.append(slice(low - coordinate, high - coordinate))
        return tuple(source), tuple(target), whole

    def load(self, coords: Sequence[int]) -> npt.NDArray[np.uint16]:
        """Return the box at ``coords`` (innermost first) as [rows, inner]; outside the tensor it is zero."""
        assert self.view is not None
        source, target, whole = self._inside(coords)
        if whole:
            return self.view[source].reshape(self.rows, self.box[0])
        out = np.zeros(self.box[::-1], np.uint16)
        out[target] = self.view[source]
        return out.reshape(self.rows, self.box[0])

    def store(self, coords: Sequence[int], values: npt.NDArray[np.uint16]) -> None:
        """Write ``values`` [rows, inner] to the box at ``coords``; what lies outside the tensor is dropped."""
        assert self.view is not None
        source, target, _ = self._inside(coords)
        self.view[source] = values.reshape(self.box[::-1])[target]

    def label(self, coords: Sequence[int]) -> str:
        """Return the clipped box at ``coords`` as text, ``A[0:64, 128:192]``; empty if all of it is outside the tensor."""
        source, _, _ = self._inside(coords)
        if any(part.stop <= part.start for part in source):
            return ""
        return f"{self.name}[{', '.join(f'{part.start}:{part.stop}' for part in source)}]"

    def extent(self, coords: Sequence[int]) -> tuple[int, int, int, int]:
        """Return (first byte-row, end row, first column, end column) of the clipped box, for overlap tests.

        A 3-D map whose outermost dimension continues the innermost (a row split into swizzle atoms) folds to 2-D.
        """
        source, _, _ = self._inside(coords)
        if len(source) == 2:
            (rows, columns) = source
            return rows.start, rows.stop, columns.start, columns.stop
        if len(source) == 3:
            outer, rows, columns = source
            width = self.strides[2] // 2
            if outer.stop <= outer.start:
                return rows.start, rows.start, 0, 0
            return rows.start, rows.stop, outer.start * width + columns.start, (outer.stop - 1) * width + columns.stop
        raise UnsupportedOp(f"tensor map of {self.name} with {len(source)} dimensions; modelled: 2 and 3")
