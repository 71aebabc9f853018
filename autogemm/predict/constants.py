"""Constants of the closed-form model, one set per GPU, each with its source.

docs/prediction.md says what was fitted to what.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ..arch import DEFAULT_GPU, Gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """What one GPU costs. Cycles are SM cycles.

    Attributes:
        full_load_clock_hz: SM clock at which the power limit holds a busy tensor core, at 1 TFLOP of work.
        clock_per_utilization: exponent: clock rises as utilization**-this below full load.
        clock_per_work: exponent: clock falls as (FLOPs / 1e12)**-this, since short work ends before the power limit acts.
        launch_s, cluster_launch_s: kernel to kernel in a stream; further for a launch with clusters.
        load_cycles: TMA issue to full barrier, hit in L2; miss_cycles: further where the data are not in L2.
        step_cycles: per k step beside the MMAs, for 1, 2 and 3 consumers; pingpong_step_cycles: for two in ping-pong.
        least_step_cycles: no k step is shorter (barrier wait, issue, commit, release).
        epilogue_column_cycles: convert and stage one column of 64 rows of a consumer.
        epilogue_step_cycles: wait, barriers and store issue per EPI_N columns.
        zero_fill_cycles: TMA cycles per tile row outside the tensor.
        l2_part: part of the L2 size that effectively holds data for re-use.
        l2_miss_bytes_per_s: rate at which lines that miss reach all SMs together.
        b_sharing: SMs that one L2 read of a B tile serves, since neighbours in the raster ask for it at the same time.
        dram_efficiency: reached part of the data sheet's bandwidth.
        overlap: exponent p of (sum x**p)**(1/p), by which bounds that overlap are joined; large means a plain maximum.
        slice_cycles: latency of handing partial sums over between K slices; slice_bytes_per_cycle: its rate per SM.
        pingpong_trims: True if ping-pong kernels load no rows outside a small M (the recorded ones did).
    """

    full_load_clock_hz: float
    clock_per_utilization: float
    clock_per_work: float
    launch_s: float
    cluster_launch_s: float
    load_cycles: float
    miss_cycles: float
    step_cycles: tuple[float, float, float]
    pingpong_step_cycles: float
    least_step_cycles: float
    epilogue_column_cycles: float
    epilogue_step_cycles: float
    zero_fill_cycles: float
    l2_part: float
    l2_miss_bytes_per_s: float
    b_sharing: float
    dram_efficiency: float
    overlap: float
    slice_cycles: float
    slice_bytes_per_cycle: float
    pingpong_trims: bool = True


# Fitted by scripts/fit_predictor.py to tests/data/h200_landscape.json (24 shapes x 66 configs, one H200), except:
# clock_per_utilization: the recorded configs ran interleaved, so that the power limit saw their average (free, it fits 0.05);
# slice_cycles, slice_bytes_per_cycle: the recorded kernels don't split K; fitted to those that do, 314 times of 14 shapes with
# at most 1000 rows (docs/performance.md). They hold what the model lacks for a short loop besides the sums themselves.
_H200: Final = Constants(
    full_load_clock_hz=1.405e9,
    clock_per_utilization=0.05,
    clock_per_work=0.053,
    launch_s=1.89e-6,
    cluster_launch_s=0.93e-6,
    load_cycles=1225,
    miss_cycles=347,
    step_cycles=(47.5, 54.3, 72.2),
    pingpong_step_cycles=49.94,
    least_step_cycles=199,
    epilogue_column_cycles=5.106,
    epilogue_step_cycles=251,
    zero_fill_cycles=6.22,
    l2_part=0.2023,
    l2_miss_bytes_per_s=9.06e12,
    b_sharing=2.981,
    dram_efficiency=0.704,
    overlap=8.27,
    slice_cycles=4000,
    slice_bytes_per_cycle=24,
)

# Nothing here was fitted to the article's table of v7, v8 and v9; what has no source of its own is the H200's value.
# Clock: cuBLAS-class kernels reach 1528 TFLOP/s at 4096^3 (DeepGEMM) and 1567 at 16384^3 (cuBLAS); with 80 % and 95 % of the
# tensor cores' cycles busy that is 1.58 and 1.36 GHz, which two constants describe. Power grows as utilization * clock**3 where
# voltage follows the clock, hence 1/3.
# load_cycles: SemiAnalysis' main loop of 128x128x64 stages runs 3.69 to 10.0 TFLOP/s per SM at 2 to 6 stages: depth times step
# is 2233 cycles at depth 2, of which 256 are the MMAs; the miss is in it. step_cycles: their commit overhead.
# l2_miss_bytes_per_s: the H200's, by the ratio of device-memory bandwidths.
_B200: Final = replace(
    _H200,
    full_load_clock_hz=1.40e9,
    clock_per_utilization=1 / 3,
    clock_per_work=0.022,
    load_cycles=1977,
    miss_cycles=0,
    step_cycles=(12.0, 12.0, 12.0),
    pingpong_step_cycles=12.0,
    least_step_cycles=60,
    l2_miss_bytes_per_s=9.06e12 * 8.0 / 4.8,
)

CONSTANTS: Final[dict[str, Constants]] = {"nvidia-h200": _H200, "nvidia-h100": _H200, "nvidia-b200": _B200}


def constants(gpu: Gpu) -> Constants:
    """Return the Constants of ``gpu``; those of its arch's default GPU where it has none of its own."""
    return CONSTANTS.get(gpu.slug) or CONSTANTS[DEFAULT_GPU[gpu.arch]]
