"""PTX and CUDA intrinsics: what lowered kernels are made of, and the synchronization of traced ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from ..errors import UnsupportedOp
from .compiler import Compiler
from .program import ITEM_BYTES
from .state import OFFSET_MASK, WINDOW_BITS

Handler = Callable[[Compiler, Any], None]
ValueHandler = Callable[[Compiler, Any], "tuple[str, bool]"]


def _split(e: Any) -> tuple[list[str], list[Any]]:
    """Return (PTX modifiers, operands) of a call; absent modifiers are empty strings and dropped."""
    modifiers = [a.value for a in e.args if type(a).__name__ == "StringImm" and a.value]
    return modifiers, [a for a in e.args if type(a).__name__ != "StringImm"]


def _only(e: Any, modifiers: list[str], allowed: set[str]) -> None:
    unknown = [m for m in modifiers if m not in allowed]
    if unknown:
        raise UnsupportedOp(f"operation {e.op.name} with .{'.'.join(unknown)}")


def _simple(operation: str, *, operands: int, allowed: str) -> Handler:
    """Return a handler that passes its operands on, for one fixed set of modifiers."""

    def handler(c: Compiler, e: Any) -> None:
        modifiers, values = _split(e)
        _only(e, modifiers, set(allowed.split()))
        if len(values) != operands:
            raise UnsupportedOp(f"operation {e.op.name} with {len(values)} operands; modelled: {operands}")
        c.call(operation, *(c.expr(v) for v in values))

    return handler


# ---- values


def _pass_first(c: Compiler, e: Any) -> tuple[str, bool]:
    return c.value(e.args[0])


def _reinterpret(c: Compiler, e: Any) -> tuple[str, bool]:
    source, varies = c.value(e.args[0])
    target = str(e.ty)
    if target == "uint32x2":
        return f"SPLIT({source})", varies
    if target == "uint64" and type(e.args[0]).__name__ == "Shuffle":
        return f"JOIN({source})", varies
    if target == "float32" and str(e.args[0].ty) in ("uint32", "int32"):
        return f"AS_FLOAT({source})", varies
    return source, varies


def _address_of(c: Compiler, e: Any) -> tuple[str, bool]:
    target = e.args[0]
    if type(target).__name__ == "Var":
        binding = c.look(target)
        return (binding.name, False)
    binding = c.look(c.buffer_of(target))
    if binding.kind == "regs":
        return f"({binding.name}, {c.flat(binding, target.indices)})", False
    if binding.kind == "workspace":
        return f"({binding.name}, {c.expr(target.indices[0])})", True
    if binding.kind == "scalar":
        return binding.name, False
    return c.address(target)


def _func_call_value(c: Compiler, e: Any) -> tuple[str, bool]:
    name = e.args[0].value
    if name == "tvm_builtin_pointer_offset":
        pointer, lanes = c.value(e.args[1])
        offset, varies = c.value(e.args[2])
        size = ITEM_BYTES[c.look(c.buffer_of(e.args[1].args[0])).dtype]
        return f"({pointer} + {size} * {offset})", lanes or varies
    raise UnsupportedOp(f"CUDA helper {name} as a value")


def _tmem_address(c: Compiler, e: Any) -> tuple[str, bool]:
    address, row, column = (c.expr(x) for x in e.args)
    return f"({address} + ({row} << 16) + {column})", False


VALUES: Final[dict[str, ValueHandler]] = {
    "tirx.cuda.cvta_generic_to_shared": _pass_first,
    "tirx.handle_add_byte_offset": _pass_first,
    "tirx.reinterpret": _reinterpret,
    "tirx.address_of": _address_of,
    "tirx.buffer_data": lambda c, e: (c.look(e.args[0]).name, False),
    "tirx.tvm_stack_alloca": lambda c, e: ("[None]", False),
    "tirx.tvm_warp_shuffle": lambda c, e: (f"int(np.broadcast_to({c.expr(e.args[1])}, (32,))[{c.expr(e.args[2])}])", False),
    "tirx.cuda.thread_rank": lambda c, e: ("THREAD", True),
    "tirx.cuda.elect_sync": lambda c, e: (f"ELECT({c.mask})", True),
    "tirx.cuda.get_tmem_addr": _tmem_address,
    "tirx.cuda.func_call": _func_call_value,
}


# ---- barriers, fences, registers


def _mbarrier_arrive(c: Compiler, e: Any) -> None:
    modifiers, values = _split(e)
    _only(e, modifiers, {"arrive", "shared", "shared::cta", "shared::cluster", "b64", "release", "cluster", "cta"})
    c.call("mbarrier_arrive", c.expr(values[0]), *(c.expr(v) for v in values[1:]))


def _fence_proxy(c: Compiler, e: Any) -> None:
    modifiers, _ = _split(e)
    _only(e, modifiers, {"proxy", "async", "shared::cta", "shared::cluster"})
    c.call("fence_proxy")


def _mapa(c: Compiler, e: Any) -> None:
    modifiers, (target, pointer, rank) = _split(e)
    _only(e, modifiers, {"shared::cluster", "u32", "u64"})
    (source, varies), (place, lanes) = c.value(pointer), c.value(rank)
    c.assign(c.buffer_of(target), target.indices, f"({source} & {OFFSET_MASK:#x} | {place} << {WINDOW_BITS})", varies or lanes)


def _setmaxnreg(c: Compiler, e: Any) -> None:
    modifiers, (count,) = _split(e)
    _only(e, modifiers, {"inc", "dec", "sync", "aligned", "u32"})
    c.call("setmaxnreg", c.expr(count), str("inc" in modifiers))


def _bar(wait: bool) -> Handler:
    def handler(c: Compiler, e: Any) -> None:
        modifiers, values = _split(e)
        _only(e, modifiers, {"sync", "arrive", "aligned", "cta"})
        if len(values) != 2:
            raise UnsupportedOp(f"operation {e.op.name} with {len(values)} operands; modelled: id and thread count")
        c.call("bar_sync", *(c.expr(v) for v in values), str(wait))

    return handler


def _nothing(c: Compiler, e: Any) -> None:
    c.call("nothing")


def _grid_wait(c: Compiler, e: Any) -> None:
    c.programmatic = True
    c.call("grid_wait")


def _grid_control(c: Compiler, e: Any) -> None:
    modifiers, _ = _split(e)
    _only(e, modifiers, {"wait", "launch_dependents"})
    (_grid_wait if "wait" in modifiers else _nothing)(c, e)


# ---- TMA


def _call_packed(c: Compiler, e: Any) -> None:
    if e.args[0].value != "runtime.cuTensorMapEncodeTiled":
        raise UnsupportedOp(f"host call {e.args[0].value}")
    values = [a for a in e.args if type(a).__name__ != "StringImm"]
    target, rank = c.expr(values[0]), int(values[1])
    numbers = [c.expr(v) for v in values[3:]]
    # dims, strides, box, element strides, then interleave, swizzle, L2 promotion, out-of-bounds fill
    sizes, (interleave, swizzle, _, fill) = numbers[: 4 * rank - 1], numbers[4 * rank - 1 :]
    if interleave != "0" or fill != "0":
        raise UnsupportedOp(f"tensor map with interleave {interleave}, out-of-bounds fill {fill}; modelled: 0 and 0")
    c.emit(f"{target}[0] = M.encode_map({c.expr(values[2])}, {rank}, ({', '.join(sizes)},), {swizzle})")


def _tensormap_encode(c: Compiler, e: Any) -> None:
    a = e.attrs
    if a.interleave or a.oob_fill:
        raise UnsupportedOp(f"tensor map with interleave {a.interleave}, out-of-bounds fill {a.oob_fill}; modelled: 0 and 0")
    values = [c.expr(x) for x in e.args if type(x).__name__ != "StringImm"]
    c.emit(f"{values[0]}[0] = M.encode_map({values[1]}, {a.rank}, ({', '.join(values[2:])},), {a.swizzle})")


_LOAD_MODIFIERS: Final = {
    "async", "bulk", "tensor", "1d", "2d", "3d", "shared::cluster", "shared::cta", "global", "tile",
    "mbarrier::complete_tx::bytes", "multicast::cluster", "cta_group::1", "cta_group::2",
}  # fmt: skip


def _tma_load(c: Compiler, e: Any) -> None:
    modifiers, values = _split(e)
    _only(e, modifiers, _LOAD_MODIFIERS)
    operands = [c.expr(v) for v in values]
    ctas = operands.pop() if "multicast::cluster" in modifiers else "None"
    group = 2 if "cta_group::2" in modifiers else 1
    pointer, tensor_map, *coords, barrier = operands
    c.call("tma_load", pointer, f"{tensor_map}[0]", f"({', '.join(coords)},)", barrier, str(group), ctas)


def _tma_store(c: Compiler, e: Any) -> None:
    modifiers, values = _split(e)
    _only(e, modifiers, {"async", "bulk", "tensor", "1d", "2d", "3d", "global", "shared::cta", "tile", "bulk_group"})
    tensor_map, *coords, pointer = (c.expr(v) for v in values)
    c.call("tma_store", f"{tensor_map}[0]", f"({', '.join(coords)},)", pointer)


def _bulk_wait(c: Compiler, e: Any) -> None:
    modifiers, (groups,) = _split(e)
    _only(e, modifiers, {"async", "bulk", "wait_group", "read"})
    c.call("bulk_wait", c.expr(groups), str("read" in modifiers))


# ---- tcgen05


def _group(modifiers: list[str]) -> str:
    return "2" if "cta_group::2" in modifiers else "1"


def _tmem(operation: str) -> Handler:
    def handler(c: Compiler, e: Any) -> None:
        modifiers, values = _split(e)
        _only(e, modifiers, {"alloc", "dealloc", "relinquish_alloc_permit", "cta_group::1", "cta_group::2", "sync", "aligned",
                             "shared::cta", "b32"})  # fmt: skip
        c.call(operation, *(c.expr(v) for v in values), _group(modifiers))

    return handler


def _commit(c: Compiler, e: Any) -> None:
    modifiers, values = _split(e)
    allowed = "commit cta_group::1 cta_group::2 mbarrier::arrive::one shared::cluster multicast::cluster b64"
    _only(e, modifiers, set(allowed.split()))
    ctas = c.expr(values[1]) if "multicast::cluster" in modifiers else "None"
    c.call("mma_commit", c.expr(values[0]), ctas, _group(modifiers))


def _tensor_fence(c: Compiler, e: Any) -> None:
    modifiers, _ = _split(e)
    _only(e, modifiers, {"fence::after_thread_sync", "fence::before_thread_sync"})
    c.call("tensor_fence", str("fence::after_thread_sync" in modifiers))


def _tensor_wait(c: Compiler, e: Any) -> None:
    modifiers, _ = _split(e)
    _only(e, modifiers, {"wait::ld", "sync", "aligned"})
    c.call("tmem_wait", "True")


def _tcgen05_descriptor(c: Compiler, e: Any) -> None:
    _descriptor(c, e, "tcgen05")


def _wgmma_descriptor(c: Compiler, e: Any) -> None:
    _descriptor(c, e, "wgmma")


def _descriptor(c: Compiler, e: Any, kind: str) -> None:
    target, pointer, leading, stride, swizzle = (c.expr(v) for v in _split(e)[1])
    c.emit(f"{target} = ENCODE_DESCRIPTOR({kind!r}, {pointer} & {OFFSET_MASK:#x}, {leading}, {stride}, {swizzle})")


def _tcgen05_mma(c: Compiler, e: Any) -> None:
    modifiers = [a.value for a in e.args if type(a).__name__ == "StringImm" and a.value]
    _only(e, [m for m in modifiers if not re.fullmatch(r"p\d+", m)], {"mma", "cta_group::1", "cta_group::2", "kind::f16"})
    values = [c.expr(v) for v in _split(e)[1]]
    address, a, b, idesc = values[:4]
    disable, accumulate = values[4:-1], values[-1]
    if any(v not in ("0",) for v in disable):
        raise UnsupportedOp("tcgen05.mma with a disable-output-lane mask")
    c.call("mma_descriptors", address, a, b, idesc, accumulate, _group(modifiers))


def _tcgen05_ld(c: Compiler, e: Any) -> None:
    modifiers, values = _split(e)
    shape = next((m for m in modifiers if re.fullmatch(r"x\d+", m)), "")
    _only(e, [m for m in modifiers if m != shape], {"ld", "sync", "aligned", "32x32b", "b32"})
    registers = values[:-1]
    if int(shape[1:]) != len(registers):
        raise UnsupportedOp(f"tcgen05.ld {shape} into {len(registers)} registers")
    name, first = _register(c, registers[0])
    _consecutive(c, registers)
    c.call("tmem_load", name, first, str(len(registers)), c.expr(values[-1]))


# ---- registers


def _register(c: Compiler, load: Any) -> tuple[str, str]:
    """Return (registers, 32-bit word index) of a register operand."""
    if type(load).__name__ != "TensorLoad":
        raise UnsupportedOp(f"register operand {str(load)[:80]}")
    binding = c.look(c.buffer_of(load))
    if binding.kind != "regs" or ITEM_BYTES[binding.dtype] != 4:
        raise UnsupportedOp(f"register operand in {binding.kind} buffer {binding.name!r} of {binding.dtype}")
    return binding.name, c.flat(binding, load.indices)


def _consecutive(c: Compiler, loads: list[Any]) -> None:
    """Require that register operands are one array's consecutive elements, in order (checked by their linear form)."""
    base, first = _register(c, loads[0])
    rest, start = _sum(first)
    for i, load in enumerate(loads):
        name, source = _register(c, load)
        if name != base or _sum(source) != (rest, start + i):
            text = f"{str(loads[0])[:40]} and {str(load)[:40]} at place {i}"
            raise UnsupportedOp(f"register operands that are not consecutive: {text}")


