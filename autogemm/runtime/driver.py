"""The CUDA driver calls a launch needs, each checked; tests put a recording fake in place of ``CudaDriver``."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Protocol

from ..errors import LaunchError, MissingDependency

TENSOR_MAP_BYTES: Final = 128  # sizeof(CUtensorMap), cuda.h
_MAX_MAP_ARGUMENTS: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class MapSpec:
    """Arguments of a cuTensorMapEncodeTiled call but the address; lists run from the innermost dimension out.

    Attributes:
        dtype: element type.
        dims: extents in elements.
        strides_bytes: strides of all dimensions but the innermost.
        box: box extents in elements.
        swizzle_bytes: 0, 32, 64 or 128.
        l2_promotion_bytes: 0, 64, 128 or 256.
    """

    dtype: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int
    l2_promotion_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """Arguments of one cuLaunchKernelEx call.

    Attributes:
        function: handle from ``Driver.load``.
        grid_ctas, block_threads, cluster_ctas: extents along x; the others are 1.
        smem_bytes: dynamic shared memory per CTA.
        params: address of the array of parameter addresses; what it points to must outlive the launch function.
        stream: raw stream handle, 0 for the legacy default stream.
        programmatic: let it start while the work before it on the stream still runs (programmatic dependent launch; CUDA
            Programming Guide, "Programmatic Dependent Launch and Synchronization"). Only for kernels that wait for that work.
    """

    function: int
    grid_ctas: int
    block_threads: int
    cluster_ctas: int
    smem_bytes: int
    params: int
    stream: int
    programmatic: bool = False


class Memory(Protocol):
    """Device memory that lives as long as this object."""

    address: int


class Driver(Protocol):
    """What ``Kernel`` asks of the CUDA driver and of torch's notion of the current device and stream."""

    def device_name(self, device: int) -> str: ...

    def capability(self, device: int) -> tuple[int, int]: ...

    def sm_count(self, device: int) -> int: ...

    def load(self, device: int, cubin: bytes, entry: str, smem_bytes: int) -> int:
        """Return a function handle with the shared-memory limit raised, loaded into the device's primary context."""

    def max_active_clusters(self, function: int, block_threads: int, cluster_ctas: int, smem_bytes: int) -> int:
        """Return how many clusters of ``function`` the device holds at once; needs the function's context current."""

    def encode(self, spec: MapSpec, address: int) -> bytes:
        """Return the 128 bytes of a CUtensorMap of the matrix at ``address``, a multiple of 16; needs a current context."""

    def prepare(self, spec: LaunchSpec) -> Callable[[], None]:
        """Return a function that launches ``spec`` in the calling thread's current context."""

    def allocate_zeroed(self, device: int, size: int, stream: int, capturing: bool) -> Memory:
        """Return zeroed device memory, ready for work that is put on ``stream`` from now on."""

    def capture_id(self, stream: int) -> int:
        """Return a number that is unique to the graph capture that ``stream`` takes part in; 0 outside capture."""

    def current_device(self) -> int: ...

    def current_stream(self, device: int) -> int: ...

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        """Make the device's primary context current in this thread within the block."""

    def adopt(self, device: int) -> None:
        """Make the device's primary context current in this thread, for good."""


class _Allocation:
    """Memory from cuMemAlloc, never freed: a CUDA graph that outlives every Python object may hold its address."""

    def __init__(self, address: int) -> None:
        self.address = address


