"""Machine: what dispatch asks of the GPUs of this host."""

from __future__ import annotations

from typing import Final, Protocol

import torch

from ..arch import ArchName, gpu_slug
from ..binary import Binary
from ..device import Device
from .launcher import Kernel

_ARCH_OF: Final[dict[tuple[int, int], ArchName]] = {(9, 0): "sm_90a", (10, 0): "sm_100a"}


class Launch(Protocol):
    """A loaded kernel: ``out[M,N] = a[M,K] . b[N,K]^T`` on the caller's current stream; returns ``out``."""

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, l2_group_size: int, sm_count: int
    ) -> torch.Tensor: ...


class Machine(Protocol):
    """The GPUs of one host; tests put a fake in its place."""

    device_type: str

    def device(self, index: int) -> Device:
        """Return what a decision must know of GPU ``index``."""

    def load(self, binary: Binary, index: int) -> Launch:
        """Return ``binary`` loaded on GPU ``index``.

        Raises:
            LaunchError: the driver refuses it.
        """

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a CUDA graph."""


class CudaMachine:
    """The real GPUs, through torch and the CUDA driver."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}

    def device(self, index: int) -> Device:
        """Return what a decision must know of GPU ``index``."""
        if index not in self._devices:
            properties = torch.cuda.get_device_properties(index)
            self._devices[index] = Device(
                arch=_ARCH_OF.get((properties.major, properties.minor)), gpu=gpu_slug(properties.name),
                sm_count=properties.multi_processor_count, name=properties.name, driver=driver_version(),
                torch=torch.__version__,
            )  # fmt: skip
        return self._devices[index]

    def load(self, binary: Binary, index: int) -> Launch:
        """Return ``binary`` loaded on GPU ``index``."""
        return Kernel(binary, index)

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()


def driver_version() -> str | None:
    """Return the kernel driver's version as nvidia-smi prints it (``580.159.04``), None where the system does not tell."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") in (1, 2) and word.replace(".", "").isdigit()), None)
