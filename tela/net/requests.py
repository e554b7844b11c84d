"""Requests over pooled, long-lived ``/tela/http/1`` streams: both ends. The frames are in :mod:`tela.wire`.

A stream carries one request after another. The caller who gives up early sends CANCEL and lets the stream drain in the
background; a stream that does not come clean in DRAIN_TIMEOUT_S is reset. A CANCEL may cross the end of the response,
so one that comes between requests means nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from tela.errors import PeerError, ProtocolError, StreamResetError, UnavailableError
from tela.net.transport import Mesh, Stream, StreamHandler
from tela.observe import log
from tela.record import NodeId, short
from tela.wire import (
    HTTP_PROTOCOL,
    MAX_HEAD_BYTES,
    ErrorFrame,
    FrameDecoder,
    FrameType,
    GateCode,
    RequestHead,
    ResponseHead,
    data_frames,
    decode_error,
    decode_request_head,
    decode_response_head,
    encode,
    frame,
)

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings trio-stubs, which hide trio's own types from mypy

MAX_IDLE_STREAMS_PER_PEER: Final = 64
"""Kept open for the next call; more calls at once than this pay for opening."""
MAX_CALLS_PER_PEER: Final = 1_024
"""In flight to one peer at once; an engine batches a few hundred. Above it the peer is as good as full."""
DRAIN_TIMEOUT_S: Final = 2.0
"""What an abandoned call may take to end before its stream is reset."""
MAX_BODY_FRAMES: Final = 16
"""Frames of a request body (1 MiB) that wait for the handler; above it the caller's sending waits."""


class CallError(PeerError):
    """The gate ended the call with an error. ``is_accepted`` False: no engine saw it, another may be tried."""

    def __init__(self, error: ErrorFrame) -> None:
        super().__init__(error.message or error.code, code=error.code)
        self.is_accepted = error.is_accepted


class StaleStreamError(StreamResetError):
    """A stream that had served before broke before the first byte of this response: perhaps it was dead already."""

    code = "stale-stream"


class _FramedStream:
    """A stream cut into frames. A cancelled send leaves half a frame behind: then only a reset is left."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.is_usable = True
        self.n_requests = 0
        self._decoder = FrameDecoder()
        self._frames: deque[tuple[FrameType, bytes]] = deque()

    async def send(self, data: bytes) -> None:
        if not self.is_usable:
            raise StreamResetError(f"the stream to {short(self.stream.peer)} holds half a frame or has ended")
        self.is_usable = False
        await self.stream.send(data)
        self.is_usable = True

    async def send_content(self, content: bytes) -> None:
        for piece in data_frames(content):
            await self.send(piece)

    async def send_last(self, content: bytes) -> None:
        pieces = list(data_frames(content))
        last = pieces.pop() if pieces else b""
        for piece in pieces:
            await self.send(piece)
        await self.send(last + frame(FrameType.END))

    async def receive(self) -> tuple[FrameType, bytes] | None:
        """The next frame, None at a clean end between two."""
        while not self._frames:
            data = await self.stream.receive()
            if not data:
                self.is_usable = False
                if not self._decoder.is_between_frames:
                    raise StreamResetError(f"{short(self.stream.peer)} ended the stream within a frame")
                return None
            self._frames.extend(self._decoder.feed(data))
        return self._frames.popleft()

    @property
    def has_frames(self) -> bool:
        return bool(self._frames)


def _head_frame(kind: FrameType, head: RequestHead | ResponseHead) -> bytes:
    payload = encode(head)
    if len(payload) > MAX_HEAD_BYTES:
        raise ProtocolError(f"{kind.name.lower()} head of {len(payload)} bytes, at most {MAX_HEAD_BYTES}")
    return frame(kind, payload)


# -- the caller's end -------------------------------------------------------------------------------------------------


class Call:
    """One request in flight. Made by :meth:`RequestClient.call`."""

    def __init__(self, framed: _FramedStream) -> None:
        self._framed = framed
        self._has_answer = False
        self.is_reused = framed.n_requests > 1
        self.is_sent = False
        self.is_over = False

    @property
    def is_perhaps_stale(self) -> bool:
        """The stream served before and has told nothing of this request: it may have been dead already."""
        return self.is_reused and not self._has_answer

    async def send(self, content: bytes) -> None:
        """Send a part of the body; waits while the peer takes it slower."""
        await self._framed.send_content(content)

    async def end(self, content: bytes = b"") -> None:
        """The body is complete, with ``content`` as its last part: a short one costs no send of its own."""
        await self._framed.send_last(content)
        self.is_sent = True

    async def response(self) -> ResponseHead:
        """Wait for the head of the response.

        Raises:
            CallError: the gate refused or failed; its code says why.
            StaleStreamError: the pooled stream broke before the response began.
            StreamResetError: the peer went away.
            ProtocolError: the peer sent something else.
        """
        kind, payload = await self._next()
        if kind is not FrameType.RESPONSE:
            raise self._misplaced(kind)
        return decode_response_head(payload)

    async def receive(self) -> bytes:
        """The next part of the response's body, ``b""`` at its end. Raises what :meth:`response` raises."""
        while not self.is_over:
            kind, payload = await self._next()
            if kind is FrameType.DATA and payload:
                return payload
            if kind not in {FrameType.DATA, FrameType.END}:
                raise self._misplaced(kind)
            self.is_over = kind is FrameType.END
        return b""

    async def _next(self) -> tuple[FrameType, bytes]:
        try:
            received = await self._framed.receive()
            if received is None:
                raise StreamResetError(f"{short(self._framed.stream.peer)} ended the stream within a call")
        except StreamResetError as error:
            self._framed.is_usable = False
            if self.is_perhaps_stale:
                raise StaleStreamError(str(error)) from error
            raise
        except ProtocolError:
            self._framed.is_usable = False
            raise
        self._has_answer = True
        if received[0] is FrameType.ERROR:
            self.is_over = True
            raise CallError(decode_error(received[1]))
        return received

    def _misplaced(self, kind: FrameType) -> ProtocolError:
        self._framed.is_usable = False
        return ProtocolError(f"{short(self._framed.stream.peer)} sent {kind.name} out of place")


