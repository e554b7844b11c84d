"""Many outbound-only nodes on one hub: 16 by default, 64 in ``make test-net-full`` (registry.md 0; faults.md G01)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.netlab.net import Net
from tests.netlab.swarm import WORKERS, NetSwarm, failures, seconds_until

N_NODES = int(os.environ.get("TELA_NODES", "16"))
START_LIMIT_S = 10 + 4.0 * N_NODES
"""Each process takes a second of one of two cores."""
GONE_LIMIT_S = 20.0


@pytest.fixture
def swarm(net: Net) -> Iterator[NetSwarm]:
    with NetSwarm(net) as swarm:
        swarm.init()
        swarm.start_public()
        yield swarm


def test_every_node_of_a_crowd_serves_and_leaves(net: Net, swarm: NetSwarm, figures: dict[str, object]) -> None:
    names = [f"{WORKERS[number % len(WORKERS)]}-{number}" for number in range(N_NODES)]
    for name in names:
        swarm.start_fake(name)
    figures[f"crowd_of_{N_NODES}_started_s"] = seconds_until(
        lambda: swarm.n_ready() == N_NODES, "the crowd to serve", limit_s=START_LIMIT_S
    )
    outcomes = swarm.ask(20 * N_NODES)
    assert failures(outcomes) == []
    assert len({outcome.node for outcome in outcomes}) == N_NODES
    nodes = swarm.look("pub")["nodes"]
    assert {view["path"] for view in nodes} == {"self", "direct"}
    assert swarm.look("pub")["n_links"] == N_NODES
    for name in names[1:]:
        daemon = next(daemon for daemon in swarm.daemons if daemon.name == name)
        daemon.process.terminate()
    figures[f"crowd_of_{N_NODES}_left_s"] = seconds_until(
        lambda: swarm.look("pub")["n_links"] == 1, "all but one to leave", limit_s=GONE_LIMIT_S + N_NODES / 2
    )
    assert failures(swarm.ask(10)) == []
    assert {view["state"] for view in swarm.look("pub")["nodes"]} == {"serving", "left"}
