"""What the CUDA driver is told, with cuda.bindings' own structures and its functions replaced."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from autogemm.runtime.driver import CudaDriver, DriverError, LaunchSpec, MapSpec

OK = cuda.CUresult.CUDA_SUCCESS
LAUNCH = LaunchSpec(
    function=0xF00, grid_ctas=132, block_threads=384, cluster_ctas=2, smem_bytes=200_000, params=0xABC0, stream=7
)
MAP = MapSpec(dtype="bfloat16", dims=(136, 300), strides_bytes=(272,), box=(64, 128), swizzle_bytes=64, l2_promotion_bytes=256)


class Bindings:
    """The module ``cuda.bindings.driver`` with some functions replaced; the rest is the real one."""

    def __init__(self, **functions: Any) -> None:
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(cuda, name)


def make_driver(**functions: Any) -> CudaDriver:
    made = CudaDriver.__new__(CudaDriver)
    made._bind(SimpleNamespace(), Bindings(**functions))
    return made


def test_a_launch_passes_grid_cluster_shared_memory_stream_and_parameters() -> None:
    seen: list[tuple[Any, ...]] = []

    def launch(*arguments: Any) -> tuple[Any]:
        seen.append(arguments)
        return (OK,)

    make_driver(cuLaunchKernelEx=launch).prepare(LAUNCH)()
    config, function, params, extra = seen[0]
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (132, 1, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (384, 1, 1)
    assert config.sharedMemBytes == 200_000 and int(config.hStream) == 7
    assert config.numAttrs == 1
    assert config.attrs[0].id == cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dims = config.attrs[0].value.clusterDim
    assert (dims.x, dims.y, dims.z) == (2, 1, 1)
    assert (int(function), params, extra) == (0xF00, 0xABC0, 0)


OVERLAP = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
ACTIVE = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
KERNEL_NODE = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL


class Capture:
    """A stream as the driver sees it, captured into a graph or not; records what each launch allowed."""

    def __init__(self) -> None:
        self.overlaps: list[bool] = []
        self.status: Any = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
        self.before: list[tuple[Any, int]] = []  # what comes next depends on: (type of node, its function)
        self.queries = 0
        self.driver = make_driver(
            cuLaunchKernelEx=self.launch, cuStreamGetCaptureInfo=self.info,
            cuGraphNodeGetType=lambda node: (OK, node[0]),
            cuGraphKernelNodeGetParams=lambda node: (OK, SimpleNamespace(func=node[1])),
        )  # fmt: skip
        self.driver._capturing = lambda: self.status == ACTIVE

    def launch(self, config: Any, *rest: Any) -> tuple[Any]:
        allowed = [a.value.programmaticStreamSerializationAllowed for a in config.attrs if a.id == OVERLAP]
        assert allowed in ([], [1]) and config.numAttrs == len(config.attrs)
        self.overlaps.append(bool(allowed))
        return (OK,)

    def info(self, stream: Any) -> tuple[Any, ...]:
        self.queries += 1
        assert int(stream) == LAUNCH.stream
        return OK, self.status, 3, None, self.before or None, None, len(self.before)


def test_a_kernel_that_waits_for_its_predecessor_is_launched_before_that_ends() -> None:
    seen = Capture()
    launch = seen.driver.prepare(replace(LAUNCH, programmatic=True))
    launch()
    launch()
    seen.driver.prepare(LAUNCH)()
    assert seen.overlaps == [True, True, False] and seen.queries == 0


@pytest.mark.parametrize(
    ("before", "overlaps"),
    [
        ([(KERNEL_NODE, LAUNCH.function)], True),  # one of ours
        ([(KERNEL_NODE, 0xBAD)], False),  # someone else's kernel
        ([(cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET, LAUNCH.function)], False),
        ([(KERNEL_NODE, LAUNCH.function)] * 2, False),  # two branches meet
        ([], False),  # the first node of the graph
    ],
)
def test_in_a_graph_a_kernel_overlaps_only_with_one_of_our_own(before: list[tuple[Any, int]], overlaps: bool) -> None:
    seen = Capture()
    launch = seen.driver.prepare(replace(LAUNCH, programmatic=True))
    seen.status, seen.before = ACTIVE, before
    launch()
    assert seen.overlaps == [overlaps] and seen.queries == 1


def test_a_capture_of_another_stream_changes_nothing() -> None:
    seen = Capture()
    seen.driver._capturing = lambda: True  # torch's current stream, while the launch names a stream of its own
    seen.driver.prepare(replace(LAUNCH, programmatic=True))()
    assert seen.overlaps == [True] and seen.queries == 1


def test_clusters_are_counted_for_the_attributes_of_a_launch() -> None:
    seen: list[tuple[Any, ...]] = []

    def count(*arguments: Any) -> tuple[Any, int]:
        seen.append(arguments)
        return OK, 30

    assert make_driver(cuOccupancyMaxActiveClusters=count).max_active_clusters(0xF00, 384, 4, 200_000) == 30
    function, config = seen[0]
    dims = config.attrs[0].value.clusterDim
    assert int(function) == 0xF00 and (config.gridDimX, config.blockDimX, config.sharedMemBytes) == (4, 384, 200_000)
    assert config.attrs[0].id == cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert (config.numAttrs, dims.x, dims.y, dims.z) == (1, 4, 1, 1)


def test_a_failed_launch_names_the_error_and_keeps_its_code() -> None:
    driver = make_driver(cuLaunchKernelEx=lambda *arguments: (cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,))
    with pytest.raises(DriverError, match=r"could not launch .*CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        driver.prepare(LAUNCH)()
    assert caught.value.code == 700


def test_a_tensor_map_is_encoded_with_the_drivers_own_names() -> None:
    seen: list[tuple[Any, ...]] = []

    def encode(*arguments: Any) -> tuple[Any, Any]:
        seen.append(arguments)
        return OK, cuda.CUtensorMap()

    driver = make_driver(cuTensorMapEncodeTiled=encode)
    assert driver.encode(MAP, 0x1000) == bytes(128) and driver.encode(MAP, 0x2000) == bytes(128)
    kind, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill = seen[0]
    assert kind == cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 and rank == 2
    assert [address, seen[1][2]] == [0x1000, 0x2000]
    assert [[int(x) for x in xs] for xs in (dims, strides, box, steps)] == [[136, 300], [272], [64, 128], [1, 1]]
    assert interleave == cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    assert swizzle == cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B
    assert promotion == cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    assert fill == cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE


def test_a_refused_tensor_map_says_which() -> None:
    driver = make_driver(cuTensorMapEncodeTiled=lambda *arguments: (cuda.CUresult.CUDA_ERROR_INVALID_VALUE, None))
    with pytest.raises(DriverError, match=r"tensor map at 0x1000: .*dims=\(136, 300\).*INVALID_VALUE"):
        driver.encode(MAP, 0x1000)


def test_a_cubin_is_loaded_with_its_shared_memory_limit_in_a_relaxed_capture_mode() -> None:
    calls: list[str] = []

    def note(name: str, *result: Any) -> Any:
        def function(*arguments: Any) -> tuple[Any, ...]:
            calls.append(f"{name} {arguments[-1] if arguments else ''}".strip())
            return (OK, *result)

        return function

    relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    strict = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    driver = make_driver(
        cuDeviceGet=note("device", 0), cuDevicePrimaryCtxRetain=note("retain", 5), cuCtxPushCurrent=note("push"),
        cuCtxPopCurrent=note("pop", 5), cuThreadExchangeStreamCaptureMode=note("mode", strict),
        cuModuleLoadData=note("load", 1), cuModuleGetFunction=note("function", 77), cuFuncSetAttribute=note("limit"),
    )  # fmt: skip
    assert driver.load(0, b"cubin", "gemm_kernel", 1234) == 77
    assert calls == [
        "device 0", "retain 0", "push 5", f"mode {relaxed}", "load b'cubin'", "function b'gemm_kernel'", "limit 1234",
        f"mode {strict}", "pop",
    ]  # fmt: skip
