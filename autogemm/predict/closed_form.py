"""A kernel's time in closed form: the bounds of one k step, times steps and tiles, plus what does not overlap.

One CTA per SM walks its tiles; each k step takes the longest of: its MMAs, the ring's load latency, its share of the L2,
and the zero fill of rows outside the tensor. docs/prediction.md explains the model and how well it does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from ..arch import Gpu
from ..config import Config
from ..dtypes import DTYPES
from ..errors import InputError
from ..fingerprint import fingerprint
from ..manifest import ceildiv
from ..problem import Problem
from ..results import Prediction
from .constants import Constants, constants

MODEL: Final = "closed-form-2"
_FOLDER: Final = Path(__file__).resolve().parent
_MMA_K: Final = 16  # K of one 16-bit MMA on both archs (PTX ISA)


def mma_cycles(config: Config, arch_name: str) -> float:
    """Return tensor-core cycles of one k step of one CTA (of the pair, where CTAs pair up on sm_100a).

    wgmma m64nNk16, both operands in shared memory: max(N/2, 16+N/4) cycles fits arXiv 2402.13499 (n64: 32, n128: 64,
    n256: 128) and the FlashVLA unit tests (n8: 18.9, n32: 24.7). tcgen05.mma k16: max(N/2, 32+N/4) fits SemiAnalysis'
    B200 intervals for one CTA (n64: 48, n128: 64, n256: 128) and max(N/2, 22+N/3) those for a pair (43, 64, 128).
    """
    steps = config.blk_k / _MMA_K
    if arch_name == "sm_100a":
        n = config.cta_group * config.blk_n
        fixed = 32 + n / 4 if config.cta_group == 1 else 22 + n / 3
        return steps * config.num_consumer * max(n / 2, fixed)
    return steps * (config.blk_m / 64) * max(config.blk_n / 2, 16 + config.blk_n / 4)


class _Grid(NamedTuple):
    """The work of one launch. Rows and columns are those the MMA sees: exchanged with SWAP_AB.

    Attributes:
        m, n: rows and columns of the product.
        cta_rows, cta_cols: rows and columns of operands that one CTA loads per k step.
        cols: columns of one cluster's tile; rows: its rows.
        row_tiles, col_tiles: tiles along both.
        k_steps: k steps of one work item; slices: work items per tile.
        clusters: that run at once; waves: rounds they need.
    """

    m: int
    n: int
    cta_rows: int
    cta_cols: int
    rows: int
    cols: int
    row_tiles: int
    col_tiles: int
    k_steps: int
    slices: int
    clusters: int
    waves: int

    @property
    def items(self) -> int:
        return self.row_tiles * self.col_tiles * self.slices


def _grid(problem: Problem, config: Config, blackwell: bool, sms: int) -> _Grid:
    m, n = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    pair = config.cta_group
    cta_rows = config.blk_m * config.num_consumer if blackwell else config.blk_m
    rows, cols = pair * cta_rows, pair * config.blk_n if blackwell else config.blk_n
    row_tiles, col_tiles = ceildiv(m, rows), ceildiv(n, cols)
    all_steps = ceildiv(problem.k, config.blk_k)
    k_steps = ceildiv(all_steps, config.split_k)
    slices = ceildiv(all_steps, k_steps)
    items = row_tiles * col_tiles * slices
    clusters = min(items, sms // pair)
    return _Grid(
        m, n, cta_rows, cols // pair, rows, cols, row_tiles, col_tiles, k_steps, slices, clusters, ceildiv(items, clusters)
    )


def predict(
    problem: Problem, config: Config, gpu: Gpu, *, sm_count: int | None = None, use: Constants | None = None
) -> Prediction:
    """Return the predicted time of ``config`` on ``problem`` with a warm L2, as repeated launches see it.

    Args:
        sm_count: SMs the kernel may occupy; all of ``gpu`` by default.
        use: constants in place of the GPU's own (for fitting them).

    Raises:
        InputError: sm_count is smaller than one cluster or larger than the GPU.
    """
    sms = gpu.sm_count if sm_count is None else sm_count
    pair = config.cta_group
    if not pair <= sms <= gpu.sm_count:
        raise InputError(f"sm_count={sms} is outside {pair} to {gpu.sm_count}, one cluster to all SMs of {gpu.slug}")
    c = constants(gpu) if use is None else use
    p = c.overlap
    size = DTYPES[problem.dtype].bytes
    grid = _grid(problem, config, gpu.arch == "sm_100a", sms)
    items, waves, k_steps = grid.items, grid.waves, grid.k_steps

    # One k step: what an SM does by itself, multiplying and loading.
    mma = mma_cycles(config, gpu.arch)
    sharing = 1 if config.pingpong else config.num_consumer  # consumers that work on one tile together
    multiply = mma + c.step_cycles + c.consumer_cycles * (sharing - 1)
    latency = (c.load_cycles + multiply) / config.pipe_depth
    zero_fill = 0.0 if pair == 1 else c.zero_fill_cycles * _rows_outside(grid, pair)
    load = latency**p + zero_fill**p
    compute = k_steps * _joined(multiply, c.least_step_cycles, p)

    # What all SMs share.
    a_served, b_served = _served(grid, config, c)
    requested = min(grid.cta_rows, grid.m) / a_served + min(grid.cta_cols, grid.n) / b_served
    l2_step_s = requested * config.blk_k * size * grid.clusters * pair / c.l2_bytes_per_s
    dram_s = _dram_bytes(problem, grid, config.l2_group_size, gpu, c) / (c.dram_efficiency * gpu.dram_bytes_per_s)

    # What follows a tile's last step.
    cols, consumer_rows = grid.cols, grid.cta_rows / sharing
    epilogue = c.epilogue_column_cycles * cols * consumer_rows / 64 + c.store_cycles * (cols / config.epi_n - 1)
    handed_over = added = 0.0
    if grid.slices > 1:
        # Every slice leaves float32 sums in L2; the last of a tile to come reads the others' and writes the tile.
        sums = grid.cta_rows * cols * 4 / c.slice_bytes_per_cycle
        waits = c.slice_cycles + c.slice_miss_cycles * _missed(problem, gpu, c)
        handed_over, added = waits + sums, sums * (grid.slices - 1)
    after = handed_over + added + epilogue
    # Between two tiles: with ping-pong, two are in work at a time, one in its epilogue under the other's MMAs.
    between = handed_over + (added + epilogue) / grid.slices
    if config.pingpong:
        computed = max(compute, (compute + between) / 2)
    elif config.tmem_buffers > 1:
        computed = max(compute, between)
    else:
        computed = compute + between
    last = (items - (waves - 1) * grid.clusters) / items  # part of the work in the last, partly filled wave

    next_clock = gpu.max_clock_hz
    for _ in range(2):  # the clock depends on the utilization, which depends weakly on the clock
        clock = next_clock
        loaded = k_steps * (load + (l2_step_s * clock) ** p) ** (1 / p)
        # Loads go on during an epilogue, as far as the ring is deep; those of the last tile are done before it.
        early_s = _joined((waves - 1) * _joined(computed, loaded, p) / clock, (1 - last) * dram_s, p)
        late_s = _joined(_joined(compute, loaded, p) / clock, last * dram_s, p) + after / clock
        device_s = early_s + late_s
        busy = min(1.0, items * pair * k_steps * mma / (sms * clock * device_s))
        next_clock = _settled_clock(problem, gpu, c, busy)
    launch_s = c.launch_s + (c.cluster_launch_s if pair > 1 else 0.0)
    return Prediction(
        time_s=device_s + launch_s,
        model=MODEL,
        gpu=gpu.slug,
        clock_hz=clock,
        parts_s={
            "launch": launch_s,
            "main_loop": waves * _joined(compute, loaded, p) / clock,
            "epilogue": ((waves - 1) * (computed - compute) + after) / clock,
            "reduction": (waves * handed_over + added) / clock,
            "bound_mma": waves * k_steps * mma / clock,
            "bound_load_latency": waves * k_steps * latency / clock,
            "bound_l2": waves * k_steps * l2_step_s,
            "bound_dram": dram_s,
        },
        utilization={
            "tensor_core": busy,
            "dram": dram_s / device_s * c.dram_efficiency,
            "sms": items / (waves * (sms // pair)),
        },
    )


@lru_cache(maxsize=1)
def model_hash() -> str:
    """Return the content hash of the model: of its formulas, its constants and what it knows of GPUs."""
    return fingerprint((*sorted(_FOLDER.glob("*.py")), _FOLDER.parent / "arch.py", _FOLDER.parent / "resources.py"))


def _settled_clock(problem: Problem, gpu: Gpu, use: Constants, busy: float) -> float:
    """Return the SM clock in Hz that the power limit leaves while ``busy`` of the tensor cores' cycles are used."""
    work = float((max(problem.flops, 1e9) / 1e12) ** -use.clock_per_work)
    return min(gpu.max_clock_hz, use.full_load_clock_hz * work * float(max(busy, 0.05) ** -use.clock_per_utilization))


