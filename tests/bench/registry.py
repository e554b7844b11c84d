"""``make bench-registry``: the registry between real processes on loopback; the last line is one JSON object.

32 nodes in four processes, of which the first three are hubs; every node links the hubs, as daemons do. Admission,
engines and requests take no part there. Beside them 8 nodes, a member that repeats itself as fast as it can, and what
tests/bench/registry_micro.py measures inside one process.

- ``p50_ms``, ``p100_median_ms``, ``p100_p99_ms``: from a publication until half of the nodes, and all, show it; median
  over the updates, and the worst hundredth. ``cpu_floor_ms``: what its merges alone take on these cores.
- ``kb_s_idle``, ``kb_s_5ups``: bytes of packets on loopback a second and node, with all that TCP and IP add; nothing
  else may use loopback meanwhile.
- ``hostile_cut_s``: until the member is closed; ``hostile_cpu_pct``: of a core, what the hub's process spent in that
  time, or in a second if it was less.
- ``kill_window_*``, ``stop_window_*``: tests/bench/registry_windows.py: from SIGKILL, or SIGSTOP, of a real worker that
  listens nowhere until the ingress would send no request there; the 99th percentile is the worst that was seen.
  ``term_errors``: requests that failed while workers left.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import trio

from tela.crdt.delta import Delta
from tela.errors import PeerError
from tela.gossip.author import Author
from tela.gossip.frames import MAX_DELTAS, Hello, Records, encode_frame
from tela.identity import sign_envelope
from tela.net.libp2p import open_mesh
from tela.record import NO_CATALOG, SessionState
from tela.wire import GOSSIP_PROTOCOL, PROTOCOL_MAX, PROTOCOL_MIN
from tests.bench import registry_micro, registry_windows
from tests.bench.registry_nodes import NOW, SWARM, card_of, key_of

N_HUBS = 3
N_PROCESSES = 4
UPDATES = 120
PAUSE_S = 0.05
"""Between updates: each is measured alone."""
TRAFFIC_S = 10.0
UPDATES_PER_S = 5
HOSTILE_LIMIT_S = 20.0
MALLORY = 60_000


class Host:
    """One process with some of the nodes."""

    def __init__(self, first: int, last: int, n_hubs: int) -> None:
        self.first, self.last = first, last
        command = [sys.executable, "-m", "tests.bench.registry_nodes", str(first), str(last), str(n_hubs)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.addresses: list[str] = json.loads(self._read())

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def answer(self) -> object:
        return json.loads(self._read())

    def ask(self, *words: object) -> object:
        self.tell(*words)
        return self.answer()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


class Swarm:
    """Nodes in several processes, all linked with the hubs and known to each other."""

    def __init__(self, n_nodes: int, n_processes: int) -> None:
        self.n_nodes = n_nodes
        edges = [round(n_nodes * index / n_processes) for index in range(n_processes + 1)]
        self.hosts = [Host(first, last, N_HUBS) for first, last in itertools.pairwise(edges)]
        self.hubs = [address for host in self.hosts for address in host.addresses]
        for host in self.hosts:
            host.ask("dial", self.hubs)
        while min(int(str(host.ask("count"))) for host in self.hosts) < n_nodes:
            time.sleep(0.1)

    def everybody(self, *words: object) -> list[object]:
        for host in self.hosts:
            host.tell(*words)
        return [host.answer() for host in self.hosts]

    def publish(self, token: str, number: int) -> int:
        host = next(host for host in self.hosts if host.first <= number < host.last)
        return int(str(host.ask("publish", token, number)))

    def delays_ms(self, token: str, number: int) -> list[float]:
        """From a publication to each other node, ascending."""
        self.everybody("watch", token, number)
        began_ns = self.publish(token, number)
        seen = [at for times in self.everybody("seen", token) for at in times]
        return sorted((at - began_ns) / 1e6 for at in seen)[1:]  # the publisher itself is the first

    def stop(self) -> None:
        for host in self.hosts:
            host.stop()


@contextmanager
def swarm_of(n_nodes: int, n_processes: int) -> Iterator[Swarm]:
    swarm = Swarm(n_nodes, n_processes)
    try:
        yield swarm
    finally:
        swarm.stop()


def loopback_bytes() -> int:
    """Of packets ever sent on loopback."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def kb_s(swarm: Swarm, updates_per_s: int) -> float:
    """What a node sends a second."""
    before, began_s, n_updates = loopback_bytes(), time.monotonic(), 0
    while (passed_s := time.monotonic() - began_s) < TRAFFIC_S:
        if n_updates < passed_s * updates_per_s:
            swarm.publish(f"traffic {n_updates}", n_updates % swarm.n_nodes)
            n_updates += 1
        time.sleep(0.005)
    return round((loopback_bytes() - before) / passed_s / swarm.n_nodes / 1000, 2)


