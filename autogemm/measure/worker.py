"""A worker process that runs trials for its parent, and may die of them.

The parent sends requests (method, arguments) over a socket; the worker calls the method on its service and answers. A hang is
ended by SIGKILL, a death is noticed at once, and a CUDA error that leaves the process unusable is told apart from one that
does not. What a request dies of is that request's fault: requests are answered one at a time.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol

from ..errors import AutogemmError, InputError
from ..results import Outcome
from .faults import Fault, TrialFault, classify, death

# Ways an answer can begin.
_RESULT: Final = "result"  # value
_FAULT: Final = "fault"  # Fault
_REFUSED: Final = "refused"  # text of an InputError
_BUG: Final = "bug"  # traceback
_DOING: Final = "doing"  # what a long request is at; more will follow

_START: Final = "import sys; from autogemm.measure.worker import serve; serve(*sys.argv[1:])"
# CUDA start-up and the first import of torch; a machine under load took 20 s.
START_TIMEOUT_S: Final = 180.0


class WorkerError(RuntimeError):
    """The worker's own code failed: a bug, not a trial's fault."""


class Service(Protocol):
    """What runs in a worker; every public method may be requested."""

    announce: Callable[[str], None]  # set by the worker; tells the parent what a long request is at

    def probe(self) -> None:
        """Raise if the process can't use its device any more."""


class Worker:
    """The parent's handle of one worker process."""

    def __init__(self, factory: str) -> None:
        """Start the process.

        Args:
            factory: ``module:callable`` that returns the Service, imported in the worker.
        """
        ours, theirs = socket.socketpair()
        # The worker reads this pipe only to notice that the parent is gone.
        lifeline_read, self._lifeline = os.pipe()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(p).absolute()) for p in sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs.fileno()), str(lifeline_read), factory],
            stdin=subprocess.DEVNULL, stdout=self._stderr, stderr=self._stderr, env=environment,
            pass_fds=(theirs.fileno(), lifeline_read), start_new_session=True,
        )  # fmt: skip
        theirs.close()
        os.close(lifeline_read)
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._finalizer = weakref.finalize(self, _end, self._process, self._connection, self._lifeline)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can be asked something."""
        return self._finalizer.alive and self._process.poll() is None

    def call(self, method: str, *arguments: Any, timeout_s: float, doing: Callable[[str], None] | None = None) -> Any:
        """Return what the service's ``method`` returns.

        Args:
            timeout_s: after which the worker is killed.
            doing: told what the request is at.

        Raises:
            TrialFault: the request failed, hung or ended the worker. If the fault is sticky, the worker is gone.
            InputError: the service refused its arguments.
            WorkerError: a bug.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._connection.send((method, arguments))
            while True:
                if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                    self.kill()
                    text = f"no answer to {method} within {timeout_s:g} s"
                    raise TrialFault(Fault(outcome=Outcome.TIMEOUT, detail=text, sticky=True))
                kind, value = self._connection.recv()
                if kind != _DOING:
                    break
                if doing is not None:
                    doing(value)
        except (EOFError, OSError):
            status = self._wait()
            fault = death(status, self._log())
            self.kill()
            raise TrialFault(fault) from None
        if kind == _RESULT:
            return value
        if kind == _FAULT:
            if value.sticky:
                self.kill()
            raise TrialFault(value)
        if kind == _REFUSED:
            raise InputError(value)
        raise WorkerError(f"worker failed in {method}:\n{value}")

    def kill(self) -> None:
        """End the process with SIGKILL and reap it."""
        self._finalizer()

    def _wait(self) -> int:
        try:
            return self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def _log(self) -> str:
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 65536))
        return self._stderr.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes], connection: Connection[Any, Any], lifeline: int) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    connection.close()
    os.close(lifeline)


def serve(connection_fd: str, lifeline_fd: str, factory: str) -> None:
    """Answer requests until the parent closes the connection; the main function of a worker process."""
    connection: Connection[Any, Any] = Connection(int(connection_fd))
    threading.Thread(target=_die_with_parent, args=(int(lifeline_fd),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when a trial ends
    service, broken = _make(factory, connection)  # before the first request: importing torch takes seconds
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if broken is not None:
                raise broken
            answer = (_RESULT, getattr(service, method)(*arguments))
        except Exception as error:  # every failure is an answer
            answer = _failure(error, service)
        connection.send(answer)


def _make(factory: str, connection: Connection[Any, Any]) -> tuple[Service | None, Exception | None]:
    module, _, name = factory.partition(":")
    try:
        service: Service = getattr(importlib.import_module(module), name)()
        service.announce = lambda text: connection.send((_DOING, text))
    except Exception as error:  # told when something is asked
        return None, error
    return service, None


def _failure(error: Exception, service: Service | None) -> tuple[str, Any]:
    fault = error.fault if isinstance(error, TrialFault) else classify(error)
    if fault is None:
        if isinstance(error, AutogemmError):
            return _REFUSED, str(error)
        if type(error).__name__ == "OutOfMemoryError":  # torch's; this module does without torch
            return _REFUSED, f"not enough device memory: {str(error).splitlines()[0]}"
        return _BUG, traceback.format_exc()
    if not fault.sticky and service is not None:
        try:
            service.probe()
        except Exception as broken:
            seen = classify(broken)
            outcome = fault.outcome if seen is None else seen.outcome
            fault = Fault(outcome=outcome, detail=f"{fault.detail}; then {broken}", sticky=True)
    return _FAULT, fault


def _die_with_parent(lifeline: int) -> None:
    with contextlib.suppress(OSError):
        os.read(lifeline, 1)  # returns when the parent, the only writer, has closed it or is gone
    os.kill(os.getpid(), signal.SIGKILL)
