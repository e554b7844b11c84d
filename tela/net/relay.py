"""A hub as relay: who reserved, who may call whom, and the two streams that it joins. Circuit relay v2 without limits.

A reservation lasts as long as its connection (faults.md G01): what died is forgotten at once, and a thousand reconnects
leave nothing. Fairness among circuits is that of the connections below: Yamux gives each stream its turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import trio

from tela.errors import PeerError, ProtocolError, TelaError
from tela.net.bounds import deadline
from tela.net.circuit import HOP_PROTOCOL, STOP_PROTOCOL, Kind, Message, Status, encode_message
from tela.net.circuits import receive_message
from tela.net.transport import HANDSHAKE_TIMEOUT_S, Mesh, PathKind, Stream
from tela.observe import circuits, log, reservations
from tela.record import NodeId, short

RESERVATION_S: Final = 3600
"""What is promised; renewed as often as the peer likes."""
MAX_RESERVATIONS: Final = 4_096
"""As many members as a hub has connections for; each costs some 100 bytes."""
MAX_CIRCUITS: Final = 4_096
MAX_CIRCUITS_PER_PEER: Final = 256
"""Of one member, as caller and as called: it must not use up the hub's."""
CALL_TIMEOUT_S: Final = HANDSHAKE_TIMEOUT_S
"""For the called node to take the call."""


class Relay:
    """The relay's side. Serve :meth:`serve_hop` to members only; ``now`` is unix seconds."""

    def __init__(self, mesh: Mesh, *, now: Callable[[], float]) -> None:
        self._mesh = mesh
        self._now = now
        self._reserved: set[NodeId] = set()
        self._circuits: Counter[NodeId] = Counter()
        self._n_circuits = 0
        mesh.on_connection(self._on_connection)

    @property
    def n_reservations(self) -> int:
        """Nodes that can be called."""
        return len(self._reserved)

    @property
    def n_circuits(self) -> int:
        """Circuits that stand."""
        return self._n_circuits

    async def serve_hop(self, stream: Stream) -> None:
        """One request: a reservation, or a circuit for as long as it lasts."""
        try:
            with deadline(HANDSHAKE_TIMEOUT_S, f"a request of {short(stream.peer)}"):
                request, rest = await receive_message(stream, HOP_PROTOCOL)
        except ProtocolError:
            await _answer(stream, Status.MALFORMED_MESSAGE)
            raise
        if request.kind is Kind.RESERVE:
            await self._reserve(stream)
        elif request.kind is Kind.CONNECT and request.peer is not None:
            await self._connect(stream, request.peer, rest)
        else:
            await _answer(stream, Status.UNEXPECTED_MESSAGE)

    async def _reserve(self, stream: Stream) -> None:
        status = self._judge_reservation(stream.peer)
        if status is Status.OK:
            self._reserved.add(stream.peer)
            reservations.set(len(self._reserved))
        await _answer(stream, status, expires_unix_s=int(self._now()) + RESERVATION_S)

    def _judge_reservation(self, peer: NodeId) -> Status:
        path = self._mesh.paths().get(peer)
        if path is None or path.kind is PathKind.RELAYED:
            return Status.PERMISSION_DENIED  # gone already, or here through another relay: no chains
        is_known = peer in self._reserved
        return Status.OK if is_known or len(self._reserved) < MAX_RESERVATIONS else Status.RESERVATION_REFUSED

    async def _connect(self, stream: Stream, called: NodeId, rest: bytes) -> None:
        status = self._judge_call(stream.peer, called)
        if status is not Status.OK:
            await _answer(stream, status)
            return
        with self._count(stream.peer, called):
            try:
                onward, early = await self._call(stream.peer, called)
            except TelaError as error:
                log.info("circuit.refuse", peer=short(stream.peer), called=short(called), reason=str(error))
                await _answer(stream, Status.CONNECTION_FAILED)
                return
            try:
                await stream.send(encode_message(HOP_PROTOCOL, Message(Kind.STATUS, status=Status.OK)))
                await splice(stream, rest, onward, early)
            finally:
                onward.reset()

    def _judge_call(self, caller: NodeId, called: NodeId) -> Status:
        if called not in self._reserved:
            return Status.NO_RESERVATION
        if called == caller:
            return Status.PERMISSION_DENIED
        is_full = max(self._circuits[caller], self._circuits[called]) >= MAX_CIRCUITS_PER_PEER
        return Status.RESOURCE_LIMIT_EXCEEDED if is_full or self._n_circuits >= MAX_CIRCUITS else Status.OK

    @contextmanager
    def _count(self, caller: NodeId, called: NodeId) -> Iterator[None]:
        """Count a circuit for as long as the block runs."""
        self._change(caller, called, 1)
        try:
            yield
        finally:
            self._change(caller, called, -1)

    def _change(self, caller: NodeId, called: NodeId, by: int) -> None:
        self._n_circuits += by
        for node in (caller, called):
            self._circuits[node] += by
        self._circuits += Counter()  # drops nodes at zero
        circuits.set(self._n_circuits)

    async def _call(self, caller: NodeId, called: NodeId) -> tuple[Stream, bytes]:
        with deadline(CALL_TIMEOUT_S, f"calling {short(called)}"):
            onward = await self._mesh.open(called, STOP_PROTOCOL)
            try:
                await onward.send(encode_message(STOP_PROTOCOL, Message(Kind.CONNECT, caller)))
                answer, early = await receive_message(onward, STOP_PROTOCOL)
                if answer.kind is not Kind.STATUS or answer.status != Status.OK:
                    raise PeerError(f"{short(called)} does not take the call")
            except BaseException:
                onward.reset()
                raise
        return onward, early

    def _on_connection(self, peer: NodeId, is_up: bool) -> None:
        if not is_up and peer in self._reserved:
            self._reserved.discard(peer)
            reservations.set(len(self._reserved))


async def splice(one: Stream, early_one: bytes, other: Stream, early_other: bytes) -> None:
    """Carry bytes both ways until both have ended, or one breaks; a slow reader slows its writer.

    Args:
        one: a stream.
        early_one: what came from it already.
        other: the stream to join it with.
        early_other: what came from that already.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_pump, one, early_one, other)
        nursery.start_soon(_pump, other, early_other, one)


async def _pump(source: Stream, early: bytes, sink: Stream) -> None:
    if early:
        await sink.send(early)
    while data := await source.receive():
        await sink.send(data)
    await sink.finish()


async def _answer(stream: Stream, status: Status, *, expires_unix_s: int = 0) -> None:
    granted = expires_unix_s if status is Status.OK else 0
    await stream.send(encode_message(HOP_PROTOCOL, Message(Kind.STATUS, status=status, expires_unix_s=granted)))
    await stream.finish()
    with trio.move_on_after(HANDSHAKE_TIMEOUT_S):  # lost: the answer to a peer that does not read
        while await stream.receive():  # to return is to reset, and the peer must have read it
            pass
