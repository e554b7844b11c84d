"""A swarm whose one worker wraps real vLLM: 3 GB and 40 CPU-seconds a start, so one engine at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from scripts.demo.local_swarm import LocalSwarm
from tests.vllm import lab

TEST_TIMEOUT_S = 240
READY_TIMEOUT_S = 180
"""Ready in 35 to 55 s on two idle cores, 90 s on busy ones."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def engine() -> list[str]:
    """The command of real vLLM with the tiny model."""
    return lab.engine_command()


@pytest.fixture(scope="module")
def lasting_swarm(engine: list[str]) -> Iterator[LocalSwarm]:
    """For the tests of a module that only ask."""
    with LocalSwarm(environment=lab.ENVIRONMENT) as swarm:
        yield start(swarm, engine)


@pytest.fixture
def swarm(engine: list[str]) -> Iterator[LocalSwarm]:
    """For one test, which breaks it."""
    with LocalSwarm(environment=lab.ENVIRONMENT) as swarm:
        yield start(swarm, engine)


def start(swarm: LocalSwarm, engine: list[str]) -> LocalSwarm:
    swarm.init()
    swarm.start_hub()
    worker = swarm.start_worker("worker", engine)
    # One process that waits, where polling by processes would take a core from vLLM.
    asked = ("--for", "serving", "--model", lab.MODEL, "--name", "hub", "--timeout", f"{READY_TIMEOUT_S}s")
    done = swarm.call("wait", *asked, timeout_s=READY_TIMEOUT_S + 10)
    assert done.returncode == 0, done.stderr + worker.text()[-3000:]
    return swarm


def sdk(swarm: LocalSwarm) -> openai.OpenAI:
    """The official SDK, without retries of its own."""
    return openai.OpenAI(base_url=swarm.base_url, api_key="none", max_retries=0, timeout=60)
