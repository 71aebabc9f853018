"""Config: the knobs of one generated kernel, and nothing that can be derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple

from .arch import ArchName, arch
from .errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """One knob as users meet it.

    Attributes:
        name: spelling in YAML, JSON and on the command line; the Config field is its lower-case form.
        default: value where a Config leaves it out; None if it must be given.
        archs: archs on which values other than the default mean anything.
        at_launch: the least value from which on the knob is a kernel argument, so that one Binary serves all of those; None if
            every value needs a Binary of its own.
        help: one line for people.
    """

    name: str
    default: int | bool | None
    archs: tuple[ArchName, ...]
    at_launch: int | None = None
    help: str

    @property
    def field(self) -> str:
        """Name of the Config field."""
        return self.name.lower()


_BOTH: Final[tuple[ArchName, ...]] = ("sm_90a", "sm_100a")

KNOBS: Final[dict[str, Knob]] = {
    k.name: k
    for k in (
        Knob(name="BLK_M", default=None, archs=_BOTH,
             help="tile rows of A: per CTA on sm_90a, per consumer and CTA on sm_100a"),
        Knob(name="BLK_N", default=None, archs=_BOTH, help="tile rows of B: per CTA"),
        Knob(name="BLK_K", default=64, archs=_BOTH, help="tile depth along K of one pipeline stage"),
        Knob(name="PIPE_DEPTH", default=None, archs=_BOTH, help="stages of the A/B shared-memory ring"),
        Knob(name="CTA_GROUP", default=1, archs=_BOTH,
             help="CTAs that share operands: a tcgen05 pair on sm_100a, a TMA-multicast cluster along M on sm_90a"),
        Knob(name="NUM_CONSUMER", default=1, archs=_BOTH,
             help="MMA warps with a writeback warpgroup each (sm_100a) or consumer warpgroups (sm_90a)"),
        Knob(name="EPI_N", default=None, archs=_BOTH, help="columns per epilogue store step"),
        Knob(name="l2_group_size", default=8, archs=_BOTH, at_launch=1, help="tile rows per raster group"),
        Knob(name="TMEM_BUFFERS", default=1, archs=("sm_100a",),
             help="accumulator buffers in TMEM per consumer; 2 overlaps the epilogue with the next tile"),
        Knob(name="PINGPONG", default=False, archs=("sm_90a",),
             help="the two consumer warpgroups take alternate tiles instead of halves of one tile"),
        Knob(name="SPLIT_K", default=1, archs=("sm_90a",), at_launch=2,
             help="slices of K, spread over CTAs, whose partial sums are added in fixed order"),
        Knob(name="SWAP_AB", default=False, archs=("sm_90a",),
             help="compute D^T = B . A^T, so that a small M lies on the MMA's N side; BLK_M then tiles N and BLK_N tiles M"),
    )
}  # fmt: skip


class LaunchKnobs(NamedTuple):
    """The knobs that are kernel arguments (see Knob.at_launch), as launchers take them."""

    l2_group_size: int = 8
    split_k: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """One point of the search space; KNOBS says what each field means."""

    blk_m: int
    blk_n: int
    blk_k: int = 64
    pipe_depth: int
    cta_group: int = 1
    num_consumer: int = 1
    epi_n: int
    l2_group_size: int = 8
    tmem_buffers: int = 1
    pingpong: bool = False
    split_k: int = 1
    swap_ab: bool = False

    @property
    def id(self) -> str:
        """Stable, readable identity; knobs at their default that came later than the seed's are left out."""
        text = (
            f"{self.blk_m}x{self.blk_n}x{self.blk_k}_d{self.pipe_depth}_g{self.cta_group}_c{self.num_consumer}"
            f"_e{self.epi_n}_l{self.l2_group_size}"
        )
        for name in ("TMEM_BUFFERS", "PINGPONG", "SPLIT_K", "SWAP_AB"):
            value = getattr(self, name.lower())
            if value != KNOBS[name].default:
                text += {"TMEM_BUFFERS": "_t", "PINGPONG": "_pp", "SPLIT_K": "_k", "SWAP_AB": "_swap"}[name]
                text += "" if isinstance(value, bool) else str(value)
        return text

    @property
    def binary(self) -> Config:
        """The Config with launch-time knobs at one value: equal for all Configs that share one Binary.

        That value is the knob's default, or, where the default needs a Binary of its own, the least that shares.
        """
        return replace(self, l2_group_size=KNOBS["l2_group_size"].default, split_k=min(self.split_k, 2))  # type: ignore[arg-type]

    @property
    def launch(self) -> LaunchKnobs:
        """The launch-time knobs."""
        return LaunchKnobs(l2_group_size=self.l2_group_size, split_k=self.split_k)

    def to_knobs(self) -> dict[str, int | bool]:
        """Return every knob under its public spelling, in KNOBS order (JSON-ready)."""
        return {name: getattr(self, knob.field) for name, knob in KNOBS.items()}

    @classmethod
    def from_knobs(cls, knobs: Mapping[str, Any], base: Config | None = None) -> Config:
        """Return the Config that ``knobs`` describes; left-out knobs come from ``base``, then from their defaults.

        Raises:
            InputError: unknown knob, a value of the wrong type, or a knob missing that has no default.
        """
        values: dict[str, Any] = {} if base is None else {f.name: getattr(base, f.name) for f in fields(cls)}
        for name, value in knobs.items():
            values[knob(name).field] = _typed(name, value)
        missing = [k.name for k in KNOBS.values() if k.field not in values and k.default is None]
        if missing:
            raise InputError(f"config lacks {', '.join(missing)}; give every knob that has no default")
        return cls(**values)

    def with_knob(self, name: str, value: Any) -> Config:
        """Return a copy with one knob changed (``name`` as in KNOBS; ``value`` may be text from a command line)."""
        return Config.from_knobs({name: value}, base=self)

    def __str__(self) -> str:
        return " ".join(f"{name}={_shown(value)}" for name, value in self.to_knobs().items())


