"""The TMA engine: tensor maps, loads with multicast, stores in bulk groups, overlapping stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ..errors import UnsupportedOp
from .layout import TensorMap
from .race import INFINITE, Access, Region
from .registers import RegisterOps
from .state import OFFSET_MASK, PREVIOUS_KERNEL, WINDOW_BITS, Lanes, Pointer, Warp

_CELL: Final = 64  # edge of the cells that sort output boxes for overlap tests


class TmaOps(RegisterOps):
    """cp.async.bulk.tensor and what belongs to it."""

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
            found = TensorMap(
                name, self.arrays[name], v[:rank], v[rank : 2 * rank - 1], v[2 * rank - 1 : 3 * rank - 1], int(swizzle)
            )
            self.maps[key] = found
        return found

    def map_region(self, tmap: TensorMap, offset: int) -> Region:
        """Return the shared-memory region of a box at byte ``offset``."""
        key = ("box", offset, tmap.box, tmap.swizzle)
        found = self.regions.get(key)
        return found if found is not None else self.shared(key, tmap.shared_offsets(offset))

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
                self.found(
                    "protocol",
                    ("tma alignment",),
                    lambda: f"{self.who(warp)}: TMA load to shared-memory byte {offset}; addresses must be multiples of 128",
                )
            region = self.map_region(tmap, offset)
        if ctas is None:
            targets = [(rank, bar_rank)]
            if group == 1 and bar_rank != rank:
                self.found(
                    "protocol",
                    ("tma barrier",),
                    lambda: (
                        f"{self.who(warp)}: TMA load into cta{rank} completes "
                        f"on a barrier of "
                        f"cta{bar_rank}; only .cta_group::2 may signal a peer's"
                    ),
                )
        else:
            chosen = [r for r in range(16) if int(ctas) >> r & 1]
            if not chosen or chosen[-1] >= self.ctas:
                self.found(
                    "protocol",
                    ("multicast",),
                    lambda: f"{self.who(warp)}: TMA multicast to CTA mask {int(ctas):#b} in a cluster of {self.ctas}",
                )
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
        if self.dependent and not clock[PREVIOUS_KERNEL]:
            self.during_previous(warp, tmap.name, tmap.label(coords), "TMA load", writes=False)
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
                self.slice(
                    cluster.index * self.ctas + target, "TMA", f"{region.label} <- {tmap.name}{list(coords)}", time, done, "tma"
                )
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
            if self.dependent and not warp.clock[PREVIOUS_KERNEL]:
                self.during_previous(warp, tmap.name, tmap.label(coords), "TMA store", writes=True)
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
                        self._overlap(warp, tmap.name, (top, bottom, left, right), writes, owner, index)
                        break
                if writes:
                    found.append(entry)

    def _overlap(self, warp: Warp, name: str, box: tuple[int, int, int, int], writes: bool, owner: Warp, other: int) -> None:
        verb, mine = "store" if writes else "load", warp.cluster.index
        self.found(
            "race",
            ("output", name, writes),
            lambda: (
                f"{name}[{box[0]}:{box[1]}, {box[2]}:{box[3]}]: TMA {verb} of {self.who(warp)} in cluster {mine} overlaps one "
                f"already stored by {self.who(owner)} in cluster {other}, unordered"
            ),
        )

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
