"""What a revocation list does to a replica: it is taken from the CA alone, and what it names no longer counts."""

from __future__ import annotations

import itertools

import pytest

from tela.crdt import gmap
from tela.crdt.delta import ALL_BUCKETS, Key, delta_of
from tela.crdt.gmap import GossipMap, Outcome
from tela.crdt.lattice import Status
from tela.crdt.registry import Change, Registry
from tela.record import Kind, VoteKind
from tela.revocation import RevokedKind
from tests.lab.statements import CA, NOW, CountingVerifier, delta, node, raw_envelope, raw_record, raw_revocations, vote

A, B, C, D = (node(number) for number in range(1, 5))
ISSUER = bytes(32)  # of every certificate in tests.lab.statements
REVOKE_A = raw_revocations((RevokedKind.NODE, A))


class Replica(GossipMap):
    """A map that expels when its core would."""

    def __init__(self) -> None:
        super().__init__(CountingVerifier().verifier)

    def take(self, fact: object, unix_s: float = NOW) -> Outcome:
        merged = self.merge(delta(fact), unix_s)
        if merged.is_changed and merged.key.kind == Kind.REVOCATION:
            self.expel()
        self.validate()
        return merged.outcomes[0]


def replica(*facts: object) -> Replica:
    made = Replica()
    for fact in (*map(raw_record, (A, B, C, D)), *facts):
        assert made.take(fact) is Outcome.NEW
    return made


@pytest.mark.parametrize(
    ("raw", "outcome"),
    [
        (REVOKE_A, Outcome.NEW),
        (raw_revocations((RevokedKind.NODE, A), owner=B), Outcome.REFUSED),  # a member's own "list"
        (REVOKE_A[:-1] + b"\x00", Outcome.BAD_SIGNATURE),
        (raw_envelope(CA, b"\xc1", session=1, kind=Kind.REVOCATION), Outcome.REFUSED),
        (raw_envelope(CA, b"", kind=Kind.CATALOG), Outcome.UNKNOWN),  # the CA is no node
    ],
)
def test_only_the_ca_revokes(raw, outcome):
    made = replica()
    assert made.take(raw) is outcome
    assert (made.node(A) is None) == (raw == REVOKE_A)


def test_what_a_revoked_node_said_is_gone_and_cannot_come_back():
    catalog = raw_envelope(A, b"catalog", kind=Kind.CATALOG)
    made = replica(catalog, vote(A, B), vote(C, B))
    made.take(REVOKE_A)
    assert set(made) == {Key(CA, Kind.REVOCATION), *(Key(each, Kind.NODE) for each in (B, C, D))}
    assert [each.observer for each in made.node(B).votes] == [C]
    assert made.certificate_of(A) is None
    assert made.take(raw_record(A, version=2)) is Outcome.REFUSED
    assert made.take(raw_record(A, session=NOW * 1000 + 1)) is Outcome.REFUSED
    assert made.take(catalog) is Outcome.UNKNOWN
    assert made.take(vote(A, D)) is Outcome.REFUSED


def test_revoked_issuer_takes_all_of_its_members_along():
    made = replica()
    made.take(raw_revocations((RevokedKind.ISSUER, ISSUER)))
    assert set(made) == {Key(CA, Kind.REVOCATION)}


def test_revoked_token_expels_nobody():
    made = replica()
    made.take(raw_revocations((RevokedKind.TOKEN, b"12345678")))
    assert len(made) == 5


def test_death_that_a_revoked_vote_proved_is_none():
    made = replica(*(vote(each, D, kind=VoteKind.DOWN) for each in (A, B, C)))
    assert made.node(D).status is Status.DOWN
    made.take(REVOKE_A)
    assert made.node(D).status is Status.SERVING


def test_newer_list_wins_in_any_order_and_an_older_one_is_a_duplicate():
    older, newer = REVOKE_A, raw_revocations((RevokedKind.NODE, A), (RevokedKind.NODE, B), version=2)
    for order in itertools.permutations([older, newer]):
        made = replica()
        for raw in order:
            made.take(raw)
        assert made.revoked.version == 2
        assert set(made) == {Key(CA, Kind.REVOCATION), Key(C, Kind.NODE), Key(D, Kind.NODE)}


def test_list_outlives_leases_and_a_full_map_has_room_for_it(monkeypatch):
    monkeypatch.setattr(gmap, "MAX_ENTRIES", 4)
    made = replica()
    assert made.take(raw_record(node(5))) is Outcome.FULL
    assert made.take(REVOKE_A) is Outcome.NEW
    made.sweep(NOW + 365 * 86_400)
    assert set(made) == {Key(CA, Kind.REVOCATION)}
    assert made.take(raw_record(A, issued=NOW + 365 * 86_400), NOW + 365 * 86_400) is Outcome.REFUSED


def test_replicas_converge_whenever_the_list_came():
    facts = [*map(raw_record, (A, B, C, D)), vote(A, B), vote(C, B), vote(A, D, kind=VoteKind.DOWN), REVOKE_A]
    early, late = Replica(), Replica()
    for made, order in ((early, reversed(facts)), (late, facts)):
        for fact in order:
            made.take(fact)
    for source, target in ((early, late), (late, early)) * 2:
        send, _ = source.digest.compare(ALL_BUCKETS, target.digest.lines(ALL_BUCKETS))
        for key in send:
            target.merge(delta_of(source.get(key)), NOW)
    assert early.digest.root == late.digest.root
    assert [each.observer for each in late.node(B).votes] == [C]


def test_candidates_of_a_revoked_node_leave_the_snapshot():
    made, registry = Replica(), Registry()
    for each in (A, B):
        made.take(raw_record(each, models=("llama",)))
    registry.apply((Change(each, made.node(each), made.certificate_of(each)) for each in (A, B)), unix_s=NOW)
    made.merge(delta(REVOKE_A), NOW)
    snapshot = registry.apply((Change(key.owner, made.node(key.owner), None) for key in made.expel()), unix_s=NOW)
    assert [candidate.node for candidate in snapshot.models["llama"]] == [B]
    assert set(snapshot.members) == {B}
