"""The trio shell of the gossip core: streams in and out, ticks, logs, metrics. It decides nothing.

One task touches the core. Everybody else hands it events: link tasks through a bounded channel, which slows a peer that
sends faster than we merge; our own publish and suspect calls through a mailbox where the newest replaces the older.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import trio

from tela.crdt.gmap import GossipMap, Outcome, Verifier
from tela.crdt.registry import Change, Member, Registry, Snapshot
from tela.errors import StreamResetError, TelaError
from tela.gossip.changes import MAX_CHANGES, explain
from tela.gossip.core import TICK_S, GossipCore, Signer
from tela.gossip.events import (
    Changed,
    Close,
    Effect,
    Event,
    Farewell,
    FrameReceived,
    Leave,
    LinkDown,
    LinkId,
    LinkUp,
    Publish,
    Received,
    RevocationsTaken,
    Revoke,
    Send,
    Sent,
    SessionTaken,
    Suspect,
    Synced,
    Tick,
    Voted,
)
from tela.gossip.frames import FrameCutter
from tela.identity import (
    KeyPair,
    check_certificate,
    is_envelope_genuine,
    is_vote_genuine,
    sign_envelope,
    sign_vote,
)
from tela.net.transport import Mesh, Stream
from tela.observe import gossip_records, gossip_sent_bytes, log, members
from tela.record import NO_CATALOG, Card, Catalog, NodeId, SessionId, SessionState, SwarmId, short
from tela.revocation import Revocations
from tela.views import ChangeView
from tela.wire import GOSSIP_PROTOCOL

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings trio-stubs, which hide trio's own types from mypy

EVENTS_MAX: Final = 64
"""Events waiting for the core; link tasks wait behind it, so it costs at most 64 frames of 64 KiB."""
WRITE_TIMEOUT_S: Final = 5.0
"""A peer that does not take one frame in this time is closed: it comes back and compares everything."""
REOPEN_S: Final = (0.5, 1.5)
"""Before a gossip stream is opened anew on a connection that is still up, jittered."""


class _Port:
    """The shell's end of one link."""

    def __init__(self, stream: Stream, *, is_ours: bool) -> None:
        self.stream = stream
        self.is_ours = is_ours
        self.scope = trio.CancelScope()
        # One frame is enough: the core waits for Sent before the next.
        self.outbox, self.frames = trio.open_memory_channel[bytes](1)


