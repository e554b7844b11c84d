"""Circuits as their two ends see them: reserving at a hub, calling through it, being called. Bytes in them are sealed.

A circuit is a stream to the relay behind which another node answers. Noise runs end to end inside, so a relay sees
ciphertext only, and one that leads to somebody else than was asked for is found out by the handshake.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

import trio

from tela.errors import PeerError, ProtocolError, RefusedError
from tela.net.bounds import deadline
from tela.net.circuit import (
    HOP_PROTOCOL,
    MAX_MESSAGE_BYTES,
    STOP_PROTOCOL,
    Kind,
    Message,
    Status,
    decode_message,
    encode_message,
    status_text,
)
from tela.net.endpoints import NOWHERE, Endpoint
from tela.net.messages import receive_cut
from tela.net.multiaddrs import Address
from tela.net.protobuf import MessageCutter
from tela.net.transport import HANDSHAKE_TIMEOUT_S, Stream
from tela.observe import log
from tela.record import NodeId, short

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings trio-stubs, which hide trio's own types from mypy

RENEWALS: Final = 2
"""A reservation is renewed when one of so many parts of its time is over."""
MIN_RENEWAL_S: Final = 5.0
"""However short a time a relay grants."""


class Carrier(Protocol):
    """The mesh, as far as circuits use it."""

    def peers(self) -> frozenset[NodeId]:
        """See Mesh."""
        ...

    async def open(self, peer: NodeId, protocol: str) -> Stream:
        """See Mesh."""
        ...

    async def dial_relay(self, address: Address) -> None:
        """Connect to the relay whose address is the front of ``address``."""
        ...

    async def accept(self, bytes_stream: trio.abc.Stream, remote: Endpoint, *, relay: NodeId) -> None:
        """Serve an inbound connection through ``relay`` until it is over."""
        ...


async def receive_message(stream: Stream, protocol: str) -> tuple[Message, bytes]:
    """One message of ``protocol``, and what came behind it.

    Raises:
        ProtocolError: it is none, or the peer ended before.
        StreamResetError: the stream broke.
    """
    cutter = MessageCutter(MAX_MESSAGE_BYTES)
    body = await receive_cut(stream, cutter)
    return decode_message(protocol, body), cutter.rest


class CircuitStream(trio.abc.Stream):
    """A stream of the mesh as a connection of its own: what Noise and Yamux run over once more."""

    def __init__(self, stream: Stream, received: bytes) -> None:
        """``received`` came behind the last message of the relay's protocol."""
        self._stream = stream
        self._received = memoryview(received)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Raises trio.BrokenResourceError where the circuit broke."""
        try:
            await self._stream.send(bytes(data))
        except PeerError as error:
            raise trio.BrokenResourceError(str(error)) from error

    async def wait_send_all_might_not_block(self) -> None:
        """Windows below do the waiting."""
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Raises trio.BrokenResourceError where the circuit broke."""
        if not self._received:
            try:
                self._received = memoryview(await self._stream.receive())
            except PeerError as error:
                raise trio.BrokenResourceError(str(error)) from error
        data, self._received = self._received[:max_bytes], self._received[max_bytes or len(self._received) :]
        return bytes(data)

    async def aclose(self) -> None:
        """Break the circuit."""
        self._stream.reset()
        await trio.lowlevel.checkpoint()


