"""What the mesh offers to the floors above, whatever library carries it.

:class:`Mesh` and :class:`Stream` are Protocols with two users each: :mod:`tela.net.libp2p` and the in-memory mesh of
:mod:`tela.net.memory`; one conformance suite runs over both. Addresses are libp2p multiaddrs as text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import base58

from tela.errors import ConfigError
from tela.record import NodeId

DIAL_TIMEOUT_S: Final = 10.0
OPEN_TIMEOUT_S: Final = 10.0
HANDSHAKE_TIMEOUT_S: Final = 10.0

# libp2p peer id of an Ed25519 key: identity multihash (0x00, 36 bytes) of the key's protobuf (type 1, 32 bytes).
# Source: libp2p specs, peer-ids/peer-ids.md.
_PEER_ID_PREFIX: Final = bytes.fromhex("002408011220")


class Stream(Protocol):
    """A reliable, ordered, bidirectional byte stream to one peer. One reader and one writer at a time."""

    @property
    def peer(self) -> NodeId:
        """The key that the peer proved to hold."""
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

    async def disconnect(self, peer: NodeId) -> None:
        """Close every connection to ``peer``."""
        ...

    def on_connection(self, listener: Callable[[NodeId, bool], None]) -> None:
        """Call ``listener(peer, is_up)`` when a peer's first connection comes up or its last one goes down."""
        ...


def peer_id(node: NodeId) -> str:
    """The libp2p peer id of a node key, as in ``/p2p/12D3Koo...``."""
    return str(base58.b58encode(_PEER_ID_PREFIX + node), "ascii")


def node_of_peer_id(text: str) -> NodeId:
    """The node key inside an Ed25519 peer id.

    Raises:
        ConfigError: not the peer id of an Ed25519 key.
    """
    try:
        raw = base58.b58decode(text)
    except ValueError as error:
        raise ConfigError(f"not a peer id: {text[:64]}") from error
    if len(raw) != len(_PEER_ID_PREFIX) + 32 or not raw.startswith(_PEER_ID_PREFIX):
        raise ConfigError(f"not the peer id of an Ed25519 key: {text[:64]}")
    return NodeId(raw[len(_PEER_ID_PREFIX) :])


def node_of_address(address: str) -> NodeId:
    """The peer that ``/ip4/192.0.2.1/tcp/4001/p2p/12D3Koo...`` names.

    Raises:
        ConfigError: the form is not ``/<ip4|ip6|dns4|dns6|dns>/HOST/tcp/PORT/p2p/PEER_ID``.
    """
    parts = address.split("/")
    well_formed = (
        len(parts) == 7
        and parts[0] == ""
        and parts[1] in {"ip4", "ip6", "dns", "dns4", "dns6"}
        and parts[3] == "tcp"
        and parts[4].isdecimal()
        and int(parts[4]) < 65_536
        and parts[5] == "p2p"
    )
    if not well_formed:
        raise ConfigError(f"malformed address {address[:128]}", hint="the form is /ip4/192.0.2.1/tcp/4001/p2p/PEER_ID")
    return node_of_peer_id(parts[6])


def node_of_addresses(addresses: Sequence[str]) -> NodeId:
    """The one peer that all ``addresses`` name.

    Raises:
        ConfigError: none given, one is malformed, or they name several peers.
    """
    nodes = {node_of_address(address) for address in addresses}
    if len(nodes) != 1:
        raise ConfigError(f"{len(addresses)} addresses name {len(nodes)} peers instead of one")
    return nodes.pop()


def host_and_port(address: str) -> tuple[str, int]:
    """Where a well-formed multiaddr points: IP address or DNS name, and TCP port."""
    parts = address.split("/")
    return parts[2], int(parts[4])