class Gossip:
    """A node's registry replica and the gossip that keeps it."""

    def __init__(
        self,
        mesh: Mesh,
        key: KeyPair,
        swarm: SwarmId,
        ca: bytes,
        *,
        now: Callable[[], float],
        rng: random.Random,
        on_change: Callable[[Snapshot], None],
        on_revocations: Callable[[Revocations], None],
    ) -> None:
        verifier = Verifier(
            is_envelope_genuine=lambda envelope: is_envelope_genuine(swarm, envelope),
            is_vote_genuine=lambda vote: is_vote_genuine(swarm, vote),
            check_certificate=lambda node, certificate, unix_s: check_certificate(
                certificate, node=node, swarm=swarm, ca=ca, now=unix_s
            ),
            ca=NodeId(ca),
        )
        signer = Signer(lambda envelope: sign_envelope(key, swarm, envelope), lambda vote: sign_vote(key, swarm, vote))
        self._mesh = mesh
        self._unix_now = now
        self._rng = rng
        self._on_change = on_change
        self._on_revocations = on_revocations
        self._registry = Registry()
        self._core = GossipCore(key.public, verifier, signer, now=trio.current_time(), unix_s=now())
        self._ports: dict[LinkId, _Port] = {}
        self._link_ids = map(LinkId, itertools.count(1))
        self._send_event, self._events = trio.open_memory_channel[Event | None](EVENTS_MAX)
        self._mailbox: dict[object, Event] = {}
        self._synced = trio.Event()
        self._left = trio.Event()
        self._n_farewells = 0
        self._changes: deque[ChangeView] = deque(maxlen=MAX_CHANGES)
        self._source = ""  # who told us what is being handled
        mesh.on_path(self._move)

    @property
    def map(self) -> GossipMap:
        """The replica itself: for reading."""
        return self._core.map

    @property
    def changes(self) -> tuple[ChangeView, ...]:
        """The last changes of what the registry shows, oldest first."""
        return tuple(self._changes)

    @property
    def snapshot(self) -> Snapshot:
        """The registry as of now."""
        return self._registry.snapshot

    @property
    def doubted(self) -> frozenset[NodeId]:
        """Peers whose answer is overdue on our own link."""
        return self._core.doubted

    @property
    def session(self) -> SessionId:
        """Our present session; 0 before the first record is out."""
        return self._core.author.session

    async def serve(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the core until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tick)
            task_status.started()
            async for event in self._events:
                if event is not None:
                    self._handle(event)
                while self._mailbox:
                    self._handle(self._mailbox.pop(next(iter(self._mailbox))))

    async def handler(self, stream: Stream) -> None:
        """Serve an inbound ``/tela/gossip/1`` stream until it ends."""
        await self._serve_link(stream, is_ours=False)

    async def link(self, peer: NodeId) -> None:
        """Keep a gossip stream to ``peer`` for as long as its connection is up."""
        while peer in self._mesh.peers():
            if peer not in self._core.peers:
                await self._open(peer)
            await trio.sleep(self._rng.uniform(*REOPEN_S))

    def _move(self, peer: NodeId) -> None:
        """Streams of ours begin anew where there is a better connection; the peer does the same with its own."""
        for port in self._ports.values():
            if port.stream.peer == peer and port.is_ours:
                port.scope.cancel()

    async def _open(self, peer: NodeId) -> None:
        try:
            stream = await self._mesh.open(peer, GOSSIP_PROTOCOL)
        except TelaError as error:
            log.debug("link.retry", peer=short(peer), reason=str(error))
        else:
            await self._serve_link(stream, is_ours=True)

    def publish(self, state: SessionState, card: Card, catalog: Catalog = NO_CATALOG) -> None:
        """Say this of ourselves, under the next version."""
        self._post("time", Tick(self._unix_now()))  # it may be another one since the last tick
        self._post("publish", Publish(state, card, catalog))

    def revoke(self, raw: bytes) -> None:
        """Take in and spread a revocation list; one that the CA did not sign, or an old one, changes nothing."""
        self._post(("revoke", raw), Revoke(raw))

    def suspect(self, peer: NodeId) -> None:
        """The data plane saw ``peer`` fail."""
        self._post(("suspect", peer), Suspect(peer))

    async def leave(self, timeout_s: float) -> int:
        """Publish LEFT and wait until two peers (all, if fewer) have it or the time is up; returns how many have it."""
        self._post("leave", Leave())
        with trio.move_on_after(timeout_s):  # lost: peers that have not answered learn it from others, or suspect us
            await self._left.wait()
        return self._n_farewells

    async def wait_synced(self, timeout_s: float) -> bool:
        """Wait until we have all that some peer had; False where the time was up first."""
        with trio.move_on_after(timeout_s):  # lost: nothing, the caller goes on with what it has
            await self._synced.wait()
        return self._synced.is_set()

    # -- tasks ------------------------------------------------------------------------------------------------------

    def _post(self, slot: object, event: Event) -> None:
        self._mailbox[slot] = event
        try:
            self._send_event.send_nowait(None)
        except trio.WouldBlock:
            pass  # the core has events to take; it empties the mailbox after each

    async def _tick(self) -> None:
        while True:
            await self._send_event.send(Tick(self._unix_now()))
            await trio.sleep(TICK_S)

    async def _serve_link(self, stream: Stream, *, is_ours: bool) -> None:
        link, port = next(self._link_ids), _Port(stream, is_ours=is_ours)
        self._ports[link] = port
        try:
            with port.scope:
                # Admission, which came before, may have put our clock right.
                await self._send_event.send(Tick(self._unix_now()))
                await self._send_event.send(LinkUp(link, stream.peer, is_ours))
                await self._run_link(link, port)
        finally:
            stream.reset()
            del self._ports[link]
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
                await self._send_event.send(LinkDown(link))

    async def _run_link(self, link: LinkId, port: _Port) -> None:
        """The wall of a link: what its peer does wrong ends here."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, link, port)
                await self._read(link, port.stream)
                nursery.cancel_scope.cancel()
        except* TelaError as errors:
            reasons = sorted(str(error) for error in errors.exceptions)
            log.debug("link.down", peer=short(port.stream.peer), reason=reasons[0])

    async def _read(self, link: LinkId, stream: Stream) -> None:
        cutter = FrameCutter()
        while data := await stream.receive():
            for payload in cutter.feed(data):
                await self._send_event.send(FrameReceived(link, payload))

    async def _write(self, link: LinkId, port: _Port) -> None:
        async for data in port.frames:
            try:
                with trio.fail_after(WRITE_TIMEOUT_S):
                    await port.stream.send(data)
            except trio.TooSlowError:
                raise StreamResetError(f"the peer took no frame for {WRITE_TIMEOUT_S} s") from None
            gossip_sent_bytes.inc(len(data))
            await self._send_event.send(Sent(link))

    # -- effects ----------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        port = self._ports.get(event.link) if isinstance(event, FrameReceived) else None
        self._source = short(port.stream.peer) if port else ""
        for effect in self._core.handle(event, trio.current_time()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect)
            case Close():
                self._close(effect)
            case Changed():
                self._show(effect)
            case Synced():
                self._synced.set()
            case RevocationsTaken():
                self._on_revocations(effect.revocations)
            case Farewell():
                self._n_farewells = effect.n_acks
                if effect.is_enough:
                    self._left.set()
            case Received() | Voted() | SessionTaken():
                _tell(effect)

    def _send(self, effect: Send) -> None:
        port = self._ports.get(effect.link)
        if port is not None:
            port.outbox.send_nowait(effect.data)

    def _close(self, effect: Close) -> None:
        log.info("gossip.close", peer=short(effect.peer), reason=effect.reason)
        port = self._ports.get(effect.link)
        if port is not None:
            port.scope.cancel()

    def _show(self, effect: Changed) -> None:
        core, before = self._core.map, self.snapshot.members
        changes = [
            Change(node, core.node(node), core.certificate_of(node), core.catalog(node)) for node in effect.nodes
        ]
        snapshot = self._registry.apply(changes, unix_s=self._unix_now())
        members.set(len(snapshot.members))
        for node in effect.nodes:
            self._note(node, before.get(node), snapshot.members.get(node))
        self._on_change(snapshot)

    def _note(self, node: NodeId, before: Member | None, after: Member | None) -> None:
        entry, revoked = self._core.map.node(node), self._core.map.revoked
        is_revoked = before is not None and before.certificate is not None and revoked.denies(before.certificate)
        reason = explain(before, after, entry.votes if entry else (), is_revoked=is_revoked)
        if reason is None:
            return
        cards = [member.card for member in (after, before) if member and member.card]
        change = ChangeView(
            unix_s=self._unix_now(),
            node=short(node),
            name=next((card.name for card in cards if card.name), ""),  # a goodbye carries none
            was=before.status.value if before else "",
            status=after.status.value if after else "",
            reason=reason,
            heard_from=self._source,
        )
        self._changes.append(change)
        log.debug("member.change", peer=change.node, status=change.status or "forgotten", reason=reason)


def _tell(effect: Received | Voted | SessionTaken) -> None:
    match effect:
        case Received():
            for outcome, n_facts in Counter(effect.outcomes).items():
                gossip_records.labels(outcome.value).inc(n_facts)
                if outcome not in {Outcome.NEW, Outcome.DUPLICATE}:
                    log.info("gossip.drop", peer=short(effect.peer), reason=outcome.value, n_facts=n_facts)
        case Voted():
            log.info("gossip.vote", peer=short(effect.subject), session=effect.session, kind=effect.kind.name.lower())
        case SessionTaken():
            log.info("gossip.session", session=effect.session, reason=effect.reason)
