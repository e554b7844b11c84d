from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tela.crdt.lattice import QUORUM, TOMBSTONE_S, Entry, Record, Status, add_votes, entry_of, fade, join, parse_record
from tela.record import SessionState, Vote, VoteKind
from tests.lab.statements import NOW, node, raw_envelope, raw_record, record, vote

OWNER = node(0)
OBSERVERS = [node(number) for number in range(1, 6)]
BASE = NOW * 1000


# Statements are built once: drawing from a pool is ten times faster than signing in every example.
RECORDS = [
    record(OWNER, session=BASE + session, state=state, version=version, incarnation=incarnation, lease_s=lease_s)
    for session, state, version, incarnation, lease_s in itertools.product(
        (1, 2, 3), SessionState, (1, 2, 3), (0, 1, 2), (60, 61)
    )
]
VOTES = [
    vote(observer, OWNER, session=BASE + session, incarnation=incarnation, kind=kind, issued=NOW + issued)
    for observer, session, incarnation, kind, issued in itertools.product(
        OBSERVERS, (1, 2, 3, 4), (0, 1, 2), VoteKind, (0, 1, 2)
    )
]


def records() -> st.SearchStrategy[Record]:
    return st.sampled_from(RECORDS)


def votes() -> st.SearchStrategy[Vote]:
    return st.sampled_from(VOTES)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    entry = entry_of(draw(records()))
    for other in draw(st.lists(records(), max_size=2)):
        entry = join(entry, entry_of(other))
    return add_votes(entry, draw(st.lists(votes(), max_size=6)))


@given(entries(), entries())
def test_join_is_commutative(left, right):
    assert join(left, right).fingerprint() == join(right, left).fingerprint()


@given(entries())
def test_join_is_idempotent(entry):
    assert join(entry, entry).fingerprint() == entry.fingerprint()


@settings(max_examples=300)
@given(entries(), entries(), entries())
def test_join_is_associative_with_pruning_and_quorum_inside(a, b, c):
    assert join(join(a, b), c).fingerprint() == join(a, join(b, c)).fingerprint()


@settings(max_examples=100)
@given(entries(), st.lists(entries(), max_size=4))
def test_join_only_goes_up_and_never_resurrects(entry, others):
    for other in others:
        before, entry = entry, join(entry, other)
        assert entry.floor >= before.floor
        assert entry.rec.rank >= before.rec.rank
        assert entry.ref.refutation >= before.ref.refutation
        if entry.rec.session == before.rec.session:
            assert entry.rec.state >= before.rec.state
            assert entry.is_dead or not before.is_dead


@settings(max_examples=100)
@given(entries(), st.lists(votes(), max_size=6), st.randoms())
def test_votes_one_by_one_in_any_order_equal_votes_at_once(entry, given_votes, random):
    shuffled = given_votes * 2
    random.shuffle(shuffled)
    one_by_one = entry
    for each in shuffled:
        one_by_one = add_votes(one_by_one, (each,))
    assert one_by_one.fingerprint() == add_votes(entry, given_votes).fingerprint()


@given(entries())
def test_entry_stays_bounded_and_keeps_its_proof(entry):
    assert len([each for each in entry.votes if each.kind is VoteKind.SUSPECT]) <= QUORUM
    if entry.is_down:
        proof = {each.observer for each in entry.votes if each.session == entry.floor}
        assert len(proof) == QUORUM


@dataclass(frozen=True)
class NaiveEntry:
    """The obvious lattice: order by (session, version), votes pruned by the record. Three votes kill."""

    rank: tuple[int, int]
    incarnation: int
    floor: int
    votes: frozenset[tuple[int, int]]  # (observer, session)

    def join(self, other: NaiveEntry) -> NaiveEntry:
        best = max(self, other, key=lambda entry: entry.rank)
        gathered = self.votes | other.votes
        is_quorum = len({observer for observer, session in gathered if session == best.rank[0]}) >= QUORUM
        floor = max(self.floor, other.floor, best.rank[0] if is_quorum else 0)
        kept = frozenset() if best.incarnation else gathered  # "refuted": pruned by rec, before a quorum is reached
        return NaiveEntry(best.rank, best.incarnation, floor, kept)


def test_naive_lattice_is_not_associative_and_ours_is():
    a = NaiveEntry((1, 1), 0, 0, frozenset({(1, 1), (2, 1)}))
    b = NaiveEntry((1, 1), 0, 0, frozenset({(3, 1)}))
    c = NaiveEntry((1, 2), 1, 0, frozenset())
    assert a.join(b).join(c) != a.join(b.join(c))
    first = record(OWNER, session=BASE + 1)
    refuting = entry_of(record(OWNER, session=BASE + 1, version=2, incarnation=1))
    down = [vote(observer, OWNER, session=BASE + 1, kind=VoteKind.DOWN) for observer in OBSERVERS[:3]]
    two, one = add_votes(entry_of(first), down[:2]), add_votes(entry_of(first), down[2:])
    assert join(join(two, one), refuting).fingerprint() == join(two, join(one, refuting)).fingerprint()
    assert join(two, join(one, refuting)).is_down


def test_status_follows_votes_and_refutation():
    entry = entry_of(record(OWNER))
    assert entry.status is Status.SERVING
    entry = add_votes(entry, [vote(observer, OWNER) for observer in OBSERVERS[:2]])
    assert (entry.status, entry.n_suspect_votes) == (Status.SUSPECT, 2)
    entry = join(entry, entry_of(record(OWNER, version=2, incarnation=1)))
    assert (entry.status, entry.votes) == (Status.SERVING, ())
    entry = add_votes(entry, [vote(observer, OWNER, kind=VoteKind.DOWN) for observer in OBSERVERS[:3]])
    assert entry.status is Status.DOWN
    entry = join(entry, entry_of(record(OWNER, session=BASE + 9)))
    assert (entry.status, entry.votes) == (Status.SERVING, ())


def test_late_down_vote_does_not_make_a_tombstone_younger():
    downs = [vote(observer, OWNER, kind=VoteKind.DOWN, issued=NOW + index) for index, observer in enumerate(OBSERVERS)]
    entry = add_votes(entry_of(record(OWNER)), downs[:3])
    assert entry.end_unix_s == NOW + 2 + TOMBSTONE_S
    assert add_votes(entry, downs[3:]).end_unix_s == NOW + 2 + TOMBSTONE_S
    again = vote(OBSERVERS[0], OWNER, kind=VoteKind.DOWN, issued=NOW + 999, incarnation=7)
    assert add_votes(entry, [again]).fingerprint() == entry.fingerprint()


def test_separate_incidents_do_not_add_up_to_a_death():
    old = vote(OBSERVERS[0], OWNER, kind=VoteKind.DOWN, issued=NOW)
    entry = add_votes(entry_of(record(OWNER)), [old])
    assert fade(entry, NOW + TOMBSTONE_S - 1) is entry
    assert fade(entry, NOW + TOMBSTONE_S).votes == ()


def test_body_with_unknown_fields_is_read_and_kept_byte_for_byte():
    raw = raw_record(OWNER, incarnation=5, extra=("future", {"x": 1}))
    parsed = parse_record(raw)
    assert parsed.incarnation == 5
    assert parsed.raw == raw


def test_undecodable_body_is_opaque_and_lives_one_lease_of_its_session():
    parsed = parse_record(raw_envelope(OWNER, b"\xc1 nonsense"))
    assert (parsed.state, parsed.issued_unix_s, parsed.expires_unix_s) == (SessionState.JOIN, NOW, NOW + 3600)
