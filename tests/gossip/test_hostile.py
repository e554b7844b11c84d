"""Members that say too much, and what it may cost the others."""

from __future__ import annotations

from tela.crdt import caps
from tela.crdt.gmap import Outcome
from tela.crdt.lattice import Status
from tela.gossip.conduct import USELESS_FACTS
from tela.gossip.core import PUBLISH_BURST
from tela.gossip.events import Close, FrameReceived, LinkId, LinkUp, Publish, Received
from tela.gossip.frames import MAX_DELTAS, Hello, Records
from tela.record import SessionState
from tela.wire import decode_node_body
from tests.gossip.test_core import A, B, C, D, mesh, payload, told
from tests.lab.cores import Cores
from tests.lab.statements import card, delta, raw_record


def stranger(cores: Cores, peer: bytes) -> LinkId:
    """A link of A to a peer that is no core of ours."""
    link = LinkId(77)
    cores.handle(A, LinkUp(link, peer, is_ours=False))
    cores.handle(A, FrameReceived(link, payload(Hello(1, 1, 0))))
    return link


def test_owner_that_says_too_much_is_looked_at_no_more_and_the_newest_comes_later():
    cores = mesh(A, B)
    link = stranger(cores, D)
    said = [raw_record(C, version=version) for version in range(1, 1_001)]
    before = cores.counting[A].n_verified
    for raw in said:
        cores.handle(A, FrameReceived(link, payload(Records((delta(raw),)))))
    burst, refill_per_s = caps.RECORDS
    assert cores.counting[A].n_verified - before == burst
    assert cores[A].map.node(C).rec.version == burst
    assert told(cores, A, Received)[-1].outcomes == (Outcome.LIMITED,)
    cores.handle(A, FrameReceived(link, payload(Records((delta(raw_record(D)),)))))
    assert cores[A].map.node(D) is not None  # others have room of their own
    cores.now += 1 / refill_per_s
    cores.handle(A, FrameReceived(link, payload(Records((delta(said[-1]),)))))
    assert cores[A].map.node(C).rec.version == len(said)


def test_nobody_uses_up_the_room_of_somebody_else():
    cores = mesh(A, B)
    link = stranger(cores, D)
    for version in range(1, 3):
        forged = raw_record(C, version=version)[:-1] + b"\x00"
        cores.handle(A, FrameReceived(link, payload(Records((delta(forged),)))))
    assert cores[A].map.caps.has_room(C)
    assert len(cores[A].map.caps._records) <= 2  # of A and B, who are honest


def test_peer_that_repeats_itself_for_ever_is_closed_and_muted():
    cores = mesh(A, B)
    link = stranger(cores, D)
    known = payload(Records((delta(raw_record(C)),) * MAX_DELTAS))
    burst, _ = USELESS_FACTS
    for _ in range(int(burst // MAX_DELTAS) + 2):
        cores.handle(A, FrameReceived(link, known))
    assert told(cores, A, Close)[-1] == Close(link, D, "flood")
    assert cores[A].peers == {B}


def test_engine_that_flaps_is_told_of_as_often_as_allowed_and_how_it_is_at_last():
    cores = mesh(A, B)
    first = cores[A].author.version
    for index in range(100):
        cores.handle(A, Publish(SessionState.SERVING, card(A, f"model-{index}")))
        cores.settle()
    burst, _ = PUBLISH_BURST
    assert cores[A].author.version - first <= burst
    cores.run(2.0)
    body = decode_node_body(cores[B].map.node(A).rec.envelope.body)
    assert [service.model for service in body.card.services] == ["model-99"]
    cores.handle(A, Publish(SessionState.DRAIN, card(A)))  # a step is told at once
    cores.settle()
    assert cores[B].map.node(A).status is Status.DRAIN
