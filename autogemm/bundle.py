"""Bundles: tuned rows, their compiled kernels and the code that launches them, for hosts with torch and the CUDA driver only.

A bundle is a folder, or the same as one zip file:

``bundle.json``      schema, rows, and the SHA-256 of every other file and of itself.
``kernels/``         cubin and manifest of each kernel.
``python/autogemm``  the part of this package that dispatches; on a host without the package, put ``python`` on PYTHONPATH.

Everything is checked against its hash when a bundle is loaded, and a bundle of which anything was changed is refused.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from . import __version__
from .binary import Binary, write_whole
from .constraints import violations
from .database import Database
from .decision import Table
from .device import Device
from .errors import InputError, NothingFound
from .kernel_store import FolderKernels, KernelKey, MemoryKernels, choose
from .problem import Problem
from .record import Key, Row

if TYPE_CHECKING:
    from .dispatch import Dispatcher

SCHEMA: Final = 1
INDEX: Final = "bundle.json"

# Modules from which a program uses a bundle; what they import when imported goes with them.
_ENTRY_MODULES: Final = ("__init__", "bundle", "dispatch", "layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A loaded bundle.

    Attributes:
        sha256: of its index, which holds the hashes of everything else: the identity of the bundle.
        version: of the autogemm that made it.
    """

    rows: tuple[Row, ...]
    binaries: tuple[Binary, ...]
    sha256: str
    version: str

    def install(self, into: Dispatcher | None = None) -> None:
        """Make ``matmul`` (or ``into``) use these rows before those of the database, and these kernels before others."""
        from .dispatch import dispatcher

        (into if into is not None else dispatcher()).add(self.rows, self.binaries)


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleReport:
    """What ``make_bundle`` wrote.

    Attributes:
        path: folder or zip file.
        cublas: shapes whose row says that cuBLAS is faster; they carry no kernel.
        cublaslt: shapes whose row names an algorithm of cuBLASLt. They need no kernel; one that is compiled already and beats
            torch.matmul goes along for hosts with another version of the library.
        missing: shapes without a row; they run torch.matmul.
        bytes: size on disk.
    """

    path: Path
    rows: int
    kernels: int
    cublas: tuple[str, ...]
    cublaslt: tuple[str, ...]
    missing: tuple[str, ...]
    bytes: int
    sha256: str


def make_bundle(
    problems: Sequence[Problem] | None, *, device: Device, database: Database, out: Path, sm_count: int | None = None,
    compiling: bool = True, workers: int | None = None,
) -> BundleReport:  # fmt: skip
    """Write the rows of ``problems`` on ``device`` and their kernels to ``out``; a name that ends in ``.zip`` makes one file.

    Kernels come from where dispatch finds them; what is not there is compiled, if ``compiling``.

    Args:
        problems: shapes to serve; None for every row of the device.
        sm_count: SM budget of the rows; the whole GPU by default. With ``problems`` None, rows of every budget are taken.

    Raises:
        InputError: ``out`` exists, can't be written, or a kernel can't be had as it was measured.
        NothingFound: none of the problems has a row.
        CompileError, MissingDependency: a kernel must be compiled, and can't be.
    """
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise InputError(f"{out} exists already; name a new folder or file")
    rows, missing = _rows(problems, device, database, sm_count)
    if not rows:
        raise NothingFound(f"no row for {device.gpu} to bundle; tune first: autogemm tune --shape MxNxK")
    binaries = _kernels(rows, compiling, workers)
    files = {f"kernels/{b.name}{suffix}": content for b in binaries for suffix, content in _parts(b)}
    files |= loader_files()
    index = _index(rows, files)
    files[INDEX] = index
    try:
        (_write_zip if out.suffix == ".zip" else _write_folder)(out, files)
    except OSError as error:
        raise InputError(f"can't write {out}: {error.strerror or error}; name another place") from error
    return BundleReport(
        path=out, rows=len(rows), kernels=len(binaries), missing=tuple(missing),
        cublas=tuple(row.key.problem.shape for row in rows if row.choice == "cublas"),
        cublaslt=tuple(row.key.problem.shape for row in rows if row.choice == "cublaslt"),
        bytes=sum(map(len, files.values())), sha256=hashlib.sha256(index).hexdigest(),
    )  # fmt: skip


