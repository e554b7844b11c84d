"""The trio shell of :mod:`tela.net.punch`: both sides of an attempt at a direct connection through NATs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import trio

from tela.errors import DeadlineError, PeerError, ProtocolError, RefusedError
from tela.net.bounds import AskLimit, deadline
from tela.net.carriers import connect_from, listen_at
from tela.net.dialback import ask
from tela.net.endpoints import Endpoint
from tela.net.messages import receive_cut
from tela.net.protobuf import MessageCutter
from tela.net.punch import (
    MAX_MESSAGE_BYTES,
    PUNCH_PROTOCOL,
    Kind,
    Message,
    Plan,
    decode_message,
    encode_message,
    targets,
    told_endpoints,
)
from tela.net.transport import Mesh, PathKind, Stream
from tela.observe import log, punches
from tela.record import NodeId, short

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings trio-stubs, which hide trio's own types from mypy

LOOK_INTERVAL_S: Final = 1.0
MAX_TRIES: Final = 3
"""In a row, as the specification has it."""
DIAL_TIMEOUT_S: Final = 1.6
"""Of one try: long enough for a first packet that was lost to be sent again after 1 s."""
REDIAL_S: Final = 0.1
"""After a refusal: the other side was not there yet, and its host or NAT answered for it."""
MAX_CALLERS: Final = 4
"""At the port from which we dial: where nothing filters, the other side's connection comes in there."""
EXCHANGE_TIMEOUT_S: Final = 5.0
MAX_AT_ONCE: Final = 8


class PunchMesh(Mesh, Protocol):
    """A mesh that can be reached from the ports of its own connections."""

    def vantage(self, peer: NodeId) -> Endpoint:
        """Our end of a connection that we made straight to a peer; else NOWHERE."""
        ...

    async def take_punched(self, bytes_stream: trio.abc.Stream, peer: NodeId, *, is_client: bool) -> None:
        """Make a connection that both sides opened at once ours. Raises PeerError where it is no good."""
        ...


class _Vantage(NamedTuple):
    """Where we dial from, and where a hub sees what leaves from there."""

    local: Endpoint
    seen: Endpoint


