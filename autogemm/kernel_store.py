"""Finding the compiled kernel of a Config: folders of binaries and loaded bundles. Reads files; compiles nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .binary import Binary
from .config import Config
from .errors import InputError
from .settings import cache_folder, kernel_folders


def kept_folder() -> Path:
    """Return the folder of kernels that tuned rows need on this machine, where dispatch finds them without a compiler."""
    return cache_folder() / "binaries"


def keep(binary: Binary) -> Path:
    """Write ``binary`` to where dispatch finds it and return its file.

    Raises:
        InputError: the folder can't be written.
    """
    try:
        return binary.write(kept_folder())
    except OSError as error:
        raise InputError(f"can't write {kept_folder()}: {error}; set AUTOGEMM_CACHE to a folder you own") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelKey:
    """What identifies a compiled kernel.

    Attributes:
        config: launch-time knobs at their default.
        generator: content hash of the generator that the Row's measurement was made with; None accepts any.
    """

    arch: str
    dtype: str
    layout: str
    epilogue: str
    config: Config
    generator: str | None = None

    def accepts(self, binary: Binary) -> bool:
        """Return whether ``binary`` is the kernel meant, whatever its generator."""
        m = binary.manifest
        return (m.arch, m.dtype, m.layout, m.epilogue) == (self.arch, self.dtype, self.layout, self.epilogue) and (
            binary.config.binary == self.config.binary
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Outcome of a search for a kernel.

    Attributes:
        binary: the kernel, None if there is none that may be used.
        reason: why not; empty if found.
    """

    binary: Binary | None
    reason: str = ""


class KernelSource(Protocol):
    """Where kernels come from."""

    def find(self, key: KernelKey) -> Found:
        """Return the kernel of ``key``; never raises for one that is missing or damaged."""


def choose(key: KernelKey, candidates: Iterable[Binary]) -> Found:
    """Return the first of ``candidates``, by content hash, that is the kernel of ``key`` and of its generator."""
    same = sorted((b for b in candidates if key.accepts(b)), key=lambda b: b.sha256)
    for binary in same:
        if key.generator in (None, binary.manifest.generator):
            return Found(binary=binary)
    if not same:
        return Found(binary=None, reason=f"no compiled kernel for {key.config.binary.id} ({key.arch}, {key.dtype})")
    have = ", ".join(sorted({b.manifest.generator[:12] or "unknown" for b in same}))
    return Found(
        binary=None,
        reason=f"the row was measured with generator {str(key.generator)[:12]}, the compiled kernel is from {have}; "
        "run autogemm verify, or tune again",
    )


class MemoryKernels:
    """Kernels already in memory, such as those of a bundle."""

    def __init__(self, binaries: Iterable[Binary]) -> None:
        self.binaries = tuple(binaries)

    def find(self, key: KernelKey) -> Found:
        """Return the kernel of ``key``."""
        return choose(key, self.binaries)


class FolderKernels:
    """Kernels that Binary.write left in folders. Thread-safe; a folder is listed again at every search that misses."""

    def __init__(self, folders: Sequence[Path] | None = None) -> None:
        """Search ``folders``; by default those that AUTOGEMM_KERNELS names, then the one ``keep`` writes to."""
        self.folders = tuple(folders) if folders is not None else (*kernel_folders(), kept_folder())
        self._read: dict[Path, Binary] = {}
        self._lock = threading.Lock()

    def find(self, key: KernelKey) -> Found:
        """Return the kernel of ``key``. A file that is damaged is passed over; if nothing else is found, it is the reason."""
        stem = f"{key.arch}-{key.dtype}-{key.config.binary.id}-"
        candidates, damaged = [], []
        with self._lock:
            for folder in self.folders:
                for path in sorted(folder.glob(f"{stem}*.json")) if folder.is_dir() else ():
                    try:
                        if path not in self._read:
                            self._read[path] = Binary.read(path)
                        candidates.append(self._read[path])
                    except InputError as error:
                        damaged.append(str(error))
        found = choose(key, candidates)
        if found.binary is None and damaged:
            return Found(binary=None, reason=damaged[0])
        return found


class ChainedKernels:
    """Several sources; the first that has the kernel wins."""

    def __init__(self, sources: Sequence[KernelSource]) -> None:
        self.sources = tuple(sources)

    def find(self, key: KernelKey) -> Found:
        """Return the kernel of ``key``; if no source has it, the most telling reason."""
        reasons = []
        for source in self.sources:
            found = source.find(key)
            if found.binary is not None:
                return found
            reasons.append(found.reason)
        telling = [reason for reason in reasons if not reason.startswith("no compiled kernel")]
        return Found(binary=None, reason=(telling or reasons or ["no kernels at all"])[0])
