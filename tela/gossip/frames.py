"""Frames of ``/tela/gossip/1``: a 4-byte big-endian length, then a MessagePack array that starts with its type.

Evolution: fields are appended with defaults, unknown types are skipped; HELLO negotiates everything else.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from tela.crdt.delta import LINE_BYTES, N_BUCKETS, SUM_BYTES, Delta
from tela.errors import ProtocolError
from tela.wire import decode

MAX_FRAME_BYTES: Final = 64 * 1024
"""With its length: one message of the muxer below carries it."""
MAX_DELTAS: Final = 32
"""In one RECORDS frame: a receiver's task checks 32 signatures, 3 ms, before it looks at another link."""
MAX_RECORDS_BYTES: Final = 48 * 1024
"""Where a RECORDS frame is closed: one more delta of two records and six votes still fits into MAX_FRAME_BYTES."""
MAX_LINES_BYTES: Final = 60 * 1024
"""Of a DIGEST or WANT; a bucket of a full map (50,000 entries) has about 3,200 lines of 16 bytes."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First frame of each side: protocol versions spoken, and the root hash."""

    version_min: int
    version_max: int
    root: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A sign of life with the sender's hashes; answered by an Ack at once."""

    sequence: int
    root: int
    sums: bytes


class Ack(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Says that everything before the Ping was taken in, with the sender's hashes."""

    sequence: int
    root: int
    sums: bytes


class Records(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Facts, in deltas of one owner each."""

    deltas: tuple[Delta, ...]


class Digest(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The sender's lines of some buckets. Answered by RECORDS as far as needed, then one WANT for the same buckets."""

    buckets: int
    lines: bytes


class Want(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Ids of entries to send, and the news that all records owed for these buckets went before this frame."""

    buckets: int
    ids: bytes


class Mode(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """From now on the sender wants no news on this link, and sends none; or it does again. See gossip/uplinks.py."""

    is_lazy: bool


Frame = Hello | Ping | Ack | Records | Digest | Want | Mode


class _TypeOnly(msgspec.Struct, frozen=True, array_like=True):
    type: int


_KNOWN_TYPES: Final = frozenset(range(1, 8))
_LENGTH: Final = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)
_type_decoder = msgspec.msgpack.Decoder(_TypeOnly)


def encode_frame(frame: Frame) -> bytes:
    """The frame with its length."""
    payload = _encoder.encode(frame)
    assert len(payload) + _LENGTH.size <= MAX_FRAME_BYTES
    return _LENGTH.pack(len(payload)) + payload


def decode_frame(payload: bytes) -> Frame | None:
    """Read one payload; None for a type that we do not know.

    Raises:
        ProtocolError: not a frame, or one whose parts do not fit together.
    """
    try:
        frame = decode(payload, _decoder, "gossip frame")
    except ProtocolError:
        if decode(payload, _type_decoder, "gossip frame").type in _KNOWN_TYPES:
            raise
        return None
    if not _is_well_formed(frame):
        raise ProtocolError(f"malformed {type(frame).__name__} frame")
    return frame


def _is_well_formed(frame: Frame) -> bool:
    match frame:
        case Ping() | Ack():
            return len(frame.sums) == N_BUCKETS * SUM_BYTES
        case Records():
            return len(frame.deltas) <= MAX_DELTAS
        case Digest():
            return 0 < frame.buckets < 1 << N_BUCKETS and len(frame.lines) % LINE_BYTES == 0
        case Want():
            return 0 < frame.buckets < 1 << N_BUCKETS
        case Hello() | Mode():
            return True


class FrameCutter:
    """Cuts a byte stream into payloads; holds at most one incomplete frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes in any split; return the payloads completed by them.

        Raises:
            ProtocolError: a length over the limit.
        """
        self._buffer += data
        payloads = []
        position = 0
        while len(self._buffer) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, position)
            if length + _LENGTH.size > MAX_FRAME_BYTES:
                raise ProtocolError(f"gossip frame of {length} bytes, at most {MAX_FRAME_BYTES - _LENGTH.size}")
            start = position + _LENGTH.size
            if start + length > len(self._buffer):
                break
            payloads.append(bytes(self._buffer[start : start + length]))
            position = start + length
        del self._buffer[:position]
        return payloads
