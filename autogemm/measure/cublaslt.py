"""A second baseline: the algorithms that cuBLASLt's heuristic offers, to be searched like any other candidates.

Called through ctypes in the library that torch's wheel brings; constants and layouts are those of cublasLt.h and
library_types.h (CUDA 13).
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any, Final

import torch

from ..errors import LaunchError, MissingDependency
from ..runtime.driver import cuda_driver

WORKSPACE_BYTES: Final = 64 << 20
MAX_ALGORITHMS: Final = 16

_COMPUTE_32F: Final = 68
_R_32F: Final = 0
_TYPES: Final = {torch.float16: 2, torch.bfloat16: 14}
_OP_T: Final = 1
_DESC_TRANSA: Final = 3
_PREF_MAX_WORKSPACE: Final = 1
_PREF_MIN_ALIGNMENT: Final = (5, 6, 7, 8)  # of A, B, C and D


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


def _library() -> Any:
    torch.zeros(1, device="cuda")  # torch loads its CUDA libraries on first use
    major = str(torch.version.cuda).split(".")[0]
    name = f"libcublasLt.so.{major}"
    places = [name]
    for folder in sys.path:
        places += [str(p) for p in sorted(Path(folder or ".").glob(f"nvidia/*/lib/{name}"))]
    for place in places:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise MissingDependency(f"{name} was not found beside torch; the cublaslt baseline needs torch's CUDA build")


class Algorithm:
    """One cuBLASLt algorithm for one problem size, callable like a kernel: ``algorithm(a, b, out)``."""

    def __init__(self, owner: CublasLt, plan: _Plan, found: _Heuristic) -> None:
        self._owner, self._plan, self._found = owner, plan, found

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Put ``out = a . b^T`` on the current stream.

        Raises:
            LaunchError: cuBLASLt refused.
        """
        owner, plan = self._owner, self._plan
        out_pointer = ctypes.c_void_p(out.data_ptr())
        owner.check(
            owner.library.cublasLtMatmul(
                owner.handle, plan.operation, ctypes.byref(_ONE), ctypes.c_void_p(b.data_ptr()), plan.b,
                ctypes.c_void_p(a.data_ptr()), plan.a, ctypes.byref(_ZERO), out_pointer, plan.d, out_pointer, plan.d,
                ctypes.byref(self._found.algo), ctypes.c_void_p(owner.workspace.data_ptr()), ctypes.c_size_t(WORKSPACE_BYTES),
                ctypes.c_void_p(cuda_driver().current_stream(owner.device)),
            ),
            "run an algorithm",
        )  # fmt: skip
        return out


_ONE: Final = ctypes.c_float(1.0)
_ZERO: Final = ctypes.c_float(0.0)


class _Plan:
    """Descriptors of one problem size; row-major D = A . B^T is column-major D^T = op(B) . A with op = transpose."""

    def __init__(self, owner: CublasLt, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        library, kind = owner.library, _TYPES[a.dtype]
        (m, k), n = a.shape, b.shape[0]
        self.operation = ctypes.c_void_p()
        owner.check(library.cublasLtMatmulDescCreate(ctypes.byref(self.operation), _COMPUTE_32F, _R_32F), "make a descriptor")
        transpose = ctypes.c_int32(_OP_T)
        owner.check(
            library.cublasLtMatmulDescSetAttribute(self.operation, _DESC_TRANSA, ctypes.byref(transpose), ctypes.c_size_t(4)),
            "set the transposition",
        )
        self.b = self._layout(owner, kind, k, n, b.stride(0))
        self.a = self._layout(owner, kind, k, m, a.stride(0))
        self.d = self._layout(owner, kind, n, m, out.stride(0))

    @staticmethod
    def _layout(owner: CublasLt, kind: int, rows: int, cols: int, leading: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        status = owner.library.cublasLtMatrixLayoutCreate(
            ctypes.byref(made), kind, ctypes.c_uint64(rows), ctypes.c_uint64(cols), ctypes.c_int64(max(leading, rows))
        )
        owner.check(status, "make a layout")
        return made


class CublasLt:
    """A cuBLASLt handle with a workspace of WORKSPACE_BYTES; for one stream at a time."""

    def __init__(self, device: int) -> None:
        """Create the handle.

        Raises:
            MissingDependency: the library is not there.
        """
        self.device = device
        with torch.cuda.device(device):
            self.library = _library()
            self.handle = ctypes.c_void_p()
            self.check(self.library.cublasLtCreate(ctypes.byref(self.handle)), "start")
            self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device}")

    def check(self, status: int, what: str) -> None:
        """Raise LaunchError unless ``status`` is CUBLAS_STATUS_SUCCESS."""
        if status != 0:
            raise LaunchError(f"cuBLASLt could not {what}: status {status}")

    def algorithms(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, limit: int = MAX_ALGORITHMS) -> list[Algorithm]:
        """Return what cublasLtMatmulAlgoGetHeuristic offers for these sizes, its own first choice first.

        Args:
            a: [M, K]; b: [N, K]; out: [M, N]; rows contiguous. Later calls may use other tensors of the same shapes, strides
                and alignment.
        """
        library, plan = self.library, _Plan(self, a, b, out)
        preference = ctypes.c_void_p()
        self.check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "make a preference")
        size = ctypes.c_size_t(WORKSPACE_BYTES)
        set_attribute = library.cublasLtMatmulPreferenceSetAttribute
        self.check(
            set_attribute(preference, _PREF_MAX_WORKSPACE, ctypes.byref(size), ctypes.c_size_t(8)), "bound the workspace"
        )
        for attribute, tensor in zip(_PREF_MIN_ALIGNMENT, (b, a, out, out), strict=True):
            alignment = ctypes.c_uint32(min(256, tensor.data_ptr() & -tensor.data_ptr()))
            self.check(set_attribute(preference, attribute, ctypes.byref(alignment), ctypes.c_size_t(4)), "state the alignment")
        found = (_Heuristic * limit)()
        count = ctypes.c_int()
        self.check(
            library.cublasLtMatmulAlgoGetHeuristic(
                self.handle, plan.operation, plan.b, plan.a, plan.d, plan.d, preference, limit, found, ctypes.byref(count)
            ),
            "find an algorithm",
        )
        library.cublasLtMatmulPreferenceDestroy(preference)
        return [Algorithm(self, plan, found[i]) for i in range(count.value) if found[i].state == 0]
