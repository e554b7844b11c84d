"""Bytes on the wire, frozen: envelope, vote, ``/tela/http/1`` frames, caller claim, protocol versions.

Everything here is pure.  Formats change only by appending fields with defaults (an older reader ignores them, a newer
one fills them in) or by a new protocol version; golden vectors in tests/test_wire.py come from the msgpack package.
MessagePack is written and read with msgspec: typed decoding costs what untyped decoding costs elsewhere and names the
field that is wrong (style.md 3.4).

``/tela/http/1``: a long-lived stream carries one request after another, never two at once::

    caller:  REQUEST DATA* END      or, at any moment, CANCEL in place of the rest
    gate:    RESPONSE DATA* END     or, at any moment, ERROR in place of the rest

Each side ends each request with one terminal frame, so after both the stream is idle and clean. CANCEL may also follow
END, while the answer is awaited; a gate that has answered already ignores it. DATA carries content, never transfer
coding: each hop frames for itself (RFC 9112 section 7.1).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from tela.errors import ProtocolError
from tela.record import (
    MAX_ADDRESSES,
    MAX_CATALOG_BYTES,
    MAX_INSTANCES,
    MAX_LABELS,
    MAX_RECORD_BYTES,
    MAX_SERVICES,
    MAX_STRING_BYTES,
    NODE_ID_BYTES,
    SIGNATURE_BYTES,
    Card,
    Catalog,
    Envelope,
    NodeBody,
    NodeId,
    SwarmId,
    Vote,
)

PROTOCOL_MIN: Final = 1
PROTOCOL_MAX: Final = 1
"""A node speaks every version from MIN to MAX. N and N-1 meet at the lower maximum; without overlap both refuse."""

HTTP_PROTOCOL: Final = "/tela/http/1"
GOSSIP_PROTOCOL: Final = "/tela/gossip/1"
ADMISSION_PROTOCOL: Final = "/tela/admit/1"
REACH_PROTOCOL: Final = "/tela/reach/1"

MAX_FRAME_PAYLOAD_BYTES: Final = 65_532
"""With its 4-byte header a frame is 64 KiB: one Noise message less its overhead carries it."""
MAX_HEAD_BYTES: Final = 48 * 1024
"""A request or response head in a frame: 32 KiB of headers (faults.md A04), the target and a claim."""

_RECORD_PREFIX: Final = b"tela/rec/1"
_VOTE_PREFIX: Final = b"tela/vote/1"
_CLAIM_PREFIX: Final = b"tela/claim/1"
_RECORD_FIELDS: Final = struct.Struct(">B32sQQ")  # kind, owner, session, version
_VOTE_FIELDS: Final = struct.Struct(">32s32sQQBQ")  # observer, subject, session, incarnation, kind, issued_unix_s

T = TypeVar("T")


def negotiate_version(ours: tuple[int, int], theirs: tuple[int, int]) -> int | None:
    """The version that two ranges ``(min, max)`` agree on: the lower maximum, or None where they do not overlap.

    >>> negotiate_version((1, 2), (1, 1))
    1
    >>> negotiate_version((2, 3), (1, 1)) is None
    True
    """
    version = min(ours[1], theirs[1])
    return version if version >= max(ours[0], theirs[0]) else None


# -- envelopes and votes --------------------------------------------------------------------------------------------


def record_signing_bytes(swarm: SwarmId, envelope: Envelope) -> bytes:
    """What an owner signs: prefix, swarm, fixed-width fields, body. The swarm id stops replay across swarms."""
    fields = _RECORD_FIELDS.pack(envelope.kind, envelope.owner, envelope.session, envelope.version)
    return _RECORD_PREFIX + swarm + fields + envelope.body


def vote_signing_bytes(swarm: SwarmId, vote: Vote) -> bytes:
    """What an observer signs."""
    return (
        _VOTE_PREFIX
        + swarm
        + _VOTE_FIELDS.pack(vote.observer, vote.subject, vote.session, vote.incarnation, vote.kind, vote.issued_unix_s)
    )


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_vote_decoder = msgspec.msgpack.Decoder(Vote)
_body_decoder = msgspec.msgpack.Decoder(NodeBody)
_catalog_decoder = msgspec.msgpack.Decoder(Catalog)


def encode(value: msgspec.Struct) -> bytes:
    """MessagePack of a wire struct."""
    return _encoder.encode(value)


def decode(data: bytes | memoryview, decoder: msgspec.msgpack.Decoder[T], what: str) -> T:
    """Decode foreign bytes.

    Raises:
        ProtocolError: the bytes are not a ``what``; the message names the field.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"undecodable {what}: {error}") from error


