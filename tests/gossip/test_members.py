"""How often one observer may suspect one subject."""

from __future__ import annotations

from tela.crdt.lattice import entry_of
from tela.gossip.members import MAX_VOTES, VOTES_WINDOW_S, Observer
from tests.lab.statements import node, record

US, PEER = node(1), node(2)
ENTRY = entry_of(record(PEER))


def fail_once(observer: Observer, now: float) -> int:
    """The peer falls silent and comes back; how many votes that cost."""
    observer.doubt(PEER, now, 0.0)
    votes = observer.due(now, lambda _: ENTRY)
    observer.trust(PEER)
    return len(votes)


def test_second_failure_is_suspected_as_soon_as_the_first() -> None:
    observer = Observer(US)
    assert [fail_once(observer, at) for at in (0.0, 3.0)] == [1, 1]


def test_node_that_fails_again_and_again_costs_a_bounded_number_of_votes() -> None:
    observer = Observer(US)
    n_votes = sum(fail_once(observer, float(at)) for at in range(round(VOTES_WINDOW_S)))
    assert n_votes == MAX_VOTES
    assert fail_once(observer, VOTES_WINDOW_S) == 1
