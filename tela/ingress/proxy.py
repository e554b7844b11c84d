"""One attempt: a request to one instance over the mesh, and its answer to the client.

The first byte to the client is the commit, and it waits for the first content of the answer. Before it, a failure is
either *unstarted*, so that somebody else may be asked, or final. After it, a break is shown for what it is: by one
error event and no ``[DONE]`` where an event stream stands between two events, otherwise by breaking the connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import trio

from tela.errors import DeadlineError, PeerError, ProtocolError, StreamResetError, UnavailableError
from tela.ingress import headers, openai
from tela.ingress.framing import Headers
from tela.ingress.http1 import Responder
from tela.ingress.openai import ApiError, StreamTail
from tela.net.requests import Call, CallError, RequestClient
from tela.record import NodeId, short
from tela.wire import GateCode, RequestHead, ResponseHead

CONNECT_TIMEOUT_S: Final = 5.0
"""For a stream to the peer; one hung peer must not hold what others could answer (faults.md E03)."""
DEATH_WAIT_S: Final = 1.0
"""A dying connection resets its streams a moment before it counts as down."""
DEATH_POLL_S: Final = 0.02

HOLD_BYTES: Final = 64 * 1024
"""A plain answer up to this length is held until it is whole: its instance may die within it, and nobody sees it."""
HOLD_S: Final = 15.0
"""How long the head of an event stream waits for its first event: longer, and proxies in between take us for dead."""

_ENDS_WITH_DONE: Final = re.compile(r"/v1/(chat/)?completions")
"""Paths whose event streams tell their end by ``[DONE]`` or ``finish_reason``; others just end."""


Failure = PeerError | DeadlineError | UnavailableError


class UnstartedError(PeerError):
    """The instance surely does not work on the request, and nothing was answered: another one may be asked."""

    code = "unstarted"

    def __init__(self, message: str, *, code: str | None = None, is_dead: bool = False) -> None:
        super().__init__(message, code=code)
        self.is_dead = is_dead


class Answer:
    """The answer to one client, from whichever instance it comes; ``status`` is the engine's."""

    def __init__(self, responder: Responder, path: str, on_first_byte: Callable[[], None]) -> None:
        self._responder = responder
        self._is_done_expected = _ENDS_WITH_DONE.fullmatch(path) is not None
        self._on_first_byte = on_first_byte
        self._tail: StreamTail | None = None  # of an event stream
        self.status = 0
        self.is_broken = False

    @property
    def is_started(self) -> bool:
        """The first byte is out."""
        return self._responder.is_started

    async def relay(self, response: ResponseHead, call: Call, own_headers: Headers) -> None:
        """Pass the answer on as it comes.

        Raises:
            PeerError: it broke; :meth:`break_off` tells the client.
        """
        is_events = headers.is_event_stream(response.headers)
        length = None if is_events else headers.content_length(response.headers)
        shown = [*headers.answered(response.headers, is_events=is_events), *own_headers]
        self._tail = StreamTail() if is_events else None
        self.status = response.status
        opening = await self._hold(call, length)
        await self._responder.start(response.status, shown, length=length)
        self._on_first_byte()
        await self._pass(opening)
        while data := await call.receive():
            await self._pass(data)
        self._check_end()
        await self._responder.end()

    async def _hold(self, call: Call, length: int | None) -> bytes:
        """What goes out together with the head: until then a failure is one before the first byte."""
        if self._tail is not None:
            return await self._first_event(call)
        opening = await call.receive()
        if length is not None and length <= HOLD_BYTES:
            while len(opening) < length and (data := await call.receive()):
                opening += data
        return opening

    async def _first_event(self, call: Call) -> bytes:
        first = b""
        with trio.move_on_after(HOLD_S):  # lost: a death within the prompt's work can no longer be made good
            first = await call.receive()
            if not first:
                self._check_end()
        return first

    async def _pass(self, data: bytes) -> None:
        if self._tail is not None:
            self._tail.feed(data)
        await self._responder.send(data)

    def _check_end(self) -> None:
        """A clean end of the connection is no proof that the engine was finished (faults.md C01)."""
        if self._tail is None or self.status != 200:
            return
        if self._tail.is_empty or (self._is_done_expected and not self._tail.is_finished):
            raise ProtocolError("the engine ended the stream before it was finished")

    async def break_off(self, error: Failure) -> None:
        """End a started answer that cannot be finished; never with a ``[DONE]`` of ours.

        Raises:
            StreamResetError: there is no honest end in band; the server breaks the connection.
        """
        self.is_broken = True
        if self._tail is None or not self._tail.is_between_events:
            raise StreamResetError(str(error)) from error
        code = "deadline_exceeded" if isinstance(error, DeadlineError) else "upstream_disconnected"
        await self._responder.send(openai.error_event(str(error), code))
        await self._responder.end()


