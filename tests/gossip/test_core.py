from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.crdt.gmap import Outcome
from tela.crdt.lattice import LEASE_S, Status
from tela.gossip.conduct import MAX_STRIKES, MUTE_S
from tela.gossip.events import (
    Close,
    Farewell,
    FrameReceived,
    Leave,
    LinkDown,
    LinkId,
    LinkUp,
    Publish,
    Received,
    SessionTaken,
    Suspect,
    Synced,
    Tick,
    Voted,
)
from tela.gossip.frames import Digest, Hello, Ping, Records, encode_frame
from tela.record import Catalog, SessionState, VoteKind
from tela.wire import decode_catalog
from tests.lab.cores import Cores
from tests.lab.statements import NOW, card, delta, node, raw_record, vote

A, B, C, D, E = (node(number) for number in range(1, 6))


def mesh(*nodes: bytes) -> Cores:
    """Every node published and linked to every other."""
    cores = Cores(*nodes)
    for index, opener in enumerate(nodes):
        for other in nodes[index + 1 :]:
            cores.connect(opener, other)
    cores.settle()
    for each in nodes:
        cores.publish(each, "llama")
    assert len(cores.roots()) == 1
    return cores


def told(cores: Cores, node_id: bytes, kind: type) -> list[object]:
    return [effect for effect in cores.effects[node_id] if isinstance(effect, kind)]


def payload(frame: object) -> bytes:
    return encode_frame(frame)[4:]


def test_publish_floods_along_a_chain_and_is_not_sent_back():
    cores = Cores(A, B, C)
    cores.connect(A, B)
    cores.connect(B, C)
    cores.settle()
    start = len(cores.sent)
    cores.publish(A, "llama")
    assert cores[C].map.node(A).status is Status.SERVING
    assert [(sender, receiver) for sender, receiver, _ in cores.sent[start:]] == [(A, B), (B, C)]


def test_link_opening_brings_both_sides_everything_and_says_synced():
    cores = Cores(A, B)
    cores.handle(A, Publish(SessionState.SERVING, card(A)))
    cores.handle(B, Publish(SessionState.SERVING, card(B)))
    cores.connect(A, B)
    cores.settle()
    assert len(cores.roots()) == 1
    assert told(cores, A, Synced) == [Synced(B)]
    assert told(cores, B, Synced) == [Synced(A)]
    sent = [delta for frame in cores.frames(Records) for delta in frame.deltas]
    assert len(sent) == 2  # each record once


def test_opening_with_many_records_is_chunked():
    cores = Cores(A, B)
    for number in range(100, 400):
        cores[A].map.merge(delta(raw_record(node(number))), NOW)
    cores.connect(A, B)
    cores.settle()
    assert len(cores.roots()) == 1
    assert len(cores[B].map) == 300
    assert all(len(frame.deltas) <= 32 for frame in cores.frames(Records))


def test_newest_record_overtakes_what_a_slow_link_still_owes():
    cores = Cores(A, B)
    cores.connect(A, B)
    cores.settle()
    start = len(cores.sent)
    for _ in range(5):  # no Sent meanwhile: the link is busy with the first
        cores.handle(A, Publish(SessionState.SERVING, card(A)))
    cores.settle()
    assert len(cores.frames(Records, start)) == 2
    assert cores[B].map.node(A).rec.version == 5


def test_lost_update_is_repaired_after_two_exchanges_and_not_more_often_than_allowed():
    cores = mesh(A, B)
    start = len(cores.sent)
    cores[A].map.merge(delta(raw_record(C)), NOW)  # as if the flood had been lost
    cores.run(1.0)
    assert not cores.frames(Digest, start)
    cores.run(1.0)
    assert len(cores.roots()) == 1
    assert len(cores.frames(Digest, start)) == 1


def test_permanent_difference_keeps_to_the_repair_rate():
    cores = mesh(A, B)
    ahead = raw_record(C, issued=NOW + 5000)
    cores[A].map.merge(delta(ahead), NOW + 5000)  # B holds it out for as long as its clock says so
    start = len(cores.sent)
    cores.run(20.0)
    assert 5 <= len(cores.frames(Digest, start)) <= 10


def test_two_streams_of_a_pair_become_the_one_of_the_lower_id():
    cores = Cores(A, B)
    by_lower, by_higher = cores.connect(A, B), cores.connect(B, A)
    cores.settle()
    closed = {effect.link for effect in told(cores, A, Close) + told(cores, B, Close)}
    assert by_higher in closed or LinkId(by_higher + 1) in closed
    assert by_lower not in closed
    assert cores[A].peers == {B}
    assert cores[B].peers == {A}


