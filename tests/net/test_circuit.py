"""Messages of circuit relay v2; the other implementation is py-libp2p's generated code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.relay.circuit_v2.pb import circuit_pb2

from tela.errors import ProtocolError
from tela.net.circuit import (
    HOP_PROTOCOL,
    MAX_MESSAGE_BYTES,
    STOP_PROTOCOL,
    Kind,
    Message,
    Status,
    decode_message,
    encode_message,
    status_text,
)
from tela.net.multiaddrs import raw_peer_id
from tela.net.protobuf import MessageCutter, encode_fields
from tests.lab.statements import node

PEER = node(7)


def body_of(wire: bytes) -> bytes:
    body = MessageCutter(MAX_MESSAGE_BYTES).feed(wire)
    assert body is not None
    return body


def test_hop_reads_as_the_generated_code_reads_it():
    theirs = circuit_pb2.HopMessage()
    theirs.ParseFromString(body_of(encode_message(HOP_PROTOCOL, Message(Kind.CONNECT, PEER))))
    assert (theirs.type, theirs.peer.id) == (circuit_pb2.HopMessage.CONNECT, raw_peer_id(PEER))


def test_addresses_voucher_and_limit_are_passed_over():
    peer = encode_fields((1, raw_peer_id(PEER)), (2, b"an address"), (2, b"another"))
    limit = encode_fields((1, 120), (2, 1 << 17))
    body = encode_fields((1, 0), (2, peer), (3, limit))
    assert decode_message(STOP_PROTOCOL, body) == Message(Kind.CONNECT, PEER)
    reservation = encode_fields((1, 1_800_000_000), (2, b"an address"), (3, b"a voucher"))
    body = encode_fields((1, 2), (3, reservation), (4, limit), (5, 100))
    assert decode_message(HOP_PROTOCOL, body) == Message(Kind.STATUS, None, Status.OK, 1_800_000_000)


@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        (HOP_PROTOCOL, Message(Kind.RESERVE)),
        (HOP_PROTOCOL, Message(Kind.CONNECT, PEER)),
        (HOP_PROTOCOL, Message(Kind.STATUS, status=Status.OK, expires_unix_s=1_800_000_000)),
        (HOP_PROTOCOL, Message(Kind.STATUS, status=Status.NO_RESERVATION)),
        (STOP_PROTOCOL, Message(Kind.CONNECT, PEER)),
        (STOP_PROTOCOL, Message(Kind.STATUS, status=Status.OK)),
    ],
)
def test_message_comes_back(protocol, message):
    assert decode_message(protocol, body_of(encode_message(protocol, message))) == message


@given(st.sampled_from([HOP_PROTOCOL, STOP_PROTOCOL]), st.binary(max_size=80))
def test_anything_is_a_message_or_a_protocol_error(protocol, body):
    try:
        decode_message(protocol, body)
    except ProtocolError:
        pass


@pytest.mark.parametrize("body", [encode_fields((1, 3)), encode_fields((1, 1), (2, encode_fields((1, b"no key"))))])
def test_unknown_type_and_foreign_peer_are_protocol_errors(body):
    with pytest.raises(ProtocolError):
        decode_message(HOP_PROTOCOL, body)


def test_status_is_told_in_words():
    assert (status_text(204), status_text(299)) == ("no reservation", "status 299")
