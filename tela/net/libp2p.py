"""The mesh over py-libp2p: Noise over TCP, identify and ping for peers of other kinds, our own Yamux.

py-libp2p keeps the upgrade of a connection and its registry of peers; accepting and dialling are here, for reasons
measured in design/overlay.md 1, and streams are :mod:`tela.net.muxer`'s. With :mod:`tela.net.foreign` and
:mod:`tela.net.host` this is the door to libp2p: every library error is mapped here.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio
from libp2p.abc import ISecureConn
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.basic_host import BasicHost
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL

from tela.errors import PeerError
from tela.identity import KeyPair
from tela.net.addresses import announced_addresses, local_interfaces
from tela.net.bounds import deadline
from tela.net.carriers import bound_endpoint, carry, remote_endpoint, share_port
from tela.net.circuits import Circuits
from tela.net.egress import Egress
from tela.net.endpoints import EVERY_INTERFACE, NOWHERE, Choice, Endpoint, endpoints_of
from tela.net.foreign import BufferedConnection, ForeignConnection, raw_address, records_of
from tela.net.host import make_host
from tela.net.identify import IDENTIFY_PROTOCOL, identify_answer
from tela.net.listening import open_listeners
from tela.net.multiaddrs import Address, Carrier, node_of_addresses, node_of_peer_id, parse_address, peer_id
from tela.net.multistream import Offer
from tela.net.muxer import Connection
from tela.net.streams import MuxedStream
from tela.net.transport import (
    DIAL_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    OPEN_TIMEOUT_S,
    PathKind,
    PathView,
    Stream,
    StreamHandler,
)
from tela.net.websocket import accept_websocket
from tela.observe import log
from tela.record import NodeId, short

HEARTBEAT_S: Final = 5.0
DEAD_AFTER_S: Final = 15.0
"""A peer that sent nothing for three heartbeats is gone, whatever TCP believes."""
DIAL_STAGGER_S: Final = 0.25
"""Head start of each address over the next one (RFC 8305 section 8)."""
MAX_HANDSHAKES_PER_HOST: Final = 128
"""Unfinished inbound handshakes from one IP address: a flood must not starve the others."""
MAX_OPENINGS: Final = 1_024
"""WebSockets being opened: behind a proxy all come from one address."""
_OPENINGS: Final = "websockets"


class _Muxer(MuxerMultistream):
    """Makes our Yamux: the stock muxer ignores the class that is registered for it (design/mux.md 6)."""

    def __init__(self, make_connection: Callable[[ISecureConn, ID], ForeignConnection]) -> None:
        super().__init__({YAMUX_PROTOCOL: ForeignConnection}, int(HANDSHAKE_TIMEOUT_S))
        self._make_connection = make_connection

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> ForeignConnection:
        await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        return self._make_connection(conn, peer_id)


class Libp2pMesh:
    """A :class:`tela.net.transport.Mesh` over py-libp2p. Made by :func:`open_mesh`."""

    def __init__(
        self,
        host: BasicHost,
        key: KeyPair,
        nursery: trio.Nursery,
        heartbeat_s: float,
        dead_after_s: float,
        *,
        egress: Egress,
    ) -> None:
        self._host = host
        self._swarm = host.get_network()
        self._key = key
        self._nursery = nursery
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._egress = egress
        self._addresses: tuple[str, ...] = ()
        self._connections: dict[NodeId, list[Connection]] = {}
        self._handlers: dict[str, StreamHandler] = {IDENTIFY_PROTOCOL: self._identify}
        self._listeners: list[Callable[[NodeId, bool], None]] = []
        self._path_listeners: list[Callable[[NodeId], None]] = []
        self._handshakes: Counter[str] = Counter()
        self._swarm.upgrader.muxer_multistream = _Muxer(self._make_connection)
        self.circuits = Circuits(self)

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
        return {peer: min(each.silence_s for each in those) for peer, those in self._connections.items()}

    def paths(self) -> Mapping[NodeId, PathView]:
        """See Mesh."""
        return {peer: _path(those[0]) for peer, those in self._connections.items()}

    def on_connection(self, listener: Callable[[NodeId, bool], None]) -> None:
        """See Mesh."""
        self._listeners.append(listener)

    def on_path(self, listener: Callable[[NodeId], None]) -> None:
        """See Mesh."""
        self._path_listeners.append(listener)

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """See Mesh."""
        self._handlers[protocol] = handler

    async def open(self, peer: NodeId, protocol: str) -> MuxedStream:
        """See Mesh."""
        if peer not in self._connections:
            raise PeerError(f"no connection to {short(peer)}")
        with deadline(OPEN_TIMEOUT_S, f"opening {protocol} to {short(peer)}"):
            try:
                return await self._connections[peer][0].open(protocol)
            except PeerError as error:
                raise PeerError(f"cannot open {protocol} to {short(peer)}: {error}") from error

    async def dial(self, addresses: Sequence[str]) -> NodeId:
        """See Mesh. DNS names are resolved anew each time; nothing is cached, neither success nor failure."""
        peer = node_of_addresses(addresses)
        if peer not in self._connections:
            with deadline(DIAL_TIMEOUT_S, f"dialling {short(peer)}"):
                muxed = await self._first_to_answer(peer, addresses)
                await self._adopt(muxed, "outbound")
        return peer

    async def dial_relay(self, address: Address) -> None:
        """Connect to the relay in front of ``address``. Raises what :meth:`dial` raises."""
        assert address.relay is not None
        await self.dial([str(address._replace(node=address.relay, relay=None))])

    async def verify(self, address: Address) -> None:
        """Prove by a fresh connection that ``address`` leads to its node; it is closed at once.

        Raises:
            PeerError: it does not; the message says why.
        """
        try:
            muxed = await self._connect(address.node, str(address))
        except Exception as error:
            raise PeerError(str(error) or type(error).__name__) from error
        await muxed.close()

    def observed(self, peer: NodeId) -> Endpoint:
        """The other end of a direct connection with a peer; NOWHERE where there is none."""
        return next((each.remote for each in self._connections.get(peer, []) if each.remote.host), NOWHERE)

    def vantage(self, peer: NodeId) -> Endpoint:
        """Our end of a connection that we made straight to a peer, for more to leave from there; else NOWHERE."""
        return next((each.local for each in self._connections.get(peer, []) if each.local.host), NOWHERE)

    async def take_punched(self, bytes_stream: trio.abc.Stream, peer: NodeId, *, is_client: bool) -> None:
        """Make a connection that both sides opened at once ours; ``is_client``: we take the dialler's part in Noise.

        Raises:
            PeerError: it leads to somebody else, or broke.
        """
        try:
            muxed = await self._upgrade(bytes_stream, peer if is_client else None)
            if muxed.connection.peer != peer:
                await muxed.close()
                raise PeerError(f"it leads to {short(muxed.connection.peer)}")
            muxed.connection.is_punched = True
            await self._adopt(muxed, "outbound" if is_client else "inbound")
        except Exception as error:
            raise PeerError(str(error) or type(error).__name__) from error

    async def _first_to_answer(self, peer: NodeId, addresses: Sequence[str]) -> ForeignConnection:
        answers: list[ForeignConnection] = []
        failures: list[str] = []

        async def attempt(address: str, over: trio.Event) -> None:
            try:
                answers.append(await self._connect(peer, address))
                nursery.cancel_scope.cancel()
            except Exception as error:  # noqa: BLE001 - the wall of handshakes: library code over foreign bytes
                failures.append(f"{address}: {str(error) or type(error).__name__}")
            over.set()

        async with trio.open_nursery() as nursery:
            for address in sorted(addresses, key=_is_circuit):
                over = trio.Event()
                nursery.start_soon(attempt, address, over)
                with trio.move_on_after(DIAL_STAGGER_S):  # nothing is lost: the attempt goes on beside the next
                    await over.wait()
        if not answers:
            raise PeerError(f"no answer from {short(peer)}: {failures[-1]}")
        for late in answers[1:]:
            await late.close()
        return answers[0]

    async def _connect(self, peer: NodeId, address: str) -> ForeignConnection:
        target = parse_address(address)
        if target.relay is not None:
            return await self._upgrade(await self.circuits.connect(target), peer, relay=target.relay)
        bytes_stream = await self._egress.connect(peer, target.host, target.port)
        is_plain = target.carrier is Carrier.TCP and self._egress.is_direct(peer, target.host, target.port)
        remote, local = remote_endpoint(bytes_stream), share_port(bytes_stream) if is_plain else NOWHERE
        muxed = await self._upgrade(await carry(bytes_stream, target), peer)
        muxed.connection.remote, muxed.connection.local = remote, local
        return muxed

    async def _upgrade(
        self, bytes_stream: trio.abc.Stream, peer: NodeId | None, *, relay: NodeId | None = None
    ) -> ForeignConnection:
        """Noise and Yamux over a stream of bytes; ``peer`` is whom we dialled, None where we were dialled."""
        muxed = await self._negotiate(bytes_stream, peer)
        muxed.connection.relay = relay
        return muxed

    async def _negotiate(self, bytes_stream: trio.abc.Stream, peer: NodeId | None) -> ForeignConnection:
        raw = BufferedConnection(bytes_stream, peer is not None)
        upgrader = self._swarm.upgrader
        try:
            if peer is None:
                secured = await upgrader.upgrade_security(raw, False)
                muxed: ForeignConnection = await upgrader.upgrade_connection(secured, secured.get_remote_peer())
                return muxed
            raw.propose(Offer(NOISE_PROTOCOL))
            noise = upgrader.security_multistream.transports[NOISE_PROTOCOL]
            remote = ID.from_base58(peer_id(peer))
            return self._make_connection(await noise.secure_outbound(raw, remote), remote, Offer(YAMUX_PROTOCOL))
        except BaseException:
            await trio.aclose_forcefully(bytes_stream)
            raise

    async def _identify(self, stream: Stream) -> None:
        protocols = {*self._handlers, *self._host.get_mux().handlers}
        with deadline(OPEN_TIMEOUT_S, "answering identify"):
            await stream.send(identify_answer(self.node, map(raw_address, self._addresses), protocols))
            await stream.finish()
            await stream.receive()  # its end: a handler that returns resets the stream

    def _make_connection(self, secured: ISecureConn, remote: ID, offer: Offer | None = None) -> ForeignConnection:
        connection = Connection(
            records_of(secured),
            node_of_peer_id(str(remote)),
            is_client=secured.is_initiator,
            handlers=self._handlers,
            is_foreign=self._host.get_mux().handlers.__contains__,
            heartbeat_s=self._heartbeat_s,
            dead_after_s=self._dead_after_s,
            offer=offer,
        )
        return ForeignConnection(connection, secured, remote)

    async def _accept_tcp(self, tcp: trio.SocketStream) -> None:
        await self.accept(tcp, remote_endpoint(tcp))

    async def _accept_websocket(self, tcp: trio.SocketStream) -> None:
        proxy = remote_endpoint(tcp).host
        if self._handshakes[_OPENINGS] >= MAX_OPENINGS:
            await trio.aclose_forcefully(tcp)
            return
        self._handshakes[_OPENINGS] += 1
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                stream, forwarded_for = await accept_websocket(tcp)
        except Exception as error:  # noqa: BLE001 - the wall
            log.debug("link.down", remote=proxy, reason=f"no websocket: {str(error) or type(error).__name__}")
            await trio.aclose_forcefully(tcp)
            return
        finally:
            self._handshakes[_OPENINGS] -= 1
        # Only a proxy on this host is believed; anybody could write the header.
        is_fronted = ipaddress.ip_address(proxy).is_loopback if proxy else False
        await self.accept(stream, Endpoint(forwarded_for if is_fronted and forwarded_for else proxy, 0))

    async def accept(self, bytes_stream: trio.abc.Stream, remote: Endpoint, *, relay: NodeId | None = None) -> None:
        """Serve an inbound connection from ``remote``, or through ``relay``, until it is over.

        The wall of handshakes: a bad one ends itself only.
        """
        source = f"relay {short(relay)}" if relay else remote.host
        if self._handshakes[source] >= MAX_HANDSHAKES_PER_HOST:
            return
        self._handshakes[source] += 1
        try:
            with trio.fail_after(HANDSHAKE_TIMEOUT_S):
                muxed = await self._upgrade(bytes_stream, None, relay=relay)
                muxed.connection.remote = remote
                await self._adopt(muxed, "inbound")
        except Exception as error:  # noqa: BLE001 - the wall
            log.debug("link.down", remote=source, reason=f"handshake failed: {str(error) or type(error).__name__}")
            return
        finally:
            self._handshakes[source] -= 1
            self._handshakes += Counter()  # drops hosts at zero
        await muxed.event_closed.wait()

    async def _adopt(self, muxed: ForeignConnection, direction: str) -> None:
        """Make the connection ours and the swarm's. Ours first: a stream may come in before add_conn returns."""
        connection = muxed.connection
        peer = connection.peer
        connection.on_closed = lambda: self._forget(connection)
        self._connections.setdefault(peer, []).append(connection)
        if len(self._connections[peer]) == 1:
            self._notify(peer, is_up=True)
        self._rank(peer)
        try:
            registered = await self._swarm.add_conn(muxed, direction)
            if muxed.is_closed:  # the library may have forgotten it before it registered it
                self._swarm.remove_conn(registered)
        except BaseException as error:
            with trio.CancelScope(shield=True):  # short: it closes a socket
                await muxed.close()
            if isinstance(error, BaseLibp2pError):
                raise PeerError(f"connection to {short(peer)} failed: {error}") from error
            raise

    def _forget(self, connection: Connection) -> None:
        remaining = self._connections[connection.peer]
        remaining.remove(connection)
        if not remaining:
            del self._connections[connection.peer]
            self._notify(connection.peer, is_up=False)
            return
        self._rank(connection.peer)

    def _rank(self, peer: NodeId) -> None:
        """Direct connections are used first, and supersede circuits."""
        those = self._connections[peer]
        those.sort(key=lambda each: each.relay is not None)
        n_before = sum(each.is_superseded for each in those)
        for each in those:
            each.is_superseded = each.relay is not None and those[0].relay is None
        if sum(each.is_superseded for each in those) > n_before:
            for listener in self._path_listeners:
                listener(peer)

    def _notify(self, peer: NodeId, *, is_up: bool) -> None:
        for listener in self._listeners:
            listener(peer, is_up)

    async def disconnect(self, peer: NodeId) -> None:
        """See Mesh."""
        for connection in list(self._connections.get(peer, [])):
            connection.close()
        await trio.lowlevel.checkpoint()

    async def listen(self, listen: Sequence[Endpoint], advertise: Sequence[Endpoint], choice: Choice) -> None:
        """Accept connections at each endpoint from now on; see :func:`open_mesh`."""
        bound: list[Endpoint] = []
        for endpoint in listen:
            listeners = await open_listeners(endpoint)
            bound += [bound_endpoint(each, endpoint.carrier) for each in listeners]
            accept = self._accept_tcp if endpoint.carrier is Carrier.TCP else self._accept_websocket
            await self._nursery.start(trio.serve_listeners, accept, listeners)
        self._addresses = announced_addresses(self.node, bound, advertise, local_interfaces(), choice)


