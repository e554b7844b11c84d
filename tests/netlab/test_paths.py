"""How sites reach each other over a relay: an ingress behind one NAT, workers behind another, a hub in public.

Both NATs map each connection anew, so that the sites cannot meet (test_punch.py has those who do). Also for minutes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from tests.e2e.load import ask_many, sdk
from tests.netlab.net import HUB_ADDRESS, Net
from tests.netlab.swarm import FRONT, MODEL, NetSwarm, failures, seconds_until

REACH_LIMIT_S = 10.0
"""overlay.md 5: how a node is reached is said within it."""
BACK_LIMIT_S = 15.0
N_TOKENS = int(os.environ.get("TELA_STREAM_S", "10"))
"""One a second; ``make test-net-full`` asks for three minutes, beyond every timeout on the way."""


@pytest.fixture(scope="module")
def swarm(net: Net) -> Iterator[NetSwarm]:
    """The public hub, an ingress behind NAT of site A, a worker in each site."""
    for gateway in ("gwA", "gwB"):
        net.map_ports_anew(gateway)
    with NetSwarm(net) as swarm:
        swarm.start_sites()
        yield swarm


def paths(swarm: NetSwarm, name: str) -> dict[str, tuple[str, str]]:
    return {view["name"]: (view["path"], view["relay"]) for view in swarm.look(name)["nodes"]}


def ask_front(net: Net, swarm: NetSwarm, n_requests: int) -> list[str]:
    with net.inside("a1"):
        return failures(ask_many(swarm, MODEL, n_requests=n_requests))


def test_ingress_behind_nat_is_reached_through_the_hub_and_says_why(net: Net, swarm: NetSwarm) -> None:
    """Its own address is private: the hub cannot dial it back, so it is not announced."""
    hub = swarm.look("pub")["node"]
    seconds_until(lambda: swarm.look(FRONT)["reach"]["kind"] == "relayed", "the reach", limit_s=REACH_LIMIT_S)
    reach = swarm.look(FRONT)["reach"]
    assert "10.1.0.11:4001: " in reach["reason"]
    assert all(f"/ip4/{HUB_ADDRESS}/" in address and "/p2p-circuit/" in address for address in reach["announced"])
    assert ask_front(net, swarm, 20) == []
    shown = paths(swarm, FRONT)
    assert (shown["pub"], shown["b1"]) == (("direct", ""), ("relayed", hub))
    assert paths(swarm, "b1")[FRONT] == ("relayed", hub)
    assert paths(swarm, "b1")["pub"] == ("direct", "")
    assert paths(swarm, "pub")["b1"] == ("direct", "")


def test_blocked_udp_changes_nothing(net: Net, swarm: NetSwarm) -> None:
    """Nothing here is by UDP."""
    for gateway in ("gwA", "gwB"):
        net.block_udp(gateway)
    try:
        swarm.start_fake("b2-hard", models="hard")
        swarm.wait_serving("hard", name=FRONT)
        with net.inside("a1"):
            outcomes = ask_many(swarm, "hard", n_requests=20)
        assert failures(outcomes) == []
        assert {outcome.node for outcome in outcomes} == {swarm.look("b2-hard")["node"]}
        assert paths(swarm, FRONT)["b2-hard"][0] == "relayed"
        swarm.call("leave", "--name", "b2-hard")
    finally:
        for gateway in ("gwA", "gwB"):
            net.open(gateway)


def test_hub_that_falls_silent_and_returns_carries_the_circuits_again(
    net: Net, swarm: NetSwarm, figures: dict[str, object]
) -> None:
    net.unplug("pub")
    try:
        seconds_until(lambda: paths(swarm, FRONT)["b1"][0] != "relayed", "the circuits to end", limit_s=40)
    finally:
        net.plug("pub")
    figures["circuits_back_s"] = seconds_until(
        lambda: paths(swarm, FRONT)["b1"][0] == "relayed", "the circuits", limit_s=2 * BACK_LIMIT_S
    )
    swarm.wait_serving(MODEL, replicas=2, name=FRONT, timeout_s=BACK_LIMIT_S)
    assert ask_front(net, swarm, 10) == []


def stream_over_a_relay(net: Net, swarm: NetSwarm, n_tokens: int) -> int:
    """A stream of one token a second from the other site; how many tokens came before its proper end."""
    slow = f"slow-{n_tokens}"
    flags = ("--tokens", str(n_tokens), "--token-interval", "1")
    swarm.start_fake("b2", "--no-canary", models=slow, flags=flags)  # one token of it would be the whole stream
    swarm.wait_serving(slow, name=FRONT)
    with net.inside("a1"), sdk(swarm) as client:
        question = [{"role": "user", "content": "count"}]
        chunks = list(client.chat.completions.create(model=slow, messages=question, stream=True, timeout=2 * n_tokens))
    assert chunks[-1].choices[0].finish_reason
    return sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks)


def test_stream_over_a_relay_is_whole_beside_other_requests(net: Net, swarm: NetSwarm) -> None:
    others: list[str] = []
    beside = threading.Thread(target=lambda: others.extend(ask_front(net, swarm, 200)))
    beside.start()
    n_tokens = stream_over_a_relay(net, swarm, N_TOKENS)
    beside.join()
    assert n_tokens == N_TOKENS
    assert others == []
