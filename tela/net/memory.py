"""A mesh in memory, for tests and simulated shells: behaves as :mod:`tela.net.libp2p` does, without sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio

from tela.errors import PeerError, StreamResetError
from tela.net.bounds import serve_stream
from tela.net.multiaddrs import node_of_addresses, peer_id
from tela.net.transport import PathKind, PathView, StreamHandler
from tela.record import NodeId, short

WINDOW_BYTES: Final = 256 * 1024
"""What a writer may be ahead of its reader."""


class _Pipe:
    """One direction of a stream."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._changed = trio.Event()
        self._is_finished = False
        self._is_broken = False

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        view = memoryview(data)
        while view:
            if self._is_broken or self._is_finished:
                raise StreamResetError("the stream is closed for sending")
            room = WINDOW_BYTES - len(self._buffer)
            if room > 0:
                self._buffer += view[:room]
                view = view[room:]
                self._wake()
            else:
                await self._changed.wait()

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self._buffer:
            if self._is_finished:
                return b""
            if self._is_broken:
                raise StreamResetError("the stream broke")
            await self._changed.wait()
        data = bytes(self._buffer)
        self._buffer.clear()
        self._wake()
        return data

    def finish(self) -> None:
        self._is_finished = True
        self._wake()

    def abort(self, *, keep: bool) -> None:
        """Break the direction. What the reader has not taken is kept for it, unless it is the reader who breaks."""
        if not keep:
            self._buffer.clear()
            self._is_finished = False
        self._is_broken = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class MemoryStream:
    """A :class:`tela.net.transport.Stream`."""

    def __init__(self, peer: NodeId, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._peer = peer
        self._incoming = incoming
        self._outgoing = outgoing

    @property
    def peer(self) -> NodeId:
        """The node at the other end."""
        return self._peer

    @property
    def is_superseded(self) -> bool:
        """See Stream."""
        return False

    async def send(self, data: bytes) -> None:
        """See Stream."""
        await self._outgoing.send(data)

    async def receive(self) -> bytes:
        """See Stream."""
        return await self._incoming.receive()

    async def finish(self) -> None:
        """See Stream."""
        await trio.lowlevel.checkpoint()
        self._outgoing.finish()

    def reset(self) -> None:
        """See Stream."""
        self._incoming.abort(keep=False)
        self._outgoing.abort(keep=True)

    def cut(self) -> None:
        """The connection went away under the stream."""
        self._incoming.abort(keep=True)
        self._outgoing.abort(keep=True)


class MemoryMesh:
    """A :class:`tela.net.transport.Mesh`. Made by :meth:`MemoryNetwork.mesh`."""

    def __init__(self, network: MemoryNetwork, node: NodeId, addresses: tuple[str, ...]) -> None:
        self._network = network
        self._node = node
        self._addresses = addresses
        self._streams: dict[NodeId, list[MemoryStream]] = {}
        self._handlers: dict[str, StreamHandler] = {}
        self._listeners: list[Callable[[NodeId, bool], None]] = []

    @property
    def node(self) -> NodeId:
        """Our own key."""
        return self._node

    @property
    def addresses(self) -> Sequence[str]:
        """One made-up multiaddr where the mesh listens."""
        return self._addresses

    async def dial(self, addresses: Sequence[str]) -> NodeId:
        """See Mesh."""
        await trio.lowlevel.checkpoint()
        peer = node_of_addresses(addresses)
        if peer not in self._streams:
            remote = self._network.reach(self._node, peer, addresses)
            self.connect(peer)
            remote.connect(self._node)
        return peer

    async def open(self, peer: NodeId, protocol: str) -> MemoryStream:
        """See Mesh."""
        await trio.lowlevel.checkpoint()
        if peer not in self._streams:
            raise PeerError(f"no connection to {short(peer)}")
        there, back = _Pipe(), _Pipe()
        ours, theirs = MemoryStream(peer, back, there), MemoryStream(self._node, there, back)
        self._network.serve(peer, theirs, protocol)
        self._streams[peer].append(ours)
        return ours

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """See Mesh."""
        self._handlers[protocol] = handler

    def handler(self, protocol: str) -> StreamHandler | None:
        """Who serves ``protocol`` here."""
        return self._handlers.get(protocol)

    def peers(self) -> frozenset[NodeId]:
        """Peers with a live connection."""
        return frozenset(self._streams)

    def paths(self) -> Mapping[NodeId, PathView]:
        """See Mesh."""
        return dict.fromkeys(self._streams, PathView(PathKind.DIRECT))

    async def disconnect(self, peer: NodeId) -> None:
        """See Mesh."""
        await trio.lowlevel.checkpoint()
        self._network.drop(self._node, peer)

    def on_connection(self, listener: Callable[[NodeId, bool], None]) -> None:
        """See Mesh."""
        self._listeners.append(listener)

    def on_path(self, listener: Callable[[NodeId], None]) -> None:
        """Nobody is told: here is one connection to a peer, and never a better one."""

    def connect(self, peer: NodeId) -> None:
        """The connection to ``peer`` is up."""
        self._streams[peer] = []
        for listener in self._listeners:
            listener(peer, True)

    def lose(self, peer: NodeId) -> None:
        """The connection to ``peer`` is gone."""
        if peer not in self._streams:
            return
        for stream in self._streams.pop(peer):
            stream.cut()
        for listener in self._listeners:
            listener(peer, False)


class MemoryNetwork:
    """Meshes that reach each other, and cuts between them. ``nursery`` runs their handlers."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._meshes: dict[NodeId, MemoryMesh] = {}
        self._cuts: set[frozenset[NodeId]] = set()

    def mesh(self, node: NodeId, *, is_listening: bool = True) -> MemoryMesh:
        """A new node; one that had the same key before is gone, as after a restart."""
        if node in self._meshes:
            self.remove(node)
        address = f"/ip4/127.0.0.1/tcp/{len(self._meshes) + 1}/p2p/{peer_id(node)}"
        self._meshes[node] = MemoryMesh(self, node, (address,) if is_listening else ())
        return self._meshes[node]

    def remove(self, node: NodeId) -> None:
        """Kill a node: its peers see their connections break."""
        for peer in self._meshes[node].peers():
            self.drop(node, peer)
        del self._meshes[node]

    def cut(self, one: NodeId, other: NodeId) -> None:
        """Break the connection between two nodes and let no new one through."""
        self._cuts.add(frozenset({one, other}))
        self.drop(one, other)

    def heal(self, one: NodeId, other: NodeId) -> None:
        """Undo :meth:`cut`."""
        self._cuts.discard(frozenset({one, other}))

    def reach(self, node: NodeId, peer: NodeId, addresses: Sequence[str]) -> MemoryMesh:
        """The mesh that listens at one of ``addresses``. Raises PeerError where none does."""
        remote = self._meshes.get(peer)
        is_cut = frozenset({node, peer}) in self._cuts
        if remote is None or is_cut or not set(addresses) & set(remote.addresses):
            raise PeerError(f"no answer from {short(peer)}: {addresses[-1]}")
        return remote

    def serve(self, node: NodeId, stream: MemoryStream, protocol: str) -> None:
        """Start ``node``'s handler on its end of a new stream. Raises PeerError where it has none."""
        handler = self._meshes[node].handler(protocol)
        if handler is None:
            raise PeerError(f"{short(node)} does not answer {protocol}")
        self._nursery.start_soon(serve_stream, handler, stream, protocol)

    def drop(self, one: NodeId, other: NodeId) -> None:
        """Close the connection between two nodes, if there is one."""
        for node, peer in ((one, other), (other, one)):
            if node in self._meshes:
                self._meshes[node].lose(peer)