def _sum(source: str) -> tuple[str, int]:
    """Return (rest, constant) of a source ``(rest + constant)`` or ``constant``."""
    if source.isdigit():
        return "", int(source)
    match = re.fullmatch(r"\((.*) \+ (\d+)\)", source)
    return (match.group(1), int(match.group(2))) if match else (source, 0)


def _words(c: Compiler, operands: list[Any]) -> str:
    """Return the source of 32-bit operands: (registers, word), or (None, number) for a number alike in all lanes."""
    words = [("None", x.value) if type(x).__name__ == "IntImm" else _register(c, x) for x in operands]
    return "(" + ", ".join(f"({name}, {index})" for name, index in words) + ",)"


def _func_call(c: Compiler, e: Any) -> None:
    name = e.args[0].value
    match = re.fullmatch(r"tvm_builtin_cast_float32x2_(float16|bfloat16)x2", name)
    if match:
        c.emit(f"M.cast_pair(w, {c.mask}, {c.expr(e.args[1])}, {c.expr(e.args[2])}, {match.group(1)!r})")
    elif any(_EMPTY_ASM.fullmatch(a.value) for a in e.args if type(a).__name__ == "StringImm"):
        return
    else:
        raise UnsupportedOp(f"CUDA helper {name}")


# A helper that only keeps the compiler from moving register accesses: its assembly text is empty, it computes nothing.
_EMPTY_ASM: Final = re.compile(r'\s*__forceinline__ __device__ void \w+\([^)]*\)\s*\{\s*asm volatile\("" : [^;]*\);\s*\}\s*')


