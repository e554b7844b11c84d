"""One request through choice and retries: what passes on, who is asked again, and who never is."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest
import trio
import trio.testing

from tela.crdt.lattice import Status
from tela.ingress.proxy import CONNECT_TIMEOUT_S
from tela.net.requests import IncomingCall
from tela.record import NodeId
from tela.wire import ErrorFrame, GateCode, ResponseHead
from tests.lab.ingress_lab import (
    BODY,
    DONE,
    EVENT,
    EVENTS,
    JSON,
    US,
    answer,
    body_of,
    gate_named,
    lab,
    refuse,
)
from tests.lab.swarm_views import candidate, member, node_id, snapshot

PATHS = [
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/score",
    "/v1/audio/speech", "/v1/images/generations", "/tokenize", "/detokenize", "/rerank", "/score",
    "/v1/chat/completions?api-version=1",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
async def test_body_reaches_the_instance_byte_for_byte(path: str) -> None:
    async with lab(a=gate_named("a")) as bench:
        got = await bench.post(path=path)
    assert got.status == 200
    assert got.json == {"node": "a", "sha256": hashlib.sha256(BODY).hexdigest(), "target": path}
    assert got.headers["x-tela-node"] == node_id("a")[:4].hex()
    assert got.headers["x-tela-provider"] == "a"
    assert got.headers["x-tela-attempts"] == "1"


async def test_large_form_reaches_the_instance_byte_for_byte() -> None:
    file = random.Random(1).randbytes(3_000_000)
    form = b'--X\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + file
    form += b'\r\n--X\r\nContent-Disposition: form-data; name="model"\r\n\r\norg/M\r\n--X--\r\n'
    async with lab(a=gate_named("a")) as bench:
        got = await bench.post(form, "Content-Type: multipart/form-data; boundary=X", path="/v1/audio/transcriptions")
    assert got.json["sha256"] == hashlib.sha256(form).hexdigest()


async def test_gate_gets_claim_instance_deadline_and_clean_headers() -> None:
    heads = []

    async def gate(call: IncomingCall) -> None:
        heads.append(call.head)
        await answer(call, b"{}")

    async with lab(candidate("a", instance=3), a=gate) as bench:
        got = await bench.post(
            BODY, "Authorization: Bearer secret", "X-Request-Id: mine", "X-Tela-Timeout: 20", "User-Agent: test"
        )
    (head,) = heads
    assert (head.claim.ingress, head.instance, head.request_id, head.method) == (US, 3, "mine", "POST")
    assert 19 < head.deadline_s <= 20
    assert dict(head.headers) == {
        b"user-agent": b"test", b"content-length": b"%d" % len(BODY), b"accept-encoding": b"identity",
        b"x-request-id": b"mine",
    }  # fmt: skip
    assert got.headers["x-request-id"] == "mine"


async def test_engines_error_passes_unchanged() -> None:
    async def busy(call: IncomingCall) -> None:
        headers = (JSON, (b"retry-after", b"7"), (b"x-ratelimit-limit-requests", b"9"))
        await answer(call, b'{"error":{"message":"slow down"}}', *headers, status=429)

    async with lab(a=busy, b=busy) as bench:
        got = await bench.post()
        assert sum(bench.hits.values()) == 1
    assert (got.status, got.body) == (429, b'{"error":{"message":"slow down"}}')
    assert got.headers["retry-after"] == "7"
    assert got.headers["x-ratelimit-limit-requests"] == "9"


async def test_events_pass_unchanged_and_marked() -> None:
    async def stream(call: IncomingCall) -> None:
        await body_of(call)
        await call.respond(ResponseHead(200, b"", (EVENTS,)))
        for piece in (EVENT[:7], EVENT[7:], b": comment\n\n", DONE):
            await call.send(piece)
        await call.end()

    async with lab(a=stream) as bench:
        got = await bench.post()
    assert got.body == EVENT + b": comment\n\n" + DONE
    assert got.headers["x-accel-buffering"] == "no"
    assert got.headers["cache-control"] == "no-cache"


async def test_round_robin_reaches_every_replica() -> None:
    async with lab(a=gate_named("a"), b=gate_named("b")) as bench:
        nodes = [(await bench.post()).json["node"] for _ in range(4)]
    assert nodes == ["a", "b", "a", "b"]


async def test_refused_attempt_is_made_elsewhere_and_the_refuser_left_alone() -> None:
    async with lab(a=refuse, b=gate_named("b")) as bench:
        first, second = await bench.post(), await bench.post()
        assert bench.hits == {"a": 1, "b": 2}
    assert (first.json["node"], first.headers["x-tela-attempts"]) == ("b", "2")
    assert (second.json["node"], second.headers["x-tela-attempts"]) == ("b", "1")


async def test_at_most_three_replicas_are_asked_and_none_twice() -> None:
    async with lab(a=refuse, b=refuse, c=refuse, d=refuse) as bench:
        got = await bench.post()
        assert sorted(bench.hits.values()) == [0, 1, 1, 1]
    assert (got.status, got.code) == (503, "draining")
    assert got.headers["retry-after"] == "1"
    assert got.headers["x-tela-attempts"] == "3"


async def test_retry_can_be_declined() -> None:
    async with lab(a=refuse, b=gate_named("b")) as bench:
        got = await bench.post(BODY, "X-Tela-No-Retry: 1")
        assert bench.hits == {"a": 1, "b": 0}
    assert got.status == 503


async def test_policy_of_the_gate_is_told_as_403() -> None:
    async def deny(call: IncomingCall) -> None:
        await call.fail(ErrorFrame(GateCode.REFUSED, "not for you", is_accepted=False))

    async with lab(a=deny) as bench:
        for _ in range(2):  # the second one is asked again: a refusal is no failure
            got = await bench.post()
            assert (got.status, got.code) == (403, "provider_not_allowed")
        assert bench.hits == {"a": 2}


@pytest.mark.parametrize(
    ("code", "status"), [(GateCode.ENGINE_DISCONNECTED, 502), (GateCode.DEADLINE, 504), (GateCode.INTERNAL, 502)]
)
async def test_accepted_request_is_never_made_again(code: GateCode, status: int) -> None:
    async def fail(call: IncomingCall) -> None:
        await call.fail(ErrorFrame(code, "broke"))

    async with lab(a=fail, b=gate_named("b")) as bench:
        got = await bench.post()
        assert bench.hits == {"a": 1, "b": 0}
    assert got.status == status


async def test_node_that_dies_before_it_answers_is_replaced_and_reported() -> None:
    async with lab(a=gate_named("a"), b=gate_named("b")) as bench:

        async def die(_: IncomingCall) -> None:
            bench.network.remove(node_id("a"))
            await trio.sleep_forever()

        bench.gates["a"] = die
        got = await bench.post()
        assert (got.json["node"], got.headers["x-tela-attempts"]) == ("b", "2")
        assert bench.dead == [node_id("a")]


async def test_reset_of_a_fresh_stream_by_a_living_node_is_final(autojump_clock: trio.testing.MockClock) -> None:
    async def reset(call: IncomingCall) -> None:
        call._framed.stream.reset()

    async with lab(a=reset, b=gate_named("b")) as bench:
        got = await bench.post()
        assert bench.hits == {"a": 1, "b": 0}
    assert (got.status, got.code) == (502, "upstream_error")


async def test_reset_of_a_reused_stream_is_made_elsewhere() -> None:
    async with lab(a=gate_named("a"), b=gate_named("b")) as bench:
        assert (await bench.post()).json["node"] == "a"
        await bench.post()

        async def reset(call: IncomingCall) -> None:
            call._framed.stream.reset()

        bench.gates["a"] = reset
        got = await bench.post()
        assert (got.json["node"], got.headers["x-tela-attempts"]) == ("b", "2")
        assert bench.dead == []


async def test_node_without_a_stream_is_replaced() -> None:
    async with lab(a=gate_named("a"), b=gate_named("b")) as bench:
        bench.network._meshes[node_id("a")]._handlers.clear()
        got = await bench.post()
        assert got.json["node"] == "b"
        assert bench.dead == [node_id("a")]


async def test_peer_that_never_opens_a_stream_is_given_up(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lab(a=gate_named("a"), b=gate_named("b")) as bench:
        open_stream = bench.mesh.open

        async def hang(peer: NodeId, protocol: str) -> Any:
            if peer == node_id("a"):
                await trio.sleep_forever()
            return await open_stream(peer, protocol)

        monkeypatch.setattr(bench.mesh, "open", hang)
        started = trio.current_time()
        assert (await bench.post()).json["node"] == "b"
        assert trio.current_time() - started == pytest.approx(CONNECT_TIMEOUT_S)


async def test_slow_first_byte_is_never_made_again(autojump_clock: trio.testing.MockClock) -> None:
    cancelled = trio.Event()

    async def hang(_: IncomingCall) -> None:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with lab(a=hang, b=gate_named("b")) as bench:
        got = await bench.post(BODY, "X-Tela-Timeout: 30")
        await cancelled.wait()
        assert bench.hits == {"a": 1, "b": 0}
    assert (got.status, got.code) == (504, "deadline_exceeded")
    assert "X-Tela-Timeout" in got.json["error"]["message"]


async def test_allowlist_holds_on_every_path() -> None:
    mine = [candidate("a", provider="a"), candidate("b", provider="b")]
    async with lab(*mine, a=gate_named("a"), b=gate_named("b")) as bench:
        for _ in range(4):
            assert (await bench.post(BODY, "X-Tela-Providers: a")).json["node"] == "a"
        bench.gates["a"] = refuse
        assert (await bench.post(BODY, "X-Tela-Providers: a")).status == 503
        bench.network.remove(node_id("a"))
        assert (await bench.post(BODY, "X-Tela-Providers: a")).code == "no_capacity"
        bench.view[0] = snapshot(mine[1], dead=[member("a", provider="a", status=Status.DOWN)])
        assert (await bench.post(BODY, "X-Tela-Providers: a")).code == "no_capacity"
        assert (await bench.post(BODY, "X-Tela-Providers:")).code == "provider_not_allowed"
        assert (await bench.post(BODY, "X-Tela-Providers: *")).status == 400
        assert bench.hits["b"] == 0
