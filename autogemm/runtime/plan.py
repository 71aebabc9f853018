"""What a launch is made of: the checks of its operands, and the recipe that holds all but addresses and stream."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from ..config import LaunchKnobs
from ..constraints import MAX_SPLIT_K
from ..dtypes import DTYPES
from ..errors import InputError
from ..manifest import Manifest, evaluate
from ..problem import MAX_EXTENT
from .driver import TENSOR_MAP_BYTES, Driver, MapSpec

# CUDA Driver API, cuTensorMapEncodeTiled: addresses and strides are multiples of 16 bytes, and strides stay below 2**40.
ALIGNMENT_BYTES: Final = 16
_MAX_STRIDE_BYTES: Final = 1 << 40
MAX_L2_GROUP_SIZE: Final = 64

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {"float16": torch.float16, "bfloat16": torch.bfloat16}

# CUtensorMap is 64-byte aligned (cuda.h); every parameter gets a slot that is.
_SLOT_BYTES: Final = 64
_WORKSPACE: Final = "workspace"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A Manifest evaluated for given sizes and launch-time knobs; only addresses and the stream are missing.

    Attributes:
        grid_ctas: CTAs along x.
        workspace_bytes: device memory needed, 0 for none.
        fields: one entry per kernel parameter: its bytes, or an operand with the tensor map to encode, or ``workspace``.
    """

    grid_ctas: int
    workspace_bytes: int
    fields: tuple[bytes | tuple[str, MapSpec] | str, ...]


def recipe(manifest: Manifest, variables: Mapping[str, int]) -> Recipe:
    """Return the Recipe of ``manifest`` for the values of its VARIABLES.

    Raises:
        InputError: a kernel parameter does not fit in 32 bits.
    """
    values = manifest.scalar_values(variables)
    maps = {
        m.name: (
            m.operand,
            MapSpec(
                dtype=manifest.dtype, dims=tuple(evaluate(e, values) for e in m.dims),
                strides_bytes=tuple(evaluate(e, values) for e in m.strides_bytes),
                box=tuple(evaluate(e, values) for e in m.box), swizzle_bytes=m.swizzle_bytes,
                l2_promotion_bytes=m.l2_promotion_bytes,
            ),
        )
        for m in manifest.tensor_maps
    }  # fmt: skip
    fields: list[bytes | tuple[str, MapSpec] | str] = []
    for param in manifest.params:
        if param.kind == "tensor_map":
            fields.append(maps[param.name])
        elif param.kind == "workspace":
            fields.append(_WORKSPACE)
        else:
            fields.append(_integer(param.name, values[param.name], signed=param.kind == "int32"))
    return Recipe(
        grid_ctas=evaluate(manifest.grid, values), workspace_bytes=evaluate(manifest.workspace_bytes, values),
        fields=tuple(fields),
    )  # fmt: skip


def _integer(name: str, value: int, *, signed: bool) -> bytes:
    try:
        return value.to_bytes(4, "little", signed=signed)
    except OverflowError:
        raise InputError(f"kernel parameter {name}={value} does not fit in 32 bits; the problem is too large") from None


