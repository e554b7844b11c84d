"""How a worker with real vLLM ends: on request without losing a stream, and unasked without hiding it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import openai
import psutil
import pytest

from scripts.demo.local_swarm import LocalSwarm, poll
from tests.vllm import lab
from tests.vllm.conftest import sdk

MESSAGES = [{"role": "user", "content": "Name one colour."}]
LONG_TOKENS = 900
EXIT_TIMEOUT_S = 45.0
"""The drain of one short stream, vLLM's own second or five to end, and what two busy cores add."""
FOLLOW_TIMEOUT_S = 10.0
"""Nothing below a daemon outlives it by more (design/engine.md)."""
GONE_TIMEOUT_S = 10.0
EXIT_ENGINE_ENDED_UNASKED = 70


@pytest.fixture
def client(swarm: LocalSwarm) -> Iterator[openai.OpenAI]:
    with sdk(swarm) as client:
        yield client


def test_term_drains_a_stream_and_leaves_nothing(client: openai.OpenAI, swarm: LocalSwarm) -> None:
    worker = swarm.daemons[1]
    family = worker.family()
    assert len(family) > 3  # tela, the guard, the API server, the engine core and what it starts
    stream = client.chat.completions.create(
        model=lab.MODEL,
        messages=MESSAGES,
        max_tokens=LONG_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [next(iter(stream))]
    worker.process.send_signal(signal.SIGTERM)
    chunks += stream
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == LONG_TOKENS
    assert worker.wait(EXIT_TIMEOUT_S) == 0, worker.text()[-3000:]
    assert alive_of(family) == []
    assert list(client.models.list()) == []


def test_death_of_the_engine_core_is_a_failure_though_vllm_exits_0(client: openai.OpenAI, swarm: LocalSwarm) -> None:
    worker = swarm.daemons[1]
    family = worker.family()
    core = next(process for process in family if process.name() == "VLLM::EngineCore")
    core.kill()
    assert worker.wait(EXIT_TIMEOUT_S) == EXIT_ENGINE_ENDED_UNASKED, worker.text()[-3000:]
    assert alive_of(family) == []
    for _ in poll(GONE_TIMEOUT_S, "the model to disappear"):
        if not list(client.models.list()):
            break


def alive_of(family: list[psutil.Process]) -> list[psutil.Process]:
    """Those that did not follow their daemon in time."""
    return psutil.wait_procs(family, timeout=FOLLOW_TIMEOUT_S)[1]
