"""Mutants: copies of a kernel's source file with a few lines changed, imported beside the original."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import autogemm.kernel

_NUMBER = itertools.count()


def mutant(file: str | Path, changes: Sequence[tuple[str, str]], folder: Path) -> ModuleType:
    """Return the module of ``file`` (a name under autogemm/kernel, or a path) with every (old, new) text replaced.

    The tracer reads a kernel's source from disk, so the mutant is a file of its own in ``folder``. Relative imports work as in
    the original: the mutant is a module of autogemm.kernel.

    Raises:
        AssertionError: an ``old`` text does not occur exactly once, so that no mutation silently tests the original.
    """
    path = Path(file)
    if not path.is_absolute():
        path = Path(autogemm.kernel.__file__).parent / file
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {path.name}"
        text = text.replace(old, new)
    name = f"mutant_{next(_NUMBER)}_{path.stem}"
    copy = folder / f"{name}.py"
    copy.write_text(text, encoding="utf-8")
    full = f"autogemm.kernel.{name}"
    spec = importlib.util.spec_from_file_location(full, copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module
