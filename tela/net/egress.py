"""How a TCP connection to somebody else is made: directly, or through a proxy. The shell of :mod:`tela.net.tunnel`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

import trio

from tela.errors import ProxyError
from tela.net import tunnel
from tela.net.tunnel import Proxies, Proxy
from tela.record import NodeId

PROXY_TIMEOUT_S: Final = 8.0
"""For a proxy to open a tunnel; below the 10 s of a dial, so that the error names the proxy and not the hub."""


class Egress:
    """Makes the connections of a mesh.

    Args:
        proxies: what this node was told.
        is_hub: whether a peer is a hub; HTTPS_PROXY is for hubs only, since peers of one site are behind it as we are.
    """

    def __init__(self, proxies: Proxies | None = None, is_hub: Callable[[NodeId], bool] = lambda _peer: False) -> None:
        self._proxies = proxies or Proxies()
        self._is_hub = is_hub

    def is_direct(self, peer: NodeId, host: str, port: int) -> bool:
        """Whether no proxy is in between."""
        return self._proxies.route(host, port, is_hub=self._is_hub(peer)) is None

    async def connect(self, peer: NodeId, host: str, port: int) -> trio.abc.Stream:
        """A connection whose first byte will be the peer's.

        Raises:
            ProxyError: the proxy is away, or said no; the message tells its answer.
            OSError: a direct connection failed.
        """
        proxy = self._proxies.route(host, port, is_hub=self._is_hub(peer))
        if proxy is None:
            return await trio.open_tcp_stream(host, port)
        return await open_tunnel(proxy, host, port)


async def open_tunnel(proxy: Proxy, host: str, port: int) -> trio.SocketStream:
    """A connection to ``host:port`` through ``proxy``.

    Raises:
        ProxyError: see :meth:`Egress.connect`.
    """
    handshake = _socks if proxy.scheme == "socks5" else _connect
    try:
        with trio.fail_after(PROXY_TIMEOUT_S):
            stream = await trio.open_tcp_stream(proxy.host, proxy.port)
            try:
                await handshake(stream, proxy, host, port)
            except BaseException:
                await trio.aclose_forcefully(stream)
                raise
            return stream
    except ProxyError as error:
        raise ProxyError(f"proxy {proxy} {error}", code=error.code, hint=error.hint) from None
    except trio.TooSlowError:
        raise ProxyError(f"proxy {proxy} did not answer within {PROXY_TIMEOUT_S:g} s", code="proxy-away") from None
    except (OSError, trio.BrokenResourceError) as error:
        raise ProxyError(f"proxy {proxy} cannot be reached: {error}", code="proxy-away") from error


async def _connect(stream: trio.SocketStream, proxy: Proxy, host: str, port: int) -> None:
    await stream.send_all(tunnel.connect_request(proxy, host, port))
    tunnel.check_connect_reply(await _receive_head(stream))


async def _socks(stream: trio.SocketStream, proxy: Proxy, host: str, port: int) -> None:
    await stream.send_all(tunnel.socks_greeting(proxy))
    if tunnel.wants_credentials(await _receive_exactly(stream, 2), proxy):
        await stream.send_all(tunnel.socks_credentials(proxy))
        tunnel.check_credentials_reply(await _receive_exactly(stream, 2))
    await stream.send_all(tunnel.socks_request(host, port))
    head = await _receive_exactly(stream, tunnel.SOCKS_REPLY_HEAD_BYTES)
    await _receive_exactly(stream, tunnel.socks_reply_rest(head))


async def _receive_head(stream: trio.SocketStream) -> bytes:
    """An HTTP head and not a byte more: a peer that speaks first is right behind it, so look before taking."""
    head = b""
    while len(head) < tunnel.MAX_HEAD_BYTES:
        ahead = await stream.socket.recv(tunnel.MAX_HEAD_BYTES, socket.MSG_PEEK)
        n_head = tunnel.head_bytes(head + ahead)
        head += await _receive_exactly(stream, (len(ahead) or 1) if n_head is None else n_head - len(head))
        if n_head is not None:
            return head
    raise ProxyError("answered without an end", code="proxy-protocol")


async def _receive_exactly(stream: trio.SocketStream, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = await stream.receive_some(n - len(data))
        if not part:
            raise ProxyError("closed the connection instead of answering", code="proxy-away")
        data += part
    return data
