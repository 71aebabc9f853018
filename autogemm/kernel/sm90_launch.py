"""What the host knows of the sm_90a kernel: its sizes, and the Manifest's scalars, tensor maps, grid and workspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..config import Config
from ..dtypes import dtype as lookup_dtype
from ..manifest import Scalar, TensorMap
from ..resources import accumulator_registers, geometry, store_box
from .scheduler import raster_scalars

MMA_M: Final = 64  # rows of one wgmma (PTX ISA, wgmma.mma_async: m64nNk16)
WARPGROUP: Final = 128
ELEMENT_BYTES: Final = 2

# 128 B measured best or equal on large shapes. Kernels that mostly stream one operand from device memory ask for 256 B, so that
# a K step's 128-byte rows bring in the next step's.
L2_PROMOTION_BYTES: Final = 128
L2_PROMOTION_BYTES_STREAMING: Final = 256

# Counters come first in the workspace, padded to whole lines of 128 bytes.
_LINE_WORDS: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Sizes that the kernel text needs, derived from one Config; elements unless named otherwise."""

    consumer_rows: int  # rows of a tile that one consumer accumulates
    blocks: int  # 64-row MMAs on top of each other in one consumer
    block_regs: int  # accumulator registers of one such block
    cluster: int
    steps: int  # store steps of EPI_N
    box: int  # inner extent of one store box
    store_rows: int  # outer extent of one store box
    partial_words: int  # 32-bit words of one consumer's partial sums

    @classmethod
    def of(cls, c: Config) -> Plan:
        geo = geometry(c, "sm_90a")
        return cls(
            consumer_rows=geo.consumer_rows, blocks=geo.consumer_rows // MMA_M, block_regs=c.blk_n * MMA_M // WARPGROUP,
            cluster=geo.cluster_ctas, steps=c.blk_n // c.epi_n, box=store_box(c),
            store_rows=c.epi_n if c.swap_ab else geo.consumer_rows,
            partial_words=accumulator_registers(c) * WARPGROUP,
        )  # fmt: skip


def manifest_parts(config: Config, dtype: str) -> tuple[tuple[Scalar, ...], tuple[TensorMap, ...], str, str]:
    """Return (scalars, tensor maps, grid, workspace bytes) of the kernel's Manifest."""
    c, plan = config, Plan.of(config)
    rows, cols, ld_lhs, ld_rhs = ("N", "M", "ldb", "lda") if c.swap_ab else ("M", "N", "lda", "ldb")
    split = c.split_k > 1
    # A box that is mostly out of bounds costs as much as a full one (M = 16: 54 us against 38), so a box larger than the tensor
    # is cut to it, in whole swizzle atoms of 8 rows. Multicast halves are left alone: peers count their bytes.
    trims = c.cta_group == 1
    lhs_box = f"min({c.blk_m}, round_up({rows}, 8))" if trims else str(c.blk_m)
    rhs_box = f"min({c.blk_n}, round_up({cols}, 8))" if trims else str(c.blk_n // c.cta_group)
    row_bytes = c.blk_k * lookup_dtype(dtype).bytes
    scalars = (
        Scalar(name="lhs_box", value=lhs_box),
        Scalar(name="rhs_box", value=rhs_box),
        Scalar(name="out_box", value=f"min({plan.store_rows}, round_up(M, 8))"),
        Scalar(name="stage_bytes", value=f"(lhs_box + rhs_box * {c.cta_group}) * {row_bytes}"),
        Scalar(name="k_steps", value=f"ceildiv(K, {c.blk_k})"),
        Scalar(name="slice_steps", value="ceildiv(k_steps, split_k)" if split else "k_steps"),
        *raster_scalars(
            cluster_rows=c.cta_group * c.blk_m, cluster_cols=c.blk_n, cluster_ctas=plan.cluster, rows=rows, cols=cols,
            slices="ceildiv(k_steps, slice_steps)" if split else "1",  # at most split_k, and none of them empty
        ),
        Scalar(name="counter_words", value=f"round_up(tile_count * {c.num_consumer}, {_LINE_WORDS})" if split else "0"),
        Scalar(
            name="workspace_words",
            value=f"counter_words + item_count * {c.num_consumer * plan.partial_words}" if split else "0",
        ),
    )  # fmt: skip
    promotion = L2_PROMOTION_BYTES_STREAMING if c.swap_ab or split else L2_PROMOTION_BYTES
    maps = (
        TensorMap(
            name="lhs_map", operand="b" if c.swap_ab else "a", dims=("K", rows), strides_bytes=(f"{ld_lhs} * {ELEMENT_BYTES}",),
            box=(str(c.blk_k), "lhs_box"), swizzle_bytes=128, l2_promotion_bytes=promotion,
        ),
        TensorMap(
            name="rhs_map", operand="a" if c.swap_ab else "b", dims=("K", cols), strides_bytes=(f"{ld_rhs} * {ELEMENT_BYTES}",),
            box=(str(c.blk_k), "rhs_box"), swizzle_bytes=128, l2_promotion_bytes=promotion,
        ),
        TensorMap(
            name="out_map", operand="d", dims=("N", "M"), strides_bytes=(f"ldd * {ELEMENT_BYTES}",),
            box=(str(plan.box), "out_box"), swizzle_bytes=plan.box * ELEMENT_BYTES, l2_promotion_bytes=L2_PROMOTION_BYTES,
        ),
    )  # fmt: skip
    return scalars, maps, "grid", "workspace_words * 4" if split else "0"
