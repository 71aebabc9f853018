"""``autogemm compile``: one kernel to look at, or the whole search space of an arch for a GPU host without a compiler."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from ..arch import ArchName
from ..binary import Binary, write_whole
from ..config import Config
from ..constraints import require_legal, violations
from ..dtypes import dtype as lookup_dtype
from ..errors import IllegalConfig, InputError, NothingFound
from ..predict.closed_form import rank
from ..problem import Problem
from ..space import load_space
from . import live, options, render

if TYPE_CHECKING:
    from ..compile.compiler import Emission

_SUFFIX = {"cuda": "cu", "ptx": "ptx", "cubin": "cubin", "tir": "py"}


def compile_command(
    shape: options.OptionalShape = None,
    arch: options.ArchOption = None,
    dtype: options.DtypeOption = "float16",
    config: options.ConfigOption = None,
    config_id: options.IdOption = None,
    settings: options.SetOption = None,
    space: Annotated[
        str | None,
        typer.Option("--space", metavar="ARCH", help="Compile and check every config of this arch's space into --out."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder to write to; made if missing.")] = None,
    emit: Annotated[
        str | None,
        typer.Option("--emit", metavar="cuda|ptx|cubin|tir", help="Print this form of the kernel, or write it to --out."),
    ] = None,
    no_check: Annotated[bool, typer.Option("--no-check", help="With --space: leave out the check on the CPU.")] = False,
    workers: options.WorkersOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Compile kernels; needs no GPU and no CUDA toolkit.

    Without --space: the config that --config, --id and --set describe, or the model's best for --shape.
    """
    kind = lookup_dtype(dtype).name
    if space is not None:
        if out is None:
            raise InputError("--space needs --out DIR for the kernels")
        if any((shape, config, config_id, settings, emit, arch)):
            raise InputError(
                "--space compiles every config of an arch; leave out --shape, --config, --id, --set, --emit and --arch"
            )
        _compile_space(options.parse_arch(space), kind, _folder(out), not no_check, workers, as_json)
        return
    arch_name = options.parse_arch(arch or "sm_100a")
    if emit is not None and emit not in _SUFFIX:
        raise InputError(f"unknown form {emit!r}; --emit takes {', '.join(_SUFFIX)}")
    if emit == "cubin" and out is None:
        raise InputError("--emit cubin needs --out DIR: a cubin is not text")
    problem = None if shape is None else options.problems([shape], None, kind)[0]
    chosen = options.chosen_config(arch_name, config, config_id, settings)
    if chosen is None:
        chosen = _best(arch_name, problem)
    require_legal(chosen, arch_name, problem, dtype=kind)
    folder = None if out is None else _folder(out)
    if emit is not None:
        _emit(chosen, arch_name, kind, emit, folder, as_json)
    else:
        _compile_one(chosen, arch_name, kind, folder, as_json)


def _best(arch_name: ArchName, problem: Problem | None) -> Config:
    if problem is None:
        raise InputError("nothing to compile; give --config, --id, --set, --shape or --space")
    candidates = load_space(arch_name).configs(problem.dtype)
    legal = [c for c in candidates if not violations(c, arch_name, problem)]
    if not legal:
        raise IllegalConfig(f"every config of the {arch_name} space", violations(candidates[0], arch_name, problem))
    return rank(problem, legal, options.parse_gpu(arch_name))[0][0]


def _folder(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / ".probe", b"")
        (out / ".probe").unlink()
    except OSError as error:
        raise InputError(f"can't write to {out}: {error.strerror}; name another folder with --out") from error
    return out


def _emit(config: Config, arch_name: ArchName, dtype: str, form: str, folder: Path | None, as_json: bool) -> None:
    from ..compile.compiler import Emission, emit

    assert form in get_args(Emission)
    what: Emission = form  # type: ignore[assignment]
    content = emit(config, arch_name, dtype, what)
    document: dict[str, Any] = {"arch": arch_name, "dtype": dtype, "config_id": config.id, "emit": form}
    if folder is not None:
        path = folder / f"{arch_name}-{dtype}-{config.binary.id}.{_SUFFIX[form]}"
        write_whole(path, content if isinstance(content, bytes) else content.encode())
        document["file"] = str(path)
    elif isinstance(content, str):
        document["text"] = content
    if as_json:
        render.document(document)
    else:
        render.raw(document["text"] if folder is None else str(document["file"]))


def _compile_one(config: Config, arch_name: ArchName, dtype: str, folder: Path | None, as_json: bool) -> None:
    from ..compile.compiler import compile_config

    binary = compile_config(config, arch_name, dtype)
    path = None if folder is None else binary.write(folder)
    if as_json:
        render.document(
            {**_described(binary), "file": None if path is None else str(path), "manifest": binary.manifest.to_json()}
        )
    else:
        render.binary(binary, path)


def _described(binary: Binary) -> dict[str, Any]:
    return {
        "name": binary.name, "config_id": binary.config.id, "compiler": binary.compiler, "sha256": binary.sha256,
        "cubin_bytes": len(binary.cubin), **asdict(binary.usage),
    }  # fmt: skip


def _compile_space(arch_name: ArchName, dtype: str, folder: Path, check: bool, workers: int | None, as_json: bool) -> None:
    from ..search.portable import portable_binaries

    configs = load_space(arch_name).binaries(dtype)
    written: list[dict[str, Any]] = []
    rejected: list[dict[str, str]] = []
    with live.counter(f"{arch_name} {dtype}", len(configs)) as advance:
        for config, result in portable_binaries(configs, arch_name, dtype, check=check, workers=workers):
            if isinstance(result, Binary):
                path = result.write(folder)
                written.append({**_described(result), "file": str(path)})
            else:
                rejected.append({"config_id": config.id, "stage": result.stage, "reason": result.reason})
            advance(f"{len(written)} kernels, {len(rejected)} rejected")
    for entry in rejected:
        render.note(f"rejected {entry['config_id']}: {entry['reason']}")
    if as_json:
        render.document({"arch": arch_name, "dtype": dtype, "folder": str(folder), "kernels": written, "rejected": rejected})
    elif written:
        render.line(f"{len(written)} kernels for {arch_name} {dtype} in {folder}, {len(rejected)} rejected")
        render.note(f"on a GPU host: autogemm tune --candidates {folder} --shape MxNxK")
    if not written:
        raise NothingFound(f"no config of the {arch_name} space could be compiled")
