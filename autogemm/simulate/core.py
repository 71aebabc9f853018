"""Event loop of the machine, its findings and its shadow memory; synchronization and engines are mixed in.

Every warp is one Python generator that the program's front end compiled. It calls operations on the machine; an operation
returns 0 (go on), a delay in cycles, or BLOCK (something else will resume the warp). Cheap operations only add to the warp's
``lag`` and hand it back once it exceeds a quantum, so that warps may run ahead of the event clock by that much.
"""

from __future__ import annotations

import gc
import heapq
import random
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..arch import Arch
from ..results import FindingKind
from .cost import CostTable
from .race import INFINITE, Access, Region, Shadow
from .report import Findings, barrier_family, barrier_label, deadlock_text, role
from .state import BLOCK, WARPS_PER_GROUP, Cluster, Mbarrier, Slice, Warp

if TYPE_CHECKING:
    from .program import Program
    from .survey import Survey


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
            self.found(
                "resource",
                "smem",
                lambda: f"{program.smem_bytes} B of shared memory per CTA; {arch.name} allows {arch.smem_bytes}",
            )
        if self.grid % self.ctas:
            self.found("resource", "grid", lambda: f"grid of {self.grid} CTAs is no multiple of the cluster size {self.ctas}")
        launched = range(self.grid // self.ctas) if clusters is None else clusters
        if len(self.findings):
            launched = ()  # the launch fails; there is nothing to execute
        self.clusters = [self._launch(index) for index in launched]
        self._check_layout()

    # ---- start, run, finish

    def _check_layout(self) -> None:
        """Report mbarriers that share bytes with a data buffer: whoever writes the one breaks the other."""
        for start, count, name in self.program.barriers:
            for buffer in self.program.shared_buffers:
                first, last = buffer.offset, buffer.offset + buffer.elements * buffer.itemsize
                if start < last and first < start + 8 * count:
                    text = f"mbarriers {name} (bytes {start}:{start + 8 * count}) overlap {buffer.name} (bytes {first}:{last})"
                    self.found("resource", ("overlap", name), partial(str, text + " in shared memory"))

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
                    self.push(
                        self.costs.launch + (self.random.random() * self.memory_jitter if self.seed else 0.0), self.resume, warp
                    )
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
        # A run makes millions of short-lived tuples and no garbage cycles: collections would only walk what is alive.
        collecting = gc.isenabled()
        gc.disable()
        try:
            with np.errstate(all="ignore"):
                while heap and count <= limit:
                    self.now, _, action, argument = heapq.heappop(heap)
                    action(argument)
                    count += 1
        finally:
            if collecting:
                gc.enable()
        if count > limit:
            text = f"no end after {limit} events; a loop waits for something that never comes"
            self.found("deadlock", "events", text.__str__)
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
            self.found(
                "protocol",
                ("bulk exit", what),
                lambda: (
                    f"{self.who(warp)} exits with bulk stores {what}: the "
                    f"TMA engine may "
                    "still read its shared memory (missing cp.async.bulk.commit_group or wait_group)"
                ),
            )

    def _finish(self, cluster: Cluster) -> None:
        for rank, owned in cluster.tmem.items():
            columns = sum(owned.values())
            if columns:
                leak = f"cta{rank} exits without tcgen05.dealloc of its {columns} TMEM columns"
                self.found("protocol", ("leak",), leak.__str__)
        for bar in cluster.barriers.values():
            if bar.tx:
                rest = f"{self.label(bar)} ends with {bar.tx} B of its tx-count outstanding"
                self.found("protocol", ("tx", barrier_family(self.program, bar.offset)), rest.__str__)
        if not self.race:
            return
        for (rank, agent), (tick, what) in cluster.touched.items():
            if tick > cluster.final[rank][agent]:
                text = (
                    f"cta{rank} may exit while {what} still targets it; nothing orders its exit after that "
                    "(missing wait, or final cluster barrier)"
                )
                self.found("protocol", ("exit", what), text.__str__)

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

    def _race(
        self, rank: int, region: Region, other: Region, access: Access, earlier: Access, earlier_writes: bool, writes: bool
    ) -> None:
        verb, earlier_verb = access.verb, earlier.verb
        first, second = "write" if writes else "read", "write" if earlier_writes else "read"
        flying = ", which is still in flight" if earlier.tick >= INFINITE else ""
        via = f" (as {other.label})" if other.label != region.label else ""
        one, two, cycle = access.warp, earlier.warp, earlier.cycle
        key = (region.label.split("[")[0], verb, earlier_verb, first, second, one.group, two.group)
        self.found(
            "race",
            key,
            lambda: (
                f"cta{rank}.{region.label}: {first} by {verb} of {self.who(one)} is not "
                f"ordered after the "
                f"{second} by {earlier_verb} of {self.who(two)}{via} at cycle {cycle:.0f}{flying}"
            ),
        )

    def _fault(self, rank: int, what: str, region: Region, access: Access, earlier: Access | None) -> None:
        warp, verb = access.warp, access.verb
        if what == "blank":
            self.poisoned.add(
                "uninitialized",
                (region.label.split("[")[0], verb),
                self.now,
                lambda: f"cta{rank}.{region.label}: {verb} of {self.who(warp)} reads what no one wrote",
            )
            return
        assert earlier is not None
        other, other_verb = earlier.warp, earlier.verb
        key = (what, region.label.split("[")[0], verb, other_verb)
        if what == "proxy":
            self.found(
                "race",
                key,
                lambda: (
                    f"cta{rank}.{region.label}: {verb} of {self.who(warp)} (async proxy) "
                    f"follows the generic "
                    f"write by {other_verb} of {self.who(other)} without fence.proxy.async in between"
                ),
            )
        elif what == "after":
            self.found(
                "protocol",
                key,
                lambda: (
                    f"cta{rank}.{region.label}: {verb} of {self.who(warp)} follows {other_verb} of "
                    f"{self.who(other)} without tcgen05.fence::after_thread_sync after the wait"
                ),
            )
        else:
            self.found(
                "protocol",
                key,
                lambda: (
                    f"cta{rank}.{region.label}: {verb} of {self.who(warp)} follows {other_verb} of "
                    f"{self.who(other)}, which executed no tcgen05.fence::before_thread_sync before it "
                    f"signalled"
                ),
            )

    def touch(self, cluster: Cluster, rank: int, agent: int, tick: int, what: str) -> None:
        """Note that ``agent`` targets CTA ``rank``; the CTA must not exit before."""
        old = cluster.touched.get((rank, agent))
        if old is None or old[0] < tick:
            cluster.touched[(rank, agent)] = (tick, what)