class Punching:
    """Turns relayed paths into direct ones where NATs allow it; what cannot be stays relayed, with the reason.

    Args:
        mesh: ours.
        is_member: whether to have to do with a peer.
        is_kin: whether a peer is of our provider.
    """

    def __init__(
        self, mesh: PunchMesh, *, is_member: Callable[[NodeId], bool], is_kin: Callable[[NodeId], bool]
    ) -> None:
        self._mesh = mesh
        self._is_member = is_member
        self._is_kin = is_kin
        self._plan = Plan()
        self._seen: dict[NodeId, _Vantage] = {}
        self._limit = AskLimit()
        self._slots = trio.CapacityLimiter(MAX_AT_ONCE)

    @property
    def reasons(self) -> Mapping[NodeId, str]:
        """Why a relayed peer is not reached directly."""
        return self._plan.reasons

    async def serve(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look each second who is relayed, until cancelled."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                relayed = {
                    peer: path.is_dialled
                    for peer, path in self._mesh.paths().items()
                    if path.kind is PathKind.RELAYED and self._is_member(peer)
                }
                for peer in self._plan.next(relayed, trio.current_time()):
                    nursery.start_soon(self._try, peer)
                await trio.sleep(LOOK_INTERVAL_S)

    async def _try(self, peer: NodeId) -> None:
        reason = ""
        async with self._slots:
            for _ in range(MAX_TRIES):
                try:
                    await self._lead(peer)
                except (PeerError, DeadlineError, RefusedError) as error:
                    reason = str(error)
                else:
                    punches.labels("done").inc()
                    return
        punches.labels("failed").inc()
        self._fail(peer, reason)

    def _fail(self, peer: NodeId, reason: str) -> None:
        log.info("punch.fail", peer=short(peer), reason=reason)
        self._plan.failed(peer, reason, trio.current_time())

    async def _lead(self, peer: NodeId) -> None:
        """One try by the side that was called over the relay."""
        vantage = await self._vantage(peer)
        stream = await self._mesh.open(peer, PUNCH_PROTOCOL)
        try:
            with deadline(EXCHANGE_TIMEOUT_S, f"agreeing with {short(peer)} to meet"):
                began_s = trio.current_time()
                await stream.send(encode_message(self._connect_message(peer, vantage)))
                theirs = await _receive(stream, MessageCutter(MAX_MESSAGE_BYTES), Kind.CONNECT)
                rtt_s = trio.current_time() - began_s
                wanted = targets(theirs, *vantage, is_kin=self._is_kin(peer))
                await stream.send(encode_message(Message(Kind.SYNC)))
            await trio.sleep(rtt_s / 2)  # SYNC is there now
            await self._meet(peer, vantage.local, wanted, is_client=True)
        finally:
            stream.reset()

    async def serve_stream(self, stream: Stream) -> None:
        """One try by the side that called over the relay. Serve it to members only."""
        peer = stream.peer
        if not self._limit.may_ask(peer, trio.current_time()):
            return
        try:
            await self._follow(stream)
        except (PeerError, DeadlineError, RefusedError) as error:
            self._fail(peer, str(error))

    async def _follow(self, stream: Stream) -> None:
        peer, cutter = stream.peer, MessageCutter(MAX_MESSAGE_BYTES)
        with deadline(EXCHANGE_TIMEOUT_S, f"agreeing with {short(peer)} to meet"):
            theirs = await _receive(stream, cutter, Kind.CONNECT)
            try:
                vantage = await self._vantage(peer)
            except (PeerError, DeadlineError, RefusedError):
                await stream.send(encode_message(Message(Kind.CONNECT)))  # so that the other side can say why
                await stream.finish()
                raise
            wanted = targets(theirs, *vantage, is_kin=self._is_kin(peer))
            await stream.send(encode_message(self._connect_message(peer, vantage)))
            await _receive(stream, cutter, Kind.SYNC)
        await self._meet(peer, vantage.local, wanted, is_client=False)

    def _connect_message(self, peer: NodeId, vantage: _Vantage) -> Message:
        return Message(Kind.CONNECT, told_endpoints(*vantage, is_kin=self._is_kin(peer)))

    async def _vantage(self, peer: NodeId) -> _Vantage:
        """Where to dial ``peer`` from: the port of our link to the hub between us, which its NAT has mapped already."""
        path = self._mesh.paths().get(peer)
        if path is None or path.relay is None:
            raise PeerError(f"{short(peer)} is not relayed any more")
        hub, local = path.relay, self._mesh.vantage(path.relay)
        if not local.host:
            raise PeerError(f"our link to hub {short(hub)} goes through a proxy")
        if hub not in self._seen or self._seen[hub].local != local:
            _, seen = await ask(self._mesh, hub, ())
            if not seen.port:
                raise PeerError(f"hub {short(hub)} cannot tell at which port it sees us")
            self._seen[hub] = _Vantage(local, seen)
        return self._seen[hub]

    async def _meet(self, peer: NodeId, local: Endpoint, wanted: Sequence[Endpoint], *, is_client: bool) -> None:
        """Dial while the other side does. The client's first connection counts; the server takes what comes.

        Raises:
            PeerError: they did not meet.
        """
        failures: list[str] = []
        n_made = 0

        async def take(tcp: trio.SocketStream) -> None:
            nonlocal n_made
            try:
                await self._mesh.take_punched(tcp, peer, is_client=is_client)
            except PeerError as error:
                failures.append(str(error))
                return
            n_made += 1
            if is_client:
                nursery.cancel_scope.cancel()

        async def dial(target: Endpoint) -> None:
            await take(await _dial(local, target, failures))

        async def listen() -> None:
            try:
                async with await listen_at(local, MAX_CALLERS) as listener:
                    for _ in range(MAX_CALLERS):
                        nursery.start_soon(take, await listener.accept())
            except OSError as error:  # to dial may do
                failures.append(f"cannot listen at {local.host}:{local.port}: {error}")

        with trio.move_on_after(DIAL_TIMEOUT_S):  # lost: nothing, the relay goes on
            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                for target in wanted:
                    nursery.start_soon(dial, target)
        if not n_made:
            tried = ", ".join(f"{each.host}:{each.port}" for each in wanted)
            why = failures[-1] if failures else "its NAT or ours maps each connection anew, or a firewall drops them"
            raise PeerError(f"not met at {tried}: {why}")
        log.info("punch.done", peer=short(peer), n_made=n_made)


async def _dial(local: Endpoint, target: Endpoint, failures: list[str]) -> trio.SocketStream:
    """A connection, tried for as long as the caller has time."""
    while True:
        try:
            return await connect_from(local, target)
        except OSError as error:
            failures.append(error.strerror or str(error))
        await trio.sleep(REDIAL_S)


async def _receive(stream: Stream, cutter: MessageCutter, kind: Kind) -> tuple[Endpoint, ...]:
    """The endpoints of the next message, which must be of ``kind``.

    Raises:
        ProtocolError: it is not, or the peer ended before.
        StreamResetError: the stream broke.
    """
    message = decode_message(await receive_cut(stream, cutter))
    if message.kind is not kind:
        raise ProtocolError(f"{short(stream.peer)} sent {message.kind.name} where {kind.name} is due")
    return message.endpoints
