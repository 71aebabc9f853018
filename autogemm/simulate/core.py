"""The machine: event loop, warps, CTAs and clusters, and all that synchronizes them (mbarriers, named and cluster barriers).

Every warp is one Python generator that the program's front end compiled. It calls operations on the machine; an operation
returns 0 (go on), a delay in cycles, or BLOCK (something else will resume the warp). Cheap operations only add to the warp's
``lag`` and hand it back once it exceeds a quantum, so that warps may run ahead of the event clock by that much.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from ..arch import Arch
from ..results import FindingKind
from .cost import CostTable
from .race import INFINITE, Access, Clock, Region, Shadow
from .report import Findings, barrier_family, barrier_label, deadlock_text, role

if TYPE_CHECKING:
    from .program import Program, Survey

BLOCK: Final = object()
POISON: Final = 0x7FFF  # a NaN in float16 and in bfloat16: what unwritten memory holds
WARPS_PER_GROUP: Final = 4
MAX_COUNT: Final = (1 << 20) - 1  # PTX ISA, "mbarrier": arrival counts 1..2^20-1, tx-count within +-(2^20-1)

Lanes = npt.NDArray[np.bool_]
# An address in the cluster's shared-memory window: CTA rank and byte offset in one integer, as the hardware's 32-bit
# shared::cluster addresses are; a vector where it varies by lane.
Pointer = Any
WINDOW_BITS: Final = 24
OFFSET_MASK: Final = (1 << WINDOW_BITS) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """One interval of a timeline.

    Attributes:
        cta: CTA index in the grid.
        track: what was busy (``wg2.w3``, ``TMA``, ``tensor core``, ``store``).
        name: what it did.
        start_cycle, end_cycle: when.
        kind: ``wait``, ``tma``, ``mma``, ``store``, ``work``.
    """

    cta: int
    track: str
    name: str
    start_cycle: float
    end_cycle: float
    kind: str


class Mbarrier:
    """One mbarrier: phase, pending arrivals, tx-count, and the clocks that its phases hand over."""

    __slots__ = (
        "arrived", "cleared", "clock", "count", "entries", "init", "live", "offset", "pending", "phase", "previous", "published", "rank",
        "tx", "waiters",
    )  # fmt: skip

    def __init__(self, rank: int, offset: int, agents: int) -> None:
        self.rank, self.offset = rank, offset
        self.live = False
        self.cleared: set[int] = set()  # agents whose use was found to be ordered after mbarrier.init (+1000: async uses)
        self.count = self.pending = self.tx = self.phase = 0
        self.clock: Clock = np.zeros(agents, np.int32)  # of this phase's arrivals so far
        self.published: Clock = np.zeros(agents, np.int32)
        self.waiters: list[tuple[Warp, int]] = []
        self.arrived: list[str] = []
        self.init: tuple[int, int, int, int] = (0, 0, 0, 0)  # agent, tick; tick of its proxy fence, of its mbarrier_init fence
        self.entries: dict[int, int] = {}  # agent -> tick of this phase's arrivals
        self.previous: list[tuple[int, int]] = []


class Named:
    """One generation of a named barrier (``number`` >= 0) or of the cluster barrier."""

    __slots__ = ("arrived", "clock", "members", "need", "number", "previous", "time", "waiters")

    def __init__(self, number: int, need: int, agents: int, previous: dict[int, int]) -> None:
        self.number, self.need = number, need
        self.arrived = 0
        self.clock: Clock = np.zeros(agents, np.int32)
        self.members: list[tuple[Warp, int]] = []
        self.waiters: list[Warp] = []
        self.previous = previous
        self.time = 0.0


class Warp:
    """One warp: its generator, clock and asynchronous work in flight."""

    __slots__ = (
        "activities", "after", "block", "bulk_done", "bulk_lane", "bulk_open", "bulk_tick", "bx", "clock", "cluster", "done", "gen", "group",
        "id", "index", "inits", "lag", "load_ready", "load_tick", "loading", "mma_end", "mma_tick", "rank", "registers", "single", "since", "wait",
        "waits", "wgmma",
    )  # fmt: skip

    def __init__(self, cluster: Cluster, rank: int, group: int, index: int, ctas: int) -> None:
        self.cluster, self.rank, self.group, self.index = cluster, rank, group, index
        self.bx = cluster.index * ctas + rank
        self.id = cluster.agent(("warp", rank, group, index))
        self.clock: Clock = np.zeros(cluster.agents_max, np.int32)
        self.clock[self.id] = 1
        self.after: Clock = np.zeros(cluster.agents_max, np.int32)  # clock at the last tcgen05.fence::after_thread_sync
        self.gen: Generator[Any, None, None]
        self.block: tuple[str, Any, Any] | None = None
        self.done = False
        self.lag = self.since = 0.0
        self.registers = 0
        self.activities: set[str] = set()
        self.waits: dict[str, float] = {}
        self.wait = ""
        self.inits: list[Mbarrier] = []
        self.single: Lanes | None = None  # the mask last found to hold exactly one lane
        self.mma_tick, self.mma_end = 1, 0.0
        self.bulk_open: list[float] = []
        self.bulk_done: list[float] = []
        self.bulk_tick = 1
        self.bulk_lane = 0
        self.loading: dict[int, Any] = {}
        self.load_tick, self.load_ready = 1, 0.0
        self.wgmma: Any = None


class Cluster:
    """One cluster: shared memory, tensor memory, barriers, shadows and agents of its CTAs."""

    def __init__(self, index: int, ctas: int) -> None:
        self.index, self.ctas = index, ctas
        self.agents_max = 32 + 80 * ctas
        self.agents: dict[Hashable, int] = {}
        self.ticks: dict[int, int] = {}
        self.shared: dict[int, npt.NDArray[np.uint16]] = {}
        self.tensor: dict[int, npt.NDArray[np.float32]] = {}
        self.words: dict[tuple[int, int], int] = {}  # 32-bit scalars in shared memory (the TMEM address)
        self.barriers: dict[tuple[int, int], Mbarrier] = {}
        self.named: dict[tuple[int, int], Named] = {}
        self.shadows: dict[tuple[int, str], Shadow] = {}
        self.warps: list[Warp] = []
        self.tmem: dict[int, dict[int, int]] = {}  # CTA -> first column -> columns allocated
        self.tmem_group: dict[int, int] = {}
        self.tmem_released: set[int] = set()
        self.free_registers = [0] * ctas
        self.register_queue: list[tuple[Warp, int]] = []
        self.in_free, self.out_free, self.store_free = [0.0] * ctas, [0.0] * ctas, [0.0] * ctas
        self.pipe_free: dict[tuple[int, int], float] = {}
        self.touched: dict[tuple[int, int], tuple[int, str]] = {}  # (CTA, agent) -> (last tick it targets the CTA with, what)
        self.final: dict[int, Clock] = {}  # CTA -> join of its warps' clocks at exit
        self.groups: dict[tuple[int, int], Any] = {}

    def agent(self, key: Hashable) -> int:
        """Return the number of the agent called ``key``."""
        found = self.agents.get(key)
        if found is None:
            found = self.agents[key] = len(self.agents)
            if found >= self.agents_max:
                raise AssertionError(f"more than {self.agents_max} agents in a cluster")
        return found

    def tick(self, agent: int) -> int:
        """Return the next tick of an agent without a warp of its own."""
        found = self.ticks[agent] = self.ticks.get(agent, 0) + 1
        return found


class Core:
    """Event loop, memory and synchronization; the engines are mixed in by Machine.

    Args:
        program: compiled PrimFunc.
        arch: limits.
        parameters: values of run-time scalars and extents.
        arrays: global buffers as 16-bit patterns, or None where only shapes are known.
        costs: cost table.
        seed: 0 runs without jitter; any other value draws random delays.
        numerics, race: compute numbers, detect races.
        tracing: record ``slices``.
        clusters: cluster indices to execute; None for all.
        quantum: cycles a warp may run ahead of the event clock.
    """

    def __init__(
        self,
        program: Program,
        *,
        arch: Arch,
        parameters: Mapping[str, int],
        arrays: Mapping[str, npt.NDArray[np.uint16] | None],
        shapes: Mapping[str, tuple[int, ...]],
        costs: CostTable,
        seed: int = 0,
        numerics: bool = True,
        race: bool = True,
        tracing: bool = False,
        clusters: Iterable[int] | None = None,
        quantum: float = 60.0,
        max_events: int = 50_000_000,
    ) -> None:
        self.program, self.arch, self.costs = program, arch, costs
        self.P, self.arrays, self.shapes = dict(parameters), dict(arrays), dict(shapes)
        self.numerics, self.race, self.tracing = numerics, race, tracing
        self.seed, self.quantum, self.max_events = seed, quantum, max_events
        self.random = random.Random(seed)
        # Mixed scales: small jitter reorders neighbours, large jitter starves one role for many stages.
        scale = (0.0, 1.0, 8.0, 50.0)[0 if seed == 0 else 1 + seed % 3]
        self.warp_jitter, self.memory_jitter = 4.0 * scale, 60.0 * scale
        self.now = 0.0
        self.events = 0
        self.findings = Findings()
        self.poisoned = Findings()  # reads of memory no one wrote: reported only if poison reached the output
        self.slices: list[Slice] = []
        self.busy: dict[str, float] = {"tensor core": 0.0, "tma in": 0.0, "tma out": 0.0}
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._sequence = 0
        self._survey: Survey | None = None
        self.grid = program.grid(self.P)
        self.ctas = program.cluster_ctas
        self.groups = program.warpgroups
        self.regions = program.regions
        if program.smem_bytes > arch.smem_bytes:
            self.found("resource", "smem", lambda: f"{program.smem_bytes} B of shared memory per CTA; {arch.name} allows {arch.smem_bytes}")
        if self.grid % self.ctas:
            self.found("resource", "grid", lambda: f"grid of {self.grid} CTAs is no multiple of the cluster size {self.ctas}")
        launched = range(self.grid // self.ctas) if clusters is None else clusters
        self.clusters = [self._launch(index) for index in launched]

    # ---- start, run, finish

    def _launch(self, index: int) -> Cluster:
        cluster = Cluster(index, self.ctas)
        # Registers per thread at launch: an even share of the SM, rounded down to 8 (setmaxnreg's unit).
        threads = self.groups * WARPS_PER_GROUP * 32
        share = min(self.arch.max_registers + 1, self.arch.registers_per_sm // threads // 8 * 8)
        for rank in range(self.ctas):
            for group in range(self.groups):
                for i in range(WARPS_PER_GROUP):
                    warp = Warp(cluster, rank, group, i, self.ctas)
                    warp.registers = share
                    warp.gen = self.program.main(self, warp)
                    cluster.warps.append(warp)
                    self.push(self.costs.launch + (self.random.random() * self.memory_jitter if self.seed else 0.0), self.resume, warp)
        return cluster

    def push(self, time: float, action: Callable[[Any], None], argument: Any) -> None:
        """Schedule ``action(argument)``."""
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, action, argument))

    def resume(self, warp: Warp) -> None:
        """Run ``warp`` until it must wait."""
        warp.block = None
        delay = next(warp.gen, None)
        if delay is None:
            self._exit(warp)
        elif delay is not BLOCK:
            self.push(self.now + delay, self.resume, warp)

    def spend(self, warp: Warp, cycles: float) -> float:
        """Charge ``cycles`` to ``warp``; return the delay to hand back, 0 while it may run ahead."""
        if self.seed:
            draw = self.random.random()
            cycles += draw * self.warp_jitter * (1.0 if draw < 0.97 else 30.0)
        lag = warp.lag + cycles
        if lag > self.quantum:
            warp.lag = 0.0
            return lag
        warp.lag = lag
        return 0.0

    def run(self) -> None:
        """Execute until nothing is left to do, then look at what did not finish."""
        heap = self._heap
        count, limit = 0, self.max_events
        with np.errstate(all="ignore"):
            while heap:
                self.now, _, action, argument = heapq.heappop(heap)
                action(argument)
                count += 1
                if count > limit:
                    self.found("deadlock", "events", lambda: f"no end after {limit} events; a loop waits for something that never comes")
                    break
        self.events = count
        stuck = [w for cluster in self.clusters for w in cluster.warps if not w.done]
        if stuck and count <= limit:
            self.found("deadlock", "deadlock", lambda: deadlock_text(self, stuck))
        elif not stuck:
            for cluster in self.clusters:
                self._finish(cluster)

    def _exit(self, warp: Warp) -> None:
        warp.done = True
        final = warp.cluster.final.get(warp.rank)
        if final is None:
            warp.cluster.final[warp.rank] = warp.clock.copy()
        else:
            np.maximum(final, warp.clock, out=final)
        if warp.bulk_open or warp.bulk_done:
            what = "never committed" if warp.bulk_open else "not waited for"
            self.found("protocol", ("bulk exit", what), lambda: f"{self.who(warp)} exits with bulk stores {what}: the TMA engine may "
                       "still read its shared memory (missing cp.async.bulk.commit_group or wait_group)")  # fmt: skip

    def _finish(self, cluster: Cluster) -> None:
        for rank, owned in cluster.tmem.items():
            columns = sum(owned.values())
            if not columns:
                continue
            self.found("protocol", ("leak",), lambda rank=rank, columns=columns:
                       f"cta{rank} exits without tcgen05.dealloc of its {columns} TMEM columns")  # fmt: skip
        for bar in cluster.barriers.values():
            if bar.tx:
                self.found("protocol", ("tx", barrier_family(self.program, bar.offset)), lambda bar=bar:
                           f"{self.label(bar)} ends with {bar.tx} B of its tx-count outstanding")  # fmt: skip
        if not self.race:
            return
        for (rank, agent), (tick, what) in cluster.touched.items():
            if tick > cluster.final[rank][agent]:
                self.found("protocol", ("exit", what.split(" of ")[0].split(" by ")[0]), lambda rank=rank, what=what:
                           f"cta{rank} may exit while {what} still targets it; nothing orders its exit after that "
                           "(missing wait, or final cluster barrier)")  # fmt: skip

    # ---- findings

    def found(self, kind: FindingKind, key: Hashable, text: Callable[[], str]) -> None:
        """Record a finding."""
        self.findings.add(kind, key, self.now, text)

    def survey(self) -> Survey:
        """Return the dry run of the program that tells what each warp does."""
        if self._survey is None:
            self._survey = self.program.survey(self.P, self.shapes)
        return self._survey

    def who(self, warp: Warp) -> str:
        """Return ``cta0.wg2.w3 (TMA producer)``."""
        title = role(self.survey().activities.get((warp.rank, warp.group, warp.index), set()) | warp.activities)
        return f"cta{warp.rank}.wg{warp.group}.w{warp.index}" + (f" ({title})" if title else "")

    def label(self, bar: Mbarrier) -> str:
        """Return the name of a barrier."""
        return barrier_label(self.program, bar.rank, bar.offset)

    def slice(self, cta: int, track: str, name: str, start: float, end: float, kind: str) -> None:
        """Record one interval of the timeline."""
        self.slices.append(Slice(cta=cta, track=track, name=name, start_cycle=start, end_cycle=end, kind=kind))

    # ---- shadows

    def shadow(self, cluster: Cluster, rank: int, space: str) -> Shadow:
        """Return the shadow of one CTA's ``smem`` or ``tmem``."""
        found = cluster.shadows.get((rank, space))
        if found is None:
            found = cluster.shadows[(rank, space)] = Shadow(
                self.regions,
                lambda r, o, a, e, ew, w: self._race(rank, r, o, a, e, ew, w),
                lambda what, r, a, e: self._fault(rank, what, r, a, e),
            )
        return found

    def _race(self, rank: int, region: Region, other: Region, access: Access, earlier: Access, earlier_writes: bool, writes: bool) -> None:
        verb, earlier_verb = access.verb, earlier.verb
        first, second = "write" if writes else "read", "write" if earlier_writes else "read"
        flying = ", which is still in flight" if earlier.tick >= INFINITE else ""
        via = f" (as {other.label})" if other.label != region.label else ""
        one, two, cycle = access.warp, earlier.warp, earlier.cycle
        key = (region.label.split("[")[0], verb, earlier_verb, first, second, one.group, two.group)
        self.found("race", key, lambda: f"cta{rank}.{region.label}: {first} by {verb} of {self.who(one)} is not ordered after the "
                   f"{second} by {earlier_verb} of {self.who(two)}{via} at cycle {cycle:.0f}{flying}")  # fmt: skip

    def _fault(self, rank: int, what: str, region: Region, access: Access, earlier: Access | None) -> None:
        warp, verb = access.warp, access.verb
        if what == "blank":
            self.poisoned.add("uninitialized", (region.label.split("[")[0], verb), self.now, lambda:
                              f"cta{rank}.{region.label}: {verb} of {self.who(warp)} reads what no one wrote")  # fmt: skip
            return
        assert earlier is not None
        other, other_verb = earlier.warp, earlier.verb
        key = (what, region.label.split("[")[0], verb, other_verb)
        if what == "proxy":
            self.found("race", key, lambda: f"cta{rank}.{region.label}: {verb} of {self.who(warp)} (async proxy) follows the generic "
                       f"write by {other_verb} of {self.who(other)} without fence.proxy.async in between")  # fmt: skip
        elif what == "after":
            self.found("protocol", key, lambda: f"cta{rank}.{region.label}: {verb} of {self.who(warp)} follows {other_verb} of "
                       f"{self.who(other)} without tcgen05.fence::after_thread_sync after the wait")  # fmt: skip
        else:
            self.found("protocol", key, lambda: f"cta{rank}.{region.label}: {verb} of {self.who(warp)} follows {other_verb} of "
                       f"{self.who(other)}, which executed no tcgen05.fence::before_thread_sync before it signalled")  # fmt: skip

    def touch(self, cluster: Cluster, rank: int, agent: int, tick: int, what: str) -> None:
        """Note that ``agent`` targets CTA ``rank``; the CTA must not exit before."""
        old = cluster.touched.get((rank, agent))
        if old is None or old[0] < tick:
            cluster.touched[(rank, agent)] = (tick, what)

    # ---- mbarriers

    def bar(self, warp: Warp, pointer: Pointer) -> Mbarrier:
        """Return the mbarrier at ``pointer``."""
        pointer = int(pointer)
        return self.bar_at(warp, pointer >> WINDOW_BITS, pointer & OFFSET_MASK)

    def bar_at(self, warp: Warp, rank: int, offset: int) -> Mbarrier:
        """Return the mbarrier at byte ``offset`` of CTA ``rank``."""
        key = (rank, offset)
        found = warp.cluster.barriers.get(key)
        if found is None:
            if not 0 <= key[0] < self.ctas:
                self.found("protocol", ("rank",), lambda: f"{self.who(warp)} addresses CTA {key[0]} of a cluster of {self.ctas}")
                key = (key[0] % self.ctas, key[1])
            found = warp.cluster.barriers.setdefault(key, Mbarrier(*key, warp.cluster.agents_max))
        return found

    def release(self, warp: Warp) -> Clock:
        """Return a copy of the warp's clock for others, and open its next tick."""
        clock = warp.clock.copy()
        warp.clock[warp.id] += 1
        return clock

    def mbarrier_init(self, warp: Warp, mask: Lanes, pointer: Pointer, count: int) -> float:
        """mbarrier.init."""
        bar = self.bar(warp, pointer)
        if bar.live:
            self.found("protocol", ("init2", bar.offset), lambda: f"{self.who(warp)} initializes {self.label(bar)} a second time")
        if not 1 <= count <= MAX_COUNT:
            self.found("protocol", ("count", bar.offset), lambda: f"{self.label(bar)} initialized with count {count}; allowed: 1 to {MAX_COUNT}")
        bar.live = True
        bar.count = bar.pending = int(count)
        bar.init = (warp.id, int(warp.clock[warp.id]), 0, 0)
        warp.inits.append(bar)
        return self.spend(warp, 4)

    def fence_mbarrier_init(self, warp: Warp, mask: Lanes) -> float:
        """fence.mbarrier_init.release.cluster."""
        for bar in warp.inits:
            if not bar.init[3]:
                bar.init = (*bar.init[:3], int(warp.clock[warp.id]))
        return self.spend(warp, 10)

    def fence_proxy(self, warp: Warp, mask: Lanes) -> float:
        """fence.proxy.async."""
        for bar in warp.inits:
            if not bar.init[2]:
                bar.init = (*bar.init[:2], int(warp.clock[warp.id]), bar.init[3])
        if self.race:
            for rank in range(self.ctas):
                shadow = warp.cluster.shadows.get((rank, "smem"))
                if shadow is not None and shadow.generic_writes:
                    shadow.fence_proxy(warp.id, warp.clock)
        return self.spend(warp, 10)

    def check_live(self, warp: Warp, bar: Mbarrier, what: str, asynchronous: bool) -> None:
        """Check that ``bar`` was initialized, and that the use by ``warp`` is ordered after it."""
        if warp.id + (1000 if asynchronous else 0) in bar.cleared:
            return
        family = barrier_family(self.program, bar.offset)
        if not bar.live:
            self.found("protocol", ("uninitialized barrier", family), lambda: f"{what} of {self.who(warp)} uses {self.label(bar)} "
                       "before any mbarrier.init")  # fmt: skip
            return
        bar.cleared.add(warp.id + (1000 if asynchronous else 0))  # clocks only grow: one check will do
        if not self.race:
            return
        agent, tick, proxied, fenced = bar.init
        if tick > warp.clock[agent]:
            hint = "cluster" if bar.rank != warp.rank else "CTA"
            self.found("race", ("init", family), lambda: f"{what} of {self.who(warp)} uses {self.label(bar)} with no ordering after "
                       f"its mbarrier.init (needs a {hint} barrier in between)")  # fmt: skip
        elif bar.rank != warp.rank and not fenced:
            self.found("protocol", ("init fence", family), lambda: f"{what} of {self.who(warp)} uses {self.label(bar)} of another CTA, "
                       "but its initializer executed no fence.mbarrier_init.release.cluster")  # fmt: skip
        elif asynchronous and not fenced and not proxied:
            self.found("protocol", ("init fence", family), lambda: f"{what} of {self.who(warp)} uses {self.label(bar)} through the async "
                       "proxy, but its initializer executed neither fence.mbarrier_init nor fence.proxy.async")  # fmt: skip

    def mbarrier_wait(self, warp: Warp, mask: Lanes, pointer: Pointer, parity: Any) -> Any:
        """mbarrier.try_wait.parity, repeated until it succeeds."""
        bar = self.bar(warp, pointer)
        self.check_live(warp, bar, "mbarrier wait", False)
        if bar.rank != warp.rank:
            self.found("protocol", ("remote wait", bar.offset), lambda: f"{self.who(warp)} waits on {self.label(bar)} of another CTA; "
                       "waits are local only")  # fmt: skip
        parity = int(parity)
        if (bar.phase & 1) != parity:
            np.maximum(warp.clock, bar.published, out=warp.clock)
            return self.spend(warp, 6)
        warp.block = ("mbarrier", bar, parity)
        warp.since = self.now + warp.lag
        warp.lag = 0.0
        bar.waiters.append((warp, parity))
        return BLOCK

    def _wake(self, warp: Warp, bar: Mbarrier) -> None:
        np.maximum(warp.clock, bar.published, out=warp.clock)
        time = max(self.now, warp.since)
        if self.now > warp.since:
            name = self.label(bar)
            warp.waits[name] = warp.waits.get(name, 0.0) + self.now - warp.since
            if self.tracing:
                self.slice(warp.bx, f"wg{warp.group}.w{warp.index}", "wait " + name, warp.since, self.now, "wait")
        self.push(time + self.costs.wake_latency, self.resume, warp)

    def arrive_later(self, time: float, bar: Mbarrier, count: int, clock: Clock, warp: Warp, what: str, agent: int, tick: int,
                     completed: int = 0, expected: int = 0) -> None:  # fmt: skip
        """Schedule an arrival (``count``), complete_tx or expect_tx on ``bar`` at ``time``."""
        self.push(time, self._arrive, (bar, count, clock, warp, what, agent, tick, completed, expected))

    def _arrive(self, event: tuple[Any, ...]) -> None:
        bar, count, clock, warp, what, agent, tick, completed, expected = event
        if not bar.live:
            self.check_live(warp, bar, what, False)
        if self.race:
            if bar.previous:
                for other, when in bar.previous:
                    if when > clock[other]:
                        self.found("race", ("phase", barrier_family(self.program, bar.offset), what), lambda:
                                   f"{what} of {self.who(warp)} on {self.label(bar)} is not ordered after the barrier's previous phase: "
                                   "in another schedule it would count there")  # fmt: skip
                        break
            bar.entries[agent] = tick  # an agent's ticks only grow
            np.maximum(bar.clock, clock, out=bar.clock)
        bar.tx += expected - completed
        bar.pending -= count
        if count and len(bar.arrived) < 6:
            bar.arrived.append(f"cta{warp.rank}.wg{warp.group}.w{warp.index}")
        if bar.pending < 0:
            self.found("protocol", ("over", barrier_family(self.program, bar.offset)), lambda phase=bar.phase, tx=bar.tx:
                       f"{what} of {self.who(warp)}: more than the {bar.count} arrivals that phase {phase} of {self.label(bar)} takes"
                       + (f" ({tx} B of transactions outstanding)" if tx else ""))  # fmt: skip
            bar.pending = 0
        if not -MAX_COUNT <= bar.tx <= MAX_COUNT:
            self.found("protocol", ("tx range", barrier_family(self.program, bar.offset)), lambda tx=bar.tx:
                       f"tx-count {tx} of {self.label(bar)} is outside the allowed +-{MAX_COUNT}")  # fmt: skip
        if bar.pending == 0 and bar.tx == 0:
            self._complete(bar)

    def _complete(self, bar: Mbarrier) -> None:
        np.maximum(bar.published, bar.clock, out=bar.published)
        bar.clock[:] = 0
        bar.previous, bar.entries = list(bar.entries.items()), {}
        bar.phase += 1
        bar.pending = bar.count
        bar.arrived.clear()
        if bar.waiters:
            waiters, bar.waiters = bar.waiters, []
            for warp, parity in waiters:
                if (bar.phase & 1) != parity:
                    self._wake(warp, bar)
                else:
                    bar.waiters.append((warp, parity))

    def mbarrier_arrive(self, warp: Warp, mask: Lanes, pointer: Pointer, count: int = 1, expected: int = 0, what: str = "mbarrier.arrive") -> float:
        """mbarrier.arrive by every lane in ``mask``, on one barrier or (lane-varying rank) on several; with expect_tx bytes."""
        targets: dict[int, int] = {}
        if isinstance(pointer, np.ndarray):
            for lane in np.flatnonzero(mask):
                targets[int(pointer[lane])] = targets.get(int(pointer[lane]), 0) + 1
        else:
            targets[int(pointer)] = int(np.count_nonzero(mask))
        tick = int(warp.clock[warp.id])
        clock = self.release(warp)
        time = self.now + warp.lag
        for target, lanes in targets.items():
            bar = self.bar(warp, target)
            self.check_live(warp, bar, what, False)
            remote = bar.rank != warp.rank
            if remote:
                self.touch(warp.cluster, bar.rank, warp.id, tick, f"{what} by a peer CTA")
            jitter = self.random.random() * self.memory_jitter if self.seed else 0.0
            delay = (self.costs.remote_latency if remote else self.costs.arrive_latency) + jitter
            self.arrive_later(time + delay, bar, lanes * int(count), clock, warp, what, warp.id, tick, expected=int(expected) * lanes)
        return self.spend(warp, 4)

    def mbarrier_expect(self, warp: Warp, mask: Lanes, pointer: Pointer, size: Any) -> float:
        """mbarrier.arrive.expect_tx."""
        return self.mbarrier_arrive(warp, mask, pointer, 1, int(size), "mbarrier.arrive.expect_tx")

    # ---- named barriers, cluster barrier

    def _join(self, warp: Warp, mask: Lanes, key: tuple[int, int], need: int, wait: bool, what: str) -> Any:
        cluster = warp.cluster
        if not mask.all():
            self.found("protocol", ("divergent", what), lambda: f"{self.who(warp)} reaches {what} with {int(np.count_nonzero(mask))} of 32 lanes")
        state = cluster.named.get(key)
        if state is None:
            state = cluster.named[key] = Named(key[1], need, cluster.agents_max, {})
        if state.arrived and state.need != need:
            other = state.need
            self.found("protocol", ("barrier count", key[1]), lambda: f"{self.who(warp)} joins {what} for {need * 32} threads while others "
                       f"use it for {other * 32}")  # fmt: skip
        state.need = need
        tick = int(warp.clock[warp.id])
        if self.race:
            for agent, when in state.previous.items():
                if when > warp.clock[agent]:
                    self.found("race", ("generation", key[1], warp.group), lambda: f"{self.who(warp)} arrives at {what}, but nothing orders "
                               "that after the barrier's previous use by other warps: in another schedule it would count there")  # fmt: skip
                    break
        np.maximum(state.clock, self.release(warp), out=state.clock)
        state.members.append((warp, tick))
        state.arrived += 1
        state.time = max(state.time, self.now + warp.lag)
        result: Any = BLOCK
        if wait:
            warp.block = ("named", state, None)
            warp.since = self.now + warp.lag
            warp.lag = 0.0
            warp.wait = what
            state.waiters.append(warp)
        else:
            result = self.spend(warp, 4)
        if state.arrived >= state.need:
            following = Named(key[1], need, cluster.agents_max, {w.id: t for w, t in state.members})
            cluster.named[key] = following
            release = max(state.time, self.now) + self.costs.barrier_latency
            for other_warp in state.waiters:
                np.maximum(other_warp.clock, state.clock, out=other_warp.clock)
                if state.time > other_warp.since:
                    name = other_warp.wait
                    other_warp.waits[name] = other_warp.waits.get(name, 0.0) + state.time - other_warp.since
                    if self.tracing:
                        track = f"wg{other_warp.group}.w{other_warp.index}"
                        self.slice(other_warp.bx, track, name, other_warp.since, state.time, "wait")
                self.push(release, self.resume, other_warp)
        return result

    def bar_sync(self, warp: Warp, mask: Lanes, number: Any, threads: Any, wait: bool = True) -> Any:
        """bar.sync (``wait``) or bar.arrive."""
        number, threads = int(number), int(threads)
        if not 0 <= number <= 15 or threads % 32 or threads < 32:
            self.found("protocol", ("barrier id", number), lambda: f"{self.who(warp)}: bar {number} for {threads} threads; ids are 0 to 15, "
                       "thread counts multiples of 32")  # fmt: skip
        return self._join(warp, mask, (warp.rank, number), max(1, threads // 32), wait, f"named barrier {number}")

    def cta_sync(self, warp: Warp, mask: Lanes) -> Any:
        """__syncthreads."""
        return self._join(warp, mask, (warp.rank, 0), self.groups * WARPS_PER_GROUP, True, "named barrier 0 (CTA)")

    def warpgroup_sync(self, warp: Warp, mask: Lanes, number: Any) -> Any:
        """bar.sync of one warpgroup's 128 threads."""
        return self.bar_sync(warp, mask, number, 128)

    def cluster_sync(self, warp: Warp, mask: Lanes) -> Any:
        """barrier.cluster.arrive and wait (release, acquire)."""
        return self._join(warp, mask, (-1, -1), self.groups * WARPS_PER_GROUP * self.ctas, True, "the cluster barrier")

    def warp_sync(self, warp: Warp, mask: Lanes) -> float:
        """__syncwarp: a warp is one thread of execution here."""
        return self.spend(warp, 1)

    def nothing(self, warp: Warp, mask: Lanes) -> float:
        """An instruction without effect inside one kernel (prefetch, dependent launch)."""
        return self.spend(warp, 1)

    # ---- register budget

    def setmaxnreg(self, warp: Warp, mask: Lanes, count: Any, increase: bool) -> Any:
        """setmaxnreg: give registers back to the CTA's pool, or wait until the pool holds enough."""
        count = int(count)
        if not 24 <= count <= 256 or count % 8:  # PTX ISA, "setmaxnreg"
            self.found("protocol", ("setmaxnreg range",), lambda: f"{self.who(warp)}: setmaxnreg {count}; allowed: 24 to 256 in steps of 8")
        before = warp.registers
        if (count < before) if increase else (count > before):
            word = "inc" if increase else "dec"
            self.found("protocol", ("setmaxnreg direction",), lambda: f"{self.who(warp)}: setmaxnreg.{word} {count} with {before} registers")
            warp.registers = count
            return self.spend(warp, 4)
        cluster = warp.cluster
        if not increase:
            warp.registers = count
            cluster.free_registers[warp.rank] += (before - count) * 32
            self._grant(cluster)
            return self.spend(warp, 4)
        cluster.register_queue.append((warp, count))
        warp.block = ("registers", count, cluster.free_registers[warp.rank])
        warp.since = self.now + warp.lag
        warp.lag = 0.0
        self._grant(cluster)
        return BLOCK

    def _grant(self, cluster: Cluster) -> None:
        waiting, cluster.register_queue = cluster.register_queue, []
        for warp, count in waiting:
            need = (count - warp.registers) * 32
            if need <= cluster.free_registers[warp.rank]:
                cluster.free_registers[warp.rank] -= need
                warp.registers = count
                self.push(max(self.now, warp.since) + 4, self.resume, warp)
            else:
                warp.block = ("registers", count, cluster.free_registers[warp.rank])
                cluster.register_queue.append((warp, count))
