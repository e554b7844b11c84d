"""The wire is frozen: golden vectors made with the msgpack package, limits, and any split of a frame stream."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela import wire
from tela.errors import ProtocolError
from tela.record import (
    MAX_RECORD_BYTES,
    Card,
    Catalog,
    Envelope,
    Hardware,
    Instance,
    InstanceState,
    Job,
    Kind,
    Listing,
    NodeBody,
    NodeId,
    Service,
    SessionId,
    SessionState,
    SwarmId,
    Vote,
    VoteKind,
)
from tela.wire import FrameDecoder, FrameType

OWNER = NodeId(bytes(range(32)))
OTHER = NodeId(bytes(range(32, 64)))
SWARM = SwarmId(b"sixteen-byte-id.")
SIGNATURE = b"s" * 64
SERVICE = Service(0, "vllm", "org/M", InstanceState.READY, 4096, "", "base")
CARD = Card(
    certificate=b"cert",
    addresses=("/ip4/192.0.2.1/tcp/4001",),
    services=(SERVICE,),
    hardware=Hardware("H100", 8, 80 << 30, 64, 1 << 40, "nvidia-smi"),
    end_unix_s=1_800_000_000,
    version="0.1.0",
    name="n1",
    instances=(Instance(0, "0.11.0", "bfloat16", "fp8", 4, 1, 2),),
    price=2.5,
    tier="stable",
)
BODY = NodeBody(SessionState.SERVING, 2, 1_790_000_000, 1_790_003_600, 0, CARD, b"12345678")
ENVELOPE = Envelope(Kind.NODE, OWNER, SessionId(1_790_000_000_000), 7, b"body", SIGNATURE)
VOTE = Vote(OWNER, OTHER, SessionId(1_790_000_000_000), 3, VoteKind.SUSPECT, 1_790_000_001, SIGNATURE)
CLAIM = wire.Claim(OWNER, 5, "key-1", "eth", 1_790_000_000, 1_790_000_060, SIGNATURE)
REQUEST = wire.RequestHead(
    CLAIM, 1, "req-1", 30.0, "POST", "/v1/chat/completions", ((b"content-type", b"application/json"),)
)
RESPONSE = wire.ResponseHead(200, b"OK", ((b"content-length", b"2"),))

CARD_FIELDS = [
    b"cert",
    ["/ip4/192.0.2.1/tcp/4001"],
    [[0, "vllm", "org/M", 2, 4096, "", "base"]],
    ["H100", 8, 80 << 30, 64, 1 << 40, "nvidia-smi"],
    1_800_000_000,
    "0.1.0",
    b"",
    "n1",
    "",
    [[0, "0.11.0", "bfloat16", "fp8", 4, 1, 2]],
    2.5,
    "stable",
]
CARD_OF_THE_FIRST_VERSION = CARD_FIELDS[:9]
CATALOG = Catalog("h1", "ops", Job("alps", "17", "gpu", 10), ("rack=1",), (Listing(0, 4096, "base", ("lora",)),))
CLAIM_FIELDS = [OWNER, 5, "key-1", "eth", 1_790_000_000, 1_790_000_060, SIGNATURE]
GOLDEN: list[tuple[msgspec.Struct, list[Any]]] = [
    (ENVELOPE, [1, OWNER, 1_790_000_000_000, 7, b"body", SIGNATURE]),
    (BODY, [2, 2, 1_790_000_000, 1_790_003_600, 0, CARD_FIELDS, b"12345678"]),
    (msgspec.structs.replace(BODY, card=None), [2, 2, 1_790_000_000, 1_790_003_600, 0, None, b"12345678"]),
    (CATALOG, ["h1", "ops", ["alps", "17", "gpu", 10], ["rack=1"], [[0, 4096, "base", ["lora"]]]]),
    (VOTE, [OWNER, OTHER, 1_790_000_000_000, 3, 1, 1_790_000_001, SIGNATURE]),
    (
        REQUEST,
        [CLAIM_FIELDS, 1, "req-1", 30.0, "POST", "/v1/chat/completions", [[b"content-type", b"application/json"]]],
    ),
    (RESPONSE, [200, b"OK", [[b"content-length", b"2"]]]),
    (wire.ErrorFrame("draining", "leaving", False), ["draining", "leaving", False]),
]


@pytest.mark.parametrize(("value", "fields"), GOLDEN, ids=lambda part: type(part).__name__)
def test_encode_golden_is_what_msgpack_writes(value: msgspec.Struct, fields: list[Any]) -> None:
    assert wire.encode(value) == msgpack.packb(fields)
    assert msgspec.msgpack.decode(msgpack.packb(fields), type=type(value)) == value


def test_record_kinds_and_states_are_frozen() -> None:
    assert [(kind.name, kind.value) for kind in Kind] == [
        ("NODE", 1), ("CATALOG", 2), ("REVOCATION", 3), ("WEIGHTS", 4), ("SYNC", 5), ("KV", 6), ("POOL", 7),
    ]  # fmt: skip
    assert [state.value for state in SessionState] == [1, 2, 3, 4]
    assert [state.value for state in InstanceState] == [1, 2, 3]
    assert [kind.value for kind in VoteKind] == [1, 2]
    assert [kind.value for kind in FrameType] == [1, 2, 3, 4, 5, 6]


def test_signing_bytes_are_frozen() -> None:
    session = struct.pack(">Q", 1_790_000_000_000)
    assert wire.record_signing_bytes(SWARM, ENVELOPE) == (
        b"tela/rec/1" + SWARM + b"\x01" + OWNER + session + struct.pack(">Q", 7) + b"body"
    )
    assert wire.vote_signing_bytes(SWARM, VOTE) == (
        b"tela/vote/1"
        + SWARM
        + OWNER
        + OTHER
        + session
        + struct.pack(">Q", 3)
        + b"\x01"
        + struct.pack(">Q", 1_790_000_001)
    )
    unsigned = [*CLAIM_FIELDS[:-1], b""]
    assert wire.claim_signing_bytes(SWARM, CLAIM) == b"tela/claim/1" + SWARM + msgpack.packb(unsigned)


@pytest.mark.parametrize(
    ("ours", "theirs", "version"),
    [((1, 1), (1, 1), 1), ((1, 2), (1, 1), 1), ((1, 1), (1, 2), 1), ((2, 3), (1, 2), 2), ((2, 2), (1, 1), None)],
)
def test_negotiate_version_meets_at_lower_maximum(
    ours: tuple[int, int], theirs: tuple[int, int], version: int | None
) -> None:
    assert wire.negotiate_version(ours, theirs) == version
    assert wire.negotiate_version(theirs, ours) == version


def test_decode_fields_of_a_later_version_are_ignored() -> None:
    later = msgpack.packb([200, b"OK", [], "a field of version 2"])
    assert wire.decode_response_head(later) == wire.ResponseHead(200, b"OK", ())
    body = msgpack.packb([2, 0, 1, 2, 0, [*CARD_FIELDS, "new"], b"", "newer"])
    assert wire.decode_node_body(body).card == CARD


def test_decode_card_of_the_first_version_is_read() -> None:
    body = msgpack.packb([2, 0, 1, 2, 0, CARD_OF_THE_FIRST_VERSION, b""])
    assert wire.decode_node_body(body).card == msgspec.structs.replace(CARD, instances=(), price=None, tier="")


def test_decode_catalog_over_a_limit_is_refused() -> None:
    for fields in (["h" * 257], ["", "", [], ["k=v"] * 17], ["", "", [], [], [[0, 0, "", ["m" * 200] * 30]]]):
        with pytest.raises(ProtocolError):
            wire.decode_catalog(msgpack.packb(fields))


@pytest.mark.parametrize(
    "fields",
    [
        [1, OWNER[:-1], 1, 1, b"", SIGNATURE],
        [1, OWNER, 1, 1, b"", SIGNATURE + b"s"],
        [1, OWNER, 0, 1, b"", SIGNATURE],
        [1, OWNER, 1, 0, b"", SIGNATURE],
        [256, OWNER, 1, 1, b"", SIGNATURE],
        [1, OWNER, 1 << 63, 1, b"", SIGNATURE],
        [1, OWNER, "1", 1, b"", SIGNATURE],
        [1, OWNER, 1, 1, bytes(MAX_RECORD_BYTES), SIGNATURE],
        "no array",
    ],
)
def test_decode_envelope_out_of_range_is_refused(fields: object) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_envelope(msgpack.packb(fields))


@pytest.mark.parametrize(
    "card",
    [
        Card(services=(SERVICE,) * 33),
        Card(addresses=("/ip4/192.0.2.1/tcp/1",) * 17),
        Card(name="é" * 129),
        Card(services=(msgspec.structs.replace(SERVICE, model="m" * 257),)),
    ],
)
def test_decode_node_body_over_a_limit_is_refused(card: Card) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_node_body(wire.encode(msgspec.structs.replace(BODY, card=card)))


@given(st.binary(max_size=200))
def test_decode_garbage_raises_only_protocol_errors(data: bytes) -> None:
    for decoder in (wire.decode_envelope, wire.decode_vote, wire.decode_node_body, wire.decode_request_head):
        try:
            decoder(data)
        except ProtocolError:
            pass


@given(
    st.lists(st.tuples(st.sampled_from(list(FrameType)), st.binary(max_size=40)), max_size=8),
    st.lists(st.integers(1, 50), max_size=30),
)
def test_frame_decoder_any_split_gives_the_same_frames(frames: list[tuple[FrameType, bytes]], cuts: list[int]) -> None:
    data = b"".join(wire.frame(kind, payload) for kind, payload in frames)
    decoder, got = FrameDecoder(), []
    for size in [*cuts, len(data)]:
        got += decoder.feed(data[:size])
        data = data[size:]
    assert got == frames
    assert decoder.is_between_frames


def test_frame_header_is_type_and_24_bit_length() -> None:
    assert wire.frame(FrameType.DATA, b"ab") == b"\x03\x00\x00\x02ab"


def test_frame_decoder_skips_hints_and_refuses_unknown_types() -> None:
    hint = struct.pack(">I", 0x81 << 24 | 3) + b"abc"
    assert FrameDecoder().feed(hint + wire.frame(FrameType.END)) == [(FrameType.END, b"")]
    with pytest.raises(ProtocolError, match="unknown frame type 7"):
        FrameDecoder().feed(struct.pack(">I", 7 << 24))
    with pytest.raises(ProtocolError, match="at most"):
        FrameDecoder().feed(struct.pack(">I", 3 << 24 | 65_533))


@given(st.binary(max_size=200_000))
def test_data_frames_carry_all_content(content: bytes) -> None:
    frames = FrameDecoder().feed(b"".join(wire.data_frames(content)))
    assert b"".join(payload for _, payload in frames) == content
    assert {kind for kind, _ in frames} <= {FrameType.DATA}
