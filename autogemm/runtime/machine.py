"""Machine: what dispatch asks of the GPUs of this host."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ..algorithm import Algorithm
from ..binary import Binary
from ..config import LaunchKnobs
from ..device import Device
from ..problem import Problem


class Launch(Protocol):
    """A loaded kernel, or a restored algorithm of cuBLASLt, which ignores ``launch`` and ``sm_count``.

    It computes ``out[M,N] = a[M,K] . b[N,K]^T``; launcher.Kernel and cublaslt.LoadedAlgorithm are the real ones.
    """

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, launch: LaunchKnobs, sm_count: int
    ) -> torch.Tensor:
        """Compute on the caller's current stream and return ``out``."""

    def plan(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *, launch: LaunchKnobs, sm_count: int, stream: int
    ) -> Any:
        """Return what ``run`` needs to do this again, for tensors at the same addresses of the same sizes, strides and types.

        None if that can't be.
        """

    def run(self, plan: Any) -> None:
        """Compute what ``plan`` was made for, on the stream it was made for."""

    def current_stream(self) -> int:
        """Return a handle of the caller's current stream on the kernel's device."""


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

    def restore(self, algorithm: Algorithm, problem: Problem, index: int) -> Launch:
        """Return ``algorithm`` ready to compute ``problem`` with dense operands on GPU ``index``.

        Raises:
            LaunchError, MissingDependency: it can't run here.
        """

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a CUDA graph."""
