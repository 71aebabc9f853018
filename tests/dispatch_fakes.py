"""Stand-ins for dispatch: rows with chosen timings, and a machine that launches on the CPU and refuses what TMA would."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cublaslt_fakes import algorithm_of
from fakes import make_manifest

from autogemm.algorithm import Algorithm
from autogemm.binary import Binary, Usage
from autogemm.config import NAMED, Config, LaunchKnobs
from autogemm.decision import Notice
from autogemm.device import Device
from autogemm.dispatch import Dispatcher
from autogemm.errors import LaunchError
from autogemm.kernel_store import MemoryKernels
from autogemm.problem import Problem
from autogemm.record import CublasLtRecord, Key, Provenance, Row
from autogemm.results import Environment, Measurement, Prediction, Samples

CONFIG = NAMED["sm_90a"]["cooperative"]
SKINNY = NAMED["sm_90a"]["skinny"]
H200 = Device(
    arch="sm_90a", gpu="nvidia-h200", sm_count=132, name="NVIDIA H200", driver="580.1", torch="2.11.0", cublaslt=130100
)  # fmt: skip
PROVENANCE = Provenance(
    autogemm="0.1.0", generator="gen-1", compiler="nvrtc 13.0", driver="580.1", tvm="0.27", torch="2.11.0",
    date="2026-11-29T16:00:00Z",
)  # fmt: skip


def key_of(m: int, n: int, k: int, *, dtype: str = "float16", device: Device = H200, **changes: Any) -> Key:
    assert device.arch is not None
    problem = Problem(m=m, n=n, k=k, dtype=dtype)
    return replace(Key.of(problem, arch=device.arch, gpu=device.gpu, sm_count=device.sm_count), **changes)


def measured(
    m: int, n: int, k: int, *, kernel_us: float = 100.0, ratio: float = 1.1, config: Config = CONFIG, dtype: str = "float16",
    device: Device = H200, date: str = PROVENANCE.date, samples: int = 3, **changes: Any,
) -> Row:  # fmt: skip
    kernel = tuple(kernel_us * 1e-6 * (1 + 0.001 * i) for i in range(samples))
    environment = Environment(
        gpu=device.name, slug=device.gpu, sm_count=device.sm_count, driver="580.1", cuda="13.0", torch="2.11.0",
        power_limit_w=700.0, sm_clock_hz=None, power_w=None, throttle_reasons=(), date=date,
    )  # fmt: skip
    return Row(
        key=key_of(m, n, k, dtype=dtype, device=device, **changes), config=config, provenance=replace(PROVENANCE, date=date),
        evidence=Measurement(
            warm=Samples(kernel_s=kernel, baseline_s=tuple(t * ratio for t in kernel), cold_l2=False), cold=None,
            relative_error={"kernel": 2e-4, "baseline": 2e-4}, environment=environment,
        ),
    )  # fmt: skip


def with_algorithm(row: Row, lead: float = 1.05, algorithm: Algorithm | None = None) -> Row:
    """Return ``row`` with a cuBLASLt algorithm that is ``lead`` times as fast as its kernel in every round."""
    assert row.measurement is not None
    warm, cold = row.measurement.warm, row.measurement.cold
    record = CublasLtRecord(
        algorithm=algorithm if algorithm is not None else algorithm_of(), tried=8,
        warm_s=tuple(t / lead for t in warm.kernel_s), cold_s=None if cold is None else tuple(t / lead for t in cold.kernel_s),
        relative_error={"kernel": 2e-4, "baseline": 2e-4},
    )  # fmt: skip
    return replace(row, cublaslt=record)


def predicted(m: int, n: int, k: int, *, config: Config = CONFIG, device: Device = H200, **changes: Any) -> Row:
    return Row(
        key=key_of(m, n, k, device=device, **changes), config=config, provenance=replace(PROVENANCE, driver=None, torch=None),
        evidence=Prediction(time_s=1e-4, model="closed-form-1", gpu=device.gpu, clock_hz=1.98e9),
    )  # fmt: skip


def binary_of(config: Config, *, dtype: str = "float16", arch: str = "sm_90a", generator: str = "gen-1") -> Binary:
    manifest = replace(
        make_manifest(arch=arch, dtype=dtype, cluster=config.cta_group), knobs=config.binary.to_knobs(), generator=generator
    )
    usage = Usage(registers=168, spill_bytes=0, stack_bytes=0, smem_bytes=0)
    cubin = f"cubin of {config.binary.id} {dtype} {arch} {generator}".encode()
    return Binary(cubin=cubin, manifest=manifest, usage=usage, compiler="fake")


@dataclass
class FakeMachine:
    """GPUs that are the CPU. A kernel that is handed what the real launcher refuses fails the test."""

    gpu: Device = H200
    load_s: float = 0.0
    is_capturing: bool = False
    stream: int = 7
    loads: list[str] = field(default_factory=list)
    restored: list[Algorithm] = field(default_factory=list)
    refuses: str = ""
    launches: list[dict[str, Any]] = field(default_factory=list)
    device_type: str = "cpu"

    def device(self, index: int) -> Device:
        return self.gpu

    def capturing(self) -> bool:
        return self.is_capturing

    def load(self, binary: Binary, index: int) -> Any:
        assert not self.is_capturing, "a kernel was loaded inside CUDA-graph capture"
        time.sleep(self.load_s)
        self.loads.append(binary.name)

        return FakeKernel(self, binary)

    def restore(self, algorithm: Algorithm, problem: Problem, index: int) -> Any:
        assert not self.is_capturing, "an algorithm was restored inside CUDA-graph capture"
        if self.refuses:
            raise LaunchError(self.refuses)
        self.restored.append(algorithm)
        return FakeAlgorithm(self, algorithm, problem)


@dataclass
class FakeKernel:
    """A kernel on the CPU that reads and writes raw addresses, as a GPU does, so that a stale plan computes stale numbers."""

    machine: FakeMachine
    binary: Binary

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, launch: LaunchKnobs, sm_count: int
    ) -> torch.Tensor:  # fmt: skip
        self.run(self.plan(a, b, out, launch=launch, sm_count=sm_count, stream=self.current_stream()))
        return out

    def plan(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, launch: LaunchKnobs, sm_count: int, stream: int
    ) -> tuple[Any, ...]:  # fmt: skip
        refused = [
            tensor.shape
            for tensor in (a, b, out)
            if tensor.dim() != 2
            or tensor.dtype != getattr(torch, self.binary.manifest.dtype)
            or tensor.data_ptr() % 16
            or min(tensor.shape) < 1
            or tensor.stride(1) != 1
            or (tensor.shape[0] > 1 and (tensor.stride(0) * 2 % 16 or tensor.stride(0) < tensor.shape[1]))
            or tensor.is_neg()
        ]
        assert not refused and a.shape[1] % 8 == 0 and out.shape == (a.shape[0], b.shape[0]), (a.shape, b.shape, out.shape)
        assert self.binary.manifest.cluster_ctas <= sm_count <= self.machine.gpu.sm_count and 1 <= launch.l2_group_size <= 64
        return (*((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (a, b, out)), sm_count, stream)

    def run(self, plan: tuple[Any, ...]) -> None:
        *operands, sm_count, stream = plan
        assert stream == self.current_stream()
        a, b, out = (_at(*operand) for operand in operands)
        with torch.no_grad():
            out.copy_(a.double() @ b.double().t())
        self.machine.launches.append({"config": self.binary.config, "sm_count": sm_count, "thread": threading.get_ident()})

    def current_stream(self) -> int:
        return self.machine.stream


@dataclass
class FakeAlgorithm:
    """A cuBLASLt algorithm on the CPU, for dense tensors of one problem."""

    machine: FakeMachine
    algorithm: Algorithm
    problem: Problem

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, launch: LaunchKnobs, sm_count: int
    ) -> torch.Tensor:  # fmt: skip
        self.run(self.plan(a, b, out, launch=launch, sm_count=sm_count, stream=self.current_stream()) or _plan(a, b, out, 0))
        return out

    def plan(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, launch: LaunchKnobs, sm_count: int, stream: int
    ) -> tuple[Any, ...] | None:  # fmt: skip
        p = self.problem
        assert (a.shape, b.shape, out.shape) == ((p.m, p.k), (p.n, p.k), (p.m, p.n))
        assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 and not t.is_neg() for t in (a, b, out))
        return None if self.algorithm.workspace_bytes else _plan(a, b, out, stream)

    def run(self, plan: tuple[Any, ...]) -> None:
        *operands, stream = plan
        assert stream in (0, self.current_stream())
        a, b, out = (_at(*operand) for operand in operands)
        with torch.no_grad():
            out.copy_(a.double() @ b.double().t())
        self.machine.launches.append({"algorithm": self.algorithm, "thread": threading.get_ident()})

    def current_stream(self) -> int:
        return self.machine.stream


def _plan(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, stream: int) -> tuple[Any, ...]:
    return (*((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (a, b, out)), stream)


def _at(address: int, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    elements = sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True)) + 1
    raw = (ctypes.c_char * (elements * 2)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).as_strided(shape, stride)


def dispatcher_of(
    rows: Sequence[Row], *, machine: FakeMachine | None = None, binaries: Iterable[Binary] | None = None,
    unmeasured: bool = False, notices: Sequence[Notice] = (),
) -> Dispatcher:  # fmt: skip
    """Return a Dispatcher over ``rows``, with a kernel for each of them unless ``binaries`` says otherwise."""
    if binaries is None:
        binaries = {(r.config.binary, r.key.dtype): binary_of(r.config, dtype=r.key.dtype_a) for r in rows}.values()
    return Dispatcher(
        read_rows=lambda: (list(rows), list(notices)), kernels=MemoryKernels(binaries), machine=machine or FakeMachine(),
        unmeasured=unmeasured,
    )  # fmt: skip


def operands(
    m: int, n: int, k: int, dtype: torch.dtype = torch.float16, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return a [m, k] and b [k, n], both with K contiguous."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, k, generator=generator).to(dtype), torch.randn(n, k, generator=generator).to(dtype).t()
