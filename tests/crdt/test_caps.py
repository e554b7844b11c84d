"""Token buckets by member."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tela.crdt import caps
from tela.crdt.caps import Buckets
from tests.lab.statements import node

BURST, REFILL_PER_S = 5.0, 2.0


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 3)), max_size=200))
def test_no_member_ever_gets_more_than_its_burst_and_its_refill(steps: list[tuple[int, float]]) -> None:
    buckets, now = Buckets(BURST, REFILL_PER_S), 0.0
    taken: dict[int, list[float]] = {}
    for number, pause_s in steps:
        now += pause_s
        if buckets.has_room(node(number), now):
            buckets.count(node(number), now)
            taken.setdefault(number, []).append(now)
    for times in taken.values():
        for first in range(len(times)):
            for last in range(first, len(times)):
                assert last - first + 1 <= BURST + REFILL_PER_S * (times[last] - times[first]) + 1e-6


def test_full_buckets_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(caps, "_SWEEP_ABOVE", 8)
    buckets = Buckets(BURST, REFILL_PER_S)
    for number in range(100):
        buckets.count(node(number), number * 1.0)
    assert len(buckets) <= 10