def test_second_stream_of_the_same_opener_replaces_the_first():
    cores = Cores(A, B)
    first = cores.connect(A, B)
    cores.connect(A, B)
    cores.settle()
    assert Close(first, B, "replaced") in cores.effects[A]
    cores.run(5.0)
    assert not told(cores, A, Voted)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"\xc1"], "protocol"),
        ([payload(Records(()))], "no hello"),
        ([payload(Hello(2, 3, 0))], "version"),
    ],
)
def test_bad_opening_closes_the_link(frames, reason):
    cores = Cores(A)
    cores.handle(A, LinkUp(LinkId(1), B, is_ours=False))
    for each in frames:
        cores.handle(A, FrameReceived(LinkId(1), each))
    assert told(cores, A, Close) == [Close(LinkId(1), B, reason)]


def test_unknown_frame_type_is_ignored():
    cores = mesh(A, B)
    cores.handle(A, LinkUp(LinkId(99), C, is_ours=False))
    cores.handle(A, FrameReceived(LinkId(99), payload(Hello(1, 9, 0))))
    cores.handle(A, FrameReceived(LinkId(99), msgpack.packb([77, b"future"])))
    assert not told(cores, A, Close)


def test_poison_is_counted_and_three_strikes_close_and_mute():
    cores = Cores(A)
    cores.handle(A, LinkUp(LinkId(1), B, is_ours=False))
    cores.handle(A, FrameReceived(LinkId(1), payload(Hello(1, 1, 0))))
    poison = raw_record(C)[:-1] + b"\x00"
    for _ in range(MAX_STRIKES - 1):
        cores.handle(A, FrameReceived(LinkId(1), payload(Records((delta(poison), delta(raw_record(D)))))))
    assert cores[A].map.node(D) is not None
    assert not told(cores, A, Close)
    cores.handle(A, FrameReceived(LinkId(1), payload(Records((delta(b"junk"),)))))
    assert told(cores, A, Received)[-1].outcomes == (Outcome.MALFORMED,)
    assert told(cores, A, Close) == [Close(LinkId(1), B, "bad facts")]
    cores.handle(A, LinkUp(LinkId(2), B, is_ours=False))
    assert told(cores, A, Close)[-1] == Close(LinkId(2), B, "muted")
    cores.now += MUTE_S
    cores.handle(A, Tick(NOW + MUTE_S))
    cores.handle(A, LinkUp(LinkId(3), B, is_ours=False))
    assert cores[A].peers == {B}


def test_vote_on_us_from_the_future_stops_nothing():
    cores = mesh(A, B)
    cores[A]._merge(delta(vote(B, A, session=cores[A].author.session, issued=NOW + 9999)), None, cores.now)
    assert cores[A].map.node(A).status is Status.SERVING


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=40) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.binary(max_size=30) | st.lists(anything, max_size=4), max_size=4), st.integers(1, 6))
def test_whatever_a_peer_sends_raises_nothing(frames, frame_type):
    cores = Cores(A)
    cores.handle(A, LinkUp(LinkId(1), B, is_ours=False))
    cores.handle(A, FrameReceived(LinkId(1), payload(Hello(1, 1, 0))))
    for frame in frames:
        data = frame if isinstance(frame, bytes) else msgpack.packb([frame_type, *frame])
        cores.handle(A, FrameReceived(LinkId(1), data))
    cores.run(0.5)


def test_crash_is_suspected_within_the_grace_and_down_after_three_votes():
    cores = mesh(A, B, C, D)
    del cores.cores[D]
    dead = D
    for link, (owner, peer, _) in list(cores._ends.items()):
        if peer == dead:
            del cores._ends[link]
            cores.handle(owner, LinkDown(link))
    cores.run(1.25)
    assert cores[A].map.node(D).status is Status.SUSPECT
    cores.run(15.25)
    assert {core.map.node(D).status for core in cores.cores.values()} == {Status.DOWN}
    assert len(cores.roots()) == 1


def test_silent_peer_is_closed_after_three_seconds_and_suspected():
    cores = mesh(A, B)
    cores.is_mute.add(B)
    cores.run(3.5)
    assert told(cores, A, Close)[-1].reason == "silent"
    assert told(cores, A, Voted)[0].subject == B


def test_silent_peer_is_suspected_before_its_link_is_given_up():
    cores = mesh(A, B)
    cores.is_mute.add(B)
    cores.run(2.5)
    assert [effect.subject for effect in told(cores, A, Voted)] == [B]
    assert not told(cores, A, Close)


