"""The mesh over py-libp2p: Noise over TCP, Yamux, multistream-select, identify. The only importer of libp2p.

py-libp2p keeps the upgrade of a connection and its streams; accepting, dialling, liveness and the walls are here, for
reasons measured in design/overlay.md 1. Every library error is mapped here, and its loggers are silent below CRITICAL.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Final

import libp2p
import trio
from libp2p.abc import INetStream, ISecureConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_noise_key_pair
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.basic_host import BasicHost
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection import swarm_connection
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_client import MULTISELECT_PROTOCOL_ID
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import FLAG_SYN, TYPE_PING
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL

from tela.errors import ConfigError, PeerError, StreamResetError
from tela.identity import KeyPair
from tela.net.addresses import announced_addresses, local_interfaces
from tela.net.bounds import deadline, serve_stream
from tela.net.libp2p_patch import HEADER, SafeStream, SafeYamux
from tela.net.listening import open_listeners
from tela.net.transport import (
    DIAL_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    OPEN_TIMEOUT_S,
    StreamHandler,
    host_and_port,
    node_of_addresses,
    node_of_peer_id,
    peer_id,
)
from tela.observe import log
from tela.record import NodeId, short

LIBP2P_VERSION: Final = "0.8.1"
"""The patch and the hooks below name internals of this version."""
HEARTBEAT_S: Final = 5.0
DEAD_AFTER_S: Final = 15.0
"""A peer that sent nothing for three heartbeats is gone, whatever TCP believes."""
RECEIVE_BYTES: Final = 64 * 1024
"""Of one read of a socket: a whole Noise message."""
DIAL_STAGGER_S: Final = 0.25
"""Head start of each address over the next one (RFC 8305 section 8)."""
MAX_HANDSHAKES_PER_HOST: Final = 128
"""Unfinished inbound handshakes from one IP address: a flood must not starve the others."""
_UNLIMITED: Final = 1 << 30
"""Turns the swarm's own pruning of connections off; limits are ours."""

_LibraryHandler = Callable[[INetStream], Awaitable[None]]


class Libp2pStream:
    """A :class:`tela.net.transport.Stream` over one Yamux stream."""

    def __init__(self, muxed: SafeStream, peer: NodeId, nursery: trio.Nursery) -> None:
        self._muxed = muxed
        self._peer = peer
        self._nursery = nursery
        self._is_reset = False

    @property
    def peer(self) -> NodeId:
        """The key that the peer proved to hold."""
        return self._peer

    async def send(self, data: bytes) -> None:
        """See Stream. A cancelled call may have sent a part."""
        if self._is_reset:
            raise StreamResetError(f"stream to {short(self._peer)} was reset by us")
        try:
            await self._muxed.write(data)
        except BaseLibp2pError as error:
            raise StreamResetError(f"stream to {short(self._peer)} broke: {error}") from error

    async def receive(self) -> bytes:
        """See Stream. A cancelled call has taken nothing."""
        try:
            data: bytes = b"" if self._is_reset else await self._muxed.read()
        except MuxedStreamEOF:
            data = b""
        except BaseLibp2pError as error:
            raise StreamResetError(f"stream from {short(self._peer)} broke: {error}") from error
        if self._is_reset:
            raise StreamResetError(f"stream from {short(self._peer)} was reset by us")
        return data

    async def finish(self) -> None:
        """See Stream."""
        try:
            await self._muxed.close()
        except BaseLibp2pError as error:
            raise StreamResetError(f"stream to {short(self._peer)} broke: {error}") from error

    def reset(self) -> None:
        """See Stream."""
        if not self._is_reset:
            self._is_reset = True
            self._nursery.start_soon(self._muxed.reset)


class _BufferedConnection(RawConnection):
    """Reads ahead, gives exactly what is asked for, and remembers when the peer was last heard of.

    The library asks for the two bytes of a length and then for a message, takes a message that comes in over a hundred
    pieces for a broken one, and reads a hundred times at the end of the connection.
    """

    def __init__(self, tcp: trio.SocketStream, is_initiator: bool) -> None:
        super().__init__(TrioTCPStream(tcp), is_initiator)
        self._buffer = bytearray()
        self.heard_at = 0.0

    async def read(self, n: int | None = None) -> bytes:
        while len(self._buffer) < (n or 1):
            data = await super().read(RECEIVE_BYTES)
            if not data:
                raise ConnectionClosedError("the peer closed the connection")
            self._buffer += data
            self.heard_at = trio.current_time()
        data = bytes(self._buffer[:n])
        del self._buffer[:n]
        return data


