"""What a Config costs and covers: tile geometry, shared memory, TMEM, registers, threads. Derived, never stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .arch import ArchName
from .config import Config
from .dtypes import dtype as lookup_dtype

# Slices of K whose partial sums a thread has in flight at once, at most: few kernels are worth splitting into more than four.
MAX_IN_FLIGHT: Final = 3

# Barriers, the TMEM address and alignment of the stage ring to 1024 B (the 128-byte swizzle repeats every 1024 B:
# PTX ISA, "Shared memory swizzle") fit in this many bytes before the ring.
SMEM_HEADER_BYTES: Final = 1024
THREADS_PER_WARPGROUP: Final = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Which part of D one CTA and one cluster compute.

    Attributes:
        cta_rows, cta_cols: rows and columns of D per CTA.
        cluster_rows, cluster_cols: rows and columns of D per cluster, the unit the scheduler hands out.
        consumer_rows: rows one consumer accumulates.
        cluster_ctas: CTAs per cluster.
    """

    cta_rows: int
    cta_cols: int
    cluster_rows: int
    cluster_cols: int
    consumer_rows: int
    cluster_ctas: int


def geometry(config: Config, arch_name: ArchName) -> Geometry:
    """Return the tile geometry of ``config`` on ``arch_name`` (before a swap of A and B)."""
    ctas = config.cta_group
    if arch_name == "sm_100a":
        # A tcgen05 pair splits M between its CTAs and lets both read the B halves: each CTA holds BLK_N rows of B
        # and all CTA_GROUP*BLK_N columns of its accumulator (PTX ISA, "tcgen05.mma", cta_group::2).
        rows, cols = config.num_consumer * config.blk_m, ctas * config.blk_n
        return Geometry(
            cta_rows=rows, cta_cols=cols, cluster_rows=ctas * rows, cluster_cols=cols,
            consumer_rows=config.blk_m, cluster_ctas=ctas,
        )  # fmt: skip
    per_consumer = config.blk_m if config.pingpong else config.blk_m // max(1, config.num_consumer)
    return Geometry(
        cta_rows=config.blk_m, cta_cols=config.blk_n, cluster_rows=ctas * config.blk_m, cluster_cols=config.blk_n,
        consumer_rows=per_consumer, cluster_ctas=ctas,
    )  # fmt: skip


def threads(config: Config) -> int:
    """Return threads per CTA: one warpgroup per consumer and one that loads (and, on sm_100a, issues MMAs)."""
    return (config.num_consumer + 1) * THREADS_PER_WARPGROUP


def stage_bytes(config: Config, arch_name: ArchName, dtype: str) -> int:
    """Return shared-memory bytes of one ring stage: the A tile and the B tile of one CTA."""
    rows_a = config.blk_m * (config.num_consumer if arch_name == "sm_100a" else 1)
    return (rows_a + config.blk_n) * config.blk_k * lookup_dtype(dtype).bytes


def epilogue_bytes(config: Config, arch_name: ArchName, dtype: str) -> int:
    """Return shared-memory bytes in which the consumers stage D for the TMA store: EPI_N columns each."""
    rows = geometry(config, arch_name).consumer_rows * config.num_consumer
    return rows * config.epi_n * lookup_dtype(dtype).bytes


def store_box(config: Config) -> int:
    """Return columns of D per TMA store box on sm_90a: the widest swizzle span that fits EPI_N (or one MMA's 64 rows of B)."""
    return 64 if config.swap_ab else next((box for box in (64, 32) if config.epi_n % box == 0), 16)


def smem_bytes(config: Config, arch_name: ArchName, dtype: str) -> int:
    """Return dynamic shared memory of one CTA in bytes."""
    ring = config.pipe_depth * stage_bytes(config, arch_name, dtype)
    return SMEM_HEADER_BYTES + ring + epilogue_bytes(config, arch_name, dtype)


def tmem_columns(config: Config) -> int:
    """Return TMEM columns the accumulators of one CTA occupy (sm_100a)."""
    return config.num_consumer * config.tmem_buffers * config.cta_group * config.blk_n


def accumulator_registers(config: Config) -> int:
    """Return float32 accumulator registers per consumer thread (sm_90a, where wgmma accumulates in registers)."""
    rows = geometry(config, "sm_90a").consumer_rows
    return rows * config.blk_n // THREADS_PER_WARPGROUP


def slices_in_registers(config: Config) -> tuple[int, int]:
    """Return (accumulators of a consumer thread that are summed over the slices of K together, slices in flight); sm_90a.

    The sums and the terms in flight lie beside the accumulators, in what the compiler was seen to allot without spilling: 224
    registers of one consumer's thread, 192 of two's. More than 64 accumulators are summed in parts.
    """
    have = accumulator_registers(config)
    together = have if have <= 64 else max(n for n in range(4, 37, 4) if have % n == 0)
    in_flight = ((224 if config.num_consumer == 1 else 192) - have - together) // together if have <= 64 else 1
    return together, max(1, min(in_flight, MAX_IN_FLIGHT))


def register_split(config: Config) -> tuple[int, int] | None:
    """Return setmaxnreg values (producer, consumer) on sm_90a, or None where the launch value already suffices.

    24 and 40 are the floors used by CUTLASS-style kernels for a TMA warpgroup; the sums stay within the 64 Ki
    registers of an SM: 128*40 + 256*232 = 64512 and 128*32 + 384*160 = 65536.
    """
    return {1: None, 2: (40, 232), 3: (32, 160)}.get(config.num_consumer)