def _path(connection: Connection) -> PathView:
    direct = PathKind.PUNCHED if connection.is_punched else PathKind.DIRECT
    kind = direct if connection.relay is None else PathKind.RELAYED
    return PathView(kind, connection.machine.rtt_s, connection.relay, connection.is_dialled)


def _is_circuit(address: str) -> bool:
    return parse_address(address).relay is not None


@asynccontextmanager
async def open_mesh(
    key: KeyPair,
    listen: Sequence[str],
    *,
    advertise: Sequence[str] = (),
    choice: Choice = EVERY_INTERFACE,
    egress: Egress | None = None,
    heartbeat_s: float = HEARTBEAT_S,
    dead_after_s: float = DEAD_AFTER_S,
) -> AsyncIterator[Libp2pMesh]:
    """A mesh for as long as the block runs; afterwards every connection is closed and no task is left.

    Args:
        key: who we are.
        listen: ``HOST:PORT`` or ``ws://HOST:PORT`` each, port 0 for any; empty for an outbound-only node.
        advertise: what to announce instead of what we listen on; ``wss://HOST`` as well.
        choice: of the interfaces to be reached on, where we listen on all.
        egress: how connections are made; directly by default.
        heartbeat_s: pings of each connection are this far apart.
        dead_after_s: a peer that is silent for this long is disconnected.

    Raises:
        ConfigError: an address cannot be listened on.
    """
    host = make_host(key)
    async with host.run(listen_addrs=[]), trio.open_nursery() as nursery:
        mesh = Libp2pMesh(host, key, nursery, heartbeat_s, dead_after_s, egress=egress or Egress())
        await mesh.listen(endpoints_of(listen), endpoints_of(advertise), choice)
        try:
            yield mesh
        finally:
            nursery.cancel_scope.cancel()
