"""A swarm of real tela processes on the hosts of the network lab. The engines are tests/lab/fake_engine.py."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from scripts.demo.local_swarm import Daemon, LocalSwarm, poll
from tests.e2e.load import Outcome, ask_many
from tests.lab.control import ask_control
from tests.lab.engines import fake_command
from tests.netlab.net import HUB_ADDRESS, Net

MODEL = "fake"
HUB_NAME = "hub.example"
HUB_PORT = 4001
FRONT = "a1-front"
WORKERS = ("a1", "a2", "b1", "b2")
NO_PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"), "")
"""What this machine needs to reach the world is of no use in the lab."""


class NetSwarm(LocalSwarm):
    """Daemons called ``HOST`` or ``HOST-SOMETHING`` run on that host; ``pub`` is the first hub and the ingress."""

    def __init__(self, net: Net) -> None:
        super().__init__(environment=NO_PROXIES)
        self.net = net

    def command(self, name: str, *argv: str) -> list[str]:
        return self.net.command(name.partition("-")[0], *argv)

    def start_public(self, *, address: str = HUB_ADDRESS, advertise: str = "") -> Daemon:
        """The public hub and ingress; the invite names its address, or what it advertises."""
        options = ("--advertise", f"{advertise}:{HUB_PORT}") if advertise else ()
        listen = f"{address}:{HUB_PORT}"
        hub = self.start(
            "pub", "ingress", "--hub", "--http", "127.0.0.1:8080", "--listen", listen, *options, invite=self.hub_invite
        )
        self.base_url = self.wait_status(hub)["base_url"]
        if not self.invite:
            roles = ("--roles", "worker,ingress", "--uses", "100")
            self.invite = self.answer("invite", "create", *roles)["invite"]
        return hub

    def start_sites(self) -> None:
        """The public hub, an ingress behind NAT of site A, to which requests go, and a worker in each site."""
        self.init()
        self.start_public()
        front = self.start(FRONT, "ingress", "--http", "127.0.0.1:8090", "--listen", "0.0.0.0:4001")
        self.base_url = self.wait_status(front)["base_url"]
        for name in ("a2", "b1"):
            self.start_fake(name)
        self.wait_serving(MODEL, replicas=2, name=FRONT)

    def start_fake(self, name: str, *options: str, models: str = MODEL, flags: tuple[str, ...] = ()) -> Daemon:
        """A worker with ``options`` whose engine is a fake one with ``flags``."""
        return self.start_worker(name, fake_command("--port", "{port}", "--model", models, *flags), *options)

    def look(self, name: str) -> Any:
        """What ``tela status`` would show, straight from the control socket: quick enough to measure with."""
        return json.loads(self.control(name, "GET", "/status"))

    def control(self, name: str, method: str, path: str) -> bytes:
        """Ask a daemon's control socket."""
        return ask_control(self, name, path, method=method)

    def state_of(self, node: str, *, seen_by: str) -> str:
        """State of a member as a daemon shows it; empty where it shows none."""
        return next((view["state"] for view in self.look(seen_by)["nodes"] if view["node"] == node), "")

    def n_ready(self, model: str = MODEL) -> int:
        """Replicas that the public ingress would route to."""
        return next((view["n_ready"] for view in self.look("pub")["models"] if view["model"] == model), 0)

    def ask(
        self,
        n_requests: int,
        *,
        n_parallel: int = 4,
        disturb: Callable[[], object] | None = None,
        disturb_after: int = 0,
    ) -> list[Outcome]:
        """Requests of a client on the ingress' host; see ask_many."""
        with self.net.inside("pub"):
            return ask_many(
                self,
                MODEL,
                n_requests=n_requests,
                n_parallel=n_parallel,
                disturb=disturb,
                disturb_after=disturb_after,
            )

    def workers(self) -> dict[str, tuple[int, ...]]:
        """Process ids of every worker and of what it runs: the same after as before, where nothing was restarted."""
        daemons = {daemon.name: daemon for daemon in self.daemons if daemon.process.poll() is None}
        return {name: tuple(sorted(p.pid for p in daemons[name].family())) for name in daemons if name != "pub"}


def seconds_until(condition: Callable[[], object], what: str, *, limit_s: float) -> float:
    """How long it took; a daemon that is just starting or ending does not answer yet."""
    began = time.monotonic()
    for _ in poll(limit_s, what, interval_s=0.03):
        with contextlib.suppress(OSError):
            if condition():
                break
    return round(time.monotonic() - began, 2)


def failures(outcomes: list[Outcome]) -> list[str]:
    """What clients were told instead of an answer."""
    return [outcome.error for outcome in outcomes if outcome.error]
