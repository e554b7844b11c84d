"""A worker is revoked while it serves: out within seconds, out for good, and nobody else notices.

The engines are fake, as what is asked of them is not the point and they start in a moment; all else is real processes.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator

import openai
import pytest

from scripts.demo.local_swarm import LocalSwarm, poll
from tests.e2e.load import ask_once, sdk
from tests.lab.engines import FAKE_ENGINE

EFFECT_TIMEOUT_S = 5.0
"""What design/overlay.md 4 promises: a revocation takes effect on live links within seconds."""
REFUSED = 5
MODEL, OTHER_MODEL = "one", "other"


def engine(model: str) -> list[str]:
    return [sys.executable, str(FAKE_ENGINE), "--model", model, "--port", "{port}"]


@pytest.fixture
def swarm() -> Iterator[LocalSwarm]:
    """A hub, and two workers that serve one model each."""
    with LocalSwarm() as swarm:
        swarm.init()
        swarm.start_hub()
        swarm.start_worker("w1", engine(MODEL))
        swarm.start_worker("w2", engine(OTHER_MODEL))
        for model in (MODEL, OTHER_MODEL):
            swarm.wait_serving(model)
        yield swarm


def listed(client: openai.OpenAI) -> set[str]:
    return {model.id for model in client.models.list()}


def test_revoked_worker_is_out_within_seconds_and_for_good(swarm: LocalSwarm) -> None:
    hub, revoked, survivor = swarm.daemons
    family = revoked.family()
    node = swarm.status("w1")["node"]
    assert ask_once(swarm, MODEL).error == ""

    began = time.monotonic()
    assert swarm.answer("swarm", "revoke", node)["node"].startswith(node)
    with sdk(swarm) as client:
        for _ in poll(EFFECT_TIMEOUT_S, "the model of the revoked worker to be listed no more"):
            if listed(client) == {OTHER_MODEL}:
                break
    assert revoked.wait(began + EFFECT_TIMEOUT_S - time.monotonic()) == REFUSED
    assert revoked.text().count("tela: error: the swarm's CA revoked the key of node") == 1
    for _ in poll(EFFECT_TIMEOUT_S, "the engine to follow"):
        if not any(process.is_running() for process in family):
            break

    assert ask_once(swarm, OTHER_MODEL).error == ""
    assert "NotFound" in ask_once(swarm, MODEL).error
    assert node not in {view["node"] for view in swarm.status("w2")["nodes"]}

    again = swarm.start_worker("w1", engine(MODEL))  # it remembers what it was told
    assert again.wait() == REFUSED
    refuse_under_another_key(swarm)
    assert [daemon.process.poll() for daemon in (hub, survivor)] == [None, None]
    assert ask_once(swarm, OTHER_MODEL).error == ""


def refuse_under_another_key(swarm: LocalSwarm) -> None:
    """Once the invite is revoked too, its holder cannot come back under another name."""
    (invite,) = [each for each in swarm.answer("invite", "list")["invites"] if each["uses"] == 1000]
    assert (invite["n_used"], invite["state"]) == (2, "good")
    swarm.answer("invite", "revoke", invite["id"])
    renamed = swarm.start_worker("w3", engine(MODEL))
    assert renamed.wait() == REFUSED
    assert f"revoked the invite {invite['id']}" in renamed.text()


def test_revocation_outlives_the_hub_and_a_node_that_forgot_it_is_told_again(swarm: LocalSwarm) -> None:
    hub, revoked, _ = swarm.daemons
    swarm.answer("swarm", "revoke", swarm.status("w1")["node"])
    assert revoked.wait() == REFUSED
    listen = swarm.status()["addresses"][0].split("/")
    swarm.kill(hub)
    swarm.start_hub(http=swarm.base_url.removeprefix("http://").removesuffix("/v1"), listen=f"{listen[2]}:{listen[4]}")
    elsewhere = swarm.folder / "elsewhere"  # another host, as it were: with the node's key, and without the list
    shutil.copytree(swarm.folder / "state" / "nodes" / "w1", elsewhere / "nodes" / "w1")
    (elsewhere / "nodes" / "w1" / "revocations").unlink()
    forgetful = swarm.start_worker("w1", engine(MODEL), "--state-dir", str(elsewhere))
    assert forgetful.wait() == REFUSED
    assert '"code": "revoked"' in forgetful.text()  # the log of a hub's refusal
    assert "the swarm's CA revoked the key of node" in forgetful.text()
    swarm.wait_serving(OTHER_MODEL, timeout_s=15)
    assert [each["kind"] for each in swarm.answer("swarm", "show")["revoked"]] == ["node"]