class _TensorMemory:
    """Memory from torch's caching allocator."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.address = int(tensor.data_ptr())


class CudaDriver:
    """The real driver, through cuda.bindings. Thread-safe: no call keeps state but for lazily created contexts."""

    def __init__(self) -> None:
        import torch

        try:
            from cuda.bindings import driver as cuda
        except ImportError as error:
            raise MissingDependency(
                "launching needs the package cuda-bindings; install it with: pip install cuda-bindings"
            ) from error
        if not torch.cuda.is_available():
            raise MissingDependency("no CUDA device is available to torch; launching and timing need one")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._bind(torch, cuda)
        # Both are plain C functions of about 0.1 us; their public wrappers cost 5 us (torch.cuda.current_stream).
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice
        self.current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
        self._check(cuda.cuInit(0), "cuInit")

    def _bind(self, torch: Any, cuda: Any) -> None:
        """Take ``torch`` and ``cuda.bindings.driver`` into use."""
        self._torch = torch
        self._cuda = cuda
        self._success = cuda.CUresult.CUDA_SUCCESS
        self._contexts: dict[int, Any] = {}
        self._overlapping: set[int] = set()  # functions that are launched so
        self._arguments: dict[MapSpec, tuple[tuple[Any, ...], tuple[Any, ...]]] = {}
        self._types = {
            "float16": cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            "bfloat16": cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        }
        swizzle, promotion = cuda.CUtensorMapSwizzle, cuda.CUtensorMapL2promotion
        self._swizzles = {
            0: swizzle.CU_TENSOR_MAP_SWIZZLE_NONE, 32: swizzle.CU_TENSOR_MAP_SWIZZLE_32B,
            64: swizzle.CU_TENSOR_MAP_SWIZZLE_64B, 128: swizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        }  # fmt: skip
        self._promotions = {
            0: promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE, 64: promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
            128: promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B, 256: promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        }  # fmt: skip

    def device_name(self, device: int) -> str:
        return str(self._torch.cuda.get_device_name(device))

    def capability(self, device: int) -> tuple[int, int]:
        major, minor = self._torch.cuda.get_device_capability(device)
        return int(major), int(minor)

    def sm_count(self, device: int) -> int:
        return int(self._torch.cuda.get_device_properties(device).multi_processor_count)

    def load(self, device: int, cubin: bytes, entry: str, smem_bytes: int) -> int:
        cuda = self._cuda
        with self.context(device), self._relaxed_capture():
            module = self._check(cuda.cuModuleLoadData(cubin), "load the cubin")
            function = self._check(cuda.cuModuleGetFunction(module, entry.encode()), f"find kernel {entry} in the cubin")
            limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(cuda.cuFuncSetAttribute(function, limit, smem_bytes), f"allow {smem_bytes} bytes of shared memory")
        return int(function)

    def encode(self, spec: MapSpec, address: int) -> bytes:
        before, after = self._map_arguments(spec)
        status, made = self._cuda.cuTensorMapEncodeTiled(*before, address, *after)
        if status != self._success:
            raise self._error(status, f"encode a tensor map at {address:#x}: {spec}")
        return ctypes.string_at(int(made.getPtr()), TENSOR_MAP_BYTES)

    def _map_arguments(self, spec: MapSpec) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the arguments before and after the address, converted once per spec; conversion costs more than encoding."""
        found = self._arguments.get(spec)
        if found is None:
            cuda = self._cuda
            if len(self._arguments) >= _MAX_MAP_ARGUMENTS:
                self._arguments.clear()
            found = self._arguments[spec] = (
                (self._types[spec.dtype], len(spec.dims)),
                (
                    [cuda.cuuint64_t(n) for n in spec.dims],
                    [cuda.cuuint64_t(n) for n in spec.strides_bytes],
                    [cuda.cuuint32_t(n) for n in spec.box],
                    [cuda.cuuint32_t(1)] * len(spec.dims),
                    cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                    self._swizzles[spec.swizzle_bytes],
                    self._promotions[spec.l2_promotion_bytes],
                    cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
                ),
            )
        return found

    def max_active_clusters(self, function: int, block_threads: int, cluster_ctas: int, smem_bytes: int) -> int:
        config = launch_config(self._cuda, cluster_ctas, block_threads, cluster_ctas, smem_bytes)
        found = self._cuda.cuOccupancyMaxActiveClusters(self._cuda.CUfunction(function), config)
        return int(self._check(found, f"count the clusters of {cluster_ctas} CTAs that fit on the device"))

    def prepare(self, spec: LaunchSpec) -> Callable[[], None]:
        cuda, programmatic = self._cuda, spec.programmatic
        extents = (spec.grid_ctas, spec.block_threads, spec.cluster_ctas, spec.smem_bytes)
        function, params = cuda.CUfunction(spec.function), spec.params
        call, success = cuda.cuLaunchKernelEx, self._success
        usual = launch_config(cuda, *extents, programmatic=programmatic)
        ordinary = launch_config(cuda, *extents) if programmatic else usual
        usual.hStream = ordinary.hStream = cuda.CUstream(spec.stream)
        if programmatic:
            self._overlapping.add(spec.function)

        def launch() -> None:
            alone = programmatic and self._capturing() and not self._follows_own(spec.stream)
            status = call(ordinary if alone else usual, function, params, 0)[0]
            if status != success:
                raise self._error(status, f"launch {spec}")

        return launch

    def _follows_own(self, stream: int) -> bool:
        """Return whether what is captured next on ``stream`` follows one overlapping kernel and nothing else.

        Only then an overlapping launch pays in a graph. After another kernel it makes the replay slower (H200, CUDA 13.0: by
        0.2 us), though the same pair outside of graphs is 0.7 to 1.1 us faster.
        """
        cuda = self._cuda
        status, _, _, before, *_ = self._check(cuda.cuStreamGetCaptureInfo(cuda.CUstream(stream)), "query the stream's capture")
        if status != cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            return True  # some other stream is being captured
        if before is None or len(before) != 1:
            return False
        kind = self._check(cuda.cuGraphNodeGetType(before[0]), "ask for a graph node's type")
        if kind != cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            return False
        kernel = self._check(cuda.cuGraphKernelNodeGetParams(before[0]), "ask for a graph node's kernel")
        return int(kernel.func) in self._overlapping

    def allocate_zeroed(self, device: int, size: int, stream: int, capturing: bool) -> Memory:
        torch, cuda = self._torch, self._cuda
        if not capturing:
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
                return _TensorMemory(torch.zeros(size, dtype=torch.uint8, device=f"cuda:{device}"))
        # Memory of the graph's own pool may be shared with other graphs and is not zeroed again at each replay; so take
        # memory outside of it and zero it now, on a stream that is not captured.
        with self.context(device), self._relaxed_capture():
            address = self._check(cuda.cuMemAlloc(size), f"allocate {size} bytes of workspace")
            side = self._check(cuda.cuStreamCreate(int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)), "create a stream")
            self._check(cuda.cuMemsetD8Async(address, 0, size, side), "zero the workspace")
            self._check(cuda.cuStreamSynchronize(side), "zero the workspace")
            self._check(cuda.cuStreamDestroy(side), "destroy a stream")
        return _Allocation(int(address))

    def capture_id(self, stream: int) -> int:
        info = self._check(self._cuda.cuStreamGetCaptureInfo(self._cuda.CUstream(stream)), "query the stream's capture")
        active = self._cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return int(info[1]) + 1 if info[0] == active else 0

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        self._check(self._cuda.cuCtxPushCurrent(self._primary(device)), "make the context current")
        try:
            yield
        finally:
            self._check(self._cuda.cuCtxPopCurrent(), "restore the context")

    def adopt(self, device: int) -> None:
        self._check(self._cuda.cuCtxSetCurrent(self._primary(device)), "make the context current")

    def _primary(self, device: int) -> Any:
        # Retained once and never released: torch uses the same context for the life of the process.
        found = self._contexts.get(device)
        if found is None:
            handle = self._check(self._cuda.cuDeviceGet(device), f"find device {device}")
            found = self._contexts[device] = self._check(self._cuda.cuDevicePrimaryCtxRetain(handle), "retain the context")
        return found

    @contextmanager
    def _relaxed_capture(self) -> Iterator[None]:
        """Let this thread load and allocate while some stream is being captured into a graph."""
        relaxed = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = self._check(self._cuda.cuThreadExchangeStreamCaptureMode(relaxed), "relax the capture mode")
        try:
            yield
        finally:
            self._check(self._cuda.cuThreadExchangeStreamCaptureMode(before), "restore the capture mode")

    def _check(self, result: Sequence[Any], what: str) -> Any:
        if result[0] != self._success:
            raise self._error(result[0], what)
        return result[1] if len(result) == 2 else result[1:]

    def _error(self, status: Any, what: str) -> DriverError:
        return DriverError(f"the CUDA driver could not {what}: {getattr(status, 'name', status)}", int(status))


