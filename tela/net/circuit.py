"""Messages of circuit relay v2: how a node reserves a slot at a relay, is called through it and calls others.

Two protocols, as libp2p specs relay/circuit-v2.md has them. HOP, to the relay: RESERVE, or CONNECT to a peer that has
reserved. STOP, from the relay: somebody calls. Both are answered by STATUS; after an OK to CONNECT the streams carry
the bytes of the circuit. A reservation without limits in it is without limits.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from tela.errors import ConfigError, ProtocolError
from tela.net.multiaddrs import node_of_raw_peer_id, raw_peer_id
from tela.net.protobuf import content, decode_fields, encode_fields, integer, varint
from tela.record import NodeId

HOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/stop"
MAX_MESSAGE_BYTES: Final = 4096
"""As the specification has it."""


class Kind(enum.Enum):
    """What a message is; its number depends on the protocol."""

    RESERVE = "reserve"
    CONNECT = "connect"
    STATUS = "status"


class Status(enum.IntEnum):
    """Answers. Others than OK end the stream."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


class Message(NamedTuple):
    """One message of either protocol."""

    kind: Kind
    peer: NodeId | None = None  # of CONNECT: whom to call, or who calls
    status: int = 0
    expires_unix_s: int = 0  # of an answer to RESERVE


class _Layout(NamedTuple):
    """Where a protocol has its fields."""

    kinds: tuple[Kind, ...]
    reservation: int | None
    status: int


_HOP: Final = _Layout((Kind.RESERVE, Kind.CONNECT, Kind.STATUS), reservation=3, status=5)
_STOP: Final = _Layout((Kind.CONNECT, Kind.STATUS), reservation=None, status=4)
_LAYOUTS: Final = {HOP_PROTOCOL: _HOP, STOP_PROTOCOL: _STOP}
_KIND, _PEER, _PEER_ID, _EXPIRE = 1, 2, 1, 1


def encode_message(protocol: str, message: Message) -> bytes:
    """On the wire, with its length in front."""
    layout = _LAYOUTS[protocol]
    fields: list[tuple[int, int | bytes]] = [(_KIND, layout.kinds.index(message.kind))]
    if message.peer is not None:
        fields.append((_PEER, encode_fields((_PEER_ID, raw_peer_id(message.peer)))))
    if message.expires_unix_s and layout.reservation is not None:
        fields.append((layout.reservation, encode_fields((_EXPIRE, message.expires_unix_s))))
    if message.status:
        fields.append((layout.status, message.status))
    body = encode_fields(*fields)
    return varint(len(body)) + body


def decode_message(protocol: str, body: bytes) -> Message:
    """A message without its length. Addresses, vouchers and limits in it are passed over.

    Raises:
        ProtocolError: it is none.
    """
    layout = _LAYOUTS[protocol]
    fields = decode_fields(body)
    number = integer(fields, _KIND)
    if number >= len(layout.kinds):
        raise ProtocolError(f"a message of unknown type {number}")
    peer = content(decode_fields(content(fields, _PEER)), _PEER_ID)
    reservation = b"" if layout.reservation is None else content(fields, layout.reservation)
    return Message(
        layout.kinds[number],
        _node(peer) if peer else None,
        integer(fields, layout.status),
        integer(decode_fields(reservation), _EXPIRE),
    )


def _node(raw: bytes) -> NodeId:
    try:
        return node_of_raw_peer_id(raw)
    except ConfigError as error:
        raise ProtocolError(str(error)) from error


def status_text(status: int) -> str:
    """For people: ``no reservation``."""
    return Status(status).name.lower().replace("_", " ") if status in set(Status) else f"status {status}"
