"""What a timer is, and a scripted one for tests and dry runs. The real one is in cuda_timer.py."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from ..errors import InputError

# The name under which every round reports torch.matmul.
BASELINE: Final = "baseline"
# The name of the best algorithm a search of cuBLASLt found, where it was asked for.
CUBLASLT: Final = "cublaslt"


class Timer(Protocol):
    """Times registered kernels in interleaved rounds."""

    def round(self, names: Sequence[str]) -> dict[str, float]:
        """Return one sample, in seconds per call, of each of ``names`` and of ``BASELINE``, all from one interleaved round.

        Only samples of one round compare: between rounds the clock moves. A kernel that fails for good is left out, in this
        round and all later ones.
        """


class ScriptedTimer:
    """A Timer of given true times, for tests: shared drift per round, independent noise per sample, the same for a seed."""

    def __init__(
        self, times_s: Mapping[str, float], *, noise: float = 0.0, outliers: float = 0.0, seed: int = 0,
        drift: Callable[[int], float] = lambda index: 1.0,
    ) -> None:  # fmt: skip
        """Script the times.

        Args:
            times_s: seconds per call by name; must hold ``BASELINE``.
            noise: standard deviation of the logarithm of a sample.
            outliers: share of samples that take half as long again.
            drift: factor on all samples of round ``index``, such as a falling clock.
        """
        if BASELINE not in times_s:
            raise InputError(f"a timer needs a time for {BASELINE!r}")
        self.times_s = dict(times_s)
        self.rounds = 0
        self.samples = 0
        self._noise, self._outliers, self._drift = noise, outliers, drift
        self._random = random.Random(seed)

    def round(self, names: Sequence[str]) -> dict[str, float]:
        factor = self._drift(self.rounds)
        self.rounds += 1
        taken = {}
        for name in dict.fromkeys((BASELINE, *names)):
            if name not in self.times_s:
                raise InputError(f"no kernel {name!r} is registered with this timer")
            sample = self.times_s[name] * factor * math.exp(self._random.gauss(0.0, self._noise))
            taken[name] = sample * (1.5 if self._random.random() < self._outliers else 1.0)
        self.samples += len(taken)
        return taken