def _cvt(dtype: str) -> Handler:
    def handler(c: Compiler, e: Any) -> None:
        modifiers, values = _split(e)
        _only(e, modifiers, {"rn", "f16x2", "bf16x2", "f32"})
        operands = ", ".join(f"{name}, {index}" for name, index in (_register(c, v) for v in values))
        c.emit(f"M.pack2(w, {c.mask}, {operands}, {dtype!r})")

    return handler


def _global(modifiers: list[str]) -> bool:
    """Return whether an access goes to the workspace, at a scope at which other SMs see it."""
    if "global" not in modifiers:
        return False
    unknown = [m for m in modifiers if m not in {"global", "relaxed", "gpu", "v2", "v4", "u32", "b32", "f32", "cg", "weak"}]
    if unknown or not (("relaxed" in modifiers and "gpu" in modifiers) or "cg" in modifiers):
        raise UnsupportedOp(f"global access .{'.'.join(modifiers)}; modelled: .relaxed.gpu or .cg (past L1) of 32-bit words")
    return True


def _store_vector(c: Compiler, e: Any) -> None:
    modifiers, values = _split(e)
    if _global(modifiers):
        c.call("workspace_put", c.expr(values[0]), _words(c, values[1:]), str("relaxed" in modifiers))
        return
    _only(e, modifiers, {"shared", "shared::cta", "v2", "v4", "u32", "b32", "f32"})
    c.call("store_vector", c.expr(values[0]), _words(c, values[1:]))