def test_silent_peer_is_doubted_here_as_often_as_it_falls_silent():
    """Votes are rationed, three in half a minute; whom we route to is our own affair."""
    cores = mesh(A, B)
    for _ in range(6):
        cores.is_mute.add(B)
        for _ in range(20):  # longer each time at first: who was there all the time makes us doubt ourselves
            cores.run(0.25)
            if cores[A].doubted:
                break
        assert cores[A].doubted == {B}
        cores.is_mute.clear()
        cores.run(2.0)
        assert cores[A].doubted == frozenset()
    cores.is_mute.add(B)
    cores.run(12.0)
    assert told(cores, A, Close)[-1].reason == "silent"
    assert cores[A].doubted == frozenset()  # the link is gone, and with it the doubt


def seconds_until_voted(cores: Cores, observer: bytes) -> float:
    began = cores.now
    while not told(cores, observer, Voted):
        cores.run(0.25)
    return cores.now - began


def test_observer_that_was_late_itself_waits_longer():
    punctual, late = mesh(A, B), mesh(A, B)
    for _ in range(3):
        late.now += 0.9  # a stalled process: its ticks come late, and with them what was sent meanwhile
        late.run(0.25)
    for cores in (punctual, late):
        cores.is_mute.add(B)
    assert seconds_until_voted(late, A) > seconds_until_voted(punctual, A)


def test_own_standstill_judges_nobody():
    cores = mesh(A, B)
    cores.now += 60.0
    cores.run(2.0)
    assert not told(cores, A, Close)
    assert not told(cores, A, Voted)


def test_link_that_comes_back_within_the_grace_is_no_death():
    cores = mesh(A, B, C)
    cores.cut(B)
    cores.run(0.5)
    cores.connect(A, B)
    cores.connect(B, C)
    cores.run(20.0)
    assert not any(told(cores, each, Voted) for each in (A, B, C))


def test_suspected_but_reachable_node_refutes():
    cores = Cores(A, B, C)
    cores.connect(A, B)
    link = cores.connect(A, C)
    cores.connect(B, C)
    cores.settle()
    for each in (A, B, C):
        cores.publish(each)
    cores.cut_link(link)
    cores.run(3.0)
    assert told(cores, A, Voted) == [Voted(C, cores[C].author.session, VoteKind.SUSPECT)]
    assert cores[A].map.node(C).ref.incarnation >= 1
    assert {core.map.node(C).status for core in cores.cores.values()} == {Status.SERVING}
    cores.run(30.0)
    assert not any(effect.kind is VoteKind.DOWN for each in (A, B, C) for effect in told(cores, each, Voted))


def test_data_plane_suspicion_probes_a_link_and_votes_without_one():
    cores = mesh(A, B)
    cores.handle(A, Suspect(B))
    cores.run(2.0)
    assert not told(cores, A, Voted)
    cores[A].map.merge(delta(raw_record(C)), NOW)
    for _ in range(40):
        cores.handle(A, Suspect(C))
        cores.run(0.25)
    assert [effect.subject for effect in told(cores, A, Voted)] == [C]  # at most one in ten seconds


def test_votes_of_others_make_us_look_ourselves():
    cores = mesh(A, B, C)
    cores.is_mute.add(C)
    false_or_not = vote(B, C, session=cores[C].author.session)
    cores.handle(A, LinkUp(LinkId(99), D, is_ours=False))
    cores.handle(A, FrameReceived(LinkId(99), payload(Hello(1, 1, 0))))
    cores.handle(A, FrameReceived(LinkId(99), payload(Records((delta(false_or_not),)))))
    cores.run(1.5)
    assert Voted(C, cores[C].author.session, VoteKind.SUSPECT) in cores.effects[A]


def test_refutations_are_limited_to_one_a_second():
    cores = mesh(A, B, C)
    first = cores[A].author.version
    for _ in range(12):
        entry = cores[B].map.node(A)
        doubt = vote(B, A, session=entry.ref.session, incarnation=entry.ref.incarnation)
        cores[B]._merge(delta(doubt), None, cores.now)
        cores.run(0.25)
    assert 2 <= cores[A].author.version - first <= 4


def test_node_that_meets_its_own_death_goes_on_under_a_new_session():
    cores = mesh(A, B, C, D)
    before = cores[A].author.session
    for observer in (B, C, D):
        cores[B].map.merge(delta(vote(observer, A, session=before, kind=VoteKind.DOWN)), NOW)
    cores.run(4.0)
    assert told(cores, A, SessionTaken)[-1].reason == "down"
    assert cores[A].author.session > before
    assert {core.map.node(A).status for core in cores.cores.values()} == {Status.SERVING}


