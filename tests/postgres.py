"""A PostgreSQL server on loopback, from Debian's packages, for as long as a test needs it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path


def find_binaries() -> Path | None:
    """Return the folder of initdb and pg_ctl, which Debian keeps out of PATH."""
    found = shutil.which("initdb")
    if found is not None and shutil.which("pg_ctl") is not None:
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return folders[-1].parent if folders else None


class Postgres:
    """One server with an empty database ``postgres`` and no password."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._folder = Path(tempfile.mkdtemp(prefix="autogemm-pg-"))
        # PostgreSQL refuses to run as root; Debian's package brings a user for it.
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._run("initdb", "-D", str(self._folder / "data"), "-A", "trust", "-U", "postgres", "--no-sync")
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://postgres:secret@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = f"-p {self.port} -k {self._folder} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=200"
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-o", options, "-l", str(self._folder / "log"), "-w", "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", "-w", "stop")

    def close(self) -> None:
        self.stop()
        time.sleep(0.1)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._binaries / program), *arguments], user=self._user, cwd=self._folder, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if program == "initdb" else subprocess.DEVNULL, text=True, check=False,
        ) if program == "initdb" else subprocess.run(
            [str(self._binaries / program), *arguments], user=self._user, cwd=self._folder, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip  # the server inherits pg_ctl's output, which must not be a pipe that we wait for
        if done.returncode != 0:
            log = self._folder / "log"
            raise RuntimeError(f"{program} failed: {done.stdout or (log.read_text() if log.exists() else '')}")
