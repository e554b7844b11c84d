"""One gossip stream as the core sees it: what the peer knows, what it is owed, what its hashes said.

Nothing is queued as bytes. A link owes *keys*, each at most once (invariant I23), and renders what is newest when the
shell can write: a slow peer costs one key per entry, whatever happens meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeVar

import msgspec

from tela.crdt.delta import ALL_BUCKETS, ID_BYTES, LINE_BYTES, N_BUCKETS, Delta, FactId, Key, delta_of, facts_of
from tela.crdt.gmap import GossipMap
from tela.gossip.events import LinkId
from tela.gossip.frames import (
    MAX_DELTAS,
    MAX_LINES_BYTES,
    MAX_RECORDS_BYTES,
    Ack,
    Digest,
    Frame,
    Hello,
    Mode,
    Ping,
    Records,
    Want,
)
from tela.record import Kind, NodeId
from tela.wire import PROTOCOL_MAX, PROTOCOL_MIN

SRTT_GAIN: Final = 1 / 8
"""Of a new sample in the smoothed round-trip time (RFC 6298 section 2)."""
PATIENCE_S: Final = (0.7, 1.0)
"""Bounds of the wait for an answer: simulated, 0.5 s makes votes on healthy nodes at 1 % loss, 1 s finds a silent host
in 1.2 s (registry.md 3.4, 3.5)."""
REPAIR_INTERVAL_S: Final = 2.0
"""Between anti-entropy repairs of a node: without a limit of their own they defeat every budget (registry.md 3.3)."""
REPAIR_BUCKETS: Final = 4
REPAIR_RECORDS: Final = 32

T = TypeVar("T")


class Link:
    """State of one stream. Mutated by the core only."""

    def __init__(self, link: LinkId, peer: NodeId, *, is_ours: bool, now: float) -> None:
        self.id = link
        self.peer = peer
        self.is_ours = is_ours
        self.heard_at = now
        self.is_doubted = False  # it was overdue since it was last heard
        self.is_greeted = False
        self.is_writing = False
        self.is_farewell_acked = False
        self.is_lazy_for_peer = False
        self._is_lazy_for_us = False
        self._is_mode_due = False
        self.awaiting = 0  # buckets of our opening digest whose WANT has not come
        self._is_hello_due = True
        self.owed: dict[Key, None] = {}  # oldest first; sent newest first
        self._known: dict[Key, frozenset[FactId]] = {}
        self._ping_at = now
        self._srtt_s: float | None = None  # of our pings; the side that only answers knows none
        self._is_ping_due = False
        self._sequence = 0
        self._ack_due: int | None = None
        self._digest_due = 0
        self._wants: list[tuple[int, list[bytes]]] = []
        self._opening = ALL_BUCKETS  # buckets that the peer may still compare free of any rate
        self._compared_at = float("-inf")
        self._n_compared = 0
        self._differing = 0  # buckets that differed at the last exchange
        self._farewell_sequence: int | None = None

    # -- what the peer knows ----------------------------------------------------------------------------------------

    def learn(self, key: Key, facts: frozenset[FactId], gossip_map: GossipMap) -> None:
        """The peer has these facts: they are not sent back."""
        entry = gossip_map.get(key)
        current = facts_of(entry).ids if entry else frozenset()
        self._known[key] = (self._known.get(key, frozenset()) | facts) & current

    def forget(self, key: Key) -> None:
        """The entry is gone."""
        self._known.pop(key, None)
        self.owed.pop(key, None)

    def owe(self, key: Key) -> None:
        """Send what is newest of this entry."""
        self.owed.pop(key, None)
        self.owed[key] = None

    def owe_whole(self, keys: Iterable[Key]) -> None:
        """Send these entries whole: the peer said that it lacks them, whatever we thought."""
        for key in keys:
            self._known.pop(key, None)
            self.owe(key)

    @property
    def is_lazy(self) -> bool:
        """Whether no news goes here: one side has it from others."""
        return self._is_lazy_for_us or self.is_lazy_for_peer

    def choose(self, *, is_lazy: bool) -> bool:
        """Whether we want news here; True where that is told anew."""
        if is_lazy == self._is_lazy_for_us:
            return False
        self._is_lazy_for_us = is_lazy
        self._is_mode_due = True
        return True

    # -- liveness and hashes ----------------------------------------------------------------------------------------

    def hear(self, now: float) -> bool:
        """The peer sent something; True where it had been given up."""
        was_doubted, self.is_doubted, self.heard_at = self.is_doubted, False, now
        return was_doubted

    @property
    def patience_s(self) -> float:
        """How long an answer may take: four round trips and some processing, within PATIENCE_S."""
        shortest_s, longest_s = PATIENCE_S
        return longest_s if self._srtt_s is None else min(longest_s, max(shortest_s, 4 * self._srtt_s + 0.3))

    def ping(self, now: float) -> None:
        """Ping at the next chance."""
        self._is_ping_due = True
        self._ping_at = now

    def ping_if_due(self, now: float, interval_s: float) -> None:
        """Ping where the last one is ``interval_s`` old."""
        if now - self._ping_at >= interval_s:
            self.ping(now)

    def acknowledge(self, sequence: int) -> None:
        """Answer a ping; a newer one replaces an answer that is not sent yet."""
        self._ack_due = sequence

    def say_farewell(self, own: Key, now: float) -> None:
        """Once our LEFT went out here, a ping behind it tells by its answer that it was taken in."""
        if self.is_greeted and self._farewell_sequence is None and own not in self.owed:
            self._farewell_sequence = self._sequence + 1
            self.ping(now)

    def take_ack(self, sequence: int, now: float) -> None:
        """Note what an answer says of the path, and of our LEFT."""
        if sequence == self._sequence:
            sample_s = now - self._ping_at
            self._srtt_s = sample_s if self._srtt_s is None else self._srtt_s + SRTT_GAIN * (sample_s - self._srtt_s)
        if self._farewell_sequence is not None and sequence >= self._farewell_sequence:
            self.is_farewell_acked = True

    def differing_twice(self, mask: int) -> int:
        """Buckets that differ now and did at the exchange before: not just news in flight."""
        again, self._differing = mask & self._differing, mask
        return again

    # -- anti-entropy -----------------------------------------------------------------------------------------------

    def open_digest(self) -> None:
        """Compare everything, once, at the opening."""
        self.awaiting = self._digest_due = ALL_BUCKETS

    def repair(self, mask: int) -> None:
        """Compare a few buckets: another choice each time where more differ."""
        start = self._sequence % N_BUCKETS
        order = [(start + step) % N_BUCKETS for step in range(N_BUCKETS)]
        for bucket in [bucket for bucket in order if mask >> bucket & 1][:REPAIR_BUCKETS]:
            self._digest_due |= 1 << bucket

    def compare(self, frame: Digest, gossip_map: GossipMap, now: float) -> None:
        """Answer a peer's digest: owe what it lacks, then want what we lack. Ignored where it comes too often."""
        is_opening = frame.buckets & self._opening == frame.buckets
        if not is_opening and now - self._compared_at < REPAIR_INTERVAL_S / 2:
            return
        self._compared_at = now
        self._opening &= ~frame.buckets
        send, ask = gossip_map.digest.compare(frame.buckets, frame.lines)
        if not is_opening:
            send, ask = self._window(send), self._window(ask)
            self._n_compared += 1
        # What is owed last is sent first, and NODE records come first in ``send``.
        self.owe_whole(reversed(send))
        # Our own opening digest brings what we lack anyway.
        is_coming = frame.buckets & self.awaiting == frame.buckets
        self._wants.append((frame.buckets, [] if is_coming else ask))

    def _window(self, items: list[T]) -> list[T]:
        """REPAIR_RECORDS of them, others each time: a peer may refuse some for as long as its clock is off."""
        start = self._n_compared * REPAIR_RECORDS % max(len(items), 1)
        return (items[start:] + items[:start])[:REPAIR_RECORDS]

    def take_want(self, frame: Want, gossip_map: GossipMap) -> bool:
        """Owe what the peer asks for; True where this completes our opening digest."""
        ids = [frame.ids[at : at + ID_BYTES] for at in range(0, len(frame.ids), ID_BYTES)]
        keys = [key for key in map(gossip_map.digest.key_of, ids) if key is not None]
        self.owe_whole(sorted(keys, key=lambda key: (-key.kind, key.owner)))
        was_awaiting, self.awaiting = self.awaiting, self.awaiting & ~frame.buckets
        return bool(was_awaiting) and not self.awaiting

    # -- writing ----------------------------------------------------------------------------------------------------

    def next_frame(self, gossip_map: GossipMap) -> Frame | None:
        """What to write next: answers first, then news, then what may wait."""
        if self._is_hello_due:
            self._is_hello_due = False
            return Hello(PROTOCOL_MIN, PROTOCOL_MAX, gossip_map.digest.root)
        if not self.is_greeted:
            return None
        return self._next_exchange(gossip_map) or self._next_records(gossip_map) or self._next_want()

    def _next_exchange(self, gossip_map: GossipMap) -> Frame | None:
        digest = gossip_map.digest
        if self._is_mode_due:
            self._is_mode_due = False
            return Mode(self._is_lazy_for_us)
        if self._ack_due is not None:
            sequence, self._ack_due = self._ack_due, None
            return Ack(sequence, digest.root, digest.sums)
        if self._is_ping_due:
            self._is_ping_due = False
            self._sequence += 1
            return Ping(self._sequence, digest.root, digest.sums)
        return self._next_digest(gossip_map) if self._digest_due else None

    def _next_digest(self, gossip_map: GossipMap) -> Digest:
        mask, lines = 0, b""
        for bucket in range(N_BUCKETS):
            if self._digest_due >> bucket & 1:
                more = gossip_map.digest.lines(1 << bucket)[: MAX_LINES_BYTES // LINE_BYTES * LINE_BYTES]
                if mask and len(lines) + len(more) > MAX_LINES_BYTES:
                    break
                mask |= 1 << bucket
                lines += more
        self._digest_due &= ~mask
        return Digest(mask, lines)

    def _next_records(self, gossip_map: GossipMap) -> Records | None:
        deltas: list[Delta] = []
        size_bytes = 0
        while self.owed and len(deltas) < MAX_DELTAS and size_bytes < MAX_RECORDS_BYTES:
            key = self._next_owed()
            entry = gossip_map.get(key)
            delta = delta_of(entry, self._known.get(key, frozenset())) if entry else None
            if entry is None or delta is None:
                continue
            self._known[key] = facts_of(entry).ids
            deltas.append(delta)
            size_bytes += len(msgspec.msgpack.encode(delta))
        return Records(tuple(deltas)) if deltas else None

    def _next_owed(self) -> Key:
        """The newest; a node's own record before its other kinds, which a peer takes of a session that it knows."""
        key, _ = self.owed.popitem()
        first = Key(key.owner, Kind.NODE)
        if first not in self.owed:
            return key
        del self.owed[first]
        self.owed[key] = None
        return first

    def _next_want(self) -> Want | None:
        if not self._wants:
            return None
        buckets, ids = self._wants.pop(0)
        return Want(buckets, b"".join(ids[: MAX_LINES_BYTES // ID_BYTES]))