def load_bundle(path: Path | str, *, sha256: str | None = None, install: bool = True) -> Bundle:
    """Return the bundle at ``path`` after checking all of it, and make ``matmul`` use it.

    Args:
        sha256: identity that ``make_bundle`` reported; give it where the bundle's origin is not trusted, since hashes inside a
            bundle only tell damage and careless changes.
        install: False to only look at it.

    Raises:
        InputError: no bundle, of a newer schema, incomplete, or with anything changed since it was made.
    """
    files = _read_files(Path(path))
    index = files.pop(INDEX, None)
    if index is None:
        raise InputError(f"{path} is no bundle: it lacks {INDEX}")
    digest = hashlib.sha256(index).hexdigest()
    if sha256 is not None and digest != sha256.lower():
        raise InputError(f"bundle {path} has identity {digest[:12]}, expected {sha256[:12]}; fetch it again from its origin")
    document = _parse(index, path)
    _verify(document, files, path)
    rows = _rows_in(document, path)
    binaries = tuple(
        Binary.from_json(_json(files[name], path), files[str(PurePosixPath(name).with_suffix(".cubin"))], f"{path}: {name}")
        for name in sorted(files)
        if name.startswith("kernels/") and name.endswith(".json")
    )
    for row in rows:
        found = choose(kernel_key(row), binaries)
        if row.choice == "autogemm" and found.binary is None:
            raise InputError(f"bundle {path} is incomplete, the kernel of {row.key} is not in it: {found.reason}")
    bundle = Bundle(rows=rows, binaries=binaries, sha256=digest, version=str(document["autogemm"]))
    if install:
        bundle.install()
    return bundle


def kernel_key(row: Row) -> KernelKey:
    """Return which compiled kernel ``row`` needs: for a measured one, of the generator that was measured."""
    return KernelKey(
        arch=row.key.arch, dtype=row.key.dtype_a, layout=row.key.layout, epilogue=row.key.epilogue, config=row.config.binary,
        generator=row.provenance.generator if row.measurement is not None else None,
    )  # fmt: skip


def loader_files() -> dict[str, bytes]:
    """Return the source files that using a bundle needs, by their path in the bundle."""
    package = Path(__file__).resolve().parent
    found: dict[str, bytes] = {}
    waiting = list(_ENTRY_MODULES)
    while waiting:
        name = waiting.pop()
        path = package / f"{name.replace('.', '/')}.py"
        if not path.is_file():
            path = package / name.replace(".", "/") / "__init__.py"
        if not path.is_file():
            continue  # a name inside a module, not a module
        place = f"python/autogemm/{path.relative_to(package).as_posix()}"
        if place not in found:
            found[place] = path.read_bytes()
            waiting += _imported(found[place], path.relative_to(package).parent.parts)
            waiting += [
                ".".join(path.relative_to(package).parts[:depth]) for depth in range(1, len(path.relative_to(package).parts))
            ]
    return found


def _imported(source: bytes, parents: tuple[str, ...]) -> list[str]:
    """Return modules of the package that ``source`` imports at its top level, relative to the package."""
    names: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parents[: len(parents) - node.level + 1]
            stem = [*base, *([node.module] if node.module else [])]
            names += [".".join(stem)] if stem else []
            names += [".".join([*stem, alias.name]) for alias in node.names]
    return names


def _rows(
    problems: Sequence[Problem] | None, device: Device, database: Database, sm_count: int | None
) -> tuple[list[Row], list[str]]:
    table = Table.of(database.rows(device.gpu))
    if problems is None:
        return [row for row in table.rows if sm_count in (None, row.key.sm_count)], []
    assert device.arch is not None
    rows, missing = [], []
    for problem in dict.fromkeys(problems):
        key = Key.of(problem, arch=device.arch, gpu=device.gpu, sm_count=sm_count or device.sm_count)
        row = table.by_key.get(key)
        if row is None:
            missing.append(problem.shape)
        else:
            rows.append(row)
    return rows, missing