def knob(name: str) -> Knob:
    """Return the Knob spelled ``name``.

    Raises:
        InputError: no such knob.
    """
    found = KNOBS.get(name)
    if found is None:
        raise InputError(f"unknown knob {name!r}; knobs: {', '.join(KNOBS)}")
    return found


def _typed(name: str, value: Any) -> int | bool:
    is_bool = isinstance(knob(name).default, bool)
    if is_bool:
        if isinstance(value, str) and value.lower() in ("true", "1", "on", "yes", "false", "0", "off", "no"):
            return value.lower() in ("true", "1", "on", "yes")
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        raise InputError(f"{name} must be true or false, got {value!r}")
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise InputError(f"{name} must be an integer, got {value!r}") from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} must be an integer, got {value!r}")
    return value


def _shown(value: int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# The kernels of the article the project starts from, step 7 to 9, as points of the sm_100a space.
_V7 = Config(blk_m=128, blk_n=128, pipe_depth=2, cta_group=1, num_consumer=1, epi_n=128)
NAMED: Final[dict[ArchName, dict[str, Config]]] = {
    "sm_100a": {
        "v7": _V7,
        "v8": replace(_V7, pipe_depth=4, cta_group=2),
        "v9": replace(_V7, pipe_depth=4, cta_group=2, num_consumer=2, epi_n=64),
    },
    "sm_90a": {
        # Best or near-best over the public shapes in the laboratory's first sweep on an H200.
        "cooperative": Config(blk_m=128, blk_n=256, pipe_depth=4, cta_group=2, num_consumer=2, epi_n=64),
        "pingpong": Config(blk_m=128, blk_n=128, pipe_depth=6, num_consumer=2, epi_n=64, pingpong=True),
        "skinny": Config(blk_m=64, blk_n=64, pipe_depth=13, epi_n=64),
    },
}


def named_config(name: str, arch_name: ArchName) -> Config:
    """Return the named point ``name`` (``v9``) of the arch's space.

    Raises:
        InputError: the arch has no point of that name.
    """
    points = NAMED[arch(arch_name).name]
    if name not in points:
        raise InputError(f"no config is named {name!r} on {arch_name}; named: {', '.join(points)}; or give --set KNOB=VALUE")
    return points[name]
