"""A WebSocket as a stream of bytes (RFC 6455): for hubs behind a front proxy that lets nothing else through.

Each write is a binary message; where messages begin and end means nothing, as libp2p has it (specs, websockets). The
framing is wsproto's. Nothing is compressed: what is inside is Noise. Who is at the other end is for Noise to say, too.
"""

from __future__ import annotations

import ipaddress
from typing import Final, NamedTuple

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    Pong,
    RejectConnection,
    RejectData,
    Request,
)
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from tela.errors import PeerError, ProtocolError

RECEIVE_BYTES: Final = 64 * 1024
MAX_HEAD_BYTES: Final = 16 * 1024
"""Of the request or answer that opens a WebSocket; a front proxy adds a few headers."""
CLOSE_TIMEOUT_S: Final = 1.0
_TARGET: Final = "/"
_NOT_A_SOCKET: Final = 426
"""Upgrade Required (RFC 9110 section 15.5.22): what a plain HTTP request gets."""
_FORWARDED_FOR: Final = b"x-forwarded-for"


class Accepted(NamedTuple):
    """A WebSocket that a client opened; ``forwarded_for`` is whom the proxy in front names as its client, or ""."""

    stream: WebSocketStream
    forwarded_for: str


class WebSocketStream(trio.abc.Stream):
    """Made by :func:`connect_websocket` and :func:`accept_websocket`. A cancelled write breaks it."""

    def __init__(self, transport: trio.abc.Stream, connection: WSConnection) -> None:
        self._transport = transport
        self._connection = connection
        self._sending = trio.Lock()  # the reader answers pings while somebody writes
        self._received = bytearray()
        self._is_ended = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Raises trio.BrokenResourceError where the other end is gone."""
        await self._send(BytesMessage(data=bytes(data)))

    async def wait_send_all_might_not_block(self) -> None:
        """See trio.abc.SendStream."""
        async with self._sending:
            await self._transport.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Some bytes, ``b""`` at the end.

        Raises:
            trio.BrokenResourceError: the other end is gone.
            ProtocolError: it does not speak WebSocket, or sends text.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._received and not self._is_ended:
            for event in await self._next_events():
                await self._take(event)
        data = bytes(self._received[:max_bytes])
        del self._received[: len(data)]
        return data

    async def _next_events(self) -> list[Event]:
        await _receive_into(self._transport, self._connection)
        try:
            return list(self._connection.events())
        except RemoteProtocolError as error:
            raise ProtocolError(f"no WebSocket: {error}") from error

    async def _take(self, event: Event) -> None:
        match event:
            case BytesMessage():
                self._received += event.data
            case Ping():
                await self._send(event.response())
            case Pong():
                pass
            case CloseConnection():
                self._is_ended = True
            case _:
                raise ProtocolError(f"a {type(event).__name__} where binary messages are due")

    async def _send(self, event: Event) -> None:
        async with self._sending:
            try:
                data = self._connection.send(event)
            except LocalProtocolError as error:  # its text holds all that was to be sent
                raise trio.BrokenResourceError("the WebSocket is closed") from error
            await self._transport.send_all(data)

    async def aclose(self) -> None:
        """Say goodbye and close the transport."""
        try:
            with trio.move_on_after(CLOSE_TIMEOUT_S):  # lost: the goodbye
                await self._send(CloseConnection(code=1000))
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError, RemoteProtocolError):
            pass
        finally:
            await trio.aclose_forcefully(self._transport)


async def connect_websocket(transport: trio.abc.Stream, host: str) -> WebSocketStream:
    """Open a WebSocket over a connection to ``host``.

    Raises:
        PeerError: it is refused; the message has the status.
        ProtocolError: the other end speaks something else.
    """
    connection = WSConnection(ConnectionType.CLIENT)
    name = f"[{host}]" if ":" in host else host
    await transport.send_all(connection.send(Request(host=name, target=_TARGET)))
    events = await _open(transport, connection, (AcceptConnection, RejectConnection))
    if isinstance(events[0], RejectConnection):
        raise PeerError(f"the front proxy or hub answers {events[0].status_code} and no WebSocket")
    return await _begun(transport, connection, events[1:])


async def accept_websocket(transport: trio.abc.Stream) -> Accepted:
    """Serve the opening of a WebSocket.

    Raises:
        ProtocolError: the client wants none; it got status 426.
    """
    connection = WSConnection(ConnectionType.SERVER)
    try:
        events = await _open(transport, connection, (Request,))
    except ProtocolError:
        body = b"this port speaks WebSocket\n"
        head = f"HTTP/1.1 {_NOT_A_SOCKET} Upgrade Required\r\nupgrade: websocket\r\nconnection: close\r\n"
        await transport.send_all(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        raise
    request = events[0]
    assert isinstance(request, Request)
    await transport.send_all(connection.send(AcceptConnection()))
    forwarded = [value for name, value in request.extra_headers if name.lower() == _FORWARDED_FOR]
    return Accepted(await _begun(transport, connection, events[1:]), _last_ip(forwarded))


def _last_ip(values: list[bytes]) -> str:
    """The last address is the one that the nearest proxy added; those before it are what its client claims."""
    last = values[-1].decode("latin-1").rpartition(",")[2].strip() if values else ""
    try:
        return str(ipaddress.ip_address(last))
    except ValueError:
        return ""


async def _open(transport: trio.abc.Stream, connection: WSConnection, wanted: tuple[type[Event], ...]) -> list[Event]:
    """The event of the opening, and what came behind it."""
    n_bytes = 0
    try:
        while True:
            n_bytes += await _receive_into(transport, connection)
            events = [event for event in connection.events() if not isinstance(event, RejectData)]
            if events and isinstance(events[0], wanted):
                return events
            if events or n_bytes > MAX_HEAD_BYTES:
                raise ProtocolError("the opening of a WebSocket is malformed or too long")
    except RemoteProtocolError as error:
        raise ProtocolError(f"no WebSocket: {error}") from error


async def _begun(transport: trio.abc.Stream, connection: WSConnection, early: list[Event]) -> WebSocketStream:
    stream = WebSocketStream(transport, connection)
    for event in early:
        await stream._take(event)  # noqa: SLF001 - of this module
    return stream


async def _receive_into(transport: trio.abc.Stream, connection: WSConnection) -> int:
    """Hand on what comes next; returns its size. Raises ProtocolError where the transport ended without a goodbye."""
    data = await transport.receive_some(RECEIVE_BYTES)
    if not data:
        raise trio.BrokenResourceError("the connection ended within a WebSocket")
    connection.receive_data(bytes(data))
    return len(data)