class RequestClient:
    """Calls peers over pooled streams. :meth:`serve` must run meanwhile: it owns the draining of abandoned calls."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._idle: dict[NodeId, list[_FramedStream]] = {}
        self._n_busy: Counter[NodeId] = Counter()
        self._nursery: trio.Nursery | None = None
        mesh.on_connection(self._on_connection)
        mesh.on_path(self._drop_idle)

    async def serve(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Drain abandoned calls until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            for peer in list(self._idle):
                self._drop_idle(peer)

    @asynccontextmanager
    async def call(self, peer: NodeId, head: RequestHead) -> AsyncIterator[Call]:
        """Begin a request; leaving the block before the response's end cancels it.

        Raises:
            UnavailableError: MAX_CALLS_PER_PEER calls to this peer are in flight.
            PeerError: no connection to ``peer``, or it broke.
            DeadlineError: the stream did not open in time.
        """
        if self._n_busy[peer] >= MAX_CALLS_PER_PEER:
            raise UnavailableError(f"{MAX_CALLS_PER_PEER} calls to {short(peer)} are in flight", code="too-many-calls")
        self._n_busy[peer] += 1
        framed = None
        call = None
        try:
            framed = await self._begin(peer, _head_frame(FrameType.REQUEST, head))
            call = Call(framed)
            yield call
        finally:
            self._n_busy[peer] -= 1
            self._n_busy += Counter()  # drops peers at zero
            if framed is not None and call is not None:
                self._give_back(peer, framed, call)

    async def _begin(self, peer: NodeId, head: bytes) -> _FramedStream:
        """A stream on which the head went out: an idle one that still takes it, else a new one."""
        while idle := self._idle.get(peer):
            framed = idle.pop()
            try:
                return await _start(framed, head)
            except StreamResetError:
                continue
        return await _start(_FramedStream(await self._mesh.open(peer, HTTP_PROTOCOL)), head)

    def _give_back(self, peer: NodeId, framed: _FramedStream, call: Call) -> None:
        if call.is_over and call.is_sent and framed.is_usable:
            self._keep(peer, framed)
        elif framed.is_usable and self._nursery is not None:
            self._nursery.start_soon(self._drain, peer, framed, call)
        else:
            framed.stream.reset()

    def _keep(self, peer: NodeId, framed: _FramedStream) -> None:
        idle = self._idle.setdefault(peer, [])
        is_full = len(idle) >= MAX_IDLE_STREAMS_PER_PEER
        if framed.has_frames or framed.stream.is_superseded or is_full or peer not in self._mesh.peers():
            framed.stream.reset()
        else:
            idle.append(framed)

    async def _drain(self, peer: NodeId, framed: _FramedStream, call: Call) -> None:
        """Cancel and wait for the end of the call, so that its stream can serve again."""
        is_clean = False
        try:
            with trio.move_on_after(DRAIN_TIMEOUT_S):  # what is lost: the stream, which is reset
                await framed.send(frame(FrameType.CANCEL))
                while not call.is_over and (received := await framed.receive()) is not None:
                    call.is_over = received[0] in {FrameType.END, FrameType.ERROR}
                is_clean = call.is_over
        except PeerError:
            pass  # it broke: reset below
        finally:
            if is_clean and framed.is_usable:
                self._keep(peer, framed)
            else:
                framed.stream.reset()

    def _on_connection(self, peer: NodeId, is_up: bool) -> None:
        if not is_up:
            self._drop_idle(peer)

    def _drop_idle(self, peer: NodeId) -> None:
        for framed in self._idle.pop(peer, []):
            framed.stream.reset()


async def _start(framed: _FramedStream, head: bytes) -> _FramedStream:
    try:
        await framed.send(head)
    except BaseException:
        framed.stream.reset()
        raise
    framed.n_requests += 1
    return framed


# -- the gate's end ---------------------------------------------------------------------------------------------------


class IncomingCall:
    """One request as its handler sees it. Cancelled where the caller gives up or goes away."""

    def __init__(self, framed: _FramedStream, head: RequestHead) -> None:
        self._framed = framed
        self.peer: NodeId = framed.stream.peer
        self.head = head
        self.scope = trio.CancelScope()
        self.body_in, self._body = trio.open_memory_channel[bytes](MAX_BODY_FRAMES)
        self.is_body_over = False
        self.is_answered = False

    async def receive(self) -> bytes:
        """The next part of the request's body, ``b""`` at its end."""
        try:
            return await self._body.receive()
        except trio.EndOfChannel:
            return b""

    async def respond(self, head: ResponseHead) -> None:
        """Send the head of the response."""
        await self._framed.send(_head_frame(FrameType.RESPONSE, head))

    async def send(self, content: bytes) -> None:
        """Send a part of the response's body; waits while the caller takes it slower."""
        await self._framed.send_content(content)

    async def end(self, content: bytes = b"") -> None:
        """The response is complete, with ``content`` as its last part: a short one costs no send of its own."""
        await self._framed.send_last(content)
        self.is_answered = True

    async def fail(self, error: ErrorFrame) -> None:
        """End the response with an error, at whatever point it is."""
        await self._framed.send(frame(FrameType.ERROR, encode(error)))
        self.is_answered = True

    def close(self) -> None:
        """The handler is done: the rest of the body has no reader."""
        self._body.close()


