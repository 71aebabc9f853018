"""cuBLASLt algorithms made callable on torch tensors: restored from their bytes, without any search.

Called through ctypes in the library that torch's wheel brings; constants and layouts are those of cublasLt.h and
library_types.h (CUDA 13). A call costs one C call: descriptors are made once per problem, arguments are plain integers.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from ..algorithm import DATA_BYTES, Algorithm
from ..config import LaunchKnobs
from ..errors import InputError, LaunchError, MissingDependency
from ..problem import Problem
from .driver import Driver, HomeContext, cuda_driver
from .operands import ALIGNMENT_BYTES

_COMPUTE_32F: Final = 68
_R_32F: Final = 0
_TYPES: Final = {"float16": 2, "bfloat16": 14}
_OP_T: Final = 1
_DESC_TRANSA: Final = 3
# CUBLASLT_ALGO_CONFIG_*: number and C type of each attribute that an Algorithm names.
_ATTRIBUTES: Final[dict[str, tuple[int, Any]]] = {
    "algo_id": (0, ctypes.c_int32), "tile_id": (1, ctypes.c_uint32), "split_k": (2, ctypes.c_int32),
    "reduction_scheme": (3, ctypes.c_uint32), "cta_swizzling": (4, ctypes.c_uint32), "custom_option": (5, ctypes.c_uint32),
    "stages_id": (6, ctypes.c_uint32), "inner_shape_id": (7, ctypes.c_uint16), "cluster_shape_id": (8, ctypes.c_uint16),
}  # fmt: skip
_STATUS: Final = {
    1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH", 11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED",
}  # fmt: skip

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: Final[dict[str, list[Any]]] = {
    "cublasLtCreate": [_POINTER],
    "cublasLtMatmulDescCreate": [_POINTER, _INT, _INT],
    "cublasLtMatmulDescSetAttribute": [_POINTER, _INT, _POINTER, _SIZE],
    "cublasLtMatrixLayoutCreate": [_POINTER, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64],
    "cublasLtMatmulPreferenceCreate": [_POINTER],
    "cublasLtMatmulPreferenceSetAttribute": [_POINTER, _INT, _POINTER, _SIZE],
    "cublasLtMatmulPreferenceDestroy": [_POINTER],
    "cublasLtMatmulAlgoGetHeuristic": [_POINTER] * 7 + [_INT, _POINTER, _POINTER],
    "cublasLtMatmulAlgoConfigGetAttribute": [_POINTER, _INT, _POINTER, _SIZE, _POINTER],
    "cublasLtMatmulAlgoCheck": [_POINTER] * 8,
    "cublasLtMatmul": [_POINTER] * 14 + [_SIZE, _POINTER],
}


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", ctypes.c_ubyte * DATA_BYTES),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@lru_cache(maxsize=1)
def library() -> Any:
    """Return torch's cuBLASLt library, its functions typed.

    Raises:
        MissingDependency: there is none.
    """
    major = str(torch.version.cuda or "").split(".")[0]
    name = f"libcublasLt.so.{major}" if major else "libcublasLt.so"
    # The one that torch has loaded; else the one beside torch; else the system's.
    places: list[tuple[str, int]] = [(name, os.RTLD_NOW | os.RTLD_NOLOAD)]
    for folder in sys.path:
        places += [(str(p), os.RTLD_NOW) for p in sorted(Path(folder or ".").glob(f"nvidia/*/lib/{name}"))]
    for place, mode in [*places, (name, os.RTLD_NOW)] if major else []:
        try:
            return typed(ctypes.CDLL(place, mode=mode))
        except OSError:
            continue
    raise MissingDependency(f"{name} was not found beside torch; cuBLASLt's algorithms need torch's CUDA build")


def typed(loaded: Any) -> Any:
    """Return ``loaded`` with the argument types of every function used here, so that plain integers pass for pointers."""
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    loaded.cublasLtGetVersion.argtypes, loaded.cublasLtGetVersion.restype = [], ctypes.c_size_t
    return loaded


def library_version() -> int:
    """Return cublasLtGetVersion() of torch's library; 0 if there is none."""
    try:
        return int(library().cublasLtGetVersion())
    except MissingDependency:
        return 0


