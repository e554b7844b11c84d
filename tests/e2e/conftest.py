"""One real swarm for the tests that only ask; tests that break things start their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from scripts.demo import fetch_model as model_fetcher
from scripts.demo.local_swarm import LocalSwarm
from tests.e2e.load import sdk

MODEL = "smollm2"
E2E_TIMEOUT_S = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))


@pytest.fixture(scope="session")
def engine() -> list[str]:
    """The command of a real llama.cpp server with a real small model."""
    weights = model_fetcher.fetch_model()
    server = Path(model_fetcher.__file__).with_name("llama_server.py")
    return [sys.executable, str(server), "--model", str(weights), "--alias", MODEL, "--threads", "1"]


@pytest.fixture(scope="module")
def swarm(engine: list[str]) -> Iterator[LocalSwarm]:
    """A hub that is the ingress and two workers with the real small model."""
    with LocalSwarm() as swarm:
        yield start_two_workers(swarm, engine)


def start_two_workers(swarm: LocalSwarm, engine: list[str]) -> LocalSwarm:
    """A hub that is the ingress, and w1 and w2 serving."""
    swarm.init()
    swarm.start_hub()
    for name in ("w1", "w2"):
        swarm.start_worker(name, engine)
    swarm.wait_serving(MODEL, replicas=2)
    return swarm


@pytest.fixture
def client(swarm: LocalSwarm) -> Iterator[openai.OpenAI]:
    """The official SDK, without retries of its own."""
    with sdk(swarm) as client:
        yield client
