"""The defects of py-libp2p 0.8.1 (design/overlay.md 1), each as a test of what we want instead."""

from __future__ import annotations

import socket
import struct

import pytest
import trio
from trio.testing import memory_stream_pair

from tela.errors import ConfigError, PeerError, StreamResetError
from tela.identity import KeyPair
from tela.net.egress import Egress
from tela.net.endpoints import NOWHERE
from tela.net.foreign import ForeignConnection
from tela.net.libp2p import open_mesh
from tela.net.multiaddrs import parse_address, peer_id
from tela.net.records import NoiseRecords
from tests.lab.meshes import connected_meshes, echo, two_meshes, wait_until
from tests.lab.proxy import open_proxy

ECHO = "/tela/echo/1"


def n_tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


@pytest.mark.defect(4)
async def test_writer_waits_longer_than_five_seconds_for_its_reader(autojump_clock):
    async with connected_meshes("libp2p") as pair:
        go = trio.Event()
        n_read = 0

        async def read_late(stream):
            nonlocal n_read
            await go.wait()
            while data := await stream.receive():
                n_read += len(data)
            await stream.finish()

        pair.listener.handle(ECHO, read_late)
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, bytes(3_000_000))
            await trio.sleep(60)
            go.set()
        await stream.finish()
        assert await stream.receive() == b""
        assert n_read == 3_000_000


@pytest.mark.defect(6)
async def test_silent_peer_is_given_up():
    async with (
        open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as listener,
        open_proxy(parse_address(listener.addresses[0]).port) as proxy,
        open_mesh(KeyPair.generate(), [], heartbeat_s=0.05, dead_after_s=0.2) as dialer,
    ):
        listener.handle(ECHO, echo)
        await dialer.dial([f"/ip4/127.0.0.1/tcp/{proxy.port}/p2p/{peer_id(listener.node)}"])
        await trio.sleep(0.5)  # more than dead_after_s: heartbeats keep a healthy idle link up
        assert 0 <= dialer.silence_s()[listener.node] < 0.2
        stream = await dialer.open(listener.node, ECHO)
        proxy.go_silent()
        with pytest.raises(StreamResetError):
            await stream.receive()
        assert not dialer.peers()


async def test_dead_peer_is_noticed_at_once():
    async with (
        open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as listener,
        open_proxy(parse_address(listener.addresses[0]).port) as proxy,
        open_mesh(KeyPair.generate(), []) as dialer,
    ):
        down = trio.Event()
        dialer.on_connection(lambda peer, is_up: None if is_up else down.set())
        await dialer.dial([f"/ip4/127.0.0.1/tcp/{proxy.port}/p2p/{peer_id(listener.node)}"])
        await proxy.drop()
        with trio.fail_after(0.2):  # far below every heartbeat
            await down.wait()


