"""``load``: one kernel as an object, compiled ahead if need be. What dispatch never does, done because the caller asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .arch import DEFAULT_GPU, GPUS, ArchName, arch, gpu
from .binary import Binary
from .config import Config
from .constraints import require_legal, violations
from .database import Database
from .decision import Table, decide
from .device import Device
from .errors import AutogemmError, CompileError, IllegalConfig
from .kernel_store import FolderKernels, KernelKey, keep
from .manifest import Manifest
from .predict.closed_form import rank
from .problem import Problem
from .record import Row
from .space import load_space


@dataclass(frozen=True, kw_only=True)
class LoadedKernel:
    """A compiled kernel with where it came from; call it with torch tensors on a GPU of its arch.

    Attributes:
        problem: what it was asked for; the kernel itself takes any extents.
        config: its knobs, launch-time ones included.
        binary: cubin, manifest and register use.
        reason: why this Config: a row, or the model.
        row: the Row that chose it, None if none did.
    """

    problem: Problem
    config: Config
    binary: Binary
    reason: str
    row: Row | None

    @property
    def cubin(self) -> bytes:
        """Machine code of the arch."""
        return self.binary.cubin

    @property
    def manifest(self) -> Manifest:
        """How to launch it."""
        return self.binary.manifest

    @cached_property
    def cuda(self) -> str:
        """CUDA source, generated anew.

        Raises:
            MissingDependency: TVM is not installed.
            CompileError: the generator has changed since the kernel was compiled.
        """
        from .kernel.generate import generate

        source = generate(self.config, arch(self.manifest.arch).name, self.manifest.dtype)
        if source.manifest.generator != self.manifest.generator:
            raise CompileError(
                f"the kernel is of generator {self.manifest.generator[:12]}, this one is {source.manifest.generator[:12]}; "
                "load it anew"
            )
        return source.cuda

    def __call__(self, a: Any, b: Any, out: Any | None = None, *, sm_count: int | None = None) -> Any:
        """Return ``a . b^T`` on the current stream: a [M, K], b [N, K], out [M, N], in the kernel's dtype, on one GPU.

        Raises:
            InputError: tensors the kernel can't take.
            MissingDependency: no CUDA device or no cuda-bindings.
            LaunchError: the GPU is of another arch, or the driver refuses the kernel.
        """
        from .runtime.launcher import Kernel

        kernel = Kernel(self.binary, max(a.get_device(), 0))
        if out is None:
            out = a.new_empty((a.shape[0], b.shape[0]))
        return kernel(a, b, out, launch=self.config.launch, sm_count=sm_count)


def load(
    m: int, n: int, k: int, *, dtype: str = "float16", arch: str | None = None, config: Config | None = None,
    database: Database | None = None, device: Device | None = None,
) -> LoadedKernel:  # fmt: skip
    """Return the kernel for a shape: ``config``, or the database's choice, or the model's best. Compiles it if need be.

    The kernel is kept where dispatch finds it, so that loading every shape of a model ahead is how a machine without tuned
    kernels at hand gets ready.

    Args:
        arch: ``sm_90a`` or ``sm_100a``; by default that of ``device``, else of the GPU here, else sm_100a.
        device: GPU whose rows to consult; by default the one here, else the one that stands for ``arch``.

    Raises:
        InputError: a shape, type or arch that can't be.
        IllegalConfig: no kernel can take the shape, or not with ``config``.
        CompileError, MissingDependency: the kernel is not compiled yet, and can't be here.
    """
    problem = Problem(m=m, n=n, k=k, dtype=dtype)
    target = device if device is not None else _device(arch)
    assert target.arch is not None
    row = None
    if config is None:
        config, row, reason = _choose(problem, target.arch, target, database if database is not None else Database())
    else:
        reason = "given by the caller"
    require_legal(config, target.arch, problem)
    binary = _binary(config, target.arch, problem, row)
    return LoadedKernel(problem=problem, config=config, binary=binary, reason=reason, row=row)


def _device(arch_name: str | None) -> Device:
    if arch_name is None:
        import torch

        if torch.cuda.is_available():
            from .cuda_machine import CudaMachine

            here = CudaMachine().device(torch.cuda.current_device())
            if here.arch is not None:
                return here
    return Device.of_arch(arch_name or "sm_100a")


def _choose(problem: Problem, arch_name: ArchName, device: Device, database: Database) -> tuple[Config, Row | None, str]:
    decision = decide(problem, device, Table.of(database.rows()), unmeasured=True)
    if decision.row is not None:
        config = decision.config if decision.config is not None else decision.row.config
        if not violations(config, arch_name, problem):
            return config, decision.row, decision.reason
    candidates = load_space(arch_name).configs(problem.dtype)
    legal = [c for c in candidates if not violations(c, arch_name, problem)]
    if not legal:
        raise IllegalConfig(f"every config of the {arch_name} space", violations(candidates[0], arch_name, problem))
    config, prediction = rank(problem, legal, GPUS.get(device.gpu) or gpu(DEFAULT_GPU[arch_name]))[0]
    return config, None, f"no row; best of {len(legal)} configs by {prediction.model}, a prediction"


def _binary(config: Config, arch_name: ArchName, problem: Problem, row: Row | None) -> Binary:
    generator = row.provenance.generator if row is not None and row.measurement is not None else None
    key = KernelKey(
        arch=arch_name, dtype=problem.dtype, layout=problem.layout, epilogue=problem.epilogue, config=config.binary,
        generator=generator,
    )  # fmt: skip
    kept = FolderKernels().find(key).binary
    if kept is not None:
        return kept
    from .compile.compiler import compile_config

    binary = compile_config(config, arch_name, problem.dtype)
    keep(binary)
    return binary


def compile_rows(rows: Iterable[Row], *, workers: int | None = None) -> Iterator[tuple[Row, Binary | AutogemmError]]:
    """Compile the kernels of ``rows`` and keep them where dispatch finds them; yield each Row with its Binary, or why not.

    Rows whose measurement favours cuBLAS, or an algorithm of cuBLASLt, need none and are left out.

    Raises:
        MissingDependency: a kernel must be compiled, and TVM or the compiler is not installed.
    """
    from .compile.compiler import compile_many

    groups: dict[tuple[ArchName, str], list[Row]] = {}
    for row in rows:
        if row.choice == "autogemm":
            groups.setdefault((row.key.arch, row.key.dtype_a), []).append(row)
    for (arch_name, dtype), members in groups.items():
        waiting: dict[Config, list[Row]] = {}
        for row in members:
            waiting.setdefault(row.config.binary, []).append(row)
        for config, result in compile_many(list(waiting), arch_name, dtype, workers):
            if isinstance(result, Binary):
                keep(result)
            yield from ((row, result) for row in waiting[config])
