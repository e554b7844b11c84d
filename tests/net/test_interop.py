"""Our mesh and a stock py-libp2p host with its own Yamux, each way round."""

from __future__ import annotations

from contextlib import asynccontextmanager

import libp2p
import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.ping import ID as PING_PROTOCOL
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from tela.errors import PeerError, StreamResetError
from tela.identity import KeyPair
from tela.net.libp2p import open_mesh
from tela.net.multiaddrs import peer_id
from tests.lab.meshes import echo, receive_all, wait_until

ECHO = "/tela/echo/1"
CONTENT = bytes(range(256)) * 4_096  # 1 MiB: several windows


@asynccontextmanager
async def stock_and_ours():
    """A stock host that echoes, and a mesh of ours that echoes; both listen."""
    keys = create_new_key_pair()
    noise = NoiseTransport(keys, noise_privkey=create_new_noise_key_pair().private_key)
    host = libp2p.new_host(key_pair=keys, sec_opt={NOISE_PROTOCOL: noise}, muxer_opt={YAMUX_PROTOCOL: Yamux})

    async def echo_back(stream):
        try:
            while data := await stream.read(65_536):
                await stream.write(data)
        except StreamEOF:
            await stream.close()

    host.set_stream_handler(TProtocol(ECHO), echo_back)
    async with (
        host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]),
        open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as mesh,
    ):
        mesh.handle(ECHO, echo)
        yield host, mesh
        await host.disconnect(ID.from_base58(peer_id(mesh.node)))  # at its end the stock host leaks its sockets


async def read_exactly(stream, n_bytes: int) -> bytes:
    content = b""
    while len(content) < n_bytes:
        content += await stream.read(n_bytes - len(content))
    return content


async def write_and_close(stream, content: bytes) -> None:
    for start in range(0, len(content), 65_536):
        await stream.write(content[start : start + 65_536])
    await stream.close_write()


async def test_we_dial_a_stock_host_and_stream_both_ways():
    async with stock_and_ours() as (host, mesh):
        peer = await mesh.dial([str(host.get_addrs()[0])])
        for _ in range(2):  # the second is opened without a round trip
            stream = await mesh.open(peer, ECHO)

            async def write(stream=stream):
                await stream.send(CONTENT)
                await stream.finish()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                assert await receive_all(stream) == CONTENT
        with pytest.raises(PeerError, match="does not speak"):
            await mesh.open(peer, "/tela/nothing/1")


async def test_stock_host_dials_us_and_streams_both_ways():
    async with stock_and_ours() as (host, mesh):
        info = info_from_p2p_addr(Multiaddr(mesh.addresses[0]))
        await host.connect(info)
        stream = await host.new_stream(info.peer_id, [TProtocol("/tela/unknown/1"), TProtocol(ECHO)])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write_and_close, stream, CONTENT)
            assert await read_exactly(stream, len(CONTENT)) == CONTENT


async def test_stock_host_is_answered_its_own_protocols():
    async with stock_and_ours() as (host, mesh):
        info = info_from_p2p_addr(Multiaddr(mesh.addresses[0]))
        await host.connect(info)
        stream = await host.new_stream(info.peer_id, [PING_PROTOCOL])
        for payload in (b"a" * 32, b"b" * 32):
            await stream.write(payload)
            assert await read_exactly(stream, 32) == payload
        await stream.reset()
        protocols = host.get_peerstore().get_protocols
        await wait_until(lambda: PING_PROTOCOL in protocols(info.peer_id))  # by identify


async def test_reset_by_a_stock_host_is_no_clean_end():
    async with stock_and_ours() as (host, mesh):

        async def reset(stream):
            await stream.read(1)
            await stream.reset()

        host.set_stream_handler(TProtocol("/tela/reset/1"), reset)
        peer = await mesh.dial([str(host.get_addrs()[0])])
        stream = await mesh.open(peer, "/tela/reset/1")
        await stream.send(b"x")
        with pytest.raises(StreamResetError):
            await stream.receive()
