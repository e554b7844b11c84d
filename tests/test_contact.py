"""A node without any link: what it dials, and what it says."""

from __future__ import annotations

import pytest
import trio
from structlog.testing import capture_logs

from tela.contact import KNOWN_PEERS_AFTER_S, UNREACHABLE_AFTER_S, Contact
from tela.net.known_peers import KnownPeers
from tests.net.test_known_peers import address, node

HUB, FRIEND = node(1), node(2)


class Bench:
    def __init__(self, *, has_hubs: bool = True) -> None:
        self.is_linked = False
        self.failures = {HUB: "connection refused"}
        known = KnownPeers(None, now=lambda: 1.0)
        known.remember(FRIEND, [address(FRIEND)], is_hub=False)
        self.contact = Contact(
            is_linked=lambda: self.is_linked, failures=lambda: self.failures, known=known, has_hubs=has_hubs
        )


async def test_known_peers_are_wanted_only_while_nobody_answers(autojump_clock):
    b = Bench()
    assert b.contact.targets() == {}
    await trio.sleep(KNOWN_PEERS_AFTER_S)
    assert b.contact.targets() == {FRIEND: (address(FRIEND),)}
    b.is_linked = True
    assert b.contact.targets() == {}
    b.is_linked = False
    await trio.sleep(KNOWN_PEERS_AFTER_S - 1)
    assert b.contact.targets() == {}


async def test_unreachable_is_said_within_ten_seconds_with_the_reason(autojump_clock):
    b = Bench()
    await trio.sleep(UNREACHABLE_AFTER_S - 1)
    assert not b.contact.is_unreachable
    assert b.contact.warnings() == ()
    await trio.sleep(1)
    assert trio.current_time() <= 10
    assert b.contact.is_unreachable
    (warning,) = b.contact.warnings()
    assert warning.startswith("unreachable: no link to any member for 8 s; ")
    assert "connection refused" in warning
    b.is_linked = True
    assert not b.contact.is_unreachable
    assert b.contact.warnings() == ()


@pytest.mark.parametrize(("alone_s", "n_lines"), [(5, 0), (20, 1), (125, 2), (3600, 60)])
async def test_one_line_a_minute_is_logged_while_alone(autojump_clock, alone_s, n_lines):
    b = Bench()
    b.failures = {}
    with capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            await nursery.start(b.contact.serve)
            await trio.sleep(alone_s)
            b.is_linked = True
            await trio.sleep(3600)
            nursery.cancel_scope.cancel()
    assert [line["event"] for line in logs] == ["node.isolated"] * n_lines
    assert {line["reason"] for line in logs} <= {"no hub of the invite answers"}


async def test_second_outage_is_told_at_once_too(autojump_clock):
    b = Bench()
    with capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            await nursery.start(b.contact.serve)
            for _ in range(2):
                await trio.sleep(10)
                b.is_linked = True
                await trio.sleep(2)
                b.is_linked = False
            nursery.cancel_scope.cancel()
    assert len(logs) == 2


async def test_first_hub_of_a_swarm_is_not_alone(autojump_clock):
    b = Bench(has_hubs=False)
    await trio.sleep(3600)
    assert not b.contact.is_unreachable
    assert b.contact.warnings() == ()
    assert b.contact.targets()  # but it looks for those that it knew
