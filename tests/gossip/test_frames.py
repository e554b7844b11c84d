from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.crdt.delta import Delta
from tela.errors import ProtocolError
from tela.gossip.frames import (
    MAX_FRAME_BYTES,
    Ack,
    Digest,
    FrameCutter,
    Hello,
    Ping,
    Records,
    Want,
    decode_frame,
    encode_frame,
)

SUMS = bytes(range(32))
GOLDEN = [
    (Hello(1, 1, 2**63), [1, 1, 1, 2**63]),
    (Ping(7, 5, SUMS), [2, 7, 5, SUMS]),
    (Ack(7, 5, SUMS), [3, 7, 5, SUMS]),
    (Records((Delta((b"record",), (b"vote",)), Delta((b"r",)))), [4, [[[b"record"], [b"vote"]], [[b"r"], []]]]),
    (Digest(0b101, bytes(32)), [5, 5, bytes(32)]),
    (Want(0xFFFF, b"12345678"), [6, 0xFFFF, b"12345678"]),
]


@pytest.mark.parametrize(("frame", "fields"), GOLDEN)
def test_frame_matches_the_golden_vector(frame, fields):
    payload = msgpack.packb(fields)
    assert encode_frame(frame) == len(payload).to_bytes(4, "big") + payload
    assert decode_frame(payload) == frame


@pytest.mark.parametrize(("frame", "fields"), GOLDEN)
def test_frame_of_a_later_version_is_read_without_its_new_fields(frame, fields):
    assert decode_frame(msgpack.packb([*fields, {"new": 1}])) == frame


def test_unknown_type_is_skipped():
    assert decode_frame(msgpack.packb([99, "future"])) is None


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb({"type": 1}),
        msgpack.packb([2, 1, 1, b"short sums"]),
        msgpack.packb([1, "x", 1, 0]),
        msgpack.packb([4, [[[b"r"], []]] * 33]),
        msgpack.packb([5, 0, b""]),
        msgpack.packb([5, 1, b"half a line"]),
        msgpack.packb([6, 1 << 16, b""]),
    ],
)
def test_malformed_frame_is_a_protocol_error(payload):
    with pytest.raises(ProtocolError):
        decode_frame(payload)


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 9))
def test_cutter_gives_payloads_back_in_any_split(payloads, step):
    stream = b"".join(len(payload).to_bytes(4, "big") + payload for payload in payloads)
    cutter = FrameCutter()
    cut = [payload for at in range(0, len(stream), step) for payload in cutter.feed(stream[at : at + step])]
    assert cut == payloads


def test_cutter_refuses_an_oversized_frame():
    with pytest.raises(ProtocolError, match="at most"):
        FrameCutter().feed(MAX_FRAME_BYTES.to_bytes(4, "big"))