class Attempts:
    """Makes attempts over the mesh; ``reachable`` are the peers with a live connection."""

    def __init__(self, client: RequestClient, reachable: Callable[[], frozenset[NodeId]]) -> None:
        self._client = client
        self._reachable = reachable

    async def attempt(
        self,
        peer: NodeId,
        head: RequestHead,
        body: bytes,
        answer: Answer,
        *,
        own_headers: Headers,
        deadline: float,
    ) -> None:
        """Ask one instance and pass its answer on. Being cancelled cancels the request at the peer.

        Args:
            peer: whose instance is asked.
            head: what is asked.
            body: its content.
            answer: where the answer goes.
            own_headers: what the answer says of this ingress.
            deadline: when the caller's time is over, on trio's clock.

        Raises:
            UnstartedError: somebody else may be asked.
            ApiError: 502 or 504, nobody else may be.
            StreamResetError: the answer broke after its start and cannot be ended in band.
        """
        call: Call | None = None
        failure: Failure | None = None
        with trio.CancelScope(deadline=min(deadline, trio.current_time() + CONNECT_TIMEOUT_S)) as limit:
            try:
                async with self._client.call(peer, head) as call:
                    limit.deadline = deadline
                    await call.end(body)
                    await answer.relay(await call.response(), call, own_headers)
            except (PeerError, DeadlineError, UnavailableError) as error:
                failure = error
        if limit.cancelled_caught:
            failure = DeadlineError(f"the time limit of {head.deadline_s:.0f} s passed (X-Tela-Timeout)")
        if failure is None:
            return
        if answer.is_started:
            await answer.break_off(failure)
            return
        raise await self._judge(peer, call, failure) from failure

    async def _judge(self, peer: NodeId, call: Call | None, failure: Failure) -> UnstartedError | ApiError:
        """What a failure before the first byte means."""
        where = f"node {short(peer)}"
        if call is None:
            is_dead = not isinstance(failure, UnavailableError)
            return UnstartedError(f"{where} cannot be reached: {failure}", is_dead=is_dead)
        if isinstance(failure, CallError):
            return _judge_refusal(where, failure)
        if isinstance(failure, DeadlineError):
            return openai.deadline_passed(f"{where}: {failure}")
        if isinstance(failure, StreamResetError):
            return await self._judge_reset(peer, call, where)
        return openai.upstream_failed(f"{where}: {failure}")

    async def _judge_reset(self, peer: NodeId, call: Call, where: str) -> UnstartedError | ApiError:
        if call.is_perhaps_stale:  # when we wrote to it (RFC 9112 section 9.3.1)
            return UnstartedError(f"{where} dropped the stream before it answered")
        if await self._is_down(peer):
            return UnstartedError(f"{where} died before it answered", is_dead=True)
        return openai.upstream_failed(f"{where} broke the stream before it answered")

    async def _is_down(self, peer: NodeId) -> bool:
        with trio.move_on_after(DEATH_WAIT_S) as wait:  # lost: a retry that would have been allowed
            while peer in self._reachable():  # noqa: ASYNC110  the registry of links offers no event, and this is rare
                await trio.sleep(DEATH_POLL_S)
        return not wait.cancelled_caught


def _judge_refusal(where: str, error: CallError) -> UnstartedError | ApiError:
    if not error.is_accepted:
        return UnstartedError(f"{where}: {error}", code=error.code)
    if error.code == GateCode.DEADLINE:
        return openai.deadline_passed(f"{where}: {error}")
    return openai.upstream_failed(f"{where}: {error}")
