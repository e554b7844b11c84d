"""Protocol Buffers as far as libp2p's own protocols use them: varints and byte strings, fields by number.

Source: protobuf.dev, programming-guides/encoding. Other wire types are passed over or refused; nothing recurses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tela.errors import ProtocolError

MAX_VARINT_BYTES: Final = 10
"""64 bits, seven a byte."""
_VARINT, _BYTES = 0, 2
_FIXED: Final = {1: 8, 5: 4}
"""Wire types of fixed size, which are passed over."""

Fields = Mapping[int, Sequence["int | bytes"]]
"""Field number to its values in order."""


def varint(value: int) -> bytes:
    """An unsigned integer in groups of seven bits, the lowest first.

    >>> varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int] | None:
    """The varint at ``at`` and where it ends; None where it is cut off.

    Raises:
        ProtocolError: it is too long.
    """
    value = 0
    for n, byte in enumerate(data[at : at + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * n
        if byte < 0x80:
            return value, at + n + 1
    if len(data) - at >= MAX_VARINT_BYTES:
        raise ProtocolError(f"a varint of more than {MAX_VARINT_BYTES} bytes")
    return None


def encode_fields(*fields: tuple[int, int | bytes]) -> bytes:
    """A message of (number, value) fields, in this order."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3 | _VARINT) + varint(value)
        else:
            out += varint(number << 3 | _BYTES) + varint(len(value)) + value
    return out


def decode_fields(data: bytes) -> Fields:
    """The fields of a message.

    Raises:
        ProtocolError: it is none, or is cut off.
    """
    fields: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(data):
        tag, at = _whole(read_varint(data, at))
        number, wire_type = tag >> 3, tag & 7
        if wire_type in _FIXED:
            at += _FIXED[wire_type]
            continue
        if wire_type not in {_VARINT, _BYTES}:
            raise ProtocolError(f"a field of wire type {wire_type}")
        value, at = _whole(read_varint(data, at))
        if wire_type == _VARINT:
            fields.setdefault(number, []).append(value)
        elif at + value > len(data):
            raise ProtocolError("a message that is cut off")
        else:
            fields.setdefault(number, []).append(data[at : at + value])
            at += value
    return fields


def _whole(read: tuple[int, int] | None) -> tuple[int, int]:
    if read is None:
        raise ProtocolError("a message that is cut off")
    return read


def integer(fields: Fields, number: int) -> int:
    """The last value of an integer field, 0 where it is missing. Raises ProtocolError where it is none."""
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise ProtocolError(f"field {number} is no integer")
    return value


def content(fields: Fields, number: int) -> bytes:
    """The last value of a field of bytes, b"" where it is missing. Raises ProtocolError where it is none."""
    value = fields.get(number, [b""])[-1]
    if not isinstance(value, bytes):
        raise ProtocolError(f"field {number} is no string")
    return value


class MessageCutter:
    """Cuts length-prefixed messages off a stream of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.rest = b""
        """What came behind the last message."""
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes in: the next message once it is whole.

        Raises:
            ProtocolError: it is longer than the limit.
        """
        self.rest += data
        head = read_varint(self.rest, 0)
        if head is None:
            return None
        n_bytes, start = head
        if n_bytes > self._max_bytes:
            raise ProtocolError(f"a message of {n_bytes} bytes, at most {self._max_bytes}")
        if len(self.rest) < start + n_bytes:
            return None
        message, self.rest = self.rest[start : start + n_bytes], self.rest[start + n_bytes :]
        return message
