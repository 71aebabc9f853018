"""Draw simulated kernels under each other as one self-contained HTML page (needs the ``report`` extra, plotly)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ..binary import write_whole
from ..errors import InputError, MissingDependency
from .state import Slice
from .trace import Recording

# What an interval is -> (legend, colour, line width in pixels); drawn in this order, so that waits lie behind work.
_KINDS: Final[dict[str, tuple[str, str, float]]] = {
    "wait": ("warp waits", "#e4e4e4", 9),
    "work": ("warp works", "#6b6b6b", 9),
    "tma": ("TMA loads in flight", "#4c78a8", 9),
    "mma": ("MMA", "#54a24b", 9),
    "store": ("TMA stores in flight", "#f58518", 9),
}
_ORDER: Final = ("TMA producer", "TMA", "MMA issuer", "MMA consumer", "tensor core", "epilogue", "store")
_ROW_PIXELS: Final = 22


def timeline_html(recordings: Sequence[Recording], *, cta: int = 0, until_s: float | None = None) -> str:
    """Return the page: one panel per kernel on a common time axis, one row per engine and warp role of one CTA.

    Args:
        cta: the CTA to show; every other one does the same work on other tiles.
        until_s: end of the part shown at first; the page can be zoomed and panned.

    Raises:
        MissingDependency: plotly is not installed.
        InputError: no recording, or one without intervals of that CTA.
    """
    figure = _figure(recordings, cta, until_s)
    return str(figure.to_html(include_plotlyjs=True, full_html=True, config={"scrollZoom": True, "displaylogo": False}))


def write_timeline(path: Path, recordings: Sequence[Recording], *, cta: int = 0, until_s: float | None = None) -> None:
    """Write ``timeline_html`` to ``path``.

    Raises:
        MissingDependency, InputError: as ``timeline_html``.
        OSError: the file can't be written.
    """
    write_whole(path, timeline_html(recordings, cta=cta, until_s=until_s).encode())


def merged(slices: Sequence[Slice], gap_cycles: float = 2.0) -> list[Slice]:
    """Return ``slices`` of one track and kind in order, with those joined that touch, overlap or repeat one name."""
    joined: list[Slice] = []
    for s in sorted(slices, key=lambda s: s.start_cycle):
        last = joined[-1] if joined else None
        if last is not None and s.start_cycle - last.end_cycle <= gap_cycles and s.name == last.name:
            end = max(last.end_cycle, s.end_cycle)
            joined[-1] = Slice(
                cta=s.cta, track=s.track, name=s.name, start_cycle=last.start_cycle, end_cycle=end, kind=s.kind
            )  # fmt: skip
        else:
            joined.append(s)
    return joined


def rows_of(recording: Recording, cta: int) -> list[str]:
    """Return the tracks to draw, in the order of the data: of warps that share a role in a warpgroup, the first stands for all.

    MMA issuers are kept: each serves another consumer.
    """
    shown: dict[tuple[str, str], str] = {}
    for which, track in recording.tracks():
        title = recording.titles.get(track, "")
        if which == cta:
            alone = title in ("", "MMA issuer")
            shown.setdefault((title, track if alone else track.split(".")[0]), track)
    order = {track: i for i, track in enumerate(_ORDER)}

    def position(track: str) -> tuple[int, str]:
        return order.get(recording.titles.get(track, track), len(order)), track

    return sorted(shown.values(), key=position)


def _figure(recordings: Sequence[Recording], cta: int, until_s: float | None) -> Any:
    try:
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots
    except ImportError as error:
        raise MissingDependency("drawing a timeline needs plotly; pip install 'autogemm[report]'") from error
    if not recordings:
        raise InputError("a timeline needs at least one simulated kernel")
    rows: list[list[str]] = []
    for recording in recordings:
        tracks = rows_of(recording, cta)
        if not tracks:
            raise InputError(f"the recording of {recording.name} holds nothing of CTA {cta}")
        rows.append(tracks)
    figure = make_subplots(
        rows=len(rows), cols=1, shared_xaxes=True, vertical_spacing=0.06,
        row_heights=[len(tracks) for tracks in rows], subplot_titles=[_title(r, cta) for r in recordings],
    )  # fmt: skip
    shown: set[str] = set()
    for row, (recording, tracks) in enumerate(zip(recordings, rows, strict=True), start=1):
        height = {track: len(tracks) - i for i, track in enumerate(tracks)}
        for kind, (legend, colour, width) in _KINDS.items():
            x: list[float | None] = []
            y: list[float | None] = []
            text: list[str | None] = []
            for track in tracks:
                mine = [s for s in recording.slices if s.cta == cta and s.track == track and s.kind == kind]
                for s in merged(mine):
                    x += [s.start_cycle / recording.clock_hz * 1e6, s.end_cycle / recording.clock_hz * 1e6, None]
                    y += [height[track], height[track], None]
                    text += [f"{s.name}<br>{s.end_cycle - s.start_cycle:.0f} cycles"] * 2 + [None]
            if not x:
                continue
            figure.add_trace(
                go.Scatter(
                    x=x, y=y, text=text, mode="lines", line={"color": colour, "width": width}, name=legend,
                    legendgroup=kind, showlegend=kind not in shown, hovertemplate="%{text}<extra></extra>",
                ),
                row=row, col=1,
            )  # fmt: skip
            shown.add(kind)
        figure.update_yaxes(
            row=row, col=1, tickmode="array", tickvals=list(height.values()), range=[0.3, len(tracks) + 0.7],
            ticktext=[recording.title(track) for track in tracks], showgrid=False, zeroline=False, fixedrange=True,
        )  # fmt: skip
    longest = max(r.cycles / r.clock_hz for r in recordings)
    figure.update_xaxes(range=[0, 1e6 * (until_s if until_s is not None else longest)], gridcolor="#eeeeee")
    figure.update_xaxes(title_text="microseconds since launch (simulated, not measured)", row=len(rows), col=1)
    figure.update_layout(
        height=130 + 70 * len(rows) + _ROW_PIXELS * sum(map(len, rows)), plot_bgcolor="white", hovermode="closest",
        margin={"l": 10, "r": 10, "t": 90, "b": 40}, font={"size": 12},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.04, "xanchor": "left", "x": 0},
    )  # fmt: skip
    return figure


def _title(recording: Recording, cta: int) -> str:
    time_us = recording.cycles / recording.clock_hz * 1e6
    busy = sum(s.end_cycle - s.start_cycle for s in recording.slices if s.kind == "mma" and s.cta == cta) / recording.cycles
    return f"{recording.name}: {time_us:.1f} us at {recording.clock_hz / 1e9:.2f} GHz, tensor core busy {busy:.0%}"
