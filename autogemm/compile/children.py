"""Child interpreters that work for this process: a request a line on stdin, an answer a line on stdout, both JSON.

Unlike ``multiprocessing``, that never imports the caller's main module, so scripts and notebooks need no ``__main__`` guard. A
child imports what it needs once; one that dies costs its request only.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from typing import Any


class ChildDied(Exception):
    """A child ended, or answered nonsense and was ended, instead of answering; the text says how and what it said last."""


class ChildrenClosed(Exception):
    """Children were ended for good before the request was taken."""


class Children:
    """Children that run one command, each started when no other is idle and kept until ``close``. Thread-safe."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        self._all: set[_Child] = set()
        self._closed = False
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return a child's answer to ``request``; as many run at once as threads ask.

        Raises:
            ChildDied: there is none; the next request starts a new child.
            ChildrenClosed: after ``close``, whose callers' threads may still be at their queue.
        """
        child = self._take()
        try:
            answer = child.ask(request)
        except (OSError, ValueError) as error:
            with self._lock:
                self._all.discard(child)
            raise ChildDied(child.kill()) from error
        self._idle.put(child)
        return answer

    def close(self) -> None:
        """End all children, for good; one that is working is killed."""
        with self._lock:
            self._closed = True
            children, self._all = self._all, set()
            self._idle = queue.LifoQueue()
        for child in children:
            child.kill()

    def _take(self) -> _Child:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            with self._lock:
                if self._closed:
                    raise ChildrenClosed from None
                child = _Child(self._command)
                self._all.add(child)
            return child


class _Child:
    """One child process and the pipe to it."""

    def __init__(self, command: Sequence[str]) -> None:
        # One thread per child: the linear algebra libraries that TVM's imports load would start one per core.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 -- lives with the child
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment,
            text=True, encoding="utf-8",
        )  # fmt: skip

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())  # an empty line, at end of file, is no JSON
        if not isinstance(answer, dict):
            raise ValueError("not an answer")
        return answer

    def kill(self) -> str:
        """End the process if it still runs, and return how it ended and the last thing it said."""
        self._process.kill()
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        return (f"signal {-code}" if code < 0 else f"exit code {code}") + (f": {said[-1]}" if said else "")
