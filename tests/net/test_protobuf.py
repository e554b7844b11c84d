from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.errors import ProtocolError
from tela.net.protobuf import MessageCutter, content, decode_fields, encode_fields, integer, read_varint, varint

values = st.integers(0, 2**64 - 1) | st.binary(max_size=300)
fields = st.lists(st.tuples(st.integers(1, 2000), values), max_size=8)


@given(fields)
def test_fields_come_back_in_order(pairs):
    decoded = decode_fields(encode_fields(*pairs))
    expected: dict[int, list[int | bytes]] = {}
    for number, value in pairs:
        expected.setdefault(number, []).append(value)
    assert decoded == expected


@given(fields, st.integers(1, 5))
def test_message_that_is_cut_off_is_refused_or_shorter(pairs, n_missing):
    whole = encode_fields(*pairs)
    try:
        decoded = decode_fields(whole[: len(whole) - n_missing])
    except ProtocolError:
        return
    assert sum(map(len, decoded.values())) < max(1, len(pairs))  # cut between two fields


@given(st.binary(max_size=60))
def test_anything_is_fields_or_a_protocol_error(data):
    try:
        decode_fields(data)
    except ProtocolError:
        pass


def test_fixed_sizes_are_passed_over_and_groups_are_refused():
    data = bytes([1 << 3 | 1]) + bytes(8) + bytes([2 << 3 | 5]) + bytes(4) + encode_fields((3, 7))
    assert decode_fields(data) == {3: [7]}
    with pytest.raises(ProtocolError, match="wire type 3"):
        decode_fields(bytes([1 << 3 | 3]))


def test_field_of_the_other_type_is_refused_and_a_missing_one_is_empty():
    decoded = decode_fields(encode_fields((1, 5), (2, b"five")))
    assert (integer(decoded, 1), content(decoded, 2), integer(decoded, 9), content(decoded, 9)) == (5, b"five", 0, b"")
    with pytest.raises(ProtocolError):
        integer(decoded, 2)
    with pytest.raises(ProtocolError):
        content(decoded, 1)


@given(st.integers(0, 2**64 - 1), st.binary(max_size=3))
def test_varint_ends_where_it_says(value, behind):
    encoded = varint(value)
    assert read_varint(encoded + behind, 0) == (value, len(encoded))
    assert read_varint(encoded[:-1], 0) is None


def test_endless_varint_is_refused():
    with pytest.raises(ProtocolError):
        read_varint(b"\xff" * 10, 0)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=3), st.data())
def test_messages_are_cut_at_any_split(messages, data):
    wire = b"".join(varint(len(message)) + message for message in messages)
    cutter, out = MessageCutter(40), []
    while wire:
        n = data.draw(st.integers(1, len(wire)))
        piece, wire = wire[:n], wire[n:]
        message = cutter.feed(piece)
        while message is not None:
            out.append(message)
            message = cutter.feed(b"")
    assert out == messages


def test_message_over_the_limit_is_refused_before_it_has_come():
    with pytest.raises(ProtocolError, match="at most 40"):
        MessageCutter(40).feed(varint(41))
