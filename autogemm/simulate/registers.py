"""Register tiles of a warp, and what threads do with them: conversions, st.shared, stmatrix, ld.shared, st.async."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedOp
from .grid import GridOps
from .layout import Offsets
from .race import INFINITE, Access, Region, shared_region
from .report import shared_label
from .state import OFFSET_MASK, WINDOW_BITS, Lanes, Pointer, Warp
from .unwritten import Unwritten

if TYPE_CHECKING:
    from .program import TileBuffer
    from .race import Clock

_POISON_WORD: Final = 0x7FFF7FFF  # NaN as float32 and as a pair of 16-bit floats
_LANES: Final = np.arange(32)


def halves_of(first: int, count: int) -> int:
    """Return the bits of ``Registers.written`` of ``count`` 16-bit elements."""
    return ((1 << int(count)) - 1) << int(first)


def words_of(first: int, count: int = 1) -> int:
    """Return the bits of ``Registers.written`` of ``count`` 32-bit elements."""
    return halves_of(2 * int(first), 2 * count)


def _element(dtype: str, index: Any) -> int:
    return halves_of(index, 1) if dtype in ("float16", "bfloat16") else words_of(index)


def decode(bits: npt.NDArray[np.uint16], dtype: str) -> npt.NDArray[np.float32]:
    """Return float32 values of 16-bit patterns of ``float16`` or ``bfloat16``."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def encode(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.uint16]:
    """Return ``values`` rounded to nearest even as 16-bit patterns of ``float16`` or ``bfloat16``."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)
    return np.asarray(values, np.float32).astype(np.float16).view(np.uint16)


class Registers:
    """A local array of one warp: [32 lanes, words of 32 bits], seen as float32, 16-bit or 32-bit elements.

    Attributes:
        written: bit i says that some lane has written 16-bit half i.
    """

    __slots__ = ("f32", "name", "u16", "words", "written")

    def __init__(self, name: str, elements: int, itemsize: int, real: bool) -> None:
        self.name = name
        self.written = 0
        self.words: npt.NDArray[np.uint32] | None = None
        if real:
            self.words = np.full((32, (elements * itemsize + 3) // 4), _POISON_WORD, np.uint32)
            self.f32: npt.NDArray[np.float32] = self.words.view(np.float32)
            self.u16: npt.NDArray[np.uint16] = self.words.view(np.uint16)


class RegisterOps(GridOps):
    """Operations of threads on their registers and, through the generic proxy, on shared memory."""

    def regs(self, warp: Warp, elements: int, itemsize: int, name: str) -> Registers:
        """Return a fresh local array, poisoned."""
        return Registers(name, elements, itemsize, self.numerics)

    def unwritten(self, warp: Warp, name: str) -> Unwritten:
        """Return what a scalar called ``name`` holds before its first write."""
        return Unwritten(lambda: self.never_written(warp, name))

    def never_written(self, warp: Warp, name: str) -> None:
        """Report a read of local variable ``name`` before its first write."""
        text = f"{self.who(warp)}: reads '{name}' before writing it"
        self.found("uninitialized", ("register", name, warp.group), text.__str__)

    def reading(self, warp: Warp, reg: Registers, bits: int) -> None:
        """Check that ``bits`` of ``reg.written`` are set, and that no asynchronous operation is still to write ``reg``."""
        if bits & ~reg.written:
            self.never_written(warp, reg.name or "registers")
            reg.written |= bits
        if warp.loading:
            what = warp.loading.get(id(reg))
            if what is not None:
                cause = "tcgen05.wait::ld" if what[1] < 0 else "wgmma.wait_group"
                self.found(
                    "race",
                    ("register", cause, warp.group),
                    lambda: (
                        f"{self.who(warp)}: registers '{reg.name or 'accumulator'}' are read before {cause} made them valid"
                    ),
                )
        if warp.wgmma is not None:
            warp.wgmma.dirty.add(id(reg))

    def reading_words(self, warp: Warp, words: Sequence[tuple[Registers | None, int]]) -> None:
        """Check the same of 32-bit words; (None, number) is a number."""
        for reg, index in words:
            if reg is not None:
                self.reading(warp, reg, words_of(index))

    def write_words(self, words: Sequence[tuple[Registers, int]]) -> None:
        """Note that 32-bit words were written."""
        for reg, index in words:
            reg.written |= words_of(index)

    def get(self, warp: Warp, reg: Registers, dtype: str, index: Any) -> Any:
        """Return element ``index`` of every lane as float32 or integer vector."""
        self.reading(warp, reg, _element(dtype, index))
        if reg.words is None:
            return np.zeros(32, np.float32 if "float" in dtype else np.int64)
        if dtype == "float32":
            return reg.f32[:, int(index)]
        if dtype in ("float16", "bfloat16"):
            return decode(reg.u16[:, int(index)], dtype)
        if dtype in ("uint32", "int32"):
            return reg.words[:, int(index)].astype(np.int64)
        raise UnsupportedOp(f"reading a {dtype} element of registers '{reg.name}'")

    def put(self, warp: Warp, mask: Lanes, reg: Registers, dtype: str, index: Any, value: Any) -> None:
        """Set element ``index`` of the lanes in ``mask``."""
        if warp.wgmma is not None:
            warp.wgmma.dirty.add(id(reg))
        warp.lag += 1
        reg.written |= _element(dtype, index)
        if reg.words is None:
            return
        index = int(index)
        values = np.broadcast_to(np.asarray(value), (32,))
        if dtype == "float32":
            reg.f32[mask, index] = values[mask]
        elif dtype in ("float16", "bfloat16"):
            reg.u16[mask, index] = encode(values.astype(np.float32), dtype)[mask]
        elif dtype in ("uint32", "int32"):
            reg.words[mask, index] = (values.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)[mask]
        else:
            raise UnsupportedOp(f"writing a {dtype} element of registers '{reg.name}'")

    def cast(
        self, warp: Warp, mask: Lanes, target: Registers, first: int, source: Registers, start: int, count: int, dtype: str
    ) -> float:
        """Convert ``count`` float32 elements to 16 bits."""
        self.reading(warp, source, words_of(start, count))
        target.written |= halves_of(first, count)
        if target.words is not None:
            target.u16[:, first : first + count] = encode(source.f32[:, start : start + count], dtype)
        return self.spend(warp, count * self.costs.cast_per_element)

    def pack2(
        self, warp: Warp, mask: Lanes, target: Registers, word: int, high: Registers, h: int, low: Registers, i: int, dtype: str
    ) -> None:
        """cvt.rn.{f16x2,bf16x2}.f32: two float32 into one register, ``low`` in the lower half."""
        self.reading(warp, high, words_of(h))
        self.reading(warp, low, words_of(i))
        target.written |= words_of(word)
        if target.words is not None:
            target.u16[:, 2 * word] = encode(low.f32[:, i], dtype)
            target.u16[:, 2 * word + 1] = encode(high.f32[:, h], dtype)
        warp.lag += 2 * self.costs.cast_per_element

    def cast_pair(
        self, warp: Warp, mask: Lanes, target: tuple[Registers, int], source: tuple[Registers, int], dtype: str
    ) -> None:
        """Convert two neighbouring float32 elements to 16 bits; operands are (registers, element)."""
        self.reading(warp, source[0], words_of(source[1], 2))
        target[0].written |= halves_of(target[1], 2)
        if target[0].words is not None:
            first, start = target[1], source[1]
            target[0].u16[:, first : first + 2] = encode(source[0].f32[:, start : start + 2], dtype)
        warp.lag += 2 * self.costs.cast_per_element

    # ---- shared memory through the generic proxy

    def memory(self, warp: Warp, rank: int) -> npt.NDArray[np.uint16]:
        """Return the shared memory of CTA ``rank``, poisoned at first use."""
        shared = warp.cluster.shared
        found = shared.get(rank)
        if found is None:
            found = shared[rank] = np.full(max(self.program.smem_bytes, self.arch.smem_bytes) // 2 + 65536, 0x7FFF, np.uint16)
        return found

    def shared(self, key: tuple[Any, ...], units: Offsets) -> Region:
        """Return the region of ``units`` cached under ``key``."""

        def build() -> Region:
            low, high = int(units.min()) * 2, int(units.max()) * 2 + 2
            if low < 0 or high > self.program.smem_bytes:
                self.found(
                    "protocol",
                    ("bounds",),
                    lambda: f"access to shared-memory bytes [{low}, {high}); the CTA has {self.program.smem_bytes}",
                )
            return shared_region(np.maximum(units, 0), shared_label(self.program, low, high))

        return self.regions.find(key, build)

    def tile_region(self, tile: TileBuffer, starts: tuple[int, ...], extents: tuple[int, ...]) -> Region:
        """Return the region [rows, columns] of a box of a shared-memory buffer in logical coordinates."""
        key = (tile, starts, extents)
        found = self.regions.get(key)
        return found if found is not None else self._box(key, tile, starts, extents)

    def row_region(self, tile: TileBuffer, starts: tuple[Any, ...], extents: tuple[int, ...]) -> Region:
        """Return the region [32 lanes, columns] of one row per lane; one start is a vector over lanes."""
        key = (tile, tuple(s.tobytes() if isinstance(s, np.ndarray) else s for s in starts), extents)
        found = self.regions.get(key)
        return found if found is not None else self._box(key, tile, starts, extents)

    def _box(self, key: tuple[Any, ...], tile: TileBuffer, starts: tuple[Any, ...], extents: tuple[int, ...]) -> Region:
        shape = tile.buffer.shape
        bad = [i for i, (s, e, n) in enumerate(zip(starts, extents, shape, strict=True)) if np.min(s) < 0 or np.max(s) + e > n]
        if bad:
            self.found(
                "protocol",
                ("bounds", tile.buffer.name),
                lambda: f"access to {tile.buffer.name} beyond its shape {shape} in dimension {bad[0]}",
            )
            starts = tuple(np.minimum(np.maximum(s, 0), n - e) for s, e, n in zip(starts, extents, shape, strict=True))
        label = ", ".join(
            f"{int(np.min(s))}:{int(np.max(s)) + e}" if e > 1 or isinstance(s, np.ndarray) else str(int(s))
            for s, e in zip(starts, extents, strict=True)
        )
        if any(isinstance(s, np.ndarray) for s in starts):
            index = tuple(s[:, None] if isinstance(s, np.ndarray) else np.asarray(int(s)) for s in starts[:-1])
            columns = np.arange(int(starts[-1]), int(starts[-1]) + extents[-1])[None, :]
            place = (*index, columns)
            units = tile.units[place]
        else:
            box = tuple(slice(int(s), int(s) + e) for s, e in zip(starts, extents, strict=True))
            units = tile.units[box].reshape(-1, extents[-1])
        return self.regions.find(key, lambda: shared_region(units, f"{tile.buffer.name}[{label}]"))

    def _lanes(self, pointer: Pointer, mask: Lanes, units_each: int, kind: str) -> tuple[int, Region | None]:
        pointers = np.broadcast_to(np.asarray(pointer, np.int64), (32,))[mask]
        if pointers.size == 0:
            return 0, None
        ranks, offsets = pointers >> WINDOW_BITS, pointers & OFFSET_MASK
        if (ranks != ranks[0]).any():
            raise UnsupportedOp(f"{kind} whose lanes address different CTAs")
        units = offsets[:, None] // 2 + np.arange(units_each)[None, :]
        return int(ranks[0]), self.shared((kind, offsets.tobytes(), units_each), units)

    def written(self, warp: Warp, rank: int, region: Region, verb: str, bytes_written: int) -> float:
        """Record a generic write and charge its time."""
        warp.activities.add("store_shared")
        cluster = warp.cluster
        if self.race:
            access = Access(warp.id, int(warp.clock[warp.id]), warp, verb, self.now)
            access.generic = True
            self.shadow(cluster, rank, "smem").write(region, access, warp.clock)
            if rank != warp.rank:
                self.touch(cluster, rank, warp.id, access.tick, f"{verb} of a peer CTA")
        time = self.now + warp.lag
        free = max(time, cluster.store_free[warp.rank]) + bytes_written / self.costs.shared_store_bw
        cluster.store_free[warp.rank] = free
        return self.spend(warp, free - time + 8)

    def store_tile(self, warp: Warp, mask: Lanes, pointer: Pointer, region: Region, source: Registers, start: int) -> float:
        """Store one row of registers per lane to ``region`` [32, columns] of the CTA that ``pointer`` lies in."""
        columns, rank = region.units.shape[1], int(pointer) >> WINDOW_BITS
        self.reading(warp, source, halves_of(start, columns))
        if self.numerics:
            self.memory(warp, rank)[region.units] = source.u16[:, start : start + columns]
        return self.written(warp, rank, region, "st.shared", 64 * columns)

    def store_vector(self, warp: Warp, mask: Lanes, pointer: Pointer, words: Sequence[tuple[Registers, int]]) -> float:
        """st.shared.v{1,2,4}.b32 from one register per word."""
        rank, region = self._lanes(pointer, mask, 2 * len(words), "st")
        if region is None:
            return 0.0
        self.reading_words(warp, words)
        if self.numerics:
            self.memory(warp, rank)[region.units] = self._halves(words)[mask]
        return self.written(warp, rank, region, "st.shared", int(np.count_nonzero(mask)) * 4 * len(words))

    @staticmethod
    def _halves(words: Sequence[tuple[Registers | None, int]]) -> npt.NDArray[np.uint16]:
        columns = [
            np.full(32, index, np.uint32) if reg is None or reg.words is None else reg.words[:, int(index)]
            for reg, index in words
        ]
        return np.ascontiguousarray(np.stack(columns, axis=1)).view(np.uint16)

    def store_matrix(
        self, warp: Warp, mask: Lanes, pointer: Pointer, words: Sequence[tuple[Registers, int]], transposed: bool
    ) -> float:
        """stmatrix.m8n8.x{1,2,4}[.trans].b16: lane 8m+r gives the address of row r of matrix m."""
        if not mask.all():
            self.found(
                "protocol",
                ("lanes", "stmatrix"),
                lambda: f"{self.who(warp)}: stmatrix with {int(np.count_nonzero(mask))} of 32 lanes",
            )
        count = len(words)
        rank, region = self._lanes(pointer, 8 * count > _LANES, 8, "stmatrix")
        assert region is not None
        self.reading_words(warp, words)
        if self.numerics:
            halves = self._halves(words)  # [lane, 2 * matrix + half]
            row, column = np.arange(8 * count)[:, None], np.arange(8)[None, :]
            matrix, r = row // 8, row % 8
            if transposed:
                values = halves[column * 4 + r // 2, 2 * matrix + r % 2]
            else:
                values = halves[r * 4 + column // 2, 2 * matrix + column % 2]
            self.memory(warp, rank)[region.units] = values
        return self.written(warp, rank, region, "stmatrix", 128 * count)

    def load_vector(self, warp: Warp, mask: Lanes, pointer: Pointer, words: Sequence[tuple[Registers, int]]) -> float:
        """ld.shared.v{1,2,4}.b32 into one register per word."""
        rank, region = self._lanes(pointer, mask, 2 * len(words), "ld")
        if region is None:
            return 0.0
        if self.race:
            access = Access(warp.id, int(warp.clock[warp.id]), warp, "ld.shared", self.now)
            self.shadow(warp.cluster, rank, "smem").read(region, access, warp.clock)
        if self.numerics:
            values = np.ascontiguousarray(self.memory(warp, rank)[region.units]).view(np.uint32)
            for column, (reg, index) in enumerate(words):
                assert reg.words is not None
                reg.words[mask, index] = values[:, column]
        self.write_words(words)
        return self.spend(warp, 30)

    def store_async(
        self, warp: Warp, mask: Lanes, pointer: Pointer, words: Sequence[tuple[Registers, int]], barrier: Pointer
    ) -> float:
        """st.async: write a peer's shared memory; each lane completes its bytes on an mbarrier in the CTA it writes to."""
        rank, region = self._lanes(pointer, mask, 2 * len(words), "st.async")
        if region is None:
            return 0.0
        self.reading_words(warp, words)
        cluster = warp.cluster
        bar = self.bar(warp, barrier)
        self.check_live(warp, bar, "st.async", False)
        if bar.rank != rank:
            self.found(
                "protocol",
                ("st.async barrier",),
                lambda: (
                    f"{self.who(warp)}: st.async writes cta{rank} but completes on {self.label(bar)}; both must be in one CTA"
                ),
            )
        size = int(np.count_nonzero(mask)) * 4 * len(words)
        agent = cluster.agent(("async", bar.rank, bar.offset))
        access = None
        clock = self.release(warp)  # what this warp does next is not part of what the write hands over
        if self.race:
            access = Access(agent, INFINITE, warp, "st.async", self.now)
            self.shadow(cluster, rank, "smem").write(region, access, clock)
        values = self._halves(words)[mask] if self.numerics else None
        time = self.now + warp.lag
        free = max(time, cluster.store_free[warp.rank]) + size / self.costs.shared_store_bw
        cluster.store_free[warp.rank] = free
        jitter = self.random.random() * self.memory_jitter if self.seed else 0.0
        self.push(
            free + self.costs.remote_latency + jitter,
            self._store_async_done,
            (warp, rank, region, values, bar, size, agent, access, clock),
        )
        return self.spend(warp, free - time + 4)

    def _store_async_done(self, event: tuple[Any, ...]) -> None:
        warp, rank, region, values, bar, size, agent, access, clock = event
        if values is not None:
            self.memory(warp, rank)[region.units] = values
        self.complete_write(warp, bar, size, agent, access, clock, "st.async", rank)

    def complete_write(
        self, warp: Warp, bar: Any, size: int, agent: int, access: Access | None, clock: Clock, what: str, rank: int
    ) -> None:
        """Give an asynchronous write its tick and complete its bytes on ``bar``."""
        tick = warp.cluster.tick(agent)
        if access is not None:
            access.tick = tick
            clock[agent] = tick
            self.touch(warp.cluster, rank, agent, tick, what)
        self._arrive((bar, 0, clock, warp, what, agent, tick, size, 0))
