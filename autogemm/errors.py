"""The errors a caller may decide on; every other exception is a bug and propagates.

A message states what was wrong, what was given, what the limit is and what to do next, in one line where it can.
"""

from __future__ import annotations

from collections.abc import Sequence


class AutogemmError(Exception):
    """Base of all errors raised on purpose."""


class InputError(AutogemmError):
    """The caller's input can't be used (bad shape, unknown knob, unreadable file); the command line exits with 2."""


class IllegalConfig(InputError):
    """A Config breaks legality rules of its arch or problem.

    Attributes:
        violations: every broken rule, each a full sentence; never only the first.
    """

    def __init__(self, what: str, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        super().__init__(f"{what} is not legal: " + "; ".join(self.violations))


class DatabaseError(InputError):
    """A tuned-config file can't be read or written as it is; the file is left (or set aside) untouched."""


class NothingFound(AutogemmError):
    """The work ran, but no usable result came of it; the command line exits with 1."""


class MissingDependency(InputError):
    """An optional package, tool or device that the request needs is not there."""


class CompileError(AutogemmError):
    """A candidate did not compile, or compiled to code that is refused (register spills)."""


class UnsupportedOp(InputError):
    """The CPU execution met an operation it has no model of; it is never skipped."""


class LaunchError(AutogemmError):
    """The CUDA driver refused to load or launch a kernel."""
