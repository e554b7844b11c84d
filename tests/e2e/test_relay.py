"""An ingress that accepts no connection: workers call it through the hub, and both meet directly where they can."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from scripts.demo.local_swarm import LocalSwarm, poll
from tests.e2e.conftest import MODEL
from tests.e2e.load import ask_many


@pytest.fixture(scope="module")
def swarm(engine: list[str]) -> Iterator[LocalSwarm]:
    """A hub, an ingress and a worker, of which only the hub listens."""
    with LocalSwarm() as swarm:
        swarm.init()
        swarm.start_hub()
        front = swarm.start("front", "ingress", "--http", "127.0.0.1:0")
        swarm.base_url = swarm.wait_status(front)["base_url"]
        swarm.start_worker("w1", engine)
        swarm.wait_serving(MODEL, name="front")
        yield swarm


def test_requests_are_answered_from_the_first_circuit_on_and_status_says_so(swarm: LocalSwarm) -> None:
    """On one host nothing is in between, so the nodes meet; tests/netlab has NATs, and circuits that stay."""
    outcomes = ask_many(swarm, MODEL, n_requests=8)
    assert [outcome.error for outcome in outcomes] == [""] * 8
    hub = swarm.status("hub")["node"]
    for _ in poll(10, "the two to meet"):
        front = swarm.status("front")
        paths = {view["name"]: view["path"] for view in front["nodes"]}
        if paths["w1"] == "punched":
            break
    assert (paths["front"], paths["hub"]) == ("self", "direct")
    assert (front["reach"]["kind"], front["reach"]["reason"]) == ("relayed", f"through {hub}; listens nowhere")
    assert all("/p2p-circuit/" in address for address in front["reach"]["announced"])
    table = swarm.call("status", "--name", "front").stdout
    assert "reached: relayed" in table
    assert "punched" in table
    assert n_reservations(swarm) >= 1


def test_hub_knows_that_it_is_reached_by_dial_back(swarm: LocalSwarm) -> None:
    reach = {}
    for _ in poll(10, "a dial-back"):
        reach = swarm.status("hub")["reach"]
        if reach["kind"] == "direct":
            break
    assert reach["announced"] == swarm.status("hub")["addresses"]


def test_wrong_address_to_advertise_is_said_and_never_announced(swarm: LocalSwarm) -> None:
    swarm.start("wrong", "ingress", "--http", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--advertise", "127.0.0.1:1")
    reach = {}
    for _ in poll(10, "the answer of a dial-back"):  # overlay.md 5: said within 10 s
        done = swarm.call("status", "--name", "wrong", "--json")
        reach = json.loads(done.stdout)["daemons"][0]["reach"] if done.returncode == 0 else {}
        if reach.get("kind") == "relayed":
            break
    assert "127.0.0.1:1: " in reach["reason"]
    shown = next(view for view in swarm.status("hub")["nodes"] if view["name"] == "wrong")
    assert "/p2p-circuit/" in shown["address"]


def test_reservation_goes_with_its_ingress(swarm: LocalSwarm) -> None:
    brief = swarm.start("brief", "ingress", "--http", "127.0.0.1:0")
    node = swarm.wait_status(brief)["node"]
    for _ in poll(10, "the reservation"):
        if swarm.status("brief")["reach"]["kind"] == "relayed":
            break
    before = n_reservations(swarm)
    swarm.kill(brief)
    for _ in poll(5, f"the reservation of {node} to be freed"):
        if n_reservations(swarm) < before:
            break


def n_reservations(swarm: LocalSwarm) -> float:
    text = swarm.call("metrics", "--name", "hub").stdout
    return float(text.partition("\ntela_relay_reservations ")[2].split()[0])
