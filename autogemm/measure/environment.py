"""Where and when something is measured: GPU, versions, and the clocks, power and throttle reasons seen meanwhile."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

import torch

from ..arch import gpu_slug
from ..results import Environment
from .nvml import Nvml, open_nvml, pci_bus_id


def now() -> str:
    """Return the present time, ISO 8601, UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(kw_only=True, slots=True)
class Recorder:
    """Collects what NVML shows of one GPU; call ``sample`` while it works, then ``environment``."""

    device: int
    nvml: Nvml | None
    clocks_hz: list[float] = field(default_factory=list)
    powers_w: list[float] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, device: int) -> Recorder:
        """Return the Recorder of CUDA device ``device``; without NVML it records nothing."""
        bus = pci_bus_id(device)
        return cls(device=device, nvml=open_nvml(bus) if bus is not None else None)

    def sample(self) -> None:
        """Read clock, power and throttle reasons once."""
        if self.nvml is None:
            return
        clock, power, reasons = self.nvml.sm_clock_hz(), self.nvml.power_w(), self.nvml.throttle_reasons()
        if clock is not None:
            self.clocks_hz.append(clock)
        if power is not None:
            self.powers_w.append(power)
        if reasons is not None:
            self.reasons.update(reasons)

    def reset(self) -> None:
        """Forget the samples."""
        self.clocks_hz.clear()
        self.powers_w.clear()
        self.reasons.clear()

    def environment(self) -> Environment:
        """Return the Environment of the samples so far."""
        properties = torch.cuda.get_device_properties(self.device)
        nvml = self.nvml
        return Environment(
            gpu=properties.name, slug=gpu_slug(properties.name), sm_count=properties.multi_processor_count,
            driver=(nvml.driver_version() if nvml is not None else None) or "unknown", cuda=str(torch.version.cuda),
            torch=str(torch.__version__), power_limit_w=nvml.power_limit_w() if nvml is not None else None,
            sm_clock_hz=_range(self.clocks_hz), power_w=_range(self.powers_w), throttle_reasons=tuple(sorted(self.reasons)),
            date=now(),
        )  # fmt: skip


def _range(values: list[float]) -> tuple[float, float] | None:
    return (min(values), max(values)) if values else None
