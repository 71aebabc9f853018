"""Compiled kernels on disk, so that no kernel is ever compiled twice and a hit needs neither TVM nor a compiler.

Two levels under ``settings.cache_folder()/kernels``:

``index``    what was asked (generator, TVM, arch, dtype, Config, compiler, flags) -> manifest, and which code belongs to it.
``code``     what was compiled (CUDA text, flags, compiler, arch) -> cubin and register use, or why it was refused. A change of
             the generator that leaves a kernel's text as it was costs no compilation.

Files are written aside and renamed. One that can't be read, or that fails its hash, counts as missing and is written anew.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from ..arch import ArchName
from ..binary import Binary, Usage, write_whole
from ..config import Config
from ..errors import CompileError, InputError
from ..kernel.generate import generator_hash
from ..manifest import Manifest
from ..settings import cache_folder
from .toolchain import Toolchain

SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What became of one CUDA text: a cubin with its register use, or the reason for which it was refused.

    Attributes:
        refusal: why there is nothing to launch, or None.
    """

    cubin: bytes
    usage: Usage | None
    compiler: str
    refusal: str | None = None

    def binary(self, manifest: Manifest) -> Binary:
        """Return the Binary of this code and ``manifest``.

        Raises:
            CompileError: it was refused.
        """
        if self.refusal is not None or self.usage is None:
            raise CompileError(self.refusal or "no code")
        return Binary(cubin=self.cubin, manifest=manifest, usage=self.usage, compiler=self.compiler)


def request_key(config: Config, arch_name: ArchName, dtype: str, tools: Toolchain) -> str:
    """Return the key of what ``compile_config`` is asked for; equal for Configs that differ in launch-time knobs only."""
    try:
        tvm_version = metadata.version("apache-tvm")
    except metadata.PackageNotFoundError:
        tvm_version = "none"
    return _key(
        "request", generator=generator_hash(), tvm=tvm_version, arch=arch_name, dtype=dtype, knobs=config.binary.to_knobs(),
        compiler=tools.compiler, flags=tools.flags,
    )  # fmt: skip


def code_key(cuda: str, arch_name: ArchName, tools: Toolchain) -> str:
    """Return the key of what the compiler is given."""
    return _key("code", cuda=cuda, arch=arch_name, compiler=tools.compiler, flags=tools.flags)


def find(request: str) -> tuple[Manifest, Compiled] | None:
    """Return what an earlier request of the same key led to, or None."""
    document = _load("index", request)
    if document is None:
        return None
    compiled = find_code(str(document.get("code")))
    try:
        return None if compiled is None else (Manifest.from_json(document["manifest"]), compiled)
    except (InputError, KeyError):
        return None


def find_code(key: str) -> Compiled | None:
    """Return what an earlier compilation of the same key led to, or None."""
    document = _load("code", key)
    if document is None:
        return None
    try:
        usage = document["usage"]
        return Compiled(
            cubin=base64.b64decode(document["cubin"], validate=True), usage=None if usage is None else Usage(**usage),
            compiler=str(document["compiler"]), refusal=document["refusal"],
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None


def keep(request: str, manifest: Manifest, key: str) -> None:
    """Record that ``request`` leads to ``manifest`` and the code of ``key``."""
    _store("index", request, {"code": key, "manifest": manifest.to_json()})


def keep_code(key: str, compiled: Compiled) -> None:
    """Record what the compilation of ``key`` led to."""
    usage = None if compiled.usage is None else asdict(compiled.usage)
    cubin = base64.b64encode(compiled.cubin).decode()
    _store("code", key, {"cubin": cubin, "usage": usage, "compiler": compiled.compiler, "refusal": compiled.refusal})


def _key(kind: str, **parts: Any) -> str:
    text = json.dumps({"schema": SCHEMA, "kind": kind, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _path(level: str, key: str) -> Path:
    return cache_folder() / "kernels" / level / key[:2] / f"{key}.json"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _load(level: str, key: str) -> dict[str, Any] | None:
    try:
        document = json.loads(_path(level, key).read_bytes())
    except (OSError, ValueError):
        return None
    content = document.get("content") if isinstance(document, dict) else None
    if not isinstance(content, dict) or document.get("key") != key or document.get("sha256") != _digest(content):
        return None
    return content


def _store(level: str, key: str, content: dict[str, Any]) -> None:
    path = _path(level, key)
    document = {"key": key, "sha256": _digest(content), "content": content}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(document).encode())
    except OSError as error:
        raise InputError(
            f"can't write the kernel cache {path.parent}: {error}; set AUTOGEMM_CACHE to a folder you own"
        ) from error
