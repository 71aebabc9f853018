"""Read-only queries of NVML through ctypes: clocks, power, energy, throttle reasons, memory. Nothing is ever set."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Final

# nvml.h
_CLOCK_SM: Final = 1
_THROTTLE_REASONS: Final[tuple[tuple[int, str], ...]] = (
    (0x1, "gpu_idle"), (0x2, "applications_clocks"), (0x4, "sw_power_cap"), (0x8, "hw_slowdown"), (0x10, "sync_boost"),
    (0x20, "sw_thermal"), (0x40, "hw_thermal"), (0x80, "hw_power_brake"), (0x100, "display_clocks"),
)  # fmt: skip


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Nvml:
    """One GPU as NVML sees it. Every query returns None where the driver does not support it."""

    def __init__(self, pci_bus_id: str) -> None:
        """Open the GPU with this PCI bus id, as ``0000:1b:00.0``.

        Raises:
            OSError: no NVML library, or NVML does not know the GPU.
        """
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        if self._library.nvmlInit_v2() != 0:
            raise OSError("NVML did not start")
        found = self._library.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(self._handle))
        if found != 0:
            raise OSError(f"NVML does not know a GPU at {pci_bus_id}: error {found}")

    def driver_version(self) -> str | None:
        text = ctypes.create_string_buffer(96)
        return text.value.decode() if self._library.nvmlSystemGetDriverVersion(text, 96) == 0 else None

    def sm_clock_hz(self) -> float | None:
        megahertz = self._unsigned("nvmlDeviceGetClockInfo", _CLOCK_SM)
        return None if megahertz is None else megahertz * 1e6

    def power_w(self) -> float | None:
        milliwatts = self._unsigned("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1e3

    def power_limit_w(self) -> float | None:
        milliwatts = self._unsigned("nvmlDeviceGetEnforcedPowerLimit")
        return None if milliwatts is None else milliwatts / 1e3

    def energy_j(self) -> float | None:
        """Joules since the driver was loaded."""
        millijoules = self._long("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def throttle_reasons(self) -> tuple[str, ...] | None:
        bits = self._long("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else tuple(name for bit, name in _THROTTLE_REASONS if bits & bit)

    def memory_used(self) -> int | None:
        """Bytes in use by all processes."""
        memory = _Memory()
        return int(memory.used) if self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)) == 0 else None

    def _unsigned(self, function: str, *arguments: int) -> int | None:
        value = ctypes.c_uint()
        status = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(value))
        return value.value if status == 0 else None

    def _long(self, function: str) -> int | None:
        value = ctypes.c_ulonglong()
        return value.value if getattr(self._library, function)(self._handle, ctypes.byref(value)) == 0 else None


@lru_cache(maxsize=16)
def open_nvml(pci_bus_id: str) -> Nvml | None:
    """Return the GPU's Nvml, or None where NVML can't be used."""
    try:
        return Nvml(pci_bus_id)
    except (OSError, AttributeError):
        return None


def pci_bus_id(device: int) -> str | None:
    """Return the PCI bus id of torch's CUDA device ``device`` without making a context, or None if the driver can't say."""
    try:
        from cuda.bindings import driver as cuda

        if int(cuda.cuInit(0)[0]) != 0:
            return None
        status, handle = cuda.cuDeviceGet(device)
        status, text = cuda.cuDeviceGetPCIBusId(32, handle) if int(status) == 0 else (status, b"")
    except (ImportError, RuntimeError):
        return None
    return text.split(b"\0", 1)[0].decode() if int(status) == 0 else None
