"""From a TIRx PrimFunc to a Python generator function that one warp runs: the compiler shared by both levels of IR.

Warp-uniform scalars become Python integers. What varies by lane becomes a vector of 32, and an ``if`` on such a value becomes
a lane mask. Every operation that touches anything shared becomes a call on the machine, with a ``yield`` where the warp must
wait. ``tile_ops`` and ``ptx_ops`` hold the operations; one that neither knows raises UnsupportedOp with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import numpy as np

from ..errors import InputError, UnsupportedOp
from .expressions import Binding, ExpressionCompiler
from .layout import encode_descriptor, layout_offsets
from .program import ITEM_BYTES, GlobalBuffer, Program, SharedBuffer, TileBuffer
from .state import WINDOW_BITS
from .unwritten import merge


class Compiler(ExpressionCompiler):
    """Compiles one PrimFunc; the operation tables are passed in, so that this file needs to know none of them."""

    def __init__(
        self,
        func: Any,
        level: Literal["tile", "ptx"],
        operations: Mapping[str, Callable[[Compiler, Any], None]],
        values: Mapping[str, Callable[[Compiler, Any], tuple[str, bool]]],
        tile_operations: Mapping[str, Callable[[Compiler, Any], None]],
        barrier_names: tuple[str, ...] | None,
    ) -> None:
        super().__init__(values)
        self.func, self.level = func, level
        self.operations, self.tile_operations = operations, tile_operations
        self.barrier_names = barrier_names
        self.smem_bytes = 0
        self.grid_source = "1"
        self.cluster_ctas = 1
        self.warpgroups = 1
        self.barriers: list[tuple[int, int, str]] = []
        self.shared_buffers: list[SharedBuffer] = []
        self.buffers: list[GlobalBuffer] = []
        self.workspaces: list[GlobalBuffer] = []
        self.scalars: list[tuple[str, str]] = []
        self.programmatic = False

    # ---- statements

    def statement(self, s: Any) -> None:
        """Compile one statement."""
        handler = getattr(self, "_stmt_" + type(s).__name__, None)
        if handler is None:
            raise UnsupportedOp(f"statement {type(s).__name__}: {str(s)[:120]}")
        handler(s)

    def _stmt_SeqStmt(self, s: Any) -> None:
        for part in s.seq:
            self.statement(part)

    def _stmt_AttrStmt(self, s: Any) -> None:
        key = s.attr_key
        if key == "tirx.dyn_smem_bytes":
            self.smem_bytes = int(s.value)
        elif key == "thread_extent":
            self._thread_extent(s)
        elif not key.startswith(("tirx.", "pragma")):
            raise UnsupportedOp(f"attribute {key}")
        self.statement(s.body)

    def _thread_extent(self, s: Any) -> None:
        tag = s.node.thread_tag
        name = self.bind(s.node.var, "let").name
        if tag == "threadIdx.x":
            self._varying.add(name)
            self.emit(f"{name} = THREAD")
            self.warpgroups = int(s.value) // 128
        elif tag == "blockIdx.x":
            self.emit(f"{name} = w.bx")
            self.grid_source = self.expr(s.value)
        elif tag == "clusterCtaIdx.x":
            self.emit(f"{name} = w.rank % {int(s.value)}")
            self.cluster_ctas *= int(s.value)
        elif (
            tag in ("clusterCtaIdx.y", "clusterCtaIdx.z", "blockIdx.y", "blockIdx.z", "threadIdx.y", "threadIdx.z")
            and int(s.value) == 1
        ):
            self.emit(f"{name} = 0")
        else:
            raise UnsupportedOp(f"launch axis {tag} of extent {s.value}")

    def _stmt_ScopeIdDefStmt(self, s: Any) -> None:
        definition = getattr(s, "def")
        scope = definition.scope
        extents = None if definition.extents is None else list(definition.extents)
        for i, var in enumerate(definition.def_ids):
            name = self.bind(var, "scope").name
            if scope == 1:
                if i or extents is None:
                    raise UnsupportedOp("a grid of more than one dimension")
                source, self.grid_source = "w.bx", self.expr(extents[0])
            elif scope == 2:
                assert extents is not None
                if i and int(extents[i]) != 1:
                    raise UnsupportedOp("a cluster of more than one dimension")
                source = "0" if i else "w.rank"
                self.cluster_ctas = max(self.cluster_ctas, int(extents[0]))
            elif scope == 3:
                assert extents is not None
                source, self.warpgroups = "w.group", int(extents[0])
            else:
                source = {4: "(w.group * 4 + w.index)", 5: "w.index", 6: "LANE", 7: "THREAD"}.get(scope, "")
                if not source:
                    raise UnsupportedOp(f"scope id of kind {scope}")
                if scope in (6, 7):
                    self._varying.add(name)
            self.emit(f"{name} = {source}")

    def _stmt_AllocBuffer(self, s: Any) -> None:
        buffer = s.buffer
        scope, dtype = buffer.ty.storage_scope, str(buffer.ty.dtype)
        shape = tuple(int(x) for x in buffer.ty.shape)
        if scope.startswith("shared"):
            name = self.bind(buffer, "smem", dtype, shape or (1,)).name
            self.emit(f"{name} = w.rank << {WINDOW_BITS}")
        elif scope == "local":
            self._local(buffer, dtype, shape)
        else:
            raise UnsupportedOp(f"allocation in scope {scope!r}")

    def _local(self, buffer: Any, dtype: str, shape: tuple[int, ...]) -> None:
        elements = int(np.prod(shape))
        if dtype in ("float16", "bfloat16", "float32") or (dtype == "uint32" and elements > 1):
            name = self.bind(buffer, "regs", dtype, shape).name
            self.emit(f"{name} = M.regs(w, {elements}, {ITEM_BYTES[dtype]}, {buffer.name!r})")
        elif elements == 1:
            name = self.bind(buffer, "scalar", dtype).name
            self.emit(f"{name} = M.unwritten(w, {buffer.name!r})")
        else:
            name = self.bind(buffer, "scalars", dtype, shape).name
            self.emit(f"{name} = [M.unwritten(w, {buffer.name!r})] * {elements}")

    def _stmt_DeclBuffer(self, s: Any) -> None:
        buffer = s.buffer
        scope, dtype = buffer.ty.storage_scope, str(buffer.ty.dtype)
        if scope == "tmem":
            address = buffer.ty.allocated_addr
            name = self.bind(buffer, "tmem", dtype).name
            if self.level == "tile":  # lowered operations carry the whole address
                self.emit(f"{name} = {self.expr(address[0]) if address else 0}")
            return
        if scope in ("local", "global"):
            binding = self.look(s.data.args[0])
            shape = tuple(int(x) for x in buffer.ty.shape) if scope == "local" else ()
            self.alias(buffer, Binding(binding.name, binding.kind, dtype, shape))
            return
        if not scope.startswith("shared"):
            raise UnsupportedOp(f"buffer in scope {scope!r}")
        shape = tuple(int(x) for x in buffer.ty.shape) or (1,)
        offset = int(buffer.ty.elem_offset) * ITEM_BYTES[dtype]
        shared = SharedBuffer(name=buffer.name or "mbarrier", offset=offset, shape=shape, dtype=dtype)
        elements = layout_offsets(buffer.ty.layout, shape)
        binding = self.bind(buffer, "smem", dtype, shape, TileBuffer(shared, elements))
        if type(s.data).__name__ == "Call" and s.data.op.name == "tirx.buffer_data":
            base = self.look(s.data.args[0])
            self.emit(f"{binding.name} = {base.name} + {offset}")
            if dtype == "uint64":
                self._barrier(shared)
            elif not any(b.offset == offset for b in self.shared_buffers) and shared.elements > 1:
                self.shared_buffers.append(shared)
        else:  # a view of a mapped pointer: the same buffer in another CTA
            self.emit(f"{binding.name} = {self.expr(s.data)}")

    def _barrier(self, shared: SharedBuffer) -> None:
        if any(offset == shared.offset for offset, _, _ in self.barriers):
            return
        index = len(self.barriers)
        names = self.barrier_names
        if names is not None and index < len(names):
            name = names[index]
        else:
            name = shared.name if shared.name not in ("mbarrier", "buffer") else f"mbarrier{index}"
        self.barriers.append((shared.offset, shared.elements, name))

    def _stmt_Bind(self, s: Any) -> None:
        self._define(s.var, s.value)

    def _stmt_BufferStore(self, s: Any) -> None:
        self.assign(s.buffer, s.indices, *self.value(s.value))

    def assign(self, buffer: Any, indices: Any, source: str, varies: bool) -> None:
        """Emit ``buffer[indices] = source``."""
        binding = self.look(buffer)
        if binding.kind == "scalar":
            if varies:
                self._varying.add(binding.name)
                if self.mask != "mask0":
                    source = f"MERGE({self.mask}, {source}, {binding.name})"
            self.emit(f"{binding.name} = {source}")
        elif binding.kind == "scalars":
            if varies:
                self._varying.add(binding.name)
            self.emit(f"{binding.name}[{self.flat(binding, indices)}] = {source}")
        elif binding.kind == "regs":
            self.emit(f"M.put(w, {self.mask}, {binding.name}, {binding.dtype!r}, {self.flat(binding, indices)}, {source})")
        else:
            raise UnsupportedOp(f"store to {binding.kind} buffer {binding.name.rsplit('_', 1)[0]!r}")

    def _stmt_IfThenElse(self, s: Any) -> None:
        condition, varies = self.value(s.condition)
        if not varies:
            self.emit(f"if {condition}:")
            self._block(s.then_case)
            if s.else_case is not None:
                self.emit("else:")
                self._block(s.else_case)
            return
        outer, inner = self.mask, self.fresh("mask")
        self.emit(f"{inner} = {outer} & ({condition})")
        self.emit(f"if {inner}.any():")
        self.mask = inner
        self._block(s.then_case)
        self.mask = outer
        if s.else_case is not None:
            other = self.fresh("mask")
            self.emit(f"{other} = {outer} & ~{inner}")
            self.emit(f"if {other}.any():")
            self.mask = other
            self._block(s.else_case)
            self.mask = outer

    def _block(self, s: Any) -> None:
        self._indent += 1
        before = len(self._lines)
        self.statement(s)
        if len(self._lines) == before:
            self.emit("pass")
        self._indent -= 1

    def _stmt_While(self, s: Any) -> None:
        condition, varies = self.value(s.condition)
        if not varies:
            self.emit(f"while {condition}:")
            self._block(s.body)
            return
        # Lanes leave one by one. What such a loop waits for are numbers: without them it is left out.
        outer, inner = self.mask, self.fresh("mask")
        self.emit(f"{inner} = {outer} & ({condition})")
        self.emit(f"while M.numerics and {inner}.any():")
        self.mask = inner
        self._block(s.body)
        self._indent += 1
        self.emit(f"{inner} = {inner} & ({self.expr(s.condition)})")
        self.emit(f"if {inner}.any():")
        self._indent += 1
        self.call("again")
        self._indent -= 2
        self.mask = outer

    def _stmt_For(self, s: Any) -> None:
        start, extent = self.expr(s.min), self.expr(s.extent)
        name = self.bind(s.loop_var, "let").name
        before = len(self._lines)
        self.emit(f"for {name} in range({extent}):" if start == "0" else f"for {name} in range({start}, {start} + {extent}):")
        self._block(s.body)
        if len(self._lines) == before + 2 and self._lines[-1].strip() == "pass":
            del self._lines[before:]

    def _stmt_Evaluate(self, s: Any) -> None:
        e = s.value
        if type(e).__name__ in ("IntImm", "FloatImm"):
            return
        if type(e).__name__ != "Call":
            raise UnsupportedOp(f"evaluation of {type(e).__name__}: {str(e)[:100]}")
        name = e.op.name
        handler = self.operations.get(name)
        if handler is None:
            raise UnsupportedOp(f"operation {name} (in {str(e)[:100]})")
        handler(self, e)

    def _stmt_TilePrimitiveCall(self, s: Any) -> None:
        handler = self.tile_operations.get(s.op.name)
        if handler is None:
            raise UnsupportedOp(f"tile operation {s.op.name}")
        handler(self, s)

    # ---- the whole function

    def _parameters(self) -> None:
        extents: set[str] = set()
        for param in self.func.params:
            if type(param.ty).__name__ == "BufferType":
                shape: list[int | str] = []
                for extent in param.ty.shape:
                    if type(extent).__name__ == "Var":
                        if extent.name not in extents:
                            extents.add(extent.name)
                            self.emit(f"{self.bind(extent, 'let').name} = M.P[{extent.name!r}]")
                        shape.append(extent.name)
                    else:
                        shape.append(int(extent))
                dtype = str(param.ty.dtype)
                scratch = len(shape) == 1 and ITEM_BYTES.get(dtype) == 4  # 32-bit words that the CTAs share
                buffers = self.workspaces if scratch else self.buffers
                buffers.append(GlobalBuffer(name=param.name, shape=tuple(shape), dtype=dtype))
                self.emit(f"{self.bind(param, 'workspace' if scratch else 'global', dtype).name} = {param.name!r}")
            elif type(param.ty).__name__ == "PrimType":
                self.scalars.append((param.name, str(param.ty.dtype)))
                self.emit(f"{self.bind(param, 'let').name} = M.P[{param.name!r}]")
            else:
                raise UnsupportedOp(f"parameter {param.name} of type {type(param.ty).__name__}")

    def compile(self) -> Program:
        """Return the Program.

        Raises:
            UnsupportedOp: the function uses something without a model.
        """
        self._parameters()
        prologue = list(self._lines)
        self.emit("mask0 = FULL")
        self.emit("LANE = LANES")
        self.emit("THREAD = (w.group * 4 + w.index) * 32 + LANES")
        self.statement(self.func.body)
        source = "\n".join(
            [
                "def main(M, w):",
                *self._lines,
                "    return",
                "    yield",
                "def grid(M):",
                *prologue,
                f"    return {self.grid_source}",
                "",
            ]
        )
        scope: dict[str, Any] = {**_RUNTIME, **self.constants}
        exec(
            compile(source, "<autogemm kernel>", "exec"), scope
        )  # the source is generated above, from nodes checked one by one

        def grid(parameters: Mapping[str, int]) -> int:
            return int(scope["grid"](_Parameters(parameters)))

        if not self.shared_buffers and not self.smem_bytes:
            raise InputError(
                "the function allocates no shared memory; is it a device kernel (T.device_entry, SMEMPool.commit)?"
            )
        return Program(
            level=self.level, source=source, main=scope["main"], grid=grid, cluster_ctas=self.cluster_ctas,
            warpgroups=self.warpgroups, smem_bytes=self.smem_bytes, barriers=self.barriers,
            shared_buffers=sorted(self.shared_buffers, key=lambda b: b.offset), buffers=self.buffers, scalars=self.scalars,
            workspaces=self.workspaces, programmatic=self.programmatic,
        )  # fmt: skip


class _Parameters:
    def __init__(self, values: Mapping[str, int]) -> None:
        self.P = values


def _elect(mask: Any) -> Any:
    """Return the mask of the one lane elect.sync picks: the lowest active one."""
    chosen = np.zeros(32, bool)
    chosen[mask.argmax()] = True
    return chosen


def _truncdiv(a: Any, b: Any) -> Any:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(np.int64)
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def _truncmod(a: Any, b: Any) -> Any:
    return a - b * _truncdiv(a, b)


_RUNTIME: Final[dict[str, Any]] = {
    "ENCODE_DESCRIPTOR": encode_descriptor,
    "LANES": np.arange(32), "FULL": np.ones(32, bool), "ELECT": _elect, "TRUNCDIV": _truncdiv, "TRUNCMOD": _truncmod, "np": np,
    "MERGE": merge, "AS_FLOAT": lambda x: np.asarray(x).astype(np.uint32).view(np.float32),
    "SPLIT": lambda x: (x & 0xFFFFFFFF, x >> 32), "JOIN": lambda p: (p[0] & 0xFFFFFFFF) | (p[1] & 0xFFFFFFFF) << 32,
}  # fmt: skip
