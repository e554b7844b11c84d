"""A simulation: production gossip cores on a seeded network of streams, in virtual time.

Streams are ordered and lose nothing; a lost packet delays what follows by its retransmission (200 ms, doubled), as TCP
does. Chance is one ``random.Random(seed)``; nodes, events and effects are hashed into ``trace``, so equal seeds can be
seen to be equal runs. Invariants (numbers as in design/registry.md 6) are asserted after every event.
"""

from __future__ import annotations

import heapq
import itertools
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from tela.crdt.lattice import QUORUM, Status
from tela.gossip.core import ENOUGH_FAREWELLS, TICK_S, GossipCore, Signer
from tela.gossip.events import (
    Changed,
    Close,
    Event,
    Farewell,
    FrameReceived,
    Leave,
    LinkDown,
    LinkId,
    LinkUp,
    Publish,
    Received,
    Send,
    Sent,
    SessionTaken,
    Synced,
    Tick,
)
from tela.gossip.frames import FrameCutter
from tela.record import Envelope, NodeId, SessionState, VoteKind
from tests.lab.statements import NOW, SIGNER, CountingVerifier, card, node

REDIAL_S = 1.0
SLOW_S = (0.02, 0.4)
VALIDATE_EVERY = 40
"""Events between full recomputations of a core's hashes; the cheap invariants are checked after each."""


@dataclass
class Weather:
    """What the network does to packets."""

    latency_s: tuple[float, float] = (0.0002, 0.04)
    loss: float = 0.02
    duplicate: float = 0.02
    """Share of frames that arrive twice: not by the stream, but as a relay's repetition would."""
    slow: float = 0.0
    """Share of nodes that take each message in after SLOW_S only."""


@dataclass
class Host:
    """A machine that a node runs on, or ran."""

    id: NodeId
    core: GossipCore
    counting: CountingVerifier
    targets: set[NodeId]
    clock_error_s: float = 0.0
    life: int = 0  # raised by every stop, so that timers of an earlier life are ignored
    is_alive: bool = True
    is_silent: bool = False  # lost without a word: the power is off, no stream is closed
    n_events: int = 0
    n_sent_bytes: int = 0
    n_sent_frames: int = 0
    is_slow: bool = False
    busy_until: float = 0.0  # of a slow one
    seen: dict[NodeId, tuple[int, int, bool]] = field(default_factory=dict)  # owner -> session, state, is_dead


@dataclass
class Pipe:
    """One direction of a stream."""

    sender: NodeId
    receiver: NodeId
    latency_s: float
    free_at: float = 0.0
    stalled: list[bytes] = field(default_factory=list)  # sent into a partition: retransmitted when it heals


