"""Time by execution: one cluster of a generated kernel runs through the machine, on its share of the GPU's bandwidth.

Clusters do the same work on different tiles, so the one with the most tiles stands for all. Long problems are executed for a
few tiles and K steps only, and continued linearly in both: a pipeline's steady state repeats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Final

from ..arch import ArchName, Gpu
from ..arch import arch as lookup_arch
from ..config import Config
from ..constraints import require_legal
from ..errors import InputError
from ..predict.closed_form import device_memory_part
from ..problem import Problem
from ..resources import geometry
from ..results import Prediction
from .check import MODEL, compile_program, launch_scalars
from .cost import CostTable, cost_table
from .machine import Machine, Slice
from .program import Program
from .report import role
from .trace import Recording

# Beyond this many K steps of one cluster, execute three short runs and continue them.
_EXACT_STEPS: Final = 400
_SHORT_STEPS: Final = 24
_SHORT_TILES: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Cycles of one execution, and what was busy for how many of them in the whole cluster."""

    cycles: float
    busy: dict[str, float]
    waits: dict[str, float]


def predict(problem: Problem, config: Config, gpu: Gpu, *, sm_count: int | None = None) -> Prediction:
    """Return the time of ``config`` on ``problem`` by executing one cluster.

    ``parts_s`` holds what each role waited for; ``utilization`` the busy part of the tensor cores and the TMA ports of all SMs.

    Raises:
        IllegalConfig: ``config`` breaks a rule of the arch or problem.
        InputError: the GPU has no cost table, sm_count is out of range, or the kernel splits K.
        MissingDependency: TVM is not installed.
    """
    plan = _Plan.of(problem, config, gpu, sm_count)
    waves, steps = plan.waves, plan.steps
    if waves * steps <= _EXACT_STEPS:
        total = plan.run(waves, steps)
    else:
        tiles, k = min(waves, _SHORT_TILES), min(steps, _SHORT_STEPS)
        base = plan.run(tiles, k)
        more_tiles = plan.run(tiles + 1, k) if waves > tiles else base
        longer = min(steps, 2 * k)
        more_steps = plan.run(tiles, longer) if longer > k else base
        further = (steps - k) / (longer - k) * waves / tiles if longer > k else 0.0
        total = _continued(base, more_tiles, more_steps, waves - tiles, further)
    part = plan.clusters * plan.ctas / plan.sms * plan.tiles / (plan.clusters * waves)
    busy = {name: min(1.0, value / (plan.ctas * total.cycles) * part) for name, value in total.busy.items()}
    clock = plan.costs.settled_clock_hz(problem.flops, busy["tensor core"], gpu.max_clock_hz)
    return Prediction(
        time_s=total.cycles / clock,
        model=MODEL,
        gpu=gpu.slug,
        clock_hz=clock,
        parts_s={"launch": plan.costs.launch / clock, **{name: cycles / clock for name, cycles in total.waits.items()}},
        utilization={name.replace(" ", "_"): value for name, value in busy.items()},
    )


def record(problem: Problem, config: Config, gpu: Gpu, *, sm_count: int | None = None, name: str | None = None) -> Recording:
    """Return everything that one cluster does from launch to end, for a trace or a timeline.

    Raises:
        As ``predict``; InputError also where the cluster's work is too long to record.
    """
    plan = _Plan.of(problem, config, gpu, sm_count)
    if plan.waves * plan.steps > 20 * _EXACT_STEPS:
        raise InputError(
            f"a timeline of {plan.waves} tiles of {plan.steps} K steps is too long to look at; take a smaller shape"
        )
    machine = plan.execute(plan.waves, plan.steps, tracing=True)
    titles: dict[str, str] = {}
    for warp in machine.clusters[0].warps:
        titles.setdefault(f"wg{warp.group}.w{warp.index}", "")
        title = role(warp.activities)
        if title:
            titles[f"wg{warp.group}.w{warp.index}"] = title
    part = plan.clusters * plan.ctas / plan.sms * plan.tiles / (plan.clusters * plan.waves)
    busy = machine.busy["tensor core"] / (plan.ctas * machine.now) * part
    return Recording(
        name=name or config.id,
        slices=tuple(_with_work([s for s in machine.slices if titles.get(s.track, s.track)])),
        clock_hz=plan.costs.settled_clock_hz(problem.flops, busy, gpu.max_clock_hz),
        cycles=machine.now,
        titles={track: title for track, title in titles.items() if title},
    )


def _with_work(slices: list[Slice]) -> list[Slice]:
    """Return ``slices`` and, for warps, what lies between two waits: work."""
    waits: dict[tuple[int, str], list[Slice]] = {}
    for s in slices:
        if s.kind == "wait":
            waits.setdefault((s.cta, s.track), []).append(s)
    work = []
    for (cta, track), of_track in waits.items():
        of_track.sort(key=lambda s: s.start_cycle)
        for before, after in pairwise(of_track):
            if after.start_cycle > before.end_cycle:
                start, end = before.end_cycle, after.start_cycle
                work.append(Slice(cta=cta, track=track, name="work", start_cycle=start, end_cycle=end, kind="work"))
    return slices + work


