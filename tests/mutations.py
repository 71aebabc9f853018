"""Faults to plant in the generator's own kernels: each is one edit of kernel/sm100.py or kernel/sm90.py.

An edit replaces the first ``old`` between ``after`` and ``until`` (all of them with ``every``), and the first of each pair in
``also`` anywhere by the second. White space in these texts matches any white space, so that the list follows the sources
through reformatting; an edit whose text is gone fails loudly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final, Literal

from autogemm.arch import ArchName
from autogemm.config import NAMED, Config

Subject = Literal[
    "role", "phase", "count", "bytes", "mask", "fence", "barrier", "allocation", "index", "store", "launch", "register"
]

NOTHING: Final = "T.evaluate(0)"


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One planted fault.

    Attributes:
        name: what is wrong, in words.
        arch_name, config: kernel it is planted in; a key of CONFIGS.
        subject: what kind of thing was changed.
        old, new, after, until, every, also: the edit (see the module's docstring).
    """

    name: str
    arch_name: ArchName
    config: str
    subject: Subject
    old: str
    new: str
    after: str = ""
    until: str = ""
    every: bool = False
    also: tuple[tuple[str, str], ...] = ()

    def apply(self, source: str) -> str:
        """Return ``source`` with the fault.

        Raises:
            LookupError: the source no longer holds the text to replace.
        """
        start = _find(source, self.after, 0).end() if self.after else 0
        end = _find(source, self.until, start).start() if self.until else len(source)
        source = source[:start] + self._replaced(source[start:end], self.old, self.new) + source[end:]
        for old, new in self.also:
            source = self._replaced(source, old, new)
        return source

    def _replaced(self, source: str, old: str, new: str) -> str:
        changed, count = _pattern(old).subn(lambda _: new, source, count=0 if self.every else 1)
        if not count:
            raise LookupError(f"the generator no longer holds {old!r} where it is looked for; adapt {self.name!r}")
        return changed


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(r"\s+".join(re.escape(part) for part in text.split()))


def _find(source: str, text: str, start: int) -> re.Match[str]:
    found = _pattern(text).search(source, start)
    if found is None:
        raise LookupError(f"the generator no longer holds {text!r}; adapt the mutations that look for it")
    return found


_V8, _V9 = NAMED["sm_100a"]["v8"], NAMED["sm_100a"]["v9"]
CONFIGS: Final[dict[str, Config]] = {
    "v8": _V8,
    "v9": _V9,
    "two buffers": replace(_V8, blk_n=64, epi_n=64, tmem_buffers=2),
    "cooperative": Config(blk_m=128, blk_n=64, pipe_depth=3, cta_group=2, num_consumer=2, epi_n=32),
    "tall": Config(blk_m=256, blk_n=64, pipe_depth=3, num_consumer=2, epi_n=64),
    "ping-pong": Config(blk_m=64, blk_n=64, pipe_depth=3, num_consumer=2, epi_n=32, pingpong=True),
    "split": Config(blk_m=64, blk_n=64, pipe_depth=3, num_consumer=1, epi_n=16, split_k=2),
    "three slices": Config(blk_m=64, blk_n=64, pipe_depth=3, num_consumer=1, epi_n=16, split_k=3),
    "swapped": Config(blk_m=64, blk_n=32, pipe_depth=3, num_consumer=1, epi_n=16, swap_ab=True),
}


def _sm100(
    config: str,
    subject: Subject,
    name: str,
    old: str,
    new: str = NOTHING,
    *,
    after: str = "",
    until: str = "",
    every: bool = False,
) -> Mutation:
    return Mutation(
        name=name, arch_name="sm_100a", config=config, subject=subject, old=old, new=new, after=after, until=until, every=every
    )


def _sm90(
    config: str,
    subject: Subject,
    name: str,
    old: str,
    new: str = NOTHING,
    *,
    after: str = "",
    until: str = "",
    every: bool = False,
    also: tuple[tuple[str, str], ...] = (),
) -> Mutation:
    return Mutation(
        name=name, arch_name="sm_90a", config=config, subject=subject, old=old, new=new, after=after, until=until, every=every,
        also=also,
    )  # fmt: skip


# Places in the sources from which an edit looks onward.
_ROLES100: Final = "# --- Tile scheduler"
_PRODUCER100: Final = "# === TMA producer"
_ISSUER100: Final = "# === MMA: warp_id selects"
_WRITER100: Final = "wb_ps = PipelineState"
_CLEANUP100: Final = "# --- Cleanup ---"

