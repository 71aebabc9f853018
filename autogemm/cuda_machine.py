"""The GPUs of this host, through torch, the CUDA driver and cuBLASLt."""

from __future__ import annotations

from typing import Final

import torch

from .algorithm import Algorithm
from .arch import ArchName, gpu_slug
from .binary import Binary
from .device import Device
from .measure.nvml import open_nvml, pci_bus_id
from .problem import Problem
from .runtime.cublaslt import cublaslt, library_version
from .runtime.launcher import Kernel
from .runtime.machine import Launch

ARCH_OF: Final[dict[tuple[int, int], ArchName]] = {(9, 0): "sm_90a", (10, 0): "sm_100a"}


class CudaMachine:
    """A runtime.machine.Machine of real GPUs."""

    device_type = "cuda"

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}

    def device(self, index: int) -> Device:
        """Return what a decision must know of GPU ``index``."""
        if index not in self._devices:
            properties = torch.cuda.get_device_properties(index)
            bus = pci_bus_id(index)
            nvml = open_nvml(bus) if bus is not None else None
            self._devices[index] = Device(
                arch=ARCH_OF.get((properties.major, properties.minor)), gpu=gpu_slug(properties.name),
                sm_count=properties.multi_processor_count, name=properties.name, torch=str(torch.__version__),
                driver=nvml.driver_version() if nvml is not None else None,
                power_limit_w=nvml.power_limit_w() if nvml is not None else None, cublaslt=library_version(),
            )  # fmt: skip
        return self._devices[index]

    def load(self, binary: Binary, index: int) -> Launch:
        """Return ``binary`` loaded on GPU ``index``."""
        return Kernel(binary, index)

    def restore(self, algorithm: Algorithm, problem: Problem, index: int) -> Launch:
        """Return ``algorithm`` ready to compute ``problem`` on GPU ``index``."""
        return cublaslt(index).restore(algorithm, problem)

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()
