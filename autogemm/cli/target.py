"""Which GPU a command is about: the one here if it is of the asked arch, else the one that stands for the arch."""

from __future__ import annotations

from dataclasses import dataclass

from ..arch import ARCHS, DEFAULT_GPU, ArchName
from ..device import Device
from ..errors import InputError, MissingDependency
from . import options


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What to tune for.

    Attributes:
        index: of the GPU here that will measure; None for a prediction.
        reason: why it is a prediction, empty for a measurement.
    """

    device: Device
    index: int | None
    reason: str = ""


def resolve(arch: str | None, gpu: int | None, *, predict: bool, default: ArchName = "sm_100a") -> Target:
    """Return the Target that --arch, --gpu and --predict name.

    Raises:
        InputError: unknown arch, or a GPU that is not there.
        MissingDependency: --gpu on a machine without a GPU.
    """
    from ..local import local_device

    asked = None if arch is None else options.parse_arch(arch)
    local = None if predict and gpu is None else local_device(gpu or 0)
    if gpu is not None and local is None:
        raise MissingDependency(f"--gpu {gpu}: no GPU is usable here; leave it out to predict by model")
    if not predict and local is not None and local.arch is not None and asked in (None, local.arch):
        return Target(device=local, index=gpu or 0)
    if gpu is not None and local is not None and local.arch != (asked or local.arch):
        raise InputError(f"--gpu {gpu} is {local.name} ({local.arch or 'no kernels'}), not {asked}")
    name = asked or (local.arch if local is not None and local.arch is not None else default)
    if predict:
        why = "asked to predict"
    elif local is None:
        why = f"no {name} GPU here"
    else:
        why = f"the GPU here is {local.name} ({local.arch or 'none of ' + ', '.join(ARCHS)})"
    return Target(device=Device.of_gpu(DEFAULT_GPU[name]), index=None, reason=why)
