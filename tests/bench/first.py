"""``make bench-first``: the figures of the main job, on real processes with the real small model.

The last line is one JSON object. What is measured, and how:

- ``join_to_routable_s``: from the worker's log line ``engine.ready``, by its own timestamp, to the moment at which the
  first request that gets an answer is asked, at an ingress that knows no other instance; asked every 20 ms (goal 1 s);
  0 where that request was on its way already.
- ``kill_requests``, ``kill_client_errors``: of that many requests over SIGKILLs of a worker, how many failed at the
  client.
- ``kill_met_the_dead``: the most requests, asked after one kill, that the ingress still sent to the dead worker first,
  so that they needed a second attempt (goal 1). A request that was in flight at the kill is not among them.
- ``daemon_rss_mb``: of the largest tela process, engines apart (goal 120).
- ``status_cpu_ms``, ``help_cpu_ms``: median CPU of the whole command (goal 120); ``floor_cpu_ms``: of a Python that
  only imports what they stand on, click and msgspec (81 ms on the machine of the goal, style.md 3.6), in the same run.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime

import psutil

from scripts.demo.demo import MODEL, engine_command
from scripts.demo.fetch_model import fetch_model
from scripts.demo.local_swarm import TELA, Daemon, LocalSwarm, poll
from tests.e2e.load import ask, ask_many, sdk

N_KILLS = 3
N_REQUESTS_PER_KILL = 60
N_COMMAND_RUNS = 9


def machine_facts() -> dict[str, object]:
    """What a reader needs to compare figures."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
    }


def command_cpu_ms(*command: str, environment: dict[str, str]) -> float:
    """Median user and system CPU of a command, as a whole process."""
    figures = []
    for _ in range(N_COMMAND_RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=environment, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        figures.append((after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) * 1000)
    return round(statistics.median(figures), 1)


def join_to_routable_s(swarm: LocalSwarm, engine: list[str]) -> float:
    """From the worker's log line ``engine.ready`` to the first request that is answered."""
    worker = swarm.start_worker("w1", engine)
    with sdk(swarm) as client:
        for _ in poll(60, "the first answer", interval_s=0.02):
            asked = datetime.now(UTC)
            if not ask(client, MODEL).error:
                break
    events = (json.loads(line) for line in worker.text().splitlines() if line.startswith("{"))
    ready = next(event["timestamp"] for event in events if event.get("event") == "engine.ready")
    return round(max(0.0, (asked - datetime.fromisoformat(ready)).total_seconds()), 3)


def kill_under_load(swarm: LocalSwarm, victim: Daemon) -> tuple[int, int]:
    """Client errors and requests that met the dead, over one SIGKILL."""
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        swarm.kill(victim)

    outcomes = ask_many(swarm, MODEL, n_requests=N_REQUESTS_PER_KILL, disturb=kill, disturb_after=15)
    n_errors = sum(bool(outcome.error) for outcome in outcomes)
    return n_errors, sum(outcome.attempts > 1 for outcome in outcomes if outcome.asked_s > killed[0])


def main() -> None:
    engine = engine_command(fetch_model())
    with LocalSwarm() as swarm:
        swarm.init()
        swarm.start_hub()
        routable_s = join_to_routable_s(swarm, engine)
        swarm.start_worker("w2", engine)
        swarm.wait_serving(MODEL, replicas=2)
        kills = []
        for _ in range(N_KILLS):
            victim = next(daemon for daemon in reversed(swarm.daemons) if daemon.name == "w2")
            kills.append(kill_under_load(swarm, victim))
            swarm.start_worker("w2", engine)
            swarm.wait_serving(MODEL, replicas=2)
        alive = [daemon for daemon in swarm.daemons if daemon.process.poll() is None]
        rss_mb = max(psutil.Process(daemon.pid).memory_info().rss for daemon in alive) / 1e6
        figures = {
            "bench": "first",
            "join_to_routable_s": routable_s,
            "kill_requests": N_KILLS * N_REQUESTS_PER_KILL,
            "kill_client_errors": sum(errors for errors, _ in kills),
            "kill_met_the_dead": max(met for _, met in kills),
            "daemon_rss_mb": round(rss_mb, 1),
            "status_cpu_ms": command_cpu_ms(TELA, "status", "--name", "hub", environment=swarm.environment),
            "help_cpu_ms": command_cpu_ms(TELA, "--help", environment=swarm.environment),
            "floor_cpu_ms": command_cpu_ms(
                sys.executable, "-c", "import click, msgspec", environment=swarm.environment
            ),
            **machine_facts(),
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
