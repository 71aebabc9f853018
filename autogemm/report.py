"""A database and its studies as one self-contained HTML page; predictions and measurements are never mixed up."""

from __future__ import annotations

import html
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from . import __version__
from .arch import GPUS, arch
from .errors import InputError, MissingDependency
from .record import Choice, Row
from .results import Outcome
from .search.trial import Trial

_COLORS: Final = {"measured": "#1b7f5c", "predicted": "#c77700", "cuBLAS": "#4a5568"}
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a202c; background: #fff; max-width: 1400px; margin: 2rem auto;
  padding: 0 1.5rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.4rem; }
p { max-width: 52rem; } .note { color: #4a5568; }
table { border-collapse: collapse; font-size: 13px; } th { text-align: left; border-bottom: 2px solid #cbd5e0;
  white-space: nowrap; }
th, td { padding: .3rem .7rem .3rem 0; vertical-align: top; } td { border-bottom: 1px solid #edf2f7; white-space: nowrap; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.measured { color: #1b7f5c; font-weight: 600; } .predicted { color: #c77700; font-weight: 600; }
code { font-size: 12px; } .scroll { overflow-x: auto; }
"""


def render_report(rows: Sequence[Row], studies: Mapping[str, Sequence[Trial]], *, title: str) -> str:
    """Return the page as text: tuned rows with spread and baseline, roofline, tie sets, landscape, regret, rejections.

    Args:
        rows: of a database, in the order to show.
        studies: name to finished trials, in the order in which they ran.

    Raises:
        InputError: nothing to report.
        MissingDependency: plotly is not installed.
    """
    if not rows and not any(studies.values()):
        raise InputError("nothing to report: no rows and no trials; make some with: autogemm tune --shape MxNxK")
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingDependency("reports need plotly; install it with: pip install autogemm[report]") from error
    sections = [
        _summary(rows, studies), _rows_section(rows), _ratio_section(rows), _roofline_section(rows), _tie_section(rows),
        _landscape_section(studies), _regret_section(studies), _rejection_section(studies),
    ]  # fmt: skip
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>'
        f"<body><h1>{html.escape(title)}</h1>\n" + "\n".join(s for s in sections if s) + "\n</body></html>\n"
    )


def _summary(rows: Sequence[Row], studies: Mapping[str, Sequence[Trial]]) -> str:
    measured = [row for row in rows if row.status == "measured"]
    ratios = [ratio for row in measured if (ratio := row.ratio()) is not None]
    parts = [f"{len(measured)} measured and {len(rows) - len(measured)} predicted rows"]
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        parts.append(f"geometric mean of the measured ratios {mean:.3f} x cuBLAS ({min(ratios):.3f} to {max(ratios):.3f})")
        run = [ratio for row in measured if (ratio := row.ratio(row.choice)) is not None]
        parts.append(f"of what dispatch runs {math.exp(statistics.fmean(map(math.log, run))):.3f} x cuBLAS")
    trials = sum(map(len, studies.values()))
    if trials:
        parts.append(f"{trials} trials in {len(studies)} {'study' if len(studies) == 1 else 'studies'}")
    return f'<p class="note">autogemm {__version__}: {"; ".join(parts)}.</p>'


def _rows_section(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = []
    for row in rows:
        m = row.measurement
        baseline = "-" if m is None else _us(statistics.median(m.warm.baseline_s))
        what = row.choice if m is not None else f"by {row.prediction.model}" if row.prediction is not None else ""
        regret = "-" if row.race is None else f"{row.race.regret:.2%}"
        rate = f"{row.key.problem.flops / row.time_s / 1e12:.0f}"
        lines.append(
            [
                row.key.problem.shape, row.key.dtype, f"{row.key.gpu} ({row.key.sm_count})", f"<code>{row.config.id}</code>",
                f'<span class="{row.status}">{row.status}</span>', _us(row.time_s), rate, baseline,
                row.ratio_text(), row.ratio_text("cublaslt"),
                "-" if row.race is None else str(len(row.race.tied)), regret, html.escape(what), row.provenance.date[:10],
            ]
        )  # fmt: skip
    head = ["shape", "dtype", "GPU (SMs)", "config", "status", "time/us", "TFLOP/s", "cuBLAS/us", "x cuBLAS", "cuBLASLt",
            "tied", "regret", "dispatch runs", "date"]  # fmt: skip
    note = (
        "Times are medians with a warm L2. x cuBLAS is the median paired ratio of times from the same interleaved rounds, "
        "with half its interquartile range; predicted rows have none. cuBLASLt is the same of the best of cuBLASLt's own "
        "algorithms. Tied: configs not separated from the fastest."
    )
    return f"<h2>Rows</h2><p class='note'>{note}</p>" + _table(head, lines, numeric={5, 6, 7, 8, 9, 10, 11})


def _ratio_section(rows: Sequence[Row]) -> str:
    measured = [row for row in rows if row.measurement is not None]
    if not measured:
        return ""
    import plotly.graph_objects as go

    figure = go.Figure()
    series: tuple[tuple[Choice, bool, str, str], ...] = (
        ("autogemm", False, "warm L2", _COLORS["measured"]), ("autogemm", True, "cold L2", "#3b6fb6"),
        ("cublaslt", False, "best cuBLASLt algorithm, warm L2", _COLORS["cuBLAS"]),
    )  # fmt: skip
    for of, cold, name, color in series:
        shown = [(row, row.ratio(of, cold=cold), row.spread(of, cold=cold)) for row in measured]
        points = [(row.key.problem.shape, ratio, spread, _name(row, of)) for row, ratio, spread in shown]
        points = [point for point in points if point[1] is not None]
        if points:
            figure.add_scatter(
                x=[p[0] for p in points], y=[p[1] for p in points], error_y={"array": [p[2] for p in points]},
                mode="markers", name=name, marker={"color": color, "size": 8}, text=[p[3] for p in points],
            )  # fmt: skip
    figure.add_hline(y=1.0, line={"color": _COLORS["cuBLAS"], "dash": "dash"}, annotation_text="cuBLAS")
    figure.update_yaxes(title="x cuBLAS (measured)")
    figure.update_xaxes(tickangle=-45)
    return "<h2>Against cuBLAS</h2>" + _figure(figure)


def _name(row: Row, choice: Choice) -> str:
    return row.cublaslt.algorithm.name if choice == "cublaslt" and row.cublaslt is not None else row.config.id


def _roofline_section(rows: Sequence[Row]) -> str:
    known = [row for row in rows if row.key.gpu in GPUS]
    if not known:
        return ""
    import plotly.graph_objects as go

    figure = go.Figure()
    intensities = [row.key.problem.flops / row.key.problem.bytes_moved for row in known]
    low, high = min(intensities) / 2, max(intensities) * 2
    for slug in dict.fromkeys(row.key.gpu for row in known):
        part = GPUS[slug]
        peak = arch(part.arch).tensor_flops_per_clock * part.sm_count * part.max_clock_hz
        knee = min(max(peak / part.dram_bytes_per_s, low), high)
        xs = [low, knee, high]
        figure.add_scatter(
            x=xs, y=[min(peak, x * part.dram_bytes_per_s) / 1e12 for x in xs], mode="lines", name=f"{slug}: data sheet",
            line={"color": _COLORS["cuBLAS"]},
        )  # fmt: skip
    for status in ("measured", "predicted"):
        points = [row for row in known if row.status == status]
        if points:
            figure.add_scatter(
                x=[r.key.problem.flops / r.key.problem.bytes_moved for r in points],
                y=[r.key.problem.flops / r.time_s / 1e12 for r in points], mode="markers", name=status,
                marker={"color": _COLORS[status], "size": 8, "symbol": "circle" if status == "measured" else "circle-open"},
                text=[f"{r.key.problem.shape} {r.config.id}" for r in points],
            )  # fmt: skip
    figure.update_xaxes(type="log", title="FLOP per byte of least device-memory traffic")
    figure.update_yaxes(type="log", title="TFLOP/s")
    note = (
        "Roofs: memory bandwidth of the data sheet, and dense tensor-core rate at the highest clock, which a long "
        "product does not sustain. Points above the memory roof find their operands in a warm L2."
    )
    return f"<h2>Roofline</h2><p class='note'>{note}</p>" + _figure(figure)


def _tie_section(rows: Sequence[Row]) -> str:
    raced = [row for row in rows if row.race is not None and row.race.finalists]
    if not raced:
        return ""
    import plotly.graph_objects as go

    figure = go.Figure()
    lines = []
    for row in raced:
        race = row.race
        assert race is not None
        fastest = race.finalists[0].kernel_s
        for finalist in race.finalists:
            pairs = zip(finalist.kernel_s, fastest, strict=False)
            tied = finalist.config.id in race.tied
            figure.add_box(
                x=[row.key.problem.shape] * len(finalist.kernel_s), y=[mine / best for mine, best in pairs],
                name=finalist.config.id, showlegend=False, boxpoints=False,
                marker={"color": _COLORS["measured"] if tied else "#a0aec0"},
            )  # fmt: skip
        ids = ", ".join(f"<code>{config_id}</code>" for config_id in race.tied)
        lines.append(
            [row.key.problem.shape, ids, f"{race.margin:.1%}", f"{race.flip_rate:.1%}", f"{race.regret:.2%}",
             f"{race.entered}", f"{race.rounds}", race.ended]
        )  # fmt: skip
    figure.update_layout(boxmode="group")
    figure.update_yaxes(title="time / time of the winner, per round")
    head = ["shape", "tie set", "margin", "flip rate", "regret", "entered", "rounds", "ended"]
    note = "Finalists of each race; green ones are tied with the winner within the margin."
    return f"<h2>Tie sets</h2><p class='note'>{note}</p>" + _figure(figure) + _table(head, lines, numeric={2, 3, 4, 5, 6})


_STUDY: Final = re.compile(r"(?:autogemm/)?(model|device)[-/](.+)-(\d+)-(float16|bfloat16)-\w+-\w+-(\d+x\d+x\d+)-[0-9a-f]+")


def _label(study: str) -> str:
    """Return a study's name for people: shape, type, GPU, and whether its values are predicted or measured."""
    match = _STUDY.fullmatch(study)
    if match is None:
        return study
    kind, gpu, sms, dtype, shape = match.groups()
    return f"{shape} {dtype} {gpu} ({sms}), {'predicted' if kind == 'model' else 'measured'}"


def _valued(trials: Sequence[Trial]) -> list[tuple[Trial, float]]:
    return [(t, t.value) for t in trials if t.outcome is Outcome.OK and t.value is not None]


def _landscape_section(studies: Mapping[str, Sequence[Trial]]) -> str:
    valued = {name: found for name, trials in studies.items() if (found := _valued(trials))}
    if not valued:
        return ""
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, found in valued.items():
        ordered = sorted(found, key=lambda pair: pair[1])
        best = ordered[0][1]
        figure.add_scatter(
            x=list(range(1, len(ordered) + 1)), y=[value / best for _, value in ordered], mode="lines+markers",
            name=_label(name), text=[trial.config.id for trial, _ in ordered], marker={"size": 5},
        )  # fmt: skip
    figure.update_xaxes(title="config, best first")
    figure.update_yaxes(title="time / best time of the study", type="log")
    return "<h2>Landscape</h2><p class='note'>Every config that was tried, by how far it is from the best.</p>" + _figure(
        figure
    )


def _regret_section(studies: Mapping[str, Sequence[Trial]]) -> str:
    valued = {name: found for name, trials in studies.items() if len(found := _valued(trials)) > 1}
    if not valued:
        return ""
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, found in valued.items():
        best, so_far, regret = min(value for _, value in found), math.inf, []
        for _, value in found:
            so_far = min(so_far, value)
            regret.append(100 * (so_far / best - 1))
        if not any(regret):
            continue  # the first trial was the best, as where a model orders what the same model judges
        figure.add_scatter(x=list(range(1, len(regret) + 1)), y=regret, mode="lines", line={"shape": "hv"}, name=_label(name))
    if not figure.data:
        return ""
    figure.update_xaxes(title="trials finished")
    figure.update_yaxes(title="best so far over best of the study, %", rangemode="tozero")
    return "<h2>Regret</h2><p class='note'>How soon the search had what it ended with.</p>" + _figure(figure)


def _rejection_section(studies: Mapping[str, Sequence[Trial]]) -> str:
    counts: Counter[tuple[str, str, str]] = Counter()
    for name, trials in studies.items():
        for trial in trials:
            if trial.outcome is not Outcome.OK:
                counts[name, trial.outcome.value, trial.reason.splitlines()[0] if trial.reason else ""] += 1
    if not counts:
        return ""
    lines = [
        [html.escape(_label(name)), outcome, html.escape(reason), str(n)] for (name, outcome, reason), n in counts.most_common()
    ]
    return "<h2>Rejected candidates</h2>" + _table(["study", "outcome", "reason", "trials"], lines, numeric={3})


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], *, numeric: set[int]) -> str:
    """Return an HTML table; cells are HTML already."""
    top = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td{' class=n' if i in numeric else ''}>{cell}</td>" for i, cell in enumerate(line)) + "</tr>"
        for line in lines
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(figure: Any) -> str:
    figure.update_layout(template="plotly_white", height=420, margin={"l": 60, "r": 20, "t": 20, "b": 60})
    figure.update_layout(legend={"x": 1.01, "y": 1, "font": {"size": 11}})
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f}"
