"""Kernel: a Binary made callable on torch tensors. Needs the CUDA driver and torch only: no TVM, no compiler.

A call looks its arguments up among prepared launches (``Plan``): tensor maps encoded, scalars evaluated, parameter array and
launch configuration built. The key of that cache holds everything a plan is made of, so that a plan can't be stale: pointers,
shapes, strides, types, devices, launch-time knobs and stream.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..binary import Binary
from ..dtypes import DTYPES
from ..errors import InputError, LaunchError
from ..manifest import Manifest, evaluate
from ..problem import MAX_EXTENT
from .driver import TENSOR_MAP_BYTES, Driver, LaunchSpec, MapSpec, Memory, cuda_driver

# CUDA Driver API, cuTensorMapEncodeTiled: addresses and strides are multiples of 16 bytes, and strides stay below 2**40.
ALIGNMENT_BYTES: Final = 16
_MAX_STRIDE_BYTES: Final = 1 << 40
MAX_L2_GROUP_SIZE: Final = 64

# Plans kept per kernel; one takes about 3 KiB of host memory. Plans that own workspace hold device memory, so fewer of them.
PLANS: Final = 1024
PLANS_WITH_WORKSPACE: Final = 64

_CAPABILITY: Final = {"sm_90a": (9, 0), "sm_100a": (10, 0)}
_TORCH_TYPES: Final[dict[str, torch.dtype]] = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One prepared launch.

    Attributes:
        launch: puts the kernel on the stream; reads only what is fixed here, so several threads may call it at once.
        keep: what must stay alive with it: parameter bytes and workspace.
    """

    launch: Callable[[], None]
    keep: tuple[Any, ...]


class _Loaded:
    """One cubin in one device's context. Never unloaded: a CUDA graph may hold the function longer than any object here."""

    def __init__(self, binary: Binary, device: int, driver: Driver) -> None:
        manifest = binary.manifest
        have, need = driver.capability(device), _CAPABILITY[manifest.arch]
        if have != need:
            raise LaunchError(
                f"this kernel is for {manifest.arch}; device {device} ({driver.device_name(device)}) has compute capability "
                f"{have[0]}.{have[1]}; compile it for that arch or choose another device"
            )
        self.sm_count = driver.sm_count(device)
        self.function = driver.load(device, binary.cubin, manifest.entry, manifest.smem_bytes)
        # Plans with the same sizes on the same stream share their workspace: launches on one stream run in order.
        self.workspaces: weakref.WeakValueDictionary[tuple[int, ...], _Workspace] = weakref.WeakValueDictionary()
        self.captured: dict[tuple[int, ...], _Workspace] = {}
        self.lock = threading.Lock()


