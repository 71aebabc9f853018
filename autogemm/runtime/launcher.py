"""Kernel: a Binary made callable on torch tensors. Needs the CUDA driver and torch only: no TVM, no compiler.

A call looks its arguments up among prepared launches (``Plan``): tensor maps encoded, scalars evaluated, parameter array and
launch configuration built. The key of that cache holds everything a plan is made of, so that a plan can't be stale: pointers,
shapes, strides, launch-time knobs and stream; types and devices are compared before.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..binary import Binary
from ..config import LaunchKnobs
from ..errors import InputError, LaunchError
from ..manifest import Manifest
from .driver import Driver, HomeContext, LaunchSpec, Memory, cuda_driver
from .plan import TORCH_DTYPES, ParameterBlock, Recipe, launch_variables, recipe

# Plans kept per kernel; one takes about 3 KiB of host memory. Plans that own workspace hold device memory, so fewer of them.
PLANS: Final = 1024
PLANS_WITH_WORKSPACE: Final = 64
# Recipes kept per kernel: sizes, whatever the addresses.
RECIPES: Final = 256

_CAPABILITY: Final = {"sm_90a": (9, 0), "sm_100a": (10, 0)}


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
    """One cubin in one device's context. Never unloaded: a CUDA graph may hold the function longer than any object here.

    Attributes:
        sm_count: SMs of the device.
        resident_ctas: CTAs that run at once, at most one per SM. A cluster stays within one GPC, whose number of SMs need not
            be a multiple of its size; a grid of sm_count / cluster_ctas clusters would leave some of them for a second wave.
    """

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
        self.resident_ctas = self.sm_count
        if manifest.cluster_ctas > 1:
            with driver.context(device):
                clusters = driver.max_active_clusters(
                    self.function, manifest.block_threads, manifest.cluster_ctas, manifest.smem_bytes
                )  # fmt: skip
            if clusters < 1:
                raise LaunchError(
                    f"device {device} ({driver.device_name(device)}) can't hold a cluster of {manifest.cluster_ctas} CTAs with "
                    f"{manifest.smem_bytes} bytes of shared memory each; choose a Config with smaller clusters"
                )
            self.resident_ctas = min(self.sm_count, clusters * manifest.cluster_ctas)
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
        self._dtype = TORCH_DTYPES[self.manifest.dtype]
        self._default_launch = binary.config.launch
        self._needs_workspace = self.manifest.workspace_bytes.strip() != "0"
        self._current_stream = self._driver.current_stream
        self._home = HomeContext(self._driver, device)
        # Two generations stand in for least-recently-used order: a hit among the recent costs no bookkeeping, and when the
        # recent are full they become the old ones, so that a plan is dropped only after a whole generation without a call.
        self._recent: dict[tuple[Any, ...], Plan] = {}
        self._old: dict[tuple[Any, ...], Plan] = {}
        self._generation = (PLANS_WITH_WORKSPACE if self._needs_workspace else PLANS) // 2
        self._recipes: dict[tuple[int, ...], Recipe] = {}
        self._lock = threading.Lock()

    @property
    def sm_count(self) -> int:
        """SMs of the device; a launch occupies as many of them as its clusters can, unless told otherwise."""
        return self._loaded.sm_count

    @property
    def resident_ctas(self) -> int:
        """CTAs that the device runs at once: its SMs, or fewer where clusters don't fill its GPCs."""
        return self._loaded.resident_ctas

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        *,
        launch: LaunchKnobs | None = None,
        sm_count: int | None = None,
        stream: int | torch.cuda.Stream | None = None,
    ) -> torch.Tensor:
        """Put ``out = a . b^T`` on the stream and return ``out``.

        Args:
            a: [M, K], the kernel's dtype, K contiguous.
            b: [N, K], likewise.
            out: [M, N], N contiguous; must not overlap a or b.
            launch: launch-time knobs, ``Config.launch``; the Binary's own by default.
            sm_count: SMs to occupy at most; all by default. Counts beyond ``resident_ctas`` mean that many.
            stream: a torch stream or raw handle of this device; torch's current one by default.

        Raises:
            InputError: wrong type, shape, stride, alignment, device, overlap or knob.
            LaunchError: the driver refused the launch.
        """
        if stream is None:
            handle = self._current_stream(self.device)
        else:
            handle = stream if isinstance(stream, int) else stream.cuda_stream
        dtype, device = self._dtype, self.device
        try:
            usual = (
                a.dtype is dtype and b.dtype is dtype and out.dtype is dtype
                and a.get_device() == device and b.get_device() == device and out.get_device() == device
            )  # fmt: skip
            key: tuple[Any, ...] = (
                a.data_ptr(), b.data_ptr(), out.data_ptr(), a.shape, b.shape, out.shape, launch, sm_count, handle,
            )  # fmt: skip
            # The strides of contiguous tensors follow from their shapes, or belong to a dimension of extent 1 and are unused.
            if not (a.is_contiguous() and b.is_contiguous() and out.is_contiguous()):
                key = (*key, a.stride(), b.stride(), out.stride())
        except AttributeError:
            raise InputError(_not_tensors(a, b, out)) from None
        if self._needs_workspace:
            key = (*key, self._driver.capture_id(handle))
        plan = self._recent.get(key) if usual else None
        if plan is None:
            plan = self._find(key, a, b, out, launch, sm_count, handle)
        self.run(plan)
        return out

    def run(self, plan: Plan) -> None:
        """Launch ``plan`` in the device's context, on the stream it was made for."""
        if self._home.here():
            plan.launch()
        else:
            with self._driver.context(self.device):
                plan.launch()

    def plan(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, launch: LaunchKnobs, sm_count: int, stream: int
    ) -> Plan | None:
        """Return a Plan that may be run again for tensors at the same addresses with the same sizes, strides and types.

        None if there is no such plan: a kernel with workspace needs another one in each capture.

        Raises:
            InputError: as in a call.
        """
        if self._needs_workspace:
            return None
        key = ("plan", a.data_ptr(), b.data_ptr(), out.data_ptr(), a.stride(), b.stride(), out.stride(), a.shape, b.shape,
               launch, sm_count, stream)  # fmt: skip
        return self._find(key, a, b, out, launch, sm_count, stream)

    def current_stream(self) -> int:
        """Return the raw handle of torch's current stream on the kernel's device."""
        return self._current_stream(self.device)

    def _find(
        self, key: tuple[Any, ...], a: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
        launch: LaunchKnobs | None, sm_count: int | None, stream: int,
    ) -> Plan:  # fmt: skip
        variables = launch_variables(
            self.manifest, a, b, out, device=self.device,
            launch=self._default_launch if launch is None else launch,
            sm_count=self.sm_count if sm_count is None else sm_count, device_sm_count=self.sm_count,
            resident_ctas=self.resident_ctas,
        )  # fmt: skip
        with self._lock:
            plan = self._recent.get(key) or self._old.pop(key, None)
        if plan is None:
            addresses = {"a": a.data_ptr(), "b": b.data_ptr(), "d": out.data_ptr()}
            with self._driver.context(self.device):
                plan = self._plan(variables, addresses, stream, key[-1] if self._needs_workspace else 0)
        with self._lock:
            if len(self._recent) >= self._generation:
                self._old, self._recent = self._recent, {}
            self._recent[key] = plan
        return plan

    def _plan(self, variables: dict[str, int], addresses: dict[str, int], stream: int, capture: int) -> Plan:
        manifest, made = self.manifest, self._recipe(variables)
        workspace = self._workspace(made.workspace_bytes, variables, stream, capture)
        params = ParameterBlock(made, self._driver, addresses, 0 if workspace is None else workspace.memory.address)
        launch = self._driver.prepare(
            LaunchSpec(
                function=self._loaded.function, grid_ctas=made.grid_ctas, block_threads=manifest.block_threads,
                cluster_ctas=manifest.cluster_ctas, smem_bytes=manifest.smem_bytes, params=params.address, stream=stream,
                programmatic=manifest.programmatic,
            )
        )  # fmt: skip
        return Plan(launch=launch, keep=(params, workspace))

    def _recipe(self, variables: dict[str, int]) -> Recipe:
        key = tuple(variables.values())
        found = self._recipes.get(key)
        if found is None:
            if len(self._recipes) >= RECIPES:
                self._recipes = {}
            found = self._recipes[key] = recipe(self.manifest, variables)
        return found

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


def _not_tensors(*given: Any) -> str:
    kinds = ", ".join(type(value).__name__ for value in given)
    return f"a kernel takes three torch tensors (a, b, out), got {kinds}"
