"""Search spaces: YAML files of values per arch, expanded to legal Configs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .arch import ArchName, arch
from .config import KNOBS, Config, knob
from .constraints import violations
from .errors import InputError
from .resources import smem_bytes
from .settings import data_folder

# A PIPE_DEPTH entry that stands for the deepest ring that fits in shared memory.
DEEPEST = "max"


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """The candidate Configs of one arch, before a problem is known.

    Attributes:
        blocks: product blocks: knob name to values.
        source: file the values came from.
    """

    arch_name: ArchName
    blocks: tuple[Mapping[str, tuple[Any, ...]], ...]
    source: str

    def configs(self, dtype: str = "float16") -> list[Config]:
        """Return the legal Configs in a fixed order, without duplicates."""
        found: dict[str, Config] = {}
        for block in self.blocks:
            for values in itertools.product(*block.values()):
                config = _resolve(dict(zip(block, values, strict=True)), self.arch_name, dtype)
                if config is not None and not violations(config, self.arch_name, dtype=dtype):
                    found.setdefault(config.id, config)
        return list(found.values())

    def binaries(self, dtype: str = "float16") -> list[Config]:
        """Return one Config per Binary: those of ``configs`` with launch-time knobs at their default."""
        return list({c.binary.id: c.binary for c in self.configs(dtype)}.values())


def _resolve(values: dict[str, Any], arch_name: ArchName, dtype: str) -> Config | None:
    if values.get("PIPE_DEPTH") != DEEPEST:
        return Config.from_knobs(values)
    shallow = Config.from_knobs({**values, "PIPE_DEPTH": 1})
    one = smem_bytes(shallow, arch_name, dtype)
    stage = smem_bytes(shallow.with_knob("PIPE_DEPTH", 2), arch_name, dtype) - one
    depth = (arch(arch_name).smem_bytes - one) // stage + 1
    return shallow.with_knob("PIPE_DEPTH", depth) if depth >= 2 else None


def load_space(arch_name: ArchName, path: Path | None = None) -> Space:
    """Return the search space of ``arch_name`` from ``path``, or the one that ships.

    Raises:
        InputError: unreadable file, unknown knob, or something other than lists of values.
    """
    file = path if path is not None else data_folder("search_spaces") / f"{arch(arch_name).name}.yaml"
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"can't read search space {file}: {' '.join(str(error).split())}") from error
    blocks = document.get("blocks") if isinstance(document, dict) else None
    if not isinstance(blocks, list) or not blocks or not all(isinstance(b, dict) and b for b in blocks):
        raise InputError(f"search space {file} needs a list 'blocks' of knob: [values] maps")
    parsed = []
    for block in blocks:
        for name, values in block.items():
            if knob(str(name)) and (not isinstance(values, list) or not values):
                raise InputError(f"search space {file}: {name} needs a list of values, got {values!r}")
        missing = [k.name for k in KNOBS.values() if k.default is None and k.name not in block]
        if missing:
            raise InputError(f"search space {file}: a block lacks {', '.join(missing)}")
        parsed.append({str(name): tuple(values) for name, values in block.items()})
    space = Space(arch_name=arch_name, blocks=tuple(parsed), source=str(file))
    if not space.configs():
        raise InputError(f"search space {file} holds no legal config for {arch_name}")
    return space
