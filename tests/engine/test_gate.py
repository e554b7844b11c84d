"""The gate between a call from the mesh and a real (fake) engine on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path

import pytest
import trio
import trio.testing

from tela.engine import gate as gate_module
from tela.engine.gate import REPLAYABLE_BYTES, Gate
from tela.engine.report import Endpoint
from tela.record import NodeId
from tela.wire import Claim, ErrorFrame, GateCode, RequestHead, ResponseHead
from tests.lab.engines import running_fake, wait_until

INGRESS = NodeId(b"i" * 32)
NOW_S = 1_000.0
CLAIM = Claim(INGRESS, 1, "", "", 990, 1_050, b"s" * 64)


class FakeCall:
    """What the mesh would hand in: a body in parts, and a record of what was answered."""

    def __init__(
        self, target: str, body: list[bytes], *, headers=(), claim: Claim = CLAIM, peer: NodeId = INGRESS, **head
    ) -> None:
        self.peer = peer
        fields = {"instance": 0, "deadline_s": 0.0, "method": "POST", **head}
        self.head = RequestHead(claim=claim, request_id="r", target=target, headers=tuple(headers), **fields)
        self.response: ResponseHead | None = None
        self.error: ErrorFrame | None = None
        self.content: list[bytes] = []
        self.is_ended = False
        self._body = list(body)

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._body.pop(0) if self._body else b""

    async def respond(self, head: ResponseHead) -> None:
        assert self.response is None
        self.response = head

    async def send(self, content: bytes) -> None:
        assert self.response
        assert content
        self.content.append(content)
        await trio.lowlevel.checkpoint()

    async def end(self, content: bytes = b"") -> None:
        self.content.append(content)
        assert not self.error
        self.is_ended = True

    async def fail(self, error: ErrorFrame) -> None:
        assert not self.is_ended
        self.error = error

    def json(self):
        return json.loads(b"".join(self.content))


def make_gate(port: int, api_key: str = "", *, is_genuine=lambda claim: True) -> Gate:
    endpoint = Endpoint("127.0.0.1", port, api_key)
    return Gate(endpoint_of={0: endpoint}.get, is_genuine=is_genuine, now=lambda: NOW_S)


def chat(stream: bool = False, **options: object) -> FakeCall:
    return FakeCall("/v1/chat/completions", [json.dumps({"model": "m", "stream": stream}).encode()], **options)


async def serve(gate: Gate, call: FakeCall, *, is_last: bool = True) -> FakeCall:
    await gate.handle(call)
    if is_last:
        gate.close()
    assert gate.in_flight.n == 0
    assert call.is_ended is not bool(call.error)
    return call


async def test_answer_passes_with_its_headers_and_exact_end(tmp_path: Path) -> None:
    async with running_fake(tmp_path, "--api-key", "own", "--gzip") as fake:
        headers = [(b"Authorization", b"Bearer none"), (b"X-Mine", b"1"), (b"Accept-Encoding", b"gzip")]
        call = await serve(make_gate(fake.port, "own"), chat(headers=headers))
        (seen,) = fake.log.events("request")
    assert call.response.status == 200
    assert {b"Content-Type", b"Server", b"Content-Length"} <= {name for name, _ in call.response.headers}
    assert call.json()["choices"][0]["message"]["content"].startswith("t0 ")
    sent = {name.lower(): value for name, value in seen["headers"]}
    assert (sent["authorization"], sent["x-mine"], sent["accept-encoding"]) == ("Bearer own", "1", "identity")
    assert int(sent["content-length"]) == seen["body_bytes"]
    assert "transfer-encoding" not in sent


async def test_stream_passes_as_it_comes_without_transfer_coding(tmp_path: Path) -> None:
    async with running_fake(tmp_path, "--tokens", "4", "--token-interval", "0.05", "--split", "random") as fake:
        call = await serve(make_gate(fake.port), chat(stream=True))
    assert len(call.content) >= 4
    assert b"transfer-encoding" not in {name.lower() for name, _ in call.response.headers}
    events = [event for event in b"".join(call.content).split(b"\n\n") if event]
    assert len(events) == 6
    assert events[-1] == b"data: [DONE]"


@pytest.mark.parametrize("status", ["400", "429", "503"])
async def test_error_of_the_engine_passes_untouched(tmp_path: Path, status: str) -> None:
    async with running_fake(tmp_path, "--status", status, "--retry-after", "7") as fake:
        call = await serve(make_gate(fake.port), chat())
    assert call.response.status == int(status)
    assert (b"Retry-After", b"7") in call.response.headers


@pytest.mark.parametrize("size", [0, 10, REPLAYABLE_BYTES, REPLAYABLE_BYTES + 1, 3_000_000])
@pytest.mark.parametrize("is_announced", [True, False])
async def test_body_of_any_size_arrives_whole(tmp_path: Path, size: int, is_announced: bool) -> None:
    body = os.urandom(size)
    parts = [body[start : start + 60_000] for start in range(0, size, 60_000)]
    headers = [(b"content-length", b"%d" % size)] if is_announced else []
    async with running_fake(tmp_path, "--echo-sha") as fake:
        call = await serve(make_gate(fake.port), FakeCall("/v1/audio/transcriptions", parts, headers=headers))
    assert call.json() == {"sha256": hashlib.sha256(body).hexdigest(), "bytes": size}


@pytest.mark.parametrize("size", [10, 3_000_000])
async def test_body_that_is_not_as_long_as_announced_is_an_error(tmp_path: Path, size: int) -> None:
    parts = [b"x" * 50_000] * (size // 50_000) or [b"x" * size]
    async with running_fake(tmp_path, "--echo-sha") as fake:
        for announced in (size - 1, size + 1):
            headers = [(b"content-length", b"%d" % announced)]
            call = await serve(make_gate(fake.port), FakeCall("/v1/completions", parts, headers=headers))
            assert call.error.code == GateCode.PROTOCOL


async def test_connections_are_reused_and_a_closed_one_is_not(tmp_path: Path) -> None:
    async with running_fake(tmp_path, "--keepalive", "0.1") as fake:
        gate = make_gate(fake.port)
        for _ in range(3):
            await serve(gate, chat(), is_last=False)
        (connection,) = gate._pools[0]._idle
        assert connection.is_reused
        await wait_until(lambda: not connection.is_quiet(), "the engine to close the idle connection")
        assert (await serve(gate, chat())).is_ended


class OneShotEngine:
    """Closes each connection after ``n_answers`` answers, in the very moment of the next request."""

    ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    def __init__(self, n_answers: int, delay_s: float = 0.0) -> None:
        self.n_answers = n_answers
        self.delay_s = delay_s
        self.n_requests = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            for _ in range(self.n_answers):
                await stream.receive_some()
                self.n_requests += 1
                await stream.send_all(self.ANSWER)
            await stream.receive_some()
            self.n_requests += 1
            await trio.sleep(self.delay_s)


@pytest.mark.parametrize(("n_answers", "delay_s", "is_answered"), [(1, 0.0, True), (1, 0.3, False), (0, 0.0, False)])
async def test_request_is_sent_again_only_where_a_pooled_connection_broke_at_once(
    n_answers: int, delay_s: float, is_answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_module, "STALE_WINDOW_S", 0.2)
    engine = OneShotEngine(n_answers, delay_s)
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, engine.serve, 0)
        gate = make_gate(listeners[0].socket.getsockname()[1])
        if n_answers:
            assert (await serve(gate, chat(), is_last=False)).is_ended
        call = await serve(gate, chat())
        nursery.cancel_scope.cancel()
    assert call.is_ended is is_answered
    if not is_answered:
        assert (call.error.code, call.error.is_accepted) == (GateCode.ENGINE_DISCONNECTED, True)
        assert engine.n_requests == n_answers + 1


@pytest.mark.parametrize("manner", ["rst", "fin"])
async def test_engine_that_breaks_off_is_an_error_and_never_an_end(tmp_path: Path, manner: str) -> None:
    async with running_fake(tmp_path, "--die-after", "2", manner) as fake:
        call = await serve(make_gate(fake.port), chat(stream=True))
    assert call.response.status == 200
    assert (call.error.code, call.error.is_accepted) == (GateCode.ENGINE_DISCONNECTED, True)


async def test_engine_that_refuses_the_connection_has_not_accepted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    call = await serve(make_gate(port), chat())
    assert (call.error.code, call.error.is_accepted) == (GateCode.ENGINE_UNREACHABLE, False)


async def test_early_answer_to_a_long_body_is_passed_on() -> None:
    """413 before the body was read: the rest of it is not sent."""
    answer = b"HTTP/1.1 413 Payload Too Large\r\nContent-Length: 0\r\n\r\n"

    async def refuse(stream: trio.SocketStream) -> None:
        await stream.receive_some(1_000)
        await stream.send_all(answer)
        await trio.sleep_forever()  # neither reads on nor closes

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, refuse, 0)
        gate = make_gate(listeners[0].socket.getsockname()[1])
        call = await serve(gate, FakeCall("/v1/completions", [b"x" * 60_000] * 400))
        nursery.cancel_scope.cancel()
    assert call.response.status == 413


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelled_call_closes_the_engines_connection(tmp_path: Path, stream: bool) -> None:
    flags = ["--token-interval", "0.1", "--tokens", "600"] if stream else ["--first-byte-delay", "60"]
    async with running_fake(tmp_path, *flags) as fake:
        gate, call = make_gate(fake.port), chat(stream=stream)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gate.handle, call)
            await fake.log.wait("request")
            await wait_until(lambda: call.content or not stream, "the first content")
            assert gate.in_flight.n == 1
            nursery.cancel_scope.cancel()
        assert gate.in_flight.n == 0
        await fake.log.wait("disconnect", timeout_s=2.0)


async def test_deadline_of_the_caller_ends_the_request(tmp_path: Path) -> None:
    async with running_fake(tmp_path, "--first-byte-delay", "60") as fake:
        call = await serve(make_gate(fake.port), chat(deadline_s=0.2))
        await fake.log.wait("disconnect", timeout_s=2.0)
    assert (call.error.code, call.error.is_accepted) == (GateCode.DEADLINE, True)


async def test_many_requests_run_at_once(tmp_path: Path) -> None:
    async with running_fake(tmp_path, "--first-byte-delay", "0.5") as fake:
        gate, calls = make_gate(fake.port), [chat() for _ in range(150)]
        started_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for call in calls:
                nursery.start_soon(gate.handle, call)
        assert trio.current_time() - started_s < 5.0
        gate.close()
    assert all(call.is_ended for call in calls)


# -- refusals: nothing reaches the engine ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (chat(peer=NodeId(b"x" * 32)), GateCode.REFUSED),
        (chat(claim=Claim(INGRESS, 1, "", "", 0, 600)), GateCode.REFUSED),
        (chat(method="GET"), GateCode.REFUSED),
        (chat(instance=1), GateCode.NO_INSTANCE),
        *(
            (FakeCall(target, []), GateCode.REFUSED)
            for target in (
                "/v1/load_lora_adapter",
                "/shutdown",
                "/sleep",
                "/v1/audio/../load_lora_adapter",
                "/v1/models",
                "//v1/completions",
                "http://evil/v1/completions",
                "/v1/completions/",
                "/v1/audio/%2e%2e",
            )
        ),
        (FakeCall("/v1/completions?a b", []), GateCode.PROTOCOL),
        (chat(headers=[(b"content-length", b"x")]), GateCode.PROTOCOL),
    ],
)
async def test_call_that_may_not_pass_is_refused_unaccepted(call: FakeCall, code: GateCode) -> None:
    await serve(make_gate(1), call)
    assert (call.error.code, call.error.is_accepted) == (code, False)


@pytest.mark.parametrize(
    "target",
    [
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/score"),
        *("/v1/audio/speech", "/v1/images/generations", "/tokenize", "/detokenize", "/rerank", "/score"),
        "/v1/completions?user=1",
    ],
)
async def test_inference_path_is_forwarded(target: str) -> None:
    call = await serve(make_gate(1), FakeCall(target, []))
    assert call.error.code == GateCode.ENGINE_UNREACHABLE


async def test_claim_is_checked_once_until_it_changes() -> None:
    checked = []
    gate = make_gate(1, is_genuine=lambda claim: checked.append(claim) or claim.session == 1)
    forged = Claim(INGRESS, 2, "", "", 990, 1_050, b"s" * 64)
    codes = [(await serve(gate, chat(claim=claim))).error.code for claim in (CLAIM, CLAIM, forged, forged)]
    assert codes == [GateCode.ENGINE_UNREACHABLE] * 2 + [GateCode.REFUSED] * 2
    assert checked == [CLAIM, forged, forged]


async def test_known_claims_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "MAX_CLAIMS", 4)
    gate = make_gate(1)
    for session in range(20):
        await serve(gate, chat(claim=Claim(INGRESS, session, "", "", 990, 1_050)))
    assert len(gate._claims) <= 4


async def test_draining_gate_refuses_new_calls_and_waits_for_those_in_flight(tmp_path: Path) -> None:
    async with running_fake(tmp_path, "--first-byte-delay", "0.3") as fake:
        gate, call = make_gate(fake.port), chat()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gate.handle, call)
            await fake.log.wait("request")
            gate.drain()
            late = chat()
            await gate.handle(late)
            assert (late.error.code, late.error.is_accepted) == (GateCode.DRAINING, False)
            assert gate.in_flight.n == 1
            with trio.fail_after(5):
                await gate.in_flight.wait_idle()
        assert call.is_ended
        gate.close()
