"""A cuBLASLt library in Python: it reads what it is given through addresses, as the real one does, and computes on the CPU."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fakes import FakeDriver

from autogemm.algorithm import DATA_BYTES, Algorithm
from autogemm.runtime.cublaslt import CublasLt, Heuristic

VERSION = 130100
# CUBLASLT_ALGO_CONFIG_* in the order of their numbers; the fake's algorithms hold them as nine uint32.
ATTRIBUTES = (
    "algo_id", "tile_id", "split_k", "reduction_scheme", "cta_swizzling", "custom_option", "stages_id", "inner_shape_id",
    "cluster_shape_id",
)  # fmt: skip
NOT_SUPPORTED = 15


def algorithm_of(number: int = 66, *, version: int = VERSION, workspace_bytes: int = 0, **changes: int) -> Algorithm:
    """Return an Algorithm that the fake library would offer, told apart by ``number``."""
    values = {**dict.fromkeys(ATTRIBUTES, 0), "algo_id": number, "tile_id": 393, "split_k": 1, "stages_id": 35, **changes}
    data = struct.pack("<9I", *(values[name] for name in ATTRIBUTES)).ljust(DATA_BYTES, b"\0")
    return Algorithm(data=data.hex(), version=version, workspace_bytes=workspace_bytes, **values)


@dataclass
class FakeLibrary:
    """Functions of cublasLt.h over host memory. Handles are keys of ``objects``."""

    driver: FakeDriver
    version: int = VERSION
    offers: list[Algorithm] = field(default_factory=list)
    needs_bytes: int = 0
    refuses: set[str] = field(default_factory=set)
    objects: dict[int, dict[str, Any]] = field(default_factory=dict)
    calls: list[dict[str, int]] = field(default_factory=list)
    alive: int = 0

    def cublasLtGetVersion(self) -> int:
        return self.version

    def cublasLtCreate(self, at: int) -> int:
        return self._make(at, what="handle")

    def cublasLtMatmulDescCreate(self, at: int, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        return self._make(at, what="operation", transposed=False)

    def cublasLtMatmulDescSetAttribute(self, operation: int, attribute: int, at: int, size: int) -> int:
        assert (attribute, size) == (3, 4)  # CUBLASLT_MATMUL_DESC_TRANSA
        self.objects[operation]["transposed"] = ctypes.c_int32.from_address(at).value == 1
        return 0

    def cublasLtMatrixLayoutCreate(self, at: int, kind: int, rows: int, cols: int, leading: int) -> int:
        return self._make(at, what="layout", kind=kind, rows=rows, cols=cols, leading=leading)

    def cublasLtMatmulPreferenceCreate(self, at: int) -> int:
        self.alive += 1
        return self._make(at, what="preference")

    def cublasLtMatmulPreferenceSetAttribute(self, preference: int, attribute: int, at: int, size: int) -> int:
        kind = {4: ctypes.c_uint32, 8: ctypes.c_uint64}[size]
        self.objects[preference][str(attribute)] = kind.from_address(at).value
        return 0

    def cublasLtMatmulPreferenceDestroy(self, preference: int) -> int:
        self.alive -= 1
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: int) -> int:
        handle, _, _, _, c, d, preference, limit, at, count = arguments
        self._in_context()
        assert self.objects[handle]["what"] == "handle" and c == d
        found = (Heuristic * limit).from_address(at)
        usable = [o for o in self.offers if o.workspace_bytes <= self.objects[preference]["1"]][:limit]
        for i, offer in enumerate(usable):
            found[i].algo[:] = list(bytes.fromhex(offer.data))
            found[i].workspace, found[i].state = offer.workspace_bytes, 0
        ctypes.c_int.from_address(count).value = len(usable)
        return 0 if usable else NOT_SUPPORTED

    def cublasLtMatmulAlgoConfigGetAttribute(self, algo: int, attribute: int, at: int, size: int, written: int) -> int:
        kind = {2: ctypes.c_uint16, 4: ctypes.c_uint32}[size]
        kind.from_address(at).value = struct.unpack_from("<9I", ctypes.string_at(algo, DATA_BYTES))[attribute]
        ctypes.c_size_t.from_address(written).value = size
        return 0

    def cublasLtMatmulAlgoCheck(
        self, handle: int, operation: int, a: int, b: int, c: int, d: int, algo: int, at: int
    ) -> int:  # fmt: skip
        self._in_context()
        Heuristic.from_address(at).workspace = self.needs_bytes
        return NOT_SUPPORTED if "check" in self.refuses else 0

    def cublasLtMatmul(self, *arguments: int) -> int:
        handle, operation, alpha, at_a, a, at_b, b, beta, at_c, c, at_d, d, algo, workspace, size, stream = arguments
        self._in_context()
        if "matmul" in self.refuses:
            return NOT_SUPPORTED
        assert self.objects[handle]["what"] == "handle" and self.objects[operation]["transposed"]
        assert (ctypes.c_float.from_address(alpha).value, ctypes.c_float.from_address(beta).value) == (1.0, 0.0)
        assert (at_c, c) == (at_d, d)
        left, right, out = (self._matrix(layout, at) for layout, at in ((a, at_a), (b, at_b), (d, at_d)))
        out[...] = left.astype(np.float64).T @ right.astype(np.float64)
        self.calls.append(
            {
                "algo_id": int.from_bytes(ctypes.string_at(algo, 4), "little"), "stream": stream, "workspace": workspace,
                "size": size, "a": at_b, "b": at_a, "d": at_d,
            }
        )  # fmt: skip
        return 0

    def _make(self, at: int, **what: Any) -> int:
        number = 1000 + len(self.objects)
        self.objects[number] = what
        ctypes.c_void_p.from_address(at).value = number
        return 0

    def _matrix(self, layout: int, at: int) -> np.ndarray:
        """Return the column-major matrix of a layout at an address, to read or write."""
        shape = self.objects[layout]
        assert shape["kind"] == 2  # CUDA_R_16F
        rows, cols, leading = shape["rows"], shape["cols"], shape["leading"]
        raw = (ctypes.c_char * (((cols - 1) * leading + rows) * 2)).from_address(at)
        return np.lib.stride_tricks.as_strided(np.frombuffer(raw, np.float16), (rows, cols), (2, 2 * leading), writeable=True)

    def _in_context(self) -> None:
        assert getattr(self.driver.contexts, "current", None) is not None, "no context is current in this thread"


def fake_cublaslt(**options: Any) -> tuple[CublasLt, FakeLibrary]:
    """Return a CublasLt of GPU 0 over a fake library, and that library."""
    driver = FakeDriver()
    library = FakeLibrary(driver, **options)
    return CublasLt(0, loaded=library, driver=driver), library