def launch_config(
    cuda: Any, grid_ctas: int, block_threads: int, cluster_ctas: int, smem_bytes: int, *, programmatic: bool = False
) -> Any:  # fmt: skip
    """Return a CUlaunchConfig of module ``cuda`` (cuda.bindings.driver) without a stream; arguments as in LaunchSpec."""
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid_ctas, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block_threads, 1, 1
    config.sharedMemBytes = smem_bytes
    attributes = []
    if cluster_ctas > 1:
        cluster = cuda.CUlaunchAttribute()
        cluster.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dims = cluster.value.clusterDim
        dims.x, dims.y, dims.z = cluster_ctas, 1, 1
        attributes.append(cluster)
    if programmatic:
        overlap = cuda.CUlaunchAttribute()
        overlap.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        attributes.append(overlap)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


class HomeContext:
    """Tells whether a device's primary context is the calling thread's, without asking the driver each time."""

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._device = driver, device
        self._current_device = driver.current_device
        self._thread = threading.local()

    def here(self) -> bool:
        """Return whether it is; if not, enter ``driver.context`` around driver and library calls for that device."""
        if self._current_device() != self._device:
            return False
        if not hasattr(self._thread, "adopted"):
            # A thread in which torch has done nothing yet has a current device, but no current context.
            self._driver.adopt(self._device)
            self._thread.adopted = True
        return True


class DriverError(LaunchError):
    """A driver call failed.

    Attributes:
        code: the CUresult.
    """

    def __init__(self, message: str, code: int) -> None:
        self.code = code
        super().__init__(message)


@lru_cache(maxsize=1)
def cuda_driver() -> Driver:
    """Return the process's CudaDriver.

    Raises:
        MissingDependency: no cuda-bindings or no CUDA device.
    """
    return CudaDriver()
