"""Hosts whose clocks are a year off: they join, serve, route, and say so. libfaketime turns their clocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.load import ask_many
from tests.lab.engines import fake_command
from tests.netlab.net import Net
from tests.netlab.swarm import MODEL, NetSwarm, failures, seconds_until

TURNED = {"a2-ahead": "+365d", "b1-behind": "-365d", "b2-front": "+365d"}


class TurnedSwarm(NetSwarm):
    """Daemons named in TURNED live in another year; their engines do not, since Python cannot sleep there."""

    def command(self, name: str, *argv: str) -> list[str]:
        if name not in TURNED:
            return super().command(name, *argv)
        (library,) = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
        variables = (f"LD_PRELOAD={library}", f"FAKETIME={TURNED[name]}", "FAKETIME_DONT_FAKE_MONOTONIC=1")
        return super().command(name, "env", *variables, *argv)


@pytest.fixture(scope="module")
def swarm(net: Net) -> Iterator[NetSwarm]:
    with TurnedSwarm(net) as swarm:
        swarm.init()
        swarm.start_public()
        for name in ("a1", "a2-ahead", "b1-behind"):
            engine = fake_command("--port", "{port}", "--model", MODEL)
            swarm.start_worker(name, ["env", "-u", "LD_PRELOAD", *engine])
        swarm.wait_serving(MODEL, replicas=3, name="pub")
        yield swarm


def test_workers_a_year_off_serve_and_say_so(swarm: NetSwarm) -> None:
    outcomes = swarm.ask(30)
    assert failures(outcomes) == []
    assert len({outcome.node for outcome in outcomes}) == 3
    for name, words in (("a2-ahead", "ahead"), ("b1-behind", "behind")):
        (warning,) = swarm.look(name)["warnings"]
        assert f"s {words}: the time of the hubs is used" in warning
        assert {view["name"]: view["state"] for view in swarm.look(name)["nodes"]}.keys() >= {"pub", "a1", name}
    assert swarm.look("a1")["warnings"] == []


def test_ingress_a_year_off_routes_to_everybody(net: Net, swarm: NetSwarm) -> None:
    front = swarm.start("b2-front", "ingress", "--http", "127.0.0.1:8090")
    public_url, swarm.base_url = swarm.base_url, swarm.wait_status(front)["base_url"]
    try:
        swarm.wait_serving(MODEL, replicas=3, name="b2-front")
        with net.inside("b2"):
            outcomes = ask_many(swarm, MODEL, n_requests=30)
    finally:
        swarm.base_url = public_url
    assert failures(outcomes) == []
    assert len({outcome.node for outcome in outcomes}) == 3


def test_nobody_is_suspected_or_expelled_for_its_clock(swarm: NetSwarm) -> None:
    seconds_until(lambda: swarm.look("a2-ahead")["uptime_s"] > 8, "some sweeps", limit_s=20)
    states = {view["name"]: view["state"] for view in swarm.look("pub")["nodes"]}
    assert {states[name] for name in ("a1", "a2-ahead", "b1-behind")} == {"serving"}
