"""A kernel's time in closed form: the bounds of one k step, times steps and tiles, plus what does not overlap.

One CTA per SM walks its tiles; each k step takes the longest of: its MMAs, the ring's load latency, its share of the L2,
and the zero fill of rows outside the tensor. docs/prediction.md explains the model and how well it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..arch import Gpu
from ..config import Config
from ..dtypes import DTYPES
from ..errors import InputError
from ..manifest import ceildiv
from ..problem import Problem
from ..resources import geometry
from ..results import Prediction
from .constants import Constants, constants

MODEL: Final = "closed-form-1"
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
    blackwell = gpu.arch == "sm_100a"
    size = DTYPES[problem.dtype].bytes
    m, n = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    k = problem.k

    # Tiles: cta_rows x cols of D per CTA; pair * cta_rows per cluster.
    cta_rows = config.blk_m * config.num_consumer if blackwell else config.blk_m
    cols = pair * config.blk_n if blackwell else config.blk_n
    cluster_rows = pair * cta_rows
    row_tiles, col_tiles = ceildiv(m, cluster_rows), ceildiv(n, cols)
    all_steps = ceildiv(k, config.blk_k)
    k_steps = ceildiv(all_steps, config.split_k)
    slices = ceildiv(all_steps, k_steps)
    tiles = row_tiles * col_tiles * slices  # what the scheduler hands out: slices of tiles
    clusters = min(tiles, sms // pair)
    waves = ceildiv(tiles, clusters)

    # What does not depend on the clock.
    mma = mma_cycles(config, gpu.arch)
    pingpong = config.pingpong
    issue = c.pingpong_step_cycles if pingpong else c.step_cycles[config.num_consumer - 1]
    a_rows = min(cta_rows, m)
    trimmed = not blackwell and pair == 1 and (c.pingpong_trims or not pingpong)  # the launcher shrinks the box of A to M
    outside = 0 if trimmed or m >= cluster_rows else cta_rows - max(0, m - (pair - 1) * cta_rows)
    row_bytes = config.blk_k * size
    shared = c.b_sharing if pair == 1 else pair
    l2_bytes = (a_rows + cols / shared) * row_bytes * clusters * pair
    total_bytes = size * (m * k + n * k + m * n)
    held = c.l2_part * gpu.l2_bytes
    miss = max(0.0, 1 - held / total_bytes)
    dram_bytes = miss * _dram_bytes(m, n, k, size, row_tiles, cluster_rows, config.l2_group_size, held)
    dram_s = dram_bytes / (c.dram_efficiency * gpu.dram_bytes_per_s)
    latency = (c.load_cycles + c.miss_cycles * miss + mma + issue) / config.pipe_depth
    sm_bounds = (mma + issue) ** p + latency**p + (c.zero_fill_cycles * outside) ** p
    l2_share_s = l2_bytes * miss / c.l2_miss_bytes_per_s
    consumer_rows = cta_rows if pingpong else cta_rows / config.num_consumer
    epilogue = c.epilogue_column_cycles * cols * consumer_rows / 64 + c.epilogue_step_cycles * (cols / config.epi_n)
    reduction = 0.0
    if slices > 1:
        # Every slice leaves float32 sums in L2; the last of a tile to come reads them all and writes the tile.
        sums = cta_rows * cols * 4 / c.slice_bytes_per_cycle
        reduction = c.slice_cycles + sums + sums * slices / min(waves, slices)
        epilogue = epilogue / min(waves, slices) + reduction
    launch_s = c.launch_s + (c.cluster_launch_s if pair > 1 else 0.0)
    overlapped = pingpong or config.tmem_buffers > 1

    next_clock = gpu.max_clock_hz
    for _ in range(2):  # the clock depends on the utilization, which depends weakly on the clock
        clock = next_clock
        l2_step = l2_share_s * clock
        step = max(c.least_step_cycles, (sm_bounds + l2_step**p) ** (1 / p))
        main = waves * k_steps * step
        # Overlapped, the epilogue of one tile runs under the MMAs of the next, unless it is the longer.
        later = max(0.0, epilogue - k_steps * step) if overlapped else epilogue
        exposed = epilogue + (waves - 1) * later
        cycles = c.load_cycles + main + exposed
        sm_s = cycles / clock
        device_s = (sm_s**p + dram_s**p) ** (1 / p)
        busy = min(1.0, tiles * pair * k_steps * mma / (sms * clock * device_s))
        next_clock = settled_clock(problem, gpu, c, busy)
    return Prediction(
        time_s=device_s + launch_s,
        model=MODEL,
        gpu=gpu.slug,
        clock_hz=clock,
        parts_s={
            "launch": launch_s,
            "fill": c.load_cycles / clock,
            "main_loop": main / clock,
            "epilogue": exposed / clock,
            "reduction": waves * reduction / clock,
            "bound_mma": waves * k_steps * mma / clock,
            "bound_load_latency": waves * k_steps * latency / clock,
            "bound_l2": waves * k_steps * l2_step / clock,
            "bound_dram": dram_s,
        },
        utilization={
            "tensor_core": busy,
            "dram": dram_s / device_s * c.dram_efficiency,
            "sms": tiles / (waves * (sms // pair)),
        },
    )


def settled_clock(problem: Problem, gpu: Gpu, use: Constants, busy: float) -> float:
    """Return the SM clock in Hz that the power limit leaves while ``busy`` of the tensor cores' cycles are used."""
    work = float((max(problem.flops, 1e9) / 1e12) ** -use.clock_per_work)
    return min(gpu.max_clock_hz, use.full_load_clock_hz * work * float(max(busy, 0.05) ** -use.clock_per_utilization))


def device_memory_part(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Return the bytes that one warm launch moves to or from device memory, over the least it could move from a cold start."""
    c = constants(gpu)
    size = DTYPES[problem.dtype].bytes
    m, n = (problem.n, problem.m) if config.swap_ab else (problem.m, problem.n)
    rows = geometry(config, gpu.arch).cluster_rows
    held = c.l2_part * gpu.l2_bytes
    miss = max(0.0, 1 - held / problem.bytes_moved)
    moved = _dram_bytes(m, n, problem.k, size, ceildiv(m, rows), rows, config.l2_group_size, held)
    return miss * moved / problem.bytes_moved


def _dram_bytes(m: int, n: int, k: int, size: int, row_tiles: int, cluster_rows: int, group: int, held: float) -> float:
    """Return bytes read and written if nothing stays in L2 from launch to launch, in raster order.

    The raster walks a group of tile rows column by column: A of the group stays in L2 if it fits, B is read once per
    group unless all of it fits.
    """
    group = min(group, row_tiles)
    panel, b_bytes = size * group * cluster_rows * k, size * n * k
    b_reads = 1 if b_bytes < held else ceildiv(row_tiles, group)
    a_reads = 1.0 if panel < held else 1 + 0.5 * (1 - held / panel)
    return size * (m * k * a_reads + m * n) + b_bytes * b_reads


def rank(
    problem: Problem, configs: Iterable[Config], gpu: Gpu, *, sm_count: int | None = None
) -> list[tuple[Config, Prediction]]:
    """Return ``configs`` with their predictions, shortest time first; equal times keep their order.

    Raises:
        InputError: as ``predict``.
    """
    predicted = [(config, predict(problem, config, gpu, sm_count=sm_count)) for config in configs]
    return sorted(predicted, key=lambda pair: pair[1].time_s)
