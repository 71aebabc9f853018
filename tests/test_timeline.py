"""Trace events and the timeline page, from hand-made intervals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autogemm.errors import InputError
from autogemm.simulate.core import Slice
from autogemm.simulate.timeline import merged, rows_of, timeline_html, write_timeline
from autogemm.simulate.trace import Recording, trace_events, write_trace


def interval(track: str, start: float, end: float, *, cta: int = 0, kind: str = "mma", name: str = "mma") -> Slice:
    return Slice(cta=cta, track=track, name=name, start_cycle=start, end_cycle=end, kind=kind)


def recording(name: str = "v9") -> Recording:
    return Recording(
        name=name,
        slices=(
            interval("wg2.w0", 100, 400, kind="wait", name="wait cta0.tma2mma[0]"),
            interval("tensor core", 400, 528),
            interval("tensor core", 528, 656),
            interval("TMA", 10, 390, kind="tma", name="Asmem[0] <- A[0, 0]"),
            interval("tensor core", 400, 528, cta=1),
        ),
        clock_hz=2e9,
        cycles=700,
        titles={"wg2.w0": "MMA issuer"},
    )


def test_trace_has_a_process_per_kernel_and_cta_and_a_named_thread_per_track() -> None:
    events = trace_events([recording("v8"), recording("v9")])["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == ["v8 CTA 0", "v8 CTA 1", "v9 CTA 0", "v9 CTA 1"]
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1]
    assert threads == ["TMA", "tensor core", "MMA issuer (wg2.w0)"]


def test_trace_gives_times_in_microseconds_and_names_the_barrier_waited_for() -> None:
    events = trace_events([recording()])["traceEvents"]
    wait = next(e for e in events if e["ph"] == "X" and e["cat"] == "wait")
    assert wait["name"] == "wait cta0.tma2mma[0]"
    assert (wait["ts"], wait["dur"]) == (pytest.approx(0.05), pytest.approx(0.15))


def test_trace_file_is_json_that_says_it_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [recording()])
    document = json.loads(path.read_text())
    assert document["otherData"]["what"] == "simulated, not measured"
    assert document["otherData"]["kernels"] == {"v9": {"clock_hz": 2e9, "cycles": 700}}
    assert sum(e["ph"] == "X" for e in document["traceEvents"]) == 5


def test_touching_intervals_of_one_name_are_drawn_as_one() -> None:
    parts = [interval("tensor core", 0, 10), interval("tensor core", 10, 20), interval("tensor core", 50, 60)]
    assert [(s.start_cycle, s.end_cycle) for s in merged(parts)] == [(0, 20), (50, 60)]
    other = [interval("tensor core", 0, 10), interval("tensor core", 10, 20, name="next")]
    assert len(merged(other)) == 2


def test_timeline_page_is_self_contained_and_shows_every_kernel(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "timeline.html"
    write_timeline(path, [recording("v7"), recording("v9")])
    page = path.read_text()
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="', page)
    assert "v7: 0.3 us at 2.00 GHz, tensor core busy 37%" in page and "v9: 0.3 us" in page
    assert "wait cta0.tma2mma[0]" in page and "simulated, not measured" in page


def test_timeline_refuses_what_it_cannot_draw() -> None:
    pytest.importorskip("plotly")
    with pytest.raises(InputError, match="at least one"):
        timeline_html([])
    with pytest.raises(InputError, match="CTA 7"):
        timeline_html([recording()], cta=7)


def test_one_epilogue_warp_stands_for_its_warpgroup_but_every_mma_issuer_is_shown() -> None:
    tracks = ["wg0.w0", "wg0.w1", "wg1.w0", "wg2.w0", "wg2.w1", "wg2.w3"]
    roles = ["epilogue", "epilogue", "epilogue", "MMA issuer", "MMA issuer", "TMA producer"]
    many = Recording(
        name="v9", clock_hz=2e9, cycles=10, titles=dict(zip(tracks, roles, strict=True)),
        slices=tuple(interval(track, 0, 1) for track in ["store", *tracks]),
    )  # fmt: skip
    assert rows_of(many, 0) == ["wg2.w3", "wg2.w0", "wg2.w1", "wg0.w0", "wg1.w0", "store"]
