"""Global memory that a kernel's CTAs share: the workspace, its atomic counters, and what orders accesses across clusters.

Clocks know the agents of one cluster. Between clusters only atomics synchronize: a release publishes its warp's clock at the
counter, together with what the warp knew of other clusters; an acquire notes, in its cluster, whom it learned about and when.
An access of another cluster is ordered before a warp's if the warp is ordered after such an acquire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .race import Access, Clock
from .registers import RegisterOps, Registers
from .state import BLOCK, PREVIOUS_KERNEL, Cluster, Lanes, Warp

_BYTES_PER_CYCLE: Final = 64  # what one SM moves to or from L2 (arXiv 2402.13499)
_ATOMIC_CYCLES: Final = 700  # a round trip to L2 and back, under load
_WORD_BYTES: Final = 4
_MAX_BLIND: Final = 6  # looks of a waiting warp before it sees the first of a store
_MAX_ROUNDS: Final = 1_000  # of such loops per warp, then they are taken to be endless

# By cluster index: the clock of that cluster's agents that someone has synchronized with.
Known = dict[int, Clock]
# A place in the workspace: buffer name, and word index of every lane (or one for all).
Place = tuple[str, Any]


def join(into: Known, other: Known) -> None:
    """Add what ``other`` knows to ``into``."""
    for index, clock in other.items():
        mine = into.get(index)
        if mine is None:
            into[index] = clock.copy()
        else:
            np.maximum(mine, clock, out=mine)


class _Workspace:
    """One buffer of 32-bit words: contents, and who last wrote and last read each word.

    Of several readers since the last write only the latest is kept.

    Attributes:
        before, earlier: contents before the last write, and the number of the write that they came from.
        relied: words whose zero from before the launch was read.
    """

    def __init__(self, name: str, words: int) -> None:
        self.name = name
        self.values: npt.NDArray[np.uint32] = np.zeros(words, np.uint32)
        self.before: npt.NDArray[np.uint32] = np.zeros(words, np.uint32)
        self.accesses: list[tuple[Cluster, Access] | None] = [None]
        self.writer: npt.NDArray[np.int32] = np.zeros(words, np.int32)
        self.earlier: npt.NDArray[np.int32] = np.zeros(words, np.int32)
        self.reader: npt.NDArray[np.int32] = np.zeros(words, np.int32)
        self.relied: npt.NDArray[np.bool_] = np.zeros(words, bool)
        self.counters: dict[int, Known] = {}  # word -> what its atomics have released

    def label(self, words: npt.NDArray[np.int64]) -> str:
        """Return the span of ``words`` as text."""
        return f"{self.name}[{int(words.min())}:{int(words.max()) + 1}]"


class WorkspaceOps(RegisterOps):
    """Loads, stores and atomics on the workspace, and the barrier that hands a decision to a whole warpgroup."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.workspaces: dict[str, _Workspace] = {}
        self.acquired: dict[int, list[tuple[int, int, Known]]] = {}  # cluster -> (agent, its tick, what it learned)
        self._votes: dict[tuple[int, int, int], list[bool]] = {}
        self._vote_of: dict[tuple[int, int], list[bool]] = {}
        self._writes = 0  # to any workspace so far
        self._pollers: list[Warp] = []
        self._rounds: dict[Warp, int] = {}  # of loops that lanes leave one by one and that read no workspace
        self._seen: set[tuple[int, int, str, int]] = set()
        self._stale: dict[tuple[int, int, str, int], tuple[int, Callable[[], None]]] = {}
        super().__init__(*args, **kwargs)

    def run(self) -> None:
        """Execute; then look at the counters, which the next launch relies on."""
        super().run()
        if len(self.clusters) * self.ctas < self.grid or any(not w.done for cluster in self.clusters for w in cluster.warps):
            return  # only a part was executed
        for _, report in self._stale.values():
            report()
        for space in self.workspaces.values():
            space.relied[list(space.counters)] = True
            left = np.flatnonzero(space.relied & (space.values != 0))
            if left.size:
                text = (
                    f"{left.size} words of {space.name} are not 0 at the end, which the next launch relies on as this one did; "
                    f"first {space.name}[{left[0]}] = {space.values[left[0]]}"
                )
                self.found("protocol", ("counter", space.name), text.__str__)

    # ---- order between clusters

    def known(self, warp: Warp) -> Known:
        """Return what ``warp`` is ordered after in other clusters."""
        result: Known = {}
        for agent, tick, learned in self.acquired.get(warp.cluster.index, ()):
            if tick <= warp.clock[agent]:
                join(result, learned)
        return result

    def _ordered(self, warp: Warp, cluster: Cluster, access: Access) -> bool:
        if cluster is warp.cluster:
            return bool(access.tick <= warp.clock[access.agent])
        for agent, tick, learned in self.acquired.get(warp.cluster.index, ()):
            clock = learned.get(cluster.index)
            if clock is not None and access.tick <= clock[access.agent] and tick <= warp.clock[agent]:
                return True
        return False

    # ---- accesses

    def _workspace(self, name: str) -> _Workspace:
        found = self.workspaces.get(name)
        if found is None:
            buffer = next(b for b in self.program.workspaces if b.name == name)
            (extent,) = buffer.shape
            found = self.workspaces[name] = _Workspace(name, extent if isinstance(extent, int) else self.P[extent])
        return found

    def _words(self, warp: Warp, mask: Lanes, place: Place, count: int, verb: str) -> tuple[_Workspace, npt.NDArray[np.int64]]:
        """Return the buffer and the word indices [active lanes, count] of a vector access; those out of bounds are reported."""
        space = self._workspace(place[0])
        first = np.broadcast_to(np.asarray(place[1], np.int64), (32,))[mask]
        if count > 1 and (first % count).any():
            self.found("protocol", ("alignment", verb), lambda: f"{self.who(warp)}: {verb} at a multiple of {count} words only")
        words: npt.NDArray[np.int64] = first[:, None] + np.arange(count)[None, :]
        last = len(space.values) - 1
        if words.size and (words.min() < 0 or words.max() > last):
            low, high = int(words.min()), int(words.max())
            self.found(
                "protocol",
                ("bounds", space.name),
                lambda: f"{self.who(warp)}: {verb} of words {low} to {high} of {space.name}, which has {last + 1}",
            )
            if last < 0:
                return space, words[:0]
            words = np.clip(words, 0, last)
        return space, words

    def _note(
        self, warp: Warp, space: _Workspace, words: npt.NDArray[np.int64], verb: str, *, writes: bool, strong: bool
    ) -> list[int]:
        """Check an access against earlier ones and record it; return the strong writes that a strong read does not follow."""
        if not self.race or not words.size:
            return []
        if self.dependent and not warp.clock[PREVIOUS_KERNEL]:
            self.during_previous(warp, space.name, space.label(words), verb, writes=writes)
        flat = words.reshape(-1)
        unordered: list[int] = []
        before = [(i, True) for i in np.unique(space.writer[flat])]
        if writes:
            before += [(i, False) for i in np.unique(space.reader[flat])]
        for i, wrote in before:
            entry = space.accesses[i]
            if entry is None:
                if wrote and not writes:
                    space.relied[flat[space.writer[flat] == 0]] = True
                continue
            cluster, access = entry
            if self._ordered(warp, cluster, access):
                continue
            if not (strong and access.strong):
                self._unordered(warp, space.name, flat, verb, cluster, access, writes, wrote)
            elif wrote and not writes:
                unordered.append(int(i))
        number = self._record(warp, space, verb, strong)
        if writes:
            space.earlier[flat] = space.writer[flat]
            space.writer[flat] = number
            space.reader[flat] = 0
        else:
            space.reader[flat] = number
        return unordered

    def _record(self, warp: Warp, space: _Workspace, verb: str, strong: bool) -> int:
        access = Access(warp.id, int(warp.clock[warp.id]), warp, verb, self.now)
        access.strong = strong
        space.accesses.append((warp.cluster, access))
        return len(space.accesses) - 1

    def _unordered(
        self, warp: Warp, name: str, words: npt.NDArray[np.int64], verb: str, cluster: Cluster, earlier: Access, writes: bool,
        wrote: bool,
    ) -> None:  # fmt: skip
        kind, other = "write" if writes else "read", "write" if wrote else "read"
        mine, theirs = warp.cluster.index, cluster.index
        self.found(
            "race",
            (name, verb, earlier.verb, kind, other),
            lambda: (
                f"{name}[{int(words.min())}:{int(words.max()) + 1}]: {kind} by {verb} of {self.who(warp)} in cluster {mine} is "
                f"not ordered after the {other} by {earlier.verb} of {self.who(earlier.warp)} in cluster {theirs} at cycle "
                f"{earlier.cycle:.0f}"
            ),
        )

    def workspace_put(
        self, warp: Warp, mask: Lanes, place: Place, operands: Sequence[tuple[Registers | None, int]], strong: bool
    ) -> float:
        """st.global of one register (or, without registers, one number) per word."""
        space, words = self._words(warp, mask, place, len(operands), "st.global")
        self.reading_words(warp, operands)
        self._note(warp, space, words, "st.global", writes=True, strong=strong)
        if self.numerics and words.size:
            self._write(space, words, self._halves(operands).view(np.uint32)[mask])
        return self.spend(warp, 4 + words.size * _WORD_BYTES / _BYTES_PER_CYCLE)

    def workspace_take(
        self, warp: Warp, mask: Lanes, place: Place, registers: Sequence[tuple[Registers, int]], strong: bool
    ) -> float:
        """ld.global into one register per word."""
        space, words = self._words(warp, mask, place, len(registers), "ld.global")
        unordered = self._note(warp, space, words, "ld.global", writes=False, strong=strong)
        if self.numerics and words.size:
            values = space.values[words]
            stale = [self._see_stale(warp, space, words, write, values) for write in unordered]
            for column, (reg, index) in enumerate(registers):
                assert reg.words is not None
                reg.words[mask, int(index)] = values[:, column]
            first = self._writes if warp.polled is None else warp.polled[0]
            warp.polled = (-1 if any(stale) else first, space.label(words))
        self.write_words(registers)
        return self.spend(warp, 4 + words.size * _WORD_BYTES / _BYTES_PER_CYCLE)

    def _see_stale(
        self, warp: Warp, space: _Workspace, words: npt.NDArray[np.int64], write: int, values: npt.NDArray[np.uint32]
    ) -> bool:
        """Put what was there before an unordered write into ``values``; False if all of the write is seen.

        The first looks, a random number of them, see nothing of it, the next one half of its words, and only then comes all.
        Whoever goes on before that relies on an order that nothing gives.
        """
        key = (warp.cluster.index, warp.id, space.name, write)
        if key in self._seen:
            return False
        found = self._stale.get(key)
        left = 1 + self._blind_looks() if found is None else found[0]
        if not left:
            del self._stale[key]
            self._seen.add(key)
            return False
        old = (space.writer[words] == write) & ((left > 1) | ((words + write) % 2 == 1))
        values[old] = space.before[words][old]
        space.relied[words[old & (space.earlier[words] == 0)]] = True
        entry = space.accesses[write]
        assert entry is not None
        cluster, earlier = entry
        flat = words.reshape(-1)

        def report() -> None:
            self._unordered(warp, space.name, flat, "ld.global", cluster, earlier, False, True)

        self._stale[key] = (left - 1, report)
        return True

    def _blind_looks(self) -> int:
        """Return 0 with probability 1/2, 1 with 1/4, and so on."""
        looks = 0
        while looks < _MAX_BLIND and self.random.random() < 0.5:
            looks += 1
        return looks

    def _write(self, space: _Workspace, words: npt.NDArray[np.int64], values: Any) -> None:
        space.before[words] = space.values[words]
        space.values[words] = values
        self._writes += 1
        waiting, self._pollers = self._pollers, []
        for warp in waiting:
            self.push(max(self.now, warp.since) + _ATOMIC_CYCLES / 2, self.resume, warp)

    def again(self, warp: Warp, mask: Lanes) -> Any:
        """One more round of a loop that lanes leave when they have seen what they look for: nothing new, no need to look."""
        polled, warp.polled = warp.polled, None
        if polled is not None and polled[0] != self._writes:
            return self.spend(warp, 4)
        if polled is None:
            self._rounds[warp] = self._rounds.get(warp, 0) + 1
            if self._rounds[warp] < _MAX_ROUNDS:
                return self.spend(warp, 4)
        warp.block = ("others' writes to", polled[1] if polled else "nothing that its loop reads", None)
        warp.since = self.now + warp.lag
        warp.lag = 0.0
        self._pollers.append(warp)
        return BLOCK

    def workspace_set(self, warp: Warp, mask: Lanes, place: Place, value: Any, strong: bool) -> float:
        """st.global of one 32-bit value."""
        space, words = self._words(warp, mask, place, 1, "st.global")
        self._note(warp, space, words, "st.global", writes=True, strong=strong)
        self._write(space, words[:, 0], int(value) & 0xFFFFFFFF)
        return self.spend(warp, 4)

    def workspace_add(self, warp: Warp, mask: Lanes, place: Place, value: Any, acquires: bool, releases: bool) -> int:
        """atom.add.u32 by every lane in ``mask``; returns the first one's old value."""
        space, words = self._words(warp, mask, place, 1, "atom.add")
        warp.lag += _ATOMIC_CYCLES
        if not words.size:
            return 0
        if self.dependent and not warp.clock[PREVIOUS_KERNEL]:
            self.during_previous(warp, space.name, space.label(words), "atom.add", writes=True)
        old = int(space.values[words[0, 0]])
        for word in words[:, 0].tolist():
            self._write(space, word, space.values[word] + np.uint32(int(value)))
            released = space.counters.setdefault(word, {})
            entry = space.accesses[space.writer[word]] if self.race else None
            if entry is not None and not self._ordered(warp, *entry):
                self._note(warp, space, words, "atom.add", writes=True, strong=True)
            if acquires and released:
                learned: Known = {}
                join(learned, released)
                # The previous kernel is one agent for all clusters: whoever learns of a wait for it is ordered after it too.
                if any(clock[PREVIOUS_KERNEL] for clock in learned.values()):
                    warp.clock[PREVIOUS_KERNEL] = 1
                self.acquired.setdefault(warp.cluster.index, []).append((warp.id, int(warp.clock[warp.id]), learned))
            # Atomics do not race among themselves; a plain access must be ordered after all of them.
            space.reader[word] = self._record(warp, space, "atom.add", True)
            if releases:
                mine = self.known(warp)
                join(mine, {warp.cluster.index: self.release(warp)})
                join(released, mine)
        return old

    # ---- votes

    def bar_vote(self, warp: Warp, mask: Lanes, number: Any, threads: Any, predicate: Any) -> Any:
        """barrier.red.or: a named barrier after which all its threads know whether the predicate held for any."""
        key = (warp.cluster.index, warp.rank, int(number))
        votes = self._votes.setdefault(key, [])
        votes.append(bool(np.any(np.broadcast_to(np.asarray(predicate), (32,)) & mask)))
        self._vote_of[(warp.cluster.index, warp.id)] = votes
        result = self.bar_sync(warp, mask, number, threads)
        if warp.cluster.named[key[1:]].arrived == 0:  # this was the last to come
            del self._votes[key]
        return result

    def bar_result(self, warp: Warp) -> int:
        """Return what the warp's last ``bar_vote`` found."""
        return int(any(self._vote_of[(warp.cluster.index, warp.id)]))
