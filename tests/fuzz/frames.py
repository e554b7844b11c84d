"""What a peer may send, as bytes: one function a parser, that must raise nothing but ProtocolError. See ``make fuzz``.

The first byte chooses the parser, the second how the rest is cut; so one corpus serves all.
"""

from __future__ import annotations

from collections.abc import Callable

from tela.errors import PeerError, ProtocolError
from tela.gossip.frames import FrameCutter, decode_frame
from tela.net.circuit import HOP_PROTOCOL, STOP_PROTOCOL, decode_message
from tela.net.multistream import Selection
from tela.net.protobuf import MessageCutter, decode_fields
from tela.net.yamux import YamuxMachine, YamuxStream
from tela.wire import FrameDecoder


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def fuzz_yamux(parts: list[bytes]) -> None:
    machine: YamuxMachine[YamuxStream] = YamuxMachine(is_client=False, make_stream=YamuxStream)
    for part in parts:
        machine.receive(part, 0.0)
        assert machine.n_unread == sum(stream.n_unread for stream in machine.streams.values())
        for stream in list(machine.streams.values()):
            machine.consumed(stream, stream.n_unread)
        while machine.take():
            pass


def fuzz_multistream(parts: list[bytes]) -> None:
    selection = Selection(lambda name: name == "/a", lambda name: name == "/b")
    for part in parts:
        _, selected = selection.receive(part)
        if selected is not None:
            return


def fuzz_gossip(parts: list[bytes]) -> None:
    cutter = FrameCutter()
    for part in parts:
        for payload in cutter.feed(part):
            decode_frame(payload)


def fuzz_requests(parts: list[bytes]) -> None:
    decoder = FrameDecoder()
    for part in parts:
        decoder.feed(part)


def fuzz_circuit(parts: list[bytes]) -> None:
    cutter = MessageCutter(4096)
    for part in parts:
        if (body := cutter.feed(part)) is not None:
            decode_fields(body)
            decode_message(HOP_PROTOCOL, body)
            decode_message(STOP_PROTOCOL, body)


PARSERS: list[Callable[[list[bytes]], None]] = [
    fuzz_yamux,
    fuzz_multistream,
    fuzz_gossip,
    fuzz_requests,
    fuzz_circuit,
]


def fuzz_one(data: bytes) -> None:
    """Raises what must not be raised."""
    if len(data) < 2:
        return
    try:
        PARSERS[data[0] % len(PARSERS)](pieces(data[2:], 1 + data[1]))
    except (ProtocolError, PeerError):
        pass
