"""A TCP proxy on loopback that can go silent (a black hole) or drop its connections (a dead host)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio


class Proxy:
    """Forwards to ``port`` until told otherwise."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._is_silent = False
        self._streams: list[trio.SocketStream] = []
        self.port = 0

    def go_silent(self) -> None:
        """Swallow every byte from now on; the connections stay open."""
        self._is_silent = True

    async def drop(self) -> None:
        """Close every connection, as the kernel of a killed process does."""
        for stream in self._streams:
            await trio.aclose_forcefully(stream)

    async def serve_connection(self, inbound: trio.SocketStream) -> None:
        outbound = await trio.open_tcp_stream("127.0.0.1", self._target)
        self._streams += [inbound, outbound]
        async with outbound, trio.open_nursery() as nursery:
            nursery.start_soon(self._forward, inbound, outbound)
            nursery.start_soon(self._forward, outbound, inbound)

    async def _forward(self, source: trio.SocketStream, sink: trio.SocketStream) -> None:
        try:
            while data := await source.receive_some():
                if not self._is_silent:
                    await sink.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass


@asynccontextmanager
async def open_proxy(port: int) -> AsyncIterator[Proxy]:
    """A proxy in front of 127.0.0.1:``port``."""
    proxy = Proxy(port)
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, proxy.serve_connection, 0, host="127.0.0.1"))
        proxy.port = listener.socket.getsockname()[1]
        yield proxy
        nursery.cancel_scope.cancel()
