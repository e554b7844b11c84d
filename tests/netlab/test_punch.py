"""Paths through the NATs of two sites: met directly where they keep ports, over the hub where they do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.load import ask_many
from tests.netlab.net import Net
from tests.netlab.swarm import FRONT, MODEL, NetSwarm, failures, seconds_until

MEET_LIMIT_S = 10.0
"""overlay.md 5: how a node is reached is said within it."""
CIRCUIT_LIMIT_S = 20.0
"""One with nothing left on it goes with its next heartbeat, of which there is one in 5 s."""


@pytest.fixture(scope="module")
def swarm(net: Net) -> Iterator[NetSwarm]:
    """The public hub, an ingress in site A, workers that listen nowhere in both sites."""
    with NetSwarm(net) as swarm:
        swarm.start_sites()
        yield swarm


def view(swarm: NetSwarm, name: str, of: str) -> dict[str, str]:
    return next((dict(each) for each in swarm.look(name)["nodes"] if each["name"] == of), {"path": "", "reason": ""})


def ask_front(net: Net, swarm: NetSwarm, n_requests: int, model: str = MODEL) -> list[str]:
    with net.inside("a1"):
        return failures(ask_many(swarm, model, n_requests=n_requests))


def test_sites_meet_directly_and_both_sides_say_so(net: Net, swarm: NetSwarm) -> None:
    seconds_until(lambda: view(swarm, FRONT, "b1")["path"] == "punched", "the sites to meet", limit_s=MEET_LIMIT_S)
    assert view(swarm, "b1", FRONT)["path"] == "punched"
    assert view(swarm, "b1", "pub")["path"] == "direct"
    assert ask_front(net, swarm, 20) == []


def test_newcomer_is_met_within_seconds(swarm: NetSwarm, figures: dict[str, object]) -> None:
    swarm.start_fake("b2-new", models="new")
    seconds_until(lambda: view(swarm, FRONT, "b2-new")["path"], "the newcomer to be linked", limit_s=60)
    figures["punched_s"] = seconds_until(
        lambda: view(swarm, FRONT, "b2-new")["path"] == "punched", "the newcomer to be met", limit_s=MEET_LIMIT_S
    )
    swarm.call("leave", "--name", "b2-new")


def test_neighbours_behind_one_nat_meet_in_their_own_network(net: Net, swarm: NetSwarm) -> None:
    """No outside hub can verify a private address; they need no router between them."""
    seconds_until(lambda: view(swarm, FRONT, "a2")["path"] == "punched", "the neighbours to meet", limit_s=MEET_LIMIT_S)
    net.close("gwA")
    try:
        assert view(swarm, "a2", FRONT)["path"] == "punched"
    finally:
        net.open("gwA")


def test_nat_that_maps_each_connection_anew_leaves_the_relay_and_the_reason(net: Net, swarm: NetSwarm) -> None:
    net.map_ports_anew("gwB")
    try:
        swarm.start_fake("b2-hard", models="hard")
        swarm.wait_serving("hard", name=FRONT)
        seconds_until(lambda: view(swarm, FRONT, "b2-hard")["reason"], "a reason", limit_s=MEET_LIMIT_S)
        for one, other in ((FRONT, "b2-hard"), ("b2-hard", FRONT)):
            shown = view(swarm, one, other)
            assert shown["path"] == "relayed"
            assert "not met at 203.0.113.2" in shown["reason"]
        assert ask_front(net, swarm, 20, "hard") == []
        assert "b2-hard is relayed: not met at" in swarm.call("status", "--name", FRONT).stdout
        swarm.call("leave", "--name", "b2-hard")
    finally:
        net.keep_ports("gwB")


def test_death_of_the_hub_breaks_no_request_between_those_who_met(net: Net, swarm: NetSwarm) -> None:
    seconds_until(lambda: _n_circuits(swarm) == 0, "the circuits of those who met to end", limit_s=CIRCUIT_LIMIT_S)
    swarm.kill(swarm.daemons[0])
    try:
        assert ask_front(net, swarm, 40) == []
        assert {view(swarm, FRONT, name)["path"] for name in ("a2", "b1")} == {"punched"}
    finally:
        front_url = swarm.base_url
        swarm.daemons[0] = swarm.start_public()
        swarm.daemons.pop()
        swarm.base_url = front_url


def _n_circuits(swarm: NetSwarm) -> int:
    metrics = swarm.control("pub", "GET", "/metrics").decode()
    return int(float(next(line.split()[1] for line in metrics.splitlines() if line.startswith("tela_relay_circuits "))))
