"""The fuzz targets without a fuzzer: seeds that reach into each parser, mutated by hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.gossip.frames import Hello, Ping, encode_frame
from tela.net.circuit import HOP_PROTOCOL, Kind, Message, encode_message
from tela.net.multistream import HEADER, line
from tela.net.yamux import ACK, DATA, FIN, PING, SYN, WINDOW_UPDATE
from tela.net.yamux import HEADER as YAMUX_HEADER
from tela.wire import FrameType, frame
from tests.fuzz.frames import PARSERS, fuzz_one
from tests.lab.statements import node


def yamux(kind: int, flags: int, stream: int, length: int) -> bytes:
    return YAMUX_HEADER.pack(0, kind, flags, stream, length)


SEEDS = {
    "fuzz_yamux": yamux(DATA, SYN, 1, 5) + b"hello" + yamux(WINDOW_UPDATE, ACK, 1, 9) + yamux(DATA, FIN, 1, 0)
    + yamux(PING, SYN, 0, 7),
    "fuzz_multistream": HEADER + line("/c") + line("/a") + b"content",
    "fuzz_gossip": encode_frame(Hello(1, 1, 5)) + encode_frame(Ping(1, 5, bytes(32))),
    "fuzz_requests": frame(FrameType.DATA, b"content") + frame(FrameType.END),
    "fuzz_circuit": encode_message(HOP_PROTOCOL, Message(Kind.CONNECT, node(1))),
}  # fmt: skip


def test_every_parser_has_a_seed_that_it_takes() -> None:
    assert list(SEEDS) == [parser.__name__ for parser in PARSERS]
    for parser in PARSERS:
        parser([SEEDS[parser.__name__]])


@given(st.data())
def test_mutated_seeds_raise_nothing_else(data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(PARSERS) - 1))
    seed = bytearray(SEEDS[PARSERS[index].__name__])
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(seed)))
        seed[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=6))
    fuzz_one(bytes([index, data.draw(st.integers(0, 255))]) + bytes(seed))


@given(st.binary(max_size=200))
def test_anything_raises_nothing_else(data: bytes) -> None:
    fuzz_one(data)


@pytest.mark.parametrize("data", [b"", b"\x00"])
def test_too_little_is_nothing(data: bytes) -> None:
    fuzz_one(data)
