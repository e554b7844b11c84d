"""The HTTP/1.1 server over raw connections: framing of answers, order, and clients that go away."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from tela.errors import RefusedError, StreamResetError
from tela.ingress import openai
from tela.ingress.http1 import LINGER_S, Handler, Limits, Request, Responder, serve_connection

GET = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"


async def echo(request: Request, responder: Responder) -> None:
    await responder.json(200, {"path": request.path, "n_bytes": len(request.body)})


@asynccontextmanager
async def serving(handler: Handler, limits: Limits | None = None) -> AsyncIterator[trio.StapledStream[Any, Any]]:
    """A client's end of an in-memory connection; on leaving, the client closes and the server must end."""
    client, server = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: serve_connection(server, handler, limits=limits or Limits()))
        yield client
        await client.aclose()


async def read_all(stream: trio.abc.ReceiveStream) -> bytes:
    return b"".join([bytes(data) async for data in stream])


async def read_until(stream: trio.abc.ReceiveStream, end: bytes) -> bytes:
    data = b""
    while end not in data:
        received = await stream.receive_some()
        assert received, f"the connection ended before {end!r}: {data!r}"
        data += received
    return data


async def exchange(data: bytes, handler: Handler = echo, limits: Limits | None = None) -> bytes:
    """Everything that the server writes until it closes."""
    async with serving(handler, limits) as client:
        await client.send_all(data)
        return await read_all(client)


