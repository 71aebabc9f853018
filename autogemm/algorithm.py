"""Algorithm: one of cuBLASLt's own ways to a product, named so that the library of the same version runs exactly it again."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Final

from .errors import InputError

# sizeof(cublasLtMatmulAlgo_t), cublasLt.h; as hex digits.
DATA_BYTES: Final = 64
_HEX: Final = re.compile(rf"[0-9a-f]{{{2 * DATA_BYTES}}}")
# Far above what a search may ask for (WORKSPACE_BYTES in measure/cublaslt.py); a row that needs more was not made by one.
MAX_WORKSPACE_BYTES: Final = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """One cuBLASLt algorithm for one problem on one kind of GPU.

    ``data`` alone decides what runs. The numbers after ``workspace_bytes`` are read out of it, for people, and compared again
    when it is restored.

    Attributes:
        data: the 64 bytes of a cublasLtMatmulAlgo_t in hex, which "can be trivially serialized and later restored for use
            with the same version of cuBLAS library" (cublasLt.h).
        version: that library's cublasLtGetVersion(), such as 130100.
        workspace_bytes: device memory it needs while it runs.
        algo_id, tile_id, stages_id, split_k, reduction_scheme, cluster_shape_id, inner_shape_id, cta_swizzling, custom_option:
            its CUBLASLT_ALGO_CONFIG_* attributes, numbered as in cublasLt.h.
    """

    data: str
    version: int
    workspace_bytes: int
    algo_id: int
    tile_id: int
    stages_id: int
    split_k: int
    reduction_scheme: int
    cluster_shape_id: int
    inner_shape_id: int
    cta_swizzling: int
    custom_option: int

    def __post_init__(self) -> None:
        if not _HEX.fullmatch(self.data):
            raise InputError(
                f"a cuBLASLt algorithm is {2 * DATA_BYTES} hex digits, got {len(self.data)} characters "
                f"({self.data[:16]!r}...); tune the shape again"
            )
        if not 0 <= self.workspace_bytes <= MAX_WORKSPACE_BYTES:
            raise InputError(
                f"a cuBLASLt algorithm's workspace must be 0 to {MAX_WORKSPACE_BYTES} bytes, got {self.workspace_bytes}; "
                "tune the shape again"
            )
        if not 1 <= self.version < 1 << 31:
            raise InputError(f"a cuBLASLt version is a positive number such as 130100, got {str(self.version)[:20]}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not 0 <= value < 1 << 31:
                raise InputError(f"a cuBLASLt algorithm's {field.name} must be 0 to {(1 << 31) - 1}, got {str(value)[:20]}")

    @property
    def name(self) -> str:
        """Short name for people: algorithm, tile, stages and cluster ids of cublasLt.h, and split of K."""
        split = f"_k{self.split_k}" if self.split_k > 1 else ""
        return f"lt{self.algo_id}_t{self.tile_id}_s{self.stages_id}_c{self.cluster_shape_id}{split}"

    def __str__(self) -> str:
        return f"{self.name} of cuBLASLt {self.version}"
