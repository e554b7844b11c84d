"""A tiny proxy on loopback for tests: HTTP CONNECT and SOCKS5 without rules, or one that says a script and hangs up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import trio


class FakeProxy:
    """Tunnels every target to 127.0.0.1 at the asked port, and remembers who was asked for."""

    def __init__(self, script: bytes | None) -> None:
        self.script = script  # sent instead of any tunnel
        self.port = 0
        self.targets: list[str] = []
        self.heads: list[bytes] = []

    async def serve(self, client: trio.SocketStream) -> None:
        async with client:
            first = await client.receive_some()
            if self.script is not None:
                await client.send_all(self.script)
                if not self.script:
                    await client.receive_some()  # silent for as long as it is asked
                return
            if first[0] == 5:
                await client.send_all(b"\5\0")
                request = await client.receive_some()
                host, port = request[5:-2].decode(), int.from_bytes(request[-2:], "big")
                answer = b"\5\0\0\1\0\0\0\0\0\0"
            else:
                self.heads.append(first)
                host, _, text = first.split()[1].decode().rpartition(":")
                port, answer = int(text), b"HTTP/1.1 200 OK\r\nVia: fake\r\n\r\n"
            self.targets.append(host)
            async with await trio.open_tcp_stream("127.0.0.1", port) as target, trio.open_nursery() as nursery:
                spoken = await target.receive_some()  # what the target says first comes in one piece with our answer
                await client.send_all(answer + spoken)
                nursery.start_soon(_copy, client, target)
                await _copy(target, client)
                nursery.cancel_scope.cancel()


async def _copy(source: trio.SocketStream, sink: trio.SocketStream) -> None:
    try:
        while data := await source.receive_some():
            await sink.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass


@asynccontextmanager
async def open_fake_proxy(script: bytes | None = None) -> AsyncIterator[FakeProxy]:
    """A proxy for as long as the block runs; one with a ``script`` sends it and hangs up, an
    empty one never answers."""
    proxy = FakeProxy(script)
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, proxy.serve, 0, host="127.0.0.1"))
        proxy.port = listener.socket.getsockname()[1]
        yield proxy
        nursery.cancel_scope.cancel()