class ParameterBlock:
    """Kernel parameters in host memory, and the array of their addresses that cuLaunchKernelEx reads.

    Attributes:
        address: address of that array, valid while this object lives.
    """

    def __init__(self, made: Recipe, driver: Driver, addresses: Mapping[str, int], workspace: int) -> None:
        """Encode the tensor maps of ``made`` for these operand ``addresses`` (``a``, ``b``, ``d``) and lay all out."""
        contents = [
            field if isinstance(field, bytes)
            else workspace.to_bytes(8, "little") if isinstance(field, str)
            else driver.encode(field[1], addresses[field[0]])
            for field in made.fields
        ]  # fmt: skip
        sizes = [TENSOR_MAP_BYTES if len(content) == TENSOR_MAP_BYTES else _SLOT_BYTES for content in contents]
        self._storage = ctypes.create_string_buffer(sum(sizes) + _SLOT_BYTES)
        start = ctypes.addressof(self._storage)
        at = -(-start // _SLOT_BYTES) * _SLOT_BYTES - start
        pointers = []
        for size, content in zip(sizes, contents, strict=True):
            ctypes.memmove(start + at, content, len(content))
            pointers.append(start + at)
            at += size
        self._pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self.address = ctypes.addressof(self._pointers)


def launch_variables(
    manifest: Manifest, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *,
    device: int, launch: LaunchKnobs, sm_count: int, device_sm_count: int, resident_ctas: int,
) -> dict[str, int]:  # fmt: skip
    """Return the Manifest's VARIABLES for these tensors, after checking that the kernel can take them.

    Args:
        sm_count: SMs to occupy at most, up to ``device_sm_count``.
        resident_ctas: CTAs that the device runs at once; the variable ``sm_count`` is that at most, so that a persistent grid
            never leaves clusters for a second wave.

    Raises:
        InputError: it can't; names the operand, what was given and what is needed.
    """
    needed = TORCH_DTYPES[manifest.dtype]
    for name, tensor in (("a", a), ("b", b), ("out", out)):
        if tensor.device.type != "cuda" or tensor.device.index != device:
            raise InputError(f"{name} is on {tensor.device}; this kernel is loaded on cuda:{device}")
        if tensor.dtype != needed:
            raise InputError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}; this kernel computes {manifest.dtype}")
        if tensor.dim() != 2:
            raise InputError(f"{name} has {tensor.dim()} dimensions; the kernel takes matrices")
    (m, k), (n, k_b) = a.shape, b.shape
    if k != k_b:
        raise InputError(f"a is [{m}, {k}] and b is [{n}, {k_b}]; both need the same K (b is [N, K])")
    if tuple(out.shape) != (m, n):
        raise InputError(f"out is {list(out.shape)}; a [{m}, {k}] and b [{n}, {k}] give [{m}, {n}]")
    for name, extent in (("M", m), ("N", n), ("K", k)):
        if not 1 <= extent <= MAX_EXTENT:
            raise InputError(f"{name} is {extent}; the kernel takes 1 to {MAX_EXTENT}")
    strides = {name: _row_stride(name, t) for name, t in (("a", a), ("b", b), ("out", out))}
    for name, tensor in (("a", a), ("b", b)):
        if _overlap(tensor, out):
            raise InputError(f"out overlaps {name} in memory; give it storage of its own")
    if isinstance(launch.l2_group_size, bool) or not 1 <= launch.l2_group_size <= MAX_L2_GROUP_SIZE:
        raise InputError(f"l2_group_size={launch.l2_group_size}; use 1 to {MAX_L2_GROUP_SIZE} tile rows")
    splits = manifest.knobs.get("SPLIT_K", 1) > 1
    if isinstance(launch.split_k, bool) or not 1 <= launch.split_k <= MAX_SPLIT_K or (launch.split_k > 1 and not splits):
        limit = f"1 to {MAX_SPLIT_K}" if splits else "1: this kernel can't split"
        raise InputError(f"SPLIT_K={launch.split_k}; use {limit}")
    if isinstance(sm_count, bool) or not manifest.cluster_ctas <= sm_count <= device_sm_count:
        raise InputError(f"sm_count={sm_count}; this kernel on this device takes {manifest.cluster_ctas} to {device_sm_count}")
    return {
        "M": m, "N": n, "K": k, "lda": strides["a"], "ldb": strides["b"], "ldd": strides["out"],
        "sm_count": min(sm_count, resident_ctas), **launch._asdict(),
    }  # fmt: skip


def _row_stride(name: str, tensor: torch.Tensor) -> int:
    """Return the row stride in elements; for a single row, one that satisfies TMA, since it is never used."""
    rows, cols = tensor.shape
    size = DTYPES[str(tensor.dtype).removeprefix("torch.")].bytes
    row, col = tensor.stride()
    if col != 1 and cols > 1:
        raise InputError(f"{name} has strides ({row}, {col}); its last dimension must be contiguous; pass {name}.contiguous()")
    if tensor.data_ptr() % ALIGNMENT_BYTES:
        raise InputError(
            f"{name} starts at an address that is {tensor.data_ptr() % ALIGNMENT_BYTES} past a multiple of {ALIGNMENT_BYTES} "
            f"bytes, which TMA needs; pass {name}.clone()"
        )
    if rows == 1:
        return -(-cols * size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // size
    if row * size % ALIGNMENT_BYTES or row * size >= _MAX_STRIDE_BYTES:
        raise InputError(
            f"{name} has rows of {row} elements, {row * size} bytes; TMA needs a multiple of {ALIGNMENT_BYTES} bytes "
            "below 2**40; pad the rows"
        )
    if row < cols:
        raise InputError(
            f"{name} has row stride {row}, less than its {cols} columns: its rows overlap; pass {name}.contiguous()"
        )
    return row


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two matrices with contiguous rows share a byte; exact for slices of columns of one buffer."""
    start, end = _span(one)
    other_start, other_end = _span(other)
    if end <= other_start or other_end <= start:
        return False
    row = one.stride(0) * one.element_size()
    if row != other.stride(0) * other.element_size() or row <= 0:
        return True
    width, other_width = one.shape[1] * one.element_size(), other.shape[1] * other.element_size()
    offset = (other_start - start) % row
    return offset < width or offset + other_width > row


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and past the last."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
