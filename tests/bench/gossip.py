"""``make bench-gossip``: a simulation of the production gossip cores; the last line is one JSON object.

No process, socket or signature takes part: time is virtual, so the figures do not depend on the machine.

- ``update_everywhere_ms_p50``, ``_p99``: from a publication to its arrival at the last node, over all seeds and
  topologies of tests/sim (star, ring, full mesh; 8 to 16 nodes; 0.2-40 ms links; 2 % loss as retransmission).
- ``idle_bytes_s_node``: gossip frames that a node sends a second while nothing changes; other layers come on top.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

from tests.sim.test_gossip import SEEDS, build, full, ring, star
from tests.sim.world import Weather, World

WARM_UP_S = 7.0
UPDATES = 8
UPDATE_INTERVAL_S = 1.0
IDLE_S = 20.0


def update_delays_s() -> list[float]:
    """Of every update of every seed."""
    delays: list[float] = []
    for seed in SEEDS:
        world = build(seed)
        world.run(WARM_UP_S)
        world.delays.clear()
        for _ in range(UPDATES):
            world.publish(world.rng.choice(world.live))
            world.run(UPDATE_INTERVAL_S)
        delays += world.delays
    return delays


def idle_bytes_s_node(topology: Callable[[World], None], n_nodes: int) -> int:
    """What a node sends a second in a quiet swarm."""
    world = World(5, n_nodes, Weather(loss=0.0, duplicate=0.0))
    topology(world)
    world.run(WARM_UP_S)
    before = sum(host.n_sent_bytes for host in world.live)
    world.run(IDLE_S)
    return round((sum(host.n_sent_bytes for host in world.live) - before) / IDLE_S / n_nodes)


def main() -> None:
    delays_ms = [delay_s * 1000 for delay_s in update_delays_s()]
    cuts = statistics.quantiles(delays_ms, n=100)
    figures = {
        "bench": "gossip",
        "kind": "simulation",
        "updates": len(delays_ms),
        "update_everywhere_ms_p50": round(cuts[49]),
        "update_everywhere_ms_p99": round(cuts[98]),
        "idle_bytes_s_node": {
            "star of 16": idle_bytes_s_node(star, 16),
            "ring of 16": idle_bytes_s_node(ring, 16),
            "full mesh of 8": idle_bytes_s_node(full, 8),
        },
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
