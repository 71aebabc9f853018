"""Local variables before their first write: whatever computes with one is reported, and gets a zero.

Generated code keeps a scalar in a Python variable. Checking each of its reads would cost more than the rest of the execution;
so the variable starts as an object that reports itself when used. A copy is no use: it is the copy's use that counts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np


class Unwritten:
    """Stands for a value that was never written.

    Args:
        report: called at each use.
    """

    __slots__ = ("_report",)
    __array_ufunc__ = None  # arithmetic with vectors comes here instead of going through their elements

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report

    def _use(self) -> int:
        self._report()
        return 0

    def __int__(self) -> int:
        return self._use()

    def __index__(self) -> int:
        return self._use()

    def __float__(self) -> float:
        return float(self._use())

    def __bool__(self) -> bool:
        return bool(self._use())

    def __hash__(self) -> int:
        return hash(self._use())

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self._use(), dtype)

    def __neg__(self) -> int:
        return -self._use()

    def __invert__(self) -> int:
        return ~self._use()


_BOTH_SIDES: Final = ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
_COMPARISONS: Final = ("lt", "le", "gt", "ge", "eq", "ne")


def _left(compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: compute(self._use(), other)


def _right(compute: Callable[[Any, Any], Any], value: int) -> Callable[[Any, Any], Any]:
    return lambda self, other: compute(other, self._use() + value)


for _name in _BOTH_SIDES:
    _compute = getattr(operator, f"__{_name}__")
    setattr(Unwritten, f"__{_name}__", _left(_compute))
    setattr(Unwritten, f"__r{_name}__", _right(_compute, 1 if _name in ("floordiv", "mod") else 0))  # no division by zero
for _name in _COMPARISONS:
    setattr(Unwritten, f"__{_name}__", _left(getattr(operator, f"__{_name}__")))


def merge(mask: Any, new: Any, old: Any) -> Any:
    """Return ``new`` in the lanes of ``mask``, ``old`` in the others."""
    return new if isinstance(old, Unwritten) else np.where(mask, new, old)
