"""Compare ways to search on recorded times: how far from the best after so much GPU time and after so many trials.

Usage: python scripts/bench_search.py --studies DIR [--recording landscape|sweep] [--seeds 8] [--noise 0.004]
           [--json FILE] [--plot FILE.html]
Replays times recorded on one H200 (tests/landscape.py: 66 Configs x 24 shapes, or 112 kernels x 21) with noise; no GPU. See
docs/search.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import landscape

from autogemm.arch import gpu
from autogemm.config import Config
from autogemm.measure.timer import BASELINE, ScriptedTimer
from autogemm.problem import Problem
from autogemm.results import Outcome
from autogemm.search.candidates import entrants, ranked
from autogemm.search.loop import BATCH
from autogemm.search.race import Rules, run_final, run_heat
from autogemm.search.study import Axes, OptunaStore, open_local
from autogemm.search.trial import Trial

# GPU seconds that one sample costs beyond its kernel: short kernels are replayed until a sample takes this long.
SAMPLE_S = 400e-6
# Rounds that a search without racing gives each trial, and that an exhaustive sweep gives each Config.
ROUNDS = 5
EXHAUSTIVE_ROUNDS = 40


@dataclass(frozen=True)
class Case:
    """One shape of the landscape and one seed."""

    problem: Problem
    times_s: dict[Config, float]
    seed: int
    noise: float

    @property
    def best_s(self) -> float:
        return min(self.times_s.values())

    @property
    def exhaustive_s(self) -> float:
        """GPU time of timing every Config for as many rounds as a finalist can get."""
        return EXHAUSTIVE_ROUNDS * sum(max(SAMPLE_S, t) for t in self.times_s.values())

    def regret(self, config: Config) -> float:
        return self.times_s[config] / self.best_s - 1


class Bench:
    """A timer that keeps count of the GPU time it would have taken."""

    def __init__(self, case: Case) -> None:
        # cuBLAS takes about as long as the best kernel.
        times = {BASELINE: case.best_s, **{c.id: t for c, t in case.times_s.items()}}
        clock = random.Random(case.seed)
        phase = clock.random()
        self._timer = ScriptedTimer(
            times, noise=case.noise, outliers=0.01, seed=case.seed, drift=lambda i: 1 + 0.3 * abs((i / 20 + phase) % 2 - 1)
        )
        self.spent_s = 0.0

    def round(self, names: tuple[str, ...]) -> dict[str, float]:
        times = self._timer.round(names)
        self.spent_s += sum(max(SAMPLE_S, t) for t in times.values())
        return times

    def trial(self, config: Config) -> float:
        """Return the median paired ratio of ROUNDS rounds."""
        rounds = [self.round((config.id,)) for _ in range(ROUNDS)]
        return statistics.median(r[config.id] / r[BASELINE] for r in rounds)


Step = tuple[float, int, Config]  # GPU seconds spent, trials done, best Config so far
Strategy = Callable[[Case, Path], Iterator[Step]]


def one_by_one(case: Case, order: Iterable[Config]) -> Iterator[Step]:
    """Give every trial the same rounds, one after the other."""
    bench, found = Bench(case), {}
    for config in order:
        found[config] = bench.trial(config)
        yield bench.spent_s, len(found), min(found, key=lambda c: found[c])


def random_order(case: Case, folder: Path) -> Iterator[Step]:
    order = list(case.times_s)
    random.Random(case.seed).shuffle(order)
    return one_by_one(case, order)


def model_order(case: Case, folder: Path) -> Iterator[Step]:
    return one_by_one(case, ranked(case.problem, case.times_s, gpu("nvidia-h200")))


def tpe(case: Case, folder: Path, queued: int = 0) -> Iterator[Step]:
    """Optuna's TPE through ask and tell; ``queued`` of the model's best first."""
    name = f"tpe{queued}-{case.problem.shape}-{case.seed}"
    store: OptunaStore = open_local(folder, name, sampler="tpe", axes=Axes.of(case.times_s), seed=case.seed)
    store.enqueue(ranked(case.problem, case.times_s, gpu("nvidia-h200"))[:queued])
    bench, found = Bench(case), {}
    while (ticket := store.ask()) is not None:
        found[ticket.config] = bench.trial(ticket.config)
        store.tell(ticket, Trial(config=ticket.config, outcome=Outcome.OK, value=found[ticket.config]))
        yield bench.spent_s, len(found), min(found, key=lambda c: found[c])
    store.close()


def racing(case: Case, folder: Path, cut: bool = True) -> Iterator[Step]:
    """The default: batches in model order, each raced against the best so far, then the finalists; the last step decides."""
    rules, bench = Rules(), Bench(case)
    order = ranked(case.problem, case.times_s, gpu("nvidia-h200"))
    order = entrants(case.problem, order, gpu("nvidia-h200")) if cut else order
    by_id = {config.id: config for config in order}
    ratios: dict[str, float] = {}
    dropped: set[str] = set()
    for start in range(0, len(order), BATCH):
        batch = [config.id for config in order[start : start + BATCH]]
        leader = min(set(ratios) - dropped, key=lambda name: ratios[name]) if ratios else None
        heat = run_heat(bench, [*batch, *([leader] if leader else [])], rules.screening, rules=rules, entered=len(order))
        ratios.update({name: heat.value(name) for name in batch})
        dropped |= set(heat.dropped)
        yield bench.spent_s, start + len(batch), by_id[min(set(ratios) - dropped, key=lambda name: ratios[name])]
    alive = sorted((n for n in ratios if n not in dropped), key=lambda name: ratios[name])[: rules.finalists]
    alive.sort(key=lambda name: order.index(by_id[name]))
    result = run_final(bench, alive, rules=rules, entered=len(order))
    yield bench.spent_s, len(order), by_id[result.winner]


STRATEGIES: dict[str, Strategy] = {
    "random order": random_order,
    "TPE": tpe,
    "TPE after the model's 8 best": lambda case, folder: tpe(case, folder, 8),
    "model order": model_order,
    "all Configs raced": lambda case, folder: racing(case, folder, cut=False),
    "model's entrants raced (default)": racing,
}


def main() -> int:
    """Print the table, and write the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--noise", type=float, default=0.004)
    parser.add_argument("--studies", type=Path, required=True, help="folder for Optuna's journals")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--recording", choices=("landscape", "sweep"), default="landscape")
    given = parser.parse_args()
    configs, shapes = landscape.load()
    recorded = [(problem, dict(zip(configs, seconds, strict=True))) for problem, seconds in shapes]
    if given.recording == "sweep":
        recorded = landscape.sweep()
    cases = [
        Case(problem=problem, times_s=times_s, seed=seed, noise=given.noise)
        for problem, times_s in recorded
        for seed in range(given.seeds)
    ]
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    print("| search | trials | GPU time, % of exhaustive | mean regret | within 2 % | within 2 % at 15 % of the time |")
    print("|---|---|---|---|---|---|")
    for name, strategy in STRATEGIES.items():
        runs = [(case, list(strategy(case, given.studies))) for case in cases]
        last = [(case, steps[-1]) for case, steps in runs]
        shares = [step[0] / case.exhaustive_s for case, step in last]
        regrets = [case.regret(step[2]) for case, step in last]
        early = [_at(case, steps, 0.15) for case, steps in runs]
        print(
            f"| {name} | {statistics.mean(s[1] for _, s in last):.0f} | {100 * statistics.mean(shares):.1f} "
            f"| {100 * statistics.mean(regrets):.2f} % | {100 * _share(regrets):.0f} % | {100 * _share(early):.0f} % |",
            flush=True,
        )
        curves[name] = {"time": _curve(runs, by_time=True), "trials": _curve(runs, by_time=False)}
    if given.json:
        given.json.write_text(json.dumps(curves))
    if given.plot:
        _plot(curves, given.plot)
    return 0