def decode_envelope(data: bytes) -> Envelope:
    """Decode and bound an envelope; its signature is not checked here.

    Raises:
        ProtocolError: too large, undecodable, or a field outside its range.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise ProtocolError(f"record of {len(data)} bytes, at most {MAX_RECORD_BYTES}")
    envelope = decode(data, _envelope_decoder, "record")
    if len(envelope.owner) != NODE_ID_BYTES or len(envelope.signature) != SIGNATURE_BYTES:
        raise ProtocolError("record with an owner or signature of the wrong size")
    if not (0 <= envelope.kind < 256 and 0 < envelope.session < 1 << 63 and 0 < envelope.version < 1 << 63):
        raise ProtocolError("record with kind, session or version out of range")
    return envelope


def decode_vote(data: bytes) -> Vote:
    """Decode and bound a vote; its signature is not checked here.

    Raises:
        ProtocolError: undecodable, or a field outside its range.
    """
    vote = decode(data, _vote_decoder, "vote")
    if len(vote.observer) != NODE_ID_BYTES or len(vote.subject) != NODE_ID_BYTES:
        raise ProtocolError("vote with a node id of the wrong size")
    if not (0 < vote.session < 1 << 63 and 0 <= vote.incarnation < 1 << 63 and 0 <= vote.issued_unix_s < 1 << 63):
        raise ProtocolError("vote with a field out of range")
    return vote


def decode_node_body(data: bytes) -> NodeBody:
    """Decode and bound the body of a NODE record. Fields beyond ours are ignored here and relayed in the envelope.

    Raises:
        ProtocolError: undecodable, or over a limit: the node is shown as opaque and is not routable.
    """
    body = decode(data, _body_decoder, "node body")
    if body.card is not None:
        _check_card(body.card)
    return body


def _check_card(card: Card) -> None:
    if len(card.services) > MAX_SERVICES or len(card.addresses) > MAX_ADDRESSES or len(card.instances) > MAX_INSTANCES:
        raise ProtocolError(f"card with {len(card.services)} services and {len(card.addresses)} addresses")
    texts = [card.version, card.name, card.http_url, card.hardware.gpu, card.tier, *card.addresses]
    for service in card.services:
        texts += (service.kind, service.model, service.reason, service.parent)
    for instance in card.instances:
        texts += (instance.version, instance.dtype, instance.quantization)
    _check_texts(texts, "card")


def decode_catalog(data: bytes) -> Catalog:
    """Decode and bound the body of a CATALOG record.

    Raises:
        ProtocolError: undecodable, or over a limit: the node is shown without it.
    """
    catalog = decode(data, _catalog_decoder, "catalog")
    if len(data) > MAX_CATALOG_BYTES or len(catalog.labels) > MAX_LABELS:
        raise ProtocolError(f"catalog of {len(data)} bytes with {len(catalog.labels)} labels")
    texts = [catalog.host, catalog.contact, catalog.job.cluster, catalog.job.job_id, catalog.job.partition]
    for listing in catalog.listings:
        texts += (listing.parent, *listing.models)
    _check_texts([*texts, *catalog.labels], "catalog")
    return catalog


def _check_texts(texts: Sequence[str], what: str) -> None:
    if any(len(text.encode()) > MAX_STRING_BYTES for text in texts):
        raise ProtocolError(f"{what} with a string over {MAX_STRING_BYTES} bytes")


# -- /tela/http/1 ---------------------------------------------------------------------------------------------------


class FrameType(enum.IntEnum):
    """Types of ``/tela/http/1`` frames. 0x80 and above are reserved for hints that an older peer skips."""

    REQUEST = 1
    RESPONSE = 2
    DATA = 3
    END = 4
    ERROR = 5
    CANCEL = 6


_FRAME_HEADER: Final = struct.Struct(">I")  # type in the top byte, payload length in the lower three
_SKIPPABLE: Final = 0x80


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """Who calls, as the ingress vouches for it. Signed once and reused until it expires: see decision 0003."""

    ingress: NodeId
    session: int  # of the ingress
    key_id: str  # "" where the ingress has no keys
    organisation: str
    issued_unix_s: int
    expires_unix_s: int
    signature: bytes = b""


class RequestHead(msgspec.Struct, frozen=True, array_like=True):
    """First frame of a request."""

    claim: Claim
    instance: int  # of the receiving node
    request_id: str
    deadline_s: float  # what is left of the caller's time; 0: no limit
    method: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...]


class ResponseHead(msgspec.Struct, frozen=True, array_like=True):
    """First frame of a response. ``headers`` are end-to-end only, as the engine wrote them."""

    status: int
    reason: bytes
    headers: tuple[tuple[bytes, bytes], ...]


class ErrorFrame(msgspec.Struct, frozen=True, array_like=True):
    """Why a request ended without END."""

    code: str  # kebab case, see GateCode
    message: str
    is_accepted: bool = True  # False: the engine never saw the request, another instance may be tried


class GateCode(enum.StrEnum):
    """Codes that a gate puts into ERROR frames."""

    CANCELLED = "cancelled"
    DRAINING = "draining"
    NO_INSTANCE = "no-instance"
    REFUSED = "refused"
    ENGINE_UNREACHABLE = "engine-unreachable"
    ENGINE_DISCONNECTED = "engine-disconnected"
    DEADLINE = "deadline"
    PROTOCOL = "protocol"
    INTERNAL = "internal-error"


def claim_signing_bytes(swarm: SwarmId, claim: Claim) -> bytes:
    """What the ingress signs: the claim with an empty signature, behind its own prefix and the swarm."""
    return _CLAIM_PREFIX + swarm + encode(msgspec.structs.replace(claim, signature=b""))


def frame(kind: FrameType, payload: bytes = b"") -> bytes:
    """One frame. ``payload`` ≤ MAX_FRAME_PAYLOAD_BYTES; longer content is cut by :func:`data_frames`."""
    assert len(payload) <= MAX_FRAME_PAYLOAD_BYTES
    return _FRAME_HEADER.pack(kind << 24 | len(payload)) + payload


def data_frames(content: bytes) -> Iterator[bytes]:
    """DATA frames for content of any length (none for empty content)."""
    view = memoryview(content)
    for start in range(0, len(view), MAX_FRAME_PAYLOAD_BYTES):
        yield frame(FrameType.DATA, bytes(view[start : start + MAX_FRAME_PAYLOAD_BYTES]))


class FrameDecoder:
    """Cuts a byte stream into ``(type, payload)``; holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[FrameType, bytes]]:
        """Take bytes in any split; return the frames completed by them.

        Raises:
            ProtocolError: an unknown type below 0x80, or a payload over the limit.
        """
        self._buffer += data
        frames: list[tuple[FrameType, bytes]] = []
        position = 0
        while len(self._buffer) - position >= _FRAME_HEADER.size:
            (word,) = _FRAME_HEADER.unpack_from(self._buffer, position)
            kind, length = word >> 24, word & 0xFFFFFF
            if length > MAX_FRAME_PAYLOAD_BYTES:
                raise ProtocolError(f"frame of {length} bytes, at most {MAX_FRAME_PAYLOAD_BYTES}")
            end = position + _FRAME_HEADER.size + length
            if end > len(self._buffer):
                break
            if kind < _SKIPPABLE:
                frames.append((_frame_type(kind), bytes(self._buffer[position + _FRAME_HEADER.size : end])))
            position = end
        del self._buffer[:position]
        return frames

    @property
    def is_between_frames(self) -> bool:
        """True where the stream may end without cutting a frame."""
        return not self._buffer


def _frame_type(kind: int) -> FrameType:
    try:
        return FrameType(kind)
    except ValueError:
        raise ProtocolError(f"unknown frame type {kind}") from None


_request_head_decoder = msgspec.msgpack.Decoder(RequestHead)
_response_head_decoder = msgspec.msgpack.Decoder(ResponseHead)
_error_decoder = msgspec.msgpack.Decoder(ErrorFrame)


def decode_request_head(payload: bytes) -> RequestHead:
    """Raises ProtocolError where the payload is not a request head."""
    return decode(payload, _request_head_decoder, "request head")


def decode_response_head(payload: bytes) -> ResponseHead:
    """Raises ProtocolError where the payload is not a response head."""
    return decode(payload, _response_head_decoder, "response head")


def decode_error(payload: bytes) -> ErrorFrame:
    """Raises ProtocolError where the payload is not an error."""
    return decode(payload, _error_decoder, "error frame")
