"""Timing on the GPU: replayed CUDA graphs between CUDA events, in interleaved rounds of random order."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from ..errors import InputError
from .timer import BASELINE

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]

# A warm sample replays calls for about this long, so that the gap before the first of them (1 to 3 us) stays below 1 %.
WARM_SAMPLE_S: Final = 400e-6
MAX_CALLS: Final = 200
# One baseline sample per so many kernels of a round, so that a falling clock does not part it from them.
BASELINE_EVERY: Final = 8
# A round begins with untimed work for so long, and holds at least so many samples in several passes where names are few: the
# clock moves in the idle gap between rounds, by 4 % on an H200. Neither is worth it where one sample alone takes longer.
# After a rest the lead-in is longer: for the first tens of milliseconds a power-capped GPU runs faster than it can sustain, and
# ratios are other ones (H200, 4096x4096x4096: 0.98 with 1 ms, 1.045 with 10 ms, 1.048 to 1.052 with 30 to 300 ms).
LEAD_IN_S: Final = 1e-3
LEAD_IN_RESTED_S: Final = 30e-3
REST_S: Final = 5e-3
SAMPLES_PER_ROUND: Final = 8
LONG_SAMPLE_S: Final = 5e-3
# What is queued at once where the GPU must not idle.
BATCH_S: Final = 20e-3
# Cold calls touch at least this many times the L2 cache before an operand set comes round again.
COLD_L2_SIZES: Final = 2.0
MAX_SETS: Final = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class OperandSet:
    """Operands of one call: a [M, K], b [N, K], out [M, N]."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor

    @property
    def bytes(self) -> int:
        """Bytes of the three."""
        return sum(t.numel() * t.element_size() for t in (self.a, self.b, self.out))


@dataclass(slots=True)
class _Graphs:
    call: Call
    warm: torch.cuda.CUDAGraph | None = None
    cold: torch.cuda.CUDAGraph | None = None
    keep: list[object] = field(default_factory=list)


