"""What is read from the snapshot, what is refused, what is counted, and who may call."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tela.crdt.lattice import Status
from tela.ingress import forwarding
from tela.record import InstanceState, SessionState
from tests.lab.ingress_lab import (
    Answer,
    gate_named,
    lab,
    metric,
    plain,
    refuse,
)
from tests.lab.swarm_views import candidate, node_id, snapshot


async def test_models_are_listed_in_the_shape_of_vllm() -> None:
    candidates = [
        candidate("a", max_context_tokens=8192),
        candidate("b", provider="b", max_context_tokens=4096),
        candidate("c", state=InstanceState.LOADING),
        candidate("d", model="lora:x@1", parent="org/M"),
        candidate("e", model="soon", state=InstanceState.LOADING),
        candidate("f", model="gone", session_state=SessionState.DRAIN, status=Status.DRAIN),
        candidate("g", model="cut-off"),
    ]
    reached = {name: gate_named(name) for name in "abcdef"}
    async with lab(*candidates, **reached) as bench:
        listed = (await bench.get("/v1/models")).json
        base = {"object": "model", "created": 1_700_000_000, "owned_by": "tela"}
        model = base | {"id": "org/M", "max_model_len": 4096, "tela": {"providers": ["a", "b"], "n_replicas": 2}}
        lora = base | {"id": "lora:x@1", "parent": "org/M", "tela": {"providers": ["a"], "n_replicas": 1}}
        assert listed == {"object": "list", "data": [lora, model]}
        for target in ("/v1/models/org/M", "/v1/models/org%2FM"):
            assert (await bench.get(target)).json == model
        for target in ("/v1/models/org/m", "/v1/models/soon", "/v1/models/gone", "/v1/models/cut-off"):
            assert (await bench.get(target)).code == "model_not_found"


async def test_ready_follows_the_registry_and_health_does_not() -> None:
    async with lab() as bench:
        assert (await bench.get("/health")).status == 200
        assert (await bench.get("/ready")).status == 503
        bench.view[0] = snapshot(candidate("a"))
        assert (await bench.get("/ready")).json == {"status": "ok"}


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models/x", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/", 404),
        ("GET", "/metrics", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("POST", "/v1/audio/../load_lora_adapter", 404),
        ("POST", "/v1/audio/%2e%2e/x", 404),
        ("OPTIONS", "*", 404),
    ],
)
async def test_other_paths_and_methods_are_refused(method: str, target: str, status: int) -> None:
    async with lab(a=gate_named("a")) as bench:
        got = await bench.get(target, method)
        assert bench.hits == {"a": 0}
    assert got.status == status
    assert got.json["error"]["type"] == "invalid_request_error"
    assert ("allow" in got.headers) == (status == 405)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"model":"org/m"}', 404, "model_not_found"),
        (b'{"model":"allowed","model":"org/M"}', 400, "invalid_request"),
        (b"{}", 400, "missing_required_parameter"),
        (b"not json", 400, "invalid_json"),
    ],
)
async def test_request_that_names_no_model_that_is_served_is_refused(body: bytes, status: int, code: str) -> None:
    async with lab(a=gate_named("a")) as bench:
        got = await bench.post(body)
        assert bench.hits == {"a": 0}
    assert (got.status, got.code) == (status, code)
    assert got.json["error"]["param"] in {"model", None}
    assert len(got.headers["x-request-id"]) == 32


async def test_names_that_clients_make_up_are_no_metric_labels() -> None:
    before = metric("tela_ingress_requests_total", model="unknown", status="404")
    async with lab(a=gate_named("a")) as bench:
        await bench.post(b'{"model":"made-up"}')
    assert metric("tela_ingress_requests_total", model="unknown", status="404") == before + 1
    assert metric("tela_ingress_requests_total", model="made-up", status="404") == 0


async def test_account_tells_the_way_and_never_the_content(capsys: pytest.CaptureFixture[str]) -> None:
    async with lab(a=refuse, b=gate_named("b")) as bench:
        await bench.post(b'{"model":"org/M","prompt":"s3cret"}', "Authorization: Bearer k3y")
    (line,) = [line for line in plain(capsys.readouterr().out).splitlines() if "ingress.request" in line]
    for part in ("model=org/M", "provider=a", f"node={node_id('b')[:4].hex()}", "status=200", "attempts=2", "ms="):
        assert part in line
    assert "s3cret" not in line
    assert "k3y" not in line


async def test_unexpected_error_is_counted_and_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    before = metric("tela_ingress_requests_total", model="unknown", status="500")
    async with lab(a=gate_named("a")) as bench:
        monkeypatch.setattr(forwarding, "read_body", lambda *_: 1 / 0)
        assert (await bench.post()).code == "internal_error"
    assert metric("tela_ingress_requests_total", model="unknown", status="500") == before + 1


@pytest.mark.parametrize(("is_open", "is_own", "status"), [(False, True, 200), (False, False, 403), (True, False, 200)])
async def test_only_own_processes_may_call_unless_open(is_open: bool, is_own: bool, status: int) -> None:
    async def tell(_: trio.SocketStream) -> bool:
        return is_own

    async with lab() as bench:
        bench.ingress._is_open, bench.ingress._is_own = is_open, tell
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            await nursery.start(bench.ingress.serve, listeners)
            async with await trio.testing.open_stream_to_socket_listener(listeners[0]) as client:
                await client.send_all(b"GET /v1/models HTTP/1.0\r\nAuthorization: Bearer any\r\n\r\n")
                got = Answer(b"".join([bytes(part) async for part in client]))
            nursery.cancel_scope.cancel()
    assert got.status == status
    if status == 403:
        assert got.code == "caller_not_allowed"
        assert "--allow-any" in got.json["error"]["message"]


async def test_failing_check_of_a_caller_ends_that_connection_only() -> None:
    async def fail(_: trio.SocketStream) -> bool:
        raise OSError("no table")

    async with lab() as bench, trio.open_nursery() as nursery:
        bench.ingress._is_own = fail
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(bench.ingress.serve, listeners)
        for _ in range(2):
            async with await trio.testing.open_stream_to_socket_listener(listeners[0]) as client:
                assert await client.receive_some() == b""
        nursery.cancel_scope.cancel()
