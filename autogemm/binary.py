"""Binary: a cubin, its manifest and what the compiler said of it; written to and read from a folder, no compiler needed."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from .config import Config
from .errors import InputError
from .manifest import Manifest

SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What the assembler reported.

    Attributes:
        registers: per thread at launch.
        spill_bytes: spill stores and loads, per thread.
        stack_bytes: stack frame per thread.
        smem_bytes: static shared memory per CTA (dynamic shared memory is the manifest's).
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Binary:
    """One compiled kernel.

    Attributes:
        compiler: name and version of what turned the CUDA source into the cubin.
        check: JSON of the CheckReport that cleared it, or None.
    """

    cubin: bytes
    manifest: Manifest
    usage: Usage
    compiler: str
    check: dict[str, Any] | None = None

    @property
    def sha256(self) -> str:
        """Content hash of cubin and manifest, in hex."""
        text = json.dumps(self.manifest.to_json(), sort_keys=True)
        return hashlib.sha256(self.cubin + b"\0" + text.encode()).hexdigest()

    @property
    def config(self) -> Config:
        """The Config it was generated from, launch-time knobs at their default."""
        return Config.from_knobs(self.manifest.knobs)

    @property
    def name(self) -> str:
        """File stem: arch, dtype, Config and the first digits of the hash."""
        return f"{self.manifest.arch}-{self.manifest.dtype}-{self.config.id}-{self.sha256[:12]}"

    def write(self, folder: Path) -> Path:
        """Write ``<name>.cubin`` and ``<name>.json`` and return the latter; each file appears whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{self.name}.cubin", self.cubin)
        path = folder / f"{self.name}.json"
        write_whole(path, (json.dumps(self.to_json(), indent=1, sort_keys=True) + "\n").encode())
        return path

    def to_json(self) -> dict[str, Any]:
        """Return all but the cubin, JSON-ready."""
        return {
            "schema": SCHEMA, "manifest": self.manifest.to_json(), "usage": asdict(self.usage), "compiler": self.compiler,
            "sha256": self.sha256, "check": self.check,
        }  # fmt: skip

    @classmethod
    def read(cls, path: Path) -> Binary:
        """Return the Binary whose JSON file is ``path``.

        Raises:
            InputError: unreadable, not a binary's JSON, of a newer schema, or not matching its hash.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            cubin = path.with_suffix(".cubin").read_bytes()
        except (OSError, ValueError) as error:
            raise InputError(f"can't read kernel {path}: {error}") from error
        return cls.from_json(document, cubin, str(path))

    @classmethod
    def from_json(cls, document: Any, cubin: bytes, where: str) -> Binary:
        """Return the Binary that ``document`` describes; ``where`` names it in errors.

        Raises:
            InputError: not a binary's JSON, of a newer schema, or not matching its hash.
        """
        if not isinstance(document, dict) or not isinstance(document.get("schema"), int):
            raise InputError(f"{where} does not describe a kernel")
        if document["schema"] > SCHEMA:
            raise InputError(f"{where} has schema {document['schema']}, newer than {SCHEMA}; upgrade autogemm")
        try:
            binary = cls(
                cubin=cubin, manifest=Manifest.from_json(document["manifest"]), usage=Usage(**document["usage"]),
                compiler=document["compiler"], check=document.get("check"),
            )  # fmt: skip
            expected = document["sha256"]
        except (KeyError, TypeError) as error:
            raise InputError(f"{where} does not describe a kernel: {error}") from error
        if binary.sha256 != expected:
            raise InputError(
                f"{where}: cubin or manifest was changed (hash {binary.sha256[:12]}, recorded {str(expected)[:12]})"
            )
        return binary


def read_folder(folder: Path) -> list[Binary]:
    """Return every Binary in ``folder``, by name.

    Raises:
        InputError: no such folder, no kernel in it, or one that can't be used.
    """
    found = [Binary.read(path) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    if not found:
        raise InputError(f"no compiled kernels in {folder}; make some with: autogemm compile --space ARCH --out {folder}")
    return found


def write_whole(path: Path, content: bytes) -> None:
    """Write a file aside and rename it, so that readers and crashes never see half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