SM100: Final[tuple[Mutation, ...]] = (
    # --- who does what
    _sm100("v9", "role", "the producer is the first MMA warp", "PRODUCER_WARP = 3", "PRODUCER_WARP = 0"),
    _sm100("v9", "role", "one MMA warp too many", "elif warp_id < NUM_CONSUMER", "elif warp_id <= NUM_CONSUMER"),
    _sm100("v9", "role", "both CTAs of a pair issue MMAs", "if cbx == 0:", "if cbx >= 0:", after=_ISSUER100),
    _sm100("v9", "role", "the wrong CTA of a pair issues MMAs", "if cbx == 0:", "if cbx == 1:", after=_ISSUER100),
    _sm100("v9", "role", "both CTAs announce the stage's bytes", "if cbx == 0:", "if cbx >= 0:", after=_PRODUCER100),
    _sm100("v8", "role", "all lanes of the producer load", "if T.cuda.elect_sync():", "if lane_id >= 0:", after=_PRODUCER100),
    _sm100("v8", "role", "all lanes of the MMA warp issue", "if T.cuda.elect_sync():", "if lane_id >= 0:", after=_ISSUER100),
    _sm100(
        "v9",
        "role",
        "every warp of a writeback warpgroup stores",
        "if warp_id == 0:",
        "if warp_id >= 0:",
        after="# shared memory -> D",
    ),
    # --- phases and slots
    _sm100(
        "v9",
        "phase",
        "the producer waits for a free stage in the wrong phase",
        "tma_ps = PipelineState(PIPE_DEPTH, phase=1)",
        "tma_ps = PipelineState(PIPE_DEPTH, phase=0)",
    ),
    _sm100(
        "v9",
        "phase",
        "the MMA warp does not wait for the first loads",
        "mma_ps = PipelineState(PIPE_DEPTH, phase=0)",
        "mma_ps = PipelineState(PIPE_DEPTH, phase=1)",
    ),
    _sm100(
        "v9",
        "phase",
        "the MMA warp waits for an accumulator that is free",
        "acc_ps = PipelineState(TMEM_BUFFERS, phase=1)",
        "acc_ps = PipelineState(TMEM_BUFFERS, phase=0)",
    ),
    _sm100(
        "v9",
        "phase",
        "writeback does not wait for the first MMAs",
        "wb_ps = PipelineState(TMEM_BUFFERS, phase=0)",
        "wb_ps = PipelineState(TMEM_BUFFERS, phase=1)",
    ),
    _sm100("v9", "phase", "the accumulator's phase is never advanced by the MMA warp", "acc_ps.advance()"),
    _sm100("two buffers", "phase", "the accumulator's buffer is never advanced by writeback", "wb_ps.advance()"),
    _sm100("v9", "phase", "the stage is never advanced by the MMA warp", "mma_ps.advance()"),
    _sm100("v9", "phase", "the stage is never advanced by the producer", "tma_ps.advance()", after=_PRODUCER100),
    # --- arrival counts
    _sm100("v9", "count", "a stage is free after one consumer's MMAs", "mma2tma.init(NUM_CONSUMER)", "mma2tma.init(1)"),
    _sm100(
        "v9",
        "count",
        "a stage needs one consumer too many to be free",
        "mma2tma.init(NUM_CONSUMER)",
        "mma2tma.init(NUM_CONSUMER + 1)",
    ),
    _sm100(
        "v9",
        "count",
        "an accumulator is free once one CTA has read it",
        "ld2mma.init(WARPGROUP_THREADS * CTA_GROUP)",
        "ld2mma.init(WARPGROUP_THREADS)",
    ),
    _sm100(
        "v9",
        "count",
        "an accumulator is free only after twice the threads",
        "ld2mma.init(WARPGROUP_THREADS * CTA_GROUP)",
        "ld2mma.init(WARPGROUP_THREADS * CTA_GROUP * 2)",
    ),
    _sm100(
        "v8",
        "count",
        "an accumulator is free once one warp has read it",
        "ld2mma.init(WARPGROUP_THREADS * CTA_GROUP)",
        "ld2mma.init(32)",
    ),
    _sm100("v9", "count", "a stage waits for two announcements", "tma2mma.init(1)", "tma2mma.init(2)"),
    _sm100("v9", "count", "an accumulator waits for two commits", "mma2ld.init(1)", "mma2ld.init(2)"),
    # --- byte counts
    _sm100(
        "v9",
        "bytes",
        "the bytes of B are not counted",
        "(NUM_CONSUMER * BLK_M + BLK_N) * BLK_K",
        "(NUM_CONSUMER * BLK_M) * BLK_K",
    ),
    _sm100("v9", "bytes", "the peer's bytes are not counted", "STAGE_BYTES = CTA_GROUP * (", "STAGE_BYTES = ("),
    _sm100(
        "v9",
        "bytes",
        "one A block's bytes are not counted",
        "(NUM_CONSUMER * BLK_M + BLK_N) * BLK_K",
        "(BLK_M + BLK_N) * BLK_K",
    ),
    _sm100(
        "v9",
        "bytes",
        "128 bytes too many are awaited",
        "arrive(tma_ps.stage, STAGE_BYTES)",
        "arrive(tma_ps.stage, STAGE_BYTES + 128)",
    ),
    # --- multicast masks and remote addresses
    _sm100(
        "v9",
        "mask",
        "free stages are reported to one CTA",
        "cta_group=CTA_GROUP, cta_mask=PAIR_MASK",
        "cta_group=CTA_GROUP, cta_mask=1",
        after="mma2tma.arrive",
    ),
    _sm100(
        "v9",
        "mask",
        "complete accumulators are reported to one CTA",
        "cta_group=CTA_GROUP, cta_mask=PAIR_MASK",
        "cta_group=CTA_GROUP, cta_mask=1",
        after="mma2ld.arrive",
    ),
    _sm100(
        "v9",
        "mask",
        "complete accumulators are reported to the peer only",
        "cta_group=CTA_GROUP, cta_mask=PAIR_MASK",
        "cta_group=CTA_GROUP, cta_mask=2",
        after="mma2ld.arrive",
    ),
    _sm100("v9", "mask", "commits reach a CTA that is not there", "PAIR_MASK = (1 << CTA_GROUP) - 1", "PAIR_MASK = 7"),
    _sm100(
        "v9",
        "mask",
        "loads of the peer are reported to the peer",
        "mbar=tma2mma_cta0.ptr_to",
        "mbar=tma2mma.ptr_to",
        every=True,
    ),
    _sm100(
        "v9",
        "mask",
        "loads of B are reported to the CTA's own barrier",
        "mbar=tma2mma_cta0.ptr_to",
        "mbar=tma2mma.ptr_to",
        after="Bsmem[tma_ps.stage",
    ),
    _sm100("v9", "mask", "the peer's writeback frees its own barrier", "ld2mma_cta0.arrive(slot)", "ld2mma.arrive(slot)"),
    # --- fences
    _sm100("v8", "fence", "no proxy fence before the TMA store", "T.ptx.fence.proxy.async_.shared__cta()", after=_WRITER100),
    _sm100(
        "v8",
        "fence",
        "no tcgen05 fence after the MMA warp's waits",
        "T.ptx.tcgen05.fence__after_thread_sync()",
        after=_ISSUER100,
        until=_WRITER100,
        every=True,
    ),
    _sm100(
        "v8",
        "fence",
        "no tcgen05 fence after the wait for a complete accumulator",
        "T.ptx.tcgen05.fence__after_thread_sync()",
        after="mma2ld.wait(slot",
    ),
    _sm100("v8", "fence", "no tcgen05 fence before an accumulator is freed", "T.ptx.tcgen05.fence__before_thread_sync()"),
    _sm100("v8", "fence", "TMEM loads are not waited for", "T.ptx.tcgen05.wait__ld.sync.aligned()"),
    _sm100("v8", "fence", "barriers are not published to the cluster", "T.ptx.fence.mbarrier_init.release.cluster()"),
    # --- waits and barriers
    _sm100(
        "v9",
        "barrier",
        "the producer does not wait for free stages",
        "mma2tma.wait(tma_ps.stage, tma_ps.phase)",
        after="for k in T.serial(k_steps",
    ),
    _sm100("v9", "barrier", "the MMA warp does not wait for loads", "tma2mma.wait(mma_ps.stage, mma_ps.phase)"),
    _sm100("v9", "barrier", "the MMA warp does not wait for a free accumulator", "ld2mma.wait(slot, acc_ps.phase)"),
    _sm100("two buffers", "barrier", "the MMA warp does not wait for a free buffer", "ld2mma.wait(slot, acc_ps.phase)"),
    _sm100("v9", "barrier", "writeback does not wait for the MMAs", "mma2ld.wait(slot, wb_ps.phase)"),
    _sm100("v9", "barrier", "accumulators are never freed", "ld2mma_cta0.arrive(slot)"),
    _sm100("v9", "barrier", "stages are never freed", "mma2tma.arrive(mma_ps.stage, cta_group=CTA_GROUP, cta_mask=PAIR_MASK)"),
    _sm100(
        "v9",
        "barrier",
        "accumulators are never reported complete",
        "mma2ld.arrive(slot, cta_group=CTA_GROUP, cta_mask=PAIR_MASK)",
    ),
    _sm100("v9", "barrier", "accumulators are freed after the first of several reads", "if i == EPI_STEPS - 1:", "if i == 0:"),
    _sm100(
        "v9",
        "barrier",
        "the pair starts with a CTA barrier only",
        "T.cuda.cluster_sync()",
        "T.cuda.cta_sync()",
        after="def sync_all",
    ),
    _sm100("v9", "barrier", "nothing separates barrier setup from use", "sync_all()", after="T.ptx.fence.mbarrier_init"),
    _sm100("v8", "barrier", "a CTA may leave while its peer uses it", "sync_all()", "T.cuda.cta_sync()", after=_CLEANUP100),
    _sm100("v8", "barrier", "TMEM is freed while it is read", "sync_all()", after=_CLEANUP100),
    _sm100(
        "v8",
        "barrier",
        "no barrier before D is staged again",
        "T.cuda.warpgroup_sync(warpgroup_barrier(wg_id))",
        after=_WRITER100,
    ),
    _sm100(
        "v8",
        "barrier",
        "no barrier between staging D and its store",
        "T.cuda.warpgroup_sync(warpgroup_barrier(wg_id))",
        after="Tx.copy(Dsmem",
    ),
    _sm100(
        "v9",
        "barrier",
        "two warpgroups share a named barrier",
        "warpgroup_barrier(wg_id)",
        "warpgroup_barrier(0)",
        after=_WRITER100,
        every=True,
    ),
    # --- TMA stores
    _sm100("v8", "store", "the previous store's read is not waited for", "T.ptx.cp.async_.bulk.wait_group.read(0)"),
    _sm100(
        "v8",
        "store",
        "one store too many may be in flight",
        "T.ptx.cp.async_.bulk.wait_group.read(0)",
        "T.ptx.cp.async_.bulk.wait_group.read(1)",
    ),
    _sm100("v8", "store", "stores are never committed", "T.ptx.cp.async_.bulk.commit_group()"),
    _sm100("v8", "store", "the last stores are not waited for", "T.ptx.cp.async_.bulk.wait_group(0)"),
    # --- TMEM allocation
    _sm100(
        "v9",
        "allocation",
        "half of the TMEM is allocated",
        "T.ptx[ALLOC](T.address_of(tmem_addr[0]), T.uint32(TMEM_COLUMNS))",
        "T.ptx[ALLOC](T.address_of(tmem_addr[0]), T.uint32(TMEM_COLUMNS // 2))",
    ),
    _sm100("v8", "allocation", "TMEM is not freed", "T.ptx[DEALLOC](tmem_addr[0], T.uint32(TMEM_COLUMNS))"),
    _sm100(
        "v8",
        "allocation",
        "a part of the TMEM is freed",
        "T.ptx[DEALLOC](tmem_addr[0], T.uint32(TMEM_COLUMNS))",
        "T.ptx[DEALLOC](tmem_addr[0], T.uint32(TMEM_COLUMNS // 2))",
    ),
    _sm100("v8", "allocation", "TMEM is freed once per warpgroup", "if wg_id == 0:", "if wg_id >= 0:", after=_CLEANUP100),
    _sm100(
        "v8",
        "allocation",
        "TMEM is allocated once per warpgroup",
        "if wg_id == 0:",
        "if wg_id >= 0:",
        after="# --- Barriers and TMEM ---",
    ),
    _sm100(
        "v8",
        "allocation",
        "a TMEM size that is no power of two",
        "T.ptx[ALLOC](T.address_of(tmem_addr[0]), T.uint32(TMEM_COLUMNS))",
        "T.ptx[ALLOC](T.address_of(tmem_addr[0]), T.uint32(TMEM_COLUMNS - 128))",
    ),
    _sm100("v9", "allocation", "accumulators of two consumers overlap", "slot * MMA_N", "slot * (MMA_N // 2)", every=True),
    # --- indices
    _sm100(
        "v9",
        "index",
        "both consumers multiply the first A block",
        "Asmem[mma_ps.stage, consumer, :, :]",
        "Asmem[mma_ps.stage, 0, :, :]",
    ),
    _sm100("v9", "index", "B always comes from stage 0", "Bsmem[mma_ps.stage, :, :]", "Bsmem[0, :, :]"),
    _sm100(
        "v9", "index", "both A blocks are loaded to one place", "Asmem[tma_ps.stage, c, :, :]", "Asmem[tma_ps.stage, 0, :, :]"
    ),
    _sm100(
        "v9",
        "index",
        "both CTAs load the same rows of A",
        "(m_idx * NUM_CONSUMER + c) * CTA_GROUP + cbx",
        "(m_idx * NUM_CONSUMER + c) * CTA_GROUP",
    ),
    _sm100(
        "v9", "index", "both CTAs load the same rows of B", "(n_idx * CTA_GROUP + cbx) * BLK_N", "(n_idx * CTA_GROUP) * BLK_N"
    ),
    _sm100("v9", "index", "all store steps go to the same columns of D", "n_idx * MMA_N + i * EPI_N", "n_idx * MMA_N"),
    _sm100("v9", "index", "all store steps read the same columns of TMEM", "slot * MMA_N + i * EPI_N", "slot * MMA_N"),
    _sm100("v9", "index", "both consumers stage D in one place", "Dsmem[consumer,", "Dsmem[0,", every=True),
    _sm100(
        "v8",
        "index",
        "all warps stage the same rows of D",
        "Dsmem[consumer, warp_id * 32 + lane_id, :]",
        "Dsmem[consumer, lane_id, :]",
    ),
    _sm100(
        "v8",
        "index",
        "both CTAs store the same rows of D",
        "(m_idx * NUM_CONSUMER + consumer) * CTA_GROUP + cbx",
        "(m_idx * NUM_CONSUMER + consumer) * CTA_GROUP",
    ),
    _sm100("v9", "index", "accumulation never starts anew", "accum=(k != 0)", "accum=True"),
    _sm100("v9", "index", "accumulation starts anew at the second step", "accum=(k != 0)", "accum=(k > 1)"),
    _sm100(
        "v9",
        "index",
        "the MMA warp skips the last step of K",
        "for k in T.serial(k_steps",
        "for k in T.serial(k_steps - 1",
        after=_ISSUER100,
    ),
    _sm100(
        "v9",
        "index",
        "the producer skips the last step of K",
        "for k in T.serial(k_steps",
        "for k in T.serial(k_steps - 1",
        after=_PRODUCER100,
    ),
    _sm100("v9", "index", "K advances by half a step", "tma_load(k * BLK_K)", "tma_load(k * (BLK_K // 2))"),
    _sm100("v9", "index", "the last store step is left out", "EPI_STEPS = MMA_N // EPI_N", "EPI_STEPS = MMA_N // EPI_N - 1"),
    _sm100(
        "v9",
        "index",
        "both CTAs of a pair count as clusters",
        "tile_scheduler.init(bx // CTA_GROUP)",
        "tile_scheduler.init(bx)",
    ),
    _sm100(
        "v9",
        "index",
        "the producer takes every other tile only",
        "tile_scheduler.next_tile()",
        "tile_scheduler.next_tile(); tile_scheduler.next_tile()",
        after=_PRODUCER100,
    ),
    # --- and some more of each
    _sm100(
        "v8", "allocation", "the ring lies over the barriers", "pool.move_base_to(SMEM_HEADER_BYTES)", "pool.move_base_to(0)"
    ),
    _sm100(
        "v9",
        "index",
        "B is loaded to the next stage",
        "Bsmem[tma_ps.stage, :, :]",
        "Bsmem[(tma_ps.stage + 1) % PIPE_DEPTH, :, :]",
    ),
    _sm100(
        "v9",
        "count",
        "a stage is announced twice",
        "tma2mma_cta0.arrive(tma_ps.stage, STAGE_BYTES)",
        "tma2mma_cta0.arrive(tma_ps.stage, STAGE_BYTES); tma2mma_cta0.arrive(tma_ps.stage, 0)",
    ),
    _sm100(
        "v9",
        "count",
        "an accumulator is freed twice",
        "ld2mma_cta0.arrive(slot)",
        "ld2mma_cta0.arrive(slot); ld2mma_cta0.arrive(slot)",
    ),
    _sm100("v9", "mask", "loads are reported to the peer of the MMA warp", "tma2mma.remote_view(0)", "tma2mma.remote_view(1)"),
    _sm100("v9", "mask", "writeback frees the peer's barrier", "ld2mma.remote_view(0)", "ld2mma.remote_view(1)"),
    _sm100(
        "v9",
        "role",
        "every lane waits for the store's read",
        "if lane_id == 0:",
        "if lane_id >= 0:",
        after="# shared memory -> D",
    ),
    _sm100(
        "v8", "role", "a warp without stores waits for them", "if warp_id == 0:", "if warp_id == 1:", after="Tx.cast(reg_out"
    ),
    # --- and once more
    _sm100("v9", "allocation", "TMEM is never allocated", "T.ptx[ALLOC](T.address_of(tmem_addr[0]), T.uint32(TMEM_COLUMNS))"),
    _sm100("v9", "bytes", "a stage's bytes are never announced", "tma2mma_cta0.arrive(tma_ps.stage, STAGE_BYTES)"),
    _sm100(
        "v9",
        "bytes",
        "a stage is announced with no bytes",
        "tma2mma_cta0.arrive(tma_ps.stage, STAGE_BYTES)",
        "tma2mma_cta0.arrive(tma_ps.stage, 0)",
    ),
    _sm100(
        "v9",
        "bytes",
        "a stage's bytes are announced for the next one",
        "tma2mma_cta0.arrive(tma_ps.stage, STAGE_BYTES)",
        "tma2mma_cta0.arrive((tma_ps.stage + 1) % PIPE_DEPTH, STAGE_BYTES)",
    ),
    _sm100(
        "v9",
        "barrier",
        "the MMA warp waits for the next stage",
        "tma2mma.wait(mma_ps.stage, mma_ps.phase)",
        "tma2mma.wait((mma_ps.stage + 1) % PIPE_DEPTH, mma_ps.phase)",
    ),
    _sm100(
        "v9",
        "barrier",
        "the next stage is freed in place of the current",
        "mma2tma.arrive(mma_ps.stage, cta_group",
        "mma2tma.arrive((mma_ps.stage + 1) % PIPE_DEPTH, cta_group",
    ),
    _sm100(
        "v9",
        "barrier",
        "a stage is freed before its MMAs are issued",
        """Tx.gemm_async(
            tmem[:, slot * MMA_N : slot * MMA_N + MMA_N],
            Asmem[mma_ps.stage, consumer, :, :], Bsmem[mma_ps.stage, :, :],
            accum=(k != 0), dispatch="tcgen05", cta_group=CTA_GROUP,
        )  # fmt: skip
        mma2tma.arrive(mma_ps.stage, cta_group=CTA_GROUP, cta_mask=PAIR_MASK)""",
        "mma2tma.arrive(mma_ps.stage, cta_group=CTA_GROUP, cta_mask=PAIR_MASK); "
        "Tx.gemm_async(tmem[:, slot * MMA_N : slot * MMA_N + MMA_N], Asmem[mma_ps.stage, consumer, :, :], "
        'Bsmem[mma_ps.stage, :, :], accum=(k != 0), dispatch="tcgen05", cta_group=CTA_GROUP)',
    ),
    _sm100(
        "v9",
        "barrier",
        "accumulators are reported complete after every step",
        "mma2tma.arrive(mma_ps.stage, cta_group=CTA_GROUP, cta_mask=PAIR_MASK)",
        "mma2tma.arrive(mma_ps.stage, cta_group=CTA_GROUP, cta_mask=PAIR_MASK); "
        "mma2ld.arrive(slot, cta_group=CTA_GROUP, cta_mask=PAIR_MASK)",
    ),
    _sm100("v9", "barrier", "the pair ends with a CTA barrier only", "sync_all()", "T.cuda.cta_sync()", after=_CLEANUP100),
    _sm100(
        "v9",
        "barrier",
        "a warpgroup takes part in the CTA's barrier",
        "T.cuda.warpgroup_sync(warpgroup_barrier(wg_id))",
        "T.cuda.warpgroup_sync(0)",
    ),
    _sm100(
        "v9",
        "fence",
        "neither fence after the barriers are set up",
        "T.ptx.fence.proxy.async_.shared__cta() T.ptx.fence.mbarrier_init.release.cluster()",
    ),
    _sm100("v9", "role", "two warps store", "if warp_id == 0:", "if warp_id <= 1:", after="# shared memory -> D"),
    _sm100("v9", "role", "two lanes store", "if lane_id == 0:", "if lane_id <= 1:", after="# shared memory -> D"),
    _sm100(
        "v9",
        "store",
        "another lane waits for the store's read",
        "if lane_id == 0: T.ptx.cp.async_.bulk.wait_group.read(0)",
        "if lane_id == 1: T.ptx.cp.async_.bulk.wait_group.read(0)",
    ),
    _sm100("v9", "phase", "the producer never goes on to the next tile", "tile_scheduler.next_tile()", after=_PRODUCER100),
    _sm100("v9", "phase", "the MMA warp never goes on to the next tile", "tile_scheduler.next_tile()", after=_ISSUER100),
    _sm100("v9", "phase", "writeback never goes on to the next tile", "tile_scheduler.next_tile()", after=_WRITER100),
    _sm100(
        "v9",
        "phase",
        "the MMA warp takes every other tile only",
        "tile_scheduler.next_tile()",
        "tile_scheduler.next_tile(); tile_scheduler.next_tile()",
        after=_ISSUER100,
    ),
    _sm100("v9", "index", "a stage is loaded twice", "tma_load(k * BLK_K)", "tma_load(k * BLK_K); tma_load(k * BLK_K)"),
    _sm100("v9", "index", "K is read 8 elements late", "tma_load(k * BLK_K)", "tma_load(k * BLK_K + 8)"),
    _sm100(
        "v9",
        "index",
        "producer and MMA warp skip the last step of K",
        "for k in T.serial(k_steps, unroll=False):",
        "for k in T.serial(k_steps - 1, unroll=False):",
        every=True,
    ),
    _sm100(
        "v9",
        "index",
        "the producer loads a step of K too many",
        "for k in T.serial(k_steps, unroll=False):",
        "for k in T.serial(k_steps + 1, unroll=False):",
        after=_PRODUCER100,
    ),
    _sm100(
        "v9",
        "index",
        "each consumer multiplies the other's A block",
        "Asmem[mma_ps.stage, consumer, :, :]",
        "Asmem[mma_ps.stage, 1 - consumer, :, :]",
    ),
    _sm100(
        "v9",
        "index",
        "B comes from the next stage",
        "Bsmem[mma_ps.stage, :, :],",
        "Bsmem[(mma_ps.stage + 1) % PIPE_DEPTH, :, :],",
    ),
    _sm100(
        "v9",
        "index",
        "writeback reads the first accumulator only",
        "T.meta_var(slot * MMA_N + i * EPI_N)",
        "T.meta_var(i * EPI_N)",
    ),
    _sm100(
        "v9",
        "index",
        "store steps go to D in reverse",
        "T.meta_var(n_idx * MMA_N + i * EPI_N)",
        "T.meta_var(n_idx * MMA_N + (EPI_STEPS - 1 - i) * EPI_N)",
    ),
    _sm100(
        "v9",
        "index",
        "neighbouring rows of D are swapped",
        "Dsmem[consumer, warp_id * 32 + lane_id, :]",
        "Dsmem[consumer, warp_id * 32 + (lane_id ^ 1), :]",
    ),
    _sm100("v9", "index", "every cluster starts at the first tile", "init(bx // CTA_GROUP)", "init(0)"),
    _sm100("v9", "index", "accumulation never goes on", "accum=(k != 0)", "accum=(k < 0)"),
)