@pytest.mark.defect(8)
async def test_dial_does_not_wait_and_forgets_failures():
    async with two_meshes("libp2p") as pair:
        port = parse_address(pair.listener.addresses[0]).port
        with pytest.raises(PeerError):
            await pair.dialer.dial([f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id(pair.listener.node)}"])
        fastest_s = 1.0
        for _ in range(5):
            start = trio.current_time()
            await pair.dialer.dial([f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id(pair.listener.node)}"])
            fastest_s = min(fastest_s, trio.current_time() - start)
            await pair.dialer.disconnect(pair.listener.node)
        assert fastest_s < 0.2  # stock: 0.252 at best


async def test_name_is_resolved_anew_at_each_dial():
    class Resolver(trio.abc.HostnameResolver):
        n_asked = 0

        async def getaddrinfo(self, host, port, *arguments):
            self.n_asked += 1
            address = "127.0.0.1" if self.n_asked > 1 else "127.0.0.2"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

        async def getnameinfo(self, sockaddr, flags):
            raise AssertionError(sockaddr)

    trio.socket.set_custom_hostname_resolver(Resolver())
    async with two_meshes("libp2p") as pair:
        port = parse_address(pair.listener.addresses[0]).port
        address = f"/dns/hub.test/tcp/{port}/p2p/{peer_id(pair.listener.node)}"
        with pytest.raises(PeerError):
            await pair.dialer.dial([address])
        assert await pair.dialer.dial([address]) == pair.listener.node


@pytest.mark.parametrize("protocol", ["/plaintext/2.0.0", "/secio/1.0.0", "/tls/1.0.0", "/yamux/1.0.0"])
@pytest.mark.defect(14)
async def test_only_noise_is_offered(protocol):
    async with open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as mesh:
        target = parse_address(mesh.addresses[0])
        stream = await trio.open_tcp_stream(target.host, target.port)
        for line in ("/multistream/1.0.0", protocol):
            await stream.send_all(bytes([len(line) + 1]) + line.encode() + b"\n")
        answer = b""
        while len(answer) < 24:
            answer += await stream.receive_some()
        assert answer == b"\x13/multistream/1.0.0\n\x03na\n"
        await stream.aclose()


async def test_the_muxer_is_ours():
    async with connected_meshes("libp2p") as pair:
        (there,) = pair.dialer._swarm.connections.values()
        assert type(there[0].muxed_conn) is ForeignConnection
        assert type(there[0].muxed_conn.connection._records) is NoiseRecords
        assert list(pair.dialer._swarm.upgrader.muxer_multistream.transports) == ["/yamux/1.0.0"]
        assert list(pair.dialer._swarm.upgrader.security_multistream.transports) == ["/noise"]


async def test_garbage_on_the_port_harms_nobody(capfd):
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(ECHO, echo)
        for _ in range(3):
            target = parse_address(pair.listener.addresses[0])
            stream = await trio.open_tcp_stream(target.host, target.port)
            await stream.send_all(b"GET / HTTP/1.1\r\n\r\n" * 10)
            await stream.aclose()
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        await stream.send(b"still here")
        assert await stream.receive() == b"still here"
    assert "Traceback" not in "".join(capfd.readouterr())


async def test_socket_that_is_reset_before_it_is_accepted_harms_nobody():
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(ECHO, echo)
        target = parse_address(pair.listener.addresses[0])
        for _ in range(3):
            with socket.create_connection((target.host, target.port)) as hasty:
                hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close is a reset
        await wait_until(lambda: not pair.listener._handshakes)
        stream = await pair.dialer.open(pair.listener.node, ECHO)
        await stream.send(b"still here")
        assert await stream.receive() == b"still here"
        async with open_mesh(KeyPair.generate(), []) as third:
            assert await third.dial(pair.listener.addresses) == pair.listener.node


async def test_swarm_remembers_no_peer_that_left():
    async with two_meshes("libp2p") as pair:
        for _ in range(10):  # some end while the library registers them
            await pair.dialer.dial(pair.listener.addresses)
            await pair.dialer.disconnect(pair.listener.node)
        await wait_until(lambda: not pair.listener._handshakes and not pair.listener.peers())
        await wait_until(lambda: not pair.listener._swarm.connections)
        for mesh in (pair.listener, pair.dialer):
            assert not mesh._swarm.auto_connector._recent_disconnects


async def test_port_in_use_is_a_config_error():
    async with open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as mesh:
        port = parse_address(mesh.addresses[0]).port
        with pytest.RaisesGroup(ConfigError, flatten_subgroups=True, allow_unwrapped=True):
            async with open_mesh(KeyPair.generate(), [f"127.0.0.1:{port}"]):
                pass


async def test_closing_is_quick_and_leaves_nothing(capfd):
    n_tasks_before = n_tasks()
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(ECHO, echo)
        streams = [await pair.dialer.open(pair.listener.node, ECHO) for _ in range(20)]
        start = trio.current_time()
    assert trio.current_time() - start < 2.0
    for stream in streams:
        with pytest.raises(StreamResetError):
            await stream.receive()
    await wait_until(lambda: n_tasks() <= n_tasks_before)
    assert "error" not in "".join(capfd.readouterr()).lower()


class PipeEgress(Egress):
    """Leads to ``mesh`` through memory, whatever the address."""

    def __init__(self, nursery):
        super().__init__()
        self.nursery = nursery
        self.mesh = None

    async def connect(self, peer, host, port):
        ours, theirs = memory_stream_pair()
        self.nursery.start_soon(self.mesh.accept, theirs, NOWHERE)
        return ours


async def test_connection_goes_over_any_stream_of_bytes():
    """As circuits and websockets need it: no socket of our own, the same records."""
    async with trio.open_nursery() as nursery:
        egress = PipeEgress(nursery)
        async with (
            open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as egress.mesh,
            open_mesh(KeyPair.generate(), [], egress=egress) as dialer,
        ):
            egress.mesh.handle(ECHO, echo)
            peer = await dialer.dial(egress.mesh.addresses)
            stream = await dialer.open(peer, ECHO)
            content = bytes(range(256)) * 8_192  # 2 MiB: several windows
            async with trio.open_nursery() as sending:
                sending.start_soon(stream.send, content)
                received = bytearray()
                while len(received) < len(content):
                    received += await stream.receive()
            assert bytes(received) == content
            await dialer.disconnect(peer)
            await wait_until(lambda: not egress.mesh.peers())
        nursery.cancel_scope.cancel()
