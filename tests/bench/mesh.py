"""``make bench-mesh``: one mesh hop, two processes on loopback; the last line is one JSON object.

tela's mesh beside a stock py-libp2p host and a plain trio TLS connection a stream, interleaved, the median of N_ROUNDS.
Both ends are tasks that send and receive; request frames, HTTP and routing are not part of it.

- ``req_cpu_ms_1``, ``_32``: 500 B there, 300 B back on open streams, that many in flight: CPU of the dearer side.
- ``fresh_cpu_ms``: a stream opened for one such request and ended (TLS: a connection): the dearer side.
- ``chunk_burst_us_send``, ``_recv``: chunks of 100 B written one by one as fast as they go: CPU per chunk.
- ``chunk_paced_us_recv``, ``delay_p50_us``, ``_p99_us``: 32 streams with 50 such chunks a second, at random phases.
- ``bulk_mb_s_1``, ``_64``, ``fairness_64``: 64 KiB writes on one and on 64 streams; the first to end against the last.
- ``dial_ms``, ``first_answer_ms``: until streams can be opened, and until a request is answered.
- ``conn_rss_kb``: resident memory of the server by connection, of N_CONNECTIONS.
- of tela alone: see :mod:`tests.bench.mesh_extras`.
- ``ratio_to_stock``, ``ratio_to_tls``: how many times less than theirs our CPU of both sides is (bulk: how many times
  the throughput; dial: the time). These hold on a busy machine too, the figures themselves do not.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys

import trio

from tela import observe
from tests.bench.mesh_extras import measure_extras
from tests.bench.mesh_jobs import (
    JOBS,
    N_BULK_STREAMS,
    WRITE,
    ask_fresh,
    ask_pooled,
    dial_ms,
    give_bulk,
    measure,
    take_burst,
    take_paced,
    usage_of,
)
from tests.bench.mesh_peers import CLIENTS, MORE, SERVERS

N_ROUNDS = 3
N_CONNECTIONS = 20
N = {
    "tela": {"request_1": 2_000, "request_32": 6_400, "fresh": 500, "burst": 20_000, "paced": 3_200, "bulk_1": 1_000,
             "bulk_64": 6_400, "dial": 15},
    "tls": {"request_1": 1_500, "request_32": 3_200, "fresh": 50, "burst": 5_000, "paced": 3_200, "bulk_1": 1_000,
            "bulk_64": 6_400, "dial": 15},
    "stock": {"request_1": 300, "request_32": 640, "fresh": 60, "burst": 1_000, "paced": 1_600, "bulk_1": 150,
              "bulk_64": 128, "dial": 5},
}  # fmt: skip
"""How often each job is done a round: fewer where it is slow."""

Figures = dict[str, tuple[float, ...]]


async def run_client(kind: str, address: str) -> Figures:
    """Figures of one round: what :func:`measure` gives for each job, and beside it what else a job tells."""
    n, figures = N[kind], Figures()
    delays_s: list[float] = []
    ends_s: list[float] = []
    async with CLIENTS[kind](address) as client:
        figures["dial"] = await dial_ms(client, n["dial"])
        await client.dial()
        usage = await client.open("usage")
        for name, prepared in (
            ("request_1", ask_pooled(client, n["request_1"], 1)),
            ("request_32", ask_pooled(client, n["request_32"], 32)),
            ("fresh", ask_fresh(client, n["fresh"])),
            ("burst", take_burst(client, n["burst"])),
            ("paced", take_paced(client, n["paced"], delays_s)),
            ("bulk_1", give_bulk(client, n["bulk_1"], 1, [])),
            ("bulk_64", give_bulk(client, n["bulk_64"], N_BULK_STREAMS, ends_s)),
        ):
            figures[name] = await measure(usage, n[name], await prepared)
        cuts = statistics.quantiles(delays_s, n=100)
        figures["delay"] = (cuts[49], cuts[98])
        took_s = figures["bulk_64"][0] * n["bulk_64"]
        figures["fairness"] = (1 - (max(ends_s) - min(ends_s)) / took_s,)
        _, before, *_ = await usage_of(usage)
        async with MORE[kind](address, N_CONNECTIONS):
            _, after, *_ = await usage_of(usage)
        figures["rss"] = ((after - before) / N_CONNECTIONS,)
    return figures


def run_round(kind: str) -> Figures:
    server = subprocess.Popen([sys.executable, "-m", "tests.bench.mesh", kind], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        return trio.run(run_client, kind, server.stdout.readline().strip())
    finally:
        server.terminate()
        server.wait()


# -- the report -------------------------------------------------------------------------------------------------------


def median_of(rounds: list[Figures]) -> Figures:
    columns = {name: list(zip(*(figures[name] for figures in rounds), strict=True)) for name in rounds[0]}
    return {name: tuple(map(statistics.median, columns[name])) for name in columns}


def readable(figures: Figures) -> dict[str, float]:
    """Named figures with their units."""
    _, receiver_s, sender_s = figures["burst"]
    return {
        "req_cpu_ms_1": round(max(figures["request_1"][1:]) * 1000, 4),
        "req_cpu_ms_32": round(max(figures["request_32"][1:]) * 1000, 4),
        "fresh_cpu_ms": round(max(figures["fresh"][1:]) * 1000, 4),
        "chunk_burst_us_send": round(sender_s * 1e6, 2),
        "chunk_burst_us_recv": round(receiver_s * 1e6, 2),
        "chunk_paced_us_recv": round(figures["paced"][1] * 1e6, 1),
        "delay_p50_us": round(figures["delay"][0] * 1e6),
        "delay_p99_us": round(figures["delay"][1] * 1e6),
        "bulk_mb_s_1": round(len(WRITE) / figures["bulk_1"][0] / 1e6),
        "bulk_mb_s_64": round(len(WRITE) / figures["bulk_64"][0] / 1e6),
        "fairness_64": round(figures["fairness"][0], 3),
        "dial_ms": round(figures["dial"][0], 2),
        "first_answer_ms": round(figures["dial"][1], 2),
        "conn_rss_kb": round(figures["rss"][0] / 1000),
    }


def ratios(ours: Figures, theirs: Figures) -> dict[str, float]:
    """How many times cheaper ours is: above 1 is better."""
    result = {
        name: sum(theirs[name][1:]) / sum(ours[name][1:]) for name in ("request_1", "request_32", "fresh", "burst")
    }
    result["bulk_throughput"] = theirs["bulk_1"][0] / ours["bulk_1"][0]
    result["dial"] = theirs["dial"][0] / ours["dial"][0]
    return {name: round(value, 2) for name, value in result.items()}


def main() -> None:
    observe.configure("warning")  # to stderr: stdout is for addresses and the report
    if len(sys.argv) > 1:
        trio.run(SERVERS[sys.argv[1]], JOBS, lambda address: print(address, flush=True))
        return
    rounds: dict[str, list[Figures]] = {kind: [] for kind in CLIENTS}
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
    report["tela"] |= measure_extras()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
