"""A second baseline: the algorithms that cuBLASLt's heuristic offers, to be searched like any other candidates."""

from __future__ import annotations

import ctypes
from typing import Final

from ..algorithm import Algorithm
from ..problem import Problem
from ..runtime.cublaslt import CublasLt, Heuristic
from ..runtime.operands import ALIGNMENT_BYTES

WORKSPACE_BYTES: Final = 64 << 20
MAX_ALGORITHMS: Final = 16

# cublasLtMatmulPreferenceAttributes_t
_MAX_WORKSPACE: Final = 1
_REDUCTION_SCHEME_MASK: Final = 3
_MIN_ALIGNMENT: Final = (5, 6, 7, 8)  # of A, B, C and D
# CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, and none: the others add the partial sums of a split K in 16 bits, and
# ``autogemm.matmul`` accumulates in float32.
_REDUCTIONS: Final = 2
_ALL_REDUCTIONS: Final = 7  # CUBLASLT_REDUCTION_SCHEME_MASK
_TORCH_ALIGNMENT_BYTES: Final = 256  # at least, of whole tensors from torch's allocator


def offered(lt: CublasLt, problem: Problem, limit: int = MAX_ALGORITHMS, *, dispatchable: bool = True) -> list[Algorithm]:
    """Return what cublasLtMatmulAlgoGetHeuristic offers for ``problem``, its own first choice first.

    They need WORKSPACE_BYTES at most.

    Args:
        dispatchable: those that take any dense operands at multiples of 16 bytes, as kernels do, and add in float32.
            False: those for whole tensors from torch's allocator, with any way to add: what a user could pick by hand.

    Raises:
        LaunchError: cuBLASLt offers none, or fails.
    """
    library, product, preference = lt.library, lt.product(problem), ctypes.c_void_p()
    with lt.driver.context(lt.device):
        lt.check(library.cublasLtMatmulPreferenceCreate(ctypes.addressof(preference)), "make a preference")
        try:
            alignment = ALIGNMENT_BYTES if dispatchable else _TORCH_ALIGNMENT_BYTES
            wanted = {
                _MAX_WORKSPACE: ctypes.c_uint64(WORKSPACE_BYTES),
                _REDUCTION_SCHEME_MASK: ctypes.c_uint32(_REDUCTIONS if dispatchable else _ALL_REDUCTIONS),
                **dict.fromkeys(_MIN_ALIGNMENT, ctypes.c_uint32(alignment)),
            }
            for attribute, value in wanted.items():
                status = library.cublasLtMatmulPreferenceSetAttribute(
                    preference.value, attribute, ctypes.addressof(value), ctypes.sizeof(value)
                )
                lt.check(status, f"set preference {attribute}")
            found, count = (Heuristic * limit)(), ctypes.c_int()
            status = library.cublasLtMatmulAlgoGetHeuristic(
                lt.handle, product.operation, product.b, product.a, product.d, product.d, preference.value, limit,
                ctypes.addressof(found), ctypes.addressof(count),
            )  # fmt: skip
            lt.check(status, f"find an algorithm for {problem}")
        finally:
            library.cublasLtMatmulPreferenceDestroy(preference.value)
        usable = [found[i] for i in range(count.value) if found[i].state == 0]
        return [lt.described(bytes(one.algo), one.workspace) for one in usable]