class _Gate:
    """Serves the calls of one stream, one after another: a task that reads frames, and one that runs handlers."""

    def __init__(self, stream: Stream, handle: Callable[[IncomingCall], Awaitable[None]]) -> None:
        self._framed = _FramedStream(stream)
        self._handle = handle
        self._call: IncomingCall | None = None
        self._begin, self._calls = trio.open_memory_channel[IncomingCall](1)

    async def serve(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read, nursery.cancel_scope)
            async for call in self._calls:
                await self._answer(call)
                if not self._framed.is_usable:
                    break
            nursery.cancel_scope.cancel()

    async def _read(self, stream_scope: trio.CancelScope) -> None:
        """Hand frames on until the stream ends; then whatever handler still runs is cancelled."""
        try:
            while (received := await self._framed.receive()) is not None:
                await self._on_frame(*received)
        finally:
            stream_scope.cancel()

    async def _on_frame(self, kind: FrameType, payload: bytes) -> None:
        call = self._call
        if call is None or (call.is_answered and call.is_body_over):
            if kind is FrameType.REQUEST:
                self._call = IncomingCall(self._framed, decode_request_head(payload))
                await self._begin.send(self._call)
                return
            if kind is FrameType.CANCEL:
                return
        elif kind is FrameType.DATA and not call.is_body_over:
            try:
                if payload:
                    await call.body_in.send(payload)
            except trio.BrokenResourceError:
                pass  # the handler is done and reads no more
            return
        elif kind in {FrameType.END, FrameType.CANCEL}:
            call.is_body_over = True
            call.body_in.close()
            if kind is FrameType.CANCEL and not call.is_answered:
                call.scope.cancel()
            return
        raise ProtocolError(f"{short(self._framed.stream.peer)} sent {kind.name} out of place")

    async def _answer(self, call: IncomingCall) -> None:
        reason = ErrorFrame(GateCode.INTERNAL, "the handler ended without an answer")
        with call.scope:
            try:
                await self._handle(call)
            except StreamResetError:
                raise
            except Exception as error:  # noqa: BLE001 - the wall of requests
                log.error("handler.fail", peer=short(call.peer), request=call.head.request_id, exc_info=error)
                reason = ErrorFrame(GateCode.INTERNAL, "the gate failed")
        call.close()
        if call.scope.cancelled_caught:
            reason = ErrorFrame(GateCode.CANCELLED, "cancelled by the caller")
        if not call.is_answered and self._framed.is_usable:
            await call.fail(reason)


def request_handler(handle: Callable[[IncomingCall], Awaitable[None]]) -> StreamHandler:
    """A stream handler that serves the calls of each stream with ``handle``, which is cancelled on CANCEL or reset."""

    async def serve(stream: Stream) -> None:
        await _Gate(stream, handle).serve()

    return serve
