"""Check a kernel on the CPU: execute it under several schedules, compare its numbers, report every fault found."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..arch import DEFAULT_GPU, Arch, ArchName
from ..arch import arch as lookup_arch
from ..config import Config
from ..constraints import require_legal
from ..dtypes import DTYPES
from ..dtypes import dtype as lookup_dtype
from ..errors import InputError, MissingDependency, UnsupportedOp
from ..problem import Problem
from ..resources import geometry
from ..results import CheckReport, Finding, Level
from .compiler import Compiler
from .cost import CostTable, cost_table
from .machine import Machine
from .program import Program
from .ptx_ops import OPERATIONS, VALUES
from .registers import decode, encode
from .tile_ops import TILE_OPERATIONS

MODEL: Final = "simulator-1"
# Executing needs the arrays, a float64 reference and its operands; more than this share of free memory is refused.
_MEMORY_SHARE: Final = 0.5
# Steps of K in a tile, at least: on sm_90a more than a kernel loads before its CTA's barrier.
_FEWEST_STEPS: Final[dict[ArchName, int]] = {"sm_90a": 4, "sm_100a": 2}
_INTEGERS: Final = 3  # exact test inputs are integers of at most this magnitude


# Instructions that one arch alone has (PTX ISA, target notes), as the machine's operations are called.
_ONLY_ON: Final[tuple[tuple[str, str, ArchName], ...]] = (
    ("wgmma", r"M\.wgmma", "sm_90a"),
    ("tcgen05", r"M\.(mma|tmem|tensor)_", "sm_100a"),
)


def compile_program(func: Any, arch: Arch, level: Level, barrier_names: Sequence[str] | None = None) -> Program:
    """Return ``func`` (a traced TIRx PrimFunc) compiled for execution at ``level``.

    Raises:
        UnsupportedOp: it uses an operation without a model; the text names it.
        InputError: it can't be lowered (``ptx``), is no device kernel, or one for another arch.
    """
    names = None if barrier_names is None else tuple(barrier_names)
    if not (hasattr(func, "params") and hasattr(func, "body")):
        raise InputError(f"func is {type(func).__name__}; give a traced PrimFunc (of an IRModule, one of its functions)")

    def compiled(body: Any, at: Level) -> Program:
        program = Compiler(body, at, OPERATIONS, VALUES, TILE_OPERATIONS, names).compile()
        for what, pattern, owner in _ONLY_ON:
            if arch.name != owner and re.search(pattern, program.source):
                raise InputError(f"the kernel uses {what}, which {arch.name} does not have; it is for {owner}")
        return program

    if level == "tile":
        return compiled(func, "tile")
    if level != "ptx":
        raise InputError(f"unknown level {level!r}; use tile or ptx")
    program = compiled(_lowered(func, arch), "ptx")
    try:  # lowering flattens buffers; the traced function still knows their shapes
        shaped = {b.offset: b for b in compiled(func, "tile").shared_buffers}
        program.shared_buffers = [shaped.get(b.offset, b) for b in program.shared_buffers]
    except UnsupportedOp:
        pass
    return program


def _lowered(func: Any, arch: Arch) -> Any:
    try:
        import tvm
        from tvm.tirx import transform
    except ImportError as error:
        raise MissingDependency(f"lowering kernels needs TVM ({error}); install autogemm[tune]") from error
    target = tvm.target.Target({"kind": "cuda", "arch": arch.name}).with_host("llvm")
    try:
        module = transform.BindTarget(target)(tvm.IRModule({"main": func}))
        return transform.LowerTIRx()(module)["main"]
    except Exception as error:  # TVM raises many types; each says why this function can't be lowered
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise InputError(f"TVM can't lower this kernel for {arch.name}: {' | '.join(lines[:3])[:400]}") from error


def check_primfunc(
    func: Any,
    *,
    arch: Arch | str,
    inputs: Mapping[str, Any] | Sequence[Any],
    expected: Any = None,
    sm_count: int,
    scalars: Mapping[str, int] | None = None,
    level: Level = "tile",
    seeds: Sequence[int] = (0,),
    barrier_names: Sequence[str] | None = None,
    costs: CostTable | None = None,
    programmatic: bool | None = None,
    numerics: bool = True,
    race: bool = True,
) -> CheckReport:
    """Execute any PrimFunc of supported operations and return what is wrong with it.

    Args:
        func: traced TIRx PrimFunc; its tensors are float16 or bfloat16, its run-time extents come from the arrays.
        arch: ``sm_90a`` or ``sm_100a``.
        inputs: arrays by parameter name, or in parameter order. bfloat16 as ``ml_dtypes.bfloat16`` or as uint16 patterns.
            Buffers left out are outputs: they start as NaN.
        expected: what the output must hold: an array, or a mapping from output name to array. None: the float64 product
            ``A . B^T`` where the three buffers are a GEMM's, else numbers are not compared.
        sm_count: SMs of the GPU (kernel scalars of that name, and each cluster's share of L2 and DRAM).
        scalars: values of the run-time scalar parameters.
        level: ``tile`` executes the traced function, ``ptx`` the lowered one with real descriptors and swizzles.
        seeds: schedules; 0 has no random delays.
        barrier_names: names of the mbarrier arrays in allocation order, for the reports.
        costs: cost table; the arch's default GPU if left out.
        programmatic: the kernel is launched so that it may start while the one before on the stream runs, and must wait for
            that before it touches global memory. None: if it holds a ``griddepcontrol.wait`` at all.
        numerics, race: False leaves out the numbers, or the race detection.

    Raises:
        UnsupportedOp: an operation without a model.
        InputError: wrong shapes or types, missing scalars, too large for memory.
    """
    where = arch if isinstance(arch, Arch) else lookup_arch(arch)
    if sm_count < 1:
        raise InputError(f"sm_count must be at least 1, got {sm_count}")
    if isinstance(seeds, int) or not seeds or not all(isinstance(seed, (int, np.integer)) and seed >= 0 for seed in seeds):
        raise InputError(f"seeds must be one or more integers from 0 on, got {seeds!r}")
    program = compile_program(func, where, level, barrier_names)
    if programmatic is not None:
        program.programmatic = programmatic
    binding = Binding(program, inputs, scalars or {}, sm_count, numerics)
    table = costs if costs is not None else cost_table(DEFAULT_GPU[where.name])
    reference = binding.reference(expected) if numerics else None
    merged: dict[tuple[str, Hashable], Finding] = {}
    worst, wrong, cycles = None, 0, 0.0
    for number, seed in enumerate(seeds):
        machine = Machine(
            program, arch=where, parameters=binding.parameters, arrays=binding.fresh(), shapes=binding.shapes, costs=table,
            seed=seed, numerics=numerics, race=race,
        )  # fmt: skip
        machine.run()
        if number == 0:
            cycles = machine.now
        stuck = any(not w.done for cluster in machine.clusters for w in cluster.warps)
        if reference is not None and not stuck:
            error, bad = _compare(machine, binding, reference)
            worst, wrong = max(worst or 0.0, error), max(wrong, bad)
        for key, finding in machine.findings.items():
            merged.setdefault((finding.kind, key), finding)
    return CheckReport(
        findings=tuple(merged.values()), level=level, shape=binding.gemm_shape, seeds=tuple(seeds), max_error=worst,
        wrong_elements=wrong, cycles=cycles, model=MODEL,
    )  # fmt: skip


class Binding:
    """A program's parameters bound to arrays and numbers.

    Attributes:
        parameters: run-time scalars and extents by name.
        shapes: shape of every buffer.
        outputs: buffers not given as inputs, in parameter order.
    """

    def __init__(self, program: Program, inputs: Mapping[str, Any] | Sequence[Any], scalars: Mapping[str, int], sm_count: int,
                 numerics: bool) -> None:  # fmt: skip
        self.program = program
        names = [b.name for b in program.buffers]
        if not isinstance(inputs, (Mapping, Sequence)) or isinstance(inputs, str):
            raise InputError(f"inputs is {type(inputs).__name__}; give arrays by name or in parameter order")
        if not isinstance(inputs, Mapping):
            if len(inputs) > len(names):
                raise InputError(f"{len(inputs)} arrays given; the kernel takes {len(names)}: {', '.join(names)}")
            inputs = dict(zip(names, inputs, strict=False))
        by_name = {self._match(name, names): array for name, array in inputs.items()}
        self.parameters: dict[str, int] = {}
        self.given: dict[str, npt.NDArray[np.uint16]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        extents: dict[str, tuple[int, str]] = {}
        known = {**{"sm_count": sm_count}, **scalars}
        for name, given in known.items():
            if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
                raise InputError(f"scalar {name} must be an integer, got {given!r}")
        for buffer in program.buffers:
            if buffer.dtype not in DTYPES:
                raise UnsupportedOp(f"global buffer {buffer.name} of {buffer.dtype}; modelled: {', '.join(DTYPES)}")
            if buffer.name in by_name:
                bits = _bits(buffer.name, by_name[buffer.name], buffer.dtype)
                if bits.ndim != len(buffer.shape):
                    raise InputError(
                        f"{buffer.name} has {bits.ndim} dimensions; the kernel takes {len(buffer.shape)}: {buffer.shape}"
                    )
                for axis, (extent, got) in enumerate(zip(buffer.shape, bits.shape, strict=True)):
                    if isinstance(extent, int):
                        if extent != got:
                            raise InputError(f"{buffer.name} has shape {bits.shape}; the kernel takes {buffer.shape}")
                    elif extent in extents and extents[extent][0] != got:
                        raise InputError(
                            f"{buffer.name} has {extent}={got} in dimension {axis}, but {extents[extent][1]} has "
                            f"{extents[extent][0]}"
                        )
                    else:
                        extents[extent] = (got, buffer.name)
                self.given[buffer.name] = bits
        for name, (value, source) in extents.items():
            if known.get(name, value) != value:
                raise InputError(f"{name}={known[name]} was given, but {source} has {value}")
            self.parameters[name] = value
        for buffer in program.buffers:
            missing = [e for e in buffer.shape if isinstance(e, str) and e not in extents and e not in known]
            if missing:
                raise InputError(
                    f"nothing tells {', '.join(missing)} of {buffer.name}{list(buffer.shape)}; give an array or a scalar"
                )
            shape = tuple(e if isinstance(e, int) else int(extents[e][0] if e in extents else known[e]) for e in buffer.shape)
            self.shapes[buffer.name] = shape
            self.parameters.update({e: n for e, n in zip(buffer.shape, shape, strict=True) if isinstance(e, str)})
        needed = [e for b in program.workspaces for e in b.shape if isinstance(e, str)]
        lacking = [name for name in (*(name for name, _ in program.scalars), *needed) if name not in known]
        if lacking:
            raise InputError(f"the kernel needs scalars {', '.join(lacking)}; pass scalars={{name: value}}")
        self.parameters.update({name: int(known[name]) for name in (*(name for name, _ in program.scalars), *needed)})
        self.outputs = [b for b in program.buffers if b.name not in self.given]
        self.gemm_shape = self._gemm_shape()
        if numerics:
            self._fits()

    @staticmethod
    def _match(name: str, names: Sequence[str]) -> str:
        if name in names:
            return name
        close = [n for n in names if n.lower() == name.lower()]
        if len(close) != 1:
            raise InputError(f"the kernel has no buffer {name!r}; it takes {', '.join(names)}")
        return close[0]

    def _gemm_shape(self) -> tuple[int, int, int] | None:
        shapes = [self.shapes[b.name] for b in self.program.buffers]
        if len(shapes) != 3 or any(len(s) != 2 for s in shapes) or len(self.outputs) != 1:
            return None
        if self.outputs[0].name != self.program.buffers[2].name:
            return None
        (m, k), (n, k2), d = shapes
        return (m, n, k) if k == k2 and d == (m, n) else None

    def _fits(self) -> None:
        elements = sum(int(np.prod(s)) for s in self.shapes.values())
        need = elements * (2 + 8) + sum(int(np.prod(self.shapes[b.name])) for b in self.outputs) * 24
        limit = memory_limit()
        if need > limit:
            raise InputError(
                f"executing at shapes {list(self.shapes.values())} needs about {need >> 20} MiB; "
                f"{limit >> 20} MiB are at hand; "
                "check a smaller shape"
            )

    def fresh(self) -> dict[str, npt.NDArray[np.uint16] | None]:
        """Return the arrays for one execution: inputs as given, outputs poisoned with NaN."""
        outputs = {b.name: np.full(self.shapes[b.name], 0x7FFF, np.uint16) for b in self.outputs}
        return {**self.given, **outputs}

    def reference(
        self, expected: Any
    ) -> dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64] | None, bool]] | None:
        """Return per output (values, scale of rounding errors or None, compare exactly)."""
        integral = all(_integral(decode(bits, self._dtype(name))) for name, bits in self.given.items())
        if expected is None:
            if self.gemm_shape is None:
                return None
            a, b = (decode(self.given[x.name], x.dtype).astype(np.float64) for x in self.program.buffers[:2])
            with np.errstate(invalid="ignore"):  # infinite inputs give NaN
                values, scale = a @ b.T, np.abs(a) @ np.abs(b).T
            # Integers: every partial sum is exact in float32 as long as it stays below 2^24.
            exact = integral and float(scale.max(initial=0.0)) <= 2.0**24
            return {self.outputs[0].name: (values, scale, exact)}
        if not isinstance(expected, Mapping):
            if len(self.outputs) != 1:
                raise InputError(
                    f"expected must map output names to arrays: the kernel has outputs "
                    f"{', '.join(b.name for b in self.outputs)}"
                )
            expected = {self.outputs[0].name: expected}
        result: dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64] | None, bool]] = {}
        for name, array in expected.items():
            output = self._match(name, [b.name for b in self.outputs])
            bits = np.asarray(array)
            if bits.dtype.kind not in "fiu" and str(bits.dtype) not in DTYPES:
                raise InputError(f"expected {output} is {bits.dtype}; give an array of numbers")
            values = bits.astype(np.float64)
            if values.shape != self.shapes[output]:
                raise InputError(f"expected {output} has shape {values.shape}; the kernel writes {self.shapes[output]}")
            exact = integral and _integral(values) and float(np.abs(values).max(initial=0.0)) <= 2.0**24
            result[output] = (values, None, exact)
        return result

    def _dtype(self, name: str) -> str:
        return next(b.dtype for b in self.program.buffers if b.name == name)


def memory_limit() -> int:
    """Return how many bytes an execution may take: a share of what the system has free."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        free = 8 << 30
    return int(free * _MEMORY_SHARE)


def _bits(name: str, array: Any, dtype: str) -> npt.NDArray[np.uint16]:
    values = np.ascontiguousarray(array)
    found = str(values.dtype)
    if found == dtype:
        return values.view(np.uint16)
    if dtype == "bfloat16" and found == "uint16":
        return values.astype(np.uint16, copy=False)
    raise InputError(
        f"{name} is {found}; the kernel takes {dtype}"
        + (" (ml_dtypes.bfloat16, or uint16 patterns)" if dtype == "bfloat16" else "")
    )


def _integral(values: npt.NDArray[Any]) -> bool:
    return bool(np.isfinite(values).all() and (values == np.rint(values)).all())


def _compare(machine: Machine, binding: Binding, reference: Mapping[str, tuple[Any, Any, bool]]) -> tuple[float, int]:
    """Compare the outputs; add findings to the machine; return (largest error, wrong elements)."""
    worst, total = 0.0, 0
    for name, (values, scale, exact) in reference.items():
        dtype = binding._dtype(name)
        bits = machine.arrays[name]
        assert bits is not None
        got = decode(bits, dtype)
        if exact:
            bad = got != decode(encode(values.astype(np.float32), dtype).reshape(values.shape), dtype)
        else:
            # Half a unit in the last place of the output, and float32 accumulation in any order.
            size = np.abs(values) if scale is None else scale
            spread = float(np.sqrt(np.mean(np.square(values)))) if scale is None else 0.0
            unit = 2.0 ** -lookup_dtype(dtype).significand_bits
            slack = unit * np.abs(values) * 1.01 + 2.0**-20 * size + unit * spread + 2.0**-24
            with np.errstate(invalid="ignore"):
                bad = ~(np.abs(got - values) <= slack)
            overflow = np.abs(values) > (65504.0 if dtype == "float16" else 3.38e38)
            bad &= ~(overflow & np.isinf(got))
        bad &= ~(np.isnan(values) & np.isnan(got))  # as the inputs demand
        with np.errstate(invalid="ignore"):
            errors = np.abs(got - values)
        finite = errors[np.isfinite(errors)]
        worst = max(worst, float(finite.max()) if finite.size else 0.0)
        count = int(bad.sum())
        total += count
        if count:
            machine.found("wrong_result", ("numbers", name), _wrong_text(name, got, values, bad, count))
            if np.isnan(got[bad]).any():
                for key, finding in machine.poisoned.items():
                    machine.found(finding.kind, key, finding.text.__str__)
    return worst, total


def _wrong_text(name: str, got: Any, values: Any, bad: Any, count: int) -> Callable[[], str]:
    index = np.argwhere(bad)
    low, high = index.min(axis=0), index.max(axis=0) + 1
    first = tuple(int(i) for i in index[0])
    box = ", ".join(f"{a}:{b}" for a, b in zip(low, high, strict=True))
    nan = int(np.isnan(got[bad]).sum())
    text = (
        f"{count} of {bad.size} elements of {name} are wrong, all within {name}[{box}]; first {name}{list(first)} = "
        f"{got[first]:g}, expected {values[first]:g}"
        + (f"; {nan} are NaN (never written, or computed from memory no one wrote)" if nan else "")
    )
    return text.__str__


# ---- generated kernels


def exercising_shape(config: Config, arch_name: ArchName) -> tuple[int, int, int, int]:
    """Return (M, N, K, sm_count) at which two clusters take four ragged tiles each and wrap the ring at least twice.

    Where tiles are split into slices of K there are three clusters, so that one tile's slices go to different ones.
    """
    tile = geometry(config, arch_name)
    rows, cols = tile.cluster_rows, tile.cluster_cols
    along_m, along_n = (cols, rows) if config.swap_ab else (rows, cols)
    m, n = _ragged(along_m, 2), _ragged(along_n, 4)
    steps = max(_FEWEST_STEPS[arch_name], -(-(2 * config.pipe_depth + 1) // 4))
    k = (steps * config.split_k - 1) * config.blk_k + 24
    return max(1, m - 3), n, k, (2 if config.split_k == 1 else 3) * tile.cluster_ctas


def _ragged(tile: int, count: int) -> int:
    """Return an extent of ``count`` tiles whose last is a bit more than half full, a multiple of 8."""
    return (count - 1) * tile + max(8, (tile * 5 // 8) // 8 * 8)


def launch_scalars(
    config: Config, arch_name: ArchName, dtype: str, shape: tuple[int, int, int], sm_count: int
) -> dict[str, int]:
    """Return every launch variable and manifest scalar of a generated kernel, for contiguous operands."""
    from ..kernel import generate
    from ..manifest import evaluate

    m, n, k = shape
    values = {
        "M": m, "N": n, "K": k, "lda": k, "ldb": k, "ldd": n, "sm_count": sm_count, **config.launch._asdict(),
    }  # fmt: skip
    scalars, _, _, _ = generate._body(arch_name).manifest_parts(config.binary, dtype)
    for scalar in scalars:
        values[scalar.name] = evaluate(scalar.value, values)
    return values


def integer_inputs(shape: tuple[int, int, int], dtype: str, seed: int = 0) -> dict[str, npt.NDArray[np.uint16]]:
    """Return A [M,K] and B [N,K] of small integers as bit patterns: products are exact, and no two tiles are alike."""
    m, n, k = shape
    draw = np.random.default_rng(seed)
    return {
        name: encode(draw.integers(-_INTEGERS, _INTEGERS + 1, size).astype(np.float32), dtype)
        for name, size in (("A", (m, k)), ("B", (n, k)))
    }


def check_config(
    config: Config,
    arch_name: ArchName,
    *,
    shape: tuple[int, int, int] | None = None,
    dtype: str = "float16",
    level: Level = "tile",
    seeds: Sequence[int] = (0, 1, 2),
    sm_count: int | None = None,
    func: Any = None,
) -> CheckReport:
    """Execute the generated kernel of ``config`` and return what is wrong with it.

    Args:
        shape: (M, N, K); None for a small shape that exercises every role, ring wrap, several tiles per CTA and ragged edges.
        sm_count: SMs to occupy; left out, two clusters' worth.
        func: the kernel as ``prim_func`` traced it, if it is at hand.

    Raises:
        IllegalConfig: ``config`` breaks a rule of the arch.
        InputError: as ``check_primfunc``.
    """
    from ..kernel import generate

    dtype = lookup_dtype(dtype).name
    m, n, k, few = exercising_shape(config, arch_name)
    extents = (m, n, k) if shape is None else shape
    if len(extents) != 3:
        raise InputError(f"shape must be (M, N, K), got {extents!r}")
    require_legal(config, arch_name, Problem(m=extents[0], n=extents[1], k=extents[2], dtype=dtype), dtype=dtype)
    sms = few if sm_count is None else sm_count
    _refuse_large(extents)
    func = generate.prim_func(config, arch_name, dtype) if func is None else func
    inputs: dict[str, Any] = integer_inputs(extents, dtype)
    if dtype == "float16":
        inputs = {name: bits.view(np.float16) for name, bits in inputs.items()}
    return check_primfunc(
        func, arch=arch_name, inputs=inputs, sm_count=sms, scalars=launch_scalars(config, arch_name, dtype, extents, sms),
        level=level, seeds=seeds, barrier_names=generate.barrier_names(config, arch_name),
    )  # fmt: skip


def _refuse_large(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    need = (m * k + n * k) * 14 + m * n * 34
    if need > memory_limit():
        raise InputError(
            f"executing {m}x{n}x{k} needs about {need >> 20} MiB; {memory_limit() >> 20} MiB are at hand; check a smaller shape"
        )
