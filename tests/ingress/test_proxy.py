"""Answers that break and clients that go away, before and after the first byte."""

from __future__ import annotations

import json

import pytest
import trio
import trio.testing

from tela.ingress.http1 import Limits, serve_connection
from tela.ingress.proxy import HOLD_BYTES, HOLD_S
from tela.net.requests import IncomingCall
from tela.wire import ErrorFrame, GateCode, ResponseHead
from tests.lab.ingress_lab import (
    BODY,
    DONE,
    EVENT,
    EVENTS,
    US,
    Gate,
    body_of,
    gate_named,
    lab,
    metric,
    plain,
    request,
)
from tests.lab.swarm_views import node_id


def breaking(
    *pieces: bytes, content_type: bytes = b"text/event-stream", is_clean: bool = False, n_bytes: int = 0
) -> Gate:
    async def gate(call: IncomingCall) -> None:
        await body_of(call)
        headers = [(b"content-type", content_type)]
        if n_bytes:
            headers.append((b"content-length", b"%d" % n_bytes))
        await call.respond(ResponseHead(200, b"", tuple(headers)))
        for piece in pieces:
            await call.send(piece)
        if is_clean:
            await call.end()
        else:
            await call.fail(ErrorFrame(GateCode.ENGINE_DISCONNECTED, "the engine went away"))

    return gate


@pytest.mark.parametrize(
    "gate",
    [breaking(EVENT, EVENT), breaking(EVENT, is_clean=True)],
    ids=["reset", "end without done"],
)
async def test_broken_event_stream_ends_by_one_error_event_and_no_done(gate: Gate) -> None:
    failed = metric("tela_ingress_requests_total", model="org/M", status="502")
    async with lab(a=gate, b=gate_named("b")) as bench:
        got = await bench.post()
        assert bench.hits["b"] == 0
    events = got.body.removeprefix(EVENT).removeprefix(EVENT)
    assert events.startswith(b"data: ")
    assert json.loads(events[6:])["error"]["code"] == "upstream_disconnected"
    assert got.body.count(b"error") == 2  # its name and its type
    assert b"[DONE]" not in got.body
    assert metric("tela_ingress_requests_total", model="org/M", status="502") == failed + 1


@pytest.mark.parametrize("gate", [breaking(is_clean=True), breaking()], ids=["empty", "no event"])
async def test_stream_without_an_event_is_a_plain_error(gate: Gate) -> None:
    async with lab(a=gate) as bench:
        got = await bench.post()
    assert (got.status, got.code) == (502, "upstream_error")


PLAIN = b'{"id": "x"}'


@pytest.mark.parametrize(
    ("content_type", "n_bytes", "pieces"),
    [
        (b"text/event-stream", 0, ()),
        (b"application/json", 0, ()),
        (b"application/json", len(PLAIN), ()),
        (b"application/json", len(PLAIN), (PLAIN[:4],)),
        (b"application/json", len(PLAIN), (PLAIN[:4], PLAIN[4:8])),
    ],
)
async def test_death_after_the_head_and_before_the_content_is_made_good(
    content_type: bytes, n_bytes: int, pieces: tuple[bytes, ...]
) -> None:
    async def dies(call: IncomingCall) -> None:
        await body_of(call)
        headers = [(b"content-type", content_type), *([(b"content-length", b"%d" % n_bytes)] if n_bytes else [])]
        await call.respond(ResponseHead(200, b"", tuple(headers)))
        for piece in pieces:
            await call.send(piece)
        bench.network.cut(US, node_id("a"))
        await trio.sleep_forever()

    async with lab(a=dies, b=gate_named("b")) as bench:
        for _ in range(2):  # whoever's turn it is
            got = await bench.post()
            assert (got.status, got.json["node"]) == (200, "b")
        assert bench.hits["a"] == 1


