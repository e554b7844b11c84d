"""Whose time is believed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tela.net.swarmclock import MAX_HUBS, TOLERANCE_S, SwarmClock
from tests.lab.statements import NOW, node

YEAR_S = 365 * 86_400.0
HUBS = [node(number) for number in range(20)]


class Host:
    """A wall clock that anybody may set, and one that nobody may."""

    def __init__(self, error_s: float = 0.0) -> None:
        self.true_s, self.error_s = 0.0, error_s
        self.clock = SwarmClock(lambda: NOW + self.true_s + self.error_s, monotonic=lambda: self.true_s)

    def hear(self, *hub_errors_s: float) -> None:
        for hub, error_s in zip(HUBS, hub_errors_s, strict=False):
            self.clock.learn(hub, NOW + self.true_s + error_s)

    @property
    def error_of_now_s(self) -> float:
        return self.clock.now() - (NOW + self.true_s)


def test_own_clock_is_believed_while_nobody_says_otherwise() -> None:
    host = Host(YEAR_S)
    assert host.error_of_now_s == YEAR_S
    assert host.clock.warnings == ()


def test_clock_a_year_off_is_corrected_and_told() -> None:
    host = Host(-YEAR_S)
    host.hear(0.3)
    host.true_s += 7200
    assert abs(host.error_of_now_s - 0.3) < 1e-3
    assert "31536000 s behind" in host.clock.warnings[0]


def test_small_differences_are_left_alone() -> None:
    host = Host(TOLERANCE_S - 1)
    host.hear(0.0)
    assert host.error_of_now_s == TOLERANCE_S - 1
    assert host.clock.skew_s == 0


def test_clock_that_is_stepped_later_changes_nothing_and_one_that_is_put_right_is_believed_again() -> None:
    host = Host()
    host.hear(0.0, 0.1)
    host.error_s = YEAR_S
    assert abs(host.error_of_now_s) <= 0.1
    host.error_s = 0.5
    assert host.error_of_now_s == 0.5
    assert host.clock.warnings == ()


def test_one_hub_among_three_cannot_set_the_time() -> None:
    host = Host(3.0)
    host.hear(0.0, YEAR_S, 0.2)
    assert host.error_of_now_s == 3.0


def test_of_two_hubs_the_one_nearer_to_our_own_clock_is_believed() -> None:
    host = Host(3.0)
    host.hear(YEAR_S, 0.0)
    assert host.error_of_now_s == 3.0


def test_time_before_the_invite_is_not_believed() -> None:
    clock = SwarmClock(lambda: NOW + YEAR_S, monotonic=lambda: 0.0, earliest_unix_s=NOW)
    clock.learn(HUBS[0], NOW - 1)
    assert clock.now() == NOW + YEAR_S
    clock.learn(HUBS[0], NOW)
    assert clock.now() == NOW


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.floats(-1e9, 1e9), st.floats(0, 1e6))
def test_hubs_that_agree_bound_the_error_whatever_our_clock_says(
    hub_errors_s: list[float], error_s: float, passed_s: float
) -> None:
    host = Host(error_s)
    host.hear(*hub_errors_s)
    host.true_s += passed_s
    assert abs(host.error_of_now_s) <= TOLERANCE_S + 5 + 1e-3
    assert len(host.clock._samples) <= MAX_HUBS
