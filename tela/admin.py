"""The control socket: HTTP/1.1 over a unix socket that only its owner can open.

=========  ============  =================================================================
method     target        answer
=========  ============  =================================================================
GET        /status       :class:`tela.views.Status`
GET        /hubs         ``{"hubs": [...]}``: addresses to put into invites
GET        /route        :class:`tela.views.RouteView`: for ``?model=M[&provider=P]``: who would answer, who not and why
GET        /registry     :class:`tela.views.RegistryView`: every entry of the replica
GET        /changes      :class:`tela.views.ChangesView`: what changed lately, and why
GET        /metrics      Prometheus text
GET        /health       200 while the daemon runs
GET        /ready        200 where it can serve, 503 before and after
GET        /revocations  the CA's list of what it took back, a record; empty where there is none
POST       /revocations  such a list: it is taken in and spread; 200, or 400 where it is none
POST       /drain        drain: nothing new is taken, what runs may end; then 200
POST       /leave        drain, say goodbye and stop; 202, the end of the socket is the end
=========  ============  =================================================================

Every answer carries ``x-tela-version``, so that a client of another version can say so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec
import trio

import tela
from tela.errors import ConfigError, TelaError, UsageError
from tela.ingress.http1 import Limits, Request, Responder, serve_connection
from tela.views import ChangesView, RegistryView, RouteView, Status

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings trio-stubs, which hide trio's own types from mypy

BACKLOG: Final = 64
"""Clients are people, probes and scrapers of one host."""
PROBE_TIMEOUT_S: Final = 1.0
"""A live daemon's backlog accepts at once; one that does not is taken for alive, never for stale."""
_PEER_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED, unix(7)


class Backend(Protocol):
    """What the node lets its owner see and do."""

    def status(self) -> Status:
        """The daemon, and the swarm as it sees it."""
        ...

    def route(self, model: str, allowlist: frozenset[str] | None) -> RouteView:
        """Who would get a request; raises UsageError where it is no ingress."""
        ...

    def registry(self) -> RegistryView:
        """Its whole replica."""
        ...

    def changes(self) -> ChangesView:
        """What changed lately in what the registry shows."""
        ...

    def metrics(self) -> bytes:
        """Prometheus text exposition."""
        ...

    def is_ready(self) -> bool:
        """Whether it can serve now."""
        ...

    def invite_hubs(self) -> tuple[str, ...]:
        """Addresses of hubs for new invites."""
        ...

    def revocations(self) -> bytes:
        """The CA's list of what it took back, as it is in force; b"" where there is none."""
        ...

    async def revoke(self, raw: bytes) -> None:
        """Take in and spread such a list; raises TelaError where it is none."""
        ...

    async def drain(self) -> None:
        """Take nothing new; returns when peers have been told."""
        ...

    async def leave(self) -> None:
        """Start to leave; returns at once."""
        ...


