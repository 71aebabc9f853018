"""Config to kernel: the traced PrimFunc, its CUDA text and the Manifest that says how to launch it.

``generator_hash`` needs no TVM, so that a cached Binary is found without importing it; everything else does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ..arch import ArchName, arch
from ..config import Config
from ..constraints import require_legal
from ..dtypes import dtype as lookup_dtype
from ..errors import MissingDependency
from ..manifest import Manifest, Param, Scalar, TensorMap
from ..problem import Epilogue, Layout
from ..resources import geometry, smem_bytes, threads

PRIM_FUNC_NAME: Final = "gemm"
ENTRY: Final = f"{PRIM_FUNC_NAME}_kernel"  # TVM names a PrimFunc's device kernel so
LAYOUT: Final[Layout] = "NT"
EPILOGUE: Final[Epilogue] = "none"
# A kernel with this instruction waits for the work before it on the stream, so it may be launched while that still runs.
_WAITS: Final = "griddepcontrol.wait"

_PACKAGE: Final = Path(__file__).resolve().parent
# What a kernel and its manifest are made of, besides this folder.
_ALSO_HASHED: Final = ("resources.py", "manifest.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSource:
    """A generated kernel before compilation.

    Attributes:
        config: its knobs, launch-time ones at their default.
        cuda: CUDA text of the kernel ``manifest.entry``.
    """

    arch: ArchName
    dtype: str
    layout: Layout
    epilogue: Epilogue
    config: Config
    cuda: str
    manifest: Manifest


@lru_cache(maxsize=1)
def generator_hash() -> str:
    """Return the content hash of the generator's source files: 16 hex digits that name a generation of kernels."""
    digest = hashlib.sha256()
    files = sorted(_PACKAGE.glob("*.py")) + [_PACKAGE.parent / name for name in _ALSO_HASHED]
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def prim_func(config: Config, arch_name: ArchName, dtype: str = "float16") -> Any:
    """Return the traced PrimFunc of ``config``: ``gemm(a [M,K], b [N,K], d [M,N], scalars...)``, M, N and K at run time.

    The scalars are a subset of ``generate(...).manifest.scalars``. Launch-time knobs don't matter.

    Raises:
        IllegalConfig: ``config`` breaks a rule of the arch.
        MissingDependency: TVM is not installed.
    """
    dtype = lookup_dtype(dtype).name
    require_legal(config, arch_name, dtype=dtype)
    body = _body(arch_name)
    from .lower import quick_tracing

    with quick_tracing():
        return body.build(config.binary, dtype)


def barrier_names(config: Config, arch_name: ArchName) -> tuple[str, ...]:
    """Return the names of the kernel's mbarrier arrays in allocation order (the IR doesn't keep them)."""
    names: tuple[str, ...] = _body(arch_name).barrier_names(config)
    return names


def manifest_parts(
    config: Config, arch_name: ArchName, dtype: str = "float16"
) -> tuple[tuple[Scalar, ...], tuple[TensorMap, ...], str, str]:
    """Return (scalars in order of evaluation, tensor maps, grid, workspace bytes) of the kernel's Manifest, untraced."""
    parts: tuple[tuple[Scalar, ...], tuple[TensorMap, ...], str, str]
    parts = _body(arch_name).manifest_parts(config.binary, lookup_dtype(dtype).name)
    return parts


def generate(config: Config, arch_name: ArchName, dtype: str = "float16") -> KernelSource:
    """Return CUDA text and Manifest of ``config``; needs no GPU and no CUDA toolkit.

    Raises:
        IllegalConfig: ``config`` breaks a rule of the arch.
        MissingDependency: TVM is not installed.
    """
    dtype = lookup_dtype(dtype).name
    config = config.binary
    func = prim_func(config, arch_name, dtype)
    from .lower import cuda_text

    cuda = cuda_text(func, arch_name)
    return KernelSource(
        arch=arch_name, dtype=dtype, layout=LAYOUT, epilogue=EPILOGUE, config=config, cuda=cuda,
        manifest=_manifest(config, arch_name, dtype, cuda),
    )  # fmt: skip


def tir_text(config: Config, arch_name: ArchName, dtype: str = "float16") -> str:
    """Return the traced PrimFunc as TVMScript text, for people.

    Raises:
        IllegalConfig: ``config`` breaks a rule of the arch.
        MissingDependency: TVM is not installed.
    """
    return str(prim_func(config, arch_name, dtype).script())


def _body(arch_name: ArchName) -> ModuleType:
    name = arch(arch_name).name
    try:
        import tvm  # noqa: F401
    except ImportError as error:
        raise MissingDependency(f"generating kernels needs TVM ({error}); install autogemm[tune]") from error
    if name == "sm_90a":
        from . import sm90

        return sm90
    from . import sm100

    return sm100


def _manifest(config: Config, arch_name: ArchName, dtype: str, cuda: str) -> Manifest:
    from .lower import kernel_params

    scalars, tensor_maps, grid, workspace_bytes = manifest_parts(config, arch_name, dtype)
    params = kernel_params(cuda, ENTRY)
    known = {m.name for m in tensor_maps} | {s.name for s in scalars}
    unknown = [name for kind, name in params if kind != "workspace" and name not in known]
    if unknown:
        raise ValueError(f"the kernel takes {', '.join(unknown)}, which manifest_parts of {arch_name} does not define")
    return Manifest(
        entry=ENTRY, arch=arch_name, dtype=dtype, layout=LAYOUT, epilogue=EPILOGUE, knobs=config.to_knobs(),
        block_threads=threads(config), cluster_ctas=geometry(config, arch_name).cluster_ctas,
        smem_bytes=smem_bytes(config, arch_name, dtype), grid=grid,
        scalars=scalars, tensor_maps=tensor_maps,
        params=tuple(Param(kind=kind, name=name) for kind, name in params),  # type: ignore[arg-type]
        workspace_bytes=workspace_bytes, programmatic=_WAITS in cuda, generator=generator_hash(),
    )  # fmt: skip