def convergence(swarm: Swarm, what: str) -> dict[str, float]:
    halves, wholes = [], []
    for index in range(UPDATES):
        delays = swarm.delays_ms(f"{what} {index}", index % swarm.n_nodes)
        halves.append(statistics.median(delays))
        wholes.append(delays[-1])
        time.sleep(PAUSE_S)
    cuts = statistics.quantiles(wholes, n=100)
    return {"p50": statistics.median(halves), "p100_median": cuts[49], "p100_p99": cuts[98]}


async def cut_hostile(hub: str) -> float:
    """Seconds until a hub closes a member that sends its own record again and again, 32 in a frame."""
    key = key_of(MALLORY)
    author = Author(key.public, lambda envelope: sign_envelope(key, SWARM, envelope))
    author.begin_session(NOW)
    author.describe(SessionState.SERVING, card_of(MALLORY, "mallory", "worker"), NO_CATALOG)
    delta = Delta((author.next_records(NOW)[0],))
    hello, flood = encode_frame(Hello(PROTOCOL_MIN, PROTOCOL_MAX, 0)), encode_frame(Records((delta,) * MAX_DELTAS))
    async with open_mesh(key, []) as mesh:
        stream = await mesh.open(await mesh.dial([hub]), GOSSIP_PROTOCOL)
        await stream.send(hello)
        began_s = trio.current_time()
        with trio.move_on_after(HOSTILE_LIMIT_S):
            try:
                while True:
                    await stream.send(flood)
            except PeerError:
                pass
        return trio.current_time() - began_s


def hostile(swarm: Swarm) -> dict[str, float]:
    host = swarm.hosts[0]
    before = float(str(host.ask("cpu")))
    cut_s = trio.run(cut_hostile, swarm.hubs[0])
    spent_s = float(str(host.ask("cpu"))) - before
    return {"hostile_cut_s": round(cut_s, 3), "hostile_cpu_pct": round(100 * spent_s / max(cut_s, 1.0), 1)}


def rounded(figures: dict[str, float], prefix: str, names: Sequence[str]) -> dict[str, float]:
    return {f"{prefix}{name}_ms": round(figures[name], 2) for name in names}


def main() -> None:
    micro = registry_micro.measure()
    with swarm_of(8, N_PROCESSES) as swarm:
        few = convergence(swarm, "few")
    with swarm_of(32, N_PROCESSES) as swarm:
        many = convergence(swarm, "many")
        traffic = {"kb_s_idle": kb_s(swarm, 0), "kb_s_5ups": kb_s(swarm, UPDATES_PER_S)}
        attack = hostile(swarm)
    cores = os.cpu_count() or 1
    figures = {
        "bench": "registry",
        **rounded(many, "", ("p50", "p100_median", "p100_p99")),
        "cpu_floor_ms": round(32 * micro.pop("merge_us") / 1000 / cores, 2),
        "n8_p50_ms": round(few["p50"], 2),
        "n8_p100_ms": round(few["p100_median"], 2),
        **traffic,
        **micro,
        **attack,
        **registry_windows.measure(),
        "cores": cores,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
