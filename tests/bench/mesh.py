"""``make bench-mesh``: one mesh hop, two processes on loopback; the last line is one JSON object.

tela's mesh beside a stock py-libp2p host and a plain trio TLS connection a stream, interleaved, the median of N_ROUNDS.
Both ends are tasks that send and receive; request frames, HTTP and routing are not part of it.

- ``request_1``, ``request_32``: 500 B there, 300 B back on open streams, that many in flight: CPU of each side, rate.
- ``fresh``: a stream opened for one such request and ended (TLS: a connection).
- ``burst``: chunks of 100 B written one by one as fast as they go: CPU per chunk.
- ``bulk``: 64 KiB writes on one stream.
- ``dial``: until streams can be opened.
- ``ratio_to_stock``, ``ratio_to_tls``: how many times less than theirs our CPU of both sides is (bulk: how many times
  the throughput; dial: the time). These hold on a busy machine too, the figures themselves do not.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import trio

from tests.bench.mesh_peers import CLIENTS, SERVERS, Client, Stream

N_ROUNDS = 3
REQUEST, RESPONSE = bytes(500), bytes(300)
CHUNK = bytes(100)
WRITE = bytes(65_536)
N = {
    "tela": {"request_1": 2_000, "request_32": 6_400, "fresh": 500, "burst": 20_000, "bulk": 1_000, "dial": 15},
    "tls": {"request_1": 1_500, "request_32": 3_200, "fresh": 50, "burst": 5_000, "bulk": 1_000, "dial": 15},
    "stock": {"request_1": 300, "request_32": 640, "fresh": 60, "burst": 1_000, "bulk": 150, "dial": 5},
}
"""How often each job is done a round: fewer where it is slow."""


def cpu_s() -> float:
    """Of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def receive_exactly(stream: Stream, n_bytes: int) -> bytes:
    """``n_bytes``, with what came along; ``b""`` if the stream ends before."""
    data = await stream.receive()
    while data and len(data) < n_bytes:
        more = await stream.receive()
        data = data + more if more else b""
    return data


async def receive_through(stream: Stream, n_bytes: int) -> None:
    """Drop ``n_bytes``."""
    while n_bytes > 0:
        data = await stream.receive()
        if not data:
            raise EOFError(f"{n_bytes} bytes are missing")
        n_bytes -= len(data)


# -- the server -------------------------------------------------------------------------------------------------------


async def answer_requests(stream: Stream) -> None:
    while await receive_exactly(stream, len(REQUEST)):
        await stream.send(RESPONSE)
    await stream.finish()


async def send_burst(stream: Stream) -> None:
    (n_chunks,) = struct.unpack("!Q", await receive_exactly(stream, 8))
    for _ in range(n_chunks):
        await stream.send(CHUNK)
    await receive_exactly(stream, 1)
    await stream.finish()


async def swallow(stream: Stream) -> None:
    data = await receive_exactly(stream, 8)
    (n_bytes,) = struct.unpack("!Q", data[:8])
    await receive_through(stream, n_bytes - len(data) + 8)
    await stream.send(b"k")
    await stream.finish()


async def tell_usage(stream: Stream) -> None:
    while await receive_exactly(stream, 1):
        await stream.send(struct.pack("!d", cpu_s()))
    await stream.finish()


JOBS = {"request": answer_requests, "burst": send_burst, "bulk": swallow, "usage": tell_usage}


# -- the client -------------------------------------------------------------------------------------------------------


async def ask(stream: Stream) -> None:
    await stream.send(REQUEST)
    await receive_exactly(stream, len(RESPONSE))


