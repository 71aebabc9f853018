"""The article's kernels of steps 7 to 9 for apache-tvm 0.27, as they stand there: static shapes, and their faults left in.

Faults: after mbarrier.init only the CTA is synchronized, though a peer CTA signals those barriers (v8, v9); every warpgroup's
warp 0 frees TMEM; no tcgen05.fence orders the writeback's reads of TMEM before the next tile's MMAs.
"""
# ruff: noqa: SIM102 -- the tile primitives' dispatch reads who executes them from nested ifs, one per scope.

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.cuda.tile_primitive.tma_utils import SwizzleMode, mma_shared_layout
from tvm.tirx.lang.pipeline import MBarrier, PipelineState, TCGen05Bar, TMABar
from tvm.tirx.lang.tile_scheduler import ClusterPersistentScheduler2D
from tvm.tirx.layout import S, TCol, TileLayout, TLane, tid_in_wg

BARRIER_NAMES = ("tma2mma", "mma2tma", "mma2ld", "ld2mma")

# CTA_GROUP, NUM_CONSUMER, PIPE_DEPTH, EPI_N of each step.
STEPS = {"v7": (1, 1, 2, 128), "v8": (2, 1, 4, 128), "v9": (2, 2, 4, 64)}


def seed_kernel(step: str, m: int, n: int, k: int, sm_count: int) -> Any:
    """Return the PrimFunc of ``step`` (v7, v8, v9) at a shape whose extents are multiples of the cluster tile."""
    CG, NC, DEPTH, EPI_N = STEPS[step]
    BLK_M, BLK_N, BLK_K = 128, 128, 64
    MMA_N, K_TILES = BLK_N * CG, k // BLK_K
    MASK = 3 if CG == 2 else 0
    BYTES = CG * (NC * BLK_M + BLK_N) * BLK_K * 2
    swizzle = SwizzleMode.SWIZZLE_128B_ATOM
    A_layout = mma_shared_layout("float16", swizzle, (DEPTH, NC, BLK_M, BLK_K))
    B_layout = mma_shared_layout("float16", swizzle, (DEPTH, BLK_N, BLK_K))
    D_layout = mma_shared_layout("float16", swizzle, (NC, BLK_M, EPI_N))
    ALLOC = f"tcgen05.alloc.cta_group::{CG}.sync.aligned.shared::cta.b32"
    RELINQUISH = f"tcgen05.relinquish_alloc_permit.cta_group::{CG}.sync.aligned"
    DEALLOC = f"tcgen05.dealloc.cta_group::{CG}.sync.aligned.b32"

    @T.prim_func
    def kernel(A: T.Buffer((m, k), "float16"), B: T.Buffer((n, k), "float16"), D: T.Buffer((m, n), "float16")):
        T.device_entry()
        bx = T.cta_id([sm_count])
        cbx = T.cta_id_in_cluster([CG])
        wg_id = T.warpgroup_id([NC + 1])
        warp_id = T.warp_id_in_wg([4])
        lane_id = T.lane_id([32])
        pool = T.SMEMPool()
        tmem_addr = pool.alloc((1,), "uint32")
        tma2mma = TMABar(pool, DEPTH)
        mma2tma = TCGen05Bar(pool, DEPTH)
        mma2ld = TCGen05Bar(pool, NC)
        ld2mma = MBarrier(pool, NC)
        pool.move_base_to(1024)
        Asmem = pool.alloc((DEPTH, NC, BLK_M, BLK_K), "float16", layout=A_layout)
        Bsmem = pool.alloc((DEPTH, BLK_N, BLK_K), "float16", layout=B_layout)
        Dsmem = pool.alloc((NC, BLK_M, EPI_N), "float16", layout=D_layout)
        tma2mma.init(1)
        mma2tma.init(NC)
        mma2ld.init(1)
        ld2mma.init(128 * CG)
        pool.commit()
        if wg_id == 0:
            if warp_id == 0:
                T.ptx[ALLOC](T.address_of(tmem_addr), T.uint32(512))
        T.ptx.fence.proxy.async_.shared__cta()
        T.ptx.fence.mbarrier_init.release.cluster()
        T.cuda.cta_sync()
        tmem = T.decl_buffer((128, 512), "float32", scope="tmem", allocated_addr=tmem_addr[0],
                             layout=TileLayout(S[(128, 512) : (1 @ TLane, 1 @ TCol)]))  # fmt: skip
        tiles = ClusterPersistentScheduler2D("ts", num_m_tiles=m // (BLK_M * CG * NC), num_n_tiles=n // MMA_N,
                                             l2_group_size=8, num_clusters=sm_count // CG)  # fmt: skip
        tiles.init(bx // CG)
        full0 = T.meta_var(tma2mma.remote_view(0) if CG > 1 else tma2mma)
        free0 = T.meta_var(ld2mma.remote_view(0) if CG > 1 else ld2mma)
        if wg_id == NC:
            if warp_id == 3:
                fill = PipelineState(DEPTH, phase=1)
                if T.cuda.elect_sync():
                    while tiles.valid():
                        for step_k in range(K_TILES):
                            mma2tma.wait(fill.stage, fill.phase)
                            for c in T.unroll(NC):
                                row = T.meta_var(((tiles.m_idx * NC + c) * CG + cbx) * BLK_M)
                                Tx.copy_async(Asmem[fill.stage, c, :, :],
                                              A[row : row + BLK_M, step_k * BLK_K : step_k * BLK_K + BLK_K],
                                              dispatch="tma_auto", cta_group=CG, mbar=full0.ptr_to([fill.stage]))  # fmt: skip
                            col = T.meta_var((tiles.n_idx * CG + cbx) * BLK_N)
                            Tx.copy_async(Bsmem[fill.stage, :, :],
                                          B[col : col + BLK_N, step_k * BLK_K : step_k * BLK_K + BLK_K],
                                          dispatch="tma_auto", cta_group=CG, mbar=full0.ptr_to([fill.stage]))  # fmt: skip
                            if cbx == 0:
                                full0.arrive(fill.stage, BYTES)
                            fill.advance()
                        tiles.next_tile()
            elif warp_id < NC:
                ring = PipelineState(DEPTH, phase=0)
                free = PipelineState(1, phase=1)
                c = T.meta_var(0 if NC == 1 else warp_id)
                if cbx == 0:
                    if T.cuda.elect_sync():
                        while tiles.valid():
                            ld2mma.wait(warp_id, free.phase)
                            free.advance()
                            for step_k in range(K_TILES):
                                tma2mma.wait(ring.stage, ring.phase)
                                Tx.gemm_async(tmem[:, c * MMA_N : c * MMA_N + MMA_N], Asmem[ring.stage, c, :, :],
                                              Bsmem[ring.stage, :, :], accum=(step_k != 0), dispatch="tcgen05",
                                              cta_group=CG)  # fmt: skip
                                mma2tma.arrive(ring.stage, cta_group=CG, cta_mask=MASK)
                                ring.advance()
                            mma2ld.arrive(warp_id, cta_group=CG, cta_mask=MASK)
                            tiles.next_tile()
        elif wg_id < NC:
            done = PipelineState(1, phase=0)
            reg_f16 = T.alloc_local((EPI_N,), "float16")
            c = T.meta_var(0 if NC == 1 else wg_id)
            while tiles.valid():
                mma2ld.wait(wg_id, done.phase)
                done.advance()
                T.ptx.tcgen05.fence__after_thread_sync()
                for i in T.unroll(MMA_N // EPI_N):
                    reg = T.alloc_local((EPI_N,), "float32")
                    reg_wg = reg.view(128, EPI_N, layout=TileLayout(S[(128, EPI_N) : (1 @ tid_in_wg, 1)]))
                    start = T.meta_var(c * MMA_N + i * EPI_N)
                    Tx.wg.copy_async(reg_wg[:], tmem[:, start : start + EPI_N])
                    T.ptx.tcgen05.wait__ld.sync.aligned()
                    Tx.cast(reg_f16[:], reg[:])
                    Tx.copy(Dsmem[c, warp_id * 32 + lane_id, :], reg_f16[:])
                    T.ptx.fence.proxy.async_.shared__cta()
                    T.cuda.warpgroup_sync(wg_id + 10)
                    if warp_id == 0:
                        if lane_id == 0:
                            row = T.meta_var(((tiles.m_idx * NC + c) * CG + cbx) * BLK_M)
                            col = T.meta_var(tiles.n_idx * MMA_N + i * EPI_N)
                            Tx.copy_async(D[row : row + BLK_M, col : col + EPI_N], Dsmem[c, :, :], dispatch="tma_auto")
                            T.ptx.cp.async_.bulk.commit_group()
                            T.ptx.cp.async_.bulk.wait_group(0)
                    T.cuda.warpgroup_sync(wg_id + 10)
                free0.arrive(wg_id)
                tiles.next_tile()
        if CG > 1:
            T.cuda.cluster_sync()
        else:
            T.cuda.cta_sync()
        if warp_id == 0:
            T.ptx[RELINQUISH]()
            T.ptx[DEALLOC](tmem_addr[0], T.uint32(512))

    return kernel
