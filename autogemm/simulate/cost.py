"""What each operation costs, per GPU: SM cycles and bytes per SM cycle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ..errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTable:
    """Latencies in SM cycles and rates in bytes (or FLOPs) per SM cycle.

    Attributes:
        clock_hz: SM clock that turns cycles into seconds; a separate factor, never part of a cost.
        launch: kernel launch to first instruction.
        tma_issue, tma_latency: issue slot; issue to complete_tx with a hit in L2.
        dram_latency: added for a box that is not in L2 yet.
        sm_in_bw, sm_out_bw: TMA bytes per SM.
        l2_bw, dram_bw: of the whole GPU, shared by all SMs.
        mma_flops, mma_latency, mma_issue: dense 16-bit FLOPs per SM; drain; issue slot.
        commit_latency: last MMA to mbarrier arrive.
        arrive_latency, remote_latency, wake_latency: mbarrier arrive in the own and in another CTA; waiter wake-up.
        barrier_latency: named barrier.
        tmem_load_latency, tmem_load_bw: tcgen05.ld, per warp.
        cast_per_element: conversion of one column of a warp.
        shared_store_bw: st.shared and stmatrix per SM.
        store_latency: TMA store issue to completion.
        prewarmed: True if A and B are in L2 from the start.
    """

    clock_hz: float = 1.85e9
    launch: float = 3000
    tma_issue: float = 20
    tma_latency: float = 600
    dram_latency: float = 350
    sm_in_bw: float = 64
    sm_out_bw: float = 64
    l2_bw: float = 8000
    dram_bw: float = 4000
    mma_flops: float = 8192
    mma_latency: float = 80
    mma_issue: float = 12
    commit_latency: float = 60
    arrive_latency: float = 20
    remote_latency: float = 180
    wake_latency: float = 40
    barrier_latency: float = 25
    tmem_load_latency: float = 40
    tmem_load_bw: float = 128
    cast_per_element: float = 0.6
    shared_store_bw: float = 128
    store_latency: float = 700
    prewarmed: bool = False


_B200: Final = CostTable()
COSTS: Final[dict[str, CostTable]] = {
    "nvidia-b200": _B200,
    "nvidia-h200": replace(_B200, clock_hz=1.5e9, mma_flops=4096, dram_bw=2600, tma_latency=650, mma_latency=60),
    "nvidia-h100": replace(_B200, clock_hz=1.5e9, mma_flops=4096, dram_bw=1900, tma_latency=650, mma_latency=60),
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
