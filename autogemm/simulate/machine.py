"""The machine that compiled programs run on: all operations together, wgmma among them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .layout import MMA_K
from .race import Access
from .registers import Registers, decode, words_of
from .state import BLOCK, Lanes, Slice, Warp
from .tcgen05 import Tcgen05Ops
from .workspace import WorkspaceOps

__all__ = ["Machine", "Slice"]

_LANES: Final = np.arange(32)[:, None]


class WgmmaGroup:
    """wgmma of one warpgroup: operation i runs when its four warps have issued it (the instruction is collective)."""

    __slots__ = ("ends", "issued", "ticks", "waiting")

    def __init__(self) -> None:
        self.issued: dict[int, list[Any]] = {}  # operation -> operands, one entry per warp so far
        self.ends: list[float] = []
        self.ticks: list[list[tuple[int, int]]] = []  # per operation: (agent, tick) of the four warps when they issued it
        self.waiting: list[tuple[Warp, int]] = []


class WgmmaWarp:
    """One warp's place in its warpgroup's wgmma stream."""

    __slots__ = ("commits", "dirty", "fenced", "issued")

    def __init__(self) -> None:
        self.issued = 0
        self.commits: list[int] = []
        self.fenced: set[int] = set()  # register tiles that a wgmma.fence covers
        self.dirty: set[int] = set()  # register tiles touched since


class Machine(Tcgen05Ops, WorkspaceOps):
    """All operations that compiled programs call; Core's docstring says what it takes."""

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

    def wgmma(
        self,
        warp: Warp,
        mask: Lanes,
        reg: Registers,
        first: int,
        n: int,
        a: Any,
        b: Any,
        scale_d: Any,
        formats: tuple[str, str],
    ) -> float:
        """wgmma.mma_async.m64nNk16: the warpgroup's D[64, n] (+)= A[64, 16] . B[n, 16]^T; each warp keeps 16 rows."""
        warp.activities.add("wgmma")
        if not mask.all():
            self.found(
                "protocol",
                ("lanes", "wgmma"),
                lambda: f"{self.who(warp)}: wgmma with {int(np.count_nonzero(mask))} of 32 lanes",
            )
        group, mine = self._wgmma(warp)
        if not mine.fenced or id(reg) in mine.dirty:
            self.found(
                "protocol",
                ("wgmma.fence", warp.group),
                lambda: (
                    f"{self.who(warp)}: wgmma on registers "
                    f"'{reg.name or 'accumulator'}' that "
                    "were touched since the last wgmma.fence"
                ),
            )
            mine.dirty.discard(id(reg))
            mine.fenced.add(-1)
        bits = words_of(first, n // 2)
        if scale_d and bits & ~reg.written:
            self.never_written(warp, reg.name or "accumulator")
        reg.written |= bits
        number = mine.issued
        mine.issued += 1
        warp.loading[id(reg)] = (reg, number)
        tick = int(warp.clock[warp.id])
        warp.clock[warp.id] += 1
        waiting = group.issued.setdefault(number, [])
        waiting.append((warp, reg, first, int(a), int(b), bool(scale_d), n, tick))
        if len(waiting) == 4:
            self._wgmma_start(group, number, formats)
        return self.spend(warp, self.costs.mma_issue)

    def _wgmma_start(self, group: WgmmaGroup, number: int, formats: tuple[str, str]) -> None:
        costs = self.costs
        operands = group.issued.pop(number)
        warp, _, _, a, b, _, n, _ = operands[-1]
        group.ticks.append([(entry[0].id, entry[-1]) for entry in operands])
        if any(entry[2:-1] != operands[0][2:-1] for entry in operands):
            self.found(
                "protocol",
                ("wgmma operands",),
                lambda: f"{self.who(warp)}: the four warps of the warpgroup issue wgmma {number} with different operands",
            )
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
        for warp, reg, first, _, _, scale_d, *_ in operands:
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
        # The operation is collective: it ran, so all four warps had come as far as issuing it.
        for agent, tick in group.ticks[needed - 1]:
            if warp.clock[agent] < tick:
                warp.clock[agent] = tick
        warp.loading = {key: value for key, value in warp.loading.items() if value[1] < 0 or value[1] >= needed}
        return group.ends[needed - 1] + self.costs.mma_latency

    def _wgmma_ready(self, warp: Warp, group: WgmmaGroup, needed: int) -> None:
        end = self._wgmma_clear(warp, group, needed)
        until = max(end, self.now)
        warp.waits["tensor core"] = warp.waits.get("tensor core", 0.0) + max(0.0, until - warp.since)
        self.push(until, self.resume, warp)
