from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tela.crdt.delta import ALL_BUCKETS, Delta, Key, delta_of, facts_of
from tela.crdt.gmap import GossipMap, Outcome
from tela.crdt.lattice import LEASE_S, TOMBSTONE_S, Status
from tela.identity import CLOCK_SKEW_S
from tela.record import Card, Kind, NodeBody, SessionState, VoteKind
from tela.wire import encode
from tests.lab.statements import NOW, CountingVerifier, delta, node, raw_envelope, raw_record, vote

A, B, C, D = (node(number) for number in range(1, 5))


def new_map(*deltas: Delta) -> GossipMap:
    gossip_map = GossipMap(CountingVerifier().verifier)
    for each in deltas:
        gossip_map.merge(each, NOW)
    return gossip_map


def members(*nodes: bytes) -> list[Delta]:
    return [delta(raw_record(each)) for each in nodes]


def sync(source: GossipMap, target: GossipMap, unix_s: float = NOW) -> None:
    """One anti-entropy exchange in one direction."""
    send, _ = source.digest.compare(ALL_BUCKETS, target.digest.lines(ALL_BUCKETS))
    for key in send:
        entry = source.get(key)
        whole = delta_of(entry) if entry else None
        if whole is not None:
            target.merge(whole, unix_s)


@pytest.mark.parametrize(
    ("raw", "outcome"),
    [
        (raw_record(A), Outcome.NEW),
        (raw_record(A, issued=NOW + CLOCK_SKEW_S + 1), Outcome.HELD),
        (raw_record(A, issued=NOW - LEASE_S), Outcome.EXPIRED),
        (raw_record(A, lease_s=LEASE_S + 1), Outcome.REFUSED),
        (raw_record(A, state=SessionState.LEFT, issued=NOW - TOMBSTONE_S), Outcome.EXPIRED),
        (raw_record(A, state=SessionState.LEFT, issued=NOW - TOMBSTONE_S + 1), Outcome.NEW),
        (raw_record(A)[:-1] + b"\x00", Outcome.BAD_SIGNATURE),
        (b"nonsense", Outcome.MALFORMED),
        (raw_envelope(A, encode(NodeBody(SessionState.SERVING, 0, NOW, NOW + 60))), Outcome.REFUSED),
        (raw_envelope(A, encode(NodeBody(SessionState.SERVING, 0, NOW, NOW + 60, card=Card(b"x")))), Outcome.REFUSED),
        (raw_envelope(A, b"", kind=Kind.CATALOG), Outcome.UNKNOWN),
        (raw_envelope(A, b"", kind=16), Outcome.REFUSED),
    ],
)
def test_merge_record_judges(raw, outcome):
    gossip_map = new_map()
    assert gossip_map.merge(delta(raw), NOW).outcomes == (outcome,)
    assert len(gossip_map) == (outcome is Outcome.NEW)
    gossip_map.validate()


def test_merge_certificate_of_another_key_refuses():
    body = encode(NodeBody(SessionState.SERVING, 0, NOW, NOW + 60, card=Card(encode_certificate_of(B))))
    assert new_map().merge(delta(raw_envelope(A, body)), NOW).outcomes == (Outcome.REFUSED,)


def encode_certificate_of(owner: bytes) -> bytes:
    from tests.lab.statements import certificate

    return encode(certificate(owner))


@pytest.mark.parametrize(
    ("given_vote", "outcome"),
    [
        (vote(B, A), Outcome.NEW),
        (vote(D, A), Outcome.REFUSED),  # no member
        (vote(A, A), Outcome.REFUSED),
        (vote(B, A, session=NOW * 1000 + 1), Outcome.UNKNOWN),
        (vote(B, A, incarnation=1), Outcome.UNKNOWN),
        (vote(B, A, session=NOW * 1000 - 1), Outcome.DUPLICATE),
        (vote(B, A, issued=NOW + CLOCK_SKEW_S + 1), Outcome.HELD),
        (vote(B, A, issued=NOW - TOMBSTONE_S), Outcome.EXPIRED),
        (msgspec.structs.replace(vote(B, A), signature=bytes(64)), Outcome.BAD_SIGNATURE),
    ],
)
def test_merge_vote_judges(given_vote, outcome):
    gossip_map = new_map(*members(A, B, C))
    assert gossip_map.merge(delta(given_vote), NOW).outcomes == (outcome,)
    gossip_map.validate()


def test_duplicate_costs_no_verification():
    counting = CountingVerifier()
    gossip_map = GossipMap(counting.verifier)
    facts = [delta(raw_record(A)), delta(raw_record(B)), delta(vote(B, A))]
    for each in facts:
        gossip_map.merge(each, NOW)
    before = counting.n_verified
    outcomes = {gossip_map.merge(each, NOW).outcomes for each in facts}
    assert outcomes == {(Outcome.DUPLICATE,)}
    assert counting.n_verified == before


def test_quorum_of_members_ends_a_session_and_a_new_one_lives():
    gossip_map = new_map(*members(A, B, C, D))
    for observer in (B, C, D):
        gossip_map.merge(delta(vote(observer, A, kind=VoteKind.DOWN)), NOW)
    assert gossip_map.node(A).status is Status.DOWN
    gossip_map.merge(delta(raw_record(A, version=2)), NOW)
    assert gossip_map.node(A).status is Status.DOWN
    gossip_map.merge(delta(raw_record(A, session=NOW * 1000 + 1)), NOW)
    assert gossip_map.node(A).status is Status.SERVING


