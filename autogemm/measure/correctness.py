"""Whether a kernel computes the product: exact integers compared for equality, random numbers against float64.

Before every run the output and the memory around it are poisoned, so that what another kernel left can't pass for a result
and a store outside of the output is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from ..dtypes import DTYPES
from ..problem import Problem
from ..results import Outcome
from .faults import Fault, TrialFault

# Bytes of poison on either side of the output. A wrong tile lands within a few rows of where it should be.
GUARD_BYTES: Final = 1 << 20
_POISON: Final = 0x5A
# Rows of the reference computed at a time: float64 temporaries stay within this many bytes.
_CHUNK_BYTES: Final = 1 << 30
# A kernel may be this much worse than cuBLAS. Both round float32 sums once, so their errors agree to the third digit.
ERROR_MARGIN: Final = 1.1
# Integer operands lie in -INTEGER_LIMIT..INTEGER_LIMIT, so that float32 sums are exact for K up to 2**24 / 9.
INTEGER_LIMIT: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Operands:
    """a [M, K], b [N, K] and what their product must be.

    Attributes:
        expected: [M, N]: float32 for random operands (float64 product, rounded once, which adds 6e-8), or the operands'
            dtype for integers, to be matched exactly.
        checksum: of a and b together.
        baseline_error: relative Frobenius error of torch.matmul on the same operands; 0 for integers.
    """

    a: torch.Tensor
    b: torch.Tensor
    expected: torch.Tensor
    exact: bool
    checksum: int
    baseline_error: float


class GuardedOutput:
    """An output matrix [M, N] inside a larger buffer whose margins are watched.

    Attributes:
        matrix: the output, contiguous.
    """

    def __init__(self, problem: Problem, dtype: torch.dtype, device: torch.device) -> None:
        size = problem.m * problem.n * DTYPES[problem.dtype].bytes
        padded = -(-size // 16) * 16
        self._buffer = torch.empty(padded + 2 * GUARD_BYTES, dtype=torch.uint8, device=device)
        self._before, self._after = self._buffer[:GUARD_BYTES], self._buffer[GUARD_BYTES + size :]
        self.matrix = self._buffer[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(problem.m, problem.n)

    def poison(self) -> None:
        """Fill the output with NaN and its surroundings with a pattern."""
        self._before.fill_(_POISON)
        self._after.fill_(_POISON)
        self.matrix.fill_(float("nan"))

    def intact(self) -> bool:
        """Return whether nothing but the output was written."""
        return bool(((self._before == _POISON).all() & (self._after == _POISON).all()).item())


def checksum(*tensors: torch.Tensor) -> int:
    """Return a number that changes when a 16-bit element of ``tensors`` does."""
    return sum(int(t.view(torch.int16).sum(dtype=torch.int64).item()) for t in tensors)


def random_operands(problem: Problem, dtype: torch.dtype, generator: torch.Generator) -> Operands:
    """Return fresh standard-normal operands, their product in float64 and torch.matmul's error on them."""
    device = generator.device
    a = torch.randn(problem.m, problem.k, generator=generator, device=device, dtype=torch.float32).to(dtype)
    b = torch.randn(problem.n, problem.k, generator=generator, device=device, dtype=torch.float32).to(dtype)
    expected = _product(a, b, torch.float32)
    baseline = relative_error(torch.matmul(a, b.T), expected)
    return Operands(a=a, b=b, expected=expected, exact=False, checksum=checksum(a, b), baseline_error=baseline)


def integer_operands(problem: Problem, dtype: torch.dtype, generator: torch.Generator) -> Operands:
    """Return small integer operands and their product: exact in float32, then rounded once to ``dtype``."""
    device = generator.device
    a, b = (
        torch.randint(-INTEGER_LIMIT, INTEGER_LIMIT + 1, (rows, problem.k), generator=generator, device=device).to(dtype)
        for rows in (problem.m, problem.n)
    )
    return Operands(a=a, b=b, expected=_product(a, b, dtype), exact=True, checksum=checksum(a, b), baseline_error=0.0)


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a . b^T in float64, rounded to ``dtype``, some rows at a time."""
    wide = b.double().T
    out = torch.empty(a.shape[0], b.shape[0], dtype=dtype, device=a.device)
    rows = max(1, _CHUNK_BYTES // (8 * (a.shape[1] + b.shape[0])))
    for start in range(0, a.shape[0], rows):
        product = a[start : start + rows].double() @ wide
        # float64 to float16 by way of float32 would round twice; to float32 and exact integers it makes no difference.
        out[start : start + rows] = product.float().to(dtype)
    return out


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ``|result - expected| / |expected|`` in the Frobenius norm; NaN if ``result`` holds a NaN or infinity.

    Differences are taken in float32, which is finer than any 16-bit result, and summed in float64, some rows at a time.
    """
    rows = max(1, _CHUNK_BYTES // (8 * result.shape[1]))
    squares = torch.zeros(2, dtype=torch.float64, device=result.device)
    for start in range(0, result.shape[0], rows):
        wanted = expected[start : start + rows]
        difference = result[start : start + rows].float() - wanted
        squares[0] += torch.linalg.vector_norm(difference, dtype=torch.float64) ** 2
        squares[1] += torch.linalg.vector_norm(wanted, dtype=torch.float64) ** 2
    error, norm = (float(x) for x in squares.sqrt().tolist())
    return error / norm if norm > 0 else error


def check(
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object], operands: Operands, output: GuardedOutput
) -> float:
    """Run a kernel once on ``operands``, alone, and return its relative error (0 where integers match exactly).

    Raises:
        TrialFault: INCORRECT: elements missing or wrong, stores outside the output, or changed operands.
    """
    output.poison()
    _synchronize(output.matrix.device)
    run(operands.a, operands.b, output.matrix)
    _synchronize(output.matrix.device)
    error = 0.0 if operands.exact else relative_error(output.matrix, operands.expected)
    problems = _problems(operands, output, error)
    if problems:
        raise TrialFault(Fault(outcome=Outcome.INCORRECT, detail="; ".join(problems), sticky=False))
    return error


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _problems(operands: Operands, output: GuardedOutput, error: float) -> list[str]:
    found = []
    if not output.intact():
        found.append("it stored outside the output")
    if checksum(operands.a, operands.b) != operands.checksum:
        found.append("it changed its operands")
    result, expected = output.matrix, operands.expected
    if operands.exact:
        if not torch.equal(result, expected):
            found.append(_where(result, expected))
    elif not error <= error_limit(operands):
        unwritten = int(result.isnan().sum().item())
        found.append(f"{unwritten} elements hold NaN" if unwritten else _exceeds(error, error_limit(operands)))
    return found


def error_limit(operands: Operands) -> float:
    """Return the largest relative error that passes: a little above cuBLAS's, or one rounding where few elements average."""
    name = str(operands.a.dtype).removeprefix("torch.")
    return max(ERROR_MARGIN * operands.baseline_error, 2.0 ** -DTYPES[name].significand_bits)


def _exceeds(error: float, limit: float) -> str:
    return f"relative error {error:.2e}, limit {limit:.2e}"


def _where(result: torch.Tensor, expected: torch.Tensor) -> str:
    wrong = result != expected
    count = int(wrong.sum().item())
    unwritten = int(result.isnan().sum().item())
    row, col = (int(i) for i in wrong.nonzero()[0].tolist())
    text = f"{count} of {wrong.numel()} integer results are wrong, first at [{row}, {col}]"
    return text + (f"; {unwritten} were never written" if unwritten else "")
