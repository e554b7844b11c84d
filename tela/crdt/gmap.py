"""The gossiped map: owner to entry, merging what peers send and forgetting what has ended.

The order of checks is a cost order: what is known already is recognised before any signature is looked at (a duplicate
costs microseconds, a signature a hundred). Nothing a peer sends raises here; each fact gets an :class:`Outcome`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec

from tela.crdt.caps import Caps
from tela.crdt.delta import Delta, Digest, FactId, Facts, Key, parse_delta
from tela.crdt.lattice import QUORUM, Entry, Record, add_votes, drop_votes, entry_of, fade, join
from tela.errors import ProtocolError, TelaError
from tela.identity import CLOCK_SKEW_S, Certificate, decode_certificate
from tela.record import Envelope, Kind, NodeId, Vote, VoteKind
from tela.revocation import NOTHING_REVOKED, read_body

MAX_ENTRIES: Final = 50_000
"""Live and dead together, about 50 MB. At the cap new owners are refused; a tombstone never goes early."""
CERTIFICATE_DIGEST_BYTES: Final = 16
"""By which a certificate is known again: its bytes are in the record already."""
MAX_KIND: Final = 15
"""Kinds one owner may have entries of: the seven known ones and room for later versions."""


class Outcome(enum.StrEnum):
    """What became of a fact."""

    NEW = "new"
    DUPLICATE = "duplicate"  # known, or dominated by what is known
    EXPIRED = "expired"
    HELD = "held"  # genuine, but issued in the future: anti-entropy brings it again when its time has come
    UNKNOWN = "unknown"  # about a session or an owner that we have no record of yet
    REFUSED = "refused"  # by no member or a revoked one, or with a lease that is too long
    BAD_SIGNATURE = "bad_signature"
    MALFORMED = "malformed"
    FULL = "full"
    LIMITED = "limited"  # its author says too much: anti-entropy brings the newest when there is room


@dataclass(frozen=True, slots=True)
class Verifier:
    """What the map asks of cryptography."""

    is_envelope_genuine: Callable[[Envelope], bool]
    is_vote_genuine: Callable[[Vote], bool]
    check_certificate: Callable[[NodeId, Certificate, int], None]  # (owner, certificate, unix_s) raises TelaError
    ca: NodeId  # whose revocations count


@dataclass(frozen=True, slots=True)
class Merged:
    """What a delta did. ``facts`` are those that its sender has, whatever we made of them."""

    key: Key | None
    outcomes: tuple[Outcome, ...]
    facts: frozenset[FactId] = frozenset()

    @property
    def is_changed(self) -> bool:
        """Whether the entry is another one now."""
        return Outcome.NEW in self.outcomes


class GossipMap:
    """The replica of one node."""

    def __init__(self, verifier: Verifier) -> None:
        self.digest = Digest()
        self.revoked = NOTHING_REVOKED
        self.caps = Caps()
        self._verifier = verifier
        self._entries: dict[Key, Entry] = {}
        self._certificates: dict[NodeId, tuple[bytes, Certificate]] = {}  # with the digest of its encoded form
        self._presumed: set[NodeId] = set()
        # The records that we hold, by their bytes: most of what arrives was here before.
        self._held: dict[bytes, Key] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def get(self, key: Key) -> Entry | None:
        """The entry, or None where nothing is known."""
        return self._entries.get(key)

    def node(self, owner: NodeId) -> Entry | None:
        """The entry of a node."""
        return self._entries.get(Key(owner, Kind.NODE))

    def catalog(self, owner: NodeId) -> Entry | None:
        """The entry of what a node says once a session."""
        return self._entries.get(Key(owner, Kind.CATALOG))

    def certificate_of(self, owner: NodeId) -> Certificate | None:
        """The certificate by which the owner's records were taken: checked, and kept without its signature."""
        known = self._certificates.get(owner)
        return known[1] if known else None

    def merge(self, delta: Delta, unix_s: float) -> Merged:
        """Join a delta: each fact is judged, then the entry that results is stored whole or not at all."""
        if not delta.votes and len(delta.records) == 1 and (known := self._held.get(delta.records[0])):
            return Merged(known, (Outcome.DUPLICATE,), frozenset({self._entries[known].rec.rank}))
        try:
            facts = parse_delta(delta)
        except ProtocolError:
            return Merged(None, (Outcome.MALFORMED,))
        entry = self._entries.get(facts.key)
        outcomes: list[Outcome] = []
        for record in facts.records:
            outcomes.append(self._judge_record(entry, record, facts, unix_s))
            if outcomes[-1] is Outcome.NEW:
                entry = _with_record(entry, record)
        for vote in facts.votes:
            outcomes.append(self._judge_vote(entry, vote, unix_s))
            if outcomes[-1] is Outcome.NEW and entry is not None:
                entry = add_votes(entry, (vote,))
        if Outcome.NEW in outcomes and entry is not None and not self._store(facts.key, entry, unix_s):
            outcomes = [Outcome.EXPIRED if outcome is Outcome.NEW else outcome for outcome in outcomes]
        return Merged(facts.key, tuple(outcomes), facts.ids)

    def sweep(self, unix_s: float) -> list[Key]:
        """Forget what has ended by now; returns the entries that changed or went."""
        changed = []
        for key, entry in list(self._entries.items()):
            if self._has_ended(key, entry, unix_s):
                self._remove(key)
                changed.append(key)
            elif (faded := fade(entry, unix_s)) is not entry:
                self._put(key, faded)
                changed.append(key)
        return changed

    def presume(self, unix_s: float) -> list[NodeId]:
        """The nodes that time alone makes DOWN for readers, or that are so no more, since the last call."""
        presumed = {
            key.owner
            for key, entry in self._entries.items()
            if entry.votes and entry.status is not entry.status_at(unix_s)
        }
        changed = sorted(presumed ^ self._presumed)
        self._presumed = presumed
        return changed

    def expel(self) -> list[Key]:
        """Drop what revoked members said, of themselves and in votes; returns the entries that changed or went."""
        revoked = {owner for owner, (_, certificate) in self._certificates.items() if self.revoked.denies(certificate)}
        revoked |= self.revoked.nodes  # also those whose records have ended, but not yet their votes
        changed = []
        for key, entry in list(self._entries.items()):
            if key.owner in revoked:
                self._remove(key)
                changed.append(key)
            elif (kept := drop_votes(entry, revoked)) is not entry:
                self._put(key, kept)
                changed.append(key)
        for owner in revoked:
            self._certificates.pop(owner, None)
        return changed

    # -- judging ----------------------------------------------------------------------------------------------------

    def _judge_record(self, entry: Entry | None, record: Record, facts: Facts, unix_s: float) -> Outcome:
        outcome = self._judge_unverified(entry, record, facts, unix_s)
        if outcome is not Outcome.NEW:
            return outcome
        if not self.caps.has_room(record.owner):
            return Outcome.LIMITED
        if not self._verifier.is_envelope_genuine(record.envelope):
            return Outcome.BAD_SIGNATURE
        self.caps.count(record.owner)
        if record.issued_unix_s > unix_s + CLOCK_SKEW_S:
            return Outcome.HELD
        return self._judge_owner(record, unix_s)

    def _judge_unverified(self, entry: Entry | None, record: Record, facts: Facts, unix_s: float) -> Outcome:
        """NEW where only signatures are left to check."""
        if entry is not None and record.rank <= entry.rec.rank and record.refutation <= entry.ref.refutation:
            return Outcome.DUPLICATE
        # The record of a session that a quorum ended outlives its lease as part of the tombstone; that of another kind
        # lives as long as its owner's session.
        is_lease_binding = record.kind == Kind.NODE and len(facts.votes) < QUORUM
        if is_lease_binding and entry_of(record).end_unix_s <= unix_s:
            return Outcome.EXPIRED
        if record.kind > MAX_KIND or not record.has_fair_lease:
            return Outcome.REFUSED
        if record.kind == Kind.REVOCATION:  # one entry in the swarm: a full map has room for it
            return Outcome.NEW if record.owner == self._verifier.ca else Outcome.REFUSED
        return Outcome.FULL if entry is None and len(self._entries) >= MAX_ENTRIES else Outcome.NEW

    def _judge_owner(self, record: Record, unix_s: float) -> Outcome:
        if record.kind == Kind.REVOCATION:
            return self._take_revocations(record)
        if record.kind != Kind.NODE:
            return Outcome.NEW if self._is_of_live_session(record) else Outcome.UNKNOWN
        return Outcome.NEW if self._is_by_member(record, unix_s) else Outcome.REFUSED

    def _is_of_live_session(self, record: Record) -> bool:
        node = self.node(record.owner)
        return node is not None and not node.is_dead and node.rec.session == record.session

    def _take_revocations(self, record: Record) -> Outcome:
        try:
            self.revoked = read_body(record.envelope, record.raw)
        except ProtocolError:
            return Outcome.REFUSED
        return Outcome.NEW

    def _is_by_member(self, record: Record, unix_s: float) -> bool:
        known, certificate = self._certificates.get(record.owner, (b"", None))
        encoded = record.certificate
        digest = blake2b(encoded, digest_size=CERTIFICATE_DIGEST_BYTES).digest()
        if certificate is not None and (not encoded or digest == known):
            return certificate.expires_unix_s + CLOCK_SKEW_S > unix_s
        try:
            certificate = decode_certificate(encoded)
            self._verifier.check_certificate(record.owner, certificate, int(unix_s))
            self.revoked.check_certificate(certificate)
        except TelaError:
            return False
        # Its signature has been checked, and is in the record.
        kept = msgspec.structs.replace(certificate, node=record.owner, signature=b"")
        self._certificates[record.owner] = (digest, kept)
        return True

    def _judge_vote(self, entry: Entry | None, vote: Vote, unix_s: float) -> Outcome:
        if entry is None or (vote.session, vote.incarnation) > entry.ref.refutation:
            return Outcome.UNKNOWN
        if vote not in add_votes(entry, (vote,)).votes or vote in entry.votes:
            return Outcome.DUPLICATE
        if vote.observer == vote.subject or vote.observer not in self._certificates:
            return Outcome.REFUSED
        if not self.caps.has_room(vote.observer, is_vote=True):
            return Outcome.LIMITED
        if not self._verifier.is_vote_genuine(vote):
            return Outcome.BAD_SIGNATURE
        self.caps.count(vote.observer, is_vote=True)
        return Outcome.HELD if vote.issued_unix_s > unix_s + CLOCK_SKEW_S else Outcome.NEW

    # -- storing ----------------------------------------------------------------------------------------------------

    def _store(self, key: Key, entry: Entry, unix_s: float) -> bool:
        entry = fade(entry, unix_s)
        previous = self._entries.get(key)
        if self._has_ended(key, entry, unix_s):
            return False
        if previous is not None and previous.fingerprint() == entry.fingerprint():
            return False
        self._put(key, entry)
        if key.kind == Kind.NODE and previous is not None:
            self._drop_stale_kinds(previous, entry)
        return True

    def _has_ended(self, key: Key, entry: Entry, unix_s: float) -> bool:
        if key.kind == Kind.NODE:
            return entry.end_unix_s <= unix_s
        return key.kind != Kind.REVOCATION and not self._is_of_live_session(entry.rec)

    def _drop_stale_kinds(self, previous: Entry, entry: Entry) -> None:
        if previous.rec.session == entry.rec.session and not entry.is_dead:
            return
        for kind in range(MAX_KIND + 1):
            key = Key(entry.rec.owner, kind)
            if kind != Kind.NODE and key in self._entries and not self._is_of_live_session(self._entries[key].rec):
                self._remove(key)

    def _put(self, key: Key, entry: Entry) -> None:
        previous = self._entries.get(key)
        if previous is not None:
            self._held.pop(previous.rec.raw, None)
        self._entries[key] = entry
        self._held[entry.rec.raw] = key
        self.digest.put(key, entry.fingerprint())

    def _remove(self, key: Key) -> None:
        self._held.pop(self._entries.pop(key).rec.raw, None)
        self.digest.put(key, None)
        if key.kind == Kind.NODE:
            self._certificates.pop(key.owner, None)

    def validate(self) -> None:
        """Assert what must hold between calls; for tests and TELA_DEBUG_VALIDATE."""
        fresh = Digest()
        for key, entry in self._entries.items():
            assert key == (entry.rec.owner, entry.rec.kind)
            assert entry.rec.session == entry.ref.session
            assert all(vote.kind is VoteKind.DOWN or vote.session > entry.floor for vote in entry.votes)
            fresh.put(key, entry.fingerprint())
        assert self._held.keys() == {entry.rec.raw for entry in self._entries.values()}
        assert (fresh.root, fresh.sums) == (self.digest.root, self.digest.sums)


def _with_record(entry: Entry | None, record: Record) -> Entry:
    return entry_of(record) if entry is None else join(entry, entry_of(record))
