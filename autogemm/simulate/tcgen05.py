"""tcgen05: tensor memory, its allocation, MMAs, commits, loads and fences."""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np

from ..errors import UnsupportedOp
from .layout import decode_descriptor
from .race import Access, Region, tensor_region
from .registers import Registers, decode, words_of
from .state import OFFSET_MASK, WINDOW_BITS, Lanes, Pointer, Warp
from .tma import TmaOps

TMEM_LANES: Final = 128


class Tcgen05Ops(TmaOps):
    """Operations of the fifth-generation tensor core."""

    def operand(self, kind: Literal["tcgen05", "wgmma"], bits: int, rows: int) -> Region:
        """Return the shared-memory region [rows, MMA_K] that a matrix descriptor names."""
        key = (kind, bits, rows)
        found = self.regions.get(key)
        return found if found is not None else self.shared(key, decode_descriptor(kind, bits).offsets(rows))

    # ---- tensor memory

    def tmem_alloc(self, warp: Warp, mask: Lanes, pointer: Pointer, columns: Any, group: int) -> float:
        """tcgen05.alloc: the address (column) goes to the 32-bit word at ``pointer``."""
        cluster, rank, columns = warp.cluster, warp.rank, int(columns)
        if not mask.all():
            self.found(
                "protocol",
                ("lanes", "alloc"),
                lambda: f"{self.who(warp)}: tcgen05.alloc with {int(np.count_nonzero(mask))} of 32 lanes",
            )
        owned = cluster.tmem.setdefault(rank, {})
        base = sum(owned.values())
        if columns < 32 or columns & (columns - 1) or columns > self.arch.tmem_columns:
            self.found(
                "protocol",
                ("alloc size",),
                lambda: (
                    f"{self.who(warp)}: tcgen05.alloc of {columns} columns; a "
                    f"power of two from 32 to "
                    f"{self.arch.tmem_columns} is allowed"
                ),
            )
        if base + columns > self.arch.tmem_columns:
            self.found(
                "protocol",
                ("alloc", "again"),
                lambda: (
                    f"{self.who(warp)}: tcgen05.alloc of {columns} columns "
                    f"while cta{rank} holds "
                    f"{base} of {self.arch.tmem_columns}: it never returns"
                ),
            )
            base = 0
        if rank in cluster.tmem_released:
            self.found(
                "protocol",
                ("alloc", "permit"),
                lambda: f"{self.who(warp)}: tcgen05.alloc after tcgen05.relinquish_alloc_permit",
            )
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
            self.found(
                "protocol",
                ("lanes", "dealloc"),
                lambda: f"{self.who(warp)}: tcgen05.dealloc with {int(np.count_nonzero(mask))} of 32 lanes",
            )
        base, columns = int(address) & 0xFFFF, int(columns)
        owned = cluster.tmem.get(rank, {})
        if base not in owned:
            self.found(
                "protocol",
                ("dealloc", "twice"),
                lambda: (
                    f"{self.who(warp)}: tcgen05.dealloc of TMEM column "
                    f"{base}, which is not "
                    f"allocated in cta{rank} (freed twice, or by too many warps?)"
                ),
            )
            return self.spend(warp, 4)
        held = owned.pop(base)
        if held != columns:
            self.found(
                "protocol",
                ("dealloc", "size"),
                lambda: f"{self.who(warp)}: tcgen05.dealloc of {columns} columns; {held} were allocated",
            )
        if group != cluster.tmem_group.get(rank, group):
            self.found(
                "protocol",
                ("dealloc", "group"),
                lambda: f"{self.who(warp)}: tcgen05.dealloc with another cta_group than the allocation",
            )
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
        self.found(
            "protocol",
            ("tmem range", verb),
            lambda: (
                f"{self.who(warp)}: {verb} on TMEM columns "
                f"{column}:{column + columns} of cta{rank}, "
                f"which holds {warp.cluster.tmem.get(rank, {}) or 'none'} (first column: count)"
            ),
        )

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
                self.found(
                    "protocol", ("group",), lambda: f"{self.who(warp)}: tcgen05.mma with cta_group::2 in a cluster of one CTA"
                )
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

    def mma_descriptors(
        self, warp: Warp, mask: Lanes, address: Any, a: Any, b: Any, idesc: Any, accumulate: Any, group: int
    ) -> float:
        """tcgen05.mma with matrix descriptors and an instruction descriptor."""
        idesc = int(idesc)
        # PTX ISA, "Instruction descriptor" of kind::f16: D format 4-5 (1 = f32), A 7-9, B 10-12 (0 = f16, 1 = bf16),
        # negate and transpose 13-16, N/8 at 17-22, M/16 at 24-28.
        if idesc >> 4 & 3 != 1 or idesc >> 13 & 15 or idesc >> 7 & 7 > 1 or idesc >> 10 & 7 > 1:
            raise UnsupportedOp(
                f"tcgen05.mma instruction descriptor {idesc:#x}; modelled: f32 += f16/bf16, K-major, not negated"
            )
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
                text = f"tcgen05.mma of {product.shape} does not fit columns {column}:{column + columns}"
                self.found("protocol", ("mma shape",), text.__str__)
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
                self.found(
                    "protocol",
                    ("commit mask",),
                    lambda: f"{self.who(warp)}: tcgen05.commit to CTA mask {int(ctas):#b} in a cluster of {self.ctas}",
                )
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
            self.found(
                "protocol",
                ("lanes", "tcgen05.ld"),
                lambda: f"{self.who(warp)}: tcgen05.ld with {int(np.count_nonzero(mask))} of 32 lanes",
            )
        address, lane = int(address), 32 * warp.index
        column = address & 0xFFFF
        # PTX ISA, "tcgen05.ld", access restrictions: a warp reaches only the 32 lanes of its place in the warpgroup.
        if address >> 16 not in (0, lane):
            self.found(
                "protocol",
                ("tmem lanes",),
                lambda: f"{self.who(warp)}: tcgen05.ld at lane {address >> 16}; this warp reaches lanes {lane}:{lane + 32}",
            )
        self._tmem_owned(warp, warp.rank, column, columns, "tcgen05.ld")
        if self.race:
            strict, done = cluster.agent(("load", warp.id)), cluster.agent(("loaded", warp.id))
            access = Access(strict, warp.load_tick, warp, "tcgen05.ld", self.now)
            access.fenced_agent, access.tensor = done, True
            self.shadow(cluster, warp.rank, "tmem").read(
                self._tmem(lane, 32, column, columns), access, warp.clock, after=warp.after
            )
        reg.written |= words_of(first, columns)
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
            self.found(
                "uninitialized",
                ("word", offset),
                lambda: f"{self.who(warp)} reads the scalar at shared-memory byte {offset} before anyone wrote it",
            )
            return 0
        if self.race:
            access = Access(warp.id, int(warp.clock[warp.id]), warp, "scalar load", self.now)
            self.shadow(warp.cluster, rank, "smem").read(self._word(offset), access, warp.clock)
        return warp.cluster.words[(rank, offset)]

    def _word(self, offset: int) -> Region:
        return self.shared(("word", offset), np.array([[offset // 2, offset // 2 + 1]], np.int64))
