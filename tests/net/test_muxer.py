"""Connections and streams of our muxer between two meshes on loopback."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil
import pytest
import trio

from tela.errors import PeerError, StreamResetError
from tela.net import libp2p, muxer, streams, yamux
from tela.net.records import SessionRecords
from tela.net.transport import Stream
from tela.net.yamux import HEADER, MAX_WINDOW_BYTES, PROTOCOL_ERROR, SYN, WINDOW_UPDATE
from tests.lab.meshes import connected_meshes, echo, receive_all, two_meshes, wait_until

ECHO = "/tela/echo/1"


def connection(mesh) -> muxer.Connection:
    """The only connection of a mesh."""
    ((each,),) = mesh._connections.values()
    return each


def n_tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


@pytest.fixture
def any_session(monkeypatch):
    """Every connection goes through the library's session, as over a relay or a websocket."""
    monkeypatch.setattr(libp2p, "records_of", SessionRecords)


async def test_foreign_session_carries_streams_both_ways(any_session):
    async with connected_meshes("libp2p") as pair:
        assert type(connection(pair.dialer)._records) is SessionRecords
        pair.listener.handle(ECHO, echo)
        content = bytes(range(256)) * 8_192
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, content)
            received = b""
            while len(received) < len(content):
                received += await stream.receive()
        assert received == content
        await pair.dialer.disconnect(pair.listener.node)
        await wait_until(lambda: not pair.listener.peers())


@pytest.mark.defect(7)
async def test_2000_streams_at_once_are_opened_and_answered():
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(ECHO, echo)
        answers = []

        async def ask(index):
            stream = await pair.dialer.open(pair.listener.node, ECHO)
            await stream.send(b"%d" % index)
            await stream.finish()
            answers.append(int(await receive_all(stream)))

        await (await pair.dialer.open(pair.listener.node, ECHO)).finish()
        async with trio.open_nursery() as nursery:
            for index in range(2_000):
                nursery.start_soon(ask, index)
        assert sorted(answers) == list(range(2_000))
        await wait_until(lambda: len(connection(pair.listener).machine.streams) <= 1)


@pytest.mark.slow
@pytest.mark.timeout(90)  # 1,200 handshakes at 5 ms of CPU: 7 s, several times that on a busy machine
@pytest.mark.defect(1)
async def test_600_connections_come_and_go_without_a_trace():
    async with two_meshes("libp2p") as pair:
        n_before, n_files_before = n_tasks(), psutil.Process(os.getpid()).num_fds()
        for _ in range(600):  # stock: refuses from the 250th on
            await pair.dialer.dial(pair.listener.addresses)
            await pair.dialer.disconnect(pair.listener.node)
        await wait_until(lambda: not pair.listener.peers(), 20)
        await wait_until(lambda: n_tasks() <= n_before, 20)
        assert psutil.Process(os.getpid()).num_fds() <= n_files_before


async def test_slow_reader_bounds_both_sides(autojump_clock):
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(ECHO, lambda stream: trio.sleep_forever())
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        with trio.move_on_after(60) as scope:
            await stream.send(bytes(4 * MAX_WINDOW_BYTES))
        assert scope.cancelled_caught
        assert connection(pair.listener).machine.n_unread <= MAX_WINDOW_BYTES
        assert not connection(pair.dialer).machine.has_output
        assert pair.dialer.peers()


async def test_second_opening_of_a_protocol_waits_for_nothing():
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(ECHO, echo)
        await (await pair.dialer.open(pair.listener.node, ECHO)).finish()
        second = await pair.dialer.open(pair.listener.node, ECHO)
        assert second.first_flag == SYN  # nothing was sent: the protocol goes with the first data
        await second.send(b"hello")
        assert second.first_flag == 0
        assert await second.receive() == b"hello"
        third = await pair.dialer.open(pair.listener.node, ECHO)
        await third.finish()  # without a byte of its own
        assert await third.receive() == b""


async def test_protocol_that_is_no_longer_served_breaks_the_stream():
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(ECHO, echo)
        await (await pair.dialer.open(pair.listener.node, ECHO)).finish()
        del pair.listener._handlers[ECHO]
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        await stream.send(b"hello")
        with pytest.raises(StreamResetError, match="does not speak"):
            await stream.receive()


async def test_peer_that_breaks_the_protocol_is_told_and_cut_off():
    async with connected_meshes("libp2p") as pair:
        ours, theirs = connection(pair.dialer), connection(pair.listener)
        ours.machine._put(HEADER.pack(9, 0, 0, 0, 0))
        ours.kick()
        await wait_until(lambda: not pair.dialer.peers() and not pair.listener.peers())
        assert theirs.reason == "yamux version 9"
        assert ours.machine.peer_code == PROTOCOL_ERROR


async def test_connection_whose_peer_goes_away_ends_with_its_last_stream():
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(ECHO, echo)
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        theirs = connection(pair.listener)
        theirs.machine.go_away(yamux.NORMAL)
        theirs.kick()
        await wait_until(lambda: connection(pair.dialer).machine.peer_code is not None)
        with pytest.raises(PeerError, match="going away"):
            await pair.dialer.open(pair.listener.node, ECHO)
        await stream.send(b"still served")
        assert await stream.receive() == b"still served"
        await stream.finish()
        assert await stream.receive() == b""
        await wait_until(lambda: not pair.dialer.peers())


