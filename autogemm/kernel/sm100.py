"""The sm_100a kernel: TMA loads, tcgen05 MMAs that accumulate in tensor memory (TMEM), and warpgroups that write D back.

One CTA is NUM_CONSUMER + 1 warpgroups; a cluster is CTA_GROUP CTAs, and each cluster walks over output tiles on its own:

==========================  ==========================================================================================
warpgroup NUM_CONSUMER      warp 3 is the TMA producer; warp c < NUM_CONSUMER issues the MMAs of consumer c (in CTA 0 of the
                            pair, for both CTAs).
warpgroup c < NUM_CONSUMER  writes back the accumulator of consumer c: TMEM, registers, shared memory, TMA store.
==========================  ==========================================================================================

They meet only at four kinds of mbarrier, each named after who signals whom:

=========  ===============  ========================  =================================================================
barrier    slots            arrivals per phase        meaning of a completed phase
=========  ===============  ========================  =================================================================
tma2mma    PIPE_DEPTH       1 + the stage's bytes     A and B of this stage are in shared memory (of both CTAs)
mma2tma    PIPE_DEPTH       NUM_CONSUMER              the MMAs that read this stage are done
mma2ld     consumer*buffer  1                         this accumulator is complete
ld2mma     consumer*buffer  128 per CTA               this accumulator has been read, its TMEM is free
=========  ===============  ========================  =================================================================

Tiles: a consumer computes BLK_M rows in each CTA; the consumers share B, of which each CTA of a pair loads half (BLK_N rows),
and the pair's MMA spans 2*BLK_M rows and 2*BLK_N columns (PTX ISA, "tcgen05.mma", cta_group::2). With TMEM_BUFFERS = 2 the
MMAs of tile i + 1 fill one accumulator while tile i leaves the other. M, N and K are run-time values: TMA reads zeros outside
A and B and clips stores to D, so ragged edges and a K tail need no code.
"""
# ruff: noqa: SIM102 -- the tile primitives' dispatch reads who executes them from nested ifs, one per scope.

from __future__ import annotations

from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.cuda.tile_primitive.tma_utils import SwizzleMode, mma_shared_layout
from tvm.tirx.lang.pipeline import MBarrier, PipelineState, TCGen05Bar, TMABar
from tvm.tirx.layout import S, TCol, TileLayout, TLane, tid_in_wg

from ..config import Config
from ..dtypes import dtype as lookup_dtype
from ..manifest import Scalar, TensorMap
from ..resources import SMEM_HEADER_BYTES, geometry, store_box
from .pipeline import MMA2TMA, TMA2MMA, warpgroup_barrier
from .scheduler import RasterScheduler, raster_scalars

ARCH = "sm_100a"
ACC_DTYPE = "float32"
TMEM_LANES = 128
# The kernel takes all of TMEM (one CTA runs per SM), so that accumulators start at column 0 and addresses are constants.
TMEM_COLUMNS = 512
PRODUCER_WARP = 3
WARPGROUP_THREADS = 128
# Swizzle span in bytes (the inner extent of a TMA box) to its mode.
_SWIZZLES = {
    32: SwizzleMode.SWIZZLE_32B_ATOM,
    64: SwizzleMode.SWIZZLE_64B_ATOM,
    128: SwizzleMode.SWIZZLE_128B_ATOM,
}


def barrier_names(config: Config) -> tuple[str, ...]:
    """Return the names of the mbarrier arrays in allocation order."""
    return (TMA2MMA, MMA2TMA, "mma2ld", "ld2mma")


def manifest_parts(config: Config, dtype: str) -> tuple[tuple[Scalar, ...], tuple[TensorMap, ...], str, str]:
    """Return (scalars, tensor maps, grid, workspace bytes) of the kernel that ``build`` makes, for its Manifest."""
    size = lookup_dtype(dtype).bytes
    tile = geometry(config, ARCH)
    store_columns = store_box(config)
    scalars = raster_scalars(cluster_rows=tile.cluster_rows, cluster_cols=tile.cluster_cols, cluster_ctas=tile.cluster_ctas)
    k_steps = Scalar(name="k_steps", value=f"ceildiv(K, {config.blk_k})")
    maps = (
        TensorMap(
            name="A_tensormap", operand="a", dims=("K", "M"), strides_bytes=(f"lda * {size}",),
            box=(str(config.blk_k), str(config.blk_m)), swizzle_bytes=config.blk_k * size,
        ),
        TensorMap(
            name="B_tensormap", operand="b", dims=("K", "N"), strides_bytes=(f"ldb * {size}",),
            box=(str(config.blk_k), str(config.blk_n)), swizzle_bytes=config.blk_k * size,
        ),
        TensorMap(
            name="D_tensormap", operand="d", dims=("N", "M"), strides_bytes=(f"ldd * {size}",),
            box=(str(store_columns), str(config.blk_m)), swizzle_bytes=store_columns * size,
        ),
    )  # fmt: skip
    return (*scalars, k_steps), maps, "grid", "0"


