"""Happens-before race detection: vector clocks over warps and asynchronous agents, shadow state over memory regions.

An *agent* is anything that acts in program order of its own: a warp, a warp's tcgen05 queue, the TMA writes that complete on
one mbarrier, a warp's bulk stores, a warp's tcgen05.ld, a warpgroup's wgmma queue. Each agent has a counter (tick). A clock
holds, for every agent of a cluster, the last tick that its owner has synchronized with. An asynchronous write is recorded when
it is issued, with an infinite tick, and gets its tick when it completes: nobody may touch the region in between.

Two accesses that overlap, of which one writes, race unless the earlier one's tick is in the later one's clock. That holds for
every schedule with the same synchronization, so one execution finds hazards that gave right numbers by luck.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from .layout import Offsets

if TYPE_CHECKING:
    from .state import Warp

Clock = npt.NDArray[np.int32]
INFINITE: Final = 1 << 40  # tick of an asynchronous write still in flight


class Region:
    """A set of shared-memory bytes or a rectangle of tensor memory, interned in a RegionTable.

    Attributes:
        units: for shared memory, 2-byte-unit offsets [rows, columns] in the order of the elements.
        mask: for shared memory, one bit per 4 bytes.
        box: for tensor memory, (first lane, lanes, first column, columns).
    """

    __slots__ = ("box", "high", "id", "label", "low", "mask", "space", "units")

    def __init__(self, space: str, label: str) -> None:
        self.id = -1
        self.space, self.label = space, label
        self.units: Offsets = np.empty((0, 0), np.int64)
        self.mask = self.low = self.high = 0
        self.box = (0, 0, 0, 0)

    def relation(self, other: Region) -> tuple[bool, bool, bool]:
        """Return (overlaps, covers other, is covered by other)."""
        if self.space == "tmem":
            l1, n1, c1, m1 = self.box
            l2, n2, c2, m2 = other.box
            overlaps = l1 < l2 + n2 and l2 < l1 + n1 and c1 < c2 + m2 and c2 < c1 + m1
            covers = l1 <= l2 and l2 + n2 <= l1 + n1 and c1 <= c2 and c2 + m2 <= c1 + m1
            covered = l2 <= l1 and l1 + n1 <= l2 + n2 and c2 <= c1 and c1 + m1 <= c2 + m2
            return overlaps, covers, covered
        if self.high <= other.low or other.high <= self.low:
            return False, False, False
        both = self.mask & other.mask
        return both != 0, both == other.mask, both == self.mask


class RegionTable:
    """All regions one program touches, with the graph of their overlaps; shared by every execution of the program."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.overlaps: list[list[tuple[int, bool]]] = []  # region -> (other region, does the first cover the other)
        self._by_content: dict[tuple[Any, ...], Region] = {}
        self._by_key: dict[tuple[Any, ...], Region] = {}

    def get(self, key: tuple[Any, ...]) -> Region | None:
        """Return the region cached under ``key``, or None."""
        return self._by_key.get(key)

    def find(self, key: tuple[Any, ...], build: Callable[[], Region]) -> Region:
        """Return the region cached under ``key``, built and interned at first use."""
        region = self._by_key.get(key)
        if region is None:
            region = self._by_key[key] = self._intern(build())
        return region

    def _intern(self, new: Region) -> Region:
        new.id = len(self.regions)
        mine = [(new.id, True)]
        for other in self.regions:
            if other.space == new.space:
                overlaps, covers, covered = new.relation(other)
                if overlaps:
                    mine.append((other.id, covers))
                    self.overlaps[other.id].append((new.id, covered))
        self.regions.append(new)
        self.overlaps.append(mine)
        return new


def shared_region(units: Offsets, label: str) -> Region:
    """Return the (not yet interned) Region of shared-memory elements at 2-byte-unit offsets ``units`` [rows, columns]."""
    region = Region("smem", label)
    region.units = units
    granules = units.reshape(-1) >> 1
    low, high = int(granules.min()), int(granules.max()) + 1
    bits = np.zeros(high - low, np.uint8)
    bits[granules - low] = 1
    region.mask = int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little") << low
    region.low, region.high = low, high
    return region


def tensor_region(lane: int, lanes: int, column: int, columns: int) -> Region:
    """Return the (not yet interned) Region of a rectangle of tensor memory."""
    region = Region("tmem", f"tmem[{lane}:{lane + lanes}, {column}:{column + columns}]")
    region.box = (lane, lanes, column, columns)
    return region


class Access:
    """One recorded access.

    Attributes:
        agent, tick: who, and when in that agent's order.
        fenced_agent: for tcgen05.ld, the agent whose ticks stand for completion *without* fence::before_thread_sync; else -1.
        generic: written through the generic proxy.
        fences: warps that executed fence.proxy.async after it, with their tick then.
        strong: a relaxed or atomic access to global memory: unordered ones do not race with each other (workspace.py).
        tensor: an asynchronous tcgen05 access to tensor memory, which needs fence::after_thread_sync on the other side.
        blank: a write that leaves undefined contents (allocation).
        current: False once something overwrote it.
    """

    __slots__ = ("agent", "blank", "current", "cycle", "fenced_agent", "fences", "generic", "strong", "tensor", "tick", "verb",
                 "warp")  # fmt: skip

    def __init__(self, agent: int, tick: int, warp: Warp, verb: str, cycle: float) -> None:
        self.agent, self.tick, self.warp, self.verb, self.cycle = agent, tick, warp, verb, cycle
        self.generic = self.tensor = self.blank = self.strong = False
        self.current = True
        self.fenced_agent = -1
        self.fences: dict[int, int] = {}


