"""What a running kernel consists of: clusters, warps, barriers, and the constants they share."""

from __future__ import annotations

from collections.abc import Generator, Hashable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .race import Clock, Shadow

BLOCK: Final = object()
POISON: Final = 0x7FFF  # a NaN in float16 and in bfloat16: what unwritten memory holds
WARPS_PER_GROUP: Final = 4
PREVIOUS_KERNEL: Final = 0  # in every cluster, the agent that stands for the kernel before on the stream (grid.py)
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
        "arrived", "cleared", "clock", "count", "entries", "init", "live", "offset", "pending", "phase", "previous",
        "published", "rank", "tx", "waiters", "watchers",
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
        self.watchers: dict[int, int] = {}  # agent -> tick of its wait that saw the latest completed phase


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
        "activities",
        "after",
        "block",
        "bulk_done",
        "bulk_lane",
        "bulk_open",
        "bulk_tick",
        "bx",
        "clock",
        "cluster",
        "done",
        "gen",
        "group",
        "id",
        "index",
        "inits",
        "lag",
        "load_ready",
        "load_tick",
        "loading",
        "mma_end",
        "mma_tick",
        "polled",
        "rank",
        "registers",
        "since",
        "single",
        "wait",
        "waits",
        "wgmma",
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
        self.polled: tuple[int, str] | None = None  # workspace writes so far at its last read of it, and what it read


class Cluster:
    """One cluster: shared memory, tensor memory, barriers, shadows and agents of its CTAs."""

    def __init__(self, index: int, ctas: int) -> None:
        self.index, self.ctas = index, ctas
        self.agents_max = 33 + 80 * ctas
        self.agents: dict[Hashable, int] = {"previous kernel": PREVIOUS_KERNEL}
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