class Product:
    """Descriptors of one problem, never freed: row-major D = A . B^T is column-major D^T = op(B) . A with op = transpose.

    Attributes:
        operation, a, b, d: handles as integers.
    """

    def __init__(self, lt: CublasLt, problem: Problem) -> None:
        if problem.layout != "NT" or problem.epilogue != "none":
            raise InputError(f"cuBLASLt's algorithms are used for layout NT without an epilogue; the problem is {problem}")
        kind, m, n, k = _TYPES[problem.dtype], problem.m, problem.n, problem.k
        made = ctypes.c_void_p()
        lt.check(lt.library.cublasLtMatmulDescCreate(ctypes.addressof(made), _COMPUTE_32F, _R_32F), "make a descriptor")
        self.operation = int(made.value or 0)
        transpose = ctypes.c_int32(_OP_T)
        status = lt.library.cublasLtMatmulDescSetAttribute(self.operation, _DESC_TRANSA, ctypes.addressof(transpose), 4)
        lt.check(status, "set the transposition")
        self.b, self.a, self.d = (self._layout(lt, kind, rows, cols) for rows, cols in ((k, n), (k, m), (n, m)))

    @staticmethod
    def _layout(lt: CublasLt, kind: int, rows: int, cols: int) -> int:
        made = ctypes.c_void_p()
        lt.check(lt.library.cublasLtMatrixLayoutCreate(ctypes.addressof(made), kind, rows, cols, rows), "make a layout")
        return int(made.value or 0)


class CublasLt:
    """cuBLASLt on one GPU. Thread-safe, for any number of streams."""

    def __init__(self, device: int, *, loaded: Any = None, driver: Driver | None = None) -> None:
        """Create the library's handle.

        Args:
            loaded: the typed library; torch's by default.

        Raises:
            MissingDependency: no library, no CUDA device or no cuda-bindings.
            LaunchError: cuBLASLt refuses the GPU.
        """
        self.device = device
        self.library = library() if loaded is None else loaded
        self.driver = cuda_driver() if driver is None else driver
        self.version = int(self.library.cublasLtGetVersion())
        made = ctypes.c_void_p()
        with self.driver.context(device):
            self.check(self.library.cublasLtCreate(ctypes.addressof(made)), "start")
        self.handle = int(made.value or 0)
        self._products: dict[Problem, Product] = {}
        self._lock = threading.Lock()

    def check(self, status: int, what: str) -> None:
        """Raise LaunchError unless ``status`` is CUBLAS_STATUS_SUCCESS."""
        if status != 0:
            raise LaunchError(f"cuBLASLt could not {what}: {_STATUS.get(status, f'status {status}')}")

    def product(self, problem: Problem) -> Product:
        """Return the descriptors of ``problem`` with dense operands, made once."""
        with self._lock:
            found = self._products.get(problem)
            if found is None:
                found = self._products[problem] = Product(self, problem)
        return found

    def described(self, data: bytes, workspace_bytes: int) -> Algorithm:
        """Return the Algorithm whose cublasLtMatmulAlgo_t holds ``data``, its attributes read by the library."""
        opaque = ctypes.create_string_buffer(data, DATA_BYTES)
        values: dict[str, int] = {}
        for name, (number, kind) in _ATTRIBUTES.items():
            value, written = kind(), ctypes.c_size_t()
            status = self.library.cublasLtMatmulAlgoConfigGetAttribute(
                ctypes.addressof(opaque), number, ctypes.addressof(value), ctypes.sizeof(kind), ctypes.addressof(written)
            )
            self.check(status, f"read {name} of an algorithm")
            values[name] = int(value.value)
        return Algorithm(data=data.hex(), version=self.version, workspace_bytes=workspace_bytes, **values)

    def restore(self, algorithm: Algorithm, problem: Problem) -> LoadedAlgorithm:
        """Return ``algorithm`` ready to compute ``problem`` on dense, 16-byte aligned tensors.

        Raises:
            LaunchError: it is of another library version, its bytes are not what it says, or cuBLASLt can't run it here.
        """
        if algorithm.version != self.version:
            raise LaunchError(
                f"the algorithm is of cuBLASLt {algorithm.version}, the library here is {self.version}; tune the shape again"
            )
        data = bytes.fromhex(algorithm.data)
        with self.driver.context(self.device):
            found = self.described(data, algorithm.workspace_bytes)
            if found != algorithm:
                raise LaunchError(f"the bytes of cuBLASLt algorithm {algorithm.name} say {found.name}; tune the shape again")
            product, result = self.product(problem), Heuristic()
            opaque = ctypes.create_string_buffer(data, DATA_BYTES)
            status = self.library.cublasLtMatmulAlgoCheck(
                self.handle, product.operation, product.b, product.a, product.d, product.d, ctypes.addressof(opaque),
                ctypes.addressof(result),
            )  # fmt: skip
            self.check(status, f"run algorithm {algorithm.name} for {problem} on this GPU")
            if result.workspace > algorithm.workspace_bytes:
                raise LaunchError(
                    f"cuBLASLt wants {result.workspace} bytes of workspace for algorithm {algorithm.name}, which was measured "
                    f"with {algorithm.workspace_bytes}; tune the shape again"
                )
        return LoadedAlgorithm(self, algorithm, problem, opaque)


