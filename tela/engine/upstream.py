"""Connections to the engine on loopback: raw sockets, kept open between requests."""

from __future__ import annotations

import socket
from collections import deque
from typing import Final

import trio

from tela.engine.http1 import ForwardError
from tela.engine.report import Endpoint
from tela.wire import MAX_FRAME_PAYLOAD_BYTES, GateCode

CONNECT_TIMEOUT_S: Final = 5.0
"""On loopback a connection that takes longer meets a full backlog: the engine is not accepting (faults.md E03)."""
MAX_IDLE_S: Final = 4.0
"""Below the five seconds after which uvicorn closes an idle connection."""
MAX_IDLE_CONNECTIONS: Final = 256
"""Kept between bursts. It bounds what lies idle, not what is in flight."""


class EngineConnection:
    """One connection; carries one request at a time."""

    def __init__(self, raw: socket.socket) -> None:
        self._raw = raw
        # SocketStream sets TCP_NODELAY.
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(raw))
        self.is_reused = False
        self.idle_since_s = 0.0

    async def send(self, data: bytes) -> None:
        """Send all of ``data``; silent where the engine closed, since its answer may still be there."""
        try:
            await self._stream.send_all(data)
        except trio.BrokenResourceError:
            pass  # what it answered before it closed, if anything, decides

    async def receive(self) -> bytes:
        """What came, at most one frame's worth; ``b""`` where the engine closed, cleanly or not."""
        try:
            return bytes(await self._stream.receive_some(MAX_FRAME_PAYLOAD_BYTES))
        except trio.BrokenResourceError:
            return b""

    def is_quiet(self) -> bool:
        """Whether an idle connection is still open and holds nothing unasked for."""
        try:
            self._raw.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Close at once: an engine in the middle of an answer sees that nobody wants it any more."""
        self._stream.socket.close()


class EnginePool:
    """Idle connections to one endpoint, the most recent first."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._idle: deque[EngineConnection] = deque()

    def take(self) -> EngineConnection | None:
        """An idle connection that is still good, or None."""
        while self._idle and trio.current_time() - self._idle[0].idle_since_s > MAX_IDLE_S:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_quiet():
                connection.is_reused = True
                return connection
            connection.close()
        return None

    async def connect(self) -> EngineConnection:
        """A new connection.

        Raises:
            ForwardError: the engine does not accept one; it has not seen the request.
        """
        endpoint = self.endpoint
        family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        raw = socket.socket(family, socket.SOCK_STREAM)
        connecting = trio.socket.from_stdlib_socket(raw)
        is_connected = False
        try:
            with trio.move_on_after(CONNECT_TIMEOUT_S):  # nothing is lost: nothing was sent
                await connecting.connect((endpoint.host, endpoint.port))
                is_connected = True
        except OSError as error:
            raise _unreachable(error.strerror or type(error).__name__) from error
        finally:
            if not is_connected:
                raw.close()
        if not is_connected:
            raise _unreachable(f"no connection within {CONNECT_TIMEOUT_S:g} s")
        return EngineConnection(raw)

    def give_back(self, connection: EngineConnection) -> None:
        """Keep a clean connection for the next request."""
        connection.idle_since_s = trio.current_time()
        self._idle.append(connection)
        if len(self._idle) > MAX_IDLE_CONNECTIONS:
            self._idle.popleft().close()

    def close(self) -> None:
        """Close every idle connection."""
        while self._idle:
            self._idle.pop().close()


def _unreachable(why: str) -> ForwardError:
    return ForwardError(GateCode.ENGINE_UNREACHABLE, f"the engine does not answer: {why}", is_accepted=False)
