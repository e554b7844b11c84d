"""How often one observer may suspect one subject."""

from __future__ import annotations

import pytest

from tela.crdt.lattice import entry_of
from tela.gossip.members import (
    DOWN_AFTER_S,
    MASS_HOLD_S,
    MASS_MIN,
    MASS_WINDOW_S,
    MAX_HEALTH,
    MAX_VOTES,
    RECOVERY_S,
    VOTES_WINDOW_S,
    LocalHealth,
    MassGuard,
    Observer,
)
from tela.record import VoteKind
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


def test_doubt_about_a_suspect_does_not_set_its_time_back() -> None:
    observer = Observer(US)
    observer.doubt(PEER, 0.0, 0.0)
    assert len(observer.due(0.0, lambda _: ENTRY)) == 1
    observer.doubt(PEER, DOWN_AFTER_S - 1, 0.0)
    assert observer.due(DOWN_AFTER_S - 1, lambda _: ENTRY) == []
    (verdict,) = observer.due(DOWN_AFTER_S, lambda _: ENTRY)
    assert verdict.kind is VoteKind.DOWN


def test_nobody_is_condemned_while_many_are_suspect() -> None:
    observer = Observer(US)
    observer.doubt(PEER, 0.0, 0.0)
    observer.due(0.0, lambda _: ENTRY)
    assert observer.due(DOWN_AFTER_S, lambda _: ENTRY, may_condemn=False) == []
    assert len(observer.due(DOWN_AFTER_S + 1, lambda _: ENTRY)) == 1


@pytest.mark.parametrize(
    ("n_members", "n_suspects", "apart_s", "is_on"),
    [
        (8, MASS_MIN, 1.0, True),
        (8, MASS_MIN - 1, 1.0, False),
        (100, 29, 0.1, False),
        (100, 30, 0.1, True),
        (8, 8, MASS_WINDOW_S, False),  # one after the other: those are deaths
    ],
)
def test_mass_guard_tells_a_cut_from_deaths(n_members: int, n_suspects: int, apart_s: float, is_on: bool) -> None:
    guard = MassGuard()
    for number in range(n_suspects):
        guard.note(node(10), number * apart_s, n_members)  # one that flaps counts once
        guard.note(node(10 + number), number * apart_s, n_members)
    last = (n_suspects - 1) * apart_s
    assert guard.is_on(last) is is_on
    assert not guard.is_on(last + MASS_HOLD_S)


def test_health_is_bounded_and_recovers_in_quiet_times() -> None:
    health = LocalHealth()
    health.recover(0.0)
    assert health.factor == 1
    for at in range(MAX_HEALTH + 5):
        health.worsen(float(at))
    last = MAX_HEALTH + 4.0
    assert health.factor == 1 + MAX_HEALTH
    health.recover(last + RECOVERY_S - 1)
    assert health.factor == 1 + MAX_HEALTH
    health.recover(last + RECOVERY_S)
    health.recover(last + RECOVERY_S)
    assert health.factor == MAX_HEALTH
