"""Stand-ins for the GPU: a driver that records its calls and computes launches on host memory, and tensors that claim a GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from autogemm.binary import Binary, Usage
from autogemm.manifest import Manifest, Operand, Param, Scalar, TensorMap
from autogemm.runtime.driver import LaunchSpec, MapSpec


def make_manifest(*, arch: str = "sm_90a", dtype: str = "float16", workspace: str = "0", cluster: int = 1) -> Manifest:
    """Return a manifest of a plausible kernel: 128x128 tiles, two derived scalars, three tensor maps."""
    params = [Param(kind="tensor_map", name=n) for n in ("A_map", "B_map", "D_map")]
    params += [Param(kind="int32", name="KT"), Param(kind="uint32", name="g_mul"), Param(kind="int32", name="tiles")]
    if workspace != "0":
        params.append(Param(kind="workspace", name="workspace"))
    return Manifest(
        entry="gemm_kernel", arch=arch, dtype=dtype, layout="NT", epilogue="none",
        knobs={
            "BLK_M": 128, "BLK_N": 128, "BLK_K": 64, "PIPE_DEPTH": 4, "CTA_GROUP": cluster, "NUM_CONSUMER": 2, "EPI_N": 64,
            "l2_group_size": 8, "TMEM_BUFFERS": 1, "PINGPONG": False, "SPLIT_K": 1, "SWAP_AB": False,
        },
        block_threads=384, cluster_ctas=cluster, smem_bytes=200_000, grid=f"min(sm_count // {cluster}, tiles) * {cluster}",
        scalars=(
            Scalar(name="KT", value="ceildiv(K, 64)"), Scalar(name="g_mul", value="magic_multiplier(l2_group_size)"),
            Scalar(name="tiles", value="ceildiv(M, 128) * ceildiv(N, 128)"),
        ),
        tensor_maps=(
            _tensor_map("A_map", "a", dims=("K", "M"), stride="lda * 2", box=("64", "128")),
            _tensor_map("B_map", "b", dims=("K", "N"), stride="ldb * 2", box=("64", "128")),
            _tensor_map("D_map", "d", dims=("N", "M"), stride="ldd * 2", box=("64", "64")),
        ),
        params=tuple(params), workspace_bytes=workspace,
    )  # fmt: skip


def _tensor_map(name: str, operand: Operand, *, dims: tuple[str, str], stride: str, box: tuple[str, str]) -> TensorMap:
    return TensorMap(name=name, operand=operand, dims=dims, strides_bytes=(stride,), box=box, swizzle_bytes=128)


def make_binary(cubin: bytes = b"cubin", **manifest: object) -> Binary:
    """Return a Binary around ``make_manifest``; what ``cubin`` holds only matters to the fake."""
    usage = Usage(registers=168, spill_bytes=0, stack_bytes=0, smem_bytes=0)
    return Binary(cubin=cubin, manifest=make_manifest(**manifest), usage=usage, compiler="fake")  # type: ignore[arg-type]


class Disguised:
    """A host tensor that says it is on a GPU; the launcher asks it nothing else."""

    def __init__(self, tensor: torch.Tensor, device: str = "cuda:0") -> None:
        self.tensor = tensor
        self.device = torch.device(device)

    def get_device(self) -> int:
        return self.device.index

    def __getattr__(self, name: str) -> object:
        return getattr(self.tensor, name)


@dataclass
class Launched:
    """One launch as the fake driver saw it."""

    spec: LaunchSpec
    maps: list[MapSpec]
    addresses: list[int]
    scalars: list[int]
    context: int
    thread: int


@dataclass
class FakeMemory:
    address: int
    content: object = None


@dataclass
class FakeDriver:
    """A ``Driver`` on host memory: a launch reads its parameter block as the real one would, then computes with NumPy."""

    manifest: Manifest = field(default_factory=make_manifest)
    sms: int = 132
    arch: tuple[int, int] = (9, 0)
    loads: list[tuple[int, str]] = field(default_factory=list)
    encoded: list[tuple[MapSpec, int]] = field(default_factory=list)
    prepared: list[LaunchSpec] = field(default_factory=list)
    launches: list[Launched] = field(default_factory=list)
    allocations: list[tuple[int, int, bool]] = field(default_factory=list)
    stream: int = 7
    device: int = 0
    capture: int = 0
    active_clusters: int | None = None
    asked_clusters: list[tuple[int, int, int, int]] = field(default_factory=list)

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __post_init__(self) -> None:
        self.contexts = threading.local()

    def device_name(self, device: int) -> str:
        return "NVIDIA Fake"

    def capability(self, device: int) -> tuple[int, int]:
        return self.arch

    def sm_count(self, device: int) -> int:
        return self.sms

    def load(self, device: int, cubin: bytes, entry: str, smem_bytes: int) -> int:
        self.loads.append((device, entry))
        return 1000 + len(self.loads)

    def max_active_clusters(self, function: int, block_threads: int, cluster_ctas: int, smem_bytes: int) -> int:
        assert getattr(self.contexts, "current", None) is not None, "the driver counts clusters in a context only"
        self.asked_clusters.append((function, block_threads, cluster_ctas, smem_bytes))
        return self.sms // cluster_ctas if self.active_clusters is None else self.active_clusters

    def encode(self, spec: MapSpec, address: int) -> bytes:
        assert getattr(self.contexts, "current", None) is not None, "the driver encodes in a context only"
        self.encoded.append((spec, address))
        return (len(self.encoded) - 1).to_bytes(8, "little") + bytes(120)

    def prepare(self, spec: LaunchSpec) -> Callable[[], None]:
        self.prepared.append(spec)

        def launch() -> None:
            assert getattr(self.contexts, "current", None) is not None, "no context is current in this thread"
            self._run(spec)

        return launch

    def allocate_zeroed(self, device: int, size: int, stream: int, capturing: bool) -> FakeMemory:
        self.allocations.append((size, stream, capturing))
        content = ctypes.create_string_buffer(size)
        return FakeMemory(ctypes.addressof(content), content)

    def capture_id(self, stream: int) -> int:
        return self.capture

    def current_device(self) -> int:
        return self.device

    def current_stream(self, device: int) -> int:
        return self.stream

    @contextmanager
    def context(self, device: int) -> Iterator[None]:
        before = getattr(self.contexts, "current", None)
        self.contexts.current = device
        yield
        self.contexts.current = before

    def adopt(self, device: int) -> None:
        self.contexts.current = device

    def _run(self, spec: LaunchSpec) -> None:
        count = len(self.manifest.params)
        pointers = (ctypes.c_void_p * count).from_address(spec.params)
        maps, addresses, scalars = [], [], []
        for param, pointer in zip(self.manifest.params, pointers, strict=True):
            assert pointer is not None
            if param.kind == "tensor_map":
                assert pointer % 64 == 0
                spec_of_map, address = self.encoded[int.from_bytes(ctypes.string_at(pointer, 8), "little")]
                maps.append(spec_of_map)
                addresses.append(address)
            elif param.kind == "workspace":
                scalars.append(int.from_bytes(ctypes.string_at(pointer, 8), "little"))
            else:
                scalars.append(int.from_bytes(ctypes.string_at(pointer, 4), "little", signed=param.kind == "int32"))
        self.launches.append(
            Launched(
                spec=spec,
                maps=maps,
                addresses=addresses,
                scalars=scalars,
                context=self.contexts.current,
                thread=threading.get_ident(),
            )
        )
        a, b, d = (_matrix(m, at) for m, at in zip(maps, addresses, strict=True))
        d[...] = (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.float16)


def _matrix(spec: MapSpec, address: int) -> np.ndarray:
    cols, rows = spec.dims
    stride = spec.strides_bytes[0]
    raw = (ctypes.c_char * ((rows - 1) * stride + cols * 2)).from_address(address)
    return np.lib.stride_tricks.as_strided(np.frombuffer(raw, np.float16), (rows, cols), (stride, 2), writeable=True)