def test_restart_with_the_clock_set_back_takes_a_higher_session():
    cores = mesh(A, B)
    before = cores[A].author.session
    cores.cut(A)
    cores.restart(A)
    cores.handle(A, Tick(NOW - 1000))
    cores.connect(A, B)
    cores.settle()
    assert told(cores, A, Synced)
    cores.publish(A)
    assert cores[A].author.session == before + 1
    assert cores[B].map.node(A).rec.session == before + 1


def test_older_twin_moves_on_and_floods_no_more_than_allowed():
    cores = mesh(A, B)
    for _ in range(8):
        session = cores[A].author.session + 5
        cores[B]._merge(delta(raw_record(A, session=session)), None, cores.now)
        cores.run(1.0)
    reasons = [effect.reason for effect in told(cores, A, SessionTaken)]
    assert reasons == ["start", "duplicate identity"]


def test_leave_is_acknowledged_by_two_and_suspects_nobody():
    cores = mesh(A, B, C, D)
    cores.handle(D, Leave())
    cores.settle()
    assert told(cores, D, Farewell)[-1].is_enough
    assert told(cores, D, Farewell)[-1].n_acks >= 2
    assert cores[A].map.node(D).status is Status.LEFT
    cores.cut(D)
    del cores.cores[D]
    cores.run(20.0)
    assert not any(told(cores, each, Voted) for each in (A, B, C))


def test_leave_over_a_busy_link_asks_only_after_the_record():
    cores = mesh(A, B)
    start = len(cores.sent)
    cores.handle(A, Publish(SessionState.DRAIN, card(A)))  # the link is writing this when we leave
    cores.handle(A, Leave())
    cores.settle()
    kinds = [type(frame) for sender, _, frame in cores.sent[start:] if sender == A]
    assert kinds == [Records, Records, Ping]
    assert told(cores, A, Farewell)[-1] == Farewell(1, is_enough=True)


def test_leave_without_links_is_over_at_once():
    cores = Cores(A)
    cores.publish(A)
    cores.handle(A, Leave())
    assert told(cores, A, Farewell) == [Farewell(0, is_enough=True)]
    cores.publish(A)
    assert cores[A].map.node(A).status is Status.LEFT


def test_record_is_renewed_at_half_its_lease_and_ends_without_its_owner():
    cores = Cores(A)
    cores.publish(A)
    cores.now = LEASE_S / 2 - 1
    cores.handle(A, Tick(NOW + cores.now))
    assert cores[A].author.version == 1
    cores.now += 1
    cores.handle(A, Tick(NOW + cores.now))
    assert cores[A].author.version == 2


def test_wall_clock_that_jumps_kills_nobody():
    cores = mesh(A, B)
    for _ in range(40):
        cores.now += 0.25
        for each in (A, B):
            cores.handle(each, Tick(NOW + 100_000))
        cores.settle()
    assert not told(cores, A, Voted)
    assert {core.map.node(each).status for core in cores.cores.values() for each in (A, B)} == {Status.SERVING}


def test_catalog_is_said_once_a_session_and_ends_with_it() -> None:
    cores = Cores(A, B)
    cores.connect(A, B)
    catalog = Catalog(host="node17", contact="ops")
    for state in (SessionState.JOIN, SessionState.SERVING):
        cores.handle(A, Publish(state, card(A, "llama"), catalog))
        cores.settle()
    entry = cores.cores[B].map.catalog(A)
    assert entry is not None
    assert decode_catalog(entry.rec.envelope.body) == catalog
    assert entry.rec.version == 1  # with the first record, and not with the second
    cores.handle(A, Publish(SessionState.SERVING, card(A, "llama"), Catalog(host="node18")))
    cores.settle()
    changed = cores.cores[B].map.catalog(A)
    assert changed is not None
    assert decode_catalog(changed.rec.envelope.body).host == "node18"
    cores.handle(A, Leave())
    cores.settle()
    assert cores.cores[B].map.catalog(A) is None


def test_catalog_is_said_anew_in_a_session_that_was_forced_on_us() -> None:
    cores = Cores(A, B)
    cores.connect(A, B)
    cores.handle(A, Publish(SessionState.SERVING, card(A, "llama"), Catalog(host="node17")))
    cores.settle()
    session = cores.cores[A].author.session
    cores.cores[A].author.hear(session + 5)  # a twin
    cores.run(1.0)
    assert cores.cores[A].author.session > session
    entry = cores.cores[B].map.catalog(A)
    assert entry is not None
    assert entry.rec.session == cores.cores[A].author.session
