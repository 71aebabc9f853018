"""How trials fail: one class of failure per cause, from CUDA error codes, messages and exit statuses."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import Final

from ..errors import AutogemmError, LaunchError
from ..results import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """How one trial failed.

    Attributes:
        outcome: class of failure, never OK.
        detail: what was seen, for people.
        sticky: True if the process that saw it can't use the GPU any more.
    """

    outcome: Outcome
    detail: str
    sticky: bool


class TrialFault(AutogemmError):
    """Carries a Fault out of a trial."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(fault.detail)


# CUDA Driver API, CUresult: the errors after which "the process must be terminated and relaunched".
_STICKY: Final[dict[int, Outcome]] = {
    700: Outcome.ILLEGAL_ACCESS,  # ILLEGAL_ADDRESS
    702: Outcome.TIMEOUT,  # LAUNCH_TIMEOUT: a display watchdog ended the kernel
    710: Outcome.ABORT,  # ASSERT: the kernel called assert
    714: Outcome.ILLEGAL_ACCESS,  # HARDWARE_STACK_ERROR
    715: Outcome.ILLEGAL_INSTRUCTION,  # ILLEGAL_INSTRUCTION
    716: Outcome.ILLEGAL_ACCESS,  # MISALIGNED_ADDRESS
    717: Outcome.ILLEGAL_ACCESS,  # INVALID_ADDRESS_SPACE
    718: Outcome.ILLEGAL_INSTRUCTION,  # INVALID_PC
    719: Outcome.ABORT,  # LAUNCH_FAILED: a trap instruction, and exceptions that have no code of their own
    721: Outcome.ABORT,  # LAUNCH_FAILED in a tensor-memory operation
}

# torch puts the runtime's text, not always its number, into the exception (cudaGetErrorString).
_TEXTS: Final[tuple[tuple[str, int], ...]] = (
    ("illegal memory access", 700), ("launch timed out", 702), ("device-side assert", 710), ("hardware stack error", 714),
    ("illegal instruction", 715), ("misaligned address", 716), ("invalid address space", 717),
    ("invalid program counter", 718), ("unspecified launch failure", 719),
)  # fmt: skip


def classify(error: BaseException) -> Fault | None:
    """Return the Fault that a CUDA exception stands for; None if it is no CUDA error, hence a bug or bad input."""
    first_line = str(error).strip().split("\n", 1)[0][:400]
    code = error_code(error)
    if code in _STICKY:
        return Fault(outcome=_STICKY[code], detail=first_line, sticky=True)
    if code is not None or isinstance(error, LaunchError):
        return Fault(outcome=Outcome.LAUNCH_FAILED, detail=first_line, sticky=False)
    return None


def error_code(error: BaseException) -> int | None:
    """Return the CUDA error number behind an exception of this package or of torch, or None."""
    for attribute in ("code", "error_code"):  # DriverError; torch.AcceleratorError
        code = getattr(error, attribute, None)
        if isinstance(code, int):
            return code
    text = str(error)
    if "CUDA" not in text:
        return None
    for words, number in _TEXTS:
        if words in text:
            return number
    found = re.search(r"CUDA error:? (?:code=)?(\d+)", text)
    return int(found.group(1)) if found else (0 if "CUDA error" in text else None)


def death(status: int, stderr: str) -> Fault:
    """Return the Fault of a worker that ended by itself with exit ``status`` (negative: by that signal)."""
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
    return Fault(outcome=Outcome.ABORT, detail=f"the worker {how}" + (f": {last[:300]}" if last else ""), sticky=True)
