"""What every mesh does, whatever carries it (style A46)."""

from __future__ import annotations

import pytest
import trio
from structlog.testing import capture_logs

from tela.errors import ConfigError, PeerError, StreamResetError
from tela.identity import KeyPair
from tela.net.multiaddrs import node_of_address, node_of_peer_id, peer_id
from tests.lab.meshes import STREAM_KINDS, connected_meshes, echo, receive_all, two_meshes, wait_until

ECHO = "/tela/echo/1"
pytestmark = pytest.mark.parametrize("kind", STREAM_KINDS)


async def test_dial_names_the_peer_and_both_sides_see_the_link(kind):
    async with two_meshes(kind) as pair:
        seen = []
        pair.listener.on_connection(lambda peer, is_up: seen.append((peer, is_up)))
        assert await pair.dialer.dial(pair.listener.addresses) == pair.listener.node
        assert pair.listener.node in pair.dialer.peers()
        await wait_until(lambda: pair.dialer.node in pair.listener.peers())
        assert await pair.dialer.dial(pair.listener.addresses) == pair.listener.node
        assert seen == [(pair.dialer.node, True)]
        assert node_of_address(pair.listener.addresses[0]) == pair.listener.node
        assert pair.dialer.addresses == ()


async def test_stream_carries_bytes_both_ways(kind):
    async with connected_meshes(kind) as pair:
        pair.listener.handle(ECHO, echo)
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        assert stream.peer == pair.listener.node
        await stream.send(b"hello")
        assert await stream.receive() == b"hello"
        stream.reset()


async def test_listener_opens_over_an_inbound_connection(kind):
    async with connected_meshes(kind) as pair:  # the dialer listens nowhere (F06)
        pair.dialer.handle(ECHO, echo)
        stream = await pair.listener.open(pair.dialer.node, ECHO)
        await stream.send(b"over your own connection")
        await stream.finish()
        assert await receive_all(stream) == b"over your own connection"


async def test_big_transfer_arrives_whole(kind):
    async with connected_meshes(kind) as pair:
        pair.listener.handle(ECHO, echo)
        content = bytes(range(256)) * 16_384  # 4 MiB: several windows
        stream = await pair.dialer.open(pair.listener.node, ECHO)

        async def write():
            await stream.send(content)
            await stream.finish()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            assert await receive_all(stream) == content


async def test_half_closed_stream_still_receives(kind):
    async with connected_meshes(kind) as pair:

        async def count(stream):
            content = await receive_all(stream)
            await stream.send(b"%d" % len(content))
            await stream.finish()

        pair.listener.handle(ECHO, count)
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        await stream.send(b"x" * 1000)
        await stream.finish()
        assert await receive_all(stream) == b"1000"


@pytest.mark.defect(5)
async def test_reset_is_an_error_and_never_a_clean_end(kind):
    async with connected_meshes(kind) as pair:
        failures = []

        async def read(stream):
            try:
                await receive_all(stream)
            except StreamResetError as error:
                failures.append(error)
                raise

        pair.listener.handle(ECHO, read)
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        await stream.send(b"half of a mess")
        stream.reset()
        stream.reset()
        await wait_until(lambda: failures)
        with pytest.raises(StreamResetError):
            await stream.receive()
        with pytest.raises(StreamResetError):
            await stream.send(b"more")


async def test_own_reset_wakes_a_waiting_reader(kind):
    async with connected_meshes(kind) as pair:
        pair.listener.handle(ECHO, echo)
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        async with trio.open_nursery() as nursery:

            async def read():
                with pytest.raises(StreamResetError):
                    await stream.receive()

            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            stream.reset()


async def test_what_was_finished_before_a_reset_is_still_read(kind):
    async with connected_meshes(kind) as pair:

        async def answer(stream):
            await stream.send(b"the answer")
            await stream.finish()  # and return: the mesh resets what is left

        pair.listener.handle(ECHO, answer)
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        assert await receive_all(stream) == b"the answer"


@pytest.mark.defect(3)
async def test_failing_handler_ends_only_its_own_stream(kind):
    with capture_logs() as logs:
        await _fail_beside_an_echo(kind)
    assert [entry["event"] for entry in logs].count("handler.fail") == 1


async def _fail_beside_an_echo(kind):
    async with connected_meshes(kind) as pair:

        async def fail(stream):
            raise ValueError("a bug")

        pair.listener.handle(ECHO, echo)
        pair.listener.handle("/tela/fail/1", fail)
        good = await pair.dialer.open(pair.listener.node, ECHO)
        bad = await pair.dialer.open(pair.listener.node, "/tela/fail/1")
        with pytest.raises(StreamResetError):
            await bad.receive()
        await good.send(b"alive")
        assert await good.receive() == b"alive"
        assert pair.listener.node in pair.dialer.peers()


