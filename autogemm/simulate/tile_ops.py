"""Tile primitives (copy_async, gemm_async, cast, copy): the operations of a traced PrimFunc before lowering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..errors import UnsupportedOp
from .compiler import Compiler
from .expressions import Binding


class _Region:
    """A TensorRegion: its buffer's binding, and (start source, extent, start varies by lane) per dimension."""

    def __init__(self, compiler: Compiler, node: Any) -> None:
        self.binding: Binding = compiler.look(compiler.buffer_of(node))
        self.box = []
        for part in node.region:
            start, varies = compiler.value(part.min)
            self.box.append((start, int(part.extent), varies))

    @property
    def extents(self) -> list[int]:
        return [extent for _, extent, _ in self.box]


def _shared(compiler: Compiler, region: _Region) -> str:
    """Return the source of the machine Region of a shared-memory box."""
    tile = compiler.constant(region.binding.name, region.binding.tile)
    starts = ", ".join(start for start, _, _ in region.box)
    operation = "row_region" if any(varies for _, _, varies in region.box) else "tile_region"
    return f"M.{operation}({tile}, ({starts},), {tuple(region.extents)})"


def _global(region: _Region, compiler: Compiler) -> tuple[str, str]:
    """Return the sources of (tensor map, coordinates innermost first) of a 2-D global box."""
    if len(region.box) != 2:
        raise UnsupportedOp(f"global box of {len(region.box)} dimensions; modelled: 2")
    (row, rows, _), (column, columns, _) = region.box
    return f"M.box_map({region.binding.name}, {rows}, {columns})", f"({column}, {row})"


def _copy_async(compiler: Compiler, s: Any) -> None:
    target, source = (_Region(compiler, a) for a in s.args[:2])
    config = dict(s.config)
    kinds = (target.binding.kind, source.binding.kind)
    if kinds == ("smem", "global"):
        if "mbar" not in config:
            raise UnsupportedOp("copy_async global -> shared without mbar")
        tensor_map, coords = _global(source, compiler)
        region = _shared(compiler, target)
        group = int(config.get("cta_group", 1))
        compiler.call(
            "tma_load", target.binding.name, tensor_map, coords, compiler.expr(config["mbar"]), str(group), "None", region
        )
        unknown = set(config) - {"mbar", "cta_group"}
        if unknown:
            raise UnsupportedOp(f"copy_async global -> shared with {', '.join(sorted(unknown))}")
    elif kinds == ("global", "smem"):
        tensor_map, coords = _global(target, compiler)
        compiler.call("tma_store", tensor_map, coords, source.binding.name, _shared(compiler, source))
    elif kinds == ("regs", "tmem") and s.scope.name == "warpgroup":
        _, (first, columns, _) = target.box
        (lane, lanes, _), (column, _, _) = source.box
        if lane != "0" or lanes != 128:
            raise UnsupportedOp(f"tmem -> register copy of lanes {lane}:{lane}+{lanes}; modelled: all 128")
        compiler.call("tmem_load", target.binding.name, first, str(columns), f"{source.binding.name} + {column}")
    else:
        raise UnsupportedOp(f"copy_async {kinds[1]} -> {kinds[0]} by a {s.scope.name}")


def _gemm_async(compiler: Compiler, s: Any) -> None:
    d, a, b = (_Region(compiler, x) for x in s.args[:3])
    if (d.binding.kind, a.binding.kind, b.binding.kind) != ("tmem", "smem", "smem"):
        raise UnsupportedOp(f"gemm_async {a.binding.kind} x {b.binding.kind} -> {d.binding.kind}")
    for flag in s.args[3:5]:
        if compiler.expr(flag) not in ("False", "0"):
            raise UnsupportedOp("gemm_async with a transposed operand")
    lane, column = d.box
    if lane[:2] != ("0", 128):
        raise UnsupportedOp(f"gemm_async into lanes {lane[0]}:+{lane[1]}; modelled: all 128")
    group = int(dict(s.config).get("cta_group", 1))
    if column[1] != b.extents[-2] * group or a.extents[-2] != 128:
        raise UnsupportedOp(
            f"gemm_async of [{a.extents[-2]}] x [{b.extents[-2]}] rows into {column[1]} columns, cta_group {group}"
        )
    formats = (a.binding.dtype, b.binding.dtype)
    compiler.call(
        "mma", f"{d.binding.name} + {column[0]}", str(column[1]), _shared(compiler, a), _shared(compiler, b),
        compiler.expr(s.args[5]), str(group), repr(formats),
    )  # fmt: skip


def _cast(compiler: Compiler, s: Any) -> None:
    target, source = (_Region(compiler, a) for a in s.args[:2])
    if (target.binding.kind, source.binding.kind) != ("regs", "regs") or source.binding.dtype != "float32":
        raise UnsupportedOp(
            f"cast {source.binding.dtype} in {source.binding.kind} -> {target.binding.dtype} in {target.binding.kind}"
        )
    first, count, _ = target.box[-1]
    compiler.call(
        "cast", target.binding.name, first, source.binding.name, source.box[-1][0], str(count), repr(target.binding.dtype)
    )


def _copy(compiler: Compiler, s: Any) -> None:
    target, source = (_Region(compiler, a) for a in s.args[:2])
    kinds = (target.binding.kind, source.binding.kind)
    rows = [start for start, _, varies in target.box if varies]
    if kinds != ("smem", "regs") or len(rows) != 1 or any(extent != 1 for extent in target.extents[:-1]):
        raise UnsupportedOp(f"copy {kinds[1]} -> {kinds[0]}; modelled: one register row per lane to shared memory")
    compiler.call("store_tile", target.binding.name, _shared(compiler, target), source.binding.name, source.box[-1][0])


TILE_OPERATIONS: Final[dict[str, Callable[[Compiler, Any], None]]] = {
    "tirx.tile.copy_async": _copy_async,
    "tirx.tile.gemm_async": _gemm_async,
    "tirx.tile.cast": _cast,
    "tirx.tile.copy": _copy,
}
