"""Pairs of meshes for tests: one suite runs over memory, over libp2p and over a circuit through a relay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from tela.identity import KeyPair
from tela.net.circuit import HOP_PROTOCOL, STOP_PROTOCOL
from tela.net.circuits import circuit_addresses
from tela.net.libp2p import Libp2pMesh, open_mesh
from tela.net.memory import MemoryNetwork
from tela.net.multiaddrs import parse_address
from tela.net.relay import Relay
from tela.net.transport import Mesh, Stream
from tests.lab.tcp_mesh import open_tcp_mesh

KINDS = ("memory", "libp2p", "websocket")
STREAM_KINDS = (*KINDS, "tcp", "circuit")
"""Those, our muxer on bare sockets, and circuits, where the relay is one more peer."""


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
    elif kind == "tcp":
        async with (
            open_tcp_mesh(one.public, is_listening=True) as listener,
            open_tcp_mesh(other.public, is_listening=False) as dialer,
        ):
            yield Pair(listener, dialer, one, other)
    elif kind == "circuit":
        async with open_relayed() as relayed:
            yield Pair(relayed.called, relayed.caller, relayed.called_key, relayed.caller_key)
    else:
        listen = "ws://127.0.0.1:0" if kind == "websocket" else "127.0.0.1:0"
        async with open_mesh(one, [listen]) as listener, open_mesh(other, []) as dialer:
            yield Pair(listener, dialer, one, other)


@dataclass
class Relayed:
    """A relay, a node that listens nowhere and holds a reservation there, and one that may call it."""

    relay: Libp2pMesh
    hops: Relay
    called: CalledMesh
    caller: Libp2pMesh
    called_key: KeyPair
    caller_key: KeyPair


class CalledMesh(Libp2pMesh):
    """Announces its circuits, as a node does in its card."""

    relay_addresses: tuple[str, ...] = ()

    @property
    def addresses(self) -> Sequence[str]:
        relays = {relay: tuple(map(parse_address, self.relay_addresses)) for relay in self.circuits.reserved}
        return circuit_addresses(self.node, relays)


@asynccontextmanager
async def open_relayed() -> AsyncIterator[Relayed]:
    """Three meshes, of which the relay serves everybody; the called one has reserved, the caller has dialled nobody."""
    keys = KeyPair.generate(), KeyPair.generate()
    async with (
        open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as relay,
        open_mesh(keys[0], []) as called,
        open_mesh(keys[1], []) as caller,
        trio.open_nursery() as nursery,
    ):
        called.__class__ = CalledMesh
        assert isinstance(called, CalledMesh)
        called.relay_addresses = tuple(relay.addresses)
        hops = Relay(relay, now=lambda: 0)
        relay.handle(HOP_PROTOCOL, hops.serve_hop)
        called.handle(STOP_PROTOCOL, called.circuits.serve_stop)
        await called.dial(relay.addresses)
        await nursery.start(called.circuits.hold, relay.node, lambda: 0)
        yield Relayed(relay, hops, called, caller, *keys)
        nursery.cancel_scope.cancel()


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
