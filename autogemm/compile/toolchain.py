"""The CUDA compiler: NVRTC from the PyPI wheels, or the nvcc that ``AUTOGEMM_NVCC`` names. Neither needs a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from ..arch import ArchName
from ..binary import Usage
from ..errors import CompileError, InputError, MissingDependency
from ..settings import nvcc_path

Form = Literal["cubin", "ptx"]

_INSTALL: Final = "install autogemm[tune]"
_LOG_LINES: Final = 8  # of a compiler log that go into an error


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolchain:
    """One compiler and the options it is given.

    Attributes:
        compiler: name and version (``nvrtc 13.0.88``).
        flags: every option that can change the code, as cache keys need them.
        nvcc: the executable, or None for NVRTC.
    """

    compiler: str
    flags: tuple[str, ...]
    nvcc: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """What a compiler made of one source: ``code`` (an ELF image, or PTX text) and its ``log``."""

    code: bytes
    log: str


def toolchain() -> Toolchain:
    """Return the compiler to use.

    Raises:
        MissingDependency: NVRTC's wheels are not installed.
        InputError: ``AUTOGEMM_NVCC`` names something that is no nvcc.
    """
    nvcc = nvcc_path()
    if nvcc is None:
        return Toolchain(compiler=f"nvrtc {_nvrtc_version()}", flags=("-std=c++17", "-default-device", "--ptxas-options=-v"))
    return Toolchain(compiler=f"nvcc {_nvcc_version(nvcc)}", flags=("-std=c++17", "-O3", "-Xptxas=-v"), nvcc=nvcc)


def compile_cuda(cuda: str, arch_name: ArchName, form: Form = "cubin", *, tools: Toolchain | None = None) -> Code:
    """Return ``cuda`` compiled for ``arch_name``.

    Raises:
        CompileError: the compiler refused it; the message holds the first lines of its log.
        MissingDependency: the compiler is not installed.
    """
    tools = tools if tools is not None else toolchain()
    return _with_nvrtc(cuda, arch_name, form, tools) if tools.nvcc is None else _with_nvcc(cuda, arch_name, form, tools)


def usage(log: str) -> Usage:
    """Return what ptxas reported (``--ptxas-options=-v``) for the one kernel in ``log``.

    Raises:
        CompileError: no such report, so that spills would go unnoticed.
    """
    registers = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if registers is None or frame is None:
        raise CompileError(f"the assembler reported no register use: {_first_lines(log)}")
    smem = re.search(r"(\d+) bytes smem", log)
    return Usage(
        registers=int(registers[1]), spill_bytes=int(frame[2]) + int(frame[3]), stack_bytes=int(frame[1]),
        smem_bytes=int(smem[1]) if smem else 0,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _nvrtc_version() -> str:
    try:
        metadata.version("cuda-bindings")
        return metadata.version("nvidia-cuda-nvrtc")
    except metadata.PackageNotFoundError as error:
        raise MissingDependency(f"compiling needs NVRTC ({error.name} is not installed); {_INSTALL}") from error


@lru_cache(maxsize=4)
def _nvcc_version(nvcc: Path) -> str:
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"AUTOGEMM_NVCC={nvcc} can't be run: {error}") from error
    version = re.search(r"release [\d.]+, V([\d.]+)", text)
    if version is None:
        raise InputError(f"AUTOGEMM_NVCC={nvcc} is no nvcc: it reports {_first_lines(text)!r}")
    return version[1]


@lru_cache(maxsize=1)
def _include_options() -> tuple[bytes, ...]:
    spec = find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        include = Path(root) / "cu13" / "include"
        if (include / "cuda_fp16.h").is_file() and (include / "cccl").is_dir():
            return (f"-I{include}".encode(), f"-I{include / 'cccl'}".encode())
    raise MissingDependency(f"compiling needs the CUDA 13 headers (nvidia-cuda-runtime, nvidia-cuda-cccl); {_INSTALL}")


def _with_nvrtc(cuda: str, arch_name: ArchName, form: Form, tools: Toolchain) -> Code:
    from cuda.bindings import nvrtc

    # compute_* stops at PTX; sm_* goes on to machine code.
    arch_option = arch_name if form == "cubin" else arch_name.replace("sm_", "compute_")
    options = [f"--gpu-architecture={arch_option}".encode(), *(flag.encode() for flag in tools.flags), *_include_options()]
    try:
        program = _checked(nvrtc.nvrtcCreateProgram(cuda.encode(), b"kernel.cu", 0, [], []))
    except RuntimeError as error:  # the wheel is there, its shared library can't be loaded
        raise MissingDependency(f"NVRTC can't be loaded: {error}; re{_INSTALL}") from error
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{tools.compiler} refused the kernel ({status.name}): {_first_lines(log)}")
        if form == "ptx":
            return Code(code=_read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0"), log=log)
        return Code(code=_read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log=log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(size_of: Any, read_into: Any, program: Any) -> bytes:
    content = bytes(_checked(size_of(program)))
    _checked(read_into(program, content))  # fills the buffer in place
    return content


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status.value != 0:
        raise CompileError(f"NVRTC failed: {status.name}")
    return values[0] if values else None


def _with_nvcc(cuda: str, arch_name: ArchName, form: Form, tools: Toolchain) -> Code:
    number = arch_name.removeprefix("sm_")
    target = f"arch=compute_{number},code={arch_name if form == 'cubin' else f'compute_{number}'}"
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "kernel.cu", Path(folder) / f"kernel.{form}"
        source.write_text(cuda, encoding="utf-8")
        command = [str(tools.nvcc), f"-{form}", f"-gencode={target}", *tools.flags, "-o", str(out), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        log = done.stdout + done.stderr
        if done.returncode:
            raise CompileError(f"{tools.compiler} refused the kernel: {_first_lines(log)}")
        return Code(code=out.read_bytes(), log=log)


def _first_lines(log: str) -> str:
    return " | ".join([line.strip() for line in log.splitlines() if line.strip()][:_LOG_LINES]) or "(no log)"
