"""The gate: hands requests from the mesh to this node's own engines on loopback, and to nothing else.

It checks who calls, lets through the inference paths alone, and splices: content goes on as it comes, in both
directions, and ends exactly where the engine ended it. There is no limit on requests in flight: the engine batches.

A body that fits into REPLAYABLE_BYTES is taken in whole and goes out in one piece on a pooled connection; should the
engine have closed that one in the very moment, it can be sent again. A longer one streams over a fresh connection while
the answer is read, since engines refuse long bodies before they have read them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from tela import observe
from tela.engine.http1 import BodyFraming, ForwardError, ResponseParser, content_length, malformed, render_request_head
from tela.engine.report import Endpoint
from tela.engine.upstream import EngineConnection, EnginePool
from tela.identity import CLOCK_SKEW_S
from tela.net.inflight import InFlight
from tela.observe import log
from tela.record import NodeId, short
from tela.wire import Claim, ErrorFrame, GateCode, RequestHead, ResponseHead

REPLAYABLE_BYTES: Final = 64 * 1024
"""Fits into the buffers of a loopback socket, so that sending it never waits for an engine that answers early."""
STALE_WINDOW_S: Final = 1.0
"""A pooled connection that the engine had closed already breaks at once. One that breaks later was working on the
request: sending that again would double the work (faults.md D05)."""
MAX_CLAIMS: Final = 4_096
"""Claims known to be genuine. Each ingress signs one a minute per key, so this is hundreds of ingresses."""
_ALLOWED_PATH: Final = re.compile(
    r"/v1/(chat/completions|completions|embeddings|responses|rerank|score|(audio|images)/[a-z]+)"
    r"|/(tokenize|detokenize|rerank|score)"
)
"""Inference alone: the engines' own admin paths (load_lora_adapter, sleep, shutdown ...) are not for the mesh."""


class MeshCall(Protocol):
    """One request from the mesh: what the gate needs of :class:`tela.net.requests.IncomingCall`."""

    @property
    def peer(self) -> NodeId:
        """The caller, as the mesh proved it."""
        ...

    @property
    def head(self) -> RequestHead:
        """What is asked."""
        ...

    async def receive(self) -> bytes:
        """The next part of the body, ``b""`` at its end."""
        ...

    async def respond(self, head: ResponseHead) -> None:
        """Send the response's head."""
        ...

    async def send(self, content: bytes) -> None:
        """Send a part of the response's body."""
        ...

    async def end(self, content: bytes = b"") -> None:
        """The response is complete, with ``content`` as its last part."""
        ...

    async def fail(self, error: ErrorFrame) -> None:
        """End the response with an error."""
        ...


@dataclass(frozen=True, slots=True)
class _Body:
    """What of a request's body was read ahead; ``length`` of all of it, None where nobody knows."""

    start: bytes
    is_whole: bool
    length: int | None


class _StaleConnectionError(ForwardError):
    """A pooled connection turned out to be closed; the request may be sent again."""


