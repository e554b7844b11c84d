"""Questions straight to a daemon's control socket: within a millisecond, quick enough to measure with."""

from __future__ import annotations

import contextlib
import http.client
import socket
from pathlib import Path

from scripts.demo.local_swarm import LocalSwarm


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("tela", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))  # close() closes it too where this fails


def ask_control(swarm: LocalSwarm, name: str, path: str, *, method: str = "GET") -> bytes:
    """What the daemon called ``name`` answers. Raises OSError where it does not run."""
    with contextlib.closing(_Connection(swarm.folder / "run" / f"{name}.sock")) as connection:
        connection.request(method, path)
        return connection.getresponse().read()
