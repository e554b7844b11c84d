"""One message of MessagePack on a stream, with its length in front: for exchanges of a question and an answer."""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from tela.errors import PeerError, ProtocolError
from tela.net.protobuf import MessageCutter
from tela.net.transport import Stream
from tela.record import short
from tela.wire import encode

_LENGTH: Final = struct.Struct(">I")


async def send_message(stream: Stream, message: msgspec.Struct) -> None:
    """Raises StreamResetError where the stream is broken."""
    body = encode(message)
    await stream.send(_LENGTH.pack(len(body)) + body)


async def receive_message(stream: Stream, what: str, max_bytes: int) -> bytes:
    """The encoded message, of at most ``max_bytes``; ``what`` names the exchange.

    Raises:
        ProtocolError: it is longer, or the peer ended within it, or sent more.
        StreamResetError: the stream broke.
    """
    buffer = bytearray()
    while True:
        if len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            if length > max_bytes or len(buffer) > _LENGTH.size + length:
                raise ProtocolError(f"{what} message of {length} bytes, at most {max_bytes}")
            if len(buffer) == _LENGTH.size + length:
                return bytes(buffer[_LENGTH.size :])
        data = await stream.receive()
        if not data:
            raise ProtocolError(f"{short(stream.peer)} ended {what} within a message")
        buffer += data


async def receive_cut(stream: Stream, cutter: MessageCutter) -> bytes:
    """The next message of a libp2p protocol; what came behind it stays in ``cutter``.

    Raises:
        ProtocolError: it is too long, or the peer ended before.
        StreamResetError: the stream broke.
    """
    body = cutter.feed(b"")
    while body is None:
        data = await stream.receive()
        if not data:
            raise ProtocolError(f"{short(stream.peer)} ended a stream within a message")
        body = cutter.feed(data)
    return body


async def wait_end(stream: Stream) -> None:
    """Until the peer, who asked, has taken the answer in and ended its side, or went away."""
    try:
        while await stream.receive():
            pass
    except PeerError:
        pass
