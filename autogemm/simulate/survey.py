"""Dry run of a program, in which no wait blocks: what each role does, and who arrives where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .report import role
from .state import OFFSET_MASK

if TYPE_CHECKING:
    from .program import Program


class _SurveyWarp:
    """The little of a Warp that generated code reads."""

    def __init__(self, rank: int, group: int, index: int, ctas: int) -> None:
        self.rank, self.group, self.index, self.bx = rank, group, index, rank
        self.lag = 0.0


class _EnoughSeen(Exception):
    """A warp has gone on for as long as is of interest. (No StopIteration: generators must not raise that.)"""


class _Dummy:
    """Stands for any region, tensor map or register tile in a survey."""

    words = None


class Survey:
    """Dry run of a program's first cluster: which warp does what, and who arrives on which mbarrier."""

    _ACTIVITIES: Final = ("tma_load", "mma", "wgmma", "tmem_load", "tma_store", "store_tile", "store_vector", "store_matrix")
    LIMIT: Final = 20_000  # operations per warp; a loop on data that never changes here would not end

    def __init__(self, program: Program, parameters: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.P, self.shapes = dict(parameters), dict(shapes)
        self.program = program
        self.numerics = False
        self.activities: dict[tuple[int, int, int], set[str]] = {}
        self._arrivals: dict[int, set[tuple[int, int, int]]] = {}
        self._where = (0, 0, 0)
        for rank in range(program.cluster_ctas):
            for group in range(program.warpgroups):
                for index in range(4):
                    self._where = (rank, group, index)
                    self._left = self.LIMIT
                    with suppress(_EnoughSeen):
                        for _ in program.main(self, _SurveyWarp(rank, group, index, program.cluster_ctas)):
                            pass

    def arrivers(self, offset: int) -> list[str]:
        """Return the roles that arrive on the mbarrier at byte ``offset`` (or on one of its array)."""
        family = next(
            (range(start, start + 8 * n) for start, n, _ in self.program.barriers if start <= offset < start + 8 * n), ()
        )
        warps: set[tuple[int, int, int]] = set()
        for candidate in family or (offset,):
            warps |= self._arrivals.get(candidate, set())
        names: dict[str, set[int]] = {}
        for rank, group, index in sorted(warps):
            title = role(self.activities.get((rank, group, index), set()))
            names.setdefault(f"wg{group}" + (f" {title}" if title else f".w{index}"), set()).add(rank)
        return [f"{name} of cta{'+'.join(map(str, sorted(ranks)))}" for name, ranks in names.items()]

    def _note(self, pointer: Any) -> None:
        for offset in np.unique(np.asarray(pointer) & OFFSET_MASK):
            self._arrivals.setdefault(int(offset), set()).add(self._where)

    def bar_result(self, warp: Any) -> int:
        """Votes pass, so that what depends on them is seen."""
        return 1

    def load_word(self, warp: Any, pointer: Any) -> int:
        """Any TMEM address will do."""
        return 0

    def get(self, warp: Any, reg: Any, dtype: str, index: Any) -> Any:
        """Registers hold nothing here."""
        return np.zeros(32, np.float32)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("regs", "box_map", "encode_map", "operand", "tile_region", "row_region", "map_region"):
            return lambda *args, **kwargs: _Dummy()

        def operation(warp: Any, mask: Any = None, *args: Any, **kwargs: Any) -> int:
            self._left -= 1
            if self._left < 0:
                raise _EnoughSeen
            if name in self._ACTIVITIES:
                kind = "store_shared" if name.startswith("store_") else name
                self.activities.setdefault(self._where, set()).add(kind)
            if name in ("mbarrier_arrive", "mbarrier_expect", "mma_commit"):
                self._note(args[0])
            elif name == "tma_load":
                self._note(args[3])
            elif name == "store_async":
                self._note(args[2])
            return 0

        return operation
