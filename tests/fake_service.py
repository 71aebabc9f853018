"""A worker's service without a GPU: what a kernel does is written in its cubin, as ``behaviour`` or ``behaviour:seconds``.

Behaviours at admission: ok, wrong, hang, abort, segfault, exit, illegal_access, illegal_instruction, trap, refused, bug.
Those that begin with ``late_`` pass admission and strike in rounds; ``rare_`` only in rounds with other kernels.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from cublaslt_fakes import algorithm_of

from autogemm.algorithm import Algorithm
from autogemm.binary import Binary
from autogemm.config import LaunchKnobs
from autogemm.errors import InputError, NothingFound
from autogemm.measure.admission import Searched
from autogemm.measure.faults import Fault, TrialFault
from autogemm.measure.timer import BASELINE, CUBLASLT, ScriptedTimer
from autogemm.problem import Problem
from autogemm.results import Environment, Outcome
from autogemm.runtime.driver import DriverError


class FakeService:
    def __init__(self) -> None:
        self.announce: Callable[[str], None] = lambda text: None
        self._broken = False

    def open(self, problem: Problem, device: int, seed: int | None) -> dict[str, Any]:
        if problem.m == 13:
            raise InputError("13 is not taken")
        if problem.m == 14:
            os.abort()
        self._problem = problem
        self._behaviours: dict[str, str] = {}
        self._timer = ScriptedTimer({BASELINE: 1e-5}, seed=seed or 0)
        return {"seed": 1234 if seed is None else seed, "baseline_error": 2e-4}

    def warm_up(self, seconds: float) -> None:
        """The hotter, the slower."""
        self._timer.times_s[BASELINE] += seconds

    def admit(self, name: str, binary: Binary, launch: LaunchKnobs, sm_count: int | None) -> dict[str, float]:
        behaviour, _, seconds = binary.cubin.decode().partition(":")
        if behaviour == "wrong":
            raise TrialFault(Fault(outcome=Outcome.INCORRECT, detail="wrong", sticky=False))
        if behaviour == "refused":
            raise InputError("for another dtype")
        self._strike(behaviour)
        self._behaviours[name] = behaviour
        self._timer.times_s[name] = float(seconds or 1e-5)
        return {"kernel": 2.1e-4, "baseline": 2e-4}

    def admit_cublaslt(self) -> Searched:
        """Find an algorithm of an id of its own in each process; none for K = 64."""
        if self._problem.k == 64:
            raise NothingFound("no algorithm computes it accurately")
        found = algorithm_of(os.getpid() % 1000 + 1)
        return Searched(algorithm=found, tried=8, relative_error=self.admit_algorithm(found))

    def admit_algorithm(self, algorithm: Algorithm) -> dict[str, float]:
        self._behaviours[CUBLASLT] = {1234: "late_abort", 1235: "wrong"}.get(algorithm.algo_id, "ok")
        if algorithm.algo_id == 1235:
            raise TrialFault(Fault(outcome=Outcome.INCORRECT, detail="wrong", sticky=False))
        self._timer.times_s[CUBLASLT] = 1e-6 * algorithm.algo_id
        return {"kernel": 2.1e-4, "baseline": 2e-4}

    def round(self, names: Sequence[str], cold: bool) -> dict[str, float]:
        for name in names:
            behaviour = self._behaviours[name]
            if behaviour.startswith("late_"):
                self._strike(behaviour.removeprefix("late_"))
            if behaviour.startswith("rare_") and len(names) > 1:
                self._strike(behaviour.removeprefix("rare_"))
        return {name: time_s * (3 if cold else 1) for name, time_s in self._timer.round(names).items()}

    def careful_round(self, names: Sequence[str], cold: bool) -> dict[str, float]:
        taken: dict[str, float] = {}
        for name in (BASELINE, *names):
            self.announce(name)
            taken |= self.round([] if name == BASELINE else [name], cold)
        return taken

    def environment(self) -> Environment:
        return Environment(
            gpu="NVIDIA Fake", slug="nvidia-fake", sm_count=132, driver="1", cuda="13", torch="2", power_limit_w=None,
            sm_clock_hz=None, power_w=None, throttle_reasons=(), date="2026-01-01T00:00:00Z",
        )  # fmt: skip

    def pid(self) -> int:
        return os.getpid()

    def probe(self) -> None:
        if self._broken:
            raise DriverError("the CUDA driver could not synchronize: CUDA_ERROR_ILLEGAL_ADDRESS", 700)

    def _strike(self, behaviour: str) -> None:
        if behaviour == "hang":
            time.sleep(600)
        elif behaviour == "abort":
            os.write(2, b"free(): invalid pointer\n")
            os.abort()
        elif behaviour == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif behaviour == "exit":
            os._exit(3)
        elif behaviour == "illegal_access":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")
        elif behaviour == "illegal_instruction":
            raise DriverError("the CUDA driver could not synchronize: CUDA_ERROR_ILLEGAL_INSTRUCTION", 715)
        elif behaviour == "trap":
            raise RuntimeError("CUDA error: unspecified launch failure")
        elif behaviour == "bad_launch":
            raise DriverError("the CUDA driver could not launch: CUDA_ERROR_INVALID_VALUE", 1)
        elif behaviour == "bad_launch_broken":
            self._broken = True
            raise DriverError("the CUDA driver could not launch: CUDA_ERROR_INVALID_VALUE", 1)
        elif behaviour == "bug":
            raise ZeroDivisionError("a bug of ours")
