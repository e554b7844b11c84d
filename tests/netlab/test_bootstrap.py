"""The way back into a swarm: a hub that moved under its name, and hubs that are gone for good."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.netlab.net import HUB_ADDRESS, Net
from tests.netlab.swarm import HUB_NAME, HUB_PORT, MODEL, NetSwarm, failures, seconds_until

NEW_ADDRESS = "203.0.113.11"
BACK_LIMIT_S = 10.0
"""As in test_mesh.py; G04 wants 35 s."""
UNREACHABLE_LIMIT_S = 10.0
"""overlay.md 5."""


@pytest.fixture
def net() -> Iterator[Net]:
    """Of each test: they move its hosts."""
    with Net() as net:
        yield net


@pytest.fixture
def swarm(net: Net) -> Iterator[NetSwarm]:
    with NetSwarm(net) as swarm:
        net.name_hosts({HUB_NAME: HUB_ADDRESS})
        swarm.init()
        swarm.start_public(advertise=HUB_NAME)
        for name in ("a1", "b1"):
            swarm.start_fake(name)
        swarm.wait_serving(MODEL, replicas=2, name="pub")
        yield swarm


def test_hub_that_comes_back_at_another_address_of_its_name_is_found(
    net: Net, swarm: NetSwarm, figures: dict[str, object]
) -> None:
    before = swarm.workers()
    swarm.kill(swarm.daemons[0])
    figures["unreachable_told_s"] = seconds_until(
        lambda: all(swarm.look(name)["warnings"] for name in before),
        "both workers to tell",
        limit_s=UNREACHABLE_LIMIT_S,
    )
    for name in before:
        assert "unreachable" in swarm.look(name)["warnings"][0]
        assert b"not ready" in swarm.control(name, "GET", "/ready")
        assert swarm.call("status", "--name", name).stdout.count("unreachable: no link to any member") == 1
    net.move("pub", HUB_ADDRESS, NEW_ADDRESS)
    net.name_hosts({HUB_NAME: NEW_ADDRESS})
    swarm.start_public(address=NEW_ADDRESS, advertise=HUB_NAME)
    figures["moved_hub_found_s"] = seconds_until(lambda: swarm.n_ready() == 2, "both workers", limit_s=BACK_LIMIT_S)
    assert failures(swarm.ask(10)) == []
    assert swarm.workers() == before
    for name in before:
        assert b"not ready" not in swarm.control(name, "GET", "/ready")
    for daemon in swarm.daemons[1:3]:
        assert daemon.text().count("node.isolated") == 1  # once a minute, and it was less


def test_one_of_two_hubs_is_lost_and_nobody_notices(net: Net, swarm: NetSwarm) -> None:
    """Requests through the other go on from the very moment, and a newcomer joins by it."""
    invite = swarm.answer("invite", "create", "--roles", "worker,ingress,hub", "--uses", "1")["invite"]
    second = swarm.start(
        "pub-two", "ingress", "--hub", "--http", "127.0.0.1:8082", "--listen", f"{HUB_ADDRESS}:4002", invite=invite
    )
    swarm.base_url = swarm.wait_status(second)["base_url"]
    swarm.wait_serving(MODEL, replicas=2, name="pub-two")
    before = swarm.workers()
    swarm.invite = swarm.answer("invite", "create", "--uses", "100")["invite"]  # it names both
    outcomes = swarm.ask(60, disturb=lambda: swarm.kill(swarm.daemons[0]), disturb_after=20)
    assert failures(outcomes) == []
    assert len({outcome.node for outcome in outcomes[30:]}) == 2
    swarm.start_fake("b2")
    seconds_until(lambda: paths(swarm, "pub-two").get("b2") == "direct", "the newcomer", limit_s=30)
    assert {name: swarm.workers()[name] for name in ("a1", "b1")} == {name: before[name] for name in ("a1", "b1")}


def test_node_whose_hubs_are_all_gone_finds_the_others_through_a_known_peer(
    net: Net, swarm: NetSwarm, figures: dict[str, object]
) -> None:
    """It knew one of the two ingresses that are left; of the other, which came while it was away, that one tells it."""
    start_front(swarm, "pub-front", 1)
    swarm.wait_serving(MODEL, replicas=2, name="pub-front")
    worker = next(daemon for daemon in swarm.daemons if daemon.name == "a1")
    swarm.call("leave", "--name", "a1")
    assert worker.wait() == 0
    start_front(swarm, "pub-late", 2)
    swarm.kill(swarm.daemons[0])
    swarm.start_fake("a1")
    node = (
        seconds_until(lambda: swarm.look("a1")["node"], "the worker to start", limit_s=30) and swarm.look("a1")["node"]
    )
    figures["known_peer_found_s"] = seconds_until(
        lambda: swarm.state_of(node, seen_by="pub-front") == "serving", "the worker", limit_s=20
    )
    figures["others_found_s"] = seconds_until(
        lambda: paths(swarm, "a1").get("pub-late") == "direct", "a link to whom it never knew", limit_s=20
    )
    assert node in {outcome.node for outcome in swarm.ask(20)}  # by way of pub-late
    assert swarm.look("a1")["warnings"] == []


def start_front(swarm: NetSwarm, name: str, number: int) -> None:
    """One more public ingress; requests go to it from now on."""
    listen = f"{HUB_ADDRESS}:{HUB_PORT + number}"
    front = swarm.start(name, "ingress", "--http", f"127.0.0.1:{8080 + number}", "--listen", listen)
    swarm.base_url = swarm.wait_status(front)["base_url"]


def paths(swarm: NetSwarm, name: str) -> dict[str, str]:
    return {view["name"]: view["path"] for view in swarm.look(name)["nodes"]}