async def test_heartbeat_measures_the_round_trip():
    async with connected_meshes("libp2p") as pair:
        await wait_until(lambda: connection(pair.dialer).machine.rtt_s is not None)
        assert 0 < connection(pair.dialer).machine.rtt_s < 1


async def test_stream_that_nobody_ends_is_reset_after_a_minute(autojump_clock):
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(ECHO, lambda stream: trio.sleep_forever())
        forgotten = await pair.dialer.open(pair.listener.node, ECHO)
        await forgotten.finish()
        waited_for = await pair.dialer.open(pair.listener.node, ECHO)
        await waited_for.finish()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waited_for.receive)
            await trio.sleep(streams.ABANDONED_HEARTBEATS * libp2p.HEARTBEAT_S + 6)
            assert forgotten.is_broken
            assert not waited_for.is_broken
            nursery.cancel_scope.cancel()


async def test_stream_without_a_protocol_is_reset_soon(autojump_clock):
    async with connected_meshes("libp2p") as pair:
        ours, theirs = connection(pair.dialer), connection(pair.listener)
        mute = ours.machine.open()
        ours.machine._put(HEADER.pack(0, WINDOW_UPDATE, SYN, mute.stream_id, 0))
        ours.kick()
        await wait_until(lambda: mute.stream_id in theirs.machine.streams)
        await trio.sleep((streams.NEGOTIATION_HEARTBEATS + 2) * libp2p.HEARTBEAT_S)
        assert mute.is_broken
        assert not theirs.machine.streams


async def test_handler_that_sleeps_is_cancelled_when_its_stream_breaks(autojump_clock):
    async with connected_meshes("libp2p") as pair:
        over = trio.Event()

        async def sleep(stream):
            try:
                await trio.sleep_forever()
            finally:
                over.set()

        pair.listener.handle(ECHO, sleep)
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        stream.reset()
        with trio.fail_after(2 * libp2p.HEARTBEAT_S):
            await over.wait()


async def test_write_that_was_taken_whole_succeeds_though_the_peer_is_gone_before_we_wake():
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(ECHO, lambda stream: trio.sleep_forever())
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, bytes(3_000_000))
            await trio.testing.wait_all_tasks_blocked()
            stream.queue.clear()  # as if the peer had read and all was framed,
            stream.on_sent()
            pair.dialer._connections[pair.listener.node][0].machine._break(
                stream
            )  # and its reset came in the same turn
            stream.on_reset()
        with pytest.raises(StreamResetError):
            await stream.send(b"more")


async def test_writers_take_turns_even_where_the_socket_takes_all_at_once():
    order: list[str] = []

    async def write(name: str, stream: Stream) -> None:
        for _ in range(3):
            await stream.send(bytes(40_000))
            order.append(name)

    async with connected_meshes("libp2p") as pair:
        pair.listener.handle("/echo/1", echo)
        streams = [await pair.dialer.open(pair.listener.node, "/echo/1") for _ in range(2)]
        async with trio.open_nursery() as nursery:
            for name, stream in zip("ab", streams, strict=True):
                nursery.start_soon(write, name, stream)
        assert set(order[:2]) == {"a", "b"}


async def test_two_readers_of_a_stream_are_an_error():
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(ECHO, echo)
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.receive)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await stream.receive()
            nursery.cancel_scope.cancel()


async def test_small_chunks_are_read_together_and_in_order():
    async with connected_meshes("libp2p") as pair:
        go = trio.Event()
        received = []

        async def read(stream):
            await go.wait()
            while data := await stream.receive():
                received.append(data)

        pair.listener.handle(ECHO, read)
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        chunks = [b"%06d" % index for index in range(5_000)]
        for chunk in chunks:
            await stream.send(chunk)
        await stream.finish()
        go.set()
        await wait_until(lambda: sum(map(len, received)) == 30_000)
        assert b"".join(received) == b"".join(chunks)
        assert len(received) < 500


async def test_unread_small_chunks_are_joined():
    async with connected_meshes("libp2p") as pair:
        handled = []

        async def sleep(stream):
            handled.append(stream)
            await trio.sleep_forever()

        pair.listener.handle(ECHO, sleep)
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        for _ in range(3_000):
            await stream.send(b"x")
        await wait_until(lambda: handled and handled[0].n_unread == 3_000)
        assert len(handled[0]._chunks) <= streams.MAX_CHUNKS


async def test_peer_without_our_muxer_is_told_apart(monkeypatch):
    made = []

    class Recorded(muxer.Connection):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    async with two_meshes("libp2p") as pair:
        monkeypatch.setattr(libp2p, "Connection", Recorded)
        monkeypatch.setattr(libp2p, "YAMUX_PROTOCOL", "/none/1")
        with suppress(PeerError):  # the refusal may come while the dial is still under way
            await pair.dialer.dial(pair.listener.addresses)
        await made[0].closed.wait()
        assert "does not speak /none/1" in made[0].reason
        assert not pair.dialer.peers()