def build(config: Config, dtype: str):
    """Return the traced PrimFunc ``gemm(a [M,K], b [N,K], d [M,N], scalars...)`` of a legal ``config``.

    ``a``, ``b`` and ``d`` are ``dtype``; accumulation is float32. The scalars are those of ``manifest_parts``.
    """
    ab_type = dtype
    CTA_GROUP, NUM_CONSUMER, PIPE_DEPTH = config.cta_group, config.num_consumer, config.pipe_depth
    BLK_M, BLK_N, BLK_K = config.blk_m, config.blk_n, config.blk_k
    EPI_N, TMEM_BUFFERS = config.epi_n, config.tmem_buffers
    MMA_N = CTA_GROUP * BLK_N
    EPI_STEPS = MMA_N // EPI_N
    ELEMENT_BYTES = lookup_dtype(dtype).bytes
    BOX_N = store_box(config)
    STAGE_BYTES = CTA_GROUP * (NUM_CONSUMER * BLK_M + BLK_N) * BLK_K * ELEMENT_BYTES
    PAIR_MASK = (1 << CTA_GROUP) - 1

    ab_swizzle = _SWIZZLES[BLK_K * ELEMENT_BYTES]
    A_layout = mma_shared_layout(ab_type, ab_swizzle, (PIPE_DEPTH, NUM_CONSUMER, BLK_M, BLK_K))
    B_layout = mma_shared_layout(ab_type, ab_swizzle, (PIPE_DEPTH, BLK_N, BLK_K))
    D_layout = mma_shared_layout(ab_type, _SWIZZLES[BOX_N * ELEMENT_BYTES], (NUM_CONSUMER, BLK_M, EPI_N))
    ALLOC = f"tcgen05.alloc.cta_group::{CTA_GROUP}.sync.aligned.shared::cta.b32"
    RELINQUISH = f"tcgen05.relinquish_alloc_permit.cta_group::{CTA_GROUP}.sync.aligned"
    DEALLOC = f"tcgen05.dealloc.cta_group::{CTA_GROUP}.sync.aligned.b32"

    @T.inline
    def sync_all():
        # A CTA of a pair signals its peer's barriers and lets its peer's MMAs read its memory: both start and end together.
        if CTA_GROUP > 1:
            T.cuda.cluster_sync()
        else:
            T.cuda.cta_sync()

    @T.prim_func
    def gemm(
        a: T.handle,
        b: T.handle,
        d: T.handle,
        grid: T.int32,
        k_steps: T.int32,
        tile_count: T.int32,
        cluster_count: T.int32,
        full_tiles: T.int32,
        group_tiles: T.int32,
        group_tiles_mul: T.uint32,
        group_tiles_shift: T.int32,
        group_rows: T.int32,
        group_rows_mul: T.uint32,
        group_rows_shift: T.int32,
        tail_rows: T.int32,
        tail_rows_mul: T.uint32,
        tail_rows_shift: T.int32,
    ):
        M = T.int32()
        N = T.int32()
        K = T.int32()
        A = T.match_buffer(a, (M, K), ab_type)
        B = T.match_buffer(b, (N, K), ab_type)
        D = T.match_buffer(d, (M, N), ab_type)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        cbx = T.cta_id_in_cluster([CTA_GROUP])
        bx = T.cta_id([grid])
        wg_id = T.warpgroup_id([NUM_CONSUMER + 1])
        warp_id = T.warp_id_in_wg([4])
        lane_id = T.lane_id([32])

        # --- Shared memory ---
        pool = T.SMEMPool()
        tmem_addr = pool.alloc((1,), "uint32")
        tma2mma = TMABar(pool, PIPE_DEPTH)
        mma2tma = TCGen05Bar(pool, PIPE_DEPTH)
        mma2ld = TCGen05Bar(pool, NUM_CONSUMER * TMEM_BUFFERS)
        ld2mma = MBarrier(pool, NUM_CONSUMER * TMEM_BUFFERS)
        pool.move_base_to(SMEM_HEADER_BYTES)
        Asmem = pool.alloc((PIPE_DEPTH, NUM_CONSUMER, BLK_M, BLK_K), ab_type, layout=A_layout)
        Bsmem = pool.alloc((PIPE_DEPTH, BLK_N, BLK_K), ab_type, layout=B_layout)
        Dsmem = pool.alloc((NUM_CONSUMER, BLK_M, EPI_N), ab_type, layout=D_layout)

        # --- Barriers and TMEM ---
        tma2mma.init(1)
        mma2tma.init(NUM_CONSUMER)
        mma2ld.init(1)
        ld2mma.init(WARPGROUP_THREADS * CTA_GROUP)
        pool.commit()
        if wg_id == 0:
            if warp_id == 0:
                T.ptx[ALLOC](T.address_of(tmem_addr[0]), T.uint32(TMEM_COLUMNS))
                T.ptx[RELINQUISH]()
        T.ptx.fence.proxy.async_.shared__cta()
        T.ptx.fence.mbarrier_init.release.cluster()
        sync_all()
        tmem = T.decl_buffer(
            (TMEM_LANES, TMEM_COLUMNS), ACC_DTYPE, scope="tmem", allocated_addr=0,
            layout=TileLayout(S[(TMEM_LANES, TMEM_COLUMNS) : (1 @ TLane, 1 @ TCol)]),
        )  # fmt: skip

        # --- Tile scheduler: one step is a cluster's tile ---
        tile_scheduler = RasterScheduler(
            (
                tile_count, cluster_count, full_tiles, group_tiles, group_tiles_mul, group_tiles_shift,
                group_rows, group_rows_mul, group_rows_shift, tail_rows, tail_rows_mul, tail_rows_shift,
            )
        )  # fmt: skip
        tile_scheduler.init(bx // CTA_GROUP)
        m_idx = T.meta_var(tile_scheduler.m_idx)
        n_idx = T.meta_var(tile_scheduler.n_idx)

        # CTA 0 of a pair issues the MMAs of both, so loads and reads of both are reported to its barriers.
        tma2mma_cta0 = T.meta_var(tma2mma.remote_view(0) if CTA_GROUP > 1 else tma2mma)
        ld2mma_cta0 = T.meta_var(ld2mma.remote_view(0) if CTA_GROUP > 1 else ld2mma)

        # =============================================
        # Warpgroup NUM_CONSUMER: TMA producer (warp 3) and MMA issue (warp c for consumer c)
        # =============================================
        if wg_id == NUM_CONSUMER:
            if warp_id == PRODUCER_WARP:
                # === TMA producer: NUM_CONSUMER blocks of A and one of B per stage ===
                tma_ps = PipelineState(PIPE_DEPTH, phase=1)

                @T.inline
                def tma_load(k_offset):
                    for c in T.unroll(NUM_CONSUMER):
                        m_st = T.meta_var(((m_idx * NUM_CONSUMER + c) * CTA_GROUP + cbx) * BLK_M)
                        Tx.copy_async(
                            Asmem[tma_ps.stage, c, :, :], A[m_st : m_st + BLK_M, k_offset : k_offset + BLK_K],
                            dispatch="tma_explicit", cta_group=CTA_GROUP, mbar=tma2mma_cta0.ptr_to([tma_ps.stage]),
                        )  # fmt: skip
                    n_st = T.meta_var((n_idx * CTA_GROUP + cbx) * BLK_N)
                    Tx.copy_async(
                        Bsmem[tma_ps.stage, :, :], B[n_st : n_st + BLK_N, k_offset : k_offset + BLK_K],
                        dispatch="tma_explicit", cta_group=CTA_GROUP, mbar=tma2mma_cta0.ptr_to([tma_ps.stage]),
                    )  # fmt: skip

                if T.cuda.elect_sync():
                    while tile_scheduler.valid():
                        for k in T.serial(k_steps, unroll=False):
                            mma2tma.wait(tma_ps.stage, tma_ps.phase)
                            tma_load(k * BLK_K)
                            if cbx == 0:
                                tma2mma_cta0.arrive(tma_ps.stage, STAGE_BYTES)
                            tma_ps.advance()
                        tile_scheduler.next_tile()
                    # The last MMAs' commits still arrive here: stay until every used stage has been freed.
                    for _ in T.serial(PIPE_DEPTH, unroll=False):
                        mma2tma.wait(tma_ps.stage, tma_ps.phase)
                        tma_ps.advance()

            elif warp_id < NUM_CONSUMER:
                # === MMA: warp_id selects the A block and the TMEM range ===
                mma_ps = PipelineState(PIPE_DEPTH, phase=0)
                acc_ps = PipelineState(TMEM_BUFFERS, phase=1)
                consumer = T.meta_var(0 if NUM_CONSUMER == 1 else warp_id)

                if cbx == 0:
                    if T.cuda.elect_sync():
                        while tile_scheduler.valid():
                            slot = T.meta_var(consumer * TMEM_BUFFERS + acc_ps.stage)
                            ld2mma.wait(slot, acc_ps.phase)
                            T.ptx.tcgen05.fence__after_thread_sync()
                            for k in T.serial(k_steps, unroll=False):
                                tma2mma.wait(mma_ps.stage, mma_ps.phase)
                                T.ptx.tcgen05.fence__after_thread_sync()
                                Tx.gemm_async(
                                    tmem[:, slot * MMA_N : slot * MMA_N + MMA_N],
                                    Asmem[mma_ps.stage, consumer, :, :], Bsmem[mma_ps.stage, :, :],
                                    accum=(k != 0), dispatch="tcgen05", cta_group=CTA_GROUP,
                                )  # fmt: skip
                                mma2tma.arrive(mma_ps.stage, cta_group=CTA_GROUP, cta_mask=PAIR_MASK)
                                mma_ps.advance()
                            mma2ld.arrive(slot, cta_group=CTA_GROUP, cta_mask=PAIR_MASK)
                            acc_ps.advance()
                            tile_scheduler.next_tile()

        # =============================================
        # Warpgroups 0 .. NUM_CONSUMER - 1: writeback, EPI_N columns a step
        # =============================================
        else:
            wb_ps = PipelineState(TMEM_BUFFERS, phase=0)
            consumer = T.meta_var(0 if NUM_CONSUMER == 1 else wg_id)
            reg_out = T.alloc_local((EPI_N,), ab_type)

            while tile_scheduler.valid():
                slot = T.meta_var(consumer * TMEM_BUFFERS + wb_ps.stage)
                mma2ld.wait(slot, wb_ps.phase)
                T.ptx.tcgen05.fence__after_thread_sync()

                for i in T.unroll(EPI_STEPS):
                    # TMEM -> registers: one row of the tile per thread
                    reg = T.alloc_local((EPI_N,), ACC_DTYPE)
                    reg_wg = reg.view(BLK_M, EPI_N, layout=TileLayout(S[(BLK_M, EPI_N) : (1 @ tid_in_wg, 1)]))
                    col_st = T.meta_var(slot * MMA_N + i * EPI_N)
                    Tx.wg.copy_async(reg_wg[:], tmem[:, col_st : col_st + EPI_N])
                    T.ptx.tcgen05.wait__ld.sync.aligned()
                    if i == EPI_STEPS - 1:
                        # The accumulator is in registers now: its next MMAs needn't wait for the store.
                        T.ptx.tcgen05.fence__before_thread_sync()
                        ld2mma_cta0.arrive(slot)
                    Tx.cast(reg_out[:], reg[:])

                    # registers -> shared memory, once the previous step's store has read it
                    if warp_id == 0:
                        if lane_id == 0:
                            T.ptx.cp.async_.bulk.wait_group.read(0)
                    T.cuda.warpgroup_sync(warpgroup_barrier(wg_id))
                    Tx.copy(Dsmem[consumer, warp_id * 32 + lane_id, :], reg_out[:])
                    T.ptx.fence.proxy.async_.shared__cta()
                    T.cuda.warpgroup_sync(warpgroup_barrier(wg_id))

                    # shared memory -> D
                    if warp_id == 0:
                        if lane_id == 0:
                            m_st = T.meta_var(((m_idx * NUM_CONSUMER + consumer) * CTA_GROUP + cbx) * BLK_M)
                            n_st = T.meta_var(n_idx * MMA_N + i * EPI_N)
                            for box in T.unroll(EPI_N // BOX_N):
                                Tx.copy_async(
                                    D[m_st : m_st + BLK_M, n_st + box * BOX_N : n_st + box * BOX_N + BOX_N],
                                    Dsmem[consumer, :, box * BOX_N : box * BOX_N + BOX_N], dispatch="tma_explicit",
                                )  # fmt: skip
                            T.ptx.cp.async_.bulk.commit_group()

                wb_ps.advance()
                tile_scheduler.next_tile()
            if warp_id == 0:
                if lane_id == 0:
                    T.ptx.cp.async_.bulk.wait_group(0)

        # --- Cleanup ---
        sync_all()
        if wg_id == 0:
            if warp_id == 0:
                T.ptx[DEALLOC](tmem_addr[0], T.uint32(TMEM_COLUMNS))

    return gemm