async def serve_admin(
    path: Path, backend: Backend, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve the control socket at ``path`` until cancelled; the socket file goes with it.

    Raises:
        UsageError: a daemon of this name runs already.
        ConfigError: the socket cannot be made there.
    """
    listener = _FileListener(path)
    admin = _Admin(backend)

    async def serve_one(stream: trio.SocketStream) -> None:
        await serve_connection(stream, admin.handle, limits=Limits())

    task_status.started()  # clients that connect from now on wait in the backlog
    await trio.serve_listeners(serve_one, [listener])


class _FileListener(trio.abc.Listener[trio.SocketStream]):
    """Listens on a claimed file. The file goes before the listener: after that it may be another daemon's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listener = trio.SocketListener(trio.socket.from_stdlib_socket(claim_socket(path)))

    async def accept(self) -> trio.SocketStream:
        return await self._listener.accept()

    async def aclose(self) -> None:
        self._path.unlink(missing_ok=True)
        await self._listener.aclose()


def claim_socket(path: Path) -> socket.socket:
    """A listening socket at ``path``, mode 0600; the file of a dead daemon is replaced.

    Raises:
        UsageError: a live daemon listens there; the message names its pid.
        ConfigError: the socket cannot be made there.
    """
    try:
        with _locked(path.parent):
            owner = _listening_pid(path)
            if owner is not None:
                raise UsageError(
                    f"a daemon called {path.stem} runs already, pid {owner}",
                    hint="give this one another name with --name, or stop that one: tela leave",
                )
            path.unlink(missing_ok=True)
            return _listen(path)
    except OSError as error:
        raise ConfigError(
            f"cannot make the control socket {path}: {error.strerror}", hint="name another place in TELA_RUNTIME_DIR"
        ) from error


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One daemon at a time may look for a stale socket and replace it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _listening_pid(path: Path) -> int | None:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid: int = _PEER_CREDENTIALS.unpack(credentials)[0]
    return pid


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(listener.fileno(), 0o600)  # before bind: the file never exists with another mode
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class _Admin:
    """Routes of one daemon."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._routes: dict[tuple[str, str], Callable[[], Awaitable[_Answer]]] = {
            ("GET", "/status"): self._status,
            ("GET", "/hubs"): self._hubs,
            ("GET", "/registry"): self._registry,
            ("GET", "/changes"): self._changes,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/revocations"): self._revocations,
            ("POST", "/drain"): self._drain,
            ("POST", "/leave"): self._leave,
        }

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer one request."""
        route = self._routes.get((request.method, request.path))
        if route:
            answer = await route()
        elif (request.method, request.path) == ("POST", "/revocations"):  # the one that reads a body
            answer = await self._revoke(request.body)
        elif (request.method, request.path) == ("GET", "/route"):  # the one that reads a query
            answer = self._route(request.target)
        else:
            answer = self._no_route(request)
        headers = ((b"content-type", answer.content_type), (b"x-tela-version", tela.__version__.encode()))
        await responder.start(answer.status, headers, length=len(answer.content))
        await responder.send(answer.content)
        await responder.end()

    async def _status(self) -> _Answer:
        return _json(200, self._backend.status())

    async def _hubs(self) -> _Answer:
        return _json(200, {"hubs": self._backend.invite_hubs()})

    async def _registry(self) -> _Answer:
        return _json(200, self._backend.registry())

    async def _changes(self) -> _Answer:
        return _json(200, self._backend.changes())

    async def _metrics(self) -> _Answer:
        return _Answer(200, self._backend.metrics(), b"text/plain; version=0.0.4; charset=utf-8")

    async def _health(self) -> _Answer:
        return _json(200, {"status": "ok"})

    async def _ready(self) -> _Answer:
        is_ready = self._backend.is_ready()
        return _json(200 if is_ready else 503, {"status": "ready" if is_ready else "not ready"})

    async def _revocations(self) -> _Answer:
        return _Answer(200, self._backend.revocations(), b"application/octet-stream")

    async def _revoke(self, raw: bytes) -> _Answer:
        try:
            await self._backend.revoke(raw)
        except TelaError as error:
            return _json(400, {"error": {"code": error.code, "message": str(error)}})
        return _json(200, {"status": "taken"})

    def _route(self, target: str) -> _Answer:
        query = urllib.parse.parse_qs(target.partition("?")[2])
        allowlist = frozenset(query["provider"]) if "provider" in query else None
        try:
            return _json(200, self._backend.route(query.get("model", [""])[0], allowlist))
        except TelaError as error:
            return _json(400, {"error": {"code": error.code, "message": str(error)}})

    async def _drain(self) -> _Answer:
        await self._backend.drain()
        return _json(200, {"status": "draining"})

    async def _leave(self) -> _Answer:
        await self._backend.leave()
        return _json(202, {"status": "leaving"})

    def _no_route(self, request: Request) -> _Answer:
        is_known = any(target == request.path for _, target in self._routes)
        status, code = (405, "method-not-allowed") if is_known else (404, "not-found")
        message = f"{request.method} {request.path[:128]} is not served here"
        return _json(status, {"error": {"code": code, "message": message}})


class _Answer(NamedTuple):
    status: int
    content: bytes
    content_type: bytes = b"application/json"


def _json(status: int, value: object) -> _Answer:
    return _Answer(status, msgspec.json.encode(value))