class World:
    """Hosts, streams and a clock."""

    def __init__(self, seed: int, n_nodes: int, weather: Weather | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.weather = weather or Weather()
        self.now = 0.0
        self.trace = blake2b(digest_size=8)
        self.hosts: dict[NodeId, Host] = {}
        self.groups: dict[NodeId, int] = {}  # partition: nodes of different groups do not hear each other
        self.delays: list[float] = []  # from a publication to its arrival at the last live node
        self.crashed: set[NodeId] = set()
        self.hubs: set[NodeId] = set()  # by their certificates
        self.left: set[NodeId] = set()
        self.farewells: dict[NodeId, int] = {}  # of those that left: how many peers said that they know
        self._signed: set[bytes] = set()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ids = map(LinkId, itertools.count(1))
        self._pipes: dict[LinkId, tuple[Pipe, LinkId]] = {}
        self._watch: dict[tuple[NodeId, int, int], tuple[float, set[NodeId]]] = {}
        for number in range(n_nodes):
            self._add(node(number))

    # -- time -------------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), action))

    def run(self, duration_s: float) -> None:
        end = self.now + duration_s
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = end

    # -- hosts ------------------------------------------------------------------------------------------------------

    def _add(self, node_id: NodeId) -> None:
        counting = CountingVerifier()
        self.hosts[node_id] = Host(node_id, self._core(node_id, counting, 0.0), counting, set())
        self.hosts[node_id].is_slow = self.rng.random() < self.weather.slow
        self._boot(self.hosts[node_id])

    def _core(self, node_id: NodeId, counting: CountingVerifier, clock_error_s: float) -> GossipCore:
        signer = Signer(self._sign, SIGNER.sign_vote)
        return GossipCore(
            node_id, counting.verifier, signer, now=self.now, unix_s=NOW + 1000 + self.now + clock_error_s
        )

    def _sign(self, envelope: Envelope) -> Envelope:
        signed = SIGNER.sign_envelope(envelope)
        self._signed.add(signed.signature)
        return signed

    def _boot(self, host: Host) -> None:
        life = host.life
        self.at(self.rng.uniform(0, TICK_S), lambda: self._tick(host, life))
        self.at(self.rng.uniform(0, 0.5), lambda: self._dial(host, life))
        # As node.py does: publish after one exchange, or alone after a while.
        self.at(5.0, lambda: self._first_publish(host, life))

    def _first_publish(self, host: Host, life: int) -> None:
        if host.is_alive and host.life == life and not host.core.author.has_published:
            self.publish(host)

    def _tick(self, host: Host, life: int) -> None:
        if host.is_alive and host.life == life:
            self.handle(host, Tick(NOW + 1000 + self.now + host.clock_error_s))
            self.at(TICK_S, lambda: self._tick(host, life))

    def _dial(self, host: Host, life: int) -> None:
        if not host.is_alive or host.life != life:
            return
        for peer in sorted(host.targets - host.core.peers):
            other = self.hosts[peer]
            if other.is_alive and self.groups.get(peer, 0) == self.groups.get(host.id, 0):
                self._connect(host, other)
        self.at(REDIAL_S * self.rng.uniform(0.8, 1.2), lambda: self._dial(host, life))

    @property
    def live(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.is_alive and host.id not in self.left]

    def publish(self, host: Host, state: SessionState = SessionState.SERVING) -> None:
        roles = ("hub", "worker") if host.id in self.hubs else ("worker",)
        self.handle(host, Publish(state, card(host.id, "llama", roles=roles)))
        author = host.core.author
        waiting = {other.id for other in self.live} - {host.id}
        self._watch[host.id, author.session, author.version] = (self.now, waiting)

    def crash(self, host: Host, *, is_silent: bool) -> None:
        host.is_alive, host.is_silent, host.life = False, is_silent, host.life + 1
        self.crashed.add(host.id)
        if not is_silent:
            for link, (pipe, _) in list(self._pipes.items()):
                if pipe.sender == host.id:
                    self._break(link)

    def restart(self, host: Host, clock_error_s: float) -> None:
        """The same key, nothing remembered, and a clock that may have gone back."""
        for link, (pipe, _) in list(self._pipes.items()):
            if pipe.sender == host.id:
                self._break(link)
        self.crashed.discard(host.id)
        host.is_alive, host.is_silent, host.clock_error_s = True, False, clock_error_s
        host.core = self._core(host.id, host.counting, clock_error_s)
        host.seen = {}
        self._boot(host)

    def leave(self, host: Host) -> None:
        self.left.add(host.id)
        self.handle(host, Leave())
        self.at(2.0, lambda: self._stop(host))

    def _stop(self, host: Host) -> None:
        if host.is_alive:
            self.crash(host, is_silent=False)
            self.crashed.discard(host.id)

    def partition(self, group: set[NodeId]) -> None:
        """Cut ``group`` off: its streams to the rest stall, new ones do not come up."""
        self.groups = dict.fromkeys(group, 1)

    def heal(self) -> None:
        self.groups = {}
        for link, (pipe, _) in list(self._pipes.items()):
            stalled, pipe.stalled = pipe.stalled, []
            for data in stalled:
                self._transmit(link, data)

    # -- streams ----------------------------------------------------------------------------------------------------

    def _connect(self, opener: Host, other: Host) -> None:
        latency_s = self.rng.uniform(*self.weather.latency_s)
        ours, theirs = next(self._ids), next(self._ids)
        self._pipes[ours] = (Pipe(opener.id, other.id, latency_s), theirs)
        self._pipes[theirs] = (Pipe(other.id, opener.id, latency_s), ours)
        self.handle(opener, LinkUp(ours, other.id, is_ours=True))
        self.at(latency_s, lambda: self._accept(other, theirs, opener.id))

    def _accept(self, host: Host, link: LinkId, opener: NodeId) -> None:
        if link in self._pipes and host.is_alive:
            self.handle(host, LinkUp(link, opener, is_ours=False))

    def _break(self, link: LinkId) -> None:
        pipe, back = self._pipes.pop(link)
        self._pipes.pop(back, None)
        for node_id, end, delay_s in ((pipe.sender, link, 0.0), (pipe.receiver, back, pipe.latency_s)):
            self.at(delay_s, lambda host=self.hosts[node_id], end=end: self._hang_up(host, end))

    def _hang_up(self, host: Host, link: LinkId) -> None:
        if host.is_alive:
            self.handle(host, LinkDown(link))

    def break_some_link(self) -> None:
        if self._pipes:
            self._break(self.rng.choice(sorted(self._pipes)))

    def _send(self, link: LinkId, data: bytes) -> None:
        if link not in self._pipes:
            return
        pipe, _ = self._pipes[link]
        host = self.hosts[pipe.sender]
        host.n_sent_bytes += len(data)
        host.n_sent_frames += 1
        self.at(0.0003, lambda: self._written(host, link))
        if self.groups.get(pipe.sender, 0) != self.groups.get(pipe.receiver, 0):
            pipe.stalled.append(data)
        else:
            self._transmit(link, data)

    def _transmit(self, link: LinkId, data: bytes) -> None:
        pipe, back = self._pipes[link]
        delay_s = pipe.latency_s * self.rng.uniform(1.0, 1.3)
        timeout_s = 0.2
        while self.rng.random() < self.weather.loss:
            delay_s += timeout_s
            timeout_s *= 2
        pipe.free_at = max(pipe.free_at + 1e-6, self.now + delay_s)
        n_copies = 2 if self.rng.random() < self.weather.duplicate else 1
        for _ in range(n_copies):
            self.at(pipe.free_at - self.now, lambda: self._deliver(pipe.receiver, back, data))

    def _written(self, host: Host, link: LinkId) -> None:
        if link in self._pipes and host.is_alive:
            self.handle(host, Sent(link))

    def _deliver(self, receiver: NodeId, link: LinkId, data: bytes) -> None:
        host = self.hosts[receiver]
        if not host.is_slow:
            self._take_in(host, link, data)
            return
        host.busy_until = max(host.busy_until + 1e-6, self.now + self.rng.uniform(*SLOW_S))  # in order
        self.at(host.busy_until - self.now, lambda: self._take_in(host, link, data))

    def _take_in(self, host: Host, link: LinkId, data: bytes) -> None:
        if link in self._pipes and host.is_alive:
            for payload in FrameCutter().feed(data):
                self.handle(host, FrameReceived(link, payload))

    # -- cores ------------------------------------------------------------------------------------------------------

    def handle(self, host: Host, event: Event) -> None:
        effects = host.core.handle(event, self.now)
        self.trace.update(struct.pack(">d", self.now) + host.id + type(event).__name__.encode())
        host.n_events += 1
        if host.n_events % VALIDATE_EVERY == 0:
            host.core.validate()
        for effect in effects:
            match effect:
                case Send():
                    self.trace.update(effect.data)
                    self._send(effect.link, effect.data)
                case Close():
                    if effect.link in self._pipes:
                        self._break(effect.link)
                case Changed():
                    self._check(host, effect)
                case SessionTaken():
                    own = host.core.map.node(host.id)
                    assert own is None or effect.session > own.floor, "I13: a new session is above the floor"
                case Synced():
                    self._first_publish(host, host.life)
                case Farewell():
                    self.farewells[host.id] = effect.n_acks
                case Received():
                    pass

    def _check(self, host: Host, changed: Changed) -> None:
        for owner in changed.nodes:
            entry = host.core.map.node(owner)
            if entry is None:
                host.seen.pop(owner, None)
                continue
            session, state, was_dead = host.seen.get(owner, (0, 0, False))
            assert entry.rec.session >= session, "I9: a lower session never comes back"
            if entry.rec.session == session:
                assert entry.rec.state >= state, "I7: state never goes back within a session"
                assert entry.is_dead or not was_dead, "I8: death is final for a session"
            assert entry.rec.envelope.signature in self._signed, "I10: only its owner writes a record"
            if entry.is_down:
                proof = {vote.observer for vote in entry.votes if vote.kind is VoteKind.DOWN}
                assert len(proof) >= QUORUM, "I11: only a quorum ends a session"
            host.seen[owner] = (entry.rec.session, entry.rec.state, entry.is_dead)
            self._arrived(host, owner, entry.rec.session, entry.rec.version)
        assert all(len(link.owed) <= len(host.core.map) for link in host.core._links.values()), "I23: bounded queues"

    def _arrived(self, host: Host, owner: NodeId, session: int, version: int) -> None:
        for key in [key for key in self._watch if key[0] == owner and key[1:] <= (session, version)]:
            began, waiting = self._watch[key]
            waiting.discard(host.id)
            if not waiting:
                self.delays.append(self.now - began)
                del self._watch[key]

    # -- what everybody must see in the end -------------------------------------------------------------------------

    def views(self) -> dict[str, set[Status | None]]:
        """How live nodes see live, crashed and left ones."""
        # Who left unheard, cut off from everybody, has crashed as far as others can tell.
        left = {node_id for node_id in self.left if self.farewells[node_id] >= ENOUGH_FAREWELLS}
        groups = {"live": {host.id for host in self.live}, "crashed": self.crashed | self.left - left, "left": left}
        return {
            name: {self._status(host, node_id) for host in self.live for node_id in nodes}
            for name, nodes in groups.items()
        }

    @staticmethod
    def _status(host: Host, node_id: NodeId) -> Status | None:
        entry = host.core.map.node(node_id)
        return entry.status if entry else None
