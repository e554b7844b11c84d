"""``make sim-registry``: a simulation of the production gossip cores in virtual time; the last line is one JSON object.

Nodes link every hub, of which there is one in fifty and three at least, as daemons do; links take 3-40 ms with jitter;
1 % of the packets are sent again after 200 ms, doubled; 5 % of the nodes are slow: each of their messages waits
20-400 ms before it is taken in and passed on (after the model of design/registry.md 3). No process, socket or signature
takes part; bytes are frames and 96 bytes for each of them.

For each number of nodes:

- ``p50_ms`` ... ``p95_ms``, ``p100_median_ms``, ``p100_p99_ms``: from an update to its arrival at that share of the
  nodes, median over the ``trials``, and the worst hundredth of the time to all; ``fast_p100_p99_ms`` without the slow.
- ``kb_s_idle``, ``kb_s_5ups``, ``hub_kb_s_5ups``: what a node, and the busiest hub, send a second.
- ``suspect_process_ms``, ``suspect_host_ms``: from a crash, or a silent end, until the registry of a hub shows it,
  median and worst of ``crashes``. An ingress that is linked with the node leaves it alone sooner, by its own link.
- ``join_ms``: all start within half a second: from the last announcement to the moment at which all know all.
  ``heal_ms``: from the end of a cut through the middle for a minute to equal replicas.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from tela.crdt.lattice import Status
from tela.gossip.events import Changed
from tela.record import NodeId, SessionState
from tests.sim.world import Host, Weather, World

FRAME_OVERHEAD_BYTES = 96
SIZES = {8: 200, 32: 200, 50: 200, 128: 200}
"""Nodes, and updates that are followed one by one. A thousand nodes that all join are a million merges: ten minutes."""
N_CRASHES = 6
WARM_UP_S = 12.0
TRAFFIC_S = 10.0
CUT_S = 60.0
SETTLE_S = 12.0
"""After a restart: it publishes within 5 s."""
WEATHER = Weather(latency_s=(0.003, 0.04), loss=0.01, duplicate=0.0, slow=0.05)
FAST = Weather(latency_s=(0.003, 0.04), loss=0.01, duplicate=0.0)


class Swarm(World):
    """A world that follows updates to every node and leaves the invariants to tests/sim."""

    def __init__(self, seed: int, n_nodes: int, weather: Weather) -> None:
        super().__init__(seed, n_nodes, weather)
        ids = sorted(self.hosts)
        self.hubs = set(ids[: max(3, n_nodes // 50)])
        for host in self.hosts.values():
            host.targets = self.hubs - {host.id}
        self.spreads: list[list[float]] = []  # of each update: delays to the nodes, ascending
        self.announced_at = 0.0  # when the last node spoke first
        self.complete_at = 0.0  # when the last node came to know everybody
        self._complete: set[NodeId] = set()
        self._followed: dict[NodeId, tuple[int, float, list[float]]] = {}

    def follow(self, host: Host) -> None:
        """Publish an update and note when each node has it."""
        self.publish(host)
        self._followed[host.id] = (host.core.author.version, self.now, [])

    def publish(self, host: Host, state: SessionState = SessionState.SERVING) -> None:
        if not host.core.author.has_published:
            self.announced_at = self.now
        super().publish(host, state)

    def _check(self, host: Host, changed: Changed) -> None:
        for owner in changed.nodes:
            followed = self._followed.get(owner)
            entry = host.core.map.node(owner)
            if followed is not None and entry is not None and entry.rec.version >= followed[0] and host.id != owner:
                self._arrive(owner, *followed)
        if len(host.core.map) == len(self.hosts) and host.id not in self._complete:
            self._complete.add(host.id)
            self.complete_at = self.now

    def _arrive(self, owner: NodeId, _version: int, began: float, delays: list[float]) -> None:
        delays.append(self.now - began)
        if len(delays) == len(self.live) - 1:
            self.spreads.append(sorted(delays))
            del self._followed[owner]

    def sent_bytes(self) -> dict[NodeId, int]:
        return {host.id: host.n_sent_bytes + FRAME_OVERHEAD_BYTES * host.n_sent_frames for host in self.hosts.values()}


def joined(seed: int, n_nodes: int, weather: Weather = WEATHER) -> Swarm:
    swarm = Swarm(seed, n_nodes, weather)
    swarm.run(WARM_UP_S)
    assert all(len(host.core.map) == n_nodes for host in swarm.live), "not everybody knows everybody"
    return swarm


def spread(swarm: Swarm, trials: int) -> list[list[float]]:
    """Delays of so many updates, one at a time."""
    swarm.spreads.clear()
    for _ in range(trials):
        swarm.follow(swarm.rng.choice(swarm.live))
        swarm.run(1.2)
    assert len(swarm.spreads) == trials, "an update did not come everywhere"
    return swarm.spreads


def percentiles(spreads: list[list[float]]) -> dict[str, float]:
    def at(share: float) -> float:
        return statistics.median(delays[max(0, round(share * len(delays)) - 1)] for delays in spreads)

    wholes = sorted(delays[-1] for delays in spreads)
    figures = {f"p{round(share * 100)}_ms": at(share) for share in (0.5, 0.75, 0.95)}
    figures |= {"p100_median_ms": statistics.median(wholes), "p100_p99_ms": wholes[int(0.99 * (len(wholes) - 1))]}
    return {name: round(value * 1000) for name, value in figures.items()}


def traffic(swarm: Swarm, updates_per_s: int) -> tuple[float, float]:
    """KB a second of a node in the middle, and of the busiest hub."""
    before = swarm.sent_bytes()
    for index in range(round(TRAFFIC_S * updates_per_s)):
        swarm.at(index / updates_per_s, lambda: swarm.publish(swarm.rng.choice(swarm.live)))
    swarm.run(TRAFFIC_S)
    rates = {node: (n_bytes - before[node]) / TRAFFIC_S / 1000 for node, n_bytes in swarm.sent_bytes().items()}
    hubs = max(rates[node] for node in swarm.hubs)
    return round(statistics.mean(rates.values()), 2), round(hubs, 1)


def suspicion_ms(swarm: Swarm, *, is_silent: bool) -> dict[str, float]:
    """From the end of a node until a hub's registry shows it."""
    delays = []
    for _ in range(N_CRASHES):
        victim = swarm.rng.choice([host for host in swarm.live if host.id not in swarm.hubs])
        hub = swarm.hosts[min(swarm.hubs)]
        swarm.crash(victim, is_silent=is_silent)
        began = swarm.now
        while swarm._status(hub, victim.id) not in {Status.SUSPECT, Status.DOWN}:
            swarm.run(0.02)
        delays.append((swarm.now - began) * 1000)
        swarm.restart(victim, 0.0)
        swarm.run(SETTLE_S)
    return {"median": round(statistics.median(delays)), "worst": round(max(delays))}


