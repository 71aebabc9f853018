"""TIR expressions as Python source: names of variables, lane-varying values, addresses in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ..errors import UnsupportedOp
from .program import ITEM_BYTES, TileBuffer

_BINARY: Final = {
    "Add": "+", "Sub": "-", "Mul": "*", "FloorDiv": "//", "FloorMod": "%", "LT": "<", "LE": "<=", "GT": ">", "GE": ">=",
    "EQ": "==", "NE": "!=",
}  # fmt: skip
_BITWISE: Final = {
    "BitwiseXor": "^", "BitwiseAnd": "&", "BitwiseOr": "|", "LeftShift": "<<", "ShiftLeft": "<<", "RightShift": ">>",
    "ShiftRight": ">>", "LShift": "<<", "RShift": ">>",
}  # fmt: skip
_BITWISE_CALLS: Final = {
    "tirx.bitwise_xor": "^", "tirx.bitwise_and": "&", "tirx.bitwise_or": "|", "tirx.shift_left": "<<", "tirx.shift_right": ">>",
}  # fmt: skip
_CAST_MASK: Final = {"uint32": 0xFFFFFFFF, "uint16": 0xFFFF, "uint8": 0xFF, "uint64": 0xFFFFFFFFFFFFFFFF}


class Binding:
    """What a TIR variable is in the generated code."""

    __slots__ = ("dtype", "kind", "name", "shape", "tile")

    def __init__(
        self, name: str, kind: str, dtype: str = "", shape: tuple[int, ...] = (), tile: TileBuffer | None = None
    ) -> None:
        self.name, self.kind, self.dtype, self.shape, self.tile = name, kind, dtype, shape, tile


class ExpressionCompiler:
    """Turns expressions into Python source and keeps what every TIR variable is called.

    Args:
        values: operations that yield a value, by name; each gets the compiler and the call.
    """

    def __init__(self, values: Mapping[str, Callable[[Any, Any], tuple[str, bool]]]) -> None:
        self.values = values
        self.mask = "mask0"
        self.constants: dict[str, Any] = {}
        self._lines: list[str] = []
        self._indent = 1
        self._bindings: dict[int, Binding] = {}
        self._kept: list[Any] = []  # variables are keyed by identity: keep them alive
        self._count = 0
        self._varying: set[str] = set()

    # ---- names

    def emit(self, line: str) -> None:
        """Append one line of generated code."""
        self._lines.append("    " * self._indent + line)

    def call(self, operation: str, *arguments: str) -> None:
        """Emit a machine operation under the current mask, and the wait it may ask for."""
        self.emit(f"d = M.{operation}(w, {', '.join((self.mask, *arguments))})")
        self.emit("if d: yield d")

    def fresh(self, base: str) -> str:
        """Return a new Python name."""
        self._count += 1
        clean = "".join(c if c.isalnum() else "_" for c in base or "v")
        return f"{clean}_{self._count}"

    def constant(self, base: str, value: Any) -> str:
        """Return the name of an object that generated code may use."""
        name = self.fresh(base)
        self.constants[name] = value
        return name

    def bind(
        self, var: Any, kind: str, dtype: str = "", shape: tuple[int, ...] = (), tile: TileBuffer | None = None
    ) -> Binding:
        """Give ``var`` a new Python name."""
        binding = Binding(self.fresh(var.name), kind, dtype, shape, tile)
        self.alias(var, binding)
        return binding

    def alias(self, var: Any, binding: Binding) -> None:
        """Let ``var`` be ``binding``."""
        self._bindings[hash(var)] = binding
        self._kept.append(var)

    def look(self, var: Any) -> Binding:
        """Return what ``var`` is.

        Raises:
            UnsupportedOp: it was never defined.
        """
        found = self._bindings.get(hash(var))
        if found is None:
            raise UnsupportedOp(f"use of {var.name!r}, which nothing defines (a parameter the front end can't bind?)")
        return found

    @staticmethod
    def buffer_of(node: Any) -> Any:
        """Return the buffer of a load, store or region node."""
        for attribute in ("buffer", "source", "tensor"):
            if hasattr(node, attribute):
                return getattr(node, attribute)
        raise UnsupportedOp(f"node {type(node).__name__} without a buffer")

    # ---- expressions

    def expr(self, e: Any) -> str:
        """Return the Python source of an expression."""
        return self.value(e)[0]

    def value(self, e: Any) -> tuple[str, bool]:
        """Return (Python source, varies by lane) of an expression."""
        if isinstance(e, (bool, int, float)):
            return repr(e), False
        kind = type(e).__name__
        if kind in ("IntImm", "FloatImm", "StringImm"):
            return repr(e.value), False
        if kind == "Var":
            name = self.look(e).name
            return name, name in self._varying
        if kind in _BINARY or kind in _BITWISE:
            (a, la), (b, lb) = self.value(e.a), self.value(e.b)
            return f"({a} {_BINARY.get(kind) or _BITWISE[kind]} {b})", la or lb
        if kind in ("Div", "Mod"):
            (a, la), (b, lb) = self.value(e.a), self.value(e.b)
            return f"{'TRUNCDIV' if kind == 'Div' else 'TRUNCMOD'}({a}, {b})", la or lb
        if kind in ("And", "Or"):
            (a, la), (b, lb) = self.value(e.a), self.value(e.b)
            if la or lb:
                return f"({a} {'&' if kind == 'And' else '|'} {b})", True
            return f"({a} {kind.lower()} {b})", False
        if kind in ("Min", "Max"):
            (a, la), (b, lb) = self.value(e.a), self.value(e.b)
            if la or lb:
                return f"np.{kind.lower()}imum({a}, {b})", True
            return f"{kind.lower()}({a}, {b})", False
        if kind == "Select":
            (c, lc), (a, la), (b, lb) = self.value(e.condition), self.value(e.true_value), self.value(e.false_value)
            if lc or la or lb:
                return f"np.where({c}, {a}, {b})", True
            return f"({a} if {c} else {b})", False
        if kind == "Not":
            a, la = self.value(e.a)
            return (f"(~({a}))" if la else f"(not {a})"), la
        if kind == "Cast":
            return self._cast(e)
        if kind == "TensorLoad":
            return self._load(e)
        if kind == "Let":
            self._define(e.var, e.value)
            return self.value(e.body)
        if kind == "Shuffle":
            return self._shuffle(e)
        if kind == "Call":
            return self._call_value(e)
        raise UnsupportedOp(f"expression {kind}: {str(e)[:120]}")

    def _cast(self, e: Any) -> tuple[str, bool]:
        source, varies = self.value(e.value)
        dtype = str(e.ty)
        if dtype in _CAST_MASK:
            return f"({source} & {_CAST_MASK[dtype]:#x})", varies
        if dtype in ("int32", "int64", "bool", "float32"):
            return source, varies
        raise UnsupportedOp(f"cast to {dtype}: {str(e)[:120]}")

    def _shuffle(self, e: Any) -> tuple[str, bool]:
        parts = [self.value(v) for v in e.vectors]
        indices = [int(i) for i in e.indices]
        varies = any(v for _, v in parts)
        if len(parts) == 1:
            return f"{parts[0][0]}[{indices[0]}]", varies
        return "(" + ", ".join(parts[i][0] for i in indices) + ",)", varies

    def _load(self, e: Any) -> tuple[str, bool]:
        binding = self.look(self.buffer_of(e))
        if binding.kind == "scalar":
            return binding.name, binding.name in self._varying
        if binding.kind == "scalars":
            return f"{binding.name}[{self.flat(binding, e.indices)}]", binding.name in self._varying
        if binding.kind == "regs":
            return f"M.get(w, {binding.name}, {binding.dtype!r}, {self.flat(binding, e.indices)})", True
        if binding.kind == "smem" and binding.dtype in ("uint32", "int32"):
            pointer, varies = self.address(e)
            if not varies:
                return f"M.load_word(w, {pointer})", False
        raise UnsupportedOp(f"load from {binding.kind} buffer {binding.name.rsplit('_', 1)[0]!r} of {binding.dtype}")

    def flat(self, binding: Binding, indices: Any) -> str:
        """Return the source of the row-major element index of ``indices`` in a local array."""
        parts = [self.expr(i) for i in indices]
        if len(parts) == 1:
            return parts[0]
        source = parts[0]
        for part, extent in zip(parts[1:], binding.shape[1:], strict=True):
            source = f"({source} * {extent} + {part})"
        return source

    def address(self, load: Any) -> tuple[str, bool]:
        """Return (pointer source, varies by lane) of the element a load names in shared memory."""
        binding = self.look(self.buffer_of(load))
        if binding.kind != "smem":
            raise UnsupportedOp(f"address of an element of {binding.kind} buffer {binding.name!r}")
        parts = [self.value(i) for i in load.indices]
        varies = any(v for _, v in parts)
        tile = binding.tile
        if tile is not None and not tile.linear:
            index = f"{self.constant(binding.name, tile)}.element({', '.join(p for p, _ in parts)})"
        else:
            terms, stride = [], 1
            for (source, _), extent in zip(reversed(parts), reversed(binding.shape or (1,)), strict=True):
                terms.append(source if stride == 1 else f"{source} * {stride}")
                stride *= extent
            index = "(" + " + ".join(reversed(terms)) + ")"
        return f"({binding.name} + {ITEM_BYTES[binding.dtype]} * {index})", varies

    def _call_value(self, e: Any) -> tuple[str, bool]:
        name = e.op.name
        if name in _BITWISE_CALLS:
            (a, la), (b, lb) = self.value(e.args[0]), self.value(e.args[1])
            return f"({a} {_BITWISE_CALLS[name]} {b})", la or lb
        handler = self.values.get(name)
        if handler is None:
            raise UnsupportedOp(f"operation {name} as a value (in {str(e)[:100]})")
        return handler(self, e)

    def _define(self, var: Any, value: Any) -> None:
        source, varies = self.value(value)
        name = self.bind(var, "let").name
        if varies:
            self._varying.add(name)
        self.emit(f"{name} = {source}")