class Circuits:
    """Calls out and in, and the reservations that make the latter possible.

    Args:
        mesh: to open streams over.
    """

    def __init__(self, mesh: Carrier) -> None:
        self._mesh = mesh
        self.introduce: Callable[[NodeId], Awaitable[object]] = _introduce_to_nobody
        """Makes a relay that was dialled for a call know us: admission, where there is one."""
        self.on_change: Callable[[], None] = lambda: None
        self._reserved: dict[NodeId, None] = {}

    @property
    def reserved(self) -> tuple[NodeId, ...]:
        """Relays through which we can be called, the first one first."""
        return tuple(self._reserved)

    async def connect(self, address: Address) -> CircuitStream:
        """Call a node through its relay.

        Raises:
            RefusedError: the relay does not call it; ``code`` is its reason.
            PeerError: the relay does not answer, or answers what it should not.
        """
        assert address.relay is not None
        if address.relay not in self._mesh.peers():
            await self._mesh.dial_relay(address)
            await self.introduce(address.relay)
        stream = await self._mesh.open(address.relay, HOP_PROTOCOL)
        try:
            answer, rest = await _ask(stream, HOP_PROTOCOL, Message(Kind.CONNECT, address.node))
            if answer.status != Status.OK:
                raise RefusedError(
                    f"relay {short(address.relay)} does not reach {short(address.node)}: {status_text(answer.status)}",
                    code="relay-refused",
                )
        except BaseException:
            stream.reset()
            raise
        return CircuitStream(stream, rest)

    async def hold(
        self, relay: NodeId, now: Callable[[], float], *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Keep a reservation at a relay that we are connected to; run it for as long as the connection lasts.

        Raises:
            RefusedError: the relay takes no reservation of ours.
            PeerError: it went away.
            DeadlineError: it did not answer.
        """
        try:
            while True:
                expires_unix_s = await self._reserve(relay)
                if relay not in self._reserved:
                    self._reserved[relay] = None
                    self.on_change()
                    task_status.started()
                await trio.sleep(max(MIN_RENEWAL_S, (expires_unix_s - now()) / RENEWALS))
        finally:
            if relay in self._reserved:
                del self._reserved[relay]
                self.on_change()

    async def _reserve(self, relay: NodeId) -> int:
        """The relay remembers us until the unix time that this returns, or until the connection ends."""
        with deadline(HANDSHAKE_TIMEOUT_S, f"reserving at {short(relay)}"):
            stream = await self._mesh.open(relay, HOP_PROTOCOL)
            try:
                answer, _ = await _ask(stream, HOP_PROTOCOL, Message(Kind.RESERVE))
                await stream.finish()
            finally:
                stream.reset()
        if answer.status != Status.OK:
            raise RefusedError(
                f"relay {short(relay)} takes no reservation: {status_text(answer.status)}", code="relay-refused"
            )
        return answer.expires_unix_s

    async def serve_stop(self, stream: Stream) -> None:
        """A relay says that somebody calls: its connection is served for as long as it lasts."""
        with deadline(HANDSHAKE_TIMEOUT_S, f"a call through {short(stream.peer)}"):
            call, rest = await receive_message(stream, STOP_PROTOCOL)
            status = Status.OK if call.kind is Kind.CONNECT else Status.UNEXPECTED_MESSAGE
            await stream.send(encode_message(STOP_PROTOCOL, Message(Kind.STATUS, status=status)))
        if status is not Status.OK or call.peer is None:
            await stream.finish()
            return
        log.debug("circuit.accept", peer=short(call.peer), relay=short(stream.peer))
        await self._mesh.accept(CircuitStream(stream, rest), NOWHERE, relay=stream.peer)


async def _introduce_to_nobody(_relay: NodeId) -> None:
    pass


async def _ask(stream: Stream, protocol: str, message: Message) -> tuple[Message, bytes]:
    await stream.send(encode_message(protocol, message))
    answer, rest = await receive_message(stream, protocol)
    if answer.kind is not Kind.STATUS:
        raise ProtocolError(f"relay {short(stream.peer)} answers {answer.kind.value} where a status is due")
    return answer, rest


def circuit_addresses(own: NodeId, reserved: Mapping[NodeId, tuple[Address, ...]]) -> tuple[str, ...]:
    """Where we can be called: the addresses of the relays that hold a reservation of ours, made to lead to us."""
    return tuple(
        str(address._replace(node=own, relay=relay))
        for relay, addresses in reserved.items()
        for address in addresses
        if address.relay is None
    )