class _SafeMuxer(MuxerMultistream):
    """Makes our Yamux: the stock muxer ignores the class that is registered for it (design/mux.md 6)."""

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> SafeYamux:
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        muxed = SafeYamux(conn, peer_id)
        self._annotate_connection(muxed, conn, protocol)
        return muxed


class Libp2pMesh:
    """A :class:`tela.net.transport.Mesh` over py-libp2p. Made by :func:`open_mesh`."""

    def __init__(
        self, host: BasicHost, key: KeyPair, nursery: trio.Nursery, heartbeat_s: float, dead_after_s: float
    ) -> None:
        self._host = host
        self._swarm = host.get_network()
        self._key = key
        self._nursery = nursery
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._addresses: tuple[str, ...] = ()
        self._connections: dict[NodeId, list[SafeYamux]] = {}
        self._listeners: list[Callable[[NodeId, bool], None]] = []
        self._handshakes: Counter[str] = Counter()

    @property
    def node(self) -> NodeId:
        """Our own key."""
        return self._key.public

    @property
    def addresses(self) -> Sequence[str]:
        """Multiaddrs to announce."""
        return self._addresses

    def peers(self) -> frozenset[NodeId]:
        """Peers with a live connection, admitted or not."""
        return frozenset(self._connections)

    def silence_s(self) -> dict[NodeId, float]:
        """Seconds since each peer was last heard of; with heartbeats answered, below their interval."""
        now = trio.current_time()
        return {peer: now - max(muxed.raw.heard_at for muxed in each) for peer, each in self._connections.items()}

    def on_connection(self, listener: Callable[[NodeId, bool], None]) -> None:
        """See Mesh."""
        self._listeners.append(listener)

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """See Mesh."""

        async def serve(net_stream: INetStream) -> None:
            muxed = net_stream.muxed_stream
            stream = Libp2pStream(muxed, node_of_peer_id(str(muxed.conn.peer_id)), self._nursery)
            await serve_stream(handler, stream, protocol)

        self._host.set_stream_handler(protocol, serve)

    async def open(self, peer: NodeId, protocol: str) -> Libp2pStream:
        """See Mesh."""
        if peer not in self._connections:
            raise PeerError(f"no connection to {short(peer)}")
        with deadline(OPEN_TIMEOUT_S, f"opening {protocol} to {short(peer)}"):
            try:
                muxed = await self._connections[peer][0].open_stream()
            except BaseLibp2pError as error:
                raise PeerError(f"cannot open {protocol} to {short(peer)}: {error}") from error
            stream = Libp2pStream(muxed, peer, self._nursery)
            try:
                await _select_protocol(muxed, protocol)
            except BaseLibp2pError as error:
                stream.reset()
                raise PeerError(f"{short(peer)} does not answer {protocol}: {error}") from error
            except BaseException:
                stream.reset()
                raise
        return stream

    async def dial(self, addresses: Sequence[str]) -> NodeId:
        """See Mesh. DNS names are resolved anew each time; nothing is cached, neither success nor failure."""
        peer = node_of_addresses(addresses)
        if peer not in self._connections:
            with deadline(DIAL_TIMEOUT_S, f"dialling {short(peer)}"):
                muxed = await self._first_to_answer(peer, addresses)
                await self._adopt(muxed, "outbound")
                self._nursery.start_soon(self._watch, peer, muxed)
        return peer

    async def _first_to_answer(self, peer: NodeId, addresses: Sequence[str]) -> SafeYamux:
        answers: list[SafeYamux] = []
        failures: list[str] = []

        async def attempt(address: str, over: trio.Event) -> None:
            try:
                answers.append(await self._connect(peer, address))
                nursery.cancel_scope.cancel()
            except Exception as error:  # noqa: BLE001 - the wall of handshakes: library code over foreign bytes
                failures.append(f"{address}: {str(error) or type(error).__name__}")
            over.set()

        async with trio.open_nursery() as nursery:
            for address in addresses:
                over = trio.Event()
                nursery.start_soon(attempt, address, over)
                with trio.move_on_after(DIAL_STAGGER_S):  # nothing is lost: the attempt goes on beside the next
                    await over.wait()
        if not answers:
            raise PeerError(f"no answer from {short(peer)}: {failures[-1]}")
        for late in answers[1:]:
            await late.close()
        return answers[0]

    async def _connect(self, peer: NodeId, address: str) -> SafeYamux:
        tcp = await trio.open_tcp_stream(*host_and_port(address))
        return await self._upgrade(tcp, peer)

    async def _upgrade(self, tcp: trio.SocketStream, peer: NodeId | None) -> SafeYamux:
        """Noise and Yamux over a TCP connection; ``peer`` is whom we dialled, None where we were dialled."""
        raw = _BufferedConnection(tcp, peer is not None)
        expected = None if peer is None else ID.from_base58(peer_id(peer))
        upgrader = self._swarm.upgrader
        try:
            secured = await upgrader.upgrade_security(raw, peer is not None, expected)
            muxed: SafeYamux = await upgrader.upgrade_connection(secured, secured.get_remote_peer())
            node_of_peer_id(str(muxed.peer_id))
        except BaseException:
            await trio.aclose_forcefully(tcp)
            raise
        muxed.raw = raw
        return muxed

    async def accept(self, tcp: trio.SocketStream) -> None:
        """Serve an inbound TCP connection until it is over. The wall of handshakes: a bad one ends itself only."""
        remote = tcp.socket.getpeername()[0]
        if self._handshakes[remote] >= MAX_HANDSHAKES_PER_HOST:
            return
        self._handshakes[remote] += 1
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                muxed = await self._upgrade(tcp, None)
                peer = await self._adopt(muxed, "inbound")
        except Exception as error:  # noqa: BLE001 - the wall
            log.debug("link.down", remote=remote, reason=f"handshake failed: {str(error) or type(error).__name__}")
            return
        finally:
            self._handshakes[remote] -= 1
            self._handshakes += Counter()  # drops hosts at zero
        await self._watch(peer, muxed)

    async def _adopt(self, muxed: SafeYamux, direction: str) -> NodeId:
        """Make the connection ours and the swarm's. Ours first: a stream may come in before add_conn returns."""
        peer = node_of_peer_id(str(muxed.peer_id))
        muxed.raw.heard_at = trio.current_time()
        self._connections.setdefault(peer, []).append(muxed)
        if len(self._connections[peer]) == 1:
            self._notify(peer, is_up=True)
        try:
            await self._swarm.add_conn(muxed, direction)
        except BaseException as error:
            self._forget(peer, muxed)
            if isinstance(error, BaseLibp2pError):
                raise PeerError(f"connection to {short(peer)} failed: {error}") from error
            raise
        return peer

    async def _watch(self, peer: NodeId, muxed: SafeYamux) -> None:
        """Ping, and close a silent connection; tell the listeners when it is over."""
        try:
            while not muxed.is_closed and trio.current_time() - muxed.raw.heard_at < self._dead_after_s:
                muxed.queue_frame(HEADER.pack(0, TYPE_PING, FLAG_SYN, 0, 0))
                with trio.move_on_after(self._heartbeat_s):  # nothing is lost: closing is asked for again
                    await muxed.event_closed.wait()
        finally:
            self._forget(peer, muxed)
            with trio.CancelScope(shield=True):  # short: it closes a socket
                await muxed.close()

    def _forget(self, peer: NodeId, muxed: SafeYamux) -> None:
        remaining = self._connections.get(peer, [])
        if muxed in remaining:
            remaining.remove(muxed)
            if not remaining:
                del self._connections[peer]
                self._notify(peer, is_up=False)

    def _notify(self, peer: NodeId, *, is_up: bool) -> None:
        for listener in self._listeners:
            listener(peer, is_up)

    async def disconnect(self, peer: NodeId) -> None:
        """See Mesh."""
        for muxed in list(self._connections.get(peer, [])):
            self._forget(peer, muxed)
            self._nursery.start_soon(muxed.close)
        await trio.lowlevel.checkpoint()

    async def listen(self, listen: Sequence[str], advertise: Sequence[tuple[str, int]]) -> None:
        """Accept connections at each ``HOST:PORT`` from now on; see :func:`open_mesh`."""
        listeners = [listener for text in listen for listener in await open_listeners(text)]
        bound = [listener.socket.getsockname()[:2] for listener in listeners]
        self._addresses = announced_addresses(self.node, bound, advertise, local_interfaces())
        if listeners:
            await self._nursery.start(trio.serve_listeners, self.accept, listeners)


