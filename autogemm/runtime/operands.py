"""What two tensors ask for: the Problem behind ``torch.matmul(a, b)``, or why no kernel can take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from ..problem import MAX_EXTENT, Layout, Problem

# TMA addresses and row strides are multiples of 16 bytes, strides below 2**40 (CUDA Driver API, cuTensorMapEncodeTiled).
ALIGNMENT_BYTES: Final = 16
MAX_STRIDE_BYTES: Final = 1 << 40

DTYPES: Final[dict[torch.dtype, str]] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operands:
    """A product as kernels see it.

    Attributes:
        problem: None if it is none that kernels are generated for.
        dense: True if the rows of both operands follow each other without gaps, as rows of the database were measured.
        reason: why there is no problem; empty otherwise.
    """

    problem: Problem | None
    dense: bool = True
    reason: str = ""


def describe(a: torch.Tensor, b: torch.Tensor, device_type: str = "cuda") -> Operands:
    """Return what ``torch.matmul(a, b)`` asks for; a [M, K] and b [K, N] in any strides.

    Looks at what torch.matmul would accept only: where that raises, so should the caller by calling it. Addresses are not
    looked at, since they change from call to call.
    """
    if a.device.type != device_type or b.device.type != device_type:
        return _not(f"the tensors are on {a.device} and {b.device}, kernels run on {device_type}")
    if a.device != b.device:
        return _not(f"the tensors are on different devices, {a.device} and {b.device}")
    if a.dim() != 2 or b.dim() != 2:
        return _not(f"kernels take matrices, the tensors have {a.dim()} and {b.dim()} dimensions")
    if a.layout != torch.strided or b.layout != torch.strided:
        return _not(f"kernels take strided tensors, got {a.layout} and {b.layout}")
    dtype = DTYPES.get(a.dtype)
    if dtype is None or b.dtype != a.dtype:
        return _not(f"kernels take two float16 or two bfloat16 tensors, got {a.dtype} and {b.dtype}")
    (m, k), (k_b, n) = a.shape, b.shape
    if k != k_b:
        return _not(f"a is [{m}, {k}] and b is [{k_b}, {n}]: the inner extents differ")
    if not all(1 <= extent <= MAX_EXTENT for extent in (m, n, k)):
        return _not(f"extents {m}, {n}, {k} are not all from 1 to {MAX_EXTENT}")
    # The letter of the BLAS layout, and the row stride under it: A is N as [M,K] with K contiguous, B is T as [N,K] likewise.
    side_a = _side(m, k, *a.stride(), contiguous="N", transposed="T")
    side_b = _side(n, k, b.stride(1), b.stride(0), contiguous="T", transposed="N")
    if side_a is None or side_b is None:
        return _not(f"strides {a.stride()} and {b.stride()}: kernels take tensors with one contiguous dimension and rows apart")
    (letter_a, stride_a, width_a), (letter_b, stride_b, width_b) = side_a, side_b
    size = a.element_size()
    for name, stride in (("a", stride_a), ("b", stride_b)):
        if stride * size % ALIGNMENT_BYTES or stride * size >= MAX_STRIDE_BYTES:
            return _not(f"{name} has rows {stride * size} bytes apart; TMA needs a multiple of {ALIGNMENT_BYTES} below 2**40")
    layout: Layout = _LAYOUTS[letter_a, letter_b]
    problem = Problem(m=m, n=n, k=k, dtype=dtype, layout=layout)
    return Operands(problem=problem, dense=stride_a == width_a and stride_b == width_b)


_LAYOUTS: Final[dict[tuple[str, str], Layout]] = {
    ("N", "T"): "NT", ("N", "N"): "NN", ("T", "N"): "TN", ("T", "T"): "TT",
}  # fmt: skip


def _side(
    rows: int, k: int, row_stride: int, k_stride: int, *, contiguous: str, transposed: str
) -> tuple[str, int, int] | None:
    """Return the layout letter, row stride and row width of one operand; None if its rows overlap or nothing is contiguous.

    A row stride that is never used, that of a single row, counts as dense.
    """
    if k_stride == 1 or k == 1:
        stride = k if rows == 1 else row_stride
        return (contiguous, stride, k) if stride >= k else None
    if row_stride == 1 or rows == 1:
        return (transposed, k_stride, rows) if k_stride >= rows else None
    return None


def _not(reason: str) -> Operands:
    return Operands(problem=None, reason=reason)


def takes_out(out: object, a: torch.Tensor, b: torch.Tensor, m: int, n: int) -> bool:
    """Return whether a kernel may write a [m, n] product of ``a`` and ``b`` to ``out``; otherwise torch.matmul must judge it.

    It may if ``out`` is a dense matrix of the right shape, type and device, aligned, without history and apart from a and b.
    """
    if type(out) is not torch.Tensor or out.dtype != a.dtype or out.device != a.device:
        return False
    if out.shape != (m, n) or out.stride(1) != 1 or (m > 1 and out.stride(0) != n) or out.requires_grad or out.is_neg():
        return False
    start = out.data_ptr()
    if start % ALIGNMENT_BYTES:
        return False
    end = start + m * n * out.element_size()
    return _apart(a, start, end) and _apart(b, start, end)


def _apart(operand: torch.Tensor, start: int, end: int) -> bool:
    first = operand.data_ptr()
    (rows, cols), (row_stride, col_stride) = operand.shape, operand.stride()
    past = first + ((rows - 1) * row_stride + (cols - 1) * col_stride + 1) * operand.element_size()
    return past <= start or end <= first