def _share(regrets: list[float]) -> float:
    return sum(regret <= 0.02 for regret in regrets) / len(regrets)


def _at(case: Case, steps: list[Step], share: float) -> float:
    """Return the regret at ``share`` of the exhaustive time; without a trial yet, that of a Config drawn blindly."""
    found = [step for step in steps if step[0] <= share * case.exhaustive_s]
    return case.regret(found[-1][2]) if found else statistics.mean(map(case.regret, case.times_s))


def _curve(runs: list[tuple[Case, list[Step]]], *, by_time: bool) -> list[tuple[float, float]]:
    grid = [0.001 * 1.15**i for i in range(40)] if by_time else [float(i) for i in range(1, 132)]
    curve = []
    for at in grid:
        if by_time:
            values = [_at(case, steps, at) for case, steps in runs if steps[0][0] <= at * case.exhaustive_s]
        else:
            values = [case.regret(found[-1][2]) for case, steps in runs if (found := [s for s in steps if s[1] <= at])]
        if len(values) == len(runs):
            curve.append((100 * at if by_time else at, 100 * statistics.mean(values)))
    return curve


def _plot(curves: dict[str, dict[str, list[tuple[float, float]]]], file: Path) -> None:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, subplot_titles=("against GPU time", "against trials"))
    colors = (
        "#999999",
        "#e69f00",
        "#d55e00",
        "#56b4e9",
        "#009e73",
        "#000000",
    )  # Okabe and Ito: told apart by colour-blind eyes
    for (name, both), color in zip(curves.items(), colors, strict=True):
        for column, axis in enumerate(("time", "trials"), start=1):
            x, y = zip(*both[axis], strict=True)
            shown = [max(value, 0.01) for value in y]
            line = {"color": color, "width": 3 if "default" in name else 2}
            figure.add_trace(
                go.Scatter(x=x, y=shown, name=name, line=line, showlegend=column == 1, mode="lines", legendgroup=name),
                row=1,
                col=column,
            )
    figure.update_yaxes(type="log", title_text="mean regret (%)", row=1, col=1)
    figure.update_yaxes(type="log", row=1, col=2)
    figure.update_xaxes(type="log", title_text="% of an exhaustive sweep", row=1, col=1)
    figure.update_xaxes(title_text="trials", row=1, col=2)
    figure.update_layout(
        template="plotly_white", width=1100, height=420, margin={"t": 40}, legend={"orientation": "h", "y": -0.2}
    )
    figure.write_html(file, include_plotlyjs=True, config={"displayModeBar": False})


if __name__ == "__main__":
    sys.exit(main())
