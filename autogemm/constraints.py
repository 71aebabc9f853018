"""The only legality rules, each with its reason and source; a check returns every broken rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .arch import ARCH_NAMES, ArchName, arch
from .config import KNOBS, Config
from .dtypes import dtype as lookup_dtype
from .errors import IllegalConfig
from .problem import Problem
from .resources import (
    accumulator_registers,
    geometry,
    register_split,
    smem_bytes,
    stage_bytes,
    tmem_columns,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One legality rule.

    Attributes:
        name: stable identifier.
        archs: where it applies.
        reason: why breaking it can't work.
        source: where the limit is stated.
        check: returns what is wrong (got, limit, next step), or None.
    """

    name: str
    archs: tuple[ArchName, ...]
    reason: str
    source: str
    check: Callable[[Config, ArchName, str], str | None]


_BOTH: Final = ARCH_NAMES
_SM90: Final[tuple[ArchName, ...]] = ("sm_90a",)
_SM100: Final[tuple[ArchName, ...]] = ("sm_100a",)

# setmaxnreg leaves a 2-consumer thread 232 registers and a 3-consumer thread 160; addresses, descriptors and the epilogue
# took about 24 of them in every compiled kernel, and 128x256 tiles on 3 consumers fail in ptxas with C7602.
_ACC_LIMIT: Final = {1: 192, 2: 192, 3: 96}
# Slices of K are summed beside the accumulators: 64x256 tiles on one consumer and 128x256 on two spill.
_SPLIT_LIMIT: Final = {1: 96, 2: 96, 3: 48}
MAX_SPLIT_K: Final = 16
_EPI_BOXES: Final = (16, 32, 64)


def _positive(c: Config, a: ArchName, d: str) -> str | None:
    bad = [f"{k.name}={getattr(c, k.field)}" for k in KNOBS.values()
           if not isinstance(k.default, bool) and getattr(c, k.field) < 1]  # fmt: skip
    return f"{', '.join(bad)} must be at least 1" if bad else None


def _foreign(c: Config, a: ArchName, d: str) -> str | None:
    bad = [f"{k.name}={getattr(c, k.field)}" for k in KNOBS.values() if a not in k.archs and getattr(c, k.field) != k.default]
    return f"{', '.join(bad)} has no meaning on {a}; leave it at its default" if bad else None


def _smem(c: Config, a: ArchName, d: str) -> str | None:
    need, limit = smem_bytes(c, a, d), arch(a).smem_bytes
    if need <= limit:
        return None
    fits = (limit - need) // stage_bytes(c, a, d) + c.pipe_depth
    hint = f"try PIPE_DEPTH={fits}" if fits >= 2 else "try smaller tiles"
    return f"PIPE_DEPTH={c.pipe_depth} needs {need} B of shared memory; {a} allows {limit}; {hint}"


def _depth(c: Config, a: ArchName, d: str) -> str | None:
    return f"PIPE_DEPTH={c.pipe_depth} can't overlap loads with MMAs; use at least 2" if c.pipe_depth < 2 else None


def _group(c: Config, a: ArchName, d: str) -> str | None:
    return f"CTA_GROUP={c.cta_group}; only 1 and 2 are generated" if c.cta_group not in (1, 2) else None


def _blk_k(c: Config, a: ArchName, d: str) -> str | None:
    span = 128 // lookup_dtype(d).bytes
    return f"BLK_K={c.blk_k}; the 128-byte swizzle spans {span} elements of {d}; use BLK_K={span}" if c.blk_k != span else None


def _epi_divides(c: Config, a: ArchName, d: str) -> str | None:
    cols = geometry(c, a).cta_cols
    return f"EPI_N={c.epi_n} does not divide the {cols} accumulator columns" if cols % c.epi_n else None


def _epi_box(c: Config, a: ArchName, d: str) -> str | None:
    if c.swap_ab:  # accumulator columns become rows of D, in boxes of whole swizzle atoms
        return f"EPI_N={c.epi_n} is no multiple of 8, the rows of a swizzle atom" if c.epi_n % 8 else None
    if any(c.epi_n % box == 0 for box in _EPI_BOXES):
        return None
    return f"EPI_N={c.epi_n} is no multiple of 16, the smallest swizzled store box"


def _tma_rows(c: Config, a: ArchName, d: str) -> str | None:
    bad = [f"{name}={rows}" for name, rows in (("BLK_M", c.blk_m), ("BLK_N", c.blk_n)) if rows > 256]
    return f"{', '.join(bad)}: a TMA box has at most 256 rows" if bad else None