class LoadedAlgorithm:
    """One algorithm for one problem on one GPU: ``algorithm(a, b, out)`` computes ``out[M,N] = a[M,K] . b[N,K]^T``.

    A machine.Launch. Calls are asynchronous, on the caller's current stream, and may be captured into a CUDA graph; threads may
    share it. Workspace is a temporary of torch's caching allocator in each call: what the next call on the same stream gets
    again, what no other stream shares meanwhile, and in a capture part of the graph's own memory.
    """

    def __init__(self, lt: CublasLt, algorithm: Algorithm, problem: Problem, opaque: ctypes.Array[ctypes.c_char]) -> None:
        product = lt.product(problem)
        self.algorithm, self.device = algorithm, lt.device
        self._lt, self._opaque = lt, opaque
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._matmul = lt.library.cublasLtMatmul
        self._before = (lt.handle, product.operation, ctypes.addressof(self._one))
        self._layouts = (product.b, product.a, product.d)
        self._beta, self._algo = ctypes.addressof(self._zero), ctypes.addressof(opaque)
        self._dtype: torch.dtype = getattr(torch, problem.dtype)
        self._shapes = ((problem.m, problem.k), (problem.n, problem.k), (problem.m, problem.n))
        self._current_stream = lt.driver.current_stream
        self._home = HomeContext(lt.driver, lt.device)

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, launch: LaunchKnobs | None = None,
        sm_count: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Put ``out = a . b^T`` on the current stream and return ``out``; ``launch`` and ``sm_count`` are a kernel's alone.

        Raises:
            InputError: tensors that the algorithm was not made for.
            LaunchError: cuBLASLt refused.
        """
        size = self.algorithm.workspace_bytes
        workspace = a.new_empty(size, dtype=torch.uint8) if size else None
        self.run(self._arguments(a, b, out, self._current_stream(self.device), workspace))
        return out

    def plan(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, launch: LaunchKnobs | None = None,
        sm_count: int | None = None, stream: int,
    ) -> tuple[int, ...] | None:  # fmt: skip
        """Return what ``run`` needs to do this again; None with workspace, which is another in each capture.

        Raises:
            InputError: as in a call.
        """
        return None if self.algorithm.workspace_bytes else self._arguments(a, b, out, stream, None)

    def run(self, plan: tuple[int, ...]) -> None:
        """Put a planned product on the stream it was planned for, in the device's context.

        Raises:
            LaunchError: cuBLASLt refused.
        """
        if self._home.here():
            status = self._matmul(*plan)
        else:
            with self._lt.driver.context(self.device):
                status = self._matmul(*plan)
        if status:
            self._lt.check(status, f"run algorithm {self.algorithm.name}")

    def current_stream(self) -> int:
        """Return the raw handle of torch's current stream on the device."""
        return self._current_stream(self.device)

    def _arguments(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, stream: int, workspace: torch.Tensor | None
    ) -> tuple[int, ...]:  # fmt: skip
        """Return the arguments of cublasLtMatmul."""
        at_a, at_b, at_out = a.data_ptr(), b.data_ptr(), out.data_ptr()
        dtype, device = self._dtype, self.device
        if not (
            (a.shape, b.shape, out.shape) == self._shapes and a.dtype is dtype and b.dtype is dtype and out.dtype is dtype
            and a.is_contiguous() and b.is_contiguous() and out.is_contiguous() and not (at_a | at_b | at_out) % ALIGNMENT_BYTES
            and a.get_device() == device and b.get_device() == device and out.get_device() == device
        ):  # fmt: skip
            raise InputError(_unfit(self._shapes, dtype, device, a, b, out))
        layout_b, layout_a, layout_d = self._layouts
        where = 0 if workspace is None else workspace.data_ptr()
        return (
            *self._before, at_b, layout_b, at_a, layout_a, self._beta, at_out, layout_d, at_out, layout_d, self._algo, where,
            self.algorithm.workspace_bytes, stream,
        )  # fmt: skip


def _unfit(shapes: Any, dtype: torch.dtype, device: int, *given: torch.Tensor) -> str:
    wanted = ", ".join("x".join(map(str, shape)) for shape in shapes)
    got = ", ".join(f"{'x'.join(map(str, t.shape))} {t.dtype} {t.device} strides {t.stride()}" for t in given)
    return (
        f"this cuBLASLt algorithm takes contiguous {dtype} tensors of {wanted} on GPU {device}, aligned to {ALIGNMENT_BYTES} "
        f"bytes; got {got}"
    )


_open: dict[int, CublasLt] = {}
_opening = threading.Lock()


def cublaslt(device: int) -> CublasLt:
    """Return the process's CublasLt of GPU ``device``; errors as its constructor."""
    with _opening:
        found = _open.get(device)
        if found is None:
            found = _open[device] = CublasLt(device)
    return found
