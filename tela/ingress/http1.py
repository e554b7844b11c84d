"""A small HTTP/1.1 server on trio: the door of the ingress for clients, and of the admin socket for the CLI.

One task reads and parses, one answers, in order. So a client that goes away is noticed in every phase, and its handler
is cancelled. An answer that cannot be finished is broken visibly: never is an end pretended.
"""

from __future__ import annotations

import enum
import http
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import trio

from tela.errors import ProtocolError, TelaError
from tela.ingress import openai
from tela.ingress.framing import Continue, Event, Limits, Phase, Request, RequestParser
from tela.observe import log

__all__ = ["Handler", "Limits", "Request", "Responder", "serve_connection"]

READ_BYTES: Final = 64 * 1024
MAX_PIPELINED: Final = 16
"""Requests parsed ahead of the one being answered; more stay unread in the socket."""
LINGER_S: Final = 2.0
"""After our last byte we read on for so long: closing at once would reset the connection and lose the answer."""


class _Framing(enum.Enum):
    LENGTH = "length"
    CHUNKED = "chunked"
    UNTIL_CLOSE = "until close"  # HTTP/1.0 knows no chunks
    NONE = "none"  # HEAD, 204, 304


class Responder:
    """Writes the answer to one request. Not finishing it breaks the connection."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]], request: Request | None) -> None:
        self._write = write
        self._is_http11 = request is None or request.version == "1.1"
        self._is_head = request is not None and request.method == "HEAD"
        self._framing = _Framing.NONE
        self._n_left = 0  # bytes still owed under LENGTH
        self.is_persistent = request is not None and request.is_persistent
        self.is_started = False
        self.is_ended = False

    async def start(
        self, status: int, headers: Iterable[tuple[bytes, bytes]] = (), *, length: int | None = None
    ) -> None:
        """Send the head.

        Args:
            status: the status code.
            headers: end-to-end headers, without Content-Length.
            length: bytes that will follow; None where that is not known.

        Raises:
            ProtocolError: a header holds a line break.
        """
        await self._write(self._head(status, headers, length))

    async def send(self, data: bytes) -> None:
        """Send content; waits while the client reads slower.

        Raises:
            ProtocolError: more than ``length`` bytes.
        """
        if not data or self._framing is _Framing.NONE:
            return
        if self._framing is _Framing.CHUNKED:
            data = b"%x\r\n%s\r\n" % (len(data), data)
        elif self._framing is _Framing.LENGTH:
            self._n_left -= len(data)
            if self._n_left < 0:
                raise ProtocolError("an answer longer than its Content-Length")
        await self._write(data)

    async def end(self) -> None:
        """The answer is whole.

        Raises:
            ProtocolError: fewer than ``length`` bytes were sent.
        """
        if self._framing is _Framing.LENGTH and self._n_left:
            raise ProtocolError("an answer shorter than its Content-Length")
        if self._framing is _Framing.CHUNKED:
            await self._write(b"0\r\n\r\n")
        self.is_ended = True

    async def json(self, status: int, value: object, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """A whole answer in JSON, in one write."""
        body = openai.render_json(value)
        head = self._head(status, (openai.JSON_TYPE, *headers), len(body))
        await self._write(head if self._framing is _Framing.NONE else head + body)
        self.is_ended = True

    @property
    def is_end_visible(self) -> bool:
        """Whether a client can tell a broken answer from a whole one when the connection just closes."""
        return self._framing is not _Framing.UNTIL_CLOSE

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]], length: int | None) -> bytes:
        assert not self.is_started, "an answer starts once"
        framing_headers = self._choose_framing(status, length)
        lines = [b"HTTP/1.1 %d %s" % (status, _reason(status))]
        lines += [b"%s: %s" % header for header in (*headers, *framing_headers)]
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1:
            raise ProtocolError("a header of the answer holds a line break")
        self.is_started = True
        return head

    def _choose_framing(self, status: int, length: int | None) -> list[tuple[bytes, bytes]]:
        headers = []
        has_content = status not in {204, 304}
        if has_content and length is not None:
            self._framing, self._n_left = _Framing.LENGTH, length
            headers.append((b"content-length", b"%d" % length))
        elif has_content and self._is_http11:
            self._framing = _Framing.CHUNKED
            headers.append((b"transfer-encoding", b"chunked"))
        elif has_content:
            self._framing, self.is_persistent = _Framing.UNTIL_CLOSE, False
        if self._is_head:
            self._framing = _Framing.NONE
        if not self.is_persistent:
            headers.append((b"connection", b"close"))
        return headers


def _reason(status: int) -> bytes:
    try:
        return http.HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""


Handler = Callable[[Request, Responder], Awaitable[None]]
"""Answers one request. A TelaError becomes an error answer, or breaks the answer where that has started."""


async def serve_connection(stream: trio.abc.HalfCloseableStream, handler: Handler, *, limits: Limits) -> None:
    """Serve one client until it goes away or the connection may not be used any more; closes ``stream``.

    Nagle's delay is off already: trio sets TCP_NODELAY on each of its TCP streams.
    """
    async with stream:
        await _Connection(stream, handler, limits).serve()


class _Connection:
    def __init__(self, stream: trio.abc.HalfCloseableStream, handler: Handler, limits: Limits) -> None:
        self._stream = stream
        self._handler = handler
        self._limits = limits
        self._parser = RequestParser(limits)
        self._read_deadline = 0.0
        self._n_unanswered = 0
        self._is_torn = False  # a write was cut short: whatever followed would be read as its rest
        self._is_closing = False  # our last byte is out: what arrives is thrown away
        self._scope = trio.CancelScope()

    async def serve(self) -> None:
        events_in, events_out = trio.open_memory_channel[Event](MAX_PIPELINED)
        async with events_in, events_out, trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            nursery.start_soon(self._answer_all, events_out)
            await self._read_all(events_in)
            nursery.cancel_scope.cancel()

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _read_all(self, events: trio.MemorySendChannel[Event]) -> None:
        """Returns when the client is gone."""
        self._set_read_deadline(Phase.BETWEEN)
        while data := await self._receive():
            phase = self._parser.phase
            if not self._is_closing:
                self._parser.feed(data)
            del data
            self._set_read_deadline(phase)
            await self._hand_over(events)

    async def _hand_over(self, events: trio.MemorySendChannel[Event]) -> None:
        parsed = self._parser.events
        while parsed:
            self._n_unanswered += 1
            await events.send(parsed.popleft())

    async def _receive(self) -> bytes:
        """The next bytes; ``b""`` when the client went away, or was silent for too long between requests."""
        while True:
            with trio.move_on_at(self._read_deadline) as scope:  # lost: nothing, the bytes stay in the socket
                data = await self._receive_some()
            if not scope.cancelled_caught:
                return data
            if self._parser.phase is not Phase.BETWEEN and not self._parser.is_refused:
                self._parser.refuse(openai.timed_out("the request took too long to arrive"))
                return b"\n"  # gives the refusal its turn; a refused parser ignores bytes
            if not self._n_unanswered:
                return b""
            self._read_deadline = trio.current_time() + self._limits.idle_s

    async def _receive_some(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some(READ_BYTES))
        except trio.BrokenResourceError:
            return b""

    def _set_read_deadline(self, former: Phase) -> None:
        now, phase = trio.current_time(), self._parser.phase
        if phase is Phase.BODY:
            self._read_deadline = now + self._limits.body_idle_s
        elif phase is Phase.BETWEEN:
            self._read_deadline = now + self._limits.idle_s
        elif former is not Phase.HEAD:
            self._read_deadline = now + self._limits.head_timeout_s

    # -- answering ----------------------------------------------------------------------------------------------------

    async def _answer_all(self, events: trio.MemoryReceiveChannel[Event]) -> None:
        is_open = True
        while is_open:
            # No variable holds the request: its body is let go as soon as it is answered.
            is_open = await self._answer(await events.receive())
            self._n_unanswered -= 1
        self._is_closing = True
        try:
            await self._stream.send_eof()
        except trio.BrokenResourceError:
            self._scope.cancel()
        self._scope.deadline = trio.current_time() + LINGER_S

    async def _answer(self, event: Event) -> bool:
        """Whether the connection can be used for another request."""
        if isinstance(event, Continue):
            await self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return True
        if isinstance(event, openai.ApiError):
            return await self._fail(Responder(self._write, None), event)
        return await self._handle(event)

    async def _handle(self, request: Request) -> bool:
        responder = Responder(self._write, request)
        try:
            await self._handler(request, responder)
        except TelaError as error:
            return await self._fail(responder, openai.from_error(error))
        except Exception:  # noqa: BLE001  the wall: an unexpected error ends this request and nothing else
            log.error("handler.fail", target=request.path, exc_info=True)
            return await self._fail(responder, openai.internal())
        if not responder.is_ended:
            return await self._fail(responder, openai.internal())
        return responder.is_persistent

    async def _fail(self, responder: Responder, error: openai.ApiError) -> bool:
        if not responder.is_started:
            await responder.json(error.status, error.value(), error.headers)
            return responder.is_persistent
        if not responder.is_end_visible:
            _reset_on_close(self._stream)
        self._scope.cancel()  # closes without the last chunk or byte
        return False

    async def _write(self, data: bytes) -> None:
        try:
            if self._is_torn:
                _reset_on_close(self._stream)
                raise trio.BrokenResourceError
            self._is_torn = True
            await self._stream.send_all(data)
            self._is_torn = False
        except trio.BrokenResourceError:
            self._scope.cancel()  # the client is gone: end the handler as the reader would
            await trio.lowlevel.checkpoint()


def _reset_on_close(stream: trio.abc.Stream) -> None:
    """Make closing send RST: a plain close would pass for the end of an answer that is delimited by it."""
    if isinstance(stream, trio.SocketStream):
        stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
