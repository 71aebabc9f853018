"""What a measuring worker runs: DeviceSessions, one after the other, behind requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..algorithm import Algorithm
from ..binary import Binary
from ..config import LaunchKnobs
from ..errors import InputError
from ..problem import Problem
from ..results import Environment, Outcome
from .admission import Searched
from .device import DeviceSession, warm_up
from .faults import Fault, TrialFault


class DeviceService:
    """The Service behind a DeviceEvaluator; see worker.py."""

    def __init__(self) -> None:
        self.announce: Callable[[str], None] = lambda text: None
        self._session: DeviceSession | None = None
        self._device = 0

    def open(self, problem: Problem, device: int, seed: int | None) -> dict[str, Any]:
        """Begin a session, ending the one before; return its ``seed`` and ``baseline_error``."""
        if self._session is not None:
            self._session.close()
            self._session = None
        self._device = device
        self._session = DeviceSession(problem, device=device, seed=seed)
        return {"seed": self._session.seed, "baseline_error": self._session.baseline_error}

    def warm_up(self, seconds: float) -> None:
        """See measure.device.warm_up."""
        warm_up(self._device, seconds)

    def admit(self, name: str, binary: Binary, launch: LaunchKnobs, sm_count: int | None) -> dict[str, float]:
        """See DeviceSession.admit; a workspace that does not fit beside the others' fails this trial only."""
        try:
            return self._open.admit(name, binary, launch, sm_count)
        except torch.OutOfMemoryError as error:
            self._open.forget(name)
            detail = f"not enough device memory: {str(error).splitlines()[0]}"
        torch.cuda.empty_cache()
        raise TrialFault(Fault(outcome=Outcome.LAUNCH_FAILED, detail=detail, sticky=False))

    def admit_cublaslt(self) -> Searched:
        """See DeviceSession.admit_cublaslt."""
        return self._open.admit_cublaslt()

    def admit_algorithm(self, algorithm: Algorithm) -> dict[str, float]:
        """See DeviceSession.admit_algorithm."""
        return self._open.admit_algorithm(algorithm)

    def round(self, names: Sequence[str], cold: bool) -> dict[str, float]:
        """See DeviceSession.round."""
        return self._open.round(names, cold=cold)

    def careful_round(self, names: Sequence[str], cold: bool) -> dict[str, float]:
        """See DeviceSession.careful_round."""
        return self._open.careful_round(names, self.announce, cold=cold)

    def forget(self, name: str) -> None:
        """See DeviceSession.forget."""
        self._open.forget(name)

    def environment(self) -> Environment:
        """See DeviceSession.environment."""
        return self._open.environment()

    def energy_j(self, name: str, seconds: float) -> float | None:
        """See DeviceSession.energy_j."""
        return self._open.energy_j(name, seconds)

    def probe(self) -> None:
        """Raise torch's CUDA error if the context is broken."""
        torch.cuda.synchronize(self._device)
        torch.zeros(1, device=f"cuda:{self._device}").add_(1).item()

    @property
    def _open(self) -> DeviceSession:
        if self._session is None:
            raise InputError("no session is open in this worker")
        return self._session