async def test_head_of_a_silent_event_stream_goes_out_in_time(autojump_clock: trio.testing.MockClock) -> None:
    async def silent(call: IncomingCall) -> None:
        await call.respond(ResponseHead(200, b"", (EVENTS,)))
        await trio.sleep(1000)
        await call.send(DONE)
        await call.end()

    async with lab(a=silent) as bench:
        before = metric("tela_ingress_first_byte_seconds_sum")
        assert (await bench.post()).body == DONE
        assert metric("tela_ingress_first_byte_seconds_sum") - before == pytest.approx(HOLD_S, abs=1)


async def test_stream_broken_inside_an_event_breaks_the_connection() -> None:
    async with lab(a=breaking(EVENT[:9])) as bench:
        got = await bench.post()
    assert got.raw_body == b"9\r\n" + EVENT[:9] + b"\r\n"


async def test_short_answer_that_breaks_is_a_plain_error() -> None:
    async with lab(a=breaking(b'{"id":', content_type=b"application/json", n_bytes=100)) as bench:
        got = await bench.post()
    assert (got.status, got.code) == (502, "upstream_error")


@pytest.mark.parametrize("n_bytes", [0, HOLD_BYTES + 1])
async def test_broken_json_breaks_the_connection(n_bytes: int) -> None:
    async with lab(a=breaking(b'{"id":', content_type=b"application/json", n_bytes=n_bytes)) as bench:
        got = await bench.post()
    assert got.raw_body == (b'{"id":' if n_bytes else b'6\r\n{"id":\r\n')


async def test_finish_reason_is_an_end_and_other_streams_need_no_done() -> None:
    finished = b'data: {"choices":[{"finish_reason":"stop"}]}\n\n'
    async with lab(a=breaking(finished, is_clean=True)) as bench:
        assert (await bench.post()).body == finished
        bench.gates["a"] = breaking(EVENT, is_clean=True)
        assert (await bench.post(path="/v1/responses")).body == EVENT
        bench.gates["a"] = breaking(is_clean=True)
        assert (await bench.post(path="/v1/responses")).status == 502


async def test_slow_answer_is_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    async def slow(call: IncomingCall) -> None:
        await trio.sleep(1000)
        await call.respond(ResponseHead(200, b"", (EVENTS,)))
        await trio.sleep(1000)
        await call.send(DONE)
        await call.end()

    async with lab(a=slow) as bench:
        assert (await bench.post()).body == DONE


async def test_deadline_within_a_stream_is_told(autojump_clock: trio.testing.MockClock) -> None:
    async def stall(call: IncomingCall) -> None:
        await call.respond(ResponseHead(200, b"", (EVENTS,)))
        await call.send(EVENT)
        await trio.sleep_forever()

    async with lab(a=stall) as bench:
        got = await bench.post(BODY, "X-Tela-Timeout: 30")
    assert json.loads(got.body.removeprefix(EVENT)[6:])["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("n_events", [None, 0, 3])
async def test_client_that_goes_away_cancels_the_call(n_events: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    asked, cancelled = trio.Event(), trio.Event()

    async def hang(call: IncomingCall) -> None:
        try:
            if n_events is not None:
                await call.respond(ResponseHead(200, b"", (EVENTS,)))
                await call.send(EVENT * n_events)
            asked.set()
            await trio.sleep_forever()
        finally:
            cancelled.set()

    async with lab(a=hang) as bench:
        async with bench.connected() as client:
            await client.send_all(request())
            await asked.wait()
            if n_events is not None:
                await client.receive_some(1)
        await cancelled.wait()
    assert "status=499" in plain(capsys.readouterr().out)


async def test_reader_that_is_slow_holds_the_instance_back() -> None:
    n_sent = 0

    async def flood(call: IncomingCall) -> None:
        nonlocal n_sent
        await call.respond(ResponseHead(200, b"", (EVENTS,)))
        while True:
            await call.send(b"x" * 10_000)
            n_sent += 10_000

    async with lab(a=flood) as bench:
        client, server = trio.testing.lockstep_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: serve_connection(server, bench.ingress.handle, limits=Limits()))
            await client.send_all(request())
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert n_sent <= 1024 * 1024
            await client.aclose()