class Gate:
    """Serves calls from the mesh with the engines of this node."""

    def __init__(
        self,
        *,
        endpoint_of: Callable[[int], Endpoint | None],
        is_genuine: Callable[[Claim], bool],
        now: Callable[[], float],
    ) -> None:
        """Args: where a ready instance answers, whether a claim's signature is good, unix seconds."""
        self._endpoint_of = endpoint_of
        self._is_genuine = is_genuine
        self._now = now
        self._is_draining = False
        self._claims: set[Claim] = set()
        self._pools: dict[int, EnginePool] = {}
        self.in_flight = InFlight(observe.gate_inflight)

    async def handle(self, call: MeshCall) -> None:
        """Serve one call to its end. Cancelling this closes the engine's connection at once."""
        result = "error"
        try:
            endpoint = self._admit(call)
            with self.in_flight.scope():
                await self._forward_in_time(call, endpoint)
            result = "ok"
        except ForwardError as error:
            result = "error" if error.is_accepted else "refused"
            log.info("gate.refuse", peer=short(call.peer), request=call.head.request_id, code=error.code)
            await call.fail(ErrorFrame(error.code, str(error), error.is_accepted))
        except trio.Cancelled:
            result = "cancelled"
            raise
        finally:
            observe.gate_requests.labels(result).inc()

    def drain(self) -> None:
        """Refuse new calls from now on; those in flight go on."""
        self._is_draining = True

    def close(self) -> None:
        """Close idle connections to engines."""
        for pool in self._pools.values():
            pool.close()

    # -- who may ask what --------------------------------------------------------------------------------------------

    def _admit(self, call: MeshCall) -> Endpoint:
        head = call.head
        if self._is_draining:
            raise _refusal(GateCode.DRAINING, "this node is draining")
        self._check_claim(head.claim, call.peer)
        if head.method != "POST" or not _ALLOWED_PATH.fullmatch(head.target.partition("?")[0]):
            raise _refusal(GateCode.REFUSED, f"{head.method[:16]} {head.target[:64]} is not forwarded")
        endpoint = self._endpoint_of(head.instance)
        if endpoint is None:
            raise _refusal(GateCode.NO_INSTANCE, f"instance {head.instance} is not ready")
        return endpoint

    def _check_claim(self, claim: Claim, peer: NodeId) -> None:
        if claim.ingress != peer:
            raise _refusal(GateCode.REFUSED, "the claim is of another ingress")
        if self._now() > claim.expires_unix_s + CLOCK_SKEW_S:
            raise _refusal(GateCode.REFUSED, "the claim has expired")
        if claim in self._claims:
            return
        if not self._is_genuine(claim):
            raise _refusal(GateCode.REFUSED, "the claim's signature does not match")
        if len(self._claims) >= MAX_CLAIMS:
            self._claims.clear()  # genuine ones are soon checked again
        self._claims.add(claim)

    # -- forwarding --------------------------------------------------------------------------------------------------

    async def _forward_in_time(self, call: MeshCall, endpoint: Endpoint) -> None:
        limit_s = call.head.deadline_s
        with trio.move_on_after(limit_s if limit_s > 0 else math.inf) as scope:  # lost: an answer that came too late
            await self._forward(call, self._pool(call.head.instance, endpoint))
        if scope.cancelled_caught:
            raise ForwardError(GateCode.DEADLINE, f"no complete answer within {limit_s:g} s", is_accepted=True)

    def _pool(self, instance: int, endpoint: Endpoint) -> EnginePool:
        pool = self._pools.get(instance)
        if pool is None or pool.endpoint != endpoint:
            if pool is not None:
                pool.close()
            pool = self._pools[instance] = EnginePool(endpoint)
        return pool

    async def _forward(self, call: MeshCall, pool: EnginePool) -> None:
        body = await _read_ahead(call)
        framing = BodyFraming(body.length)
        start = render_request_head(call.head, pool.endpoint, framing) + framing.chunk(body.start)
        reused = pool.take() if body.is_whole else None
        if reused is not None:
            try:
                return await _exchange(call, pool, reused, start)
            except _StaleConnectionError:
                pass  # once more below
        try:
            connection = await pool.connect()
        except ForwardError as error:
            if reused is None:
                raise
            raise ForwardError(GateCode.ENGINE_DISCONNECTED, str(error), is_accepted=True) from error
        if body.is_whole:
            return await _exchange(call, pool, connection, start)
        return await _exchange_streaming(call, connection, start, framing)


def _refusal(code: GateCode, message: str) -> ForwardError:
    return ForwardError(code, message, is_accepted=False)


async def _read_ahead(call: MeshCall) -> _Body:
    """Take the body in, up to REPLAYABLE_BYTES of it."""
    announced = content_length(call.head.headers)
    parts: list[bytes] = []
    size = 0
    while size <= REPLAYABLE_BYTES:
        content = await call.receive()
        if not content:
            if announced is not None and announced != size:
                raise malformed(f"the request's body has {size} bytes, its content-length is {announced}")
            return _Body(b"".join(parts), is_whole=True, length=size)
        parts.append(content)
        size += len(content)
    return _Body(b"".join(parts), is_whole=False, length=announced)


async def _exchange(call: MeshCall, pool: EnginePool, connection: EngineConnection, request: bytes) -> None:
    """Send a whole request and relay its answer."""
    is_reusable = False
    try:
        await connection.send(request)
        is_reusable = await _relay(call, connection)
    finally:
        if is_reusable:
            pool.give_back(connection)
        else:
            connection.close()


async def _exchange_streaming(call: MeshCall, connection: EngineConnection, start: bytes, framing: BodyFraming) -> None:
    """Send the rest of a body while the answer is read; an answer before the body's end makes the rest needless."""

    async def pump() -> None:
        await connection.send(start)
        while content := await call.receive():
            await connection.send(framing.chunk(content))
        await connection.send(framing.end())

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump)
            await _relay(call, connection)
            nursery.cancel_scope.cancel()
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # the first to fail cancelled the other
    finally:
        connection.close()


async def _relay(call: MeshCall, connection: EngineConnection) -> bool:
    """Pass the answer on as it comes; whether the connection is clean afterwards."""
    parser = ResponseParser()
    started_s = trio.current_time()
    is_head_sent = False
    while True:
        data = await connection.receive()
        if not data and parser.is_untouched and _may_be_stale(connection, started_s):
            raise _StaleConnectionError(
                GateCode.ENGINE_DISCONNECTED, "the engine closed an idle connection", is_accepted=True
            )
        content = parser.feed(data) if data else parser.finish()
        if parser.head is not None and not is_head_sent:
            await call.respond(parser.head)
            is_head_sent = True
        if parser.is_complete:
            await call.end(content)  # in one send: a worker that dies after it has answered
            return parser.is_reusable
        if content:
            await call.send(content)


def _may_be_stale(connection: EngineConnection, started_s: float) -> bool:
    return connection.is_reused and trio.current_time() - started_s < STALE_WINDOW_S
