"""A mesh over plain TCP: our muxer on sockets, without Noise and without py-libp2p. For the conformance suite alone.

What fails here and not over libp2p is the muxer's; what fails there and not here is the library's or the encryption's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import trio

from tela.errors import PeerError
from tela.net.bounds import deadline
from tela.net.multiaddrs import address_of, node_of_addresses, parse_address
from tela.net.muxer import Connection
from tela.net.records import NoiseRecords, NoiseSession
from tela.net.streams import MuxedStream
from tela.net.transport import DIAL_TIMEOUT_S, OPEN_TIMEOUT_S, PathKind, PathView, StreamHandler
from tela.record import NODE_ID_BYTES, NodeId, short

HEARTBEAT_S, DEAD_AFTER_S = 5.0, 15.0


def in_the_clear(_nonce: bytes, data: bytes | memoryview, _associated: None) -> bytes:
    return bytes(data)


class TcpMesh:
    """Each side tells its key first and is believed."""

    def __init__(self, node: NodeId, nursery: trio.Nursery) -> None:
        self.node = node
        self.addresses: tuple[str, ...] = ()
        self._nursery = nursery
        self._connections: dict[NodeId, Connection] = {}
        self._handlers: dict[str, StreamHandler] = {}
        self._listeners: list[Callable[[NodeId, bool], None]] = []

    async def listen(self) -> None:
        listeners = await self._nursery.start(trio.serve_tcp, self._serve, 0)
        self.addresses = (str(address_of(self.node, "127.0.0.1", listeners[0].socket.getsockname()[1])),)

    async def dial(self, addresses: Sequence[str]) -> NodeId:
        peer = node_of_addresses(addresses)
        if peer in self._connections:
            return peer
        reason = ""
        with deadline(DIAL_TIMEOUT_S, f"dialling {short(peer)}"):
            for target in map(parse_address, addresses):
                try:
                    stream = await trio.open_tcp_stream(target.host, target.port)
                    connection = await self._connect(stream, is_client=True)
                except OSError as error:
                    reason = str(error)
                    continue
                if connection.peer == peer:
                    self._nursery.start_soon(self._run, connection)
                    await connection.started.wait()
                    return peer
                await connection.aclose()
                reason = "somebody else is there"
        raise PeerError(f"no answer from {short(peer)}: {reason}")

    async def _serve(self, stream: trio.SocketStream) -> None:
        await self._run(await self._connect(stream, is_client=False))

    async def _connect(self, stream: trio.SocketStream, *, is_client: bool) -> Connection:
        await stream.send_all(self.node)
        peer = b""
        while len(peer) < NODE_ID_BYTES:
            peer += await stream.receive_some(NODE_ID_BYTES - len(peer))
        session = NoiseSession(
            encrypt=in_the_clear, n_encrypted=0, decrypt=in_the_clear, n_decrypted=0, ciphertext=b"", plaintext=b""
        )
        return Connection(
            NoiseRecords(stream, session),
            NodeId(peer),
            is_client=is_client,
            handlers=self._handlers,
            is_foreign=lambda _protocol: False,
            heartbeat_s=HEARTBEAT_S,
            dead_after_s=DEAD_AFTER_S,
        )

    async def _run(self, connection: Connection) -> None:
        self._connections[connection.peer] = connection
        connection.on_closed = lambda: self._forget(connection.peer)
        self._notify(connection.peer, is_up=True)
        await connection.run()

    def _forget(self, peer: NodeId) -> None:
        del self._connections[peer]
        self._notify(peer, is_up=False)

    def _notify(self, peer: NodeId, *, is_up: bool) -> None:
        for listener in self._listeners:
            listener(peer, is_up)

    async def open(self, peer: NodeId, protocol: str) -> MuxedStream:
        if peer not in self._connections:
            raise PeerError(f"no connection to {short(peer)}")
        with deadline(OPEN_TIMEOUT_S, f"opening {protocol}"):
            return await self._connections[peer].open(protocol)

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        self._handlers[protocol] = handler

    def peers(self) -> frozenset[NodeId]:
        return frozenset(self._connections)

    def paths(self) -> Mapping[NodeId, PathView]:
        return dict.fromkeys(self._connections, PathView(PathKind.DIRECT))

    async def disconnect(self, peer: NodeId) -> None:
        if peer in self._connections:
            self._connections[peer].close()
        await trio.lowlevel.checkpoint()

    def on_connection(self, listener: Callable[[NodeId, bool], None]) -> None:
        self._listeners.append(listener)

    def on_path(self, listener: Callable[[NodeId], None]) -> None:
        """One connection to a peer: never a better one."""


@asynccontextmanager
async def open_tcp_mesh(node: NodeId, *, is_listening: bool) -> AsyncIterator[TcpMesh]:
    async with trio.open_nursery() as nursery:
        mesh = TcpMesh(node, nursery)
        if is_listening:
            await mesh.listen()
        yield mesh
        nursery.cancel_scope.cancel()
