"""The question: one matrix product ``D[M,N] = epilogue(A[M,K] . B[N,K]^T)``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from .dtypes import dtype as lookup_dtype
from .errors import InputError

Layout = Literal["NT", "NN", "TN", "TT"]
Epilogue = Literal["none"]

# Row-major BLAS letters: first A (N = [M,K] with K contiguous), then B (T = [N,K] with K contiguous).
LAYOUTS: Final[tuple[Layout, ...]] = ("NT", "NN", "TN", "TT")
EPILOGUES: Final[tuple[Epilogue, ...]] = ("none",)

# Extents are int32 kernel arguments and TMA coordinates are signed 32-bit (PTX ISA, cp.async.bulk.tensor).
MAX_EXTENT: Final = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One GEMM: extents, element type, layout and epilogue. Accumulation is float32.

    Attributes:
        m, n, k: extents in elements.
        dtype: type of A, B and D.
        layout: row-major BLAS letters; generated kernels take ``NT`` (A ``[M,K]``, B ``[N,K]``, both K-contiguous).
        epilogue: what is applied to the accumulator before D is stored.
    """

    m: int
    n: int
    k: int
    dtype: str = "float16"
    layout: Layout = "NT"
    epilogue: Epilogue = "none"

    def __post_init__(self) -> None:
        for name, extent in (("M", self.m), ("N", self.n), ("K", self.k)):
            if isinstance(extent, bool) or not isinstance(extent, int):
                raise InputError(f"{name} must be an integer, got {extent!r}")
            if not 1 <= extent <= MAX_EXTENT:
                raise InputError(f"{name} must be between 1 and {MAX_EXTENT}, got {extent}")
        object.__setattr__(self, "dtype", lookup_dtype(self.dtype).name)
        if self.layout not in LAYOUTS:
            raise InputError(f"unknown layout {self.layout!r}; supported: {', '.join(LAYOUTS)}")
        if self.epilogue not in EPILOGUES:
            raise InputError(f"unknown epilogue {self.epilogue!r}; supported: {', '.join(EPILOGUES)}")

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiply and an add counted as two."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """Least bytes of device memory traffic: A and B read once, D written once."""
        return (self.m * self.k + self.n * self.k + self.m * self.n) * lookup_dtype(self.dtype).bytes

    @property
    def shape(self) -> str:
        """``MxNxK``, the spelling of the command line."""
        return f"{self.m}x{self.n}x{self.k}"

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype} {self.layout}" + ("" if self.epilogue == "none" else f" {self.epilogue}")


_SHAPE: Final = re.compile(r"(-?\d+)[xX*](-?\d+)[xX*](-?\d+)", re.ASCII)


def parse_shape(text: str) -> tuple[int, int, int]:
    """Return (M, N, K) from ``MxNxK``.

    Raises:
        InputError: not three integers joined by ``x``, or an extent below 1.
    """
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise InputError(f"shape {text!r} is not MxNxK; give three positive integers, such as 4096x4096x4096")
    m, n, k = (int(part) for part in match.groups())
    Problem(m=m, n=n, k=k)
    return m, n, k
