"""Findings in words: who did what to which region or barrier, who should have; one finding per fault, short enough to read."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final

from ..results import Finding, FindingKind

if TYPE_CHECKING:
    from .core import Core
    from .program import Program
    from .state import Mbarrier, Warp

MAX_PER_KIND: Final = 6  # more of the same kind say nothing new
MAX_LINES: Final = 6  # waiters named in one deadlock

# What a warp was seen doing -> what people call it; the first match names the role.
_ROLES: Final = (
    ("tma_load", "TMA producer"), ("mma", "MMA issuer"), ("wgmma", "MMA consumer"), ("tmem_load", "epilogue"),
    ("tma_store", "store"), ("store_shared", "epilogue"),
)  # fmt: skip


def role(activities: set[str]) -> str:
    """Return the role name for what a warp does, or an empty string."""
    return next((name for activity, name in _ROLES if activity in activities), "")


class Findings:
    """Collects findings, each kept once per key; texts are built when asked for, as roles are known only then."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[FindingKind, float, Callable[[], str]]] = {}
        self._count: dict[FindingKind, int] = {}

    def add(self, kind: FindingKind, key: Hashable, cycle: float, text: Callable[[], str]) -> None:
        """Keep one finding; ``key`` identifies the fault, whichever warp, cluster or schedule met it."""
        if (kind, key) in self._found or self._count.get(kind, 0) >= MAX_PER_KIND:
            return
        self._count[kind] = self._count.get(kind, 0) + 1
        self._found[(kind, key)] = (kind, cycle, text)

    def __len__(self) -> int:
        return len(self._found)

    def items(self) -> list[tuple[Hashable, Finding]]:
        """Return (key, Finding) pairs in the order of discovery."""
        return [(key, Finding(kind=kind, text=text(), cycle=cycle)) for key, (kind, cycle, text) in self._found.items()]


def barrier_label(program: Program, rank: int, offset: int) -> str:
    """Return ``cta0.tma2mma[1]`` for the mbarrier at byte ``offset`` of CTA ``rank``."""
    for start, depth, name in program.barriers:
        if start <= offset < start + 8 * depth:
            return f"cta{rank}.{name}" + (f"[{(offset - start) // 8}]" if depth > 1 else "")
    return f"cta{rank}.mbarrier@{offset}"


def barrier_family(program: Program, offset: int) -> str:
    """Return the name of the array of mbarriers that byte ``offset`` lies in."""
    return next((name for start, depth, name in program.barriers if start <= offset < start + 8 * depth), f"mbarrier@{offset}")


def shared_label(program: Program, low: int, high: int) -> str:
    """Return bytes [low, high) of shared memory in tile coordinates of the buffer they lie in: ``Asmem[1, 0:128, 0:64]``."""
    for buffer in program.shared_buffers:
        start, size = buffer.offset, buffer.itemsize * buffer.elements
        if start <= low < start + size:
            first, last = (low - start) // buffer.itemsize, (min(high, start + size) - 1 - start) // buffer.itemsize
            parts: list[str] = []
            whole = True  # do the coordinates so far agree
            for i in range(len(buffer.shape)):
                stride = 1
                for extent in buffer.shape[i + 1 :]:
                    stride *= extent
                a, b = first // stride % buffer.shape[i], last // stride % buffer.shape[i]
                if whole:
                    parts.append(str(a) if a == b else f"{a}:{b + 1}")
                    whole = a == b
                else:
                    parts.append(f"0:{buffer.shape[i]}")
            return f"{buffer.name}[{', '.join(parts)}]"
    return f"smem[{low}:{high} B]"


def deadlock_text(machine: Core, stuck: list[Warp]) -> str:
    """Return who waits for what, and which roles should have arrived; one line per kind of waiter."""
    lines: dict[str, list[str]] = {}
    for warp in sorted(stuck, key=_distance_from_cause):
        line = _wait_text(machine, warp)
        lines.setdefault(line, []).append(machine.who(warp))
    parts = [f"{some(who)} {line if len(who) == 1 else line.replace('waits', 'wait', 1)}" for line, who in lines.items()]
    if len(parts) > MAX_LINES:
        parts[MAX_LINES:] = [f"and {len(parts) - MAX_LINES} more"]
    return "no progress: " + "; ".join(parts)


def _distance_from_cause(warp: Warp) -> int:
    """Return a rank that puts barriers with something half done first: there the cause shows."""
    if warp.block is None:
        return 3
    kind, subject, _ = warp.block
    if kind == "mbarrier":
        return 0 if subject.tx else 1 if subject.pending != subject.count else 2
    return 1


def some(names: list[str]) -> str:
    """Return ``a and 2 more warps`` for a list of warps."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more warp{'s' if len(names) > 2 else ''}"


def _wait_text(machine: Core, warp: Warp) -> str:
    if warp.block is None:
        return "did not finish"
    kind, subject, parity = warp.block
    if kind == "mbarrier":
        bar: Mbarrier = subject
        label = barrier_label(machine.program, bar.rank, bar.offset)
        missing = ", ".join(machine.survey().arrivers(bar.offset)) or "no role ever arrives there"
        tx = f", {bar.tx} B of transactions outstanding" if bar.tx else ""
        arrived = f"; arrived: {', '.join(sorted(set(bar.arrived)))}" if bar.arrived else ""
        return (f"waits on {label} parity {parity} (barrier in phase {bar.phase}, {bar.count - bar.pending} of {bar.count} "
                f"arrivals{tx}{arrived}); should arrive: {missing}")  # fmt: skip
    if kind == "named":
        threads = subject.arrived * 32
        who = f"named barrier {subject.number}" if subject.number >= 0 else "the cluster barrier"
        names = sorted({machine.who(w) for w, _ in subject.members})
        return f"waits at {who} ({threads} of {subject.need * 32} threads arrived: {some(names)})"
    if kind == "registers":
        return f"waits in setmaxnreg.inc for {subject} registers per thread; {parity} registers of the CTA are free"
    return f"waits for {kind} {subject}"