def _kernels(rows: Sequence[Row], compiling: bool, workers: int | None) -> list[Binary]:
    """Return the kernels that ``rows`` need, and those at hand that may take the place of an algorithm; each once, by name."""
    from .loading import compile_rows

    needed = {kernel_key(row): row for row in rows if row.choice == "autogemm"}
    spare = {kernel_key(row) for row in rows if row.choice == "cublaslt" and row.fallback == "autogemm"} - needed.keys()
    for key, row in needed.items():
        broken = violations(row.config, row.key.arch, row.key.problem)
        if broken:
            raise InputError(f"the row of {row.key} can't be bundled: {'; '.join(broken)}")
        assert key.config == row.config.binary
    store = FolderKernels()
    found = {key: store.find(key).binary for key in needed}
    lacking = [row for key, row in needed.items() if found[key] is None]
    if lacking and not compiling:
        raise InputError(f"{len(lacking)} kernels are not compiled, the first for {lacking[0].key}; let them be compiled")
    compiled = [result for _, result in compile_rows(lacking, workers=workers)] if lacking else []
    failures = [result for result in compiled if not isinstance(result, Binary)]
    if failures:
        raise failures[0]
    made = MemoryKernels([result for result in compiled if isinstance(result, Binary)])
    for key, row in needed.items():
        if found[key] is None:
            outcome = made.find(key)
            if outcome.binary is None:
                raise InputError(f"the kernel of {row.key} can't be had as it was measured: {outcome.reason}")
            found[key] = outcome.binary
    found |= {key: store.find(key).binary for key in spare}
    return sorted({b.name: b for b in found.values() if b is not None}.values(), key=lambda b: b.name)


def _parts(binary: Binary) -> Iterable[tuple[str, bytes]]:
    yield ".cubin", binary.cubin
    yield ".json", (json.dumps(binary.to_json(), indent=1, sort_keys=True) + "\n").encode()


def _index(rows: Sequence[Row], files: Mapping[str, bytes]) -> bytes:
    document = {
        "schema": SCHEMA, "autogemm": __version__, "rows": [row.to_json() for row in rows],
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())},
    }  # fmt: skip
    document["sha256"] = _self_hash(document)
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def _self_hash(document: Mapping[str, Any]) -> str:
    content = {name: value for name, value in document.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write_folder(out: Path, files: Mapping[str, bytes]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        for name, content in files.items():
            path = aside / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        aside.chmod(0o755)
        os.replace(aside, out)  # over an empty folder or nothing
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write_zip(out: Path, files: Mapping[str, bytes]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            # A fixed date, so that equal bundles are equal files.
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, data)
    write_whole(out, content.getvalue())


def _read_files(path: Path) -> dict[str, bytes]:
    try:
        if path.is_dir():
            found = {p.relative_to(path).as_posix(): p for p in sorted(path.rglob("*")) if p.is_file()}
            return {name: p.read_bytes() for name, p in found.items() if "__pycache__" not in PurePosixPath(name).parts}
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    except FileNotFoundError as error:
        raise InputError(f"no bundle at {path}") from error
    except (OSError, zipfile.BadZipFile, RuntimeError) as error:
        raise InputError(f"can't read bundle {path}: {error}") from error


def _parse(index: bytes, path: Path | str) -> dict[str, Any]:
    document = _json(index, path)
    if not isinstance(document, dict) or type(document.get("schema")) is not int or document["schema"] < 1:
        raise InputError(f"{path} is no bundle: {INDEX} has no schema number")
    if document["schema"] > SCHEMA:
        raise InputError(f"bundle {path} has schema {document['schema']}, newer than {SCHEMA}; upgrade autogemm")
    if set(document) != {"schema", "autogemm", "rows", "files", "sha256"} or document["sha256"] != _self_hash(document):
        raise InputError(f"bundle {path} was changed after it was made: {INDEX} does not match its own hash")
    if not isinstance(document["rows"], list) or not isinstance(document["files"], dict):
        raise InputError(f"bundle {path} is damaged: rows must be a list and files an object; make it anew")
    return document


def _rows_in(document: Mapping[str, Any], path: Path | str) -> tuple[Row, ...]:
    rows: dict[Key, Row] = {}
    for number, entry in enumerate(document["rows"]):
        try:
            row = Row.from_json(entry)
        except InputError as error:
            raise InputError(f"bundle {path}, row {number}: {error}") from error
        if row.key in rows:
            raise InputError(f"bundle {path} holds two rows for {row.key}; make it anew")
        rows[row.key] = row
    return tuple(rows.values())


def _json(content: bytes, path: Path | str) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise InputError(f"bundle {path} is damaged: {error}") from error


def _verify(document: Mapping[str, Any], files: Mapping[str, bytes], path: Path | str) -> None:
    expected = document["files"]
    for word, names in (("lacks", set(expected) - set(files)), ("holds an unlisted", set(files) - set(expected))):
        if names:
            raise InputError(f"bundle {path} {word} file {min(names)}; make it anew")
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != expected[name]:
            raise InputError(f"bundle {path}: {name} was changed after the bundle was made; make it anew")
