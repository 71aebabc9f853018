"""Machine: what dispatch asks of the GPUs of this host."""

from __future__ import annotations

from typing import Protocol

import torch

from ..binary import Binary
from ..device import Device


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