def _umma(c: Config, a: ArchName, d: str) -> str | None:
    n = c.cta_group * c.blk_n
    if c.blk_m != 128:
        return f"BLK_M={c.blk_m}; the generator issues M={128 * c.cta_group} MMAs, so BLK_M must be 128"
    # A pair takes N in steps of 32: each CTA holds half of B's rows, and 16 rows are two whole 8-row swizzle atoms.
    if c.cta_group in (1, 2) and (n % (16 * c.cta_group) or not 16 <= n <= 256):
        return f"MMA N = CTA_GROUP*BLK_N = {n}; tcgen05.mma takes multiples of {16 * c.cta_group} up to 256"
    return None


def _tmem(c: Config, a: ArchName, d: str) -> str | None:
    need, limit = tmem_columns(c), arch(a).tmem_columns
    if need <= limit:
        return None
    return (f"NUM_CONSUMER*TMEM_BUFFERS*CTA_GROUP*BLK_N = {need} TMEM columns; {a} has {limit}; "
            "try TMEM_BUFFERS=1 or a smaller BLK_N")  # fmt: skip


def _tmem_load(c: Config, a: ArchName, d: str) -> str | None:
    if c.epi_n in (16, 32, 64, 128):
        return None
    return f"EPI_N={c.epi_n}; one 32x32b tcgen05.ld reads a power of two of columns, at most 128; use 16, 32, 64 or 128"


def _sm100_consumers(c: Config, a: ArchName, d: str) -> str | None:
    return f"NUM_CONSUMER={c.num_consumer}; 1 and 2 are generated on sm_100a" if c.num_consumer not in (1, 2) else None


def _tmem_buffers(c: Config, a: ArchName, d: str) -> str | None:
    return f"TMEM_BUFFERS={c.tmem_buffers}; 1 and 2 are generated" if c.tmem_buffers not in (1, 2) else None


def _wgmma(c: Config, a: ArchName, d: str) -> str | None:
    rows = geometry(c, a).consumer_rows
    split = "" if c.pingpong or c.num_consumer < 2 else f" split over {c.num_consumer} consumers"
    if rows < 64 or rows % 64 or (not c.pingpong and c.blk_m % max(1, c.num_consumer)):
        return f"BLK_M={c.blk_m}{split} leaves {rows} rows per consumer; wgmma takes multiples of 64"
    if c.blk_n % 8 or not 8 <= c.blk_n <= 256:
        return f"BLK_N={c.blk_n}; wgmma takes N in multiples of 8 from 8 to 256"
    return None


def _sm90_consumers(c: Config, a: ArchName, d: str) -> str | None:
    if c.num_consumer not in (1, 2, 3):
        return f"NUM_CONSUMER={c.num_consumer}; 1 to 3 consumer warpgroups are generated"
    if c.pingpong and c.num_consumer != 2:
        return f"PINGPONG needs NUM_CONSUMER=2, got {c.num_consumer}"
    return None


def _accumulators(c: Config, a: ArchName, d: str) -> str | None:
    need, limit = accumulator_registers(c), _ACC_LIMIT.get(c.num_consumer, 192)
    if c.split_k > 1 and need > _SPLIT_LIMIT.get(c.num_consumer, 96):
        return f"{need} accumulator registers per thread leave no room to sum slices of K; use a smaller tile or SPLIT_K=1"
    if need <= limit:
        return None
    consumer = (register_split(c) or (0, arch(a).max_registers))[1]
    return f"{need} accumulator registers per thread; {limit} fit beside the rest of {consumer}; use a smaller tile"


