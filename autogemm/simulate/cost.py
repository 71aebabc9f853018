"""What each operation costs, per GPU: SM cycles and bytes per SM cycle, each constant with its source.

Sources, by letter: HP arXiv 2402.13499 (Hopper microbenchmarks); SA SemiAnalysis' published B200 microbenchmarks; FV FlashVLA's
H100 unit tests; REC the recorded H200 times in tests/data, through the closed-form model's fit (predict/constants.py);
DERIVED from a data sheet or an instruction's definition; ASSUMED where nothing published was found, kept small enough not to
decide anything. docs/prediction.md says how well the whole does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ..errors import InputError

_MMA_K: Final = 16  # K of one 16-bit MMA (PTX ISA)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTable:
    """Latencies in SM cycles and rates in bytes (or FLOPs) per SM cycle.

    Attributes:
        clock_hz: SM clock that turns cycles into seconds, at 1 TFLOP of work and full load; a separate factor, never part of a
            cost. It changes with (FLOPs / 1e12)**-clock_per_work.
        full_load: part of the tensor cores' cycles in use below which it rises, since power grows as utilization * clock**3.
        launch: kernel launch to first instruction.
        tma_issue, tma_latency: issue slot; issue to complete_tx with a hit in L2, without the transfer itself.
        dram_latency: added for a box that is not in L2.
        sm_in_bw, sm_out_bw: TMA bytes per SM.
        l2_bw, dram_bw: of the whole GPU, shared by all SMs.
        mma_flops, mma_latency, mma_issue: dense 16-bit FLOPs per SM; end of the last MMA to its result; issue slot.
        mma_least: (fixed, per column) cycles below which no MMA with K = 16 falls, issued for one CTA and for a pair.
        commit_latency: last MMA's result to mbarrier arrive.
        arrive_latency, remote_latency, wake_latency: mbarrier arrive in the own and in another CTA; waiter wake-up.
        barrier_latency: named barrier.
        tmem_load_latency, tmem_load_bw: tcgen05.ld, per warp.
        cast_per_element: conversion of one column of a warp.
        shared_store_bw: st.shared and stmatrix per SM.
        store_latency: TMA store issue to completion.
        prewarmed: True if A and B are in L2 from the start.
    """

    clock_hz: float
    clock_per_work: float
    full_load: float
    launch: float
    tma_issue: float
    tma_latency: float
    dram_latency: float
    sm_in_bw: float
    sm_out_bw: float
    l2_bw: float
    dram_bw: float
    mma_flops: float
    mma_latency: float
    mma_issue: float
    mma_least: tuple[tuple[float, float], tuple[float, float]]
    commit_latency: float
    arrive_latency: float
    remote_latency: float
    wake_latency: float
    barrier_latency: float
    tmem_load_latency: float
    tmem_load_bw: float
    cast_per_element: float
    shared_store_bw: float
    store_latency: float
    prewarmed: bool = False

    def mma_cycles(self, rows: int, columns: int, depth: int, ctas: int = 1) -> float:
        """Return tensor-core cycles of D[rows, columns] += A[rows, depth] . B[columns, depth]^T in each of ``ctas`` CTAs."""
        fixed, column = self.mma_least[ctas - 1]
        return max(2.0 * rows * columns * depth / self.mma_flops, (fixed + column * columns) * depth / _MMA_K)

    def settled_clock_hz(self, flops: int, busy: float, most_hz: float) -> float:
        """Return the SM clock that the power limit leaves for so much work, at ``busy`` of the tensor cores' cycles."""
        work = float((max(flops, 1e9) / 1e12) ** -self.clock_per_work)
        return min(most_hz, self.clock_hz * work * float(max(1.0, self.full_load / max(busy, 0.05)) ** (1 / 3)))

    def share(self, part: float) -> CostTable:
        """Return the table for a run of ``part`` of the clusters: bandwidth that all SMs share is scaled by it."""
        return replace(self, l2_bw=self.l2_bw * part, dram_bw=self.dram_bw * part)