@pytest.mark.defect(2)
async def test_cancelled_read_takes_nothing(kind):
    async with connected_meshes(kind) as pair:
        pair.listener.handle(ECHO, echo)
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        for _ in range(20):
            with trio.move_on_after(0.001):
                await stream.receive()
        await stream.send(b"all of it")
        assert await stream.receive() == b"all of it"


@pytest.mark.defect(2)
async def test_cancelled_write_leaves_the_link_alive(kind):
    async with connected_meshes(kind) as pair:

        async def never_read(stream):
            await trio.sleep_forever()

        pair.listener.handle("/tela/stuck/1", never_read)
        pair.listener.handle(ECHO, echo)
        good = await pair.dialer.open(pair.listener.node, ECHO)
        for _ in range(10):
            stuck = await pair.dialer.open(pair.listener.node, "/tela/stuck/1")
            with trio.move_on_after(0.01) as scope:
                await stuck.send(bytes(4_000_000))
            assert scope.cancelled_caught
            stuck.reset()
            await good.send(b"ping")
            assert await good.receive() == b"ping"


async def test_slow_reader_bounds_the_writer(kind):
    async with connected_meshes(kind) as pair:
        go = trio.Event()

        async def read_late(stream):
            await go.wait()
            await stream.send(b"%d" % len(await receive_all(stream)))
            await stream.finish()

        pair.listener.handle(ECHO, read_late)
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        sent = 0

        async def write():
            nonlocal sent
            for _ in range(128):
                await stream.send(bytes(32 * 1024))
                sent += 32 * 1024
            await stream.finish()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await trio.sleep(0.1)
            assert sent < 2 * 1024 * 1024
            go.set()
            assert await receive_all(stream) == b"%d" % (4 * 1024 * 1024)


@pytest.mark.defect(7)
async def test_many_streams_at_once(kind):
    async with connected_meshes(kind) as pair:
        pair.listener.handle(ECHO, echo)
        answers = []

        async def ask(index):
            stream = await pair.dialer.open(pair.listener.node, ECHO)
            await stream.send(b"%d" % index)
            await stream.finish()
            answers.append(int(await receive_all(stream)))

        async with trio.open_nursery() as nursery:
            for index in range(300):
                nursery.start_soon(ask, index)
        assert sorted(answers) == list(range(300))


async def test_open_to_unknown_peer_or_protocol_is_a_peer_error(kind):
    async with connected_meshes(kind) as pair:
        with pytest.raises(PeerError, match="no connection"):
            await pair.dialer.open(KeyPair.generate().public, ECHO)
        with pytest.raises(PeerError, match="does not"):
            await pair.dialer.open(pair.listener.node, "/tela/nothing/1")


async def test_dial_to_nobody_is_a_peer_error(kind):
    async with two_meshes(kind) as pair:
        stranger = peer_id(KeyPair.generate().public)
        with pytest.raises(PeerError, match="no answer"):
            await pair.dialer.dial([f"/ip4/127.0.0.1/tcp/1/p2p/{stranger}"])
        host = pair.listener.addresses[0].rpartition("/")[0]
        with pytest.raises(PeerError, match="no answer"):
            await pair.dialer.dial([f"{host}/{stranger}"])  # somebody else answers there
        assert node_of_peer_id(stranger) not in pair.dialer.peers()


@pytest.mark.defect(8)
async def test_dial_tries_all_addresses(kind):
    async with two_meshes(kind) as pair:
        own = pair.listener.addresses[0]
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id(pair.listener.node)}"
        assert await pair.dialer.dial([dead, own]) == pair.listener.node


async def test_dial_wants_one_peer(kind):
    async with two_meshes(kind) as pair:
        with pytest.raises(ConfigError):
            await pair.dialer.dial([])


async def test_disconnect_breaks_streams_and_tells_both_sides(kind):
    async with connected_meshes(kind) as pair:
        seen = []
        pair.listener.handle(ECHO, echo)
        pair.listener.on_connection(lambda peer, is_up: seen.append((peer, is_up)))
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        await pair.dialer.disconnect(pair.listener.node)
        with pytest.raises(StreamResetError):
            await stream.receive()
        assert pair.listener.node not in pair.dialer.peers()
        await wait_until(lambda: seen == [(pair.dialer.node, False)])
        await pair.dialer.dial(pair.listener.addresses)
        await wait_until(lambda: pair.dialer.node in pair.listener.peers())
