"""What is told and dialled to meet through NATs, as tables and laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.errors import PeerError, ProtocolError
from tela.net.endpoints import Endpoint
from tela.net.multiaddrs import Carrier
from tela.net.protobuf import encode_fields, read_varint
from tela.net.punch import (
    MAX_ENDPOINTS,
    MAX_RETRY_S,
    RETRY_S,
    Kind,
    Message,
    Plan,
    decode_message,
    encode_message,
    targets,
    told_endpoints,
)
from tela.record import NodeId

LAN, PUBLIC = Endpoint("10.0.0.5", 40_001), Endpoint("8.8.8.8", 40_001)
A, B = NodeId(b"a" * 32), NodeId(b"b" * 32)

hosts = st.ip_addresses().map(str)
endpoints = st.builds(Endpoint, hosts, st.integers(1, 65_535), st.just(Carrier.TCP))


def body_of(encoded: bytes) -> bytes:
    head = read_varint(encoded, 0)
    assert head is not None
    length, start = head
    assert len(encoded) == start + length
    return encoded[start:]


@given(st.sampled_from(Kind), st.lists(endpoints, max_size=MAX_ENDPOINTS))
def test_message_comes_back_as_it_was(kind: Kind, told: list[Endpoint]) -> None:
    message = Message(kind, tuple(told))
    assert decode_message(body_of(encode_message(message))) == message


def test_wire_form_is_that_of_the_specification() -> None:
    """Type 100 and /ip4/8.8.8.8/tcp/4001."""
    encoded = encode_message(Message(Kind.CONNECT, (Endpoint("8.8.8.8", 4001),)))
    assert encoded.hex() == "0c" + "0864" + "1208" + "0408080808" + "060fa1"


@given(st.binary(max_size=60))
def test_noise_is_refused_or_read(noise: bytes) -> None:
    try:
        message = decode_message(noise)
    except ProtocolError:
        return
    assert len(message.endpoints) <= MAX_ENDPOINTS


def test_addresses_of_other_kinds_are_passed_over() -> None:
    quic = bytes.fromhex("0408080808" + "91020fa1" + "cc03")
    good = bytes.fromhex("0408080808" + "060fa1")
    assert decode_message(encode_fields((1, 100), (2, quic), (2, b""), (2, good[:-1]), (2, good))).endpoints == (
        Endpoint("8.8.8.8", 4001),
    )


def test_own_network_is_told_to_kin_alone() -> None:
    assert told_endpoints(LAN, PUBLIC, is_kin=False) == (PUBLIC,)
    assert told_endpoints(LAN, PUBLIC, is_kin=True) == (PUBLIC, LAN)
    assert told_endpoints(PUBLIC, PUBLIC, is_kin=True) == (PUBLIC,)


THEIR_LAN, THEIR_PUBLIC = Endpoint("10.0.0.9", 5), Endpoint("9.9.9.9", 5)
SAME_NAT = Endpoint(PUBLIC.host, 7)


@pytest.mark.parametrize(
    ("theirs", "is_kin", "dialled"),
    [
        ([THEIR_PUBLIC], False, [THEIR_PUBLIC]),
        ([THEIR_PUBLIC, THEIR_LAN], True, [THEIR_PUBLIC]),
        ([SAME_NAT, THEIR_LAN], True, [SAME_NAT, THEIR_LAN]),
        ([SAME_NAT, THEIR_LAN], False, [SAME_NAT]),
        ([Endpoint("2001:4860::8", 5), THEIR_PUBLIC], True, [THEIR_PUBLIC]),
        ([SAME_NAT, Endpoint("127.0.0.1", 22), Endpoint("169.254.169.254", 80)], True, [SAME_NAT]),
    ],
)
def test_what_is_dialled(theirs: list[Endpoint], is_kin: bool, dialled: list[Endpoint]) -> None:
    assert targets(theirs, LAN, PUBLIC, is_kin=is_kin) == dialled


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([], "no address of its own"),
        ([THEIR_LAN], "private"),
        ([Endpoint("169.254.169.254", 80)], "nobody's"),
        ([Endpoint("0.0.0.0", 80)], "nobody's"),
        ([Endpoint("2001:4860::8", 5)], "family"),
    ],
)
def test_what_is_not(theirs: list[Endpoint], words: str) -> None:
    with pytest.raises(PeerError, match=words):
        targets(theirs, LAN, PUBLIC, is_kin=False)


@pytest.mark.parametrize("host", ["64:ff9b::a00:5", "::ffff:10.0.0.5", "2002:a00:5::1"])
def test_private_address_in_the_form_of_another_is_not(host: str) -> None:
    local, seen = Endpoint("2001:4860::1", 5), Endpoint("2001:4860::1", 5)
    with pytest.raises(PeerError, match="private"):
        targets([Endpoint(host, 5)], local, seen, is_kin=False)


def test_inside_a_private_network_its_addresses_are_dialled() -> None:
    seen = Endpoint("10.9.9.9", 1)
    assert targets([THEIR_LAN], LAN, seen, is_kin=False) == [THEIR_LAN]


def test_who_was_called_tries_once_and_again_ever_later() -> None:
    plan = Plan()
    assert plan.next({A: False, B: True}, 0) == [A]
    assert plan.next({A: False, B: True}, 1) == []
    plan.failed(A, "no", 2)
    assert plan.reasons == {A: "no"}
    assert plan.next({A: False}, 2 + RETRY_S - 1) == []
    assert plan.next({A: False}, 2 + RETRY_S) == [A]
    pauses = []
    now = 100.0
    for _ in range(10):
        plan.failed(A, "no", now)
        began = now
        while not plan.next({A: False}, now):
            now += RETRY_S
        pauses.append(now - began)
    assert pauses == sorted(pauses)
    assert pauses[-1] <= MAX_RETRY_S


def test_peer_that_is_not_relayed_any_more_is_forgotten() -> None:
    plan = Plan()
    plan.failed(A, "no", 0)
    assert plan.next({}, 1) == []
    assert plan.reasons == {}
    assert plan.next({A: False}, 2) == [A]