_B200: Final = CostTable(
    clock_hz=1.40e9,  # this and the next two as in predict/constants.py
    clock_per_work=0.022,
    full_load=1,
    launch=3000,  # 1.9 us kernel to kernel, as recorded on an H200 without overlapping launches
    tma_issue=20,  # ASSUMED
    # SA: one CTA's main loop of 128x128 stages of 128 bytes of K, 2 to 6 stages deep. Over 32 MB of 8-bit operands it reaches
    # 9.68, 14.5, 18.9, 19.8 and 19.8 TFLOP/s: from L2. Over 64 MB of 16-bit ones it reaches 3.69, 5.46, 7.16, 8.74 and 10.0:
    # not from L2. Both fitted by executing that loop: see docs/prediction.md.
    tma_latency=820,
    dram_latency=570,
    sm_in_bw=79,  # SA: what the first of the two takes in once latency is covered
    sm_out_bw=64,  # ASSUMED: half of that
    l2_bw=11_800,  # SA: what their loop moved at 6 stages on 148 SMs, still without a knee
    dram_bw=4557,  # DERIVED: 8 TB/s, of which FV reaches 0.90, at 1.58 GHz
    mma_flops=8192,  # SA: 128 cycles for 128x256x16
    mma_latency=136,  # SA: latency less interval of 128x128 and 128x256 (256-row pairs: 170)
    mma_issue=12,  # SA: overhead of a commit per MMA
    mma_least=((32, 0.25), (22, 1 / 3)),  # SA: 48 cycles for 128x64; 43 for 256x64 on a pair
    commit_latency=0,  # SA's latency was taken with a commit
    arrive_latency=20,  # ASSUMED
    remote_latency=180,  # HP: distributed shared memory
    wake_latency=40,  # ASSUMED
    barrier_latency=25,  # ASSUMED
    tmem_load_latency=40,  # ASSUMED
    tmem_load_bw=128,  # ASSUMED: one 32-bit column per lane and cycle
    cast_per_element=0.6,  # DERIVED: cvt.f16x2 on 64 lanes per clock and SM, 4 warps, with moves
    shared_store_bw=128,  # HP
    store_latency=700,  # ASSUMED: as a load to L2
)

_H200: Final = replace(
    _B200,
    clock_hz=1.26e9,  # this and the next two REC, with the exponent 1/3 in place of the fitted one
    clock_per_work=0.039,
    full_load=0.6,
    launch=1870,  # REC: 0.94 us, overlapping launches
    tma_latency=650,  # HP: TMA adds 170 cycles to a load from L2 of 258 to 414
    dram_latency=347,  # HP: 479 to 744 cycles to device memory against 263 to L2
    sm_in_bw=64,  # HP: 64 B per SM and clock from L2
    l2_bw=8000,  # between HP's 4472 and what REC allows; 57 recorded points rank best from 8000 on
    dram_bw=2880,  # DERIVED: 4.8 TB/s, of which FV reaches 0.90, at 1.5 GHz
    mma_flops=4096,  # HP: 128 cycles for m64n256k16
    mma_latency=60,  # ASSUMED
    mma_least=((16, 0.25), (16, 0.25)),  # HP and FV: 32 cycles for m64n64k16, 18.9 for m64n8k16
    commit_latency=60,  # ASSUMED
)

COSTS: Final[dict[str, CostTable]] = {
    "nvidia-b200": _B200,
    "nvidia-h200": _H200,
    "nvidia-h100": replace(_H200, dram_bw=2010),  # DERIVED: 3.35 TB/s
}


def cost_table(gpu: str) -> CostTable:
    """Return the CostTable of the GPU with folder name ``gpu``.

    Raises:
        InputError: no table for it.
    """
    found = COSTS.get(gpu)
    if found is None:
        raise InputError(f"no cost table for GPU {gpu!r}; known: {', '.join(COSTS)}")
    return found
