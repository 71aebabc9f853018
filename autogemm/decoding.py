"""Dataclasses from JSON, strictly by their type hints, so that nothing is ever half understood."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

from .config import Config
from .errors import InputError

_T = TypeVar("_T")


def decode(cls: type[_T], document: Any, where: str) -> _T:
    """Return a dataclass (or Config) from its JSON form, strictly by its type hints.

    Raises:
        InputError: an unknown, missing or ill-typed field; the message names its path.
    """
    return typing.cast(_T, _decode(cls, document, where))


@lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode(hint: Any, value: Any, where: str) -> Any:
    if hint is Config:
        if not isinstance(value, dict):
            raise InputError(f"{where} must be an object of knobs, got {value!r}")
        return Config.from_knobs(value)
    if is_dataclass(hint) and isinstance(hint, type):
        return _decode_dataclass(hint, value, where)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _decode(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value not in args or isinstance(value, bool):
            raise InputError(f"{where} must be one of {', '.join(map(str, args))}, got {value!r}")
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(kinds) != len(value):
            raise InputError(f"{where} must have {len(kinds)} entries, got {len(value)}")
        return tuple(_decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))
    if origin is dict and isinstance(value, Mapping):
        return {str(name): _decode(args[1], item, f"{where}.{name}") for name, item in value.items()}
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer of more digits than a float has room for
            number = math.inf
        if not math.isfinite(number):
            raise InputError(f"{where} must be finite, got {str(value)[:60]}")
        return number
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise InputError(f"{where} has the wrong type: {str(value)[:60]!r}")


def _decode_dataclass(cls: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise InputError(f"{where} must be an object, got {str(value)[:60]!r}")
    hints = _hints(cls)
    required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    unknown, missing = sorted(set(value) - set(hints)), sorted(required - set(value))
    if unknown or missing:
        parts = [f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("has unknown", unknown)) if names]
        raise InputError(f"{where} {' and '.join(parts)}")
    return cls(**{name: _decode(hints[name], item, f"{where}.{name}") for name, item in value.items()})
