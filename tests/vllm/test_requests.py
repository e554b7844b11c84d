"""The OpenAI SDK, through tela, on real vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from scripts.demo.local_swarm import LocalSwarm, poll
from tests.vllm import lab
from tests.vllm.conftest import sdk

MESSAGES = [{"role": "user", "content": "Name one colour."}]
LONG_TOKENS = 900
"""Five seconds of an otherwise idle engine."""
CANCEL_TIMEOUT_S = 2.0
RUNNING = "vllm:num_requests_running"


@pytest.fixture
def client(lasting_swarm: LocalSwarm) -> Iterator[openai.OpenAI]:
    with sdk(lasting_swarm) as client:
        yield client


def test_models_lists_the_served_name_and_its_context(client: openai.OpenAI, lasting_swarm: LocalSwarm) -> None:
    assert [model.id for model in client.models.list()] == [lab.MODEL]
    [view] = lasting_swarm.status()["models"]
    assert view["max_context_tokens"] == lab.CONTEXT_TOKENS


def test_chat_not_streamed_has_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=lab.MODEL, messages=MESSAGES, max_tokens=8, extra_body={"ignore_eos": True}
    )
    done = answer.parse()
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 8
    assert done.usage.total_tokens == done.usage.prompt_tokens + 8
    assert answer.headers["x-tela-attempts"] == "1"


def test_chat_streamed_ends_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=lab.MODEL,
            messages=MESSAGES,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


def test_completion_answers(client: openai.OpenAI) -> None:
    done = client.completions.create(model=lab.MODEL, prompt="One, two,", max_tokens=3, extra_body={"ignore_eos": True})
    assert done.usage is not None
    assert done.usage.completion_tokens == 3


def test_error_of_the_engine_passes_through(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=lab.MODEL, messages=MESSAGES, max_tokens=lab.CONTEXT_TOKENS * 2)
    assert raised.value.response.headers["x-tela-node"]


def test_client_that_goes_away_frees_the_engine(client: openai.OpenAI, lasting_swarm: LocalSwarm) -> None:
    worker = lasting_swarm.daemons[1]
    with client.chat.completions.create(
        model=lab.MODEL, messages=MESSAGES, max_tokens=LONG_TOKENS, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        assert lab.engine_metric(worker, RUNNING) == 1
    for _ in poll(CANCEL_TIMEOUT_S, "the engine to drop the request"):
        if lab.engine_metric(worker, RUNNING) == 0:
            break
    assert lab.engine_metric(worker, "vllm:generation_tokens_total") < LONG_TOKENS
