"""What both ends of ``make bench-mesh`` do: the server's jobs, and how a client drives and measures them."""

from __future__ import annotations

import random
import resource
import statistics
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import psutil
import trio

from tests.bench.mesh_peers import Client, Stream

REQUEST, RESPONSE = bytes(500), bytes(300)
CHUNK = bytes(100)
WRITE = bytes(65_536)
N_PACED: Final = 32
PACED_INTERVAL_S: Final = 0.02
N_BULK_STREAMS: Final = 64
_STAMP: Final = struct.Struct("!d")
_COUNT: Final = struct.Struct("!Q")
_USAGE: Final = struct.Struct("!dQQQ")  # CPU seconds, resident bytes, tasks, open files

Job = Callable[[], Awaitable[None]]


def cpu_s() -> float:
    """Of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def own_usage() -> tuple[float, int, int, int]:
    """CPU seconds, resident bytes, tasks and open files of this process."""
    n_tasks = trio.lowlevel.current_statistics().tasks_living
    return cpu_s(), psutil.Process().memory_info().rss, n_tasks, len(list(Path("/proc/self/fd").iterdir()))


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
    (n_chunks,) = _COUNT.unpack(await receive_exactly(stream, _COUNT.size))
    for _ in range(n_chunks):
        await stream.send(CHUNK)
    await receive_exactly(stream, 1)
    await stream.finish()


async def send_paced(stream: Stream) -> None:
    """Chunks that tell when they were sent, at a phase of their own."""
    (n_chunks,) = _COUNT.unpack(await receive_exactly(stream, _COUNT.size))
    due = trio.current_time() + random.uniform(0, PACED_INTERVAL_S)
    for _ in range(n_chunks):
        await trio.sleep_until(due)
        due += PACED_INTERVAL_S
        await stream.send(_STAMP.pack(time.monotonic()).ljust(len(CHUNK)))
    await receive_exactly(stream, 1)
    await stream.finish()


async def swallow(stream: Stream) -> None:
    data = await receive_exactly(stream, _COUNT.size)
    (n_bytes,) = _COUNT.unpack(data[: _COUNT.size])
    await receive_through(stream, n_bytes - len(data) + _COUNT.size)
    await stream.send(b"k")
    await stream.finish()


async def tell_usage(stream: Stream) -> None:
    while await receive_exactly(stream, 1):
        await stream.send(_USAGE.pack(*own_usage()))
    await stream.finish()


JOBS = {
    "request": answer_requests,
    "burst": send_burst,
    "paced": send_paced,
    "bulk": swallow,
    "usage": tell_usage,
}


# -- the client -------------------------------------------------------------------------------------------------------


async def ask(stream: Stream) -> None:
    await stream.send(REQUEST)
    await receive_exactly(stream, len(RESPONSE))


async def ask_pooled(client: Client, n_requests: int, n_streams: int) -> Job:
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


async def ask_fresh(client: Client, n_requests: int) -> Job:
    async def job() -> None:
        for _ in range(n_requests):
            stream = await client.open("request")
            await ask(stream)
            await stream.finish()

    return job


async def take_burst(client: Client, n_chunks: int) -> Job:
    stream = await client.open("burst")

    async def job() -> None:
        await stream.send(_COUNT.pack(n_chunks))
        await receive_through(stream, n_chunks * len(CHUNK))
        await stream.send(b"k")

    return job


async def take_paced(client: Client, n_chunks: int, delays_s: list[float]) -> Job:
    """``n_chunks`` in all over N_PACED streams; the delay of each goes to ``delays_s``."""
    streams = [await client.open("paced") for _ in range(N_PACED)]

    async def take(stream: Stream) -> None:
        await stream.send(_COUNT.pack(n_chunks // N_PACED))
        data = b""
        for _ in range(n_chunks // N_PACED):
            while len(data) < len(CHUNK):
                data += await stream.receive()
            delays_s.append(time.monotonic() - _STAMP.unpack_from(data)[0])
            data = data[len(CHUNK) :]
        await stream.send(b"k")

    async def job() -> None:
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(take, stream)

    return job


async def give_bulk(client: Client, n_writes: int, n_streams: int, ends_s: list[float]) -> Job:
    """``n_writes`` in all; when each stream was done goes to ``ends_s``."""
    streams = [await client.open("bulk") for _ in range(n_streams)]

    async def give(stream: Stream) -> None:
        n_own = n_writes // n_streams
        await stream.send(_COUNT.pack(n_own * len(WRITE)))
        for _ in range(n_own):
            await stream.send(WRITE)
        await receive_exactly(stream, 1)
        ends_s.append(time.perf_counter())

    async def job() -> None:
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(give, stream)

    return job


async def usage_of(stream: Stream) -> tuple[float, int, int, int]:
    """What :func:`own_usage` gives on the server."""
    await stream.send(b"?")
    cpu, rss, n_tasks, n_fds = _USAGE.unpack((await receive_exactly(stream, _USAGE.size))[: _USAGE.size])
    return cpu, rss, n_tasks, n_fds


async def measure(usage: Stream, n_times: int, job: Job) -> tuple[float, float, float]:
    """Wall seconds, client's and server's CPU seconds, each by ``n_times``."""
    server, client, start = (await usage_of(usage))[0], cpu_s(), time.perf_counter()
    await job()
    wall_s, client_s = time.perf_counter() - start, cpu_s() - client
    return wall_s / n_times, client_s / n_times, ((await usage_of(usage))[0] - server) / n_times


async def dial_ms(client: Client, n_dials: int) -> tuple[float, float]:
    """Until streams can be opened, and until a first request is answered; medians."""
    dials_ms, answers_ms = [], []
    for _ in range(n_dials):
        start = time.perf_counter()
        await client.dial()
        dials_ms.append((time.perf_counter() - start) * 1000)
        await ask(await client.open("request"))
        answers_ms.append((time.perf_counter() - start) * 1000)
        await client.hang_up()
    return statistics.median(dials_ms), statistics.median(answers_ms)