async def _select_protocol(muxed: SafeStream, protocol: str) -> None:
    """Multistream-select with both our lines sent at once: one round trip instead of two."""
    negotiation = MultiselectCommunicator(muxed)
    for line in (MULTISELECT_PROTOCOL_ID, protocol):
        await negotiation.write(line)
    for line in (MULTISELECT_PROTOCOL_ID, protocol):
        if await negotiation.read() != line:
            raise PeerError(f"the peer does not speak {protocol} to us")


def _make_host(key: KeyPair) -> BasicHost:
    """A host that offers Noise and our Yamux, and does nothing on its own account."""
    if version("libp2p") != LIBP2P_VERSION:
        raise ConfigError(
            f"libp2p {version('libp2p')} is installed, tela needs {LIBP2P_VERSION}", hint="install tela anew"
        )
    _silence(logging.getLogger("libp2p"))
    swarm_connection.logging = logging.getLogger("libp2p.network")  # it writes to the root logger
    keys = create_new_key_pair(key.seed)
    noise = NoiseTransport(keys, noise_privkey=create_new_noise_key_pair().private_key)
    muxers = {YAMUX_PROTOCOL: SafeYamux}
    host = libp2p.new_host(
        key_pair=keys,
        sec_opt={NOISE_PROTOCOL: noise},
        muxer_opt=muxers,
        connection_config=ConnectionConfig(
            min_connections=0, low_watermark=0, high_watermark=_UNLIMITED, max_connections=_UNLIMITED
        ),
        disable_identify_address_discovery=True,
    )
    swarm = host.get_network()
    swarm.auto_connector.maybe_connect = _dial_nobody
    swarm.set_resource_manager(None)  # it denies a peer that reconnects 50 times; limits are ours
    swarm.notifees.clear()  # no identify by ourselves: a failing one is a failing system task. We answer others'
    swarm.upgrader.muxer_multistream = _SafeMuxer(muxers, int(HANDSHAKE_TIMEOUT_S))
    swarm.set_stream_handler(_walled(swarm.common_stream_handler))
    return host


