"""How long an ingress goes on routing to a worker that died, fell silent or leaves: real daemons, fake engines."""

from __future__ import annotations

import json
import signal
import statistics
import time
from typing import Any

from scripts.demo.local_swarm import Daemon, LocalSwarm, poll
from tests.e2e.load import ask_many
from tests.lab.control import ask_control
from tests.lab.engines import fake_command

MODEL = "fake"
N_KILLS = 25
N_SILENT = 3
N_STOPS = 9
N_TERMS = 4
REQUESTS_PER_TERM = 60
LIMIT_S = 20.0
POLL_S = 0.001
SETTLE_S = 1.5
"""After a restart: its links must have been pinged before the next fault."""


def start(swarm: LocalSwarm, name: str) -> Daemon:
    return swarm.start_worker(name, fake_command("--port", "{port}", "--model", MODEL))


def verdicts(swarm: LocalSwarm) -> dict[str, bool]:
    """Whether the ingress would send a request to each worker now."""
    route: dict[str, Any] = json.loads(ask_control(swarm, "hub", f"/route?model={MODEL}"))
    return {each["name"]: each["is_fit"] for each in route["candidates"]}


def until(swarm: LocalSwarm, name: str, *, is_fit: bool) -> float:
    """Seconds until the ingress changes its mind about a worker."""
    began_s = time.monotonic()
    for _ in poll(LIMIT_S, f"{name} to be {'fit' if is_fit else 'left alone'}", interval_s=POLL_S):
        if verdicts(swarm).get(name, False) is is_fit:
            break
    return time.monotonic() - began_s


def kill_windows_s(swarm: LocalSwarm) -> list[float]:
    """SIGKILL of a worker that listens nowhere, so that nobody can dial it to see."""
    windows = []
    for _ in range(N_KILLS):
        victim = start(swarm, "victim")
        until(swarm, "victim", is_fit=True)
        time.sleep(SETTLE_S)
        victim.process.send_signal(signal.SIGKILL)
        windows.append(until(swarm, "victim", is_fit=False))
        victim.process.wait()
    return windows


def stop_windows_s(swarm: LocalSwarm) -> list[float]:
    """SIGSTOP: as a host that fell silent, with every connection open; of several workers in turn."""
    victims = [start(swarm, f"silent-{index}") for index in range(N_SILENT)]
    windows = []
    for index in range(N_STOPS):
        victim = victims[index % N_SILENT]
        until(swarm, victim.name, is_fit=True)
        time.sleep(SETTLE_S)
        victim.process.send_signal(signal.SIGSTOP)
        try:
            windows.append(until(swarm, victim.name, is_fit=False))
        finally:
            victim.process.send_signal(signal.SIGCONT)
    for victim in victims:
        victim.process.terminate()
        victim.wait()
    return windows


def term_errors(swarm: LocalSwarm) -> int:
    """Requests that failed while a worker was told to leave."""
    n_errors = 0
    for _ in range(N_TERMS):
        leaver = start(swarm, "leaver")
        until(swarm, "leaver", is_fit=True)
        outcomes = ask_many(
            swarm,
            MODEL,
            n_requests=REQUESTS_PER_TERM,
            disturb=lambda leaver=leaver: leaver.process.send_signal(signal.SIGTERM),
            disturb_after=REQUESTS_PER_TERM // 4,
        )
        n_errors += sum(bool(outcome.error) for outcome in outcomes)
        leaver.wait()
    return n_errors


def measure() -> dict[str, float]:
    """Figures by name."""
    with LocalSwarm() as swarm:
        swarm.init()
        swarm.start_hub()
        start(swarm, "steady")
        swarm.wait_serving(MODEL)
        kills_ms = [window_s * 1000 for window_s in kill_windows_s(swarm)]
        stops_ms = [window_s * 1000 for window_s in stop_windows_s(swarm)]
        errors = term_errors(swarm)
    return {
        "kills": N_KILLS,
        "kill_window_p50_ms": round(statistics.median(kills_ms), 1),
        "kill_window_outbound_p99_ms": round(max(kills_ms), 1),
        "stops": N_STOPS,
        "stop_window_p50_ms": round(statistics.median(stops_ms)),
        "stop_window_p99_ms": round(max(stops_ms)),
        "term_errors": errors,
    }
