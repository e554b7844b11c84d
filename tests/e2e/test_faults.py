"""Workers and ingresses that die, leave and come back, under load, on real processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import httpx
import openai
import psutil
import pytest

from scripts.demo.local_swarm import LocalSwarm, poll
from tests.e2e.conftest import MODEL, start_two_workers
from tests.e2e.load import ask_many, ask_once, sdk

FOLLOW_TIMEOUT_S = 10.0
"""Nothing below a daemon outlives it by more (design/engine.md)."""


@pytest.fixture
def swarm(engine: list[str]) -> Iterator[LocalSwarm]:
    """A swarm of this test's own: it will be broken."""
    with LocalSwarm() as swarm:
        yield start_two_workers(swarm, engine)


def test_kill_of_a_worker_under_load_fails_no_request(swarm: LocalSwarm, engine: list[str]) -> None:
    hub, victim, survivor = swarm.daemons
    victim_node, survivor_node = (swarm.status(d.name)["node"] for d in (victim, survivor))
    families: list[list[psutil.Process]] = []
    outcomes = ask_many(
        swarm,
        MODEL,
        n_requests=100,
        disturb=lambda: families.append(swarm.kill(victim)),
        disturb_after=30,
    )
    assert [outcome.error for outcome in outcomes if outcome.error] == []
    assert {outcome.node for outcome in outcomes} == {victim_node, survivor_node}
    assert {outcome.node for outcome in outcomes[60:]} == {survivor_node}
    _, alive = psutil.wait_procs(families[0], timeout=FOLLOW_TIMEOUT_S)
    assert alive == []

    swarm.start_worker("w1", engine)  # the same node again: a new session supersedes the dead one
    swarm.wait_serving(MODEL, replicas=2)
    assert swarm.status("w1")["node"] == victim_node
    assert [view["state"] for view in swarm.status()["nodes"] if view["node"] == victim_node] == ["serving"]
    assert hub.process.poll() is None


def test_drain_under_load_fails_no_request_and_leaves_nothing(swarm: LocalSwarm) -> None:
    leaver = swarm.daemons[1]
    family = leaver.family()
    leaver_node = swarm.status(leaver.name)["node"]
    outcomes = ask_many(
        swarm,
        MODEL,
        n_requests=60,
        disturb=lambda: leaver.process.send_signal(signal.SIGTERM),
        disturb_after=20,
    )
    assert [outcome.error for outcome in outcomes if outcome.error] == []
    assert leaver.wait() == 0
    _, alive = psutil.wait_procs(family, timeout=FOLLOW_TIMEOUT_S)
    assert alive == []
    assert leaver_node not in {outcome.node for outcome in outcomes[-20:]}
    states = {view["node"]: view["state"] for view in swarm.status()["nodes"]}
    assert states.get(leaver_node, "left") == "left"


def test_restart_of_the_ingress_is_healed_by_the_workers(swarm: LocalSwarm) -> None:
    hub = swarm.daemons[0]
    workers = [daemon.pid for daemon in swarm.daemons[1:]]
    engines = {process.pid for daemon in swarm.daemons[1:] for process in daemon.family()}
    listen = swarm.status()["addresses"][0].split("/")
    http = swarm.base_url.removeprefix("http://").removesuffix("/v1")
    swarm.kill(hub)
    swarm.start_hub(http=http, listen=f"{listen[2]}:{listen[4]}")
    swarm.wait_serving(MODEL, replicas=2, timeout_s=15)
    assert ask_once(swarm, MODEL).error == ""
    assert [daemon.pid for daemon in swarm.daemons[1:3]] == workers
    assert {process.pid for daemon in swarm.daemons[1:3] for process in daemon.family()} == engines


def test_last_worker_gone_is_told_and_the_model_disappears(swarm: LocalSwarm) -> None:
    for daemon in swarm.daemons[1:]:
        swarm.kill(daemon)
    for _ in poll(5, "the error of a model without instances"):
        error = ask_once(swarm, MODEL).error
        if "InternalServerError" in error:
            break
    assert "no_capacity" in error
    with sdk(swarm) as client:
        for _ in poll(10, "the model list to empty"):
            if not list(client.models.list()):
                break


def test_second_ingress_and_a_plain_hub_join_without_a_restart(swarm: LocalSwarm) -> None:
    """Workers dial every ingress that announces itself, so requests reach them through a new one as well."""
    invite = swarm.answer("invite", "create", "--roles", "ingress,hub", "--uses", "2")["invite"]
    front = swarm.start("front", "ingress", "--http", "127.0.0.1:0", "--listen", "127.0.0.1:0", invite=invite)
    swarm.start("relay", "join", "--role", "hub", "--listen", "127.0.0.1:0", invite=invite)
    base_url = swarm.wait_status(front)["base_url"]
    swarm.wait_serving(MODEL, replicas=2, name="front", timeout_s=15)
    assert base_url != swarm.base_url
    swarm.base_url = base_url
    assert ask_once(swarm, MODEL).error == ""
    for _ in poll(10, "the workers to link with the plain hub"):
        if swarm.status("relay")["n_links"] >= 3:
            break


def test_drain_then_leave_by_command(swarm: LocalSwarm) -> None:
    worker = swarm.daemons[2]
    assert swarm.call("drain", "--name", "w2").returncode == 0
    assert swarm.status("w2")["state"] == "drain"
    node = swarm.status("w2")["node"]
    outcomes = ask_many(swarm, MODEL, n_requests=8)
    assert [outcome.error for outcome in outcomes if outcome.error] == []
    assert node not in {outcome.node for outcome in outcomes}
    assert swarm.call("leave", "--name", "w2").returncode == 0
    assert worker.wait() == 0


def test_stream_that_breaks_is_told_and_never_forged(swarm: LocalSwarm) -> None:
    """Both engines' daemons die under running streams: the SDK raises, and no [DONE] was sent."""
    with sdk(swarm) as client:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Count."}],
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        assert next(iter(stream)).choices
        for daemon in swarm.daemons[1:]:
            swarm.kill(daemon)
        with pytest.raises((openai.APIError, httpx.RemoteProtocolError)):
            list(stream)
