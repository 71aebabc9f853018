"""The asynchronous engines: TMA, tcgen05 with tensor memory, wgmma."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np

from ..errors import UnsupportedOp
from .layout import MMA_K, TensorMap, decode_descriptor
from .core import BLOCK, OFFSET_MASK, WINDOW_BITS, Lanes, Pointer, Slice, Warp
from .race import INFINITE, Access, Region, tensor_region
from .registers import RegisterOps, Registers, decode

_LANES: Final = np.arange(32)[:, None]
TMEM_LANES: Final = 128
_CELL: Final = 64  # edge of the cells that sort output boxes for overlap tests


class WgmmaGroup:
    """wgmma of one warpgroup: operation i runs when its four warps have issued it (the instruction is collective)."""

    __slots__ = ("ends", "issued", "waiting")

    def __init__(self) -> None:
        self.issued: dict[int, list[Any]] = {}  # operation -> operands, one entry per warp so far
        self.ends: list[float] = []
        self.waiting: list[tuple[Warp, int]] = []


class WgmmaWarp:
    """One warp's place in its warpgroup's wgmma stream."""

    __slots__ = ("commits", "dirty", "fenced", "issued")

    def __init__(self) -> None:
        self.issued = 0
        self.commits: list[int] = []
        self.fenced: set[int] = set()  # register tiles that a wgmma.fence covers
        self.dirty: set[int] = set()  # register tiles touched since


class Machine(RegisterOps):
    """All operations that compiled programs call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.l2_free = self.dram_free = 0.0
        self.in_l2: set[tuple[Any, ...]] = set()
        self.outputs: dict[str, dict[tuple[int, int], list[tuple[Any, ...]]]] = {}
        self.maps: dict[tuple[Any, ...], TensorMap] = {}
        super().__init__(*args, **kwargs)

    # ---- operands

    def one_lane(self, warp: Warp, mask: Lanes, what: str) -> None:
        """Check that exactly one lane issues ``what``."""
        if mask is warp.single:
            return
        lanes = int(np.count_nonzero(mask))
        warp.single = mask if lanes == 1 else None
        if lanes != 1:
            self.found("protocol", ("lanes", what), lambda: f"{self.who(warp)}: {what} issued by {lanes} lanes; one must")

    def box_map(self, name: str, rows: int, columns: int) -> TensorMap:
        """Return the TensorMap of a [rows, columns] box of global buffer ``name`` (tile level)."""
        key = (name, rows, columns)
        found = self.maps.get(key)
        if found is None:
            shape = self.shapes[name]
            found = self.maps[key] = TensorMap(name, self.arrays[name], shape[::-1], (shape[1] * 2,), (columns, rows), 0)
        return found

    def encode_map(self, name: str, rank: int, values: Sequence[int], swizzle: int) -> TensorMap:
        """Return the TensorMap that cuTensorMapEncodeTiled makes of dims, strides, box, element strides (``values``)."""
        key = (name, rank, tuple(values), swizzle)
        found = self.maps.get(key)
        if found is None:
            v = [int(x) for x in values]
            if any(x != 1 for x in v[3 * rank - 1 : 4 * rank - 1]):
                raise UnsupportedOp(f"tensor map of {name} with element strides other than 1")
            found = TensorMap(name, self.arrays[name], v[:rank], v[rank : 2 * rank - 1], v[2 * rank - 1 : 3 * rank - 1], int(swizzle))
            self.maps[key] = found
        return found

    def map_region(self, tmap: TensorMap, offset: int) -> Region:
        """Return the shared-memory region of a box at byte ``offset``."""
        key = ("box", offset, tmap.box, tmap.swizzle)
        found = self.regions.get(key)
        return found if found is not None else self.shared(key, tmap.shared_offsets(offset))

    def operand(self, kind: Literal["tcgen05", "wgmma"], bits: int, rows: int) -> Region:
        """Return the shared-memory region [rows, MMA_K] that a matrix descriptor names."""
        key = (kind, bits, rows)
        found = self.regions.get(key)
        return found if found is not None else self.shared(key, decode_descriptor(kind, bits).offsets(rows))

    # ---- TMA

    def tma_load(self, warp: Warp, mask: Lanes, pointer: Pointer, tmap: TensorMap, coords: tuple[Any, ...], barrier: Pointer,
                 group: int = 1, ctas: Any = None, region: Region | None = None) -> float:  # fmt: skip
        """cp.async.bulk.tensor global -> shared::cluster, to the CTAs in bit mask ``ctas`` (None: the one of ``pointer``)."""
        costs, cluster = self.costs, warp.cluster
        warp.activities.add("tma_load")
        self.one_lane(warp, mask, "TMA load")
        coords = tuple(map(int, coords))
        rank, offset = int(pointer) >> WINDOW_BITS, int(pointer) & OFFSET_MASK
        bar_rank, bar_offset = int(barrier) >> WINDOW_BITS, int(barrier) & OFFSET_MASK
        if region is None:
            if offset % 128:  # PTX ISA, cp.async.bulk.tensor: shared address aligned to 128 bytes
                self.found("protocol", ("tma alignment",), lambda: f"{self.who(warp)}: TMA load to shared-memory byte {offset}; "
                           "addresses must be multiples of 128")  # fmt: skip
            region = self.map_region(tmap, offset)
        if ctas is None:
            targets = [(rank, bar_rank)]
            if group == 1 and bar_rank != rank:
                self.found("protocol", ("tma barrier",), lambda: f"{self.who(warp)}: TMA load into cta{rank} completes on a barrier of "
                           f"cta{bar_rank}; only .cta_group::2 may signal a peer's")  # fmt: skip
        else:
            chosen = [r for r in range(16) if int(ctas) >> r & 1]
            if not chosen or chosen[-1] >= self.ctas:
                self.found("protocol", ("multicast",), lambda: f"{self.who(warp)}: TMA multicast to CTA mask {int(ctas):#b} in a cluster of {self.ctas}")
            targets = [(r, r if group == 1 else bar_rank) for r in chosen if r < self.ctas]
        clock = self.release(warp)
        time = self.now + warp.lag
        size = tmap.bytes
        arrival, extra = time, 0.0
        where = (tmap.name, *coords)
        if not costs.prewarmed and where not in self.in_l2:
            self.in_l2.add(where)
            self.dram_free = max(self.dram_free, time) + size / costs.dram_bw
            arrival, extra = self.dram_free, costs.dram_latency
        self.l2_free = max(self.l2_free, time) + size / costs.l2_bw
        if tmap.name in self.outputs:
            self._check_output(warp, tmap, coords, clock, False)
        for target, target_bar in targets:
            bar = self.bar_at(warp, target_bar, bar_offset)
            self.check_live(warp, bar, "TMA load", True)
            agent = cluster.agent(("async", bar.rank, bar.offset))
            access = None
            if self.race:
                access = Access(agent, INFINITE, warp, "TMA load", self.now)
                self.shadow(cluster, target, "smem").write(region, access, clock, proxy=True)
            free = max(cluster.in_free[target], time) + size / costs.sm_in_bw
            cluster.in_free[target] = free
            self.busy["tma in"] += size / costs.sm_in_bw
            done = max(arrival, self.l2_free, free) + costs.tma_latency + extra
            if self.seed:
                done += self.random.random() * self.memory_jitter * 2
            self.push(done, self._tma_done, (warp, target, region, tmap, coords, bar, size, agent, access, clock.copy()))
            if self.tracing:
                self.slice(cluster.index * self.ctas + target, "TMA", f"{region.label} <- {tmap.name}{list(coords)}", time, done, "tma")
        return self.spend(warp, costs.tma_issue)

    def _tma_done(self, event: tuple[Any, ...]) -> None:
        warp, rank, region, tmap, coords, bar, size, agent, access, clock = event
        if self.numerics:
            self.memory(warp, rank)[region.units] = tmap.load(coords)
        self.complete_write(warp, bar, size, agent, access, clock, "TMA load", rank)

    def tma_store(self, warp: Warp, mask: Lanes, tmap: TensorMap, coords: tuple[Any, ...], pointer: Pointer,
                  region: Region | None = None) -> float:  # fmt: skip
        """cp.async.bulk.tensor shared::cta -> global, in the issuing thread's open bulk group."""
        costs, cluster = self.costs, warp.cluster
        warp.activities.add("tma_store")
        self.one_lane(warp, mask, "TMA store")
        coords = tuple(map(int, coords))
        rank = int(pointer) >> WINDOW_BITS
        if region is None:
            region = self.map_region(tmap, int(pointer) & OFFSET_MASK)
        if rank != warp.rank:
            self.found("protocol", ("store cta",), lambda: f"{self.who(warp)}: TMA store from shared memory of cta{rank}")
        agent = cluster.agent(("bulk", warp.id))
        if self.race:
            access = Access(agent, warp.bulk_tick, warp, "TMA store", self.now)
            self.shadow(cluster, warp.rank, "smem").read(region, access, warp.clock, proxy=True)
            self._check_output(warp, tmap, coords, warp.clock, True)
        time = self.now + warp.lag
        free = max(cluster.out_free[warp.rank], time) + tmap.bytes / costs.sm_out_bw
        cluster.out_free[warp.rank] = free
        self.busy["tma out"] += tmap.bytes / costs.sm_out_bw
        self.l2_free = max(self.l2_free, time) + tmap.bytes / costs.l2_bw
        done = max(free, self.l2_free) + costs.store_latency
        if self.seed:
            done += self.random.random() * self.memory_jitter * 2
        if self.numerics:
            self.push(free + (done - free) * 0.4, self._store_read, (warp, tmap, coords, region))
        warp.bulk_open.append(done)
        warp.bulk_lane = int(mask.argmax())
        if self.tracing:
            self.slice(warp.bx, "store", f"{tmap.name}{list(coords)} <- {region.label}", time, done, "store")
        return self.spend(warp, costs.tma_issue)

    def _store_read(self, event: tuple[Any, ...]) -> None:
        warp, tmap, coords, region = event
        tmap.store(coords, self.memory(warp, warp.rank)[region.units])

    def _check_output(self, warp: Warp, tmap: TensorMap, coords: tuple[int, ...], clock: Any, writes: bool) -> None:
        top, bottom, left, right = tmap.extent(coords)
        if bottom <= top or right <= left:
            return
        cells = self.outputs.setdefault(tmap.name, {})
        cluster = warp.cluster
        agent = cluster.agent(("bulk", warp.id))
        entry = (top, bottom, left, right, cluster.index, agent, warp.bulk_tick, warp)
        for row in range(top // _CELL, (bottom - 1) // _CELL + 1):
            for column in range(left // _CELL, (right - 1) // _CELL + 1):
                found = cells.get((row, column))
                if found is None:
                    if writes:
                        cells[(row, column)] = [entry]
                    continue
                for t, b, le, r, index, other, tick, owner in found:
                    if t < bottom and top < b and le < right and left < r and (index != cluster.index or tick > clock[other]):
                        self.found("race", ("output", tmap.name, writes), lambda owner=owner, index=index: f"{tmap.name}[{top}:{bottom}, "
                                   f"{left}:{right}]: TMA {'store' if writes else 'load'} of {self.who(warp)} in cluster {cluster.index} overlaps "
                                   f"one already stored by {self.who(owner)} in cluster {index}, unordered")  # fmt: skip
                        break
                if writes:
                    found.append(entry)

    def bulk_commit(self, warp: Warp, mask: Lanes) -> float:
        """cp.async.bulk.commit_group."""
        warp.bulk_done.append(max(warp.bulk_open, default=self.now))
        warp.bulk_open = []
        warp.bulk_tick += 1
        return self.spend(warp, 2)

    def bulk_wait(self, warp: Warp, mask: Lanes, groups: Any, read: bool) -> float:
        """cp.async.bulk.wait_group[.read]: at most ``groups`` of the thread's groups stay in flight."""
        groups = int(groups)
        if (warp.bulk_open or warp.bulk_done) and not mask[warp.bulk_lane]:
            return self.spend(warp, 2)  # another thread's groups: the wait is empty
        time = self.now + warp.lag
        until = time
        early = self.costs.store_latency * 0.6 if read else 0.0
        while len(warp.bulk_done) > groups:
            until = max(until, warp.bulk_done.pop(0) - early)
        agent = warp.cluster.agent(("bulk", warp.id))
        warp.clock[agent] = max(int(warp.clock[agent]), warp.bulk_tick - 1 - groups)
        if until > time:
            warp.waits["bulk stores"] = warp.waits.get("bulk stores", 0.0) + until - time
            lag, warp.lag = warp.lag, 0.0
            return lag + until - time
        return self.spend(warp, 2)

    # ---- tensor memory

    def tmem_alloc(self, warp: Warp, mask: Lanes, pointer: Pointer, columns: Any, group: int) -> float:
        """tcgen05.alloc: the address (column) goes to the 32-bit word at ``pointer``."""
        cluster, rank, columns = warp.cluster, warp.rank, int(columns)
        if not mask.all():
            self.found("protocol", ("lanes", "alloc"), lambda: f"{self.who(warp)}: tcgen05.alloc with {int(np.count_nonzero(mask))} of 32 lanes")
        owned = cluster.tmem.setdefault(rank, {})
        base = sum(owned.values())
        if columns < 32 or columns & (columns - 1) or columns > self.arch.tmem_columns:
            self.found("protocol", ("alloc size",), lambda: f"{self.who(warp)}: tcgen05.alloc of {columns} columns; a power of two from 32 to "
                       f"{self.arch.tmem_columns} is allowed")  # fmt: skip
        if base + columns > self.arch.tmem_columns:
            self.found("protocol", ("alloc", "again"), lambda: f"{self.who(warp)}: tcgen05.alloc of {columns} columns while cta{rank} holds "
                       f"{base} of {self.arch.tmem_columns}: it never returns")  # fmt: skip
            base = 0
        if rank in cluster.tmem_released:
            self.found("protocol", ("alloc", "permit"), lambda: f"{self.who(warp)}: tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        owned[base] = columns
        cluster.tmem_group[rank] = group
        self.store_word(warp, pointer, base)
        if self.race:
            access = Access(warp.id, int(warp.clock[warp.id]), warp, "tcgen05.alloc", self.now)
            access.blank = True
            self.shadow(cluster, rank, "tmem").write(self._tmem(0, TMEM_LANES, base, columns), access, warp.clock)
        return self.spend(warp, 20)

    def tmem_dealloc(self, warp: Warp, mask: Lanes, address: Any, columns: Any, group: int) -> float:
        """tcgen05.dealloc."""
        cluster, rank = warp.cluster, warp.rank
        if not mask.all():
            self.found("protocol", ("lanes", "dealloc"), lambda: f"{self.who(warp)}: tcgen05.dealloc with {int(np.count_nonzero(mask))} of 32 lanes")
        base, columns = int(address) & 0xFFFF, int(columns)
        owned = cluster.tmem.get(rank, {})
        if base not in owned:
            self.found("protocol", ("dealloc", "twice"), lambda: f"{self.who(warp)}: tcgen05.dealloc of TMEM column {base}, which is not "
                       f"allocated in cta{rank} (freed twice, or by too many warps?)")  # fmt: skip
            return self.spend(warp, 4)
        held = owned.pop(base)
        if held != columns:
            self.found("protocol", ("dealloc", "size"), lambda: f"{self.who(warp)}: tcgen05.dealloc of {columns} columns; {held} were allocated")
        if group != cluster.tmem_group.get(rank, group):
            self.found("protocol", ("dealloc", "group"), lambda: f"{self.who(warp)}: tcgen05.dealloc with another cta_group than the allocation")
        if self.race:
            access = Access(warp.id, int(warp.clock[warp.id]), warp, "tcgen05.dealloc", self.now)
            access.blank = True
            self.shadow(cluster, rank, "tmem").write(self._tmem(0, TMEM_LANES, base, held), access, warp.clock, freeing=True)
        return self.spend(warp, 4)

    def tmem_relinquish(self, warp: Warp, mask: Lanes, group: int) -> float:
        """tcgen05.relinquish_alloc_permit."""
        warp.cluster.tmem_released.add(warp.rank)
        return self.spend(warp, 4)

    def _tmem(self, lane: int, lanes: int, column: int, columns: int) -> Region:
        return self.regions.find(("tmem", lane, lanes, column, columns), lambda: tensor_region(lane, lanes, column, columns))

    def _tmem_owned(self, warp: Warp, rank: int, column: int, columns: int, verb: str) -> None:
        for base, held in warp.cluster.tmem.get(rank, {}).items():
            if base <= column and column + columns <= base + held:
                return
        self.found("protocol", ("tmem range", verb), lambda: f"{self.who(warp)}: {verb} on TMEM columns {column}:{column + columns} of cta{rank}, "
                   f"which holds {warp.cluster.tmem.get(rank, {}) or 'none'} (first column: count)")  # fmt: skip

    def tensor(self, warp: Warp, rank: int) -> Any:
        """Return the tensor memory of CTA ``rank``, poisoned at first use."""
        found = warp.cluster.tensor.get(rank)
        if found is None:
            found = warp.cluster.tensor[rank] = np.full((TMEM_LANES, self.arch.tmem_columns), np.nan, np.float32)
        return found

    # ---- tcgen05

    def mma(self, warp: Warp, mask: Lanes, address: Any, columns: int, a: Region, b: Region, accumulate: Any, group: int,
            formats: tuple[str, str]) -> float:  # fmt: skip
        """tcgen05.mma kind::f16: D[128, columns] (+)= A . B^T in each CTA of the group; B is split over the group's CTAs."""
        cluster, costs = warp.cluster, self.costs
        warp.activities.add("mma")
        self.one_lane(warp, mask, "tcgen05.mma")
        agent = cluster.agent(("mma", warp.id))
        ranks: tuple[int, ...] = (warp.rank,)
        if group == 2:
            ranks = (warp.rank & ~1, warp.rank | 1)
            if self.ctas < 2:
                self.found("protocol", ("group",), lambda: f"{self.who(warp)}: tcgen05.mma with cta_group::2 in a cluster of one CTA")
                ranks = (warp.rank,)
        address, accumulate = int(address), bool(accumulate)
        column, tick = address & 0xFFFF, warp.mma_tick
        for rank in ranks:
            self._tmem_owned(warp, rank, column, columns, "tcgen05.mma")
        if self.race:
            target = self._tmem(0, TMEM_LANES, column, columns)
            clock, after = warp.clock, warp.after
            access = Access(agent, tick, warp, "tcgen05.mma", self.now)
            access.tensor = True
            for rank in ranks:
                shared = self.shadow(cluster, rank, "smem")
                shared.read(a, access, clock, proxy=True)
                shared.read(b, access, clock, proxy=True)
                tensor = self.shadow(cluster, rank, "tmem")
                if accumulate:
                    tensor.read(target, access, clock, own=agent, after=after)
                tensor.write(target, access, clock, own=agent, after=after)
                self.touch(cluster, rank, agent, tick, "tcgen05.mma")
        depth = a.units.shape[1]
        cycles = costs.mma_cycles(a.units.shape[0], columns, depth, len(ranks))
        start = max(self.now + warp.lag + costs.mma_issue, cluster.pipe_free.get((warp.rank, 0), 0.0))
        end = start + cycles
        cluster.pipe_free[(warp.rank, 0)] = end
        warp.mma_end = end
        self.busy["tensor core"] += cycles * len(ranks)
        if self.tracing:
            for rank in ranks:
                self.slice(cluster.index * self.ctas + rank, "tensor core", f"mma {a.label}", start, end, "mma")
        if self.numerics:
            self.push(end + costs.mma_latency * 0.5, self._mma_done, (warp, ranks, column, columns, a, b, accumulate, formats))
        return self.spend(warp, costs.mma_issue)

    def mma_descriptors(self, warp: Warp, mask: Lanes, address: Any, a: Any, b: Any, idesc: Any, accumulate: Any, group: int) -> float:
        """tcgen05.mma with matrix descriptors and an instruction descriptor."""
        idesc = int(idesc)
        # PTX ISA, "Instruction descriptor" of kind::f16: D format 4-5 (1 = f32), A 7-9, B 10-12 (0 = f16, 1 = bf16),
        # negate and transpose 13-16, N/8 at 17-22, M/16 at 24-28.
        if idesc >> 4 & 3 != 1 or idesc >> 13 & 15 or idesc >> 7 & 7 > 1 or idesc >> 10 & 7 > 1:
            raise UnsupportedOp(f"tcgen05.mma instruction descriptor {idesc:#x}; modelled: f32 += f16/bf16, K-major, not negated")
        formats = (("float16", "bfloat16")[idesc >> 7 & 7], ("float16", "bfloat16")[idesc >> 10 & 7])
        n, m = (idesc >> 17 & 0x3F) * 8, (idesc >> 24 & 0x1F) * 16
        if m // group != TMEM_LANES:
            raise UnsupportedOp(f"tcgen05.mma with M={m}, cta_group::{group}; modelled: 128 rows per CTA")
        left, right = self.operand("tcgen05", int(a), m // group), self.operand("tcgen05", int(b), n // group)
        return self.mma(warp, mask, address, n, left, right, accumulate, group, formats)

    def _mma_done(self, event: tuple[Any, ...]) -> None:
        warp, ranks, column, columns, a, b, accumulate, (a_format, b_format) = event
        right = np.concatenate([decode(self.memory(warp, rank)[b.units], b_format) for rank in ranks]).T
        for rank in ranks:
            product = decode(self.memory(warp, rank)[a.units], a_format) @ right
            target = self.tensor(warp, rank)[: product.shape[0], column : column + columns]
            if product.shape != target.shape:
                self.found("protocol", ("mma shape",), lambda p=product.shape: f"{self.who(warp)}: tcgen05.mma of {p} does not fit columns "
                           f"{column}:{column + columns}")  # fmt: skip
                continue
            if accumulate:
                target += product
            else:
                target[...] = product

    def mma_commit(self, warp: Warp, mask: Lanes, pointer: Pointer, ctas: Any, group: int) -> float:
        """tcgen05.commit: arrive on the barrier, in every CTA of bit mask ``ctas`` if given, when prior MMAs are done."""
        costs, cluster = self.costs, warp.cluster
        self.one_lane(warp, mask, "tcgen05.commit")
        agent = cluster.agent(("mma", warp.id))
        tick = warp.mma_tick
        clock = self.release(warp)
        clock[agent] = tick
        warp.mma_tick += 1
        time = max(self.now + warp.lag, warp.mma_end) + costs.mma_latency + costs.commit_latency
        if ctas is None:
            targets = [int(pointer) >> WINDOW_BITS]
        else:
            targets = [r for r in range(16) if int(ctas) >> r & 1]
            if not targets or targets[-1] >= self.ctas:
                self.found("protocol", ("commit mask",), lambda: f"{self.who(warp)}: tcgen05.commit to CTA mask {int(ctas):#b} in a cluster of {self.ctas}")
                targets = [r for r in targets if r < self.ctas]
        for rank in targets:
            bar = self.bar_at(warp, rank, int(pointer) & OFFSET_MASK)
            self.check_live(warp, bar, "tcgen05.commit", True)
            if rank != warp.rank:
                self.touch(cluster, rank, agent, tick, "tcgen05.commit by a peer CTA")
            jitter = self.random.random() * self.memory_jitter if self.seed else 0.0
            delay = jitter + (costs.remote_latency if rank != warp.rank else 0.0)
            self.arrive_later(time + delay, bar, 1, clock, warp, "tcgen05.commit", agent, tick)
        return self.spend(warp, 4)

    def tensor_fence(self, warp: Warp, mask: Lanes, after: bool) -> float:
        """tcgen05.fence::after_thread_sync or ::before_thread_sync."""
        if after:
            warp.after = warp.clock.copy()
        else:
            agents = warp.cluster.agents
            done = agents.get(("loaded", warp.id))
            if done is not None:
                warp.clock[agents[("load", warp.id)]] = warp.clock[done]
        return self.spend(warp, 1)

    def tmem_load(self, warp: Warp, mask: Lanes, reg: Registers, first: int, columns: int, address: Any) -> float:
        """tcgen05.ld.32x32b: the warp's 32 lanes of ``columns`` columns, one column per register."""
        costs, cluster = self.costs, warp.cluster
        warp.activities.add("tmem_load")
        if not mask.all():
            self.found("protocol", ("lanes", "tcgen05.ld"), lambda: f"{self.who(warp)}: tcgen05.ld with {int(np.count_nonzero(mask))} of 32 lanes")
        address, lane = int(address), 32 * warp.index
        column = address & 0xFFFF
        # PTX ISA, "tcgen05.ld", access restrictions: a warp reaches only the 32 lanes of its place in the warpgroup.
        if address >> 16 not in (0, lane):
            self.found("protocol", ("tmem lanes",), lambda: f"{self.who(warp)}: tcgen05.ld at lane {address >> 16}; this warp reaches lanes {lane}:{lane + 32}")
        self._tmem_owned(warp, warp.rank, column, columns, "tcgen05.ld")
        if self.race:
            strict, done = cluster.agent(("load", warp.id)), cluster.agent(("loaded", warp.id))
            access = Access(strict, warp.load_tick, warp, "tcgen05.ld", self.now)
            access.fenced_agent, access.tensor = done, True
            self.shadow(cluster, warp.rank, "tmem").read(self._tmem(lane, 32, column, columns), access, warp.clock, after=warp.after)
        if reg.words is not None:
            reg.f32[:, first : first + columns] = self.tensor(warp, warp.rank)[lane : lane + 32, column : column + columns]
        warp.loading[id(reg)] = (reg, -1)
        time = self.now + warp.lag
        warp.load_ready = max(time, warp.load_ready) + costs.tmem_load_latency + columns * 128 / costs.tmem_load_bw
        return self.spend(warp, 4)

    def tmem_wait(self, warp: Warp, mask: Lanes, load: bool) -> float:
        """tcgen05.wait::ld (``load``) or ::st."""
        if not load:
            raise UnsupportedOp("tcgen05.wait::st; tcgen05.st is not modelled")
        warp.loading = {key: value for key, value in warp.loading.items() if value[1] >= 0}
        warp.clock[warp.cluster.agent(("loaded", warp.id))] = warp.load_tick
        warp.cluster.agent(("load", warp.id))
        warp.load_tick += 1
        return self.spend(warp, max(1.0, warp.load_ready - self.now - warp.lag))

    # ---- wgmma

    def _wgmma(self, warp: Warp) -> tuple[WgmmaGroup, WgmmaWarp]:
        if warp.wgmma is None:
            warp.wgmma = WgmmaWarp()
        groups = warp.cluster.groups
        found = groups.get((warp.rank, warp.group))
        if found is None:
            found = groups[(warp.rank, warp.group)] = WgmmaGroup()
        return found, warp.wgmma

    def wgmma_fence(self, warp: Warp, mask: Lanes) -> float:
        """wgmma.fence: orders register accesses before the following wgmma."""
        _, mine = self._wgmma(warp)
        mine.fenced.add(-1)
        mine.dirty.clear()
        return self.spend(warp, 2)

    def wgmma(self, warp: Warp, mask: Lanes, reg: Registers, first: int, n: int, a: Any, b: Any, scale_d: Any, formats: tuple[str, str]) -> float:
        """wgmma.mma_async.m64nNk16: the warpgroup's D[64, n] (+)= A[64, 16] . B[n, 16]^T; each warp keeps 16 rows."""
        warp.activities.add("wgmma")
        if not mask.all():
            self.found("protocol", ("lanes", "wgmma"), lambda: f"{self.who(warp)}: wgmma with {int(np.count_nonzero(mask))} of 32 lanes")
        group, mine = self._wgmma(warp)
        if not mine.fenced or id(reg) in mine.dirty:
            self.found("protocol", ("wgmma.fence", warp.group), lambda: f"{self.who(warp)}: wgmma on registers '{reg.name or 'accumulator'}' that "
                       "were touched since the last wgmma.fence")  # fmt: skip
            mine.dirty.discard(id(reg))
            mine.fenced.add(-1)
        number = mine.issued
        mine.issued += 1
        warp.loading[id(reg)] = (reg, number)
        waiting = group.issued.setdefault(number, [])
        waiting.append((warp, reg, first, int(a), int(b), bool(scale_d), n))
        if len(waiting) == 4:
            self._wgmma_start(group, number, formats)
        return self.spend(warp, self.costs.mma_issue)

    def _wgmma_start(self, group: WgmmaGroup, number: int, formats: tuple[str, str]) -> None:
        costs = self.costs
        operands = group.issued.pop(number)
        warp, _, first, a, b, scale_d, n = operands[-1]
        if any(entry[2:] != operands[0][2:] for entry in operands):
            self.found("protocol", ("wgmma operands",), lambda: f"{self.who(warp)}: the four warps of the warpgroup issue wgmma {number} with different operands")
        cluster = warp.cluster
        left, right = self.operand("wgmma", a, 64), self.operand("wgmma", b, n)
        if self.race:
            agent = cluster.agent(("wgmma", warp.rank, warp.group))
            access = Access(agent, number + 1, warp, "wgmma", self.now)
            shared = self.shadow(cluster, warp.rank, "smem")
            shared.read(left, access, warp.clock, proxy=True)
            shared.read(right, access, warp.clock, proxy=True)
        cycles = costs.mma_cycles(64, n, MMA_K)
        start = max(self.now + warp.lag + costs.mma_issue, cluster.pipe_free.get((warp.rank, 0), 0.0))
        end = start + cycles
        cluster.pipe_free[(warp.rank, 0)] = end
        self.busy["tensor core"] += cycles
        group.ends.append(end)
        if self.tracing:
            self.slice(warp.bx, "tensor core", f"wgmma wg{warp.group} {left.label}", start, end, "mma")
        if self.numerics:
            self.push(end, self._wgmma_done, (operands, left, right, formats))
        if group.waiting:
            still = []
            for waiter, needed in group.waiting:
                if needed <= len(group.ends):
                    self._wgmma_ready(waiter, group, needed)
                else:
                    still.append((waiter, needed))
            group.waiting = still

    def _wgmma_done(self, event: tuple[Any, ...]) -> None:
        operands, left, right, (a_format, b_format) = event
        memory = self.memory(operands[0][0], operands[0][0].rank)
        product = decode(memory[left.units], a_format) @ decode(memory[right.units], b_format).T
        n = product.shape[1]
        i = np.arange(n // 2)[None, :]
        # PTX ISA, wgmma D fragment: lane l of warp w holds rows 16w + l/4 (+8), columns 8j + 2(l%4) (+1).
        column = i // 4 * 8 + _LANES % 4 * 2 + i % 2
        for warp, reg, first, _, _, scale_d, _ in operands:
            values = product[16 * warp.index + _LANES // 4 + 8 * (i % 4 // 2), column]
            target = reg.f32[:, first : first + n // 2]
            if scale_d:
                target += values
            else:
                target[...] = values

    def wgmma_commit(self, warp: Warp, mask: Lanes) -> float:
        """wgmma.commit_group."""
        _, mine = self._wgmma(warp)
        mine.commits.append(mine.issued)
        return self.spend(warp, 2)

    def wgmma_wait(self, warp: Warp, mask: Lanes, groups: Any) -> Any:
        """wgmma.wait_group: at most ``groups`` committed groups stay in flight."""
        group, mine = self._wgmma(warp)
        index = len(mine.commits) - 1 - int(groups)
        needed = mine.commits[index] if index >= 0 else 0
        if needed > len(group.ends):
            warp.block = ("wgmma", f"operation {needed} of its warpgroup", None)
            warp.since = self.now + warp.lag
            warp.lag = 0.0
            group.waiting.append((warp, needed))
            return BLOCK
        end = self._wgmma_clear(warp, group, needed)
        time = self.now + warp.lag
        if end > time:
            warp.waits["tensor core"] = warp.waits.get("tensor core", 0.0) + end - time
            lag, warp.lag = warp.lag, 0.0
            return lag + end - time
        return self.spend(warp, 2)

    def _wgmma_clear(self, warp: Warp, group: WgmmaGroup, needed: int) -> float:
        if needed == 0:
            return 0.0
        warp.clock[warp.cluster.agent(("wgmma", warp.rank, warp.group))] = needed
        warp.loading = {key: value for key, value in warp.loading.items() if value[1] < 0 or value[1] >= needed}
        return group.ends[needed - 1] + self.costs.mma_latency

    def _wgmma_ready(self, warp: Warp, group: WgmmaGroup, needed: int) -> None:
        end = self._wgmma_clear(warp, group, needed)
        until = max(end, self.now)
        warp.waits["tensor core"] = warp.waits.get("tensor core", 0.0) + max(0.0, until - warp.since)
        self.push(until, self.resume, warp)

    # ---- 32-bit words in shared memory (the TMEM address)

    def store_word(self, warp: Warp, pointer: Pointer, value: int) -> None:
        """Write a 32-bit scalar to shared memory."""
        rank, offset = int(pointer) >> WINDOW_BITS, int(pointer) & OFFSET_MASK
        if self.race:
            access = Access(warp.id, int(warp.clock[warp.id]), warp, "scalar store", self.now)
            access.generic = True
            self.shadow(warp.cluster, rank, "smem").write(self._word(offset), access, warp.clock)
        warp.cluster.words[(rank, offset)] = int(value)

    def load_word(self, warp: Warp, pointer: Pointer) -> int:
        """Read a 32-bit scalar from shared memory."""
        rank, offset = int(pointer) >> WINDOW_BITS, int(pointer) & OFFSET_MASK
        if (rank, offset) not in warp.cluster.words:
            self.found("uninitialized", ("word", offset), lambda: f"{self.who(warp)} reads the scalar at shared-memory byte {offset} before "
                       "anyone wrote it")  # fmt: skip
            return 0
        if self.race:
            access = Access(warp.id, int(warp.clock[warp.id]), warp, "scalar load", self.now)
            self.shadow(warp.cluster, rank, "smem").read(self._word(offset), access, warp.clock)
        return warp.cluster.words[(rank, offset)]

    def _word(self, offset: int) -> Region:
        return self.shared(("word", offset), np.array([[offset // 2, offset // 2 + 1]], np.int64))
