"""Figures of ``make bench-mesh`` that only tela has: a gate, a relay, many streams at once, many connections in a row.

- ``gate_cpu_ms``: CPU of a process that passes pooled requests from one connection on to another, one in flight.
- ``relay_rtt_us``, ``relay_mb_s``: an echo of 100 B, the median, and of 4 MB, over a circuit: three processes.
- ``streams_2000_s``: 2,000 streams opened at once, each with a request that is answered.
- ``cycles_5000``: growth of tasks, open files and resident MB of a listener over so many connects and disconnects.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from tela import observe
from tela.identity import KeyPair
from tela.net.circuit import HOP_PROTOCOL, STOP_PROTOCOL
from tela.net.circuits import circuit_addresses
from tela.net.libp2p import Libp2pMesh, open_mesh
from tela.net.multiaddrs import parse_address
from tela.net.relay import Relay, splice
from tela.net.transport import Stream
from tests.bench.mesh_jobs import JOBS, ask, receive_through, usage_of

N_GATED = 1_500
N_ECHOES = 300
ECHO_BYTES = 4_000_000
N_STREAMS = 2_000
N_CYCLES = 5_000
WARM_UP_CYCLES = 300
"""Before the first look: what is allocated once is no leak."""


async def echo(stream: Stream) -> None:
    while data := await stream.receive():
        await stream.send(data)
    await stream.finish()


# -- the other processes ----------------------------------------------------------------------------------------------


async def serve_jobs() -> None:
    async with open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as mesh:
        for name, job in JOBS.items():
            mesh.handle(f"/bench/{name}", job)
        await _tell(mesh.addresses[0])


async def serve_gate(worker: str) -> None:
    """Passes each stream on to the worker."""
    async with open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as mesh:
        peer = await mesh.dial([worker])

        async def pass_on(stream: Stream) -> None:
            await splice(stream, b"", await mesh.open(peer, "/bench/request"), b"")

        mesh.handle("/bench/request", pass_on)
        mesh.handle("/bench/usage", JOBS["usage"])
        await _tell(mesh.addresses[0])


async def serve_relay() -> None:
    async with open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as mesh:
        mesh.handle(HOP_PROTOCOL, Relay(mesh, now=lambda: 0.0).serve_hop)
        await _tell(mesh.addresses[0])


async def serve_echo_behind(relay: str) -> None:
    async with open_mesh(KeyPair.generate(), []) as mesh, trio.open_nursery() as nursery:
        mesh.handle(STOP_PROTOCOL, mesh.circuits.serve_stop)
        mesh.handle("/bench/echo", echo)
        peer = await mesh.dial([relay])
        await nursery.start(mesh.circuits.hold, peer, lambda: 0.0)
        await _tell(circuit_addresses(mesh.node, {peer: (parse_address(relay),)})[0])


async def _tell(address: str) -> None:
    print(address, flush=True)
    await trio.sleep_forever()


SERVERS = {"jobs": serve_jobs, "gate": serve_gate, "relay": serve_relay, "echo": serve_echo_behind}


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """Another process of this file; yields the address that it prints."""
    command = [sys.executable, "-m", "tests.bench.mesh_extras", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


# -- measuring --------------------------------------------------------------------------------------------------------


def measure_extras() -> dict[str, object]:
    """All of them."""
    figures: dict[str, object] = {}
    with serving("jobs") as worker, serving("gate", worker) as gate:
        figures["gate_cpu_ms"] = trio.run(_gate_cpu_ms, gate)
        figures["streams_2000_s"] = trio.run(_many_streams_s, worker)
        figures["cycles_5000"] = trio.run(_cycles, worker)
    with serving("relay") as relay, serving("echo", relay) as called:
        figures |= trio.run(_relay, called)
    return figures


async def _gate_cpu_ms(address: str) -> float:
    async with open_mesh(KeyPair.generate(), []) as mesh:
        peer = await mesh.dial([address])
        stream, usage = await mesh.open(peer, "/bench/request"), await mesh.open(peer, "/bench/usage")
        await ask(stream)
        before, *_ = await usage_of(usage)
        for _ in range(N_GATED):
            await ask(stream)
        after, *_ = await usage_of(usage)
        return round((after - before) / N_GATED * 1000, 4)


async def _many_streams_s(address: str) -> float:
    async with open_mesh(KeyPair.generate(), []) as mesh:
        peer = await mesh.dial([address])
        await ask(await mesh.open(peer, "/bench/request"))

        async def ask_one() -> None:
            stream = await mesh.open(peer, "/bench/request")
            await ask(stream)
            await stream.finish()

        start = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(N_STREAMS):
                nursery.start_soon(ask_one)
        return round(time.perf_counter() - start, 3)


async def _cycles(address: str) -> dict[str, float]:
    async with open_mesh(KeyPair.generate(), []) as watcher, open_mesh(KeyPair.generate(), []) as mesh:
        usage = await watcher.open(await watcher.dial([address]), "/bench/usage")
        await _cycle(mesh, address, WARM_UP_CYCLES)
        _, rss, n_tasks, n_fds = await usage_of(usage)
        await _cycle(mesh, address, N_CYCLES)
        _, rss_after, n_tasks_after, n_fds_after = await usage_of(usage)
    growth_mb = round((rss_after - rss) / 1e6, 1)
    return {"tasks": n_tasks_after - n_tasks, "fds": n_fds_after - n_fds, "rss_mb": growth_mb}


async def _cycle(mesh: Libp2pMesh, address: str, n_times: int) -> None:
    for _ in range(n_times):
        peer = await mesh.dial([address])
        await ask(await mesh.open(peer, "/bench/request"))
        await mesh.disconnect(peer)
    await trio.sleep(1.0)  # the library takes 0.1 s to forget the last one


async def _relay(address: str) -> dict[str, float]:
    async with open_mesh(KeyPair.generate(), []) as mesh:
        stream = await mesh.open(await mesh.dial([address]), "/bench/echo")
        times_s = []
        for _ in range(N_ECHOES):
            start = time.perf_counter()
            await stream.send(bytes(100))
            await receive_through(stream, 100)
            times_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, bytes(ECHO_BYTES))
            await receive_through(stream, ECHO_BYTES)
        bulk_s = time.perf_counter() - start
    return {"relay_rtt_us": round(statistics.median(times_s) * 1e6), "relay_mb_s": round(ECHO_BYTES / bulk_s / 1e6)}


if __name__ == "__main__":
    observe.configure("warning")  # to stderr: stdout is for the address
    trio.run(SERVERS[sys.argv[1]], *sys.argv[2:])