def _silence(logger: logging.Logger) -> None:
    logger.setLevel(logging.CRITICAL)
    logger.addHandler(logging.NullHandler())
    logger.propagate = False  # some of its loggers set a level of their own


async def _dial_nobody() -> None:
    """Stands in for the swarm's auto-connector: whom to dial is decided above the mesh."""


def _walled(handle: _LibraryHandler) -> _LibraryHandler:
    """The wall of the library's own handlers: an exception out of one would end its connection."""

    async def serve(net_stream: INetStream) -> None:
        try:
            await handle(net_stream)
        except Exception as error:  # noqa: BLE001 - the wall
            log.debug("stream.end", reason=repr(error))
            await net_stream.muxed_stream.reset()

    return serve


@asynccontextmanager
async def open_mesh(
    key: KeyPair,
    listen: Sequence[str],
    *,
    advertise: Sequence[tuple[str, int]] = (),
    heartbeat_s: float = HEARTBEAT_S,
    dead_after_s: float = DEAD_AFTER_S,
) -> AsyncIterator[Libp2pMesh]:
    """A mesh for as long as the block runs; afterwards every connection is closed and no task is left.

    Args:
        key: who we are.
        listen: ``HOST:PORT`` each, port 0 for any; empty for an outbound-only node.
        advertise: (host, port) pairs to announce instead of what we listen on.
        heartbeat_s: pings of each connection are this far apart.
        dead_after_s: a peer that is silent for this long is disconnected.

    Raises:
        ConfigError: an address cannot be listened on.
    """
    host = _make_host(key)
    async with host.run(listen_addrs=[]), trio.open_nursery() as nursery:
        mesh = Libp2pMesh(host, key, nursery, heartbeat_s, dead_after_s)
        await mesh.listen(listen, advertise)
        try:
            yield mesh
        finally:
            nursery.cancel_scope.cancel()