def _store_word(c: Compiler, e: Any) -> None:
    modifiers, (pointer, value) = _split(e)
    if not _global(modifiers):
        raise UnsupportedOp(f"st.{'.'.join(modifiers)} of one word; modelled: global memory")
    c.call("workspace_set", c.expr(pointer), c.expr(value), str("relaxed" in modifiers))


def _atomic_add(c: Compiler, e: Any) -> None:
    modifiers, (target, pointer, value) = _split(e)
    _only(e, modifiers, {"atom", "acq_rel", "acquire", "release", "relaxed", "gpu", "global", "add", "u32"})
    if "gpu" not in modifiers:
        raise UnsupportedOp(f"atom.{'.'.join(modifiers)}; modelled: scope gpu")
    acquires, releases = ("acq_rel" in modifiers or word in modifiers for word in ("acquire", "release"))
    source = f"M.workspace_add(w, {c.mask}, {c.expr(pointer)}, {c.expr(value)}, {acquires}, {releases})"
    c.assign(c.buffer_of(target), target.indices, source, False)


def _vote(c: Compiler, e: Any) -> None:
    modifiers, (target, number, threads, predicate) = _split(e)
    _only(e, [m for m in modifiers if not re.fullmatch(r"p\d+", m)], {"barrier", "bar", "cta", "red", "or", "pred", "aligned"})
    c.call("bar_vote", c.expr(number), c.expr(threads), c.expr(predicate))
    c.assign(c.buffer_of(target), target.indices, "M.bar_result(w)", False)


