"""Connections through a tiny proxy; the real squid and the real ssh are in tests/netlab."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from tela.errors import PeerError, ProxyError
from tela.identity import KeyPair
from tela.net import egress, tunnel
from tela.net.egress import Egress, open_tunnel
from tela.net.libp2p import open_mesh
from tela.net.multiaddrs import parse_address, peer_id
from tela.net.tunnel import Proxies, Proxy
from tests.lab.fake_proxy import open_fake_proxy

GREETING = b"the target speaks first"
PEER = KeyPair.generate().public


@asynccontextmanager
async def speaking_target():
    """A server that sends GREETING and then echoes; yields its port."""

    async def serve(stream):
        await stream.send_all(GREETING)
        async for data in stream:
            await stream.send_all(data)

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("scheme", ["http", "socks5"])
async def test_tunnel_gives_every_byte_of_a_peer_that_speaks_first(scheme):
    async with speaking_target() as port, open_fake_proxy() as proxy:
        stream = await open_tunnel(Proxy(scheme, "127.0.0.1", proxy.port), "hub.example", port)
        async with stream:
            assert await stream.receive_some() == GREETING
            await stream.send_all(b"ping")
            assert await stream.receive_some() == b"ping"
        assert proxy.targets == ["hub.example"]  # the proxy resolves it, not we


@pytest.mark.parametrize(
    ("scheme", "script", "code", "words"),
    [
        ("http", b"HTTP/1.1 403 Forbidden\r\n\r\n<html>", "proxy-refused", "answered 403 Forbidden"),
        ("http", b"x" * (tunnel.MAX_HEAD_BYTES + 1), "proxy-protocol", "without an end"),
        ("http", b"220 mail.example ESMTP\r\n\r\n", "proxy-protocol", "no HTTP"),
        ("socks5", b"\5\xff", "proxy-auth", "credentials"),
        ("socks5", b"\5\0\5\2\0\1\0\0\0\0\0\0", "proxy-refused", "rules do not allow"),
        ("socks5", b"HTTP/1.1 400 Bad Request\r\n\r\n", "proxy-protocol", "no SOCKS5"),
    ],
)
async def test_proxy_that_says_no_is_quoted(scheme, script, code, words):
    async with open_fake_proxy(script) as proxy:
        chosen = Proxy(scheme, "127.0.0.1", proxy.port, "me", "secret")
        with pytest.raises(ProxyError, match=words) as raised:
            await open_tunnel(chosen, "hub.example", 4001)
    assert raised.value.code == code
    assert str(chosen) in str(raised.value)
    assert "secret" not in f"{raised.value} {raised.value.hint}"


async def test_proxy_that_hangs_up_or_is_not_there_is_away():
    async with open_fake_proxy(b"HTTP/1.1 200") as proxy:
        with pytest.raises(ProxyError) as raised:
            await open_tunnel(Proxy("http", "127.0.0.1", proxy.port), "hub.example", 1)
        assert raised.value.code == "proxy-away"
        port = proxy.port
    with pytest.raises(ProxyError, match="cannot be reached") as raised:
        await open_tunnel(Proxy("http", "127.0.0.1", port), "hub.example", 1)
    assert raised.value.code == "proxy-away"


async def test_silent_proxy_is_given_up(monkeypatch):
    monkeypatch.setattr(egress, "PROXY_TIMEOUT_S", 0.05)
    async with open_fake_proxy(b"") as proxy:
        with pytest.raises(ProxyError, match=r"did not answer within 0\.05 s") as raised:
            await open_tunnel(Proxy("socks5", "127.0.0.1", proxy.port), "hub.example", 1)
    assert raised.value.code == "proxy-away"


async def test_egress_dials_directly_where_no_proxy_applies():
    async with speaking_target() as port:
        dead = Proxies(chosen=Proxy("http", "127.0.0.1", 1))
        async with await Egress(dead).connect(PEER, "127.0.0.1", port) as stream:
            assert await stream.receive_some() == GREETING
    with pytest.raises(ProxyError):
        await Egress(dead).connect(PEER, "192.0.2.1", 4001)
    with pytest.raises(ProxyError):
        await Egress(Proxies(ambient=dead.chosen), lambda peer: peer == PEER).connect(PEER, "192.0.2.1", 4001)


async def test_mesh_dials_a_hub_by_name_through_the_proxy_and_tells_its_answer():
    hub_key = KeyPair.generate()
    async with open_mesh(hub_key, ["127.0.0.1:0"]) as hub, open_fake_proxy() as proxy:
        way_out = Egress(Proxies(ambient=Proxy("http", "127.0.0.1", proxy.port)), lambda peer: peer == hub.node)
        port = parse_address(hub.addresses[0]).port
        address = f"/dns/hub.example/tcp/{port}/p2p/{peer_id(hub.node)}"
        async with open_mesh(KeyPair.generate(), [], egress=way_out) as worker:
            assert await worker.dial([address]) == hub.node
            assert proxy.targets == ["hub.example"]
            await worker.disconnect(hub.node)
            proxy.script = b"HTTP/1.1 403 Forbidden\r\n\r\n"
            with pytest.raises(PeerError, match="answered 403 Forbidden"):
                await worker.dial([address])