@lru_cache(maxsize=32)
def _program(config: Config, arch_name: ArchName, dtype: str) -> Program:
    from ..kernel import generate

    func = generate.prim_func(config, arch_name, dtype)
    return compile_program(func, lookup_arch(arch_name), "tile", generate.barrier_names(config, arch_name))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """One kernel on one problem, ready to be executed for part of its work."""

    program: Program
    scalars: dict[str, int]
    shape: tuple[int, int, int]
    arch_name: ArchName
    costs: CostTable
    sms: int
    ctas: int
    clusters: int
    tiles: int
    waves: int
    steps: int
    blk_k: int

    @classmethod
    def of(cls, problem: Problem, config: Config, gpu: Gpu, sm_count: int | None) -> _Plan:
        """Return the plan.

        Raises:
            As ``predict``.
        """
        require_legal(config, gpu.arch, problem)
        if config.split_k > 1:
            raise InputError(
                f"SPLIT_K={config.split_k}: clusters work on one tile together, so one can't stand for all; use the closed form"
            )
        ctas = geometry(config, gpu.arch).cluster_ctas
        sms = gpu.sm_count if sm_count is None else sm_count
        if not ctas <= sms <= gpu.sm_count:
            raise InputError(f"sm_count={sms} is outside {ctas} to {gpu.sm_count}, one cluster to all SMs of {gpu.slug}")
        program = _program(config.binary, gpu.arch, problem.dtype)
        shape = (problem.m, problem.n, problem.k)
        scalars = launch_scalars(config, gpu.arch, problem.dtype, shape, sms)
        clusters, tiles = scalars["cluster_count"], scalars["tile_count"]
        waves = -(-tiles // clusters)
        steps = scalars["k_steps"]
        costs = cost_table(gpu.slug)
        # One cluster gets its share of the L2's and the device memory's bandwidth. It meets every box for the first time, but
        # most of what it asks for was fetched by others or is still in L2: of device memory's bandwidth it uses the rest only.
        # Its latency is met more often: a wave's CTAs go through K together, and wait together for what none had before.
        loaded = tiles * ctas * steps * _stage_bytes(program, scalars)
        part = device_memory_part(problem, config, gpu)
        rest = min(1.0, max(1.0, part * problem.bytes_moved) / loaded)
        shared = costs.share(ctas * clusters / sms / clusters)
        met = min(1.0, part) * _first_touched(scalars)
        shared = replace(shared, dram_bw=shared.dram_bw / rest, dram_latency=shared.dram_latency * met)
        return cls(
            program=program, scalars=scalars, shape=shape, arch_name=gpu.arch, costs=shared, sms=sms, ctas=ctas,
            clusters=clusters, tiles=tiles, waves=waves, steps=steps, blk_k=config.blk_k,
        )  # fmt: skip

    def execute(self, tiles: int, steps: int, tracing: bool = False) -> Machine:
        """Return the machine after cluster 0 has worked on ``tiles`` tiles of ``steps`` K steps."""
        m, n, _ = self.shape
        k = min(self.shape[2], steps * self.blk_k)
        scalars = {**self.scalars, "K": k, "k_steps": steps, "slice_steps": steps}
        if tiles < self.waves:
            scalars |= {"tile_count": tiles * self.clusters, "item_count": tiles * self.clusters}
        names = [buffer.name for buffer in self.program.buffers]
        shapes = dict(zip(names, ((m, k), (n, k), (m, n)), strict=False))  # a workspace follows, which is not used
        machine = Machine(
            self.program, arch=lookup_arch(self.arch_name), parameters=scalars, arrays=dict.fromkeys(names), shapes=shapes,
            costs=self.costs, numerics=False, race=False, tracing=tracing, clusters=(0,),
        )  # fmt: skip
        machine.run()
        if any(finding.kind == "deadlock" for _, finding in machine.findings.items()):
            raise InputError("this kernel does not end: " + next(f.text for _, f in machine.findings.items()))
        return machine

    def run(self, tiles: int, steps: int) -> _Run:
        """Return what ``execute`` yields, summed up."""
        machine = self.execute(tiles, steps)
        waits: dict[str, float] = {}
        for warp in machine.clusters[0].warps:
            title = role(warp.activities)
            if warp.rank or not title:
                continue
            families: dict[str, float] = {}
            for barrier, cycles in warp.waits.items():
                family = barrier.removeprefix("cta0.").split("[")[0]
                families[family] = families.get(family, 0.0) + cycles
            for family, cycles in families.items():
                name = f"{title} waits for {family}"
                waits[name] = max(waits.get(name, 0.0), cycles)
        return _Run(cycles=machine.now, busy=dict(machine.busy), waits=waits)


def _first_touched(scalars: dict[str, int]) -> float:
    """Return the part of all tiles whose row or column no earlier wave of tiles has worked on."""
    from ..kernel.scheduler import tile_at

    rows: set[int] = set()
    columns: set[int] = set()
    count, new = scalars["tile_count"], 0
    for start in range(0, count, scalars["cluster_count"]):
        wave = [tile_at(tile, scalars) for tile in range(start, min(count, start + scalars["cluster_count"]))]
        new += sum(row not in rows or column not in columns for row, column in wave)
        rows.update(row for row, _ in wave)
        columns.update(column for _, column in wave)
    return new / count


def _stage_bytes(program: Program, scalars: dict[str, int]) -> int:
    """Return the bytes of one stage of one CTA's ring."""
    depth = next(count for _, count, name in program.barriers if name == "tma2mma")
    return sum(b.elements * b.itemsize for b in program.shared_buffers if b.shape[0] == depth and len(b.shape) > 1) // depth


def _continued(base: _Run, more_tiles: _Run, more_steps: _Run, tiles: int, steps: float) -> _Run:
    """Return ``base`` continued: ``tiles`` times what one more tile took, ``steps`` times what the longer K took more."""

    def line(at: float, tile: float, step: float) -> float:
        return max(0.0, at + tiles * (tile - at) + steps * (step - at))

    return _Run(
        cycles=line(base.cycles, more_tiles.cycles, more_steps.cycles),
        busy={k: line(v, more_tiles.busy[k], more_steps.busy[k]) for k, v in base.busy.items()},
        waits={k: line(v, more_tiles.waits.get(k, v), more_steps.waits.get(k, v)) for k, v in base.waits.items()},
    )
