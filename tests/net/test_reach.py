"""Which of our addresses count: the machine, by hand and by chance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tela.net.multiaddrs import Address, Carrier, address_of
from tela.net.reach import (
    ENOUGH,
    GONE_S,
    MAX_ANSWERERS,
    MAX_CANDIDATES,
    RECHECK_S,
    RETRY_S,
    Answered,
    Ask,
    Linked,
    Reach,
    Unanswered,
)
from tela.record import NodeId
from tests.lab.statements import node

OWN = node(1)
A, B, C = (node(number) for number in range(2, 5))
PUBLIC, PRIVATE = (address_of(OWN, host, 4001) for host in ("198.51.100.7", "10.1.2.3"))


def linked(*peers: NodeId) -> Linked:
    return Linked(frozenset(peers))


def reach(*claimed: Address, trusts_claims: bool = False) -> Reach:
    return Reach(claimed or (PUBLIC, PRIVATE), trusts_claims=trusts_claims)


def test_nothing_is_announced_before_a_member_has_reached_it():
    core = reach()
    assert core.announced == ()
    assert core.handle(linked(A), 0.0) == [Ask(A, (PUBLIC, PRIVATE))]
    core.handle(Answered(A, {PUBLIC: "", PRIVATE: "no route"}), 1.0)
    assert core.announced == (PUBLIC,)
    assert core.failures == {PRIVATE: "no route"}


def test_first_hub_trusts_its_claims_until_somebody_has_answered():
    core = reach(trusts_claims=True)
    assert core.announced == (PUBLIC, PRIVATE)
    core.handle(linked(A), 0.0)
    core.handle(Answered(A, {PUBLIC: "", PRIVATE: "no route"}), 1.0)
    assert core.announced == (PUBLIC,)


def test_two_members_are_asked_and_then_nobody_until_it_is_time_again():
    core = reach()
    asks = core.handle(linked(A, B, C), 0.0)
    assert [ask.peer for ask in asks] == sorted([A, B, C])[:ENOUGH]
    for ask in asks:
        assert core.handle(Answered(ask.peer, {PUBLIC: "", PRIVATE: ""}), 1.0) == []
    assert core.handle(linked(A, B, C), RECHECK_S - 1) == []
    assert {ask.peer for ask in core.handle(linked(A, B, C), RECHECK_S)} == {ask.peer for ask in asks}


def test_member_that_does_not_answer_is_passed_over_for_a_while():
    core = reach()
    core.handle(linked(A), 0.0)
    assert core.handle(Unanswered(A), 5.0) == []
    assert core.handle(linked(A), 5.0 + RETRY_S - 1) == []
    assert core.handle(linked(A), 5.0 + RETRY_S) == [Ask(A, (PUBLIC, PRIVATE))]


def test_member_that_reaches_nothing_is_asked_again_ever_more_seldom():
    core, now, pauses_s = reach(), 0.0, []
    core.handle(linked(A), now)
    for _ in range(12):
        asked_at = now
        core.handle(Answered(A, {PUBLIC: "timed out", PRIVATE: "timed out"}), now)
        while not core.handle(linked(A), now):
            now += 1.0
        pauses_s.append(now - asked_at)
    assert pauses_s[:3] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S]
    assert pauses_s[-1] == RECHECK_S
    core.handle(Answered(A, {PUBLIC: "", PRIVATE: "timed out"}), now)
    assert core.announced == (PUBLIC,)
    assert core.handle(linked(A), now + RECHECK_S - 1) == []


def test_address_counts_for_as_long_as_one_member_reaches_it():
    core = reach(PRIVATE)
    core.handle(linked(A, B), 0.0)
    core.handle(Answered(A, {PRIVATE: ""}), 1.0)
    core.handle(Answered(B, {PRIVATE: "no route"}), 1.0)
    assert core.announced == (PRIVATE,)
    core.handle(linked(A, B), RECHECK_S)
    core.handle(Answered(A, {PRIVATE: "timed out"}), RECHECK_S + 1)
    assert core.announced == ()


def test_word_of_a_member_that_left_counts_for_a_while_and_then_another_is_needed():
    core = reach(PRIVATE)
    core.handle(linked(A), 0.0)
    core.handle(Answered(A, {PRIVATE: ""}), 1.0)
    assert core.handle(linked(B), 2.0) == [Ask(B, (PRIVATE,))]
    core.handle(Answered(B, {PRIVATE: "no route"}), 3.0)
    core.handle(linked(B), 2.0 + GONE_S - 1)
    assert core.announced == (PRIVATE,)
    core.handle(linked(B), 2.0 + GONE_S)
    assert core.announced == ()
    assert Ask(A, (PRIVATE,)) in core.handle(linked(A, B), 2.0 + GONE_S + 1)


def test_node_that_is_alone_keeps_what_was_true():
    core = reach(PRIVATE)
    core.handle(linked(A), 0.0)
    core.handle(Answered(A, {PRIVATE: ""}), 1.0)
    for now in (2.0, 2.0 + GONE_S, 10 * GONE_S):
        core.handle(linked(), now)
        assert core.announced == (PRIVATE,)


def test_others_are_asked_where_the_first_reached_nothing():
    members = [node(number) for number in range(10, 20)]
    core, now, asked = reach(PRIVATE), 0.0, set()
    waiting = core.handle(linked(*members), now)
    while waiting:
        ask = waiting.pop()
        asked.add(ask.peer)
        waiting += core.handle(Answered(ask.peer, {PRIVATE: "no route"}), now)
    assert len(asked) == MAX_ANSWERERS
    core = reach(PRIVATE)
    first, second = core.handle(linked(*members), now)
    (third,) = core.handle(Answered(first.peer, {PRIVATE: "no route"}), now)
    assert core.handle(Answered(second.peer, {PRIVATE: ""}), now) == []
    assert core.handle(Answered(third.peer, {PRIVATE: ""}), now) == []


def test_host_that_the_user_excluded_is_no_candidate():
    core = Reach((PRIVATE,), trusts_claims=False, is_wanted=lambda host: host != PUBLIC.host)
    core.handle(linked(A), 0.0)
    assert core.handle(Answered(A, {PRIVATE: "no route"}, PUBLIC.host), 1.0) == []


def test_host_that_a_member_sees_is_tried_with_our_ports():
    core = reach(PRIVATE._replace(carrier=Carrier.WS))
    core.handle(linked(A), 0.0)
    seen = PUBLIC._replace(carrier=Carrier.WS)
    assert core.handle(Answered(A, {PRIVATE: "no route"}, PUBLIC.host), 1.0) == [Ask(A, (seen,))]
    assert core.handle(Answered(A, {seen: ""}, PUBLIC.host), 2.0) == []
    assert core.announced == (seen,)


def test_node_that_listens_nowhere_asks_nobody():
    core = Reach((), trusts_claims=True)
    assert core.handle(linked(A, B), 0.0) == []
    assert core.handle(Answered(A, {}, PUBLIC.host), 0.0) == []
    assert core.announced == ()


hosts = st.sampled_from([f"198.51.100.{number}" for number in range(30)])
peers = st.sampled_from([A, B, C])
events = st.one_of(
    st.frozensets(peers).map(Linked),
    peers.map(Unanswered),
    st.builds(Answered, peers, st.just({PUBLIC: ""}) | st.just({PUBLIC: "no", PRIVATE: "no"}), hosts | st.just("")),
)


@given(st.lists(st.tuples(events, st.floats(0, 100)), max_size=40))
def test_questions_and_candidates_are_bounded_whatever_members_say(steps):
    core, now, n_asks = reach(), 0.0, 0
    for event, pause_s in steps:
        now += pause_s
        for ask in core.handle(event, now):
            n_asks += 1
            assert len(ask.addresses) <= MAX_CANDIDATES
            assert all(address.node == OWN for address in ask.addresses)
        assert set(core.announced) <= set(core._candidates)
        assert len(core._candidates) <= MAX_CANDIDATES
        assert not set(core.failures) & set(core.announced)
    n_retries = 3 * (1 + now / RETRY_S)
    assert n_asks <= n_retries + MAX_CANDIDATES
