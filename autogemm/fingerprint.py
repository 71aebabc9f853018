"""Content hashes of source files: names of a version of some part of the package, by which what it made is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def fingerprint(files: Iterable[Path]) -> str:
    """Return 16 hex digits that change with the name or the content of any of ``files``, and with their order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
