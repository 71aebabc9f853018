"""A compiled kernel: its generated code, its buffers, barriers and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from .layout import Offsets
from .race import RegionTable
from .survey import Survey

ITEM_BYTES: Final = {
    "float16": 2, "bfloat16": 2, "float32": 4, "uint64": 8, "int64": 8, "uint32": 4, "int32": 4, "uint16": 2, "uint8": 1,
    "int8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBuffer:
    """One buffer in shared memory: byte offset, logical shape, element type."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def elements(self) -> int:
        """Elements of the buffer."""
        return int(np.prod(self.shape))


class TileBuffer:
    """A shared-memory buffer as the tile level addresses it: physical unit offset of every coordinate.

    Attributes:
        units: 2-byte-unit offsets from the start of shared memory, of the buffer's shape (element size 2).
    """

    __slots__ = ("buffer", "elements", "linear", "units")

    def __init__(self, buffer: SharedBuffer, elements: Offsets) -> None:
        self.buffer = buffer
        self.elements = elements  # physical element offset from the buffer's start
        self.linear = bool((elements.reshape(-1) == np.arange(elements.size)).all())
        self.units = elements + buffer.offset // 2 if buffer.itemsize == 2 else elements

    def element(self, *index: Any) -> Any:
        """Return the physical element offset at a coordinate (integers or lane vectors)."""
        found = self.elements[index]
        return int(found) if found.ndim == 0 else found


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalBuffer:
    """A global-memory parameter: shape entries are integers or names of run-time extents."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(kw_only=True)
class Program:
    """A compiled PrimFunc.

    Attributes:
        source: generated Python.
        main: generator function (machine, warp).
        grid: CTAs to launch, from parameter values.
        cluster_ctas, warpgroups: CTAs per cluster and warpgroups per CTA.
        smem_bytes: dynamic shared memory per CTA.
        barriers: (byte offset, count, name) of each array of mbarriers.
        buffers, scalars: parameters in order; the former are the operands.
        workspaces: further global buffers, of 32-bit words that the CTAs share; zero before the launch.
        programmatic: it may start while the kernel before on the stream runs; set where it holds a griddepcontrol.wait.
    """

    level: Literal["tile", "ptx"]
    source: str
    main: Callable[[Any, Any], Any]
    grid: Callable[[Mapping[str, int]], int]
    cluster_ctas: int
    warpgroups: int
    smem_bytes: int
    barriers: list[tuple[int, int, str]]
    shared_buffers: list[SharedBuffer]
    buffers: list[GlobalBuffer]
    scalars: list[tuple[str, str]]
    workspaces: list[GlobalBuffer] = field(default_factory=list)
    programmatic: bool = False
    regions: RegionTable = field(default_factory=RegionTable)

    def survey(self, parameters: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> Survey:
        """Return a dry run of one cluster: no wait blocks, so that every role shows what it would do."""
        return Survey(self, parameters, shapes)