def _multicast(c: Config, a: ArchName, d: str) -> str | None:
    if c.cta_group == 2 and (c.blk_n // 2) % 8:
        return f"BLK_N={c.blk_n} with CTA_GROUP=2 gives halves of {c.blk_n // 2} rows; a swizzle atom has 8 rows"
    return None


def _split_k(c: Config, a: ArchName, d: str) -> str | None:
    if c.split_k == 1:
        return None
    if c.split_k > MAX_SPLIT_K:
        return f"SPLIT_K={c.split_k}; use 1 to {MAX_SPLIT_K}"
    if c.cta_group > 1 or c.pingpong:
        return f"SPLIT_K={c.split_k} with CTA_GROUP={c.cta_group}, PINGPONG={str(c.pingpong).lower()}; use 1 and false"
    return None


def _raster(c: Config, a: ArchName, d: str) -> str | None:
    return f"l2_group_size={c.l2_group_size}; use 1 to 64 tile rows" if c.l2_group_size > 64 else None


RULES: Final[tuple[Rule, ...]] = (
    Rule(name="positive", archs=_BOTH, check=_positive, reason="a knob counts something", source="definition"),
    Rule(name="foreign-knob", archs=_BOTH, check=_foreign, reason="the arch has no such mechanism", source="PTX ISA"),
    Rule(name="shared-memory", archs=_BOTH, check=_smem, reason="a CTA's ring and epilogue must fit",
         source="CUDA C++ Programming Guide, Compute Capabilities: 227 KiB per block"),
    Rule(name="pipe-depth", archs=_BOTH, check=_depth, reason="a ring of one stage serializes", source="measured: 0.66x at 2"),
    Rule(name="cta-group", archs=_BOTH, check=_group, reason="pairs only", source="PTX ISA, tcgen05 cta_group"),
    Rule(name="swizzle-span", archs=_BOTH, check=_blk_k, reason="the inner box must equal the swizzle span",
         source="PTX ISA, Tensor swizzling modes: inner dimension at most the swizzle size"),
    Rule(name="epilogue-divides", archs=_BOTH, check=_epi_divides, reason="each store step is full", source="definition"),
    Rule(name="epilogue-box", archs=_BOTH, check=_epi_box, reason="store boxes use 32-, 64- or 128-byte swizzle",
         source="PTX ISA, Tensor swizzling modes"),
    Rule(name="tma-box", archs=_BOTH, check=_tma_rows, reason="box extents are 8-bit",
         source="CUDA Driver API, cuTensorMapEncodeTiled: boxDim at most 256"),
    Rule(name="raster-group", archs=_BOTH, check=_raster, reason="larger groups change nothing", source="measured"),
    Rule(name="umma-shape", archs=_SM100, check=_umma, reason="no such instruction",
         source="PTX ISA, tcgen05.mma shapes for kind::f16"),
    Rule(name="sm100-consumers", archs=_SM100, check=_sm100_consumers, reason="two 256-column accumulators fill TMEM",
         source="PTX ISA, Tensor Memory"),
    Rule(name="tmem-buffers", archs=_SM100, check=_tmem_buffers, reason="more than two can't help", source="TMEM size"),
    Rule(name="tmem-columns", archs=_SM100, check=_tmem, reason="accumulators must fit", source="PTX ISA, Tensor Memory"),
    Rule(name="tmem-load", archs=_SM100, check=_tmem_load, reason="one load per store step",
         source="PTX ISA, tcgen05.ld: .32x32b with .x1 to .x128"),
    Rule(name="wgmma-shape", archs=_SM90, check=_wgmma, reason="no such instruction", source="PTX ISA, wgmma.mma_async shapes"),
    Rule(name="sm90-consumers", archs=_SM90, check=_sm90_consumers, reason="four warpgroups fill the register file",
         source="64 Ki registers per SM"),
    Rule(name="accumulator-registers", archs=_SM90, check=_accumulators, reason="more spill, or fail in ptxas (C7602)",
         source="measured with NVRTC 13.0; setmaxnreg, PTX ISA"),
    Rule(name="multicast-halves", archs=_SM90, check=_multicast, reason="each CTA loads half of B",
         source="PTX ISA, 128-byte swizzle atom of 8 rows"),
    Rule(name="split-k", archs=_SM90, check=_split_k, reason="one work item is one CTA's slice of K",
         source="definition; beyond 16 slices the sums' traffic outweighs any gain"),
)  # fmt: skip


def violations(config: Config, arch_name: ArchName, problem: Problem | None = None, *, dtype: str = "float16") -> list[str]:
    """Return every legality rule that ``config`` breaks on ``arch_name``, as sentences; empty if legal.

    With a ``problem``, its type replaces ``dtype`` and its alignment is checked too.
    """
    d = problem.dtype if problem is not None else dtype
    broken = []
    for rule in RULES:
        if arch_name in rule.archs:
            text = rule.check(config, arch_name, d)
            if text is not None:
                broken.append(f"{text} [{rule.name}]")
                if rule.name == "positive":  # later rules divide by these
                    return broken
    if problem is not None:
        broken += problem_violations(problem)
    return broken


def problem_violations(problem: Problem) -> list[str]:
    """Return why no generated kernel can take ``problem``, as sentences; empty if one can.

    Row strides in bytes must be multiples of 16 (CUDA Driver API, cuTensorMapEncodeTiled: globalStrides).
    """
    size = lookup_dtype(problem.dtype).bytes
    broken = [
        f"{name}={extent}: {extent * size} bytes per row is not a multiple of 16, which TMA needs; "
        f"pad {name} to {-(-extent * size // 16) * 16 // size} [tma-alignment]"
        for name, extent in (("K", problem.k), ("N", problem.n))
        if extent * size % 16
    ]
    if problem.layout != "NT":
        broken.append(f"layout {problem.layout}: kernels are generated for NT (A [M,K], B [N,K], K contiguous) [layout]")
    return broken


def require_legal(config: Config, arch_name: ArchName, problem: Problem | None = None, *, dtype: str = "float16") -> None:
    """Raise if ``config`` is not legal.

    Raises:
        IllegalConfig: any rule fails; lists all.
    """
    broken = violations(config, arch_name, problem, dtype=dtype)
    if broken:
        raise IllegalConfig(f"config on {arch_name}" + (f" for {problem.shape}" if problem else ""), broken)
