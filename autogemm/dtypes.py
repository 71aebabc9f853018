"""Element types the generator supports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class DType:
    """One operand type.

    Attributes:
        name: spelling of TVM, NumPy and torch (``float16``, ``bfloat16``).
        bits: width of one element.
        ptx: spelling in PTX instruction names (``f16``, ``bf16``).
        significand_bits: bits of the significand with the hidden one; integers up to ``2**significand_bits`` are exact.
    """

    name: str
    bits: int
    ptx: str
    significand_bits: int

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return self.bits // 8


# IEEE 754 binary16 (11-bit significand) and bfloat16 (8-bit significand).
DTYPES: Final[dict[str, DType]] = {
    "float16": DType(name="float16", bits=16, ptx="f16", significand_bits=11),
    "bfloat16": DType(name="bfloat16", bits=16, ptx="bf16", significand_bits=8),
}

_ALIASES: Final[dict[str, str]] = {"fp16": "float16", "half": "float16", "bf16": "bfloat16"}


def dtype(name: object) -> DType:
    """Return the DType called ``name`` (``fp16``, ``half`` and ``bf16`` are accepted too, and torch's own types).

    Raises:
        InputError: no such type.
    """
    spelled = str(name).removeprefix("torch.")
    found = DTYPES.get(_ALIASES.get(spelled, spelled))
    if found is None:
        raise InputError(f"unknown dtype {name!r}; supported: {', '.join(DTYPES)}")
    return found