_PRODUCER90: Final = "# ---------------- producer ----------------"
_CONSUMER90: Final = "# ---------------- consumers ----------------"
_LOOP90: Final = "row0 = tile_row"
_PREVIOUS90: Final = "T.ptx.griddepcontrol.wait()"
_WRITE90: Final = "def write_tile"
_PUT90: Final = "def put_sums"
_ADD90: Final = 'total[i] = total[i] + T.reinterpret("float32", term[s, i])'
_UNTIL90: Final = "while least[0] == T.uint32(0):"
_COUNT90: Final = "def count_in"

SM90: Final[tuple[Mutation, ...]] = (
    # --- who does what
    _sm90(
        "cooperative",
        "role",
        "all lanes of the producer load",
        "if T.cuda.elect_sync():",
        "if lane_id >= 0:",
        after=_PRODUCER90,
    ),
    _sm90(
        "cooperative",
        "role",
        "every warp of the first warpgroup loads",
        "if warp_id == 0:",
        "if warp_id >= 0:",
        after=_PRODUCER90,
    ),
    _sm90(
        "cooperative",
        "role",
        "every warp stores",
        "if thread == 0:",
        "if lane_id == 0:",
        after="# ---------------- consumers",
        every=True,
    ),
    _sm90(
        "ping-pong",
        "role",
        "both ping-pong consumers take the same tiles",
        "if consumer == 1:",
        "if consumer == 2:",
        after="if PINGPONG: # noqa",
    ),
    # --- phases
    _sm90(
        "cooperative",
        "phase",
        "the producer waits for a free stage in the wrong phase",
        "fill = PipelineState(DEPTH, phase=1)",
        "fill = PipelineState(DEPTH, phase=0)",
    ),
    _sm90(
        "cooperative",
        "phase",
        "consumers do not wait for the first loads",
        "ring = PipelineState(DEPTH, phase=0)",
        "ring = PipelineState(DEPTH, phase=1)",
    ),
    _sm90("cooperative", "phase", "the ring is never advanced by consumers", "ring.advance()"),
    _sm90("cooperative", "phase", "the ring is never advanced by the producer", "fill.advance()"),
    _sm90(
        "ping-pong",
        "phase",
        "ping-pong does not pass over the other's stages",
        "skip(ring, steps, DEPTH)",
        after="def next_tile",
    ),
    _sm90(
        "ping-pong",
        "phase",
        "the second ping-pong consumer starts at the first stage",
        "skip(ring, steps, DEPTH)",
        after="order.pass_turn(1)",
    ),
    # --- arrival counts
    _sm90(
        "cooperative",
        "count",
        "a stage is free once one CTA has read it",
        "mma2tma.init((1 if PINGPONG else CONSUMERS) * GROUP)",
        "mma2tma.init(1 if PINGPONG else CONSUMERS)",
    ),
    _sm90(
        "cooperative",
        "count",
        "a stage is free once one consumer has read it",
        "mma2tma.init((1 if PINGPONG else CONSUMERS) * GROUP)",
        "mma2tma.init(GROUP)",
    ),
    _sm90(
        "cooperative",
        "count",
        "a stage needs one arrival too many",
        "mma2tma.init((1 if PINGPONG else CONSUMERS) * GROUP)",
        "mma2tma.init((1 if PINGPONG else CONSUMERS) * GROUP + 1)",
    ),
    _sm90("cooperative", "count", "a stage waits for two announcements", "tma2mma.init(1)", "tma2mma.init(2)"),
    # --- byte counts
    _sm90(
        "cooperative",
        "bytes",
        "the peer's half of B is not counted",
        "tma2mma.arrive(stage, stage_bytes)",
        "tma2mma.arrive(stage, stage_bytes - rhs_box * BLK_K * ELEMENT_BYTES)",
    ),
    _sm90(
        "cooperative",
        "bytes",
        "the bytes of A are not counted",
        "tma2mma.arrive(stage, stage_bytes)",
        "tma2mma.arrive(stage, stage_bytes - lhs_box * BLK_K * ELEMENT_BYTES)",
    ),
    _sm90(
        "cooperative",
        "bytes",
        "128 bytes too many are awaited",
        "tma2mma.arrive(stage, stage_bytes)",
        "tma2mma.arrive(stage, stage_bytes + 128)",
    ),
    # --- masks and remote addresses
    _sm90("cooperative", "mask", "B goes to the own CTA only", "T.uint16((1 << GROUP) - 1)", "T.uint16(1)"),
    _sm90("cooperative", "mask", "free stages are reported to one CTA", "if thread < GROUP:", "if thread < 1:"),
    _sm90(
        "cooperative",
        "mask",
        "free stages are reported to the own CTA",
        "mma2tma.arrive(stage, remote=thread)",
        "mma2tma.arrive(stage)",
    ),
    # --- fences and waits of the MMAs
    _sm90("tall", "fence", "no wgmma.fence before the MMAs", "T.ptx.wgmma.fence.sync.aligned()"),
    _sm90("tall", "fence", "no commit of the MMAs", "T.ptx.wgmma.commit_group.sync.aligned()"),
    _sm90(
        "tall",
        "fence",
        "a stage is freed while its MMAs run",
        "T.ptx.wgmma.wait_group.sync.aligned(1)",
        "T.ptx.wgmma.wait_group.sync.aligned(2)",
    ),
    _sm90("tall", "fence", "the step's MMAs are not waited for at all", "T.ptx.wgmma.wait_group.sync.aligned(1)"),
    _sm90("tall", "fence", "the last MMAs are not waited for", "T.ptx.wgmma.wait_group.sync.aligned(0)"),
    _sm90(
        "cooperative", "fence", "no proxy fence before the TMA store", "T.ptx.fence.proxy.async_.shared__cta()", after=_WRITE90
    ),
    _sm90("cooperative", "fence", "barriers are not published to the cluster", "T.ptx.fence.mbarrier_init.release.cluster()"),
    # --- waits and barriers
    _sm90("cooperative", "barrier", "the producer does not wait for free stages", "mma2tma.wait(fill.stage, fill.phase)"),
    _sm90("cooperative", "barrier", "consumers do not wait for loads", "tma2mma.wait(ring.stage, ring.phase)"),
    _sm90(
        "cooperative",
        "barrier",
        "the current stage is freed in place of the previous",
        "release(previous)",
        "release(ring.stage)",
        after=_LOOP90,
    ),
    _sm90(
        "cooperative",
        "barrier",
        "the last stage of a tile is never freed",
        "release(previous)",
        after="wait_group.sync.aligned(0)",
    ),
    _sm90("cooperative", "barrier", "stages are freed in the last step only", "if k > 0:", "if k > 1:", after=_LOOP90),
    _sm90(
        "cooperative",
        "barrier",
        "the cluster starts with a CTA barrier only",
        "T.cuda.cluster_sync()",
        "T.cuda.cta_sync()",
        after="fence.mbarrier_init",
    ),
    _sm90("cooperative", "barrier", "a CTA may leave while its peer uses it", "T.cuda.cluster_sync()", after=_LOOP90),
    _sm90("ping-pong", "barrier", "nothing separates barrier setup from use", "T.cuda.cta_sync()"),
    _sm90(
        "cooperative",
        "barrier",
        "no barrier before D is staged again",
        "T.cuda.warpgroup_sync(warpgroup_barrier(wg_id))",
        after=_WRITE90,
    ),
    _sm90(
        "cooperative",
        "barrier",
        "no barrier between staging D and its store",
        "T.cuda.warpgroup_sync(warpgroup_barrier(wg_id))",
        after="stage_rows(e) T.ptx.fence",
    ),
    _sm90(
        "cooperative",
        "barrier",
        "two warpgroups share a named barrier",
        "warpgroup_barrier(wg_id)",
        "warpgroup_barrier(0)",
        after=_WRITE90,
        every=True,
    ),
    _sm90("ping-pong", "barrier", "the turn is never passed on", "order.pass_turn(consumer)"),
    _sm90("ping-pong", "barrier", "the first turn is never given", "order.pass_turn(1)"),
    _sm90(
        "ping-pong", "barrier", "the turn is passed to oneself", "order.pass_turn(consumer)", "order.pass_turn(1 - consumer)"
    ),
    # --- TMA stores
    _sm90(
        "cooperative",
        "store",
        "the previous store's read is not waited for",
        "T.ptx.cp.async_.bulk.wait_group.read(0)",
        after=_WRITE90,
    ),
    _sm90("cooperative", "store", "stores are never committed", "T.ptx.cp.async_.bulk.commit_group()"),
    # --- register budget
    _sm90(
        "cooperative",
        "allocation",
        "consumers ask for more registers than there are",
        "setmaxnreg.inc.sync.aligned.u32(REGISTERS[1])",
        "setmaxnreg.inc.sync.aligned.u32(256)",
    ),
    _sm90(
        "cooperative", "allocation", "the producer keeps its registers", "T.ptx.setmaxnreg.dec.sync.aligned.u32(REGISTERS[0])"
    ),
    _sm90(
        "cooperative",
        "allocation",
        "the producer gives back registers that it does not hold",
        "setmaxnreg.dec.sync.aligned.u32(REGISTERS[0])",
        "setmaxnreg.dec.sync.aligned.u32(REGISTERS[1])",
    ),
    # --- indices
    _sm90("cooperative", "index", "both halves of B go to one place", "cta_rank * RHS_PART", "0 * RHS_PART"),
    _sm90("cooperative", "index", "both CTAs load the same half of B", "tile_col + cta_rank * (BLK_N // GROUP)", "tile_col"),
    _sm90(
        "cooperative",
        "index",
        "both consumers multiply the same rows",
        "lhs_smem.ptr_to([0, own_row * BLK_K])",
        "lhs_smem.ptr_to([0, 0])",
    ),
    _sm90(
        "tall",
        "index",
        "both blocks of a consumer multiply the same rows",
        "(mb * MMA_M * BLK_K + kk * MMA_K) // 8",
        "(kk * MMA_K) // 8",
    ),
    _sm90("tall", "index", "A does not advance along K", "(mb * MMA_M * BLK_K + kk * MMA_K) // 8", "(mb * MMA_M * BLK_K) // 8"),
    _sm90(
        "tall",
        "index",
        "B does not advance along K",
        "ring.stage * (RHS_STAGE // 8) + kk * MMA_K // 8",
        "ring.stage * (RHS_STAGE // 8)",
    ),
    _sm90("tall", "index", "B always comes from stage 0", "ring.stage * (RHS_STAGE // 8) + kk * MMA_K // 8", "kk * MMA_K // 8"),
    _sm90("tall", "index", "accumulation starts anew within the first step", "(step + kk) != 0", "step != 0"),
    _sm90("tall", "index", "accumulation never starts anew", "(step + kk) != 0", "(step + kk) >= 0"),
    _sm90("cooperative", "index", "both consumers store the same rows of D", "row0 + own_row, at", "row0, at"),
    _sm90(
        "cooperative",
        "index",
        "all store steps go to the same columns",
        "+ e * EPI_N)",
        "+ 0 * e)",
        after="own_col = T.meta_var(col0",
    ),
    _sm90(
        "cooperative",
        "index",
        "staging ignores the store's swizzle",
        "(2 * j + lane_id // 16) ^ swizzle",
        "(2 * j + lane_id // 16)",
    ),
    _sm90(
        "cooperative",
        "index",
        "all warps stage the same rows",
        "mb * MMA_M + warp_id * 16 + lane_id % 16",
        "mb * MMA_M + lane_id % 16",
    ),
    _sm90(
        "swapped",
        "index",
        "the transposed tile's swizzle is wrong",
        "(warp_id * 2 + lane_id // 8 % 2) ^ (lane_id % 8)",
        "(warp_id * 2 + lane_id // 8 % 2)",
    ),
    _sm90(
        "swapped",
        "index",
        "rows of the transposed tile repeat",
        "j * 16 + lane_id // 16 * 8 + lane_id % 8",
        "j * 16 + lane_id % 8",
    ),
    # --- and some more of each
    _sm90(
        "ping-pong",
        "allocation",
        "the ring lies over the barriers",
        "pool.move_base_to(SMEM_HEADER_BYTES)",
        "pool.move_base_to(0)",
    ),
    _sm90(
        "cooperative",
        "count",
        "a stage is freed twice",
        "mma2tma.arrive(stage, remote=thread)",
        "mma2tma.arrive(stage, remote=thread); mma2tma.arrive(stage, remote=thread)",
    ),
    _sm90(
        "cooperative",
        "role",
        "a thread of every warp frees the stage",
        "thread = T.meta_var(warp_id * 32 + lane_id)",
        "thread = T.meta_var(lane_id)",
    ),
    _sm90("ping-pong", "phase", "ping-pong consumers skip one tile only", "if PINGPONG:  # and pass", "if False:  # and pass"),
    _sm90(
        "ping-pong",
        "index",
        "both ping-pong consumers stage D in one place",
        "out_smem.ptr_to([consumer,",
        "out_smem.ptr_to([0,",
        every=True,
    ),
    _sm90(
        "cooperative",
        "mask",
        "loads are reported one stage too late",
        "tma2mma.ptr_to([stage])",
        "tma2mma.ptr_to([(stage + 1) % DEPTH])",
    ),
    # --- slices of K
    _sm90("split", "index", "every slice multiplies the first part of K", "sched.k_slice * slice_steps if SPLIT else 0", "0"),
    _sm90(
        "three slices",
        "index",
        "slices leave their sums in one place",
        "(tile * slices + of) * CONSUMERS",
        "(tile * slices) * CONSUMERS",
    ),
    _sm90("split", "index", "tiles leave their sums in one place", "(tile * slices + of) * CONSUMERS", "(of) * CONSUMERS"),
    _sm90("split", "index", "threads' sums overlap", "first + i * (WARPGROUP * 4)", "first + i * WARPGROUP", after=_PUT90),
    _sm90("split", "index", "slice 0 is taken for the own one", "if other == slice0:", "if other == 0:"),
    _sm90("split", "index", "sums of earlier slices are dropped", _ADD90, _ADD90.replace("total[i] + ", "")),
    _sm90(
        "split",
        "index",
        "all tiles count in one place",
        "workspace.ptr_to([tile0 * CONSUMERS + consumer])",
        "workspace.ptr_to([consumer])",
    ),
    _sm90(
        "split",
        "index",
        "a slice takes the next one's steps too",
        "T.min(slice_steps, k_steps - first_step)",
        "(k_steps - first_step)",
    ),
    _sm90(
        "split", "count", "the last slice but one adds the sums", 'T.Cast("uint32", slices - 1)', 'T.Cast("uint32", slices - 2)'
    ),
    _sm90("split", "count", "a slice counts itself twice", "T.uint32(1))", "T.uint32(2))", after=_COUNT90),
    _sm90("split", "role", "every warp counts its slice in", "if thread == 0:", "if lane_id == 0:", after=_COUNT90),
    _sm90(
        "split",
        "role",
        "every slice writes the tile",
        "if last[0] != T.uint32(0):",
        "if last[0] >= T.uint32(0):",
        after="if SPLIT: find_last()",
    ),
    _sm90(
        "split",
        "store",
        "counters are not cleared for the next launch",
        "T.ptx[_CLEAR](workspace.ptr_to([tile0 * CONSUMERS + consumer]), T.uint32(0))",
    ),
    _sm90(
        "split", "store", "sums are left for the next launch", "T.ptx[_EMPTY](at, T.uint32(0)", "T.ptx[_EMPTY](at, T.uint32(1)"
    ),
    _sm90("split", "barrier", "sums are not waited for", _UNTIL90, "while least[0] != least[0]:"),
    _sm90("split", "barrier", "one word in four of a sum is waited for", "T.unroll(CHUNK - 1):", "T.unroll(CHUNK // 4 - 1):"),
    _sm90("split", "barrier", "one word of a sum is waited for", "T.unroll(CHUNK - 1):", "T.unroll(0):"),
    _sm90("split", "barrier", "sums are looked at twice at most", _UNTIL90, "if least[0] == T.uint32(0):"),
    _sm90("split", "index", "a sum of zero looks like none", "T.float32(-0.0)", "T.float32(0.0)"),
    _sm90("split", "role", "slices leave no sums", "put_sums()", after="if SPLIT: find_last()"),
    # --- and once more
    _sm90(
        "cooperative",
        "count",
        "a stage is free at the first arrival",
        "mma2tma.init((1 if PINGPONG else CONSUMERS) * GROUP)",
        "mma2tma.init(1)",
    ),
    _sm90(
        "ping-pong",
        "count",
        "a stage waits for the consumer that does not read it",
        "mma2tma.init((1 if PINGPONG else CONSUMERS) * GROUP)",
        "mma2tma.init(CONSUMERS * GROUP)",
    ),
    _sm90("tall", "bytes", "a stage's bytes are never announced", "tma2mma.arrive(stage, stage_bytes)"),
    _sm90("cooperative", "mask", "B goes to one CTA only", "T.uint16((1 << GROUP) - 1)", "T.uint16(2)"),
    _sm90(
        "cooperative",
        "fence",
        "neither fence after the barriers are set up",
        "T.ptx.fence.proxy.async_.shared__cta() T.ptx.fence.mbarrier_init.release.cluster()",
    ),
    _sm90(
        "tall",
        "fence",
        "the last step's MMAs are still in flight",
        "T.ptx.wgmma.wait_group.sync.aligned(0)",
        "T.ptx.wgmma.wait_group.sync.aligned(1)",
    ),
    _sm90("cooperative", "barrier", "only a tile's last stage is freed", "release(previous)", after=_LOOP90),
    _sm90(
        "cooperative",
        "barrier",
        "consumers wait for the next stage",
        "tma2mma.wait(ring.stage, ring.phase)",
        "tma2mma.wait((ring.stage + 1) % DEPTH, ring.phase)",
    ),
    _sm90("ping-pong", "barrier", "ping-pong consumers do not wait for their turn", "order.wait(consumer)"),
    _sm90(
        "ping-pong",
        "phase",
        "the first ping-pong consumer starts at the second tile",
        "if consumer == 1:",
        "if consumer == 0:",
        after="if PINGPONG: # noqa",
    ),
    _sm90(
        "ping-pong",
        "phase",
        "ping-pong passes over one stage too few",
        "skip(ring, steps, DEPTH)",
        "skip(ring, steps - 1, DEPTH)",
        after="def next_tile",
    ),
    _sm90("cooperative", "phase", "the producer never goes on to the next tile", "sched.next_tile()", after=_PRODUCER90),
    _sm90("cooperative", "phase", "consumers never go on to the next tile", "next_tile()", after=_LOOP90),
    _sm90(
        "cooperative",
        "store",
        "one store too many may be in flight",
        "T.ptx.cp.async_.bulk.wait_group.read(0)",
        "T.ptx.cp.async_.bulk.wait_group.read(1)",
        after=_WRITE90,
    ),
    _sm90(
        "cooperative",
        "store",
        "another thread waits for the store's read",
        "if thread == 0: T.ptx.cp.async_.bulk.wait_group.read(0)",
        "if thread == 1: T.ptx.cp.async_.bulk.wait_group.read(0)",
        after=_WRITE90,
    ),
    _sm90(
        "cooperative",
        "store",
        "the last store's read is not waited for",
        "T.ptx.cp.async_.bulk.wait_group.read(0)",
        after="# Shared memory must outlive",
    ),
    _sm90(
        "tall",
        "index",
        "A is loaded twice",
        "T.ptx[_LOAD](lhs_smem.ptr_to([stage, 0]), T.address_of(lhs_map), k_at, tile_row, full)",
        "for _ in T.serial(2): T.ptx[_LOAD](lhs_smem.ptr_to([stage, 0]), T.address_of(lhs_map), k_at, tile_row, full)",
    ),
    _sm90(
        "tall",
        "index",
        "B advances by half a step",
        "(RHS_STAGE // 8) + kk * MMA_K // 8",
        "(RHS_STAGE // 8) + kk * MMA_K // 16",
    ),
    _sm90(
        "tall",
        "index",
        "B's descriptor names another swizzle",
        "rhs_smem.ptr_to([0, 0]), 1, 64, 3)",
        "rhs_smem.ptr_to([0, 0]), 1, 64, 2)",
    ),
    _sm90(
        "tall",
        "index",
        "B's descriptor names another stride",
        "rhs_smem.ptr_to([0, 0]), 1, 64, 3)",
        "rhs_smem.ptr_to([0, 0]), 1, 32, 3)",
    ),
    _sm90(
        "tall",
        "index",
        "B is loaded without a swizzle",
        "BLK_K, rhs_box, 1, 1, 0, 3, 2, 0)",
        "BLK_K, rhs_box, 1, 1, 0, 0, 2, 0)",
    ),
    _sm90("tall", "index", "rows are staged in half of the place", "warp_id * 16 + lane_id % 16", "warp_id * 16 + lane_id % 8"),
    _sm90("swapped", "index", "the transposed tile is not transposed", "'.trans' if SWAP else ''", "''"),
    # --- loads before the CTA's barrier
    _sm90("tall", "index", "early loads are repeated", "load(fill.stage, early + k)", "load(fill.stage, k)"),
    _sm90("tall", "index", "early loads are taken off every tile", "early = 0", after=_PRODUCER90),
    _sm90("tall", "phase", "the stages of early loads are not passed over", "fill.stage = early"),
    _sm90("tall", "role", "both warpgroups load early", "if wg_id == 0:", "if wg_id >= 0:", after="early = T.min"),
    # --- programmatic dependent launch
    _sm90("cooperative", "launch", "the previous kernel is not waited for", _PREVIOUS90, every=True),
    _sm90(
        "split", "launch", "the previous kernel is waited for where no CTA comes", _PREVIOUS90, f"if bx >= grid: {_PREVIOUS90}"
    ),
    _sm90(
        "cooperative",
        "launch",
        "one CTA of a pair waits for the previous kernel",
        _PREVIOUS90,
        f"if cta_rank == 0: {_PREVIOUS90}",
        after=_PRODUCER90,
    ),
    _sm90("split", "launch", "one CTA waits for the previous kernel", _PREVIOUS90, f"if bx == 0: {_PREVIOUS90}"),
    _sm90(
        "tall",
        "launch",
        "the previous kernel is waited for after the first loads",
        _PREVIOUS90,
        also=(("fill.advance()", f"fill.advance(); {_PREVIOUS90}"),),
    ),
    _sm90(
        "ping-pong",
        "launch",
        "the previous kernel is waited for after the first tile",
        _PREVIOUS90,
        also=(("early = 0 sched.next_tile()", f"early = 0; sched.next_tile(); {_PREVIOUS90}"),),
    ),
    _sm90(
        "cooperative",
        "launch",
        "consumers wait for the previous kernel in place of the producer",
        _PREVIOUS90,
        after=_PRODUCER90,
        also=(("ring = PipelineState(DEPTH, phase=0)", f"ring = PipelineState(DEPTH, phase=0); {_PREVIOUS90}"),),
    ),
    _sm90(
        "tall",
        "launch",
        "another warp waits for the previous kernel",
        _PREVIOUS90,
        also=(("if wg_id == 0:", f"if wg_id == 1: {_PREVIOUS90}\n            if wg_id == 0:"),),
    ),
    # --- local variables
    _sm90("cooperative", "register", "the number of early loads is never set", "early = 0"),
    _sm90("tall", "register", "the previous stage is never noted", "previous = ring.stage"),
    _sm90("tall", "register", "the tile's row is never noted", "row0 = tile_row"),
    _sm90("tall", "register", "A's descriptor is never made", "T.address_of(lhs_desc[0])", "T.address_of(rhs_desc[0])"),
    _sm90("tall", "register", "accumulators are never converted", "T.ptx[CONVERT](packed[q], acc[i + 1], acc[i])"),
    _sm90("split", "register", "the sum starts from nothing", "total[i] = T.float32(0)"),
    _sm90("split", "register", "threads that do not count have no number", "before[0] = T.uint32(0xFFFFFFFF)"),
    _sm90(
        "split",
        "register",
        "sums are never read",
        "T.ptx[_TAKE](term[s, j], term[s, j + 1], term[s, j + 2], term[s, j + 3], at)",
    ),
    _sm90("split", "register", "the tile's number is never noted", "tile0 = sched.tile_idx"),
)

MUTATIONS: Final[tuple[Mutation, ...]] = SM100 + SM90
