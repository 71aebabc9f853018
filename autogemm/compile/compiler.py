"""Config to Binary: from the cache, or generated, compiled, judged and kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, Literal

from ..arch import ArchName
from ..binary import Binary
from ..config import Config
from ..constraints import require_legal
from ..dtypes import dtype as lookup_dtype
from ..errors import CompileError
from ..kernel.generate import generate, tir_text
from . import cache
from .cache import Compiled
from .pool import shared_pool
from .toolchain import Toolchain, compile_cuda, toolchain, usage

Emission = Literal["cuda", "ptx", "cubin", "tir"]
EMISSIONS: Final[tuple[Emission, ...]] = ("cuda", "ptx", "cubin", "tir")

# ptxas advisories C7504 to C7519: it waits after every wgmma because it can't keep the accumulators apart.
_SERIALIZED: Final = re.compile(r"\(C75\d\d\)[^\n]*")

_LOST: Final = "the kernel cache lost a kernel just compiled, or the generator's files changed meanwhile; try again"


def cached_binary(config: Config, arch_name: ArchName, dtype: str = "float16") -> Binary | None:
    """Return the Binary of ``config`` if it was compiled before, else None; imports no TVM and compiles nothing.

    Raises:
        CompileError: it was compiled before, and refused.
        MissingDependency: the compiler is not installed, so that its version is unknown.
    """
    found = cache.find(cache.request_key(config, arch_name, lookup_dtype(dtype).name, toolchain()))
    return None if found is None else found[1].binary(found[0])


def compile_config(config: Config, arch_name: ArchName, dtype: str = "float16") -> Binary:
    """Return the Binary of ``config`` for ``arch_name``, compiled in this process unless the cache has it.

    Raises:
        IllegalConfig: ``config`` breaks a rule of the arch.
        CompileError: the compiler refused it, or it spills registers.
        MissingDependency: TVM or the compiler is not installed.
        InputError: the cache folder can't be written.
    """
    dtype = lookup_dtype(dtype).name
    require_legal(config, arch_name, dtype=dtype)
    tools = toolchain()
    request = cache.request_key(config, arch_name, dtype, tools)
    found = cache.find(request)
    if found is not None:
        return found[1].binary(found[0])
    source = generate(config, arch_name, dtype)
    key = cache.code_key(source.cuda, arch_name, tools)
    compiled = cache.find_code(key)
    if compiled is None:
        compiled = compile_source(source.cuda, arch_name, tools)
        cache.keep_code(key, compiled)
    cache.keep(request, source.manifest, key)
    return compiled.binary(source.manifest)


def compile_many(
    configs: Iterable[Config], arch_name: ArchName, dtype: str = "float16", workers: int | None = None
) -> Iterator[tuple[Config, Binary | CompileError]]:
    """Yield every Config with its Binary, or with why it has none, as they get ready: cached ones first.

    Configs that share a Binary (they differ in launch-time knobs) are compiled once. Worker processes compile, one per core
    unless ``workers`` says otherwise; they stay alive for later calls.

    Raises:
        IllegalConfig: a Config breaks a rule of the arch; raised before anything is compiled.
        MissingDependency: TVM or the compiler is not installed.
    """
    dtype = lookup_dtype(dtype).name
    waiting: dict[Config, list[Config]] = {}
    for config in configs:
        require_legal(config, arch_name, dtype=dtype)
        waiting.setdefault(config.binary, []).append(config)
    return _compile_many(waiting, arch_name, dtype, workers)


def _compile_many(
    waiting: dict[Config, list[Config]], arch_name: ArchName, dtype: str, workers: int | None
) -> Iterator[tuple[Config, Binary | CompileError]]:
    missing = []
    for binary_config, sharing in waiting.items():
        try:
            found = cached_binary(binary_config, arch_name, dtype)
        except CompileError as refusal:
            yield from ((config, refusal) for config in sharing)
            continue
        if found is None:
            missing.append(binary_config)
        else:
            yield from ((config, found) for config in sharing)
    for binary_config, outcome in shared_pool(workers).compile(missing, arch_name, dtype) if missing else ():
        result: Binary | CompileError
        if isinstance(outcome, CompileError):
            result = outcome
        else:
            kept = cached_binary(binary_config, arch_name, dtype)
            result = kept if kept is not None else CompileError(_LOST)
        yield from ((config, result) for config in waiting[binary_config])


def compile_source(cuda: str, arch_name: ArchName, tools: Toolchain) -> Compiled:
    """Return what becomes of CUDA text: refused if it doesn't compile, spills registers or has its wgmmas serialized."""
    try:
        code = compile_cuda(cuda, arch_name, tools=tools)
        used = usage(code.log)
    except CompileError as error:
        return Compiled(cubin=b"", usage=None, compiler=tools.compiler, refusal=str(error))
    refusal = None
    serialized = _SERIALIZED.search(code.log)
    if used.spill_bytes:
        refusal = (
            f"spills {used.spill_bytes} bytes of registers per thread ({used.registers} registers); use a smaller tile or EPI_N"
        )
    elif serialized:
        refusal = f"the assembler serializes its MMAs: {serialized[0].strip()}"
    return Compiled(cubin=code.code, usage=used, compiler=tools.compiler, refusal=refusal)


def emit(config: Config, arch_name: ArchName, dtype: str = "float16", what: Emission = "cuda") -> str | bytes:
    """Return one form of a kernel: CUDA text, PTX text, the cubin's bytes, or the traced TIR as text.

    Raises:
        IllegalConfig, CompileError, MissingDependency: as ``compile_config``.
    """
    if what == "tir":
        return tir_text(config, arch_name, dtype)
    if what == "cubin":
        return compile_config(config, arch_name, dtype).cubin
    cuda = generate(config, arch_name, dtype).cuda
    return cuda if what == "cuda" else compile_cuda(cuda, arch_name, "ptx").code.decode()
