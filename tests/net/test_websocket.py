"""WebSockets as streams: any split, a rude peer, the front proxy's word on its client."""

from __future__ import annotations

import socket

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import memory_stream_pair
from wsproto.events import CloseConnection, Ping, TextMessage

from tela.errors import ConfigError, PeerError, ProtocolError
from tela.identity import KeyPair
from tela.net import libp2p
from tela.net.endpoints import Endpoint
from tela.net.libp2p import open_mesh
from tela.net.multiaddrs import parse_address
from tela.net.websocket import MAX_HEAD_BYTES, accept_websocket, connect_websocket
from tests.lab.meshes import connected_meshes, echo, wait_until

UPGRADE = (
    b"GET / HTTP/1.1\r\nhost: hub\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n"
)


class Chopped(trio.abc.Stream):
    """Gives what it receives in pieces of at most ``n`` bytes."""

    def __init__(self, inner, n):
        self.inner, self.n = inner, n

    async def send_all(self, data):
        await self.inner.send_all(data)

    async def wait_send_all_might_not_block(self):
        await self.inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes=None):
        return await self.inner.receive_some(self.n)

    async def aclose(self):
        await self.inner.aclose()


async def two_ends(n_bytes_at_once=65_536):
    """A client's and a server's end over memory."""
    here, there = memory_stream_pair()
    ends = []
    async with trio.open_nursery() as nursery:

        async def accept():
            ends.append((await accept_websocket(Chopped(there, n_bytes_at_once))).stream)

        nursery.start_soon(accept)
        ends.insert(0, await connect_websocket(Chopped(here, n_bytes_at_once), "hub"))
    return ends


@settings(deadline=None, max_examples=40)
@given(st.lists(st.binary(min_size=1, max_size=3000), min_size=1, max_size=6), st.integers(1, 200))
def test_bytes_arrive_whole_and_in_order_at_any_split(writes, n_bytes_at_once):
    async def main():
        for sender, receiver in ((0, 1), (1, 0)):
            ends = await two_ends(n_bytes_at_once)
            received = b""
            async with trio.open_nursery() as nursery:

                async def send(stream=ends[sender]):
                    for data in writes:
                        await stream.send_all(data)
                    await stream.aclose()

                nursery.start_soon(send)
                while data := await ends[receiver].receive_some(700):
                    assert len(data) <= 700
                    received += data
            assert received == b"".join(writes)

    trio.run(main)


async def test_ping_is_answered_and_text_is_refused():
    client, server = await two_ends()
    await client._send(Ping(payload=b"are you there"))
    await client.send_all(b"x")
    assert await server.receive_some() == b"x"
    await client._send(TextMessage(data="text"))
    with pytest.raises(ProtocolError, match="TextMessage"):
        await server.receive_some()


async def test_write_after_the_end_is_a_broken_resource_and_says_nothing_of_the_content():
    client, server = await two_ends()
    await client._send(CloseConnection(code=1000))
    assert await server.receive_some() == b""
    for end in (client, server):
        with pytest.raises(trio.BrokenResourceError, match=r"^the WebSocket is closed$"):
            await end.send_all(b"secret")
        await end.aclose()
        await end.aclose()


async def test_end_without_goodbye_is_an_error():
    client, server = await two_ends()
    await trio.aclose_forcefully(client._transport)
    with pytest.raises(trio.BrokenResourceError):
        await server.receive_some()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: hub\r\n\r\n",
        b"\x13/multistream/1.0.0\n\r\n\r\n",
        b"x" * (MAX_HEAD_BYTES + 70_000),
    ],
)
async def test_what_is_no_websocket_gets_426(head):
    here, there = memory_stream_pair()
    await here.send_all(head)
    with pytest.raises(ProtocolError):
        await accept_websocket(there)
    assert (await here.receive_some()).startswith(b"HTTP/1.1 426 ")


async def test_refusal_of_a_front_proxy_is_told_with_its_status():
    here, there = memory_stream_pair()
    await there.send_all(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")
    with pytest.raises(PeerError, match="502"):
        await connect_websocket(here, "hub")


@pytest.mark.parametrize(
    ("headers", "host"),
    [
        (b"", ""),
        (b"x-forwarded-for: 198.51.100.7\r\n", "198.51.100.7"),
        (b"x-forwarded-for: 10.0.0.1, 198.51.100.7\r\n", "198.51.100.7"),  # what its client claims stands before
        (b"x-forwarded-for: 10.0.0.1\r\nX-Forwarded-For: 2001:db8::5\r\n", "2001:db8::5"),
        (b"x-forwarded-for: nobody\r\n", ""),
    ],
)
async def test_nearest_proxy_names_the_client(headers, host):
    here, there = memory_stream_pair()
    await here.send_all(UPGRADE + headers + b"\r\n")
    assert (await accept_websocket(there)).forwarded_for == host


async def test_mesh_believes_a_proxy_on_its_own_host():
    async with connected_meshes("websocket") as pair:
        assert parse_address(pair.listener.addresses[0]).carrier == "/ws"
        assert pair.listener.observed(pair.dialer.node) == Endpoint("127.0.0.1", 0)


async def test_openings_are_bounded_and_do_not_outlive_their_deadline(monkeypatch):
    monkeypatch.setattr(libp2p, "MAX_OPENINGS", 2)
    monkeypatch.setattr(libp2p, "HANDSHAKE_TIMEOUT_S", 0.3)
    async with open_mesh(KeyPair.generate(), ["ws://127.0.0.1:0"]) as hub, open_mesh(KeyPair.generate(), []) as other:
        hub.handle("/tela/echo/1", echo)
        target = parse_address(hub.addresses[0])
        idle = [socket.create_connection((target.host, target.port)) for _ in range(2)]
        await wait_until(lambda: hub._handshakes.total() == 2)
        with pytest.raises(PeerError):
            await other.dial(hub.addresses)
        await wait_until(lambda: not hub._handshakes.total())
        await other.dial(hub.addresses)
        for each in idle:
            each.close()


async def test_tls_is_for_the_proxy_in_front():
    with pytest.RaisesGroup(ConfigError, flatten_subgroups=True, allow_unwrapped=True):
        async with open_mesh(KeyPair.generate(), ["wss://127.0.0.1:0"]):
            pass
