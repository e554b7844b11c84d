from __future__ import annotations

from tela.crdt.gmap import GossipMap
from tela.crdt.lattice import PRESUMED_DOWN_S, Status
from tela.crdt.registry import Change, Registry, Snapshot
from tela.record import Card, InstanceState, NodeBody, NodeId, SessionState, VoteKind
from tela.wire import encode
from tests.lab.statements import NOW, CountingVerifier, card, certificate, delta, node, raw_envelope, raw_record, vote

A, B, C, D = (node(number) for number in range(1, 5))


class View:
    """A map with its read side."""

    def __init__(self) -> None:
        self.map = GossipMap(CountingVerifier().verifier)
        self.registry = Registry()

    def merge(self, *facts: object, unix_s: float = NOW) -> Snapshot:
        for fact in facts:
            owner = self.map.merge(delta(fact), unix_s).key.owner
            self.look(owner, unix_s=unix_s)
        return self.registry.snapshot

    def look(self, owner: NodeId, *, unix_s: float) -> Snapshot:
        return self.registry.apply([Change(owner, self.map.node(owner), self.map.certificate_of(owner))], unix_s=unix_s)


def test_snapshot_lists_candidates_sorted_with_what_the_certificate_says():
    view = View()
    snapshot = view.merge(raw_record(B, models=("llama", "qwen")), raw_record(A, models=("llama",)))
    assert [candidate.node for candidate in snapshot.models["llama"]] == [A, B]
    assert [candidate.instance for candidate in snapshot.models["qwen"]] == [1]
    only = snapshot.models["qwen"][0]
    assert (only.provider, only.zone, only.region, only.is_ready) == ("eth", "euler", "ch", True)
    assert snapshot.members[A].roles == ("worker",)


def test_member_whose_certificate_is_no_worker_s_serves_no_model():
    services = card(A, "llama").services
    ingress = Card(certificate=encode(certificate(A, roles=("ingress",))), services=services)
    body = NodeBody(SessionState.SERVING, 0, NOW, NOW + 3600, card=ingress)
    snapshot = View().merge(raw_envelope(A, encode(body)))
    assert snapshot.members[A].card.services == services
    assert snapshot.models == {}


def test_change_of_one_model_leaves_the_others_and_older_snapshots_alone():
    view = View()
    before = view.merge(raw_record(A, models=("llama",)), raw_record(B, models=("qwen",)))
    after = view.merge(raw_record(B, version=2, models=("mistral",)))
    assert set(before.models) == {"llama", "qwen"}
    assert set(after.models) == {"llama", "mistral"}
    assert after.models["llama"] is before.models["llama"]


def test_suspicion_shows_and_death_takes_candidates_away():
    view = View()
    view.merge(*(raw_record(each, models=("llama",)) for each in (A, B, C, D)))
    snapshot = view.merge(vote(B, A), vote(C, A))
    assert (snapshot.members[A].status, snapshot.members[A].n_suspect_votes) == (Status.SUSPECT, 2)
    assert snapshot.models["llama"][0].is_ready
    snapshot = view.merge(*(vote(each, A, kind=VoteKind.DOWN) for each in (B, C, D)))
    assert snapshot.members[A].status is Status.DOWN
    assert [candidate.node for candidate in snapshot.models["llama"]] == [B, C, D]


def test_one_observer_s_death_sentence_counts_after_a_while_unless_refuted():
    view = View()
    view.merge(raw_record(A, models=("llama",)), raw_record(B), vote(B, A), vote(B, A, kind=VoteKind.DOWN))
    after_s = PRESUMED_DOWN_S[1]
    assert view.map.presume(NOW + after_s - 1) == []
    assert view.map.presume(NOW + after_s) == [A]
    assert view.map.presume(NOW + after_s + 1) == []  # told once
    assert view.look(A, unix_s=NOW + after_s).members[A].status is Status.DOWN
    assert view.look(A, unix_s=NOW + after_s).models == {}
    view.map.merge(delta(raw_record(A, version=2, incarnation=1)), NOW + after_s)
    assert view.map.presume(NOW + after_s + 2) == [A]
    assert view.look(A, unix_s=NOW + after_s).members[A].status is Status.SERVING


def test_draining_session_under_suspicion_is_not_ready():
    view = View()
    view.merge(raw_record(B))
    snapshot = view.merge(raw_record(A, models=("llama",), state=SessionState.DRAIN), vote(B, A))
    (only,) = snapshot.models["llama"]
    assert (only.status, only.state, only.is_ready) == (Status.SUSPECT, InstanceState.READY, False)


def test_opaque_record_is_shown_and_not_routable():
    view = View()
    view.merge(raw_record(A, models=("llama",)))
    # The session stays at JOIN so that the later, unreadable record wins.
    view.merge(raw_record(B, state=SessionState.JOIN, models=("qwen",)))
    snapshot = view.merge(raw_envelope(B, b"\xc1", version=2))
    assert snapshot.members[B].card is None
    assert set(snapshot.models) == {"llama"}


def test_forgotten_node_leaves_the_snapshot():
    view = View()
    view.merge(raw_record(A, models=("llama",)))
    for key in view.map.sweep(NOW + 3600):
        view.registry.apply([Change(key.owner, view.map.node(key.owner), None)], unix_s=NOW)
    assert (dict(view.registry.snapshot.members), dict(view.registry.snapshot.models)) == ({}, {})
