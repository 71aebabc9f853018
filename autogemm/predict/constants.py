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
        launch_s: kernel to kernel in a stream, pipeline fill included; cluster_launch_s: further for a launch with clusters.
        load_cycles: TMA issue to full barrier under load.
        step_cycles: per k step beside the MMAs; consumer_cycles: further per consumer beyond the first that shares a tile.
        least_step_cycles: what a k step takes whatever its size (barrier wait, issue, commit, release).
        epilogue_column_cycles: convert and stage one column of 64 rows of a consumer.
        store_cycles: until a TMA store has read the staging buffer, so that the next EPI_N columns may be put there.
        zero_fill_cycles: TMA cycles per tile row outside the tensor.
        l2_bytes_per_s: rate at which L2 serves all SMs together.
        l2_keeps, l2_loses: size of a problem, in parts of the L2, up to which it stays there from launch to launch, and from
            which nothing of it does.
        sharing_sms: neighbours in the raster whose requests for the same lines L2 serves at once.
        ragged_part: part of the loads missing in tiles at the edge of N that halves what neighbours share.
        dram_efficiency: reached part of the data sheet's bandwidth.
        overlap: exponent p of (sum x**p)**(1/p), by which bounds that overlap are joined; large means a plain maximum.
        slice_cycles: latency of handing partial sums over between K slices; slice_miss_cycles: further where the handing over
            waits behind loads from device memory; slice_bytes_per_cycle: its rate per SM.
    """

    full_load_clock_hz: float
    clock_per_utilization: float
    clock_per_work: float
    launch_s: float
    cluster_launch_s: float
    load_cycles: float
    step_cycles: float
    consumer_cycles: float
    least_step_cycles: float
    epilogue_column_cycles: float
    store_cycles: float
    zero_fill_cycles: float
    l2_bytes_per_s: float
    l2_keeps: float
    l2_loses: float
    sharing_sms: float
    ragged_part: float
    dram_efficiency: float
    overlap: float
    slice_cycles: float
    slice_miss_cycles: float
    slice_bytes_per_cycle: float


# Fitted by scripts/fit_predictor.py to the times in tests/data/h200_sweep.json, except
# load_cycles: TMA adds 170 cycles to a load from L2 of 258 to 414 (arXiv 2402.13499); as in simulate/cost.py (free, it fits 870
# with no better score);
# step_cycles: with one wgmma group in flight the next one is issued under it (free, it fits 0);
# l2_keeps, l2_loses: there, problems of 31 MB run faster than device memory could feed them, and of 50 MB no longer;
# dram_efficiency: 3.02 of 3.35 TB/s sustained on an H100 (FlashVLA unit tests).
_H200: Final = Constants(
    full_load_clock_hz=1.243e9,
    clock_per_utilization=0.0768,
    clock_per_work=0.0353,
    launch_s=0.943e-6,
    cluster_launch_s=1.01e-6,
    load_cycles=650,
    step_cycles=0,
    consumer_cycles=8.03,
    least_step_cycles=216,
    epilogue_column_cycles=8.57,
    store_cycles=265,
    zero_fill_cycles=7.15,
    l2_bytes_per_s=11.5e12,
    l2_keeps=0.5,
    l2_loses=0.8,
    sharing_sms=6.02,
    ragged_part=0.0082,
    dram_efficiency=0.90,
    overlap=4.13,
    slice_cycles=2243,
    slice_miss_cycles=5096,
    slice_bytes_per_cycle=19.6,
)

# Nothing here was fitted to the article's table of v7, v8 and v9; what has no source of its own is the H200's value.
# Clock: cuBLAS-class kernels reach 1528 TFLOP/s at 4096^3 (DeepGEMM) and 1567 at 16384^3 (cuBLAS); with 80 % and 95 % of the
# tensor cores' cycles busy that is 1.58 and 1.36 GHz, which two constants describe. Power grows as utilization * clock**3 where
# voltage follows the clock, hence 1/3.
# load_cycles: SemiAnalysis' main loop of 128x128 stages of 128 bytes of K takes 1703 cycles for depth steps at depth 2 over
# 8-bit operands of 32 MB, which stay in L2, and 2233 over 16-bit ones of 64 MB, which don't; 256 are the MMAs. A kernel's waves
# meet both: the mean. step_cycles: their commit overhead.
# l2_bytes_per_s: the H200's, by the ratio of device-memory bandwidths. l2_keeps, l2_loses: the main loops of 48 and of 64 MB.
_B200: Final = replace(
    _H200,
    full_load_clock_hz=1.40e9,
    clock_per_utilization=1 / 3,
    clock_per_work=0.022,
    load_cycles=1700,
    step_cycles=12,
    consumer_cycles=0,
    least_step_cycles=60,
    l2_bytes_per_s=_H200.l2_bytes_per_s * 8.0 / 4.8,
    l2_keeps=0.38,
    l2_loses=0.51,
)

CONSTANTS: Final[dict[str, Constants]] = {"nvidia-h200": _H200, "nvidia-h100": _H200, "nvidia-b200": _B200}


def constants(gpu: Gpu) -> Constants:
    """Return the Constants of ``gpu``; those of its arch's default GPU where it has none of its own."""
    return CONSTANTS.get(gpu.slug) or CONSTANTS[DEFAULT_GPU[gpu.arch]]
