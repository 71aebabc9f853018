"""A tuner without GPU or compiler: kernels that are only names, and a bench that reads times from a script."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cublaslt_fakes import algorithm_of

from autogemm.binary import Binary, Usage
from autogemm.config import Config
from autogemm.device import Device
from autogemm.errors import InputError
from autogemm.manifest import Manifest
from autogemm.measure.admission import Admitted, Searched
from autogemm.measure.timer import BASELINE, CUBLASLT, ScriptedTimer
from autogemm.problem import Problem
from autogemm.results import CheckReport, Environment, Finding, Outcome
from autogemm.space import Space

H200 = Device(arch="sm_90a", gpu="nvidia-h200", sm_count=132, driver="580.1", name="NVIDIA H200")
PROBLEM = Problem(m=4096, n=4096, k=4096)


def space_of(configs: Sequence[Config]) -> Space:
    """Return the space that holds exactly ``configs``."""
    blocks = tuple({name: (value,) for name, value in config.to_knobs().items()} for config in configs)
    return Space(arch_name="sm_90a", blocks=blocks, source="test")


def fake_binary(config: Config, *, passed: bool = True) -> Binary:
    """Return a Binary of ``config`` with a verdict, and nothing that could run."""
    findings = () if passed else (Finding(kind="race", text="two roles write one tile"),)
    report = CheckReport(
        findings=findings, level="tile", shape=(256, 256, 128), seeds=(0, 1), max_error=0.0, wrong_elements=0, cycles=1.0,
        model="machine-1",
    )  # fmt: skip
    manifest = Manifest(
        entry="gemm_kernel", arch="sm_90a", dtype="float16", layout="NT", epilogue="none", knobs=config.binary.to_knobs(),
        block_threads=384, cluster_ctas=config.cta_group, smem_bytes=1, grid="sm_count", scalars=(), tensor_maps=(), params=(),
        generator="gen-1",
    )  # fmt: skip
    usage = Usage(registers=168, spill_bytes=0, stack_bytes=0, smem_bytes=0)
    return Binary(cubin=config.binary.id.encode(), manifest=manifest, usage=usage, compiler="fake 1", check=report.to_json())


def write_candidates(folder: Path, configs: Sequence[Config]) -> Path:
    """Write the binaries of ``configs`` as a folder of candidates and return it."""
    for config in {c.binary for c in configs}:
        fake_binary(config).write(folder)
    return folder


class FakeBench:
    """A Bench over given times; counts admissions, and can call back at every round (to kill the process, say)."""

    def __init__(
        self, times_s: Mapping[Config, float], baseline_s: float, *, noise: float = 0.004, seed: int = 0,
        bad: Mapping[Config, Outcome] | None = None, on_round: Callable[[int], None] = lambda index: None, pause_s: float = 0.0,
        cublaslt_s: float | None = None,
    ) -> None:  # fmt: skip
        times = {config.id: seconds for config, seconds in times_s.items()}
        if cublaslt_s is not None:
            times[CUBLASLT] = cublaslt_s
        self._timer = ScriptedTimer({BASELINE: baseline_s, **times}, noise=noise, outliers=0.01, seed=seed)
        self._bad, self._on_round, self._pause_s = dict(bad or {}), on_round, pause_s
        self.admitted: list[str] = []
        self.closed = False

    @property
    def samples(self) -> int:
        """Kernel timings taken."""
        return self._timer.samples

    def admit(self, name: str, binary: Binary, config: Config) -> Admitted:
        assert name == config.id and binary.config == config.binary
        self.admitted.append(name)
        outcome = self._bad.get(config, Outcome.OK)
        if outcome is not Outcome.OK:
            return Admitted(outcome=outcome, reason="scripted")
        return Admitted(outcome=outcome, relative_error={"kernel": 2e-4, "baseline": 2e-4})

    def admit_cublaslt(self) -> Searched:
        if CUBLASLT not in self._timer.times_s:
            raise InputError("libcublasLt was not found")
        self.admitted.append(CUBLASLT)
        return Searched(algorithm=algorithm_of(), tried=8, relative_error={"kernel": 2e-4, "baseline": 2e-4})

    def round(self, names: Sequence[str]) -> dict[str, float]:
        assert set(names) <= set(self.admitted)
        self._on_round(self._timer.rounds)
        if self._pause_s:
            time.sleep(self._pause_s)
        return self._timer.round(names)

    cold_round = round

    def environment(self) -> Environment:
        return Environment(
            gpu="NVIDIA H200", slug="nvidia-h200", sm_count=132, driver="580.1", cuda="13.0", torch="2.13", power_limit_w=700.0,
            sm_clock_hz=None, power_w=None, throttle_reasons=(), date="2026-11-29T16:00:00Z",
        )  # fmt: skip

    def close(self) -> None:
        self.closed = True
