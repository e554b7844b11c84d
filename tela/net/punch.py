"""Direct connections through NATs: the messages of DCUtR, whom to dial on its word, and whom to try when.

Two nodes that talk over a relay tell each other where a hub sees them, and open a connection to each other at the same
moment: each side's first packet makes its own NAT let the other's through. It works where a NAT maps all connections
of one port to the same port outside, and not where it maps each anew. Source: libp2p specs, relay/DCUtR.md.
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from tela.errors import PeerError, ProtocolError
from tela.net.endpoints import Endpoint, reached_ip
from tela.net.protobuf import decode_fields, encode_fields, integer, varint
from tela.record import NodeId

PUNCH_PROTOCOL: Final = "/libp2p/dcutr"
MAX_MESSAGE_BYTES: Final = 4096
MAX_ENDPOINTS: Final = 4
"""Of one side: where a hub sees it, and its own network."""
RETRY_S: Final = 60.0
"""After a failure; doubled each time, up to MAX_RETRY_S. NATs seldom change their ways."""
MAX_RETRY_S: Final = 3600.0

_TYPE, _ADDRESSES = 1, 2
_TCP: Final = bytes([0x06])
_IPS: Final = {4: bytes([0x04]), 6: bytes([0x29])}
"""Codes of multiaddrs, which precede the bytes of an IP address; _TCP precedes those of a port."""


class Kind(enum.IntEnum):
    """What a message is."""

    CONNECT = 100
    SYNC = 300


class Message(NamedTuple):
    """CONNECT says where its sender can be seen, SYNC that it is time to dial."""

    kind: Kind
    endpoints: tuple[Endpoint, ...] = ()


def encode_message(message: Message) -> bytes:
    """On the wire, with its length in front."""
    addresses = ((_ADDRESSES, _raw(endpoint)) for endpoint in message.endpoints[:MAX_ENDPOINTS])
    body = encode_fields((_TYPE, message.kind), *addresses)
    return varint(len(body)) + body


def decode_message(body: bytes) -> Message:
    """A message without its length; addresses that are not plain TCP, or too many, are passed over.

    Raises:
        ProtocolError: it is none.
    """
    fields = decode_fields(body)
    number = integer(fields, _TYPE)
    if number not in set(Kind):
        raise ProtocolError(f"a message of unknown type {number}")
    found = (_endpoint(raw) for raw in fields.get(_ADDRESSES, []) if isinstance(raw, bytes))
    return Message(Kind(number), tuple(each for each in found if each is not None)[:MAX_ENDPOINTS])


def _raw(endpoint: Endpoint) -> bytes:
    ip = ipaddress.ip_address(endpoint.host)
    return _IPS[ip.version] + ip.packed + _TCP + endpoint.port.to_bytes(2)


def _endpoint(raw: bytes) -> Endpoint | None:
    ip, port = raw[1:-3], int.from_bytes(raw[-2:])
    is_tcp = raw[-3:-2] == _TCP and raw[:1] == _IPS.get({4: 4, 16: 6}.get(len(ip), 0))
    return Endpoint(str(ipaddress.ip_address(ip)), port) if is_tcp and port else None


def told_endpoints(local: Endpoint, seen: Endpoint, *, is_kin: bool) -> tuple[Endpoint, ...]:
    """What to tell of ourselves: where a hub sees us, and our own network to members of our provider alone."""
    return (seen, local) if is_kin and local != seen else (seen,)


def targets(theirs: Sequence[Endpoint], local: Endpoint, seen: Endpoint, *, is_kin: bool) -> list[Endpoint]:
    """What to dial of what a peer told.

    Args:
        theirs: the endpoints.
        local: where we would dial from.
        seen: where a hub sees us.
        is_kin: the peer is of our provider, and may be behind the NAT that we are behind.

    Raises:
        PeerError: nothing is left; the reason of the last is told.
    """
    reason = "it knows no address of its own"
    found = []
    is_neighbour = is_kin and any(each.host == seen.host for each in theirs)
    for each in theirs:
        if why := _why_not(each, local, seen, is_neighbour=is_neighbour):
            reason = why
        else:
            found.append(each)
    if not found:
        raise PeerError(reason)
    return found


def _why_not(target: Endpoint, local: Endpoint, seen: Endpoint, *, is_neighbour: bool) -> str:
    """A member must not make us dial what is none of its business; a neighbour may name its private address."""
    ip, ours = reached_ip(target.host), reached_ip(seen.host)
    if ipaddress.ip_address(target.host).version != ipaddress.ip_address(local.host).version:
        return f"{target.host} is not of our address family"
    if ip.is_unspecified or ip.is_multicast or ip.is_link_local or (ip.is_loopback and not ours.is_loopback):
        return f"{target.host} is nobody's address"
    if not ip.is_global and ours.is_global and not is_neighbour:
        return f"{target.host} is private, and in another network"
    return ""


class _Try(NamedTuple):
    due_s: float
    n_failures: int = 0
    reason: str = ""


class Plan:
    """Whom to try to reach directly, and when again. It remembers peers for as long as they are relayed."""

    def __init__(self) -> None:
        self._tries: dict[NodeId, _Try] = {}

    @property
    def reasons(self) -> Mapping[NodeId, str]:
        """Why a peer is still relayed, of those that were tried by either side."""
        return {peer: each.reason for peer, each in self._tries.items() if each.reason}

    def next(self, relayed: Mapping[NodeId, bool], now: float) -> list[NodeId]:
        """Whom to try now.

        Args:
            relayed: every peer that is; True where we called it, so that the first step is its own.
            now: on a monotonic clock.
        """
        self._forget_others(relayed)
        ripe = [
            peer
            for peer, is_called_by_us in sorted(relayed.items())
            if not is_called_by_us and self._tries.get(peer, _Try(now)).due_s <= now
        ]
        for peer in ripe:
            self._tries[peer] = self._tries.get(peer, _Try(now))._replace(due_s=now + MAX_RETRY_S)
        return ripe

    def _forget_others(self, relayed: Collection[NodeId]) -> None:
        for peer in self._tries.keys() - relayed:
            del self._tries[peer]

    def failed(self, peer: NodeId, reason: str, now: float) -> None:
        """An attempt came to nothing."""
        n_failures = self._tries.get(peer, _Try(now)).n_failures
        pause_s = min(MAX_RETRY_S, RETRY_S * 2 ** min(n_failures, 10))
        self._tries[peer] = _Try(now + pause_s, n_failures + 1, reason)