def device_memory_part(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Return the bytes that one warm launch moves to or from device memory, over the least it could move from a cold start."""
    grid = _grid(problem, config, gpu.arch == "sm_100a", gpu.sm_count)
    return _dram_bytes(problem, grid, config.l2_group_size, gpu, constants(gpu)) / problem.bytes_moved


def _joined(a: float, b: float, p: float) -> float:
    return float((a**p + b**p) ** (1 / p))


def _rows_outside(grid: _Grid, pair: int) -> int:
    """Return rows outside the tensor that a CTA of a pair has filled with zeros per k step, where all clusters have some.

    A lone CTA's boxes are cut to a tensor that is smaller (see sm90_launch.py), and the few tiles at an edge showed no cost.
    What a pair shares is filled in both.
    """
    a_rows = 0 if grid.m >= grid.rows else grid.cta_rows - max(0, grid.m - (pair - 1) * grid.cta_rows)
    b_rows = 0 if grid.n >= grid.cols else grid.cta_cols - max(0, grid.n - (pair - 1) * grid.cta_cols)
    return a_rows + pair * b_rows


def _served(grid: _Grid, config: Config, c: Constants) -> tuple[float, float]:
    """Return how many SMs one L2 read of A, and one of B, serves.

    Neighbours in the raster that ask for the same lines at the same time are served together: of ``sharing_sms`` of them, those
    in one tile column share B and those in one tile row share A. Slices of a tile, which are neighbours too, share nothing.
    Tiles at the edge of N load less and end sooner; the more of them and the more that is missing, the sooner neighbours part.
    """
    pair = config.cta_group
    missing = (grid.col_tiles * grid.cols - grid.n) / pair / (grid.col_tiles * (grid.cta_rows + grid.cta_cols))
    part = 0.0 if grid.waves == 1 else missing / c.ragged_part
    together = 1 + (max(1.0, c.sharing_sms / grid.slices) - 1) / (1 + part)
    group = min(config.l2_group_size, grid.row_tiles)
    a_served = min(max(1.0, together / (group * pair)), grid.col_tiles)
    return a_served, 1.0 if pair > 1 else min(together, group)  # of a pair, each CTA reads its part once for both


def _missed(problem: Problem, gpu: Gpu, c: Constants) -> float:
    """Return the part of a problem that does not stay in L2 from launch to launch: none of a small one, all of a large one."""
    return min(1.0, max(0.0, (problem.bytes_moved / gpu.l2_bytes - c.l2_keeps) / (c.l2_loses - c.l2_keeps)))


def _dram_bytes(problem: Problem, grid: _Grid, group: int, gpu: Gpu, c: Constants) -> float:
    """Return bytes that one launch reads from and writes to device memory.

    The raster walks a group of tile rows column by column: A of the group is read once if it fits into L2, B once per group, or
    per so many rows as are in work at a time if these are more, unless all of it fits.
    """
    missed = _missed(problem, gpu, c)
    if not missed:
        return 0.0
    size, k, group, held = DTYPES[problem.dtype].bytes, problem.k, min(group, grid.row_tiles), c.l2_keeps * gpu.l2_bytes
    panel, b_bytes = size * group * grid.rows * k, size * grid.n * k
    rows_at_once = max(group, grid.clusters / (grid.col_tiles * grid.slices))
    b_reads = 1 if b_bytes < held else math.ceil(grid.row_tiles / rows_at_once)
    # A panel too large is read again in part if the group takes more than one wave.
    again = min(0.5, ceildiv(group * grid.col_tiles * grid.slices, grid.clusters) - 1)
    a_reads = 1.0 if panel < held else 1 + again * (1 - held / panel)
    return missed * (size * (grid.m * k * a_reads + grid.m * grid.n) + b_bytes * b_reads)


def rank(
    problem: Problem, configs: Iterable[Config], gpu: Gpu, *, sm_count: int | None = None
) -> list[tuple[Config, Prediction]]:
    """Return ``configs`` with their predictions, shortest time first; equal times keep their order.

    Raises:
        InputError: as ``predict``.
    """
    predicted = [(config, predict(problem, config, gpu, sm_count=sm_count)) for config in configs]
    return sorted(predicted, key=lambda pair: pair[1].time_s)