class _Workspace:
    """Workspace of one (stream, capture, sizes); a class of our own because weak references need one."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory


_loaded: dict[tuple[Driver, str, int], _Loaded] = {}
_loading = threading.Lock()


def _load(binary: Binary, device: int, driver: Driver) -> _Loaded:
    key = (driver, binary.sha256, device)
    with _loading:  # one load per binary and device, however many threads ask at once
        found = _loaded.get(key)
        if found is None:
            found = _loaded[key] = _Loaded(binary, device, driver)
    return found


class Kernel:
    """One compiled GEMM on one device: ``kernel(a, b, out)`` computes ``out[M,N] = a[M,K] . b[N,K]^T``.

    Calls are asynchronous, on the caller's current stream, and may be captured into a CUDA graph. Threads may share a Kernel.
    Capturing uses whatever was loaded at construction: it neither loads nor synchronizes, except that a kernel that needs
    workspace gets it, zeroed, from outside the graph's memory pool, and never gives it back.
    """

    def __init__(self, binary: Binary, device: int = 0, *, driver: Driver | None = None) -> None:
        """Load ``binary`` on ``device`` (once per process, however many Kernels are made of it).

        Raises:
            MissingDependency: no CUDA device or no cuda-bindings.
            LaunchError: the device is of another arch, or the driver refuses the cubin.
        """
        self.binary = binary
        self.device = device
        self.manifest: Manifest = binary.manifest
        self._driver = driver if driver is not None else cuda_driver()
        self._loaded = _load(binary, device, self._driver)
        self._dtype = _TORCH_TYPES[self.manifest.dtype]
        self._default_group = int(self.manifest.knobs["l2_group_size"])
        self._needs_workspace = self.manifest.workspace_bytes.strip() != "0"
        self._current_stream = self._driver.current_stream
        self._current_device = self._driver.current_device
        self._thread = threading.local()
        # Two generations stand in for least-recently-used order: a hit among the recent costs no bookkeeping, and when the
        # recent are full they become the old ones, so that a plan is dropped only after a whole generation without a call.
        self._recent: dict[tuple[Any, ...], Plan] = {}
        self._old: dict[tuple[Any, ...], Plan] = {}
        self._generation = (PLANS_WITH_WORKSPACE if self._needs_workspace else PLANS) // 2
        self._lock = threading.Lock()

    @property
    def sm_count(self) -> int:
        """SMs of the device, which a launch occupies unless told otherwise."""
        return self._loaded.sm_count

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        *,
        l2_group_size: int | None = None,
        sm_count: int | None = None,
        stream: int | torch.cuda.Stream | None = None,
    ) -> torch.Tensor:
        """Put ``out = a . b^T`` on the stream and return ``out``.

        Args:
            a: [M, K], the kernel's dtype, K contiguous.
            b: [N, K], likewise.
            out: [M, N], N contiguous; must not overlap a or b.
            l2_group_size: tile rows per raster group, 1 to 64; the Binary's own by default.
            sm_count: SMs to occupy at most; all by default.
            stream: a torch stream or raw handle of this device; torch's current one by default.

        Raises:
            InputError: wrong type, shape, stride, alignment, device, overlap or knob.
            LaunchError: the driver refused the launch.
        """
        if stream is None:
            handle = self._current_stream(self.device)
        else:
            handle = stream if isinstance(stream, int) else stream.cuda_stream
        try:
            key: tuple[Any, ...] = (
                a.data_ptr(), b.data_ptr(), out.data_ptr(), a.shape, b.shape, out.shape, a.stride(), b.stride(), out.stride(),
                a.dtype, b.dtype, out.dtype, a.device, b.device, out.device, l2_group_size, sm_count, handle,
            )  # fmt: skip
        except AttributeError:
            raise InputError(_not_tensors(a, b, out)) from None
        if self._needs_workspace:
            key = (*key, self._driver.capture_id(handle))
        plan = self._recent.get(key)
        if plan is None:
            plan = self._find(key, a, b, out, l2_group_size, sm_count, handle)
        if self._current_device() == self.device:
            if not hasattr(self._thread, "adopted"):
                # A thread in which torch has done nothing yet has a current device, but no current context.
                self._driver.adopt(self.device)
                self._thread.adopted = True
            plan.launch()
        else:
            with self._driver.context(self.device):
                plan.launch()
        return out

    def _find(
        self, key: tuple[Any, ...], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
        l2_group_size: int | None, sm_count: int | None, stream: int,
    ) -> Plan:  # fmt: skip
        with self._lock:
            plan = self._recent.get(key) or self._old.pop(key, None)
        if plan is None:
            plan = self._plan(a, b, out, l2_group_size, sm_count, stream, key[-1] if self._needs_workspace else 0)
        with self._lock:
            if len(self._recent) >= self._generation:
                self._old, self._recent = self._recent, {}
            self._recent[key] = plan
        return plan

    def _plan(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
        l2_group_size: int | None, sm_count: int | None, stream: int, capture: int,
    ) -> Plan:  # fmt: skip
        manifest = self.manifest
        variables = launch_variables(
            manifest, a, b, out, device=self.device,
            l2_group_size=self._default_group if l2_group_size is None else l2_group_size,
            sm_count=self.sm_count if sm_count is None else sm_count, device_sm_count=self.sm_count,
        )  # fmt: skip
        values = manifest.scalar_values(variables)
        workspace = self._workspace(evaluate(manifest.workspace_bytes, values), variables, stream, capture)
        addresses = {"a": a.data_ptr(), "b": b.data_ptr(), "d": out.data_ptr()}
        maps = {m.name: self._driver.encode(spec) for m, spec in map_specs(manifest, values, addresses)}
        params = ParameterBlock(manifest, values, maps, 0 if workspace is None else workspace.memory.address)
        launch = self._driver.prepare(
            LaunchSpec(
                function=self._loaded.function, grid_ctas=evaluate(manifest.grid, values), block_threads=manifest.block_threads,
                cluster_ctas=manifest.cluster_ctas, smem_bytes=manifest.smem_bytes, params=params.address, stream=stream,
            )
        )  # fmt: skip
        return Plan(launch=launch, keep=(params, workspace))

    def _workspace(self, size: int, variables: dict[str, int], stream: int, capture: int) -> _Workspace | None:
        if size == 0:
            return None
        # Its layout may follow from any of the sizes, and what one layout leaves behind may not be zero for another.
        key = (stream, capture, size, *variables.values())
        loaded = self._loaded
        with loaded.lock:
            found = loaded.workspaces.get(key)
            if found is None:
                found = _Workspace(self._driver.allocate_zeroed(self.device, size, stream, capture != 0))
                loaded.workspaces[key] = found
                if capture:
                    loaded.captured[key] = found
        return found


class ParameterBlock:
    """Kernel parameters in host memory, and the array of their addresses that cuLaunchKernelEx reads.

    Attributes:
        address: address of that array, valid while this object lives.
    """

    def __init__(self, manifest: Manifest, values: dict[str, int], maps: dict[str, bytes], workspace: int) -> None:
        fields: list[bytes] = []
        for param in manifest.params:
            if param.kind == "tensor_map":
                fields.append(maps[param.name])
            elif param.kind == "workspace":
                fields.append(workspace.to_bytes(8, "little"))
            else:
                fields.append(_integer(param.name, values[param.name], signed=param.kind == "int32"))
        # CUtensorMap is 64-byte aligned (cuda.h); the other parameters take a slot of 64 bytes too, for simplicity.
        sizes = [TENSOR_MAP_BYTES if len(field) == TENSOR_MAP_BYTES else 64 for field in fields]
        self._storage = ctypes.create_string_buffer(sum(sizes) + 64)
        base = -(-ctypes.addressof(self._storage) // 64) * 64
        self._pointers = (ctypes.c_void_p * len(fields))()
        for i, (size, content) in enumerate(zip(sizes, fields, strict=True)):
            ctypes.memmove(base, content, len(content))
            self._pointers[i] = base
            base += size
        self.address = ctypes.addressof(self._pointers)


def _integer(name: str, value: int, *, signed: bool) -> bytes:
    try:
        return value.to_bytes(4, "little", signed=signed)
    except OverflowError:
        raise InputError(f"kernel parameter {name}={value} does not fit in 32 bits; the problem is too large") from None


def map_specs(manifest: Manifest, values: dict[str, int], addresses: dict[str, int]) -> list[tuple[Any, MapSpec]]:
    """Return each TensorMap of ``manifest`` with the arguments it is encoded with.

    Args:
        values: launch variables and scalars.
        addresses: device address per operand (``a``, ``b``, ``d``).
    """
    return [
        (
            m,
            MapSpec(
                dtype=manifest.dtype, address=addresses[m.operand], dims=tuple(evaluate(e, values) for e in m.dims),
                strides_bytes=tuple(evaluate(e, values) for e in m.strides_bytes),
                box=tuple(evaluate(e, values) for e in m.box),
                swizzle_bytes=m.swizzle_bytes, l2_promotion_bytes=m.l2_promotion_bytes,
            ),
        )
        for m in manifest.tensor_maps
    ]  # fmt: skip


def launch_variables(
    manifest: Manifest, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *,
    device: int, l2_group_size: int, sm_count: int, device_sm_count: int,
) -> dict[str, int]:  # fmt: skip
    """Return the Manifest's VARIABLES for these tensors, after checking that the kernel can take them.

    Raises:
        InputError: it can't; names the operand, what was given and what is needed.
    """
    needed = _TORCH_TYPES[manifest.dtype]
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
    if isinstance(l2_group_size, bool) or not 1 <= l2_group_size <= MAX_L2_GROUP_SIZE:
        raise InputError(f"l2_group_size={l2_group_size}; use 1 to {MAX_L2_GROUP_SIZE} tile rows")
    if isinstance(sm_count, bool) or not manifest.cluster_ctas <= sm_count <= device_sm_count:
        raise InputError(f"sm_count={sm_count}; this kernel on this device takes {manifest.cluster_ctas} to {device_sm_count}")
    return {
        "M": m, "N": n, "K": k, "lda": strides["a"], "ldb": strides["b"], "ldd": strides["out"],
        "sm_count": sm_count, "l2_group_size": l2_group_size,
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


def _not_tensors(*given: Any) -> str:
    kinds = ", ".join(type(value).__name__ for value in given)
    return f"a kernel takes three torch tensors (a, b, out), got {kinds}"
