"""What the mesh offers to the floors above, whatever library carries it.

:class:`Mesh` and :class:`Stream` are Protocols with two users each: :mod:`tela.net.libp2p` and the in-memory mesh of
:mod:`tela.net.memory`; one conformance suite runs over both. Addresses are those of :mod:`tela.net.multiaddrs`.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from tela.record import NodeId

DIAL_TIMEOUT_S: Final = 10.0
OPEN_TIMEOUT_S: Final = 10.0
HANDSHAKE_TIMEOUT_S: Final = 10.0


class PathKind(enum.StrEnum):
    """How a peer is reached."""

    DIRECT = "direct"
    PUNCHED = "punched"  # direct as well, through the NATs of both sides
    RELAYED = "relayed"


class PathView(NamedTuple):
    """The best connection to a peer."""

    kind: PathKind
    rtt_s: float | None = None  # of the last heartbeat; None before the first was answered
    relay: NodeId | None = None  # through whom it is relayed
    is_dialled: bool = True  # by us


class Stream(Protocol):
    """A reliable, ordered, bidirectional byte stream to one peer. One reader and one writer at a time."""

    @property
    def peer(self) -> NodeId:
        """The key that the peer proved to hold."""
        ...

    @property
    def is_superseded(self) -> bool:
        """A better connection to the peer is up: it serves as ever, and the next stream goes another way."""
        ...

    async def send(self, data: bytes) -> None:
        """Send all of ``data``; waits while the peer reads slower. A cancelled call may have sent a part.

        Raises:
            StreamResetError: the stream is broken.
        """
        ...

    async def receive(self) -> bytes:
        """The next bytes, ``b""`` at the peer's clean end. A cancelled call has taken nothing.

        Raises:
            StreamResetError: the stream broke before its end; what had arrived before was delivered.
        """
        ...

    async def finish(self) -> None:
        """Half-close: the peer reads a clean end after what was sent. Receiving goes on."""
        ...

    def reset(self) -> None:
        """Break the stream at once, both ways; the peer sees StreamResetError. Safe to call twice, never blocks."""
        ...


StreamHandler = Callable[[Stream], Awaitable[None]]
"""Serves one inbound stream. The mesh resets the stream when the handler returns or raises."""


class Mesh(Protocol):
    """A node's end of the mesh."""

    @property
    def node(self) -> NodeId:
        """Our own key."""
        ...

    @property
    def addresses(self) -> Sequence[str]:
        """Multiaddrs that we listen on, with our peer id; empty for outbound-only nodes."""
        ...

    async def dial(self, addresses: Sequence[str]) -> NodeId:
        """Connect to the peer at one of ``addresses``, all of one peer; returns at once where a link is up already.

        Raises:
            DeadlineError: DIAL_TIMEOUT_S passed.
            PeerError: no address answered; the message holds the last reason.
        """
        ...

    async def open(self, peer: NodeId, protocol: str) -> Stream:
        """Open a stream over an existing connection, whichever side dialled it.

        Raises:
            PeerError: no connection, or the peer does not speak ``protocol`` to us.
            DeadlineError: OPEN_TIMEOUT_S passed.
        """
        ...

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """Serve inbound streams of ``protocol``. An exception in a handler ends its own stream, nothing else."""
        ...

    def peers(self) -> frozenset[NodeId]:
        """Peers with a live connection, admitted or not."""
        ...

    def paths(self) -> Mapping[NodeId, PathView]:
        """How each of them is reached; where there are several connections, by the one that is used."""
        ...

    async def disconnect(self, peer: NodeId) -> None:
        """Close every connection to ``peer``."""
        ...

    def on_connection(self, listener: Callable[[NodeId, bool], None]) -> None:
        """Call ``listener(peer, is_up)`` when a peer's first connection comes up or its last one goes down."""
        ...

    def on_path(self, listener: Callable[[NodeId], None]) -> None:
        """Call ``listener(peer)`` when streams to a peer become superseded."""
        ...
