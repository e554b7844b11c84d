"""The gossip state machine of one node: ``handle(event, now) -> effects``, nothing else touches the world.

Theory of operation. Every link is symmetric once open. A change of the map is *owed* to every link, less what its peer
is known to have; a link is given one frame at a time and rendered from the map as it then is, so news overtakes what it
replaces. Hashes ride on pings: what flooding lost shows as a bucket that differs twice, and is compared line by line.
At the opening of a link everything is compared at once. The node with the lower id pings and starts repairs, the other
answers; either side may probe.

``now`` is monotonic seconds and times everything; the wall clock comes with Tick and only stamps and ends leases, so a
stepped clock kills nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from tela.crdt.caps import Buckets
from tela.crdt.delta import Delta, Key
from tela.crdt.gmap import GossipMap, Merged, Outcome, Verifier
from tela.crdt.lattice import Entry
from tela.errors import ProtocolError
from tela.gossip.author import Author
from tela.gossip.conduct import Conduct
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
from tela.gossip.frames import Ack, Digest, Frame, Hello, Mode, Ping, Records, Want, decode_frame, encode_frame
from tela.gossip.link import REPAIR_INTERVAL_S, Link
from tela.gossip.members import RECONNECT_GRACE_S, LocalHealth, MassGuard, Observer, Verdict
from tela.gossip.uplinks import Peer, lazy_links
from tela.record import Envelope, Kind, NodeId, Vote, VoteKind
from tela.wire import PROTOCOL_MAX, PROTOCOL_MIN, encode, negotiate_version

TICK_S: Final = 0.25
"""A quarter of the shortest timer below."""
PING_INTERVAL_S: Final = 1.0
SILENCE_S: Final = 3.0
"""Without any frame for three pings a link is dead, whatever the transport believes (overlay.md 1, defect 6). Its peer
is suspected sooner: when a ping and the wait for its answer have passed."""
PROBE_S: Final = 1.0
"""For the answer to a probe."""
STALL_S: Final = 0.1
"""A tick so late says that we are slow: silence within that time is not held against anybody."""
LAG_S: Final = 1.0
"""Ticks further apart mean that we stood still: unread frames may be waiting, so nobody is judged."""
SWEEP_INTERVAL_S: Final = 1.0
PUBLISH_BURST: Final = (5.0, 1.0)
"""Records that we issue for what happens here, at once and a second: an engine that flaps must not flood the swarm."""
OWN_RECORD_INTERVAL_S: Final = 1.0
"""Between refutations: bounds what a voter can make us flood."""
SESSION_INTERVAL_S: Final = 10.0
"""Between sessions that others forced on us: two processes with one key must not flood the swarm."""
ENOUGH_FAREWELLS: Final = 2
"""Peers that must have our LEFT: one of them may go down with us."""


@dataclass(frozen=True, slots=True)
class Signer:
    """Our key, as far as gossip uses it."""

    sign_envelope: Callable[[Envelope], Envelope]
    sign_vote: Callable[[Vote], Vote]


class GossipCore:
    """One node's replica, its links and its opinions."""

    def __init__(self, node: NodeId, verifier: Verifier, signer: Signer, *, now: float, unix_s: float) -> None:
        self.node = node
        self.map = GossipMap(verifier)
        self.author = Author(node, signer.sign_envelope)
        self._observer = Observer(node)
        self._health = LocalHealth()
        self._guard = MassGuard()
        self._sign_vote = signer.sign_vote
        self._own_key = Key(node, Kind.NODE)
        self._links: dict[LinkId, Link] = {}
        self._by_peer: dict[NodeId, Link] = {}
        self._touched: set[LinkId] = set()
        self._changed: set[NodeId] = set()
        self._effects: list[Effect] = []
        self._ticked_at = now
        self._tick_unix_s = unix_s
        self._swept_at = self._repaired_at = self._issued_at = self._session_at = float("-inf")
        self._conduct = Conduct(now)
        self._published = Buckets(*PUBLISH_BURST)
        self._is_publish_due = False
        self.doubted: frozenset[NodeId] = frozenset()
        """Peers whose answer is overdue here: our own view, at once; votes are for the swarm, and rationed."""
        self._is_leaving = False
        self._farewell: Farewell | None = None  # the last one told

    @property
    def peers(self) -> frozenset[NodeId]:
        """Peers with a link."""
        return frozenset(self._by_peer)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event in; the effects are to be performed in order."""
        self.map.caps.now = now
        match event:
            case FrameReceived():
                self._take_payload(event, now)
            case Sent():
                self._sent(event.link)
            case Tick():
                self._tick(event.unix_s, now)
            case LinkUp():
                self._link_up(event, now)
            case LinkDown():
                self._link_down(event.link, now)
            case Suspect():
                self._probe(event.peer, now)
            case Publish():
                self._publish(event, now)
            case Revoke():
                self._merge(Delta((event.raw,)), None, now)
            case Leave():
                self._leave(now)
        self._mind_own_record(now)
        self._say_farewell(now)
        return self._flush()

    # -- links ------------------------------------------------------------------------------------------------------

    def _link_up(self, event: LinkUp, now: float) -> None:
        link = Link(event.link, event.peer, is_ours=event.is_ours, now=now)
        other = self._by_peer.get(event.peer)
        if self._conduct.is_muted(event.peer):
            self._effects.append(Close(event.link, event.peer, "muted"))
        elif other is not None and not self._replaces(link, other):
            self._effects.append(Close(event.link, event.peer, "second stream"))
        else:
            if other is not None:
                self._close(other, "replaced")
            self._links[link.id] = self._by_peer[link.peer] = link
            if self._is_leaving:
                link.owe(self._own_key)
            self._touched.add(link.id)

    def _replaces(self, new: Link, old: Link) -> bool:
        """Both sides keep the stream that the lower id opened; a second one by the same side says the first is dead."""
        return new.is_ours in {old.is_ours, self.node < new.peer}

    def _link_down(self, link_id: LinkId, now: float) -> None:
        link = self._links.get(link_id)
        if link is not None:
            self._forget(link)
            self._observer.doubt(link.peer, now, RECONNECT_GRACE_S)

    def _forget(self, link: Link) -> None:
        del self._links[link.id]
        del self._by_peer[link.peer]
        self.doubted -= {link.peer}
        self._touched.discard(link.id)

    def _close(self, link: Link, reason: str) -> None:
        self._forget(link)
        self._effects.append(Close(link.id, link.peer, reason))

    def _sent(self, link_id: LinkId) -> None:
        link = self._links.get(link_id)
        if link is not None:
            link.is_writing = False
            self._touched.add(link_id)

    # -- frames -----------------------------------------------------------------------------------------------------

    def _take_payload(self, event: FrameReceived, now: float) -> None:
        link = self._links.get(event.link)
        if link is None:
            return
        self.doubted -= {link.peer}
        if link.hear(now):
            self._health.worsen(now)  # it was there all the time
        self._observer.trust(link.peer)
        self._touched.add(link.id)
        try:
            frame = decode_frame(event.payload)
        except ProtocolError:
            self._close(link, "protocol")
            return
        if isinstance(frame, Hello):
            self._greet(link, frame)
        elif not link.is_greeted:
            self._close(link, "no hello")
        elif frame is not None:
            self._take_frame(link, frame, now)

    def _take_frame(self, link: Link, frame: Frame, now: float) -> None:
        match frame:
            case Records():
                self._take_records(link, frame, now)
            case Ping():
                link.acknowledge(frame.sequence)
            case Ack():
                self._take_ack(link, frame, now)
            case Digest():
                link.compare(frame, self.map, now)
            case Mode():
                link.is_lazy_for_peer = frame.is_lazy
            case Want():
                if link.take_want(frame, self.map):
                    self._effects.append(Synced(link.peer))

    def _greet(self, link: Link, hello: Hello) -> None:
        if negotiate_version((PROTOCOL_MIN, PROTOCOL_MAX), (hello.version_min, hello.version_max)) is None:
            self._close(link, "version")
        elif not link.is_greeted:
            link.is_greeted = True
            if hello.root == self.map.digest.root:
                self._effects.append(Synced(link.peer))
            else:
                link.open_digest()

    def _take_ack(self, link: Link, ack: Ack, now: float) -> None:
        link.take_ack(ack.sequence, now)
        again = link.differing_twice(self.map.digest.differing(ack.root, ack.sums))
        if again and not link.awaiting and now - self._repaired_at >= REPAIR_INTERVAL_S:
            self._repaired_at = now
            link.repair(again)

    def _take_records(self, link: Link, frame: Records, now: float) -> None:
        outcomes: list[Outcome] = []
        for delta in frame.deltas:
            merged = self._merge(delta, link, now)
            outcomes += merged.outcomes
        self._effects.append(Received(link.peer, tuple(outcomes)))
        if reason := self._conduct.note(link.peer, outcomes, now):
            self._close(link, reason)

    def _merge(self, delta: Delta, source: Link | None, now: float) -> Merged:
        merged = self.map.merge(delta, self._unix_s(now))
        if merged.key is None:
            return merged
        if source is not None:
            source.learn(merged.key, merged.facts, self.map)
        if merged.key == self._own_key:
            self._hear_of_us(merged)
        if merged.is_changed:
            self._offer(merged.key)
            self._count_suspect(merged.key, now)
            if merged.key.kind == Kind.REVOCATION:
                self._effects.append(RevocationsTaken(self.map.revoked))
                self._note(self.map.expel())
            if delta.votes and source is not None:
                # Someone doubts a node that we have a link to: our own look at it is the second opinion.
                self._probe_linked(merged.key.owner, now)
        return merged

    def _count_suspect(self, key: Key, now: float) -> None:
        entry = self.map.node(key.owner)
        if entry is not None and entry.n_suspect_votes and not entry.is_dead:
            live = sum(not one.is_dead for each in self.map if (one := self.map.node(each.owner)))
            self._guard.note(key.owner, now, live)

    def _hear_of_us(self, merged: Merged) -> None:
        entry = self.map.node(self.node)
        if entry is not None:
            self.author.hear(max(entry.rec.session, entry.floor))
        if set(merged.outcomes) == {Outcome.HELD}:  # by our clock it is from the future: our clock went back
            self.author.hear(max((fact[0] for fact in merged.facts if isinstance(fact, tuple)), default=0))

    def _offer(self, key: Key) -> None:
        if key.kind != Kind.REVOCATION:  # the CA is no node
            self._changed.add(key.owner)
        is_farewell = self._is_leaving and key == self._own_key
        for link in self._links.values():
            if not link.is_lazy or is_farewell:
                link.owe(key)  # of which it sends what the peer lacks: nothing, to the one that told us
                self._touched.add(link.id)

    # -- time -------------------------------------------------------------------------------------------------------

    def _unix_s(self, now: float) -> float:
        return self._tick_unix_s + (now - self._ticked_at)

    def _tick(self, unix_s: float, now: float) -> None:
        self._mind_lag(now - self._ticked_at - TICK_S, now)
        self._ticked_at, self._tick_unix_s = now, unix_s
        for link in list(self._links.values()):
            self._tick_link(link, now)
        self._choose_uplinks()
        for verdict in self._observer.due(now, self.map.node, may_condemn=not self._guard.is_on(now)):
            self._vote(verdict, now)
        if now - self._swept_at >= SWEEP_INTERVAL_S:
            self._sweep(now)

    def _mind_lag(self, lag_s: float, now: float) -> None:
        """Read before judging: what we did not hear while we were late proves nothing (registry.md 2.7)."""
        if lag_s <= STALL_S:
            return
        self._health.worsen(now)
        if lag_s > LAG_S:
            self._observer.forgive(now)
        for link in self._links.values():
            link.heard_at = now if lag_s > LAG_S else min(now, link.heard_at + lag_s)

    def _choose_uplinks(self) -> None:
        peers = {link.peer: Peer(self._roles_of(link.peer), not link.is_doubted) for link in self._links.values()}
        lazy = lazy_links(self.node, self._roles_of(self.node), peers)
        for link in self._links.values():
            if link.choose(is_lazy=link.peer in lazy):
                self._touched.add(link.id)

    def _roles_of(self, node: NodeId) -> tuple[str, ...]:
        certificate = self.map.certificate_of(node)
        return certificate.roles if certificate else ()

    def _tick_link(self, link: Link, now: float) -> None:
        silence_s, factor = now - link.heard_at, self._health.factor
        if silence_s > SILENCE_S * factor:
            self._close(link, "silent")
            self._observer.doubt(link.peer, now, 0.0)
            return
        if silence_s > PING_INTERVAL_S + TICK_S + link.patience_s:
            self.doubted |= {link.peer}
        if silence_s > PING_INTERVAL_S + TICK_S + link.patience_s * factor and not link.is_doubted:
            link.is_doubted = True
            self._observer.doubt(link.peer, now, 0.0)
        if self.node < link.peer:
            link.ping_if_due(now, PING_INTERVAL_S)
            self._touched.add(link.id)

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        self._health.recover(now)
        self._conduct.sweep(now)
        self._note(self.map.sweep(self._unix_s(now)))
        self._changed.update(self.map.presume(self._unix_s(now)))

    def _note(self, changed: Iterable[Key]) -> None:
        """The map changed these entries by itself: nobody needs to be told, every replica does the same."""
        for key in changed:
            self._changed.add(key.owner)
            for link in self._links.values():
                link.forget(key)

    # -- opinions ---------------------------------------------------------------------------------------------------

    def _probe(self, peer: NodeId, now: float) -> None:
        if peer in self._by_peer:
            self._probe_linked(peer, now)
        else:
            self._observer.doubt(peer, now, 0.0)

    def _probe_linked(self, peer: NodeId, now: float) -> None:
        link = self._by_peer.get(peer)
        if link is not None:
            link.ping(now)
            self._touched.add(link.id)
            self._observer.doubt(peer, now, PROBE_S)

    def _vote(self, verdict: Verdict, now: float) -> None:
        issued_unix_s = int(self._unix_s(now))
        vote = self._sign_vote(
            Vote(
                observer=self.node,
                subject=verdict.subject,
                session=verdict.session,
                incarnation=verdict.incarnation,
                kind=verdict.kind,
                issued_unix_s=issued_unix_s,
                signature=b"",
            )
        )
        if self._merge(Delta((), (encode(vote),)), None, now).is_changed:
            self._effects.append(Voted(verdict.subject, verdict.session, verdict.kind))

    # -- our own record ---------------------------------------------------------------------------------------------

    def _publish(self, event: Publish, now: float) -> None:
        if self.author.has_left:
            return
        if not self.author.has_published:
            self._begin_session("start", now)
        is_step = not self.author.has_issued or event.state > self.author.state  # of which a session has four
        self.author.describe(event.state, event.card, event.catalog)
        self._is_publish_due = True
        self._publish_if_allowed(now, is_urgent=is_step)

    def _publish_if_allowed(self, now: float, *, is_urgent: bool = False) -> None:
        """Issue what was described, now or when there is room: then the newest."""
        if self._is_publish_due and (is_urgent or self._published.has_room(self.node, now)):
            self._published.count(self.node, now)
            self._issue(now)

    def _begin_session(self, reason: str, now: float) -> None:
        self.author.begin_session(self._unix_s(now))
        self._effects.append(SessionTaken(self.author.session, reason))

    def _issue(self, now: float) -> None:
        self._issued_at = now
        self._is_publish_due = False
        for raw in self.author.next_records(self._unix_s(now)):
            merged = self._merge(Delta((raw,)), None, now)
            if not merged.is_changed:
                self._effects.append(Received(self.node, merged.outcomes))

    def _mind_own_record(self, now: float) -> None:
        """Answer what the swarm says of us: death or a twin by a new session, suspicion by the next incarnation."""
        author, entry = self.author, self.map.node(self.node)
        if not author.has_published or author.has_left:
            return
        self._publish_if_allowed(now)
        is_down = entry is not None and entry.floor == author.session
        if is_down or self._has_twin(entry):
            if now - self._session_at >= SESSION_INTERVAL_S:
                self._session_at = now
                self._begin_session("down" if is_down else "duplicate identity", now)
                self._issue(now)
        elif now - self._issued_at < OWN_RECORD_INTERVAL_S:
            return
        elif entry is not None and entry.n_suspect_votes:
            votes = (vote.incarnation for vote in entry.votes if vote.kind is VoteKind.SUSPECT)
            author.refute(max(votes))
            self._issue(now)
        elif entry is None or author.is_renewal_due(self._unix_s(now)):
            self._issue(now)

    def _has_twin(self, entry: Entry | None) -> bool:
        """Whether another process speaks under our key: it has a later session, or more of this one than we said."""
        if self.author.heard > self.author.session:
            return True
        return entry is not None and (entry.rec.version > self.author.version or entry.rec.state > self.author.state)

    def _leave(self, now: float) -> None:
        self._is_leaving = True
        if self.author.has_published and not self.author.has_left:
            self.author.leave()
            self._issue(now)

    def _say_farewell(self, now: float) -> None:
        if not self._is_leaving:
            return
        links = [link for link in self._links.values() if link.is_greeted]
        for link in links:
            link.say_farewell(self._own_key, now)
            self._touched.add(link.id)
        n_acks = sum(link.is_farewell_acked for link in links)
        farewell = Farewell(n_acks, is_enough=n_acks >= min(ENOUGH_FAREWELLS, len(links)))
        if farewell != self._farewell:
            self._farewell = farewell
            self._effects.append(farewell)

    # -- out --------------------------------------------------------------------------------------------------------

    def _flush(self) -> list[Effect]:
        for link_id in sorted(self._touched):
            link = self._links[link_id]
            frame = None if link.is_writing else link.next_frame(self.map)
            if frame is not None:
                link.is_writing = True
                self._effects.append(Send(link_id, encode_frame(frame)))
        self._touched.clear()
        if self._changed:
            self._effects.append(Changed(tuple(sorted(self._changed))))
            self._changed.clear()
        effects, self._effects = self._effects, []
        return effects

    def validate(self) -> None:
        """Assert what must hold between events; for tests."""
        self.map.validate()
        assert all(self._by_peer[link.peer] is link for link in self._links.values())
        assert len(self._by_peer) == len(self._links)
        assert all(len(link.owed) <= len(self.map) for link in self._links.values())
        own = self.map.node(self.node)
        assert own is None or not self.author.has_published or own.rec.owner == self.author.node