def content(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


async def test_pipelined_requests_are_answered_in_order() -> None:
    targets = [b"/%d" % index for index in range(40)]
    data = b"".join(b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % target for target in targets[:-1])
    answers = await exchange(data + b"GET /39 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert [
        json.loads(part.splitlines()[-1].partition(b"}")[0] + b"}")["path"].encode() for part in _parts(answers)
    ] == targets


def _parts(answers: bytes) -> list[bytes]:
    return [part for part in answers.split(b"HTTP/1.1 200 OK") if part]


async def test_connection_is_kept_between_requests() -> None:
    async with serving(echo) as client:
        for _ in range(3):
            await client.send_all(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab")
            answer = await read_until(client, b"}")
            assert content(answer) == {"path": "/x", "n_bytes": 2}
            assert b"connection: close" not in answer


async def test_content_of_unknown_length_is_chunked() -> None:
    async def stream(_: Request, responder: Responder) -> None:
        await responder.start(200, [(b"content-type", b"text/plain")])
        await responder.send(b"abc")
        await responder.send(b"")
        await responder.send(b"d" * 16)
        await responder.end()

    async with serving(stream) as client:
        await client.send_all(GET)
        answer = await read_until(client, b"0\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body == b"3\r\nabc\r\n10\r\n" + b"d" * 16 + b"\r\n0\r\n\r\n"


async def test_http10_gets_no_chunks_and_a_closed_connection() -> None:
    async def stream(_: Request, responder: Responder) -> None:
        await responder.start(200)
        await responder.send(b"abc")
        await responder.end()

    answer = await exchange(b"GET / HTTP/1.0\r\n\r\n", stream)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body == b"abc"
    assert b"chunked" not in head
    assert b"connection: close" in head


async def test_head_gets_the_headers_of_get_and_no_body() -> None:
    answer = await exchange(b"HEAD /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n")
    assert b"content-length: 25" in answer


async def test_expectation_is_answered_before_the_body() -> None:
    async with serving(echo) as client:
        await client.send_all(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert await read_until(client, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send_all(b"ab")
        assert content(await read_until(client, b"}"))["n_bytes"] == 2


async def test_refusal_comes_after_the_answers_owed_and_closes() -> None:
    answer = await exchange(GET + b"GET / HTTP/1.1\nHost: x\n\n" + GET)
    first, second = answer.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200")
    assert second.startswith(b"400")
    assert content(second)["error"]["code"] == "invalid_request"
    assert b"connection: close" in second


async def test_answer_to_too_large_a_body_is_read_by_a_client_that_is_still_sending() -> None:
    limits = Limits(max_body_bytes=1000)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: trio.serve_listeners(lambda stream: serve_connection(stream, echo, limits=limits), listeners)
        )
        client = await trio.testing.open_stream_to_socket_listener(listeners[0])
        await client.send_all(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n" + b"x" * 1_000_000)
        answer = await read_until(client, b"}}")
        assert answer.startswith(b"HTTP/1.1 413 ")
        await client.aclose()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("is_started", [False, True])
async def test_handler_is_cancelled_when_the_client_goes_away(is_started: bool) -> None:
    events: list[str] = []
    entered = trio.Event()

    async def hang(_: Request, responder: Responder) -> None:
        if is_started:
            await responder.start(200)
        entered.set()
        try:
            await trio.sleep_forever()
        finally:
            events.append("ended")

    async with serving(hang) as client:
        await client.send_all(GET)
        await entered.wait()
    assert events == ["ended"]


async def test_handler_that_writes_to_a_client_that_is_gone_is_cancelled() -> None:
    ends: list[type[BaseException] | None] = []

    async def flood(_: Request, responder: Responder) -> None:
        try:
            await responder.start(200)
            while True:
                await responder.send(b"x" * 65_536)
        except BaseException as error:
            ends.append(type(error))
            raise

    async with serving(flood) as client:
        await client.send_all(GET)
        await read_until(client, b"xxx")
    assert ends == [trio.Cancelled]


async def test_error_of_ours_becomes_an_answer_and_the_connection_goes_on() -> None:
    async def refuse(request: Request, _: Responder) -> None:
        if request.path == "/api":
            raise openai.unavailable("busy", retry_after_s=1.2)
        raise RefusedError("no", hint="ask the owner")

    async with serving(refuse) as client:
        await client.send_all(b"GET /api HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await read_until(client, b"}}")
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"retry-after: 2\r\n" in answer
        await client.send_all(GET)
        answer = await read_until(client, b"}}")
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert content(answer)["error"] == {
            "message": "no; ask the owner", "type": "invalid_request_error", "param": None, "code": "refused",
        }  # fmt: skip


async def test_unexpected_error_is_answered_500_without_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    async def fail(_: Request, __: Responder) -> None:
        raise ZeroDivisionError("secret")

    async with serving(fail) as client:
        await client.send_all(GET)
        answer = await read_until(client, b"}}")
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in answer
    assert "handler.fail" in capsys.readouterr().out


async def test_handler_that_answers_nothing_is_answered_500() -> None:
    async def forget(_: Request, __: Responder) -> None:
        pass

    async with serving(forget) as client:
        await client.send_all(GET)
        assert (await read_until(client, b"}}")).startswith(b"HTTP/1.1 500 ")


async def test_broken_answer_ends_without_the_last_chunk() -> None:
    async def breaks(_: Request, responder: Responder) -> None:
        await responder.start(200)
        await responder.send(b"abc")
        raise StreamResetError("gone")

    answer = await exchange(GET, breaks)
    assert answer.endswith(b"3\r\nabc\r\n")


async def test_answer_shorter_than_its_length_is_broken() -> None:
    async def short(_: Request, responder: Responder) -> None:
        await responder.start(200, length=5)
        await responder.send(b"abc")
        await responder.end()

    answer = await exchange(GET + GET, short)
    assert answer.endswith(b"content-length: 5\r\n\r\nabc")


async def test_broken_answer_without_framing_resets_the_connection() -> None:
    async def breaks(_: Request, responder: Responder) -> None:
        await responder.start(200)
        await responder.send(b"abc")
        raise StreamResetError("gone")

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: trio.serve_listeners(lambda stream: serve_connection(stream, breaks, limits=Limits()), listeners)
        )
        client = await trio.testing.open_stream_to_socket_listener(listeners[0])
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await client.send_all(b"GET / HTTP/1.0\r\n\r\n")
        with pytest.raises(trio.BrokenResourceError):
            await read_all(client)
        await client.aclose()
        nursery.cancel_scope.cancel()


async def test_nothing_follows_a_write_that_was_cut_short() -> None:
    tried = trio.Event()

    async def gives_up(_: Request, responder: Responder) -> None:
        await responder.start(200)
        with trio.move_on_after(0.05):
            await responder.send(b"x" * 20_000_000)
        tried.set()
        await responder.send(b"tail")
        await responder.end()

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: trio.serve_listeners(lambda stream: serve_connection(stream, gives_up, limits=Limits()), listeners)
        )
        client = await trio.testing.open_stream_to_socket_listener(listeners[0])
        await client.send_all(GET)
        await tried.wait()
        with pytest.raises(trio.BrokenResourceError):
            await read_all(client)
        await client.aclose()
        nursery.cancel_scope.cancel()


async def test_header_with_a_line_break_is_never_sent() -> None:
    async def split(_: Request, responder: Responder) -> None:
        await responder.start(200, [(b"x", b"a\r\nset-cookie: b")])

    async with serving(split) as client:
        await client.send_all(GET)
        answer = await read_until(client, b"}}")
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert b"set-cookie" not in answer


async def test_slow_header_is_answered_408(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(echo, Limits(head_timeout_s=30)) as client:
        started = trio.current_time()
        for byte in b"GET / HT":
            await client.send_all(bytes([byte]))
            await trio.sleep(4)
        answer = await read_until(client, b"}}")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert trio.current_time() - started <= 36


async def test_silent_body_is_answered_408(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(echo) as client:
        await client.send_all(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab")
        assert (await read_until(client, b"}}")).startswith(b"HTTP/1.1 408 ")


async def test_idle_connection_is_closed_but_not_one_that_waits_for_its_answer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def slow(_: Request, responder: Responder) -> None:
        await trio.sleep(1000)
        await responder.json(200, {})

    async with serving(slow, Limits(idle_s=100)) as client:
        await client.send_all(GET)
        assert (await read_until(client, b"{}")).startswith(b"HTTP/1.1 200 ")
        assert await read_all(client) == b""
    assert 1000 < trio.current_time() < 1300


async def test_closing_waits_briefly_for_the_client(autojump_clock: trio.testing.MockClock) -> None:
    client, server = trio.testing.memory_stream_pair()
    await client.send_all(b"GET / HTTP/1.0\r\n\r\n")
    started = trio.current_time()
    await serve_connection(server, echo, limits=Limits())
    assert trio.current_time() - started == pytest.approx(LINGER_S)
