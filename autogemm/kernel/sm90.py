"""sm_90a kernel body: TMA producer, wgmma consumers, TMA-store epilogue; M, N, K and all strides at run time.

One persistent cluster works through its tiles (see scheduler.py). Warpgroup 0 holds the producer, one elected thread that keeps
a ring of PIPE_DEPTH stages filled through TMA; warpgroups 1.. are consumers that multiply from the ring with their accumulators
in registers, leave one wgmma group in flight, and write their part of D through shared memory.

The kernel computes ``out[rows, cols] = lhs[rows, K] . rhs[cols, K]^T``: lhs lies on the MMA's M side (64 rows each), rhs on its
N side (8 to 256). Plainly, lhs is A and rhs is B. With SWAP_AB lhs is B and rhs is A, so that a small M costs no idle MMA rows,
and the epilogue transposes: D is written row-major either way.

CTA_GROUP = 2: the cluster's CTAs take neighbouring row tiles and each loads half of the rhs tile for both (TMA multicast).
PINGPONG: the two consumers take alternate tiles, one multiplying while the other stores.
SPLIT_K: a work item is one slice of K of one tile; how many slices there are is decided at launch. Each consumer counts itself
in when it starts a slice. Whoever came last adds all slices' sums in slice order and writes the tile; the others leave their
sums in the workspace and go on. It waits only for slices that others are at work on already, so nothing is assumed about which
CTAs run at the same time, and whoever is last, the results are the same bit for bit.
"""

from __future__ import annotations

from typing import Any, Final

from tvm.script import tirx as T
from tvm.tirx.lang.pipeline import MBarrier, PipelineState, TMABar

from ..config import Config
from ..dtypes import dtype as lookup_dtype
from ..resources import SMEM_HEADER_BYTES, register_split, slices_in_registers
from .pipeline import MMA2TMA, TMA2MMA, OrderBarriers, skip, warpgroup_barrier
from .scheduler import RasterScheduler
from .sm90_launch import ELEMENT_BYTES, MMA_M, WARPGROUP, Plan, manifest_parts

__all__ = ["barrier_names", "build", "manifest_parts"]

MMA_K: Final = 16
# Stages loaded before the CTA's threads meet. Two measured best of 1, 2, 4 and all: more keep the consumers waiting.
MAX_EARLY_LOADS: Final = 2

# CUtensorMapSwizzle (CUDA Driver API) by bytes of the box's inner extent.
_SWIZZLE_CODE: Final = {32: 1, 64: 2, 128: 3}

_LOAD: Final = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
_LOAD_MULTICAST: Final = _LOAD + ".multicast::cluster"
_STORE: Final = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
# Partial sums go through L2: they are read by another SM. Each word says for itself whether it has come (see ``put_sums``), so
# nothing has to be ordered: a fence and an acquiring atomic would cost two round trips to L2.
_PUT: Final = "st.relaxed.gpu.global.v4.f32"
_TAKE: Final = "ld.relaxed.gpu.global.v4.u32"
_EMPTY: Final = "st.relaxed.gpu.global.v4.u32"
_COUNT_IN: Final = "atom.relaxed.gpu.global.add.u32"
_CLEAR: Final = "st.relaxed.gpu.global.u32"
_ANY: Final = "barrier.cta.red.or.pred"

# An empty asm that reads and writes one accumulator: keeps the compiler from moving register accesses across wgmma, which reads
# and writes them asynchronously (T.cuda.wgmma.noop_barrier takes its register by value and so pins nothing).
_PIN: Final = '__forceinline__ __device__ void autogemm_pin_register(float& r) { asm volatile("" : "+f"(r) :: "memory"); }'


def barrier_names(config: Config) -> tuple[str, ...]:
    """Return the names of the kernel's mbarrier arrays, in allocation order."""
    return (TMA2MMA, MMA2TMA)


