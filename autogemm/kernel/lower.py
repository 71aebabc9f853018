"""PrimFunc to CUDA text, with no GPU and no CUDA toolkit: TVM lowers, then the text is made to stand on its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import tvm

# Everything the kernels use of the headers that TVM includes. Those pull in libcu++ and cooperative groups: four fifths of the
# compile time and nine tenths of the cubin (2.5 s and 251 kB against 0.5 s and 28 kB with NVRTC 13.0).
_PRELUDE: Final = """\
#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };
typedef struct CUtensorMap_st CUtensorMap;
#define __asm__ asm
#define __volatile__ volatile
#else
#include <cstdint>
#include <cuda.h>
#endif
"""
# The same where the text needs more than that: NVRTC has no <cuda.h>, but only the tensor map's size matters to a kernel.
_TENSOR_MAP_ONLY: Final = """\
#ifdef __CUDACC_RTC__
struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };
typedef struct CUtensorMap_st CUtensorMap;
#endif
"""
_END_OF_INCLUDES: Final = "#include <cuda.h>\n#endif\n"
_THREAD_RANK: Final = """\
    namespace cg = cooperative_groups;
    return cg::this_thread_block().thread_rank();
"""
_FROM_HEADERS: Final = re.compile(r"\b(std|cuda|cooperative_groups|cg)::")

_PARAM_TYPES: Final = {"int": "int32", "uint": "uint32", "unsigned int": "uint32"}


def cuda_text(func: Any, arch_name: str) -> str:
    """Return the CUDA source of PrimFunc ``func`` for ``arch_name``, compilable by NVRTC and by nvcc."""
    target = tvm.target.Target({"kind": "cuda", "arch": arch_name})  # explicit, so that no device is looked for
    name = str(func.attrs["global_symbol"])
    with target, quick_tracing():
        executable = tvm.compile(tvm.IRModule({name: func}), target=target, tir_pipeline="tirx")
    return stand_alone(executable.mod.imports[0].inspect_source())


def stand_alone(cuda: str) -> str:
    """Return TVM's CUDA text with its includes replaced by the few declarations it uses.

    Text that turns out to use more of them keeps them all: slower to compile, never wrong.
    """
    _, found, body = cuda.partition(_END_OF_INCLUDES)
    body = body.replace(_THREAD_RANK, "    return threadIdx.x;  // blocks are one-dimensional\n")
    if not found or _FROM_HEADERS.search(body):
        return _TENSOR_MAP_ONLY + cuda
    return _PRELUDE + body


def kernel_params(cuda: str, entry: str) -> list[tuple[str, str]]:
    """Return (kind, name) of the parameters of kernel ``entry`` in CUDA text, in order.

    TVM decides the order: tensor maps, then the scalars that are used, each sorted by name. Kinds are ``tensor_map``,
    ``int32``, ``uint32`` and ``workspace`` (any pointer).

    Raises:
        ValueError: no such kernel, or a parameter of another type.
    """
    match = re.search(rf"__global__ void[^;{{]*?\b{re.escape(entry)}\(([^)]*)\)", cuda)
    if match is None:
        raise ValueError(f"the generated CUDA text has no kernel {entry}")
    params = []
    for declaration in filter(None, (part.strip() for part in match[1].split(","))):
        kind, name = declaration.rsplit(maxsplit=1)
        if "CUtensorMap" in kind:
            params.append(("tensor_map", name))
        elif "*" in declaration:
            params.append(("workspace", name.lstrip("*")))
        elif kind in _PARAM_TYPES:
            params.append((_PARAM_TYPES[kind], name))
        else:
            raise ValueError(f"kernel {entry} takes {declaration!r}, which no launcher can pass")
    return params


@contextmanager
def quick_tracing() -> Iterator[None]:
    """Halve the time TVM takes to trace a kernel: remember which module a file belongs to.

    The tracer asks ``inspect`` for the call stack at every macro, and ``inspect`` walks all loaded modules for each frame.
    Lowering traces too: the bodies of the tile primitives.
    """
    original = inspect.getmodule
    known: dict[str, Any] = {}

    def getmodule(object: Any, _filename: str | None = None) -> Any:
        if _filename is None or inspect.ismodule(object):
            return original(object, _filename)
        if _filename not in known:
            known[_filename] = original(object, _filename)
        return known[_filename]

    inspect.getmodule = getmodule
    try:
        yield
    finally:
        inspect.getmodule = original