def _load_vector(c: Compiler, e: Any) -> None:
    modifiers, values = _split(e)
    if _global(modifiers):
        c.call("workspace_take", c.expr(values[-1]), _words(c, values[:-1]), str("relaxed" in modifiers))
        return
    _only(e, modifiers, {"shared", "shared::cta", "v2", "v4", "u32", "b32", "f32"})
    c.call("load_vector", c.expr(values[-1]), _words(c, values[:-1]))


def _store_async(c: Compiler, e: Any) -> None:
    modifiers, values = _split(e)
    _only(e, modifiers, {"async", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4", "b32", "u32", "f32", "weak"})
    c.call("store_async", c.expr(values[0]), _words(c, values[1:-1]), c.expr(values[-1]))


def _stmatrix(c: Compiler, e: Any) -> None:
    modifiers, values = _split(e)
    _only(e, modifiers, {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"})
    c.call("store_matrix", c.expr(values[0]), _words(c, values[1:]), str("trans" in modifiers))


# ---- wgmma


def _wgmma(c: Compiler, e: Any) -> None:
    modifiers = [a.value for a in e.args if type(a).__name__ == "StringImm" and a.value]
    match = next((m for m in (re.fullmatch(r"m64n(\d+)k16", x) for x in modifiers) if m), None)
    types = [m for m in modifiers if m in ("f16", "bf16")]
    if match is None or len(types) != 2 or "f32" not in modifiers:
        raise UnsupportedOp(f"wgmma {'.'.join(modifiers)}; modelled: m64nNk16.f32 of f16 or bf16")
    n = int(match.group(1))
    values = _split(e)[1]
    registers, rest = values[: n // 2], values[n // 2 :]
    name, first = _register(c, registers[0])
    _consecutive(c, registers)
    a, b, scale_d, *immediates = (c.expr(v) for v in rest)
    if immediates != ["1", "1", "0", "0"]:
        raise UnsupportedOp(f"wgmma with scale or transpose immediates {immediates}; modelled: 1, 1, 0, 0")
    formats = tuple({"f16": "float16", "bf16": "bfloat16"}[t] for t in types)
    c.call("wgmma", name, first, str(n), a, b, scale_d, repr(formats))


def _wgmma_wait(c: Compiler, e: Any) -> None:
    _, (groups,) = _split(e)
    c.call("wgmma_wait", c.expr(groups))


OPERATIONS: Final[dict[str, Handler]] = {
    "tirx.ptx.mbarrier_init": _simple("mbarrier_init", operands=2, allowed="init shared shared::cta b64"),
    "tirx.cuda.mbarrier_wait": _simple("mbarrier_wait", operands=2, allowed=""),
    "tirx.ptx.mbarrier_arrive": _mbarrier_arrive,
    "tirx.ptx.mbarrier_arrive_nocount": _mbarrier_arrive,
    "tirx.ptx.mbarrier_arrive_expect_tx": _simple(
        "mbarrier_expect", operands=2, allowed="arrive expect_tx shared shared::cta shared::cluster b64"
    ),
    "tirx.ptx.fence_proxy": _fence_proxy,
    "tirx.ptx.fence_mbarrier_init": _simple("fence_mbarrier_init", operands=0, allowed="mbarrier_init release cluster"),
    "tirx.cuda.cta_sync": _simple("cta_sync", operands=0, allowed=""),
    "tirx.cuda.cluster_sync": _simple("cluster_sync", operands=0, allowed=""),
    "tirx.cuda.warpgroup_sync": _simple("warpgroup_sync", operands=1, allowed=""),
    "tirx.cuda.warp_sync": _simple("warp_sync", operands=0, allowed=""),
    "tirx.ptx.bar_sync": _bar(True),
    "tirx.ptx.bar_arrive": _bar(False),
    "tirx.ptx.bar_sync_count": _bar(True),
    "tirx.ptx.bar_arrive_count": _bar(False),
    "tirx.ptx.barrier_sync": _bar(True),
    "tirx.ptx.barrier_arrive": _bar(False),
    "tirx.ptx.mapa": _mapa,
    "tirx.ptx.mapa_u32": _mapa,
    "tirx.ptx.setmaxnreg": _setmaxnreg,
    "tirx.ptx.prefetch": _nothing,
    "tirx.ptx.prefetch_tensormap": _nothing,
    "tirx.ptx.griddepcontrol": _grid_control,
    "tirx.tvm_call_packed": _call_packed,
    "tirx.tensormap_encode_tiled": _tensormap_encode,
    "tirx.ptx.cp_async_bulk_tensor_g2s_cluster": _tma_load,
    "tirx.ptx.cp_async_bulk_tensor_s2g": _tma_store,
    "tirx.ptx.cp_async_bulk_commit_group": _simple("bulk_commit", operands=0, allowed="async bulk commit_group"),
    "tirx.ptx.cp_async_bulk_wait_group": _bulk_wait,
    "tirx.ptx.tcgen05_alloc": _tmem("tmem_alloc"),
    "tirx.ptx.tcgen05_dealloc": _tmem("tmem_dealloc"),
    "tirx.ptx.tcgen05_relinquish_alloc_permit": _tmem("tmem_relinquish"),
    "tirx.ptx.tcgen05_commit": _commit,
    "tirx.ptx.tcgen05_commit_multicast": _commit,
    "tirx.ptx.tcgen05_fence": _tensor_fence,
    "tirx.ptx.tcgen05_wait": _tensor_wait,
    "tirx.ptx.tcgen05_mma_ss": _tcgen05_mma,
    "tirx.ptx.tcgen05_ld": _tcgen05_ld,
    "tirx.cuda.tcgen05_encode_matrix_descriptor": _tcgen05_descriptor,
    "tirx.cuda.wgmma_encode_matrix_descriptor": _wgmma_descriptor,
    "tirx.cuda.func_call": _func_call,
    "tirx.ptx.cvt_f16x2_f32": _cvt("float16"),
    "tirx.ptx.cvt_bf16x2_f32": _cvt("bfloat16"),
    "tirx.ptx.st_vec": _store_vector,
    "tirx.ptx.st": _store_word,
    "tirx.ptx.atom": _atomic_add,
    "tirx.ptx.barrier_red_pred_count": _vote,
    "tirx.ptx.ld_vec": _load_vector,
    "tirx.ptx.st_async_vec": _store_async,
    "tirx.ptx.st_async": _store_async,
    "tirx.ptx.stmatrix": _stmatrix,
    "tirx.ptx.wgmma_fence": _simple("wgmma_fence", operands=0, allowed="fence sync aligned"),
    "tirx.ptx.wgmma_commit_group": _simple("wgmma_commit", operands=0, allowed="commit_group sync aligned"),
    "tirx.ptx.wgmma_wait_group": _wgmma_wait,
    "tirx.ptx.wgmma_f16_ss": _wgmma,
    "tirx.ptx.wgmma_bf16_ss": _wgmma,
}