def build(config: Config, dtype: str) -> Any:
    """Return the TIRx PrimFunc ``gemm`` of a legal ``config``.

    Its parameters are the matrices a [M,K], b [N,K] and d [M,N], the workspace, the row strides lda, ldb, ldd in elements, and
    the scalars of ``manifest_parts``.
    """
    c, p = config, Plan.of(config)
    BLK_M, BLK_N, BLK_K, DEPTH, CONSUMERS, EPI_N = c.blk_m, c.blk_n, c.blk_k, c.pipe_depth, c.num_consumer, c.epi_n
    GROUP, SPLIT, CLUSTER, PINGPONG, SWAP = c.cta_group, c.split_k > 1, p.cluster, c.pingpong, c.swap_ab
    ROWS, BLOCKS, BLOCK_REGS, BOX = p.consumer_rows, p.blocks, p.block_regs, p.box
    LHS_STAGE, RHS_STAGE = BLK_M * BLK_K, BLK_N * BLK_K
    RHS_PART = RHS_STAGE // GROUP
    ACCUMULATORS, PARTIAL = BLOCKS * BLOCK_REGS, p.partial_words
    CHUNK, AT_ONCE = slices_in_registers(c)
    REGISTERS = register_split(c)
    SWIZZLE = _SWIZZLE_CODE[BOX * ELEMENT_BYTES]
    EARLY = min(MAX_EARLY_LOADS, DEPTH - 1)
    ptx = lookup_dtype(dtype).ptx
    MMA = f"wgmma.mma_async.sync.aligned.m64n{BLK_N}k16.f32.{ptx}.{ptx}"
    CONVERT = f"cvt.rn.{ptx}x2.f32"
    ENCODE = "runtime.cuTensorMapEncodeTiled"
    STAGE_X4 = f"stmatrix.sync.aligned.m8n8.x4{'.trans' if SWAP else ''}.shared.b16"
    STAGE_X2 = "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16"

    def lhs_of(a, b):
        return b if SWAP else a

    def rhs_of(a, b):
        return a if SWAP else b

    def sums_at(counter_words, tile, slices, of, consumer, thread, chunk=0):
        """Return the word of the workspace at which a chunk of thread's partial sums of slice ``of`` of a tile starts."""
        slot = T.Cast("int64", (tile * slices + of) * CONSUMERS + consumer)
        return T.Cast("int64", counter_words + chunk * (CHUNK * WARPGROUP) + thread * 4) + slot * T.int64(PARTIAL)

    # fmt: off
    @T.prim_func
    def gemm(
        a: T.handle, b: T.handle, d: T.handle, scratch: T.handle, lda: T.int32, ldb: T.int32, ldd: T.int32,
        lhs_box: T.int32, rhs_box: T.int32, out_box: T.int32, stage_bytes: T.int32, k_steps: T.int32, slice_steps: T.int32,
        grid: T.int32, tile_count: T.int32, cluster_count: T.int32, full_tiles: T.int32,
        group_tiles: T.int32, group_tiles_mul: T.uint32, group_tiles_shift: T.int32,
        group_rows: T.int32, group_rows_mul: T.uint32, group_rows_shift: T.int32,
        tail_rows: T.int32, tail_rows_mul: T.uint32, tail_rows_shift: T.int32,
        item_count: T.int32, slices: T.int32, slices_mul: T.uint32, slices_shift: T.int32, counter_words: T.int32,
    ):
        M = T.int32()
        N = T.int32()
        K = T.int32()
        workspace_words = T.int32()
        A = T.match_buffer(a, (M, K), dtype)
        B = T.match_buffer(b, (N, K), dtype)
        D = T.match_buffer(d, (M, N), dtype)
        workspace = T.match_buffer(scratch, (workspace_words,), "float32")
        # The launcher encodes the maps from the manifest; these calls tell the CPU execution the same.
        lhs_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, lhs_map, dtype, 2, lhs_of(A, B).data, K, lhs_of(M, N), lhs_of(lda, ldb) * 2,
                      BLK_K, lhs_box, 1, 1, 0, 3, 2, 0)
        rhs_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, rhs_map, dtype, 2, rhs_of(A, B).data, K, rhs_of(M, N), rhs_of(lda, ldb) * 2,
                      BLK_K, rhs_box, 1, 1, 0, 3, 2, 0)
        out_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, out_map, dtype, 2, D.data, N, M, ldd * 2, BOX, out_box, 1, 1, 0, SWIZZLE, 2, 0)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        cta_rank = T.cta_id_in_cluster([CLUSTER])
        bx = T.cta_id([grid])
        wg_id = T.warpgroup_id([CONSUMERS + 1])
        warp_id = T.warp_id_in_wg([4])
        lane_id = T.lane_id([32])

        # The descriptors' first fetch takes as long as the set-up below.
        if T.cuda.thread_rank() == 0:
            T.ptx.prefetch.tensormap(T.address_of(lhs_map))
            T.ptx.prefetch.tensormap(T.address_of(rhs_map))
            T.ptx.prefetch.tensormap(T.address_of(out_map))

        # ---------------- shared memory and barriers ----------------
        pool = T.SMEMPool()
        tma2mma = TMABar(pool, DEPTH)
        mma2tma = MBarrier(pool, DEPTH)
        pool.move_base_to(SMEM_HEADER_BYTES)
        lhs_smem = pool.alloc((DEPTH, LHS_STAGE), dtype)
        rhs_smem = pool.alloc((DEPTH, RHS_STAGE), dtype)
        out_smem = pool.alloc((CONSUMERS, ROWS * EPI_N), dtype)
        tma2mma.init(1)
        mma2tma.init((1 if PINGPONG else CONSUMERS) * GROUP)
        pool.commit()
        T.ptx.fence.proxy.async_.shared__cta()
        T.ptx.fence.mbarrier_init.release.cluster()

        sched = RasterScheduler(
            (
                tile_count, cluster_count, full_tiles, group_tiles, group_tiles_mul, group_tiles_shift,
                group_rows, group_rows_mul, group_rows_shift, tail_rows, tail_rows_mul, tail_rows_shift,
            ),
            (item_count, slices, slices_mul, slices_shift) if SPLIT else (),
        )
        sched.init(bx // CLUSTER)
        tile_row = T.meta_var((sched.m_idx * GROUP + (cta_rank if GROUP > 1 else 0)) * BLK_M)
        tile_col = T.meta_var(sched.n_idx * BLK_N)
        first_step = T.meta_var(sched.k_slice * slice_steps if SPLIT else 0)
        steps = T.meta_var(T.min(slice_steps, k_steps - first_step) if SPLIT else k_steps)

        @T.inline
        def load(stage, step):
            k_at = T.meta_var((first_step + step) * BLK_K)
            full = T.meta_var(tma2mma.ptr_to([stage]))
            tma2mma.arrive(stage, stage_bytes)
            T.ptx[_LOAD](lhs_smem.ptr_to([stage, 0]), T.address_of(lhs_map), k_at, tile_row, full)
            if GROUP > 1:
                T.ptx[_LOAD_MULTICAST](
                    rhs_smem.ptr_to([stage, cta_rank * RHS_PART]), T.address_of(rhs_map),
                    k_at, tile_col + cta_rank * (BLK_N // GROUP), full, T.uint16((1 << GROUP) - 1),
                )
            else:
                T.ptx[_LOAD](rhs_smem.ptr_to([stage, 0]), T.address_of(rhs_map), k_at, tile_col, full)

        # Under programmatic dependent launch: nothing of the previous kernel's may be read or overwritten before it ends;
        # consumers are ordered behind the loads. There is no launch_dependents: the next kernel's CTAs would take the SMs in
        # the order in which this one's leave them, and neighbouring tiles would no longer share a GPC's reads of L2
        # (256x4096x4096: 16.5 us against 13.4).
        early = T.local_scalar("int32")
        if CLUSTER > 1:
            early = 0
            # A peer's arrive or multicast must not reach a barrier before it is initialised.
            T.cuda.cluster_sync()
        else:
            # The first loads need no other thread; the way to memory is the longest part of a small product.
            early = T.min(steps, EARLY)
            if wg_id == 0:  # noqa: SIM102  (run-time conditions: no "and")
                if warp_id == 0:
                    T.cuda.warp_sync()  # with the thread that initialised the barriers
                    if T.cuda.elect_sync():
                        T.ptx.griddepcontrol.wait()
                        for k in T.serial(early, unroll=False):
                            load(k, k)
            T.cuda.cta_sync()

        if wg_id == 0:
            # ---------------- producer ----------------
            if REGISTERS is not None:
                T.ptx.setmaxnreg.dec.sync.aligned.u32(REGISTERS[0])
            if warp_id == 0:
                fill = PipelineState(DEPTH, phase=1)
                fill.stage = early
                if T.cuda.elect_sync():
                    if CLUSTER > 1:
                        T.ptx.griddepcontrol.wait()
                    while sched.valid():
                        for k in T.serial(steps - early, unroll=False):
                            mma2tma.wait(fill.stage, fill.phase)
                            load(fill.stage, early + k)
                            fill.advance()
                        early = 0
                        sched.next_tile()
        else:
            # ---------------- consumers ----------------
            if REGISTERS is not None:
                T.ptx.setmaxnreg.inc.sync.aligned.u32(REGISTERS[1])
            ring = PipelineState(DEPTH, phase=0)
            previous = T.local_scalar("int32")
            row0 = T.local_scalar("int32")
            col0 = T.local_scalar("int32")
            acc = T.alloc_local((ACCUMULATORS,), "float32")
            packed = T.alloc_local((4,), "uint32")
            lhs_desc = T.alloc_local((1,), "uint64")
            rhs_desc = T.alloc_local((1,), "uint64")
            consumer = T.meta_var(wg_id - 1)
            own_row = T.meta_var(0 if PINGPONG else consumer * ROWS)
            thread = T.meta_var(warp_id * 32 + lane_id)
            order = OrderBarriers()
            if SPLIT:
                tile0 = T.local_scalar("int32")
                slice0 = T.local_scalar("int32")
                total = T.alloc_local((CHUNK,), "float32")
                term = T.alloc_local((AT_ONCE, CHUNK), "uint32")
                least = T.alloc_local((1,), "uint32")
                before = T.alloc_local((1,), "uint32")
                last = T.alloc_local((1,), "uint32")
            # Both operands K-major with 128-byte swizzle: 8-row atoms 1024 B apart (PTX ISA, "Matrix-descriptor format").
            T.cuda.wgmma.encode_matrix_descriptor(T.address_of(lhs_desc[0]), lhs_smem.ptr_to([0, own_row * BLK_K]), 1, 64, 3)
            T.cuda.wgmma.encode_matrix_descriptor(T.address_of(rhs_desc[0]), rhs_smem.ptr_to([0, 0]), 1, 64, 3)

            @T.inline
            def pin_accumulators():
                for i in T.unroll(ACCUMULATORS):
                    T.evaluate(T.cuda.func_call("autogemm_pin_register", acc[i], source_code=_PIN))

            @T.inline
            def release(stage):
                if GROUP > 1:
                    if thread < GROUP:
                        mma2tma.arrive(stage, remote=thread)
                else:
                    if thread == 0:
                        mma2tma.arrive(stage)

            @T.inline
            def multiply(step):
                pin_accumulators()
                T.ptx.wgmma.fence.sync.aligned()
                for kk in T.unroll(BLK_K // MMA_K):
                    for mb in T.unroll(BLOCKS):
                        # Descriptors hold addresses in units of 16 bytes, that is, of 8 elements.
                        lhs_at = T.meta_var(ring.stage * (LHS_STAGE // 8) + (mb * MMA_M * BLK_K + kk * MMA_K) // 8)
                        rhs_at = T.meta_var(ring.stage * (RHS_STAGE // 8) + kk * MMA_K // 8)
                        T.ptx[MMA](
                            *[acc[mb * BLOCK_REGS + i] for i in range(BLOCK_REGS)],
                            lhs_desc[0] + T.Cast("uint64", lhs_at), rhs_desc[0] + T.Cast("uint64", rhs_at),
                            (step + kk) != 0, 1, 1, 0, 0,
                        )
                T.ptx.wgmma.commit_group.sync.aligned()
                pin_accumulators()

            @T.inline
            def next_tile():
                sched.next_tile()
                if PINGPONG:  # and pass over the other consumer's
                    sched.next_tile()
                    skip(ring, steps, DEPTH)

            @T.inline
            def count_in():
                """Tell the tile's other slices that this one is being worked on; ``before`` is how many were."""
                before[0] = T.uint32(0xFFFFFFFF)
                if thread == 0:
                    T.ptx[_COUNT_IN](before[0], workspace.ptr_to([tile0 * CONSUMERS + consumer]), T.uint32(1))

            @T.inline
            def find_last():
                """Set ``last`` in every thread if this slice started last, and clear the counter for the next launch."""
                is_last = T.meta_var(before[0] == T.Cast("uint32", slices - 1))
                T.ptx[_ANY](last[0], T.Cast("uint32", warpgroup_barrier(wg_id)), T.uint32(WARPGROUP), is_last)
                if last[0] != T.uint32(0):  # noqa: SIM102  (run-time conditions: no "and")
                    if thread == 0:
                        T.ptx[_CLEAR](workspace.ptr_to([tile0 * CONSUMERS + consumer]), T.uint32(0))

            @T.inline
            def put_sums():
                """Leave this slice's sums in the workspace. A word of 0 there means "not yet", so +0.0 goes as -0.0."""
                first = T.meta_var(sums_at(counter_words, tile0, slices, slice0, consumer, thread))
                for i in T.unroll(ACCUMULATORS):
                    acc[i] = T.Select(acc[i] == T.float32(0), T.float32(-0.0), acc[i])
                for i in T.unroll(ACCUMULATORS // 4):
                    at = T.meta_var(workspace.ptr_to([first + i * (WARPGROUP * 4)]))
                    T.ptx[_PUT](at, acc[i * 4], acc[i * 4 + 1], acc[i * 4 + 2], acc[i * 4 + 3])

            @T.inline
            def take_sums(first, s):
                """Read a chunk of another slice's sums into ``term[s]``; ``least`` is 0 if any have not come yet."""
                for i in T.unroll(CHUNK // 4):
                    j = T.meta_var(i * 4)
                    at = T.meta_var(workspace.ptr_to([first + i * (WARPGROUP * 4)]))
                    T.ptx[_TAKE](term[s, j], term[s, j + 1], term[s, j + 2], term[s, j + 3], at)

            @T.inline
            def look_at(s):
                least[0] = term[s, 0]
                for i in T.unroll(CHUNK - 1):
                    least[0] = T.min(least[0], term[s, i + 1])

            @T.inline
            def add_own(chunk):
                for i in T.unroll(CHUNK):
                    total[i] = total[i] + acc[chunk * CHUNK + i]

            @T.inline
            def add_slices():
                """Replace the accumulators by the sum of all slices' in slice order; the own ones come from registers."""
                for chunk in T.unroll(ACCUMULATORS // CHUNK):
                    for i in T.unroll(CHUNK):
                        total[i] = T.float32(0)
                    for group in T.serial(T.truncdiv(slices - 2 + AT_ONCE, AT_ONCE), unroll=False):
                        for s in T.unroll(AT_ONCE):
                            other = T.meta_var(group * AT_ONCE + s)
                            if other < slices - 1:
                                of = T.meta_var(other + T.Cast("int32", other >= slice0))
                                take_sums(sums_at(counter_words, tile0, slices, of, consumer, thread, chunk), s)
                        for s in T.unroll(AT_ONCE):
                            other = T.meta_var(group * AT_ONCE + s)
                            if other < slices - 1:
                                of = T.meta_var(other + T.Cast("int32", other >= slice0))
                                first = T.meta_var(sums_at(counter_words, tile0, slices, of, consumer, thread, chunk))
                                look_at(s)
                                while least[0] == T.uint32(0):
                                    take_sums(first, s)
                                    look_at(s)
                                for i in T.unroll(CHUNK // 4):  # the next launch needs it empty
                                    at = T.meta_var(workspace.ptr_to([first + i * (WARPGROUP * 4)]))
                                    T.ptx[_EMPTY](at, T.uint32(0), T.uint32(0), T.uint32(0), T.uint32(0))
                                if other == slice0:
                                    add_own(chunk)
                                for i in T.unroll(CHUNK):
                                    total[i] = total[i] + T.reinterpret("float32", term[s, i])
                    if slice0 == slices - 1:
                        add_own(chunk)
                    for i in T.unroll(CHUNK):
                        acc[chunk * CHUNK + i] = total[i]

            @T.inline
            def convert(mb, base, count):
                """Round registers base.. of block mb to pairs."""
                for q in T.unroll(count):
                    i = T.meta_var(mb * BLOCK_REGS + base + 2 * q)
                    T.ptx[CONVERT](packed[q], acc[i + 1], acc[i])

            @T.inline
            def stage_rows(e):
                """Stage EPI_N columns as row-major boxes of BOX columns, swizzled as the TMA store expects."""
                swizzle = T.meta_var(lane_id % 8 // (64 // BOX))
                for mb in T.unroll(BLOCKS):
                    for s in T.unroll(EPI_N // BOX):
                        for j in T.unroll(BOX // 16):
                            convert(mb, (e * EPI_N + s * BOX + j * 16) // 2, 4)
                            row = T.meta_var(mb * MMA_M + warp_id * 16 + lane_id % 16)
                            chunk = T.meta_var((2 * j + lane_id // 16) ^ swizzle)
                            at = T.meta_var(out_smem.ptr_to([consumer, s * (ROWS * BOX) + row * BOX + chunk * 8]))
                            T.ptx[STAGE_X4](at, packed[0], packed[1], packed[2], packed[3])

            @T.inline
            def stage_transposed(e):
                """Stage EPI_N accumulator columns as EPI_N rows of D, in boxes of 64 columns (one per block)."""
                for mb in T.unroll(BLOCKS):
                    chunk = T.meta_var((warp_id * 2 + lane_id // 8 % 2) ^ (lane_id % 8))
                    for j in T.unroll(EPI_N // 16):
                        convert(mb, (e * EPI_N + j * 16) // 2, 4)
                        row = T.meta_var(j * 16 + lane_id // 16 * 8 + lane_id % 8)
                        at = T.meta_var(out_smem.ptr_to([consumer, mb * (EPI_N * BOX) + row * BOX + chunk * 8]))
                        T.ptx[STAGE_X4](at, packed[0], packed[1], packed[2], packed[3])
                    if EPI_N % 16 == 8:
                        convert(mb, (e * EPI_N + EPI_N - 8) // 2, 2)
                        row = T.meta_var(EPI_N - 8 + lane_id % 8)
                        at = T.meta_var(out_smem.ptr_to([consumer, mb * (EPI_N * BOX) + row * BOX + chunk * 8]))
                        T.ptx[STAGE_X2](at, packed[0], packed[1])

            @T.inline
            def store(e):
                own_col = T.meta_var(col0 + e * EPI_N)
                if SWAP:
                    for mb in T.unroll(BLOCKS):
                        at = T.meta_var(out_smem.ptr_to([consumer, mb * (EPI_N * BOX)]))
                        T.ptx[_STORE](T.address_of(out_map), row0 + own_row + mb * MMA_M, own_col, at)
                else:
                    for s in T.unroll(EPI_N // BOX):
                        at = T.meta_var(out_smem.ptr_to([consumer, s * (ROWS * BOX)]))
                        T.ptx[_STORE](T.address_of(out_map), own_col + s * BOX, row0 + own_row, at)

            @T.inline
            def write_tile():
                for e in T.unroll(p.steps):
                    if thread == 0:
                        T.ptx.cp.async_.bulk.wait_group.read(0)
                    T.cuda.warpgroup_sync(warpgroup_barrier(wg_id))
                    if SWAP:
                        stage_transposed(e)
                    else:
                        stage_rows(e)
                    T.ptx.fence.proxy.async_.shared__cta()
                    T.cuda.warpgroup_sync(warpgroup_barrier(wg_id))
                    if thread == 0:
                        store(e)
                        T.ptx.cp.async_.bulk.commit_group()

            if PINGPONG:  # noqa: SIM102  (decided while tracing; the other one at run time)
                if consumer == 1:
                    order.pass_turn(1)
                    sched.next_tile()
                    skip(ring, steps, DEPTH)

            while sched.valid():
                row0 = tile_row
                col0 = tile_col
                if SPLIT:
                    tile0 = sched.tile_idx
                    slice0 = sched.k_slice
                    count_in()
                if PINGPONG:
                    order.wait(consumer)
                for k in T.serial(steps, unroll=2):
                    tma2mma.wait(ring.stage, ring.phase)
                    multiply(k)
                    T.ptx.wgmma.wait_group.sync.aligned(1)
                    if k > 0:
                        release(previous)
                    previous = ring.stage
                    ring.advance()
                if PINGPONG:
                    order.pass_turn(consumer)
                next_tile()  # decoded while the last MMAs run
                T.ptx.wgmma.wait_group.sync.aligned(0)
                pin_accumulators()
                release(previous)
                if SPLIT:
                    find_last()
                    if last[0] != T.uint32(0):
                        add_slices()
                        write_tile()
                    else:
                        put_sums()
                else:
                    write_tile()
            # Shared memory must outlive the stores' reads of it; their writes complete with the grid.
            if thread == 0:
                T.ptx.cp.async_.bulk.wait_group.read(0)
        if CLUSTER > 1:
            # No CTA may leave while a peer can still write to its shared memory.
            T.cuda.cluster_sync()
    # fmt: on

    return gemm
