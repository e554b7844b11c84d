"""Pooled request streams, over memory and over libp2p."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
from structlog.testing import capture_logs

from tela.errors import ProtocolError, StreamResetError, UnavailableError
from tela.net import requests
from tela.net.requests import CallError, RequestClient, StaleStreamError, request_handler
from tela.record import NodeId
from tela.wire import HTTP_PROTOCOL, Claim, ErrorFrame, FrameType, RequestHead, ResponseHead, encode, frame
from tests.lab.meshes import STREAM_KINDS, connected_meshes, wait_until

CLAIM = Claim(NodeId(bytes(32)), 1, "", "", 0, 0)
OK = ResponseHead(200, b"OK", ())
over_both = pytest.mark.parametrize("kind", STREAM_KINDS)


def head(request_id: str = "r1") -> RequestHead:
    return RequestHead(CLAIM, 0, request_id, 0.0, "POST", "/v1/x", ())


class Bench:
    """A client and a gate whose handler the test chooses."""

    def __init__(self, client, peer, pair):
        self.client = client
        self.peer = peer
        self.pair = pair
        self.n_streams = 0

    def serve(self, handle):
        inner = request_handler(handle)

        async def counted(stream):
            self.n_streams += 1
            await inner(stream)

        self.pair.listener.handle(HTTP_PROTOCOL, counted)

    async def ask(self, body=b"", request_id="r1"):
        async with self.client.call(self.peer, head(request_id)) as call:
            await call.end(body)
            response = await call.response()
            content = b""
            while data := await call.receive():
                content += data
            return response, content, call.is_reused


@asynccontextmanager
async def bench(kind="memory"):
    async with connected_meshes(kind) as pair, trio.open_nursery() as nursery:
        client = RequestClient(pair.dialer)
        await nursery.start(client.serve)
        yield Bench(client, pair.listener.node, pair)
        nursery.cancel_scope.cancel()


async def echo(call):
    body = b""
    while data := await call.receive():
        body += data
    await call.respond(OK)
    await call.send(call.head.request_id.encode() + b":")
    await call.end(body)


@over_both
async def test_calls_reuse_one_stream(kind):
    async with bench(kind) as b:
        b.serve(echo)
        answers = [await b.ask(b"x" * 500, f"r{index}") for index in range(5)]
        assert [reused for _, _, reused in answers] == [False, True, True, True, True]
        assert [content for _, content, _ in answers] == [b"r%d:" % index + b"x" * 500 for index in range(5)]
        assert answers[0][0] == OK
        assert b.n_streams == 1


@over_both
async def test_calls_at_once_each_get_their_own_answer(kind):
    async with bench(kind) as b:
        b.serve(echo)
        answers = {}

        async def ask(index):
            answers[index] = (await b.ask(b"body", f"r{index}"))[1]

        async with trio.open_nursery() as nursery:
            for index in range(100):
                nursery.start_soon(ask, index)
        assert answers == {index: b"r%d:body" % index for index in range(100)}


@over_both
async def test_long_bodies_stream_both_ways(kind):
    async with bench(kind) as b:

        async def double(call):
            await call.respond(OK)
            while data := await call.receive():
                await call.send(data + data)
            await call.end()

        b.serve(double)
        n_received = 0
        async with b.client.call(b.peer, head()) as call, trio.open_nursery() as nursery:

            async def write():
                for _ in range(30):
                    await call.send(bytes(100_000))
                await call.end()

            nursery.start_soon(write)
            assert await call.response() == OK
            while data := await call.receive():
                n_received += len(data)
        assert n_received == 6_000_000


@over_both
async def test_abandoned_call_cancels_the_handler_and_its_stream_serves_again(kind):
    async with bench(kind) as b:
        cancelled = trio.Event()

        async def hang(call):
            if call.head.request_id == "next":
                await echo(call)
                return
            await call.respond(OK)
            try:
                await trio.sleep_forever()
            finally:
                cancelled.set()

        b.serve(hang)
        async with b.client.call(b.peer, head()) as call:
            await call.end()
            await call.response()
        with trio.fail_after(1):
            await cancelled.wait()
        await wait_until(lambda: b.client._idle.get(b.peer))
        _, content, is_reused = await b.ask(b"b", "next")
        assert (content, is_reused, b.n_streams) == (b"next:b", True, 1)


@over_both
async def test_handler_blocked_in_send_is_cancelled(kind):
    async with bench(kind) as b:
        cancelled = trio.Event()

        async def flood(call):
            await call.respond(OK)
            try:
                while True:
                    await call.send(bytes(60_000))
            finally:
                cancelled.set()

        b.serve(flood)
        async with b.client.call(b.peer, head()) as call:
            await call.end()
            await call.response()
            await trio.testing.wait_all_tasks_blocked(0.05)
        with trio.fail_after(3):
            await cancelled.wait()


@over_both
async def test_lost_link_cancels_the_handler_and_fails_the_call(kind):
    async with bench(kind) as b:
        started, cancelled = trio.Event(), trio.Event()

        async def hang(call):
            started.set()
            try:
                await trio.sleep_forever()
            finally:
                cancelled.set()

        b.serve(hang)
        async with b.client.call(b.peer, head()) as call:
            await call.end()
            await started.wait()
            await b.pair.listener.disconnect(b.pair.dialer.node)
            with pytest.raises(StreamResetError):
                await call.response()
        with trio.fail_after(1):
            await cancelled.wait()


async def test_handler_that_gave_up_within_a_frame_can_send_nothing_more(autojump_clock):
    """An ERROR behind half a frame would be read as content: the caller must see a reset instead."""
    async with bench() as b:

        async def give_up_and_fail(call):
            await call.respond(OK)
            with trio.move_on_after(0.1):
                while True:
                    await call.send(bytes(60_000))
            await call.fail(ErrorFrame("deadline", "too late"))

        b.serve(give_up_and_fail)
        async with b.client.call(b.peer, head()) as call:
            await call.end()
            await call.response()
            await trio.sleep(1)

            async def read_all():
                while await call.receive():
                    pass

            with pytest.raises(StreamResetError):
                await read_all()


async def test_error_frame_raises_with_code_and_leaves_the_stream_usable():
    async with bench() as b:

        async def refuse(call):
            if call.head.request_id == "bad":
                await call.fail(ErrorFrame("draining", "going away", is_accepted=False))
            else:
                await echo(call)

        b.serve(refuse)
        with pytest.raises(CallError) as caught:
            await b.ask(b"unread body", "bad")
        assert (caught.value.code, caught.value.is_accepted) == ("draining", False)
        assert (await b.ask(b"", "good"))[2]
        assert b.n_streams == 1


async def test_error_after_the_head_is_no_clean_end():
    async with bench() as b:

        async def break_off(call):
            await call.respond(OK)
            await call.send(b"half")
            await call.fail(ErrorFrame("engine-disconnected", "gone"))

        b.serve(break_off)
        async with b.client.call(b.peer, head()) as call:
            await call.end()
            await call.response()
            assert await call.receive() == b"half"
            with pytest.raises(CallError, match="gone"):
                await call.receive()


@pytest.mark.parametrize("failure", ["raises", "silent"])
async def test_handler_without_an_answer_is_an_internal_error(failure):
    with capture_logs() as logs:
        async with bench() as b:

            async def handle(call):
                if failure == "raises":
                    raise ValueError("a bug")

            b.serve(handle)
            with pytest.raises(CallError) as caught:
                await b.ask()
            assert caught.value.code == "internal-error"
    assert ("handler.fail" in {entry["event"] for entry in logs}) == (failure == "raises")


async def test_early_answer_discards_the_rest_of_the_body():
    async with bench() as b:

        async def hasty(call):
            await call.respond(OK)
            await call.end()

        b.serve(hasty)
        async with b.client.call(b.peer, head()) as call:
            await call.send(bytes(200_000))
            assert await call.response() == OK
            assert await call.receive() == b""
            for _ in range(100):
                await call.send(bytes(60_000))  # nobody reads it, and still it must not block
            await call.end()
        assert (await b.ask(b""))[2]


async def test_dead_pooled_stream_tells_that_it_was_reused():
    async with bench() as b:

        async def once(call):
            if call.head.request_id == "second":
                call._framed.stream.reset()
                await trio.sleep_forever()
            await echo(call)

        b.serve(once)
        await b.ask(b"", "first")
        with pytest.raises(StaleStreamError):
            await b.ask(b"", "second")


async def test_pooled_stream_that_died_idle_is_replaced():
    async with bench() as b:
        b.serve(echo)
        await b.ask()
        b.client._idle[b.peer][0].stream.reset()
        assert not (await b.ask())[2]


async def test_too_many_calls_is_a_typed_error(monkeypatch):
    monkeypatch.setattr(requests, "MAX_CALLS_PER_PEER", 2)
    async with bench() as b:
        b.serve(echo)
        async with b.client.call(b.peer, head()), b.client.call(b.peer, head()):
            with pytest.raises(UnavailableError) as caught:
                async with b.client.call(b.peer, head()):
                    pass
            assert caught.value.code == "too-many-calls"
        assert not b.client._n_busy


async def test_idle_streams_are_bounded(monkeypatch):
    monkeypatch.setattr(requests, "MAX_IDLE_STREAMS_PER_PEER", 2)
    async with bench() as b:
        b.serve(echo)
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(b.ask)
        assert len(b.client._idle[b.peer]) == 2


async def test_stream_that_does_not_drain_is_reset(autojump_clock):
    async with bench() as b:
        over = trio.Event()

        async def deaf(stream):  # a peer that ignores CANCEL
            try:
                while True:
                    await stream.receive()
            finally:
                over.set()

        b.pair.listener.handle(HTTP_PROTOCOL, deaf)
        async with b.client.call(b.peer, head()):
            pass
        start = trio.current_time()
        await over.wait()
        assert trio.current_time() - start == pytest.approx(requests.DRAIN_TIMEOUT_S, abs=0.1)


@pytest.mark.parametrize(
    "frames",
    [
        frame(FrameType.DATA, b"x"),
        frame(FrameType.REQUEST, encode(head())) + frame(FrameType.REQUEST, encode(head())),
        frame(FrameType.REQUEST, b"\xc1"),
        frame(FrameType.RESPONSE, encode(OK)),
        b"\x7f\x00\x00\x00",
    ],
    ids=["data first", "request in request", "undecodable", "response from the caller", "unknown type"],
)
async def test_caller_that_breaks_the_protocol_is_reset(frames):
    async with bench() as b:
        b.serve(lambda call: trio.sleep_forever())
        stream = await b.pair.dialer.open(b.peer, HTTP_PROTOCOL)
        await stream.send(frames)
        with pytest.raises(StreamResetError):
            await stream.receive()


async def test_gate_that_breaks_the_protocol_is_reset():
    async with bench() as b:
        broken = trio.Event()

        async def nonsense(stream):
            await stream.receive()
            await stream.send(frame(FrameType.DATA, b"before the head"))
            try:
                while await stream.receive():
                    pass
            except StreamResetError:
                broken.set()

        b.pair.listener.handle(HTTP_PROTOCOL, nonsense)
        with pytest.raises(ProtocolError, match="DATA out of place"):
            await b.ask()
        with trio.fail_after(1):
            await broken.wait()


async def test_late_cancel_means_nothing():
    async with bench() as b:
        b.serve(echo)
        stream = await b.pair.dialer.open(b.peer, HTTP_PROTOCOL)
        one = frame(FrameType.REQUEST, encode(head())) + frame(FrameType.END)
        received = b""
        for _ in range(2):
            await stream.send(one)
            while not received.endswith(frame(FrameType.END)):
                received += await stream.receive()
            await stream.send(frame(FrameType.CANCEL))
        assert received.count(b"r1:") == 1  # the second answer ended where the first did


async def test_slow_handler_bounds_the_body():
    async with bench() as b:
        b.serve(lambda call: trio.sleep_forever())
        sent = 0
        async with b.client.call(b.peer, head()) as call:
            with trio.move_on_after(0.2):
                while True:
                    await call.send(bytes(60_000))
                    sent += 60_000
        assert sent < 3_000_000