async def ask_pooled(client: Client, n_requests: int, n_streams: int) -> Callable[[], Awaitable[None]]:
    streams = [await client.open("request") for _ in range(n_streams)]
    for stream in streams:
        await ask(stream)

    async def ask_all(stream: Stream) -> None:
        for _ in range(n_requests // n_streams):
            await ask(stream)

    async def job() -> None:
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(ask_all, stream)

    return job


async def ask_fresh(client: Client, n_requests: int) -> Callable[[], Awaitable[None]]:
    async def job() -> None:
        for _ in range(n_requests):
            stream = await client.open("request")
            await ask(stream)
            await stream.finish()

    return job


async def take_burst(client: Client, n_chunks: int) -> Callable[[], Awaitable[None]]:
    stream = await client.open("burst")

    async def job() -> None:
        await stream.send(struct.pack("!Q", n_chunks))
        await receive_through(stream, n_chunks * len(CHUNK))
        await stream.send(b"k")

    return job


async def give_bulk(client: Client, n_writes: int) -> Callable[[], Awaitable[None]]:
    stream = await client.open("bulk")

    async def job() -> None:
        await stream.send(struct.pack("!Q", n_writes * len(WRITE)))
        for _ in range(n_writes):
            await stream.send(WRITE)
        await receive_exactly(stream, 1)

    return job


async def measure(usage: Stream, n_times: int, job: Callable[[], Awaitable[None]]) -> tuple[float, float, float]:
    """Wall seconds, client's and server's CPU seconds, each by ``n_times``."""

    async def server_cpu_s() -> float:
        await usage.send(b"?")
        return float(struct.unpack("!d", await receive_exactly(usage, 8))[0])

    server, client, start = await server_cpu_s(), cpu_s(), time.perf_counter()
    await job()
    wall_s, client_s = time.perf_counter() - start, cpu_s() - client
    return wall_s / n_times, client_s / n_times, (await server_cpu_s() - server) / n_times


async def dial_ms(client: Client, n_dials: int) -> float:
    times_ms = []
    for _ in range(n_dials):
        start = time.perf_counter()
        await client.dial()
        times_ms.append((time.perf_counter() - start) * 1000)
        await client.hang_up()
    return statistics.median(times_ms)


async def run_client(kind: str, address: str) -> dict[str, tuple[float, ...]]:
    """Figures of one round: what :func:`measure` gives for each job; dial in ms."""
    n = N[kind]
    figures: dict[str, tuple[float, ...]] = {}
    async with CLIENTS[kind](address) as client:
        figures["dial"] = (await dial_ms(client, n["dial"]),)
        await client.dial()
        usage = await client.open("usage")
        for name, prepared in (
            ("request_1", ask_pooled(client, n["request_1"], 1)),
            ("request_32", ask_pooled(client, n["request_32"], 32)),
            ("fresh", ask_fresh(client, n["fresh"])),
            ("burst", take_burst(client, n["burst"])),
            ("bulk", give_bulk(client, n["bulk"])),
        ):
            figures[name] = await measure(usage, n[name], await prepared)
    return figures


def run_round(kind: str) -> dict[str, tuple[float, ...]]:
    server = subprocess.Popen([sys.executable, "-m", "tests.bench.mesh", kind], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        return trio.run(run_client, kind, server.stdout.readline().strip())
    finally:
        server.terminate()
        server.wait()


# -- the report -------------------------------------------------------------------------------------------------------


def median_of(rounds: list[dict[str, tuple[float, ...]]]) -> dict[str, tuple[float, ...]]:
    columns = {name: list(zip(*(figures[name] for figures in rounds), strict=True)) for name in rounds[0]}
    return {name: tuple(map(statistics.median, columns[name])) for name in columns}


def readable(figures: dict[str, tuple[float, ...]]) -> dict[str, float]:
    """Named figures with their units."""
    result = {"dial_ms": round(figures["dial"][0], 2)}
    for name in ("request_1", "request_32", "fresh"):
        wall_s, client_s, server_s = figures[name]
        result[f"{name}_per_s"] = round(1 / wall_s)
        result[f"{name}_client_cpu_ms"] = round(client_s * 1000, 4)
        result[f"{name}_server_cpu_ms"] = round(server_s * 1000, 4)
    _, receiver_s, sender_s = figures["burst"]
    result["burst_send_cpu_us"] = round(sender_s * 1e6, 2)
    result["burst_receive_cpu_us"] = round(receiver_s * 1e6, 2)
    wall_s, sender_s, receiver_s = (value / len(WRITE) * 1e6 for value in figures["bulk"])
    result["bulk_mb_s"] = round(1 / wall_s)
    result["bulk_send_cpu_ms_mb"] = round(sender_s * 1000, 2)
    result["bulk_receive_cpu_ms_mb"] = round(receiver_s * 1000, 2)
    return result


def ratios(ours: dict[str, tuple[float, ...]], theirs: dict[str, tuple[float, ...]]) -> dict[str, float]:
    """How many times cheaper ours is: above 1 is better."""
    result = {
        name: sum(theirs[name][1:]) / sum(ours[name][1:]) for name in ("request_1", "request_32", "fresh", "burst")
    }
    result["bulk_throughput"] = theirs["bulk"][0] / ours["bulk"][0]
    result["dial"] = theirs["dial"][0] / ours["dial"][0]
    return {name: round(value, 2) for name, value in result.items()}


def main() -> None:
    if len(sys.argv) > 1:
        trio.run(SERVERS[sys.argv[1]], JOBS, lambda address: print(address, flush=True))
        return
    rounds: dict[str, list[dict[str, tuple[float, ...]]]] = {kind: [] for kind in CLIENTS}
    for _ in range(N_ROUNDS):
        for kind, each in rounds.items():
            each.append(run_round(kind))
    figures = {kind: median_of(each) for kind, each in rounds.items()}
    report = {
        "bench": "mesh",
        **{kind: readable(each) for kind, each in figures.items()},
        "ratio_to_stock": ratios(figures["tela"], figures["stock"]),
        "ratio_to_tls": ratios(figures["tela"], figures["tls"]),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