def test_tombstone_is_told_to_a_newcomer_after_the_lease_and_forgotten_by_all_at_once():
    left = new_map(*members(A, B, C, D))
    for observer in (B, C, D):
        left.merge(delta(vote(observer, A, kind=VoteKind.DOWN)), NOW)
    late = NOW + LEASE_S + 1
    for each in (B, C, D):
        left.merge(delta(raw_record(each, version=2, issued=NOW + 1800)), NOW + 1800)
    right = GossipMap(CountingVerifier().verifier)
    for each in (B, C, D):
        right.merge(delta(raw_record(each, version=2, issued=NOW + 1800)), late)
    left.sweep(late)
    sync(left, right, late)
    assert right.node(A).status is Status.DOWN
    assert left.digest.root == right.digest.root
    for gossip_map in (left, right):
        gossip_map.sweep(NOW + TOMBSTONE_S)
        assert gossip_map.node(A) is None
    assert left.merge(delta(raw_record(A)), NOW + TOMBSTONE_S).outcomes == (Outcome.EXPIRED,)


def test_other_kinds_are_relayed_untouched_and_end_with_the_session():
    catalog = raw_envelope(A, b"\x00any bytes", kind=9)
    gossip_map = new_map(*members(A), delta(catalog))
    key = Key(A, 9)
    assert delta_of(gossip_map.get(key)).records == (catalog,)
    late = NOW + LEASE_S - 1
    gossip_map.merge(delta(raw_record(A, version=2, issued=late)), late)
    assert gossip_map.merge(delta(raw_envelope(A, b"later", kind=9, version=2)), late + 10).is_changed
    gossip_map.merge(delta(raw_record(A, session=NOW * 1000 + 1, issued=late)), late)
    assert gossip_map.get(key) is None
    assert gossip_map.merge(delta(catalog), late).outcomes == (Outcome.UNKNOWN,)
    gossip_map.validate()


def test_opaque_body_converges():
    certificate_only = msgspec.msgpack.decode(raw_record(A))[4]
    fields = msgspec.msgpack.decode(certificate_only)
    fields[5][2] = "services as a later version writes them"
    raw = raw_envelope(A, msgspec.msgpack.encode(fields), version=2)
    gossip_map = new_map(delta(raw))
    assert gossip_map.node(A).rec.version == 2
    other = new_map()
    sync(gossip_map, other)
    assert other.digest.root == gossip_map.digest.root


def test_delta_on_two_entries_is_malformed():
    mixed = delta(raw_record(A), raw_record(B))
    assert new_map().merge(mixed, NOW).outcomes == (Outcome.MALFORMED,)
    assert new_map().merge(Delta(()), NOW).outcomes == (Outcome.MALFORMED,)


statements = st.one_of(
    st.builds(
        raw_record,
        st.sampled_from([A, B, C, D]),
        session=st.sampled_from([NOW * 1000, NOW * 1000 + 1]),
        state=st.sampled_from(SessionState),
        version=st.integers(1, 3),
        incarnation=st.integers(0, 1),
    ),
    st.builds(
        vote,
        st.sampled_from([A, B, C, D]),
        st.sampled_from([A, B]),
        session=st.sampled_from([NOW * 1000, NOW * 1000 + 1]),
        incarnation=st.integers(0, 1),
        kind=st.sampled_from(VoteKind),
        issued=st.integers(NOW - 2, NOW),
    ),
)


@settings(max_examples=100)
@given(st.lists(statements, max_size=14), st.randoms())
def test_any_order_with_duplicates_converges_after_anti_entropy(facts, random):
    first, second = new_map(*members(A, B, C, D)), new_map(*members(A, B, C, D))
    shuffled = facts + facts[::2]
    random.shuffle(shuffled)
    for source, gossip_map in ((facts, first), (shuffled, second)):
        for fact in source:
            gossip_map.merge(delta(fact), NOW)
    for _ in range(2):
        sync(first, second)
        sync(second, first)
    assert first.digest.root == second.digest.root
    assert first.digest.sums == second.digest.sums
    for gossip_map in (first, second):
        gossip_map.validate()


@settings(max_examples=60)
@given(st.lists(statements, max_size=10))
def test_delta_join_equals_full_join(facts):
    whole, parts = new_map(*members(A, B, C, D)), new_map(*members(A, B, C, D))
    for fact in facts:
        whole.merge(delta(fact), NOW)
    for key in sorted(whole, key=lambda key: key.owner):
        entry = whole.get(key)
        for one in facts_of(entry).records:
            parts.merge(Delta((one.raw,)), NOW)
        for one in facts_of(entry).votes:
            parts.merge(delta(one), NOW)
    assert parts.digest.root == whole.digest.root


@settings(max_examples=60)
@given(
    st.lists(st.tuples(statements, st.integers(0, 9000)), min_size=1, max_size=12),
    st.integers(-CLOCK_SKEW_S, CLOCK_SKEW_S),
)
def test_garbage_collection_never_resurrects(events, skew_s):
    """Whatever is replayed whenever: a session that was once dead here is never seen alive again (invariant I15)."""
    gossip_map = new_map(*members(A, B, C, D))
    dead: set[tuple[bytes, int]] = set()
    for fact, at in sorted(events, key=lambda event: event[1]):
        now = NOW + at + skew_s
        gossip_map.sweep(now)
        gossip_map.merge(delta(fact), now)
        for key in gossip_map:
            entry = gossip_map.get(key)
            if entry.is_dead:
                dead.add((key.owner, entry.rec.session))
            else:
                assert (key.owner, entry.rec.session) not in dead