class CudaTimer:
    """Kernels registered by name, timed warm or cold.

    Warm: a graph of n calls on one operand set, replayed; operands that fit in L2 stay there. Cold: a graph of one call on
    each of several operand sets that together exceed twice the L2 cache (or that a flush has just evicted), so that every call
    finds its operands in device memory. Both report the time between two events divided by the calls between them; nothing is
    subtracted.
    """

    def __init__(self, base: OperandSet, baseline: Call, *, seed: int = 0, sample_s: float = WARM_SAMPLE_S) -> None:
        """Register ``baseline`` on operand set ``base`` and calibrate.

        Args:
            sample_s: how long a warm sample should take.
        """
        self._device = base.a.device
        self._base = base
        self._sample_s = sample_s
        self._random = random.Random(seed)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._graphs: dict[str, _Graphs] = {BASELINE: _Graphs(baseline)}
        self._sets: list[OperandSet] | None = None
        self._flush: torch.Tensor | None = None
        self._busy_until = -math.inf
        self.calls = 1
        self._sample_long_s = sample_s
        self.calls = self._calibrated()
        self._graphs[BASELINE].warm = None

    def add(self, name: str, call: Call) -> None:
        """Register a kernel that has passed its correctness check; ``name`` may be registered again."""
        self._graphs[name] = _Graphs(call)

    def remove(self, name: str) -> None:
        """Forget a kernel and its graphs."""
        self._graphs.pop(name, None)

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names, the baseline first."""
        return tuple(self._graphs)

    def round(self, names: Sequence[str], *, cold: bool = False, during: Callable[[], None] | None = None) -> dict[str, float]:
        """Return one sample of each of ``names`` and of the baseline, in seconds per call, taken in random order.

        Where names are few, a sample is the mean over several passes.

        Args:
            during: called while the GPU is still at work, to read clocks and power.

        Raises:
            InputError: a name is not registered.
        """
        wanted = [name for name in dict.fromkeys(names) if name != BASELINE]
        for name in wanted:
            if name not in self._graphs:
                raise InputError(f"no kernel {name!r} is registered with this timer")
        order = [name for _ in range(self._passes(len(wanted) + 1)) for name in self._pass(wanted)]
        for name in set(order):  # capture before anything is timed
            self._graph(name, cold)
        taken: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in order}
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for _ in range(self._lead_in()):
                self._graph(BASELINE, cold).replay()
            for name in order:
                taken[name].append(self._sample(name, cold))
            if during is not None:
                during()
            self._stream.synchronize()
        self._busy_until = time.monotonic()
        calls = len(self._cold_sets()) if cold else self.calls
        return {
            name: math.fsum(start.elapsed_time(end) for start, end in pairs) / len(pairs) * 1e-3 / calls
            for name, pairs in taken.items()
        }

    def replay(self, name: str, seconds: float) -> int:
        """Replay the warm graph of ``name`` for about ``seconds``, wait for it, and return how many calls it made."""
        graph = self._graph(name, cold=False)
        repeats = max(1, math.ceil(seconds / max(self._time(graph), 1e-7)))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for i in range(repeats):
                graph.replay()
                if i % 64 == 63:
                    self._stream.synchronize()  # bounds the queue
            self._stream.synchronize()
        return repeats * self.calls

    def sustain(self, name: str, seconds: float, watch: Callable[[], None]) -> tuple[int, float]:
        """Replay the warm graph of ``name`` for about ``seconds`` without a gap; return (calls, seconds they took).

        Args:
            watch: called again and again meanwhile.
        """
        graph = self._graph(name, cold=False)
        batch = max(1, math.ceil(BATCH_S / max(self._time(graph), 1e-7)))

        def queue() -> torch.cuda.Event:
            for _ in range(batch):
                graph.replay()
            mark = timing_event()
            mark.record(self._stream)
            return mark

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            first = last = queue()
            batches, until = 0, time.monotonic() + seconds
            while time.monotonic() < until:
                running, last = last, queue()  # one batch is always waiting behind the one that runs
                batches += 1
                watch()
                while not running.query():  # type: ignore[no-untyped-call]
                    watch()
            self._stream.synchronize()
        return batches * batch * self.calls, float(first.elapsed_time(last)) * 1e-3

    def _lead_in(self) -> int:
        """Return how many untimed samples of the baseline a round that begins now starts with."""
        if self._sample_long_s > LONG_SAMPLE_S:
            return 0
        rested = time.monotonic() - self._busy_until > REST_S
        return math.ceil((LEAD_IN_RESTED_S if rested else LEAD_IN_S) / self._sample_long_s)

    def _passes(self, names: int) -> int:
        return 1 if self._sample_long_s > LONG_SAMPLE_S else max(1, round(SAMPLES_PER_ROUND / names))

    def _pass(self, names: list[str]) -> list[str]:
        """Return ``names`` in random order, with the baseline among them, and again after every BASELINE_EVERY of them."""
        order = self._random.sample(names, len(names))
        count = max(1, round(len(names) / BASELINE_EVERY))
        for i in range(count):
            # One in each of ``count`` equal stretches, at a random place.
            at = (i + self._random.random()) * len(names) / count
            order.insert(min(len(order), round(at) + i), BASELINE)
        return order

    def _sample(self, name: str, cold: bool) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        graph = self._graph(name, cold)
        start, end = timing_event(), timing_event()
        if cold:
            self._evict()
        start.record(self._stream)
        graph.replay()
        end.record(self._stream)
        return start, end

    def _graph(self, name: str, cold: bool) -> torch.cuda.CUDAGraph:
        entry = self._graphs[name]
        found = entry.cold if cold else entry.warm
        if found is None:
            sets = self._cold_sets() if cold else [self._base] * self.calls
            found = self._capture(entry, sets)
            if cold:
                entry.cold = found
            else:
                entry.warm = found
        return found

    def _capture(self, entry: _Graphs, sets: list[OperandSet]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            entry.call(sets[0].a, sets[0].b, sets[0].out)  # lazy set-up happens outside the capture
            self._stream.synchronize()
            # torch.cuda.graph would also collect garbage and empty the allocator's cache, 10 ms and more each time.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for s in sets:
                    entry.call(s.a, s.b, s.out)
            finally:
                graph.capture_end()
            graph.replay()  # the first replay uploads the graph
            self._stream.synchronize()
        return graph

    def _calibrated(self) -> int:
        """Return how many baseline calls take ``sample_s``, from a few graphs of ever more of them."""
        calls = 1
        while True:
            self.calls = calls
            self._graphs[BASELINE].warm = None
            graph = self._graph(BASELINE, cold=False)
            elapsed = min(self._time(graph) for _ in range(3))
            if elapsed >= self._sample_s / 2 or calls >= MAX_CALLS:
                found = max(1, min(MAX_CALLS, math.ceil(calls * self._sample_s / elapsed)))
                self._sample_long_s = elapsed / calls * found
                return found
            calls = min(MAX_CALLS, max(calls * 2, int(calls * self._sample_s / elapsed)))

    def _time(self, graph: torch.cuda.CUDAGraph) -> float:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            start, end = timing_event(), timing_event()
            start.record(self._stream)
            graph.replay()
            end.record(self._stream)
            self._stream.synchronize()
            return float(start.elapsed_time(end)) * 1e-3

    def _cold_sets(self) -> list[OperandSet]:
        if self._sets is None:
            base = self._base
            count = cold_sets(base.bytes, _l2_bytes(self._device))
            copies = [OperandSet(a=base.a.clone(), b=base.b.clone(), out=torch.empty_like(base.out)) for _ in range(count - 1)]
            self._sets = [base, *copies]
            torch.cuda.synchronize(self._device)  # the copies were made on another stream
        return self._sets

    def _evict(self) -> None:
        """Flush L2 if the operand sets alone do not exceed it; the write is queued before the timed interval."""
        needed = COLD_L2_SIZES * _l2_bytes(self._device)
        if len(self._cold_sets()) * self._base.bytes >= needed:
            return
        if self._flush is None:
            self._flush = torch.empty(math.ceil(needed), dtype=torch.uint8, device=self._device)
        self._flush.zero_()


def cold_sets(set_bytes: int, l2_bytes: int) -> int:
    """Return how many operand sets of ``set_bytes`` a cold round cycles through: enough to exceed COLD_L2_SIZES caches."""
    return max(2, min(MAX_SETS, math.ceil(COLD_L2_SIZES * l2_bytes / set_bytes) + 1))


def timing_event() -> torch.cuda.Event:
    """Return a CUDA event that records time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _l2_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
