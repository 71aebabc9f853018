"""The GPUs of this machine, where there may be none."""

from __future__ import annotations

import torch

from .cuda_machine import CudaMachine
from .device import Device
from .errors import InputError


def local_device(index: int = 0) -> Device | None:
    """Return GPU ``index`` of this machine, None if torch can use no GPU at all.

    Raises:
        InputError: there are GPUs, but not that one.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return None
    if not 0 <= index < count:
        raise InputError(f"no GPU {index} here; there {'is' if count == 1 else 'are'} {count}, counted from 0")
    return CudaMachine().device(index)
