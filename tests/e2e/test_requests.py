"""What a user of the OpenAI SDK sees, on real processes with a real model."""

from __future__ import annotations

import json
import urllib.request

import httpx
import openai
import pytest

from scripts.demo.local_swarm import LocalSwarm
from tests.e2e.conftest import MODEL

MESSAGES = [{"role": "user", "content": "Name one colour."}]


def test_models_lists_the_served_name(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def test_chat_not_streamed_has_usage_and_says_who_answered(client: openai.OpenAI, swarm: LocalSwarm) -> None:
    answer = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=5)
    done = answer.parse()
    assert done.choices[0].message.role == "assistant"
    assert done.usage is not None
    assert 1 <= done.usage.completion_tokens <= 5
    nodes = {view["node"]: view for view in swarm.status()["nodes"]}
    assert "worker" in nodes[answer.headers["x-tela-node"]]["roles"]
    assert answer.headers["x-tela-provider"] == nodes[answer.headers["x-tela-node"]]["provider"]
    assert answer.headers["x-tela-attempts"] == "1"
    assert answer.headers["x-request-id"]


def test_chat_streamed_ends_with_a_reason_and_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] in (
        ["length"],
        ["stop"],
    )
    assert chunks[-1].usage is not None
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_streamed_and_not(client: openai.OpenAI) -> None:
    assert client.completions.create(model=MODEL, prompt="One, two,", max_tokens=3).choices
    assert list(client.completions.create(model=MODEL, prompt="One, two,", max_tokens=3, stream=True))


def test_unknown_model_is_the_sdk_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model=MODEL.upper(), messages=MESSAGES)
    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"


def test_engine_error_passes_through(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        client.chat.completions.create(model=MODEL, messages="not a list")  # type: ignore[call-overload]
    assert raised.value.response.headers["x-tela-node"]


def test_provider_allowlist_is_closed(client: openai.OpenAI, swarm: LocalSwarm) -> None:
    provider = swarm.status()["nodes"][0]["provider"]
    ask = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1}
    assert client.chat.completions.create(**ask, extra_headers={"X-Tela-Providers": provider})
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ask, extra_headers={"X-Tela-Providers": "nobody-we-know"})
    with pytest.raises(openai.PermissionDeniedError):
        client.chat.completions.create(**ask, extra_headers={"X-Tela-Providers": ""})


def test_client_that_goes_away_cancels_the_engine(swarm: LocalSwarm) -> None:
    """The request would run for minutes; after the client left, the next ones find both engines idle again."""
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.Client(trust_env=False, timeout=60) as http:
        for _ in range(4):  # both engines have two slots
            with http.stream("POST", f"{swarm.base_url}/chat/completions", json=body) as response:
                assert next(response.iter_bytes())
        done = http.post(f"{swarm.base_url}/chat/completions", json={**body, "stream": False, "max_tokens": 1})
    assert done.status_code == 200
    assert swarm.status()["n_inflight"] == 0


def test_health_ready_and_metrics(client: openai.OpenAI, swarm: LocalSwarm) -> None:
    assert client.completions.create(model=MODEL, prompt="One", max_tokens=1).choices
    root = swarm.base_url.removesuffix("/v1")
    for path in ("/health", "/ready"):
        with urllib.request.urlopen(root + path, timeout=5) as response:
            assert response.status == 200
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(root + "/metrics", timeout=5)
    metrics = swarm.call("metrics", "--name", "hub").stdout
    assert "tela_ingress_requests_total{" in metrics


def test_status_shows_nodes_models_and_paths(swarm: LocalSwarm) -> None:
    done = swarm.call("status", "--name", "hub")
    assert done.returncode == 0, done.stderr
    for word in ("hub", "w1", "w2", MODEL, "serving", "2/2"):
        assert word in done.stdout
    everything = json.loads(swarm.call("status", "--json").stdout)
    assert {status["name"] for status in everything["daemons"]} == {"hub", "w1", "w2"}