def heal_ms(swarm: Swarm) -> int:
    ids = sorted(host.id for host in swarm.live)
    swarm.partition(set(ids[1::2]))
    swarm.run(CUT_S)
    swarm.heal()
    began = swarm.now
    while len({host.core.map.digest.root for host in swarm.live}) > 1:
        swarm.run(0.05)
    return round((swarm.now - began) * 1000)


def measure(n_nodes: int, trials: int) -> dict[str, object]:
    """Figures of one size."""
    began_s = time.monotonic()
    swarm = joined(n_nodes, n_nodes)
    join_s = swarm.complete_at - swarm.announced_at
    figures: dict[str, object] = {"trials": trials, "join_ms": round(join_s * 1000)}
    figures |= percentiles(spread(swarm, trials))
    figures["kb_s_idle"], _ = traffic(swarm, 0)
    figures["kb_s_5ups"], figures["hub_kb_s_5ups"] = traffic(swarm, 5)
    figures["fast_p100_p99_ms"] = percentiles(spread(joined(n_nodes, n_nodes, FAST), trials))["p100_p99_ms"]
    figures["crashes"] = N_CRASHES
    figures["suspect_process_ms"] = suspicion_ms(swarm, is_silent=False)
    figures["suspect_host_ms"] = suspicion_ms(swarm, is_silent=True)
    figures["heal_ms"] = heal_ms(swarm)
    print(f"{n_nodes} nodes: {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    return figures


def main() -> None:
    figures = {str(n_nodes): measure(n_nodes, trials) for n_nodes, trials in SIZES.items()}
    print(json.dumps({"bench": "sim-registry", "kind": "simulation", "n": figures}))


if __name__ == "__main__":
    main()
