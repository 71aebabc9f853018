"""Synchronization: mbarriers, named barriers, the cluster barrier, proxy fences and the register budget."""

from __future__ import annotations

from typing import Any

import numpy as np

from .core import Core
from .race import Clock
from .report import barrier_family
from .state import (
    BLOCK,
    MAX_COUNT,
    OFFSET_MASK,
    WARPS_PER_GROUP,
    WINDOW_BITS,
    Cluster,
    Lanes,
    Mbarrier,
    Named,
    Pointer,
    Warp,
)


class SyncOps(Core):
    """Operations by which warps wait for each other."""

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
                self.found(
                    "protocol", ("rank",), lambda: f"{self.who(warp)} addresses CTA {key[0]} of a cluster of {self.ctas}"
                )
                key = (key[0] % self.ctas, key[1])
            found = warp.cluster.barriers.setdefault(key, Mbarrier(*key, warp.cluster.agents_max))
        return found

    def release(self, warp: Warp) -> Clock:
        """Return a copy of the warp's clock for others, and open its next tick."""
        clock: Clock = warp.clock.copy()
        warp.clock[warp.id] += 1
        return clock

    def mbarrier_init(self, warp: Warp, mask: Lanes, pointer: Pointer, count: int) -> float:
        """mbarrier.init."""
        bar = self.bar(warp, pointer)
        if bar.live:
            self.found(
                "protocol", ("init2", bar.offset), lambda: f"{self.who(warp)} initializes {self.label(bar)} a second time"
            )
        if not 1 <= count <= MAX_COUNT:
            self.found(
                "protocol",
                ("count", bar.offset),
                lambda: f"{self.label(bar)} initialized with count {count}; allowed: 1 to {MAX_COUNT}",
            )
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
            self.found(
                "protocol",
                ("uninitialized barrier", family),
                lambda: f"{what} of {self.who(warp)} uses {self.label(bar)} before any mbarrier.init",
            )
            return
        bar.cleared.add(warp.id + (1000 if asynchronous else 0))  # clocks only grow: one check will do
        if not self.race:
            return
        agent, tick, proxied, fenced = bar.init
        if tick > warp.clock[agent]:
            hint = "cluster" if bar.rank != warp.rank else "CTA"
            self.found(
                "race",
                ("init", family),
                lambda: (
                    f"{what} of {self.who(warp)} uses {self.label(bar)} with no "
                    f"ordering after "
                    f"its mbarrier.init (needs a {hint} barrier in between)"
                ),
            )
        elif bar.rank != warp.rank and not fenced:
            self.found(
                "protocol",
                ("init fence", family),
                lambda: (
                    f"{what} of {self.who(warp)} uses {self.label(bar)} "
                    f"of another CTA, "
                    "but its initializer executed no fence.mbarrier_init.release.cluster"
                ),
            )
        elif asynchronous and not fenced and not proxied:
            self.found(
                "protocol",
                ("init fence", family),
                lambda: (
                    f"{what} of {self.who(warp)} uses {self.label(bar)} "
                    f"through the async "
                    "proxy, but its initializer executed neither fence.mbarrier_init nor fence.proxy.async"
                ),
            )

    def mbarrier_wait(self, warp: Warp, mask: Lanes, pointer: Pointer, parity: Any) -> Any:
        """mbarrier.try_wait.parity, repeated until it succeeds."""
        bar = self.bar(warp, pointer)
        self.check_live(warp, bar, "mbarrier wait", False)
        if bar.rank != warp.rank:
            self.found(
                "protocol",
                ("remote wait", bar.offset),
                lambda: f"{self.who(warp)} waits on {self.label(bar)} of another CTA; waits are local only",
            )
        parity = int(parity)
        if (bar.phase & 1) != parity:
            np.maximum(warp.clock, bar.published, out=warp.clock)
            bar.watchers[warp.id] = int(warp.clock[warp.id])
            return self.spend(warp, 6)
        warp.block = ("mbarrier", bar, parity)
        warp.since = self.now + warp.lag
        warp.lag = 0.0
        bar.waiters.append((warp, parity))
        return BLOCK

    def _wake(self, warp: Warp, bar: Mbarrier) -> None:
        np.maximum(warp.clock, bar.published, out=warp.clock)
        bar.watchers[warp.id] = int(warp.clock[warp.id])
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
                        self.found(
                            "race",
                            ("phase", barrier_family(self.program, bar.offset), what),
                            lambda: (
                                f"{what} of {self.who(warp)} on {self.label(bar)} is not ordered after the "
                                f"barrier's previous phase: "
                                "in another schedule it would count there"
                            ),
                        )
                        break
            bar.entries[agent] = tick  # an agent's ticks only grow
            np.maximum(bar.clock, clock, out=bar.clock)
        bar.tx += expected - completed
        bar.pending -= count
        if count and len(bar.arrived) < 6:
            bar.arrived.append(f"cta{warp.rank}.wg{warp.group}.w{warp.index}")
        if bar.pending < 0:
            self._too_many(bar, warp, what)
            bar.pending = 0
        if not -MAX_COUNT <= bar.tx <= MAX_COUNT:
            text = f"tx-count {bar.tx} of {self.label(bar)} is outside the allowed +-{MAX_COUNT}"
            self.found("protocol", ("tx range", barrier_family(self.program, bar.offset)), text.__str__)
        if bar.pending == 0 and bar.tx == 0:
            self._complete(bar)

    def _overrun(self, bar: Mbarrier, agent: int) -> None:
        waiter = next(w for w in self.clusters[0].warps if w.id == agent)  # numbered alike in every cluster
        parity = (bar.phase + 1) & 1
        self.found(
            "race",
            ("overrun", barrier_family(self.program, bar.offset)),
            lambda: (
                f"{self.who(waiter)} waits on {self.label(bar)} parity {parity}, but the barrier's next phase can "
                f"complete before "
                "it looks: in another schedule it would see the same parity again and wait for ever"
            ),
        )

    def _too_many(self, bar: Mbarrier, warp: Warp, what: str) -> None:
        phase, rest = bar.phase, f" ({bar.tx} B of transactions outstanding)" if bar.tx else ""
        self.found(
            "protocol",
            ("over", barrier_family(self.program, bar.offset)),
            lambda: (
                f"{what} of {self.who(warp)}: more than the {bar.count} arrivals that phase {phase} of "
                f"{self.label(bar)} takes{rest}"
            ),
        )

    def _complete(self, bar: Mbarrier) -> None:
        if self.race and bar.watchers:
            for agent, tick in bar.watchers.items():
                if tick > bar.clock[agent]:
                    self._overrun(bar, agent)
                    break
        bar.watchers.clear()
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

    def mbarrier_arrive(
        self, warp: Warp, mask: Lanes, pointer: Pointer, count: int = 1, expected: int = 0, what: str = "mbarrier.arrive"
    ) -> float:
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
            self.arrive_later(
                time + delay, bar, lanes * int(count), clock, warp, what, warp.id, tick, expected=int(expected) * lanes
            )
        return self.spend(warp, 4)

    def mbarrier_expect(self, warp: Warp, mask: Lanes, pointer: Pointer, size: Any) -> float:
        """mbarrier.arrive.expect_tx."""
        return self.mbarrier_arrive(warp, mask, pointer, 1, int(size), "mbarrier.arrive.expect_tx")

    # ---- named barriers, cluster barrier

    def _join(self, warp: Warp, mask: Lanes, key: tuple[int, int], need: int, wait: bool, what: str) -> Any:
        cluster = warp.cluster
        if not mask.all():
            self.found(
                "protocol",
                ("divergent", what),
                lambda: f"{self.who(warp)} reaches {what} with {int(np.count_nonzero(mask))} of 32 lanes",
            )
        state = cluster.named.get(key)
        if state is None:
            state = cluster.named[key] = Named(key[1], need, cluster.agents_max, {})
        if state.arrived and state.need != need:
            other = state.need
            self.found(
                "protocol",
                ("barrier count", key[1]),
                lambda: f"{self.who(warp)} joins {what} for {need * 32} threads while others use it for {other * 32}",
            )
        state.need = need
        tick = int(warp.clock[warp.id])
        if self.race:
            for agent, when in state.previous.items():
                if when > warp.clock[agent]:
                    self.found(
                        "race",
                        ("generation", key[1], warp.group),
                        lambda: (
                            f"{self.who(warp)} arrives at "
                            f"{what}, but nothing orders "
                            "that after the barrier's previous use by other warps: in another schedule it would "
                            "count there"
                        ),
                    )
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
            if not state.waiters:
                self.found(
                    "protocol",
                    ("no waiter", key[1]),
                    lambda: (
                        f"{what} completes by arrivals alone: "
                        f"{self.who(warp)} was the last to "
                        "arrive and no thread waits (missing bar.sync)"
                    ),
                )
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
            self.found(
                "protocol",
                ("barrier id", number),
                lambda: f"{self.who(warp)}: bar {number} for {threads} threads; ids are 0 to 15, thread counts multiples of 32",
            )
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
        """An instruction that orders nothing in this kernel (prefetch, griddepcontrol.launch_dependents)."""
        return self.spend(warp, 1)

    # ---- register budget

    def setmaxnreg(self, warp: Warp, mask: Lanes, count: Any, increase: bool) -> Any:
        """setmaxnreg: give registers back to the CTA's pool, or wait until the pool holds enough."""
        count = int(count)
        if not 24 <= count <= 256 or count % 8:  # PTX ISA, "setmaxnreg"
            self.found(
                "protocol",
                ("setmaxnreg range",),
                lambda: f"{self.who(warp)}: setmaxnreg {count}; allowed: 24 to 256 in steps of 8",
            )
        before = warp.registers
        if (count < before) if increase else (count > before):
            word = "inc" if increase else "dec"
            self.found(
                "protocol",
                ("setmaxnreg direction",),
                lambda: f"{self.who(warp)}: setmaxnreg.{word} {count} with {before} registers",
            )
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
