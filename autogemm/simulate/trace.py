"""Write what a simulated kernel did as trace events for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..binary import write_whole
from .state import Slice

# Engines come before warps, in the order in which data pass through them.
_ENGINES: Final = ("TMA", "tensor core", "store")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What one simulated run did.

    Attributes:
        name: what people call the kernel (``v9``).
        slices: every interval, in any order.
        clock_hz: SM clock that turns cycles into seconds.
        cycles: end of the run.
        titles: track to role (``wg0.w0`` to ``TMA producer``), where known.
    """

    name: str
    slices: tuple[Slice, ...]
    clock_hz: float
    cycles: float
    titles: Mapping[str, str] = field(default_factory=dict)

    def tracks(self) -> list[tuple[int, str]]:
        """Return the (CTA, track) pairs that hold slices: per CTA the engines first, then the warps."""

        def position(pair: tuple[int, str]) -> tuple[int, int, str]:
            cta, track = pair
            return cta, _ENGINES.index(track) if track in _ENGINES else len(_ENGINES), track

        return sorted({(s.cta, s.track) for s in self.slices}, key=position)

    def title(self, track: str) -> str:
        """Return the track's name with its role, if it has one."""
        role = self.titles.get(track)
        return f"{role} ({track})" if role else track


def trace_events(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return the Chrome trace of ``recordings``: a process per kernel and CTA, a thread per track; times in microseconds."""
    events: list[dict[str, Any]] = []
    process = 0
    for recording in recordings:
        to_us = 1e6 / recording.clock_hz
        identity: dict[tuple[int, str], tuple[int, int]] = {}
        numbers: dict[int, int] = {}
        for thread, (cta, track) in enumerate(recording.tracks()):
            if cta not in numbers:
                process += 1
                numbers[cta] = process
                events.append(_name("process_name", process, 0, f"{recording.name} CTA {cta}"))
            identity[cta, track] = numbers[cta], thread
            events.append(_name("thread_name", numbers[cta], thread, recording.title(track)))
            events.append(
                {"ph": "M", "name": "thread_sort_index", "pid": numbers[cta], "tid": thread, "args": {"sort_index": thread}}
            )
        for s in sorted(recording.slices, key=lambda s: s.start_cycle):
            pid, tid = identity[s.cta, s.track]
            events.append({
                "ph": "X", "name": s.name, "cat": s.kind, "pid": pid, "tid": tid,
                "ts": round(s.start_cycle * to_us, 4), "dur": round((s.end_cycle - s.start_cycle) * to_us, 4),
                "args": {"start_cycle": round(s.start_cycle), "end_cycle": round(s.end_cycle)},
            })  # fmt: skip
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "what": "simulated, not measured",
            "kernels": {r.name: {"clock_hz": r.clock_hz, "cycles": round(r.cycles)} for r in recordings},
        },
    }


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def write_trace(path: Path, recordings: Sequence[Recording]) -> None:
    """Write ``recordings`` to ``path`` as JSON.

    Raises:
        OSError: the file can't be written.
    """
    write_whole(path, json.dumps(trace_events(recordings), separators=(",", ":")).encode())