# Called as on_race(region, other region, access, earlier access, earlier is a write); and with a text for the other findings.
RaceSink = Callable[[Region, Region, Access, Access, bool, bool], None]
FaultSink = Callable[[str, Region, Access, "Access | None"], None]


class Shadow:
    """What was last written to and read from each region of one CTA's shared or tensor memory."""

    __slots__ = ("_fault", "_race", "generic_writes", "state", "table")

    def __init__(self, table: RegionTable, race: RaceSink, fault: FaultSink) -> None:
        self.table = table
        self.state: dict[int, tuple[Access | None, list[Access]]] = {}
        self.generic_writes: list[Access] = []
        self._race, self._fault = race, fault

    def read(self, region: Region, access: Access, clock: Clock, *, own: int = -1, proxy: bool = False,
             after: Clock | None = None) -> None:  # fmt: skip
        """Record a read and check it against earlier writes.

        Args:
            clock: what the reader has synchronized with.
            own: agent in whose order the access runs anyway (accumulation in one tcgen05 queue).
            proxy: True for the async proxy, before which generic writes need fence.proxy.async.
            after: clock at the reader's last tcgen05.fence::after_thread_sync, for tensor memory.
        """
        state = self.state
        found = False
        for other, _ in self.table.overlaps[region.id]:
            entry = state.get(other)
            if entry is None or entry[0] is None:
                continue
            write = entry[0]
            if not write.blank:
                found = True
            if write.agent != own:
                if write.tick > clock[write.agent]:
                    self._unordered(region, other, access, write, clock, True, False)
                elif after is not None and write.tensor and write.tick > after[write.agent]:
                    self._fault("after", region, access, write)
                elif proxy and write.generic and not any(tick <= clock[a] for a, tick in write.fences.items()):
                    self._fault("proxy", region, access, write)
        if not found:
            self._fault("blank", region, access, None)
        entry = state.get(region.id)
        if entry is None:
            state[region.id] = (None, [access])
        else:
            reads = entry[1]
            for i, read in enumerate(reads):
                if read.agent == access.agent:
                    reads[i] = access
                    return
            reads.append(access)

    def write(self, region: Region, access: Access, clock: Clock, *, own: int = -1, proxy: bool = False,
              after: Clock | None = None, freeing: bool = False) -> None:  # fmt: skip
        """Record a write and check it against earlier writes and reads; arguments as for ``read``.

        ``freeing`` accepts a completed tcgen05.ld that no fence::before_thread_sync followed.
        """
        state = self.state
        for other, covers in self.table.overlaps[region.id]:
            entry = state.get(other)
            if entry is None:
                continue
            write, reads = entry
            if write is not None and write.agent != own:
                if write.tick > clock[write.agent]:
                    self._unordered(region, other, access, write, clock, True, True)
                elif after is not None and write.tensor and write.tick > after[write.agent]:
                    self._fault("after", region, access, write)
                elif proxy and write.generic and not any(tick <= clock[a] for a, tick in write.fences.items()):
                    self._fault("proxy", region, access, write)
            for read in reads:
                if read.agent == own:
                    continue
                if read.tick > clock[read.agent]:
                    if not (freeing and read.fenced_agent >= 0 and read.tick <= clock[read.fenced_agent]):
                        self._unordered(region, other, access, read, clock, False, True)
                elif after is not None and read.tensor and read.tick > after[read.agent]:
                    self._fault("after", region, access, read)
            if covers and other != region.id:
                if write is not None:
                    write.current = False
                del state[other]
        old = state.get(region.id)
        if old is not None and old[0] is not None:
            old[0].current = False
        state[region.id] = (access, [])
        if access.generic:
            self.generic_writes.append(access)

    def _unordered(self, region: Region, other: int, access: Access, earlier: Access, clock: Clock, earlier_writes: bool,
                   writes: bool) -> None:  # fmt: skip
        if earlier.fenced_agent >= 0 and earlier.tick <= clock[earlier.fenced_agent]:
            self._fault("before", region, access, earlier)
        else:
            self._race(region, self.table.regions[other], access, earlier, earlier_writes, writes)

    def fence_proxy(self, warp_agent: int, clock: Clock) -> None:
        """Note a fence.proxy.async of a warp: it covers every generic write in the warp's clock."""
        kept = []
        tick = int(clock[warp_agent])
        for write in self.generic_writes:
            if write.current:
                kept.append(write)
                if write.tick <= clock[write.agent]:
                    write.fences.setdefault(warp_agent, tick)
        self.generic_writes = kept
