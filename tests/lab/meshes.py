"""Pairs of meshes for tests: one suite runs over memory and over libp2p."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from tela.identity import KeyPair
from tela.net.memory import MemoryNetwork
from tela.net.transport import Mesh, Stream

KINDS = ("memory", "libp2p")


@dataclass
class Pair:
    """``dialer`` listens nowhere and has dialled ``listener``."""

    listener: Mesh
    dialer: Mesh
    listener_key: KeyPair
    dialer_key: KeyPair


@asynccontextmanager
async def two_meshes(kind: str) -> AsyncIterator[Pair]:
    """Two meshes that are not connected yet."""
    one, other = KeyPair.generate(), KeyPair.generate()
    if kind == "memory":
        async with trio.open_nursery() as nursery:
            network = MemoryNetwork(nursery)
            yield Pair(network.mesh(one.public), network.mesh(other.public, is_listening=False), one, other)
            nursery.cancel_scope.cancel()
    else:
        from tela.net.libp2p import open_mesh

        async with open_mesh(one, ["127.0.0.1:0"]) as listener, open_mesh(other, []) as dialer:
            yield Pair(listener, dialer, one, other)


@asynccontextmanager
async def connected_meshes(kind: str) -> AsyncIterator[Pair]:
    """Two meshes with a link."""
    async with two_meshes(kind) as pair:
        await pair.dialer.dial(pair.listener.addresses)
        await wait_until(lambda: pair.dialer.node in pair.listener.peers())
        yield pair


async def wait_until(condition, limit_s: float = 5.0) -> None:
    """Poll until ``condition()`` holds."""
    with trio.fail_after(limit_s):
        while not condition():
            await trio.sleep(0.005)


async def receive_all(stream: Stream) -> bytes:
    """Everything up to the clean end."""
    content = bytearray()
    while data := await stream.receive():
        content += data
    return bytes(content)


async def echo(stream: Stream) -> None:
    """A handler that sends back what it receives."""
    while data := await stream.receive():
        await stream.send(data)
    await stream.finish()
