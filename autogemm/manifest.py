"""Manifest: all a launcher must know about a cubin, as data. Its sizes are expressions of the launch variables.

A launch is described without any per-kernel code: evaluate ``scalars`` in order, then the tensor maps, grid and workspace.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any, Final, Literal

from .errors import InputError

SCHEMA: Final = 1

ParamKind = Literal["tensor_map", "int32", "uint32", "workspace"]
Operand = Literal["a", "b", "d"]

# The variables every expression may use: extents in elements, row strides of A, B and D in elements, SMs to occupy and
# the launch-time knobs. Scalars may also use the scalars listed before them.
VARIABLES: Final = ("M", "N", "K", "lda", "ldb", "ldd", "sm_count", "l2_group_size", "split_k")


def ceildiv(n: int, d: int) -> int:
    """Return n / d rounded up."""
    return -(-n // d)


def round_up(n: int, multiple: int) -> int:
    """Return the least multiple of ``multiple`` that is at least ``n``."""
    return ceildiv(n, multiple) * multiple


def magic_multiplier(d: int) -> int:
    """Return mul with ``n // d == umulhi(n, mul) >> magic_shift(d)`` for 0 <= n < 2**31; 0 stands for d == 1.

    Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994, with N = 31.
    """
    if d <= 1:
        return 0
    return ceildiv(1 << (31 + (d - 1).bit_length()), d)


def magic_shift(d: int) -> int:
    """Return the shift that belongs to ``magic_multiplier``."""
    return 0 if d <= 1 else (d - 1).bit_length() - 1


_FUNCTIONS: Final[dict[str, Callable[..., int]]] = {
    "ceildiv": ceildiv, "round_up": round_up, "magic_multiplier": magic_multiplier, "magic_shift": magic_shift,
    "min": min, "max": max,
}  # fmt: skip
_NODES: Final = (
    ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Call, ast.Name, ast.Load, ast.Constant,
    ast.IfExp, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip


@lru_cache(maxsize=4096)
def _compiled(expression: str) -> CodeType:
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise InputError(f"manifest expression {expression!r} can't be parsed: {error.msg}") from error
    for node in ast.walk(tree):
        if not isinstance(node, _NODES) or (isinstance(node, ast.Constant) and type(node.value) is not int):
            raise InputError(f"manifest expression {expression!r} holds {type(node).__name__}; only integers are allowed")
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS):
            raise InputError(f"manifest expression {expression!r} calls something other than {', '.join(_FUNCTIONS)}")
    return compile(tree, "<manifest>", "eval")


def evaluate(expression: str, variables: Mapping[str, int]) -> int:
    """Return the value of an integer expression: + - * // %, comparisons, ``a if c else b`` and ``_FUNCTIONS``.

    Raises:
        InputError: anything else in it, or a name that ``variables`` lacks.
    """
    try:
        return int(eval(_compiled(expression), {"__builtins__": {}, **_FUNCTIONS}, dict(variables)))  # only the checked nodes
    except NameError as error:
        raise InputError(f"manifest expression {expression!r}: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMap:
    """One CUtensorMap, encoded at launch (cuTensorMapEncodeTiled); lists run from the innermost dimension out.

    Attributes:
        name: kernel parameter.
        operand: which tensor it describes; its dtype is the Manifest's.
        dims: extents in elements, as expressions.
        strides_bytes: strides of every dimension but the innermost, as expressions.
        box: box extents in elements, as expressions.
        swizzle_bytes: 0, 32, 64 or 128.
        l2_promotion_bytes: 0, 64, 128 or 256.
    """

    name: str
    operand: Operand
    dims: tuple[str, ...]
    strides_bytes: tuple[str, ...]
    box: tuple[str, ...]
    swizzle_bytes: int
    l2_promotion_bytes: int = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    """One kernel parameter, in order.

    Attributes:
        kind: ``tensor_map`` (the map called ``name``), an integer scalar, or the ``workspace`` pointer.
    """

    kind: ParamKind
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalar:
    """A named value: an expression of VARIABLES and of the scalars before it."""

    name: str
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """How to launch one cubin.

    Attributes:
        entry: kernel symbol.
        arch: ``sm_90a`` or ``sm_100a``.
        dtype, layout, epilogue: what it computes.
        knobs: its Config, launch-time knobs at their default.
        block_threads: threads per CTA.
        cluster_ctas: cluster extent along x.
        smem_bytes: dynamic shared memory per CTA.
        grid: CTAs along x, as an expression.
        scalars: values in the order of evaluation; more than the kernel takes, where one builds on another.
        tensor_maps: in any order.
        params: kernel parameters in order.
        workspace_bytes: device memory the kernel needs, as an expression; "0" for none. It must be zero before the first
            launch, and each launch leaves it zero where the kernel relies on that.
        programmatic: the kernel itself waits for the work before it on the stream (``griddepcontrol.wait``), so it may be
            launched while that still runs.
        generator: content hash of the generator that emitted the kernel.
    """

    entry: str
    arch: str
    dtype: str
    layout: str
    epilogue: str
    knobs: dict[str, int | bool]
    block_threads: int
    cluster_ctas: int
    smem_bytes: int
    grid: str
    scalars: tuple[Scalar, ...]
    tensor_maps: tuple[TensorMap, ...]
    params: tuple[Param, ...]
    workspace_bytes: str = "0"
    programmatic: bool = False
    generator: str = ""
    schema: int = field(default=SCHEMA)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> Manifest:
        """Return the Manifest in ``document``.

        Raises:
            InputError: not a manifest, or of a newer schema.
        """
        if not isinstance(document, dict) or not isinstance(document.get("schema"), int):
            raise InputError("not a manifest: no schema number")
        if document["schema"] > SCHEMA:
            raise InputError(f"manifest schema {document['schema']} is newer than {SCHEMA}; upgrade autogemm")
        try:
            return cls(
                **{
                    **document,
                    "scalars": tuple(Scalar(**s) for s in document["scalars"]),
                    "tensor_maps": tuple(
                        TensorMap(**{**t, **{k: tuple(t[k]) for k in ("dims", "strides_bytes", "box")}})
                        for t in document["tensor_maps"]
                    ),
                    "params": tuple(Param(**p) for p in document["params"]),
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"not a manifest: {error}") from error

    def scalar_values(self, variables: Mapping[str, int]) -> dict[str, int]:
        """Return ``variables`` and every scalar's value."""
        values = dict(variables)
        for scalar in self.scalars:
            values[scalar.name] = evaluate(scalar.value, values)
        return values
