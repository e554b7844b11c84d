"""One owner's entry and how two of them join (design/registry.md 2.2). Pure: no clock, no keys.

An entry is ``rec x ref x floor x votes``:

``rec``
    the greatest record by (session, state, version, digest): nothing, not even the owner, walks back inside a session.
``ref``
    the record with the greatest (session, incarnation) that was ever seen: it refutes suspicion. With an honest owner
    it is ``rec``; kept apart because pruning votes by ``rec`` is not associative (tests/crdt/test_lattice.py keeps the
    counterexample).
``votes``
    what observers signed, as far as it is not dominated: SUSPECT by ``ref`` or ``floor``, DOWN by a later session.
    Of each kind the QUORUM best are kept, one an observer, in an order that pruning respects, so cutting commutes with
    joining. The best DOWN votes are the oldest: nobody can make a tombstone younger by voting again.
``floor``
    the highest session known dead: a quorum of DOWN votes, whose three votes stay as its proof, or ``ref.session - 1``.

Status is derived, never stored.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import msgspec

from tela.record import Envelope, Kind, NodeId, SessionId, SessionState, Vote, VoteKind
from tela.wire import decode_envelope, encode

QUORUM: Final = 3
"""Distinct observers whose DOWN votes end a session: two may share one bad network path (registry.md 2.7)."""
LEASE_S: Final = 3600
"""A record may promise at most this much life (registry.md 2.9)."""
TOMBSTONE_S: Final = LEASE_S + 600
"""LEFT and DOWN are remembered for a lease and twice the clock skew of 300 s, so that every record that was signed
before the death has expired when its tombstone goes."""
PRESUMED_DOWN_S: Final = {1: 285, 2: 45}
"""Where fewer observers than a quorum are left, their DOWN votes count when they stood unrefuted for so long: with the
15 s before a DOWN vote, one observer needs 300 s and two need 60 s (registry.md 2.7)."""
DIGEST_BYTES: Final = 8


class Status(enum.Enum):
    """What a reader concludes of a session."""

    JOIN = "join"
    SERVING = "serving"
    DRAIN = "drain"
    LEFT = "left"
    SUSPECT = "suspect"
    DOWN = "down"


class _CardHead(msgspec.Struct, frozen=True, array_like=True):
    certificate: bytes = b""


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """The fields that merging needs; read from bodies whose rest may be newer than us or over a limit."""

    state: SessionState
    incarnation: int
    issued_unix_s: int
    expires_unix_s: int
    flags: int = 0
    card: _CardHead | None = None


_head_decoder = msgspec.msgpack.Decoder(_Head)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """An envelope with what merging needs of its body. ``raw`` is relayed byte for byte."""

    owner: NodeId
    kind: int
    session: SessionId
    state: SessionState
    version: int
    digest: bytes  # of the body
    incarnation: int
    issued_unix_s: int
    expires_unix_s: int
    raw: bytes

    @property
    def rank(self) -> tuple[int, int, int, bytes]:
        """The total order of an owner's records."""
        return (self.session, self.state, self.version, self.digest)

    @property
    def refutation(self) -> tuple[int, int]:
        """What suspicion it answers."""
        return (self.session, self.incarnation)

    @property
    def has_fair_lease(self) -> bool:
        """Whether it promises some life and at most a lease."""
        return 0 < self.expires_unix_s - self.issued_unix_s <= LEASE_S

    @property
    def certificate(self) -> bytes:
        """The owner's, encoded; b"" where the body shows none."""
        card = _read_head(self.envelope).card
        return card.certificate if card else b""

    @property
    def envelope(self) -> Envelope:
        """The envelope, decoded again: cheaper than to hold every body twice."""
        return decode_envelope(self.raw)


def parse_record(raw: bytes) -> Record:
    """Read an envelope; the signature is not checked here.

    Raises:
        ProtocolError: the envelope itself is undecodable or out of bounds. A bad *body* is none: it is kept opaque.
    """
    envelope = decode_envelope(raw)
    head = _read_head(envelope)
    return Record(
        owner=envelope.owner,
        kind=envelope.kind,
        session=envelope.session,
        state=head.state,
        version=envelope.version,
        digest=blake2b(envelope.body, digest_size=DIGEST_BYTES).digest(),
        incarnation=head.incarnation,
        issued_unix_s=head.issued_unix_s,
        expires_unix_s=head.expires_unix_s,
        raw=raw,
    )


def _read_head(envelope: Envelope) -> _Head:
    # A body without readable times lives for one lease from the start of its session: a function of the record alone.
    start_unix_s = envelope.session // 1000
    opaque = _Head(SessionState.JOIN, 0, start_unix_s, start_unix_s + LEASE_S)
    if envelope.kind != Kind.NODE:
        return opaque
    try:
        head = _head_decoder.decode(envelope.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return opaque
    in_range = all(0 <= n < 1 << 63 for n in (head.incarnation, head.issued_unix_s, head.expires_unix_s))
    return head if in_range else opaque


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """All that is known of an owner. Built by :func:`entry_of`, :func:`join` and :func:`add_votes` only."""

    rec: Record
    ref: Record
    floor: int
    votes: tuple[Vote, ...]

    @property
    def is_down(self) -> bool:
        """Whether a quorum ended the session of ``rec``."""
        return self.floor >= self.rec.session

    @property
    def is_dead(self) -> bool:
        """Whether the session is over for good (invariant I8)."""
        return self.is_down or self.rec.state is SessionState.LEFT

    @property
    def n_suspect_votes(self) -> int:
        """Observers that doubt the present session; at most QUORUM are counted."""
        return sum(vote.kind is VoteKind.SUSPECT and vote.session == self.rec.session for vote in self.votes)

    @property
    def status(self) -> Status:
        """The view of the session."""
        if self.rec.state is SessionState.LEFT:
            return Status.LEFT
        if self.is_down:
            return Status.DOWN
        return Status.SUSPECT if self.n_suspect_votes else Status[self.rec.state.name]

    def status_at(self, unix_s: float) -> Status:
        """The view of the session at a time: a suspect that few observers gave up is DOWN after a while.

        Unlike a quorum's DOWN this is a reader's conclusion: it ends no session, and a refutation takes it back.
        """
        return Status.DOWN if self.status is Status.SUSPECT and self._is_presumed_down(unix_s) else self.status

    def _is_presumed_down(self, unix_s: float) -> bool:
        downs = [
            vote.issued_unix_s
            for vote in self.votes
            if vote.kind is VoteKind.DOWN and (vote.session, vote.incarnation) == self.ref.refutation
        ]
        return bool(downs) and unix_s >= max(downs) + PRESUMED_DOWN_S[len(downs)]

    @property
    def end_unix_s(self) -> int:
        """When everybody forgets the entry: by what was signed, never by when it was heard (chitchat#155)."""
        if self.rec.state is SessionState.LEFT:
            return self.rec.issued_unix_s + TOMBSTONE_S
        if self.is_down:
            proof = (vote.issued_unix_s for vote in self.votes if vote.session == self.floor)
            return max(proof) + TOMBSTONE_S
        return self.rec.expires_unix_s

    def fingerprint(self) -> bytes:
        """8 bytes over the content: equal fingerprints, equal entries."""
        content = (self.rec.owner, self.rec.kind, self.rec.rank, self.ref.refutation, self.votes)
        return blake2b(msgspec.msgpack.encode(content), digest_size=DIGEST_BYTES).digest()


def entry_of(record: Record) -> Entry:
    """The entry that one record makes."""
    return _settle(record, record, ())


def join(left: Entry, right: Entry) -> Entry:
    """The least upper bound of two entries of one owner: commutative, associative, idempotent by fingerprint."""
    rec = max(left.rec, right.rec, key=lambda record: record.rank)
    ref = max(left.ref, right.ref, key=lambda record: record.refutation)
    return _settle(rec, ref, left.votes + right.votes)


def add_votes(entry: Entry, votes: Iterable[Vote]) -> Entry:
    """The entry with further votes on its owner."""
    return _settle(entry.rec, entry.ref, (*entry.votes, *votes))


def fade(entry: Entry, unix_s: float) -> Entry:
    """Without votes so old that they never became a quorum: separate incidents do not add up to a death."""
    if entry.is_down or all(vote.issued_unix_s + TOMBSTONE_S > unix_s for vote in entry.votes):
        return entry
    return _settle(entry.rec, entry.ref, [vote for vote in entry.votes if vote.issued_unix_s + TOMBSTONE_S > unix_s])


def drop_votes(entry: Entry, observers: Collection[NodeId]) -> Entry:
    """Without the votes of these observers, who are members no more; a death that rested on them is none."""
    kept = [vote for vote in entry.votes if vote.observer not in observers]
    return entry if len(kept) == len(entry.votes) else _settle(entry.rec, entry.ref, kept)


def _settle(rec: Record, ref: Record, votes: Sequence[Vote]) -> Entry:
    ref = rec if rec.refutation >= ref.refutation else ref
    if not votes:  # nearly always
        return Entry(rec, ref, ref.session - 1, ())
    downs: dict[int, tuple[Vote, ...]] = {}
    suspicions: list[Vote] = []
    for vote in votes:
        if vote.session < ref.session:
            continue
        if vote.kind is VoteKind.DOWN:
            downs[vote.session] = (*downs.get(vote.session, ()), vote)
        elif (vote.session, vote.incarnation) >= ref.refutation:
            suspicions.append(vote)
    downs = {session: _best(group) for session, group in downs.items()}
    dead = max((session for session, group in downs.items() if len(group) == QUORUM), default=0)
    floor = max(dead, ref.session - 1)
    kept = [vote for session, group in downs.items() if session >= dead for vote in group]
    kept += _best(vote for vote in suspicions if vote.session > floor)
    return Entry(rec, ref, floor, tuple(sorted(kept)))


def _best(votes: Iterable[Vote]) -> tuple[Vote, ...]:
    """The QUORUM first ones, one an observer: of the latest incarnation, then the oldest."""
    first: dict[NodeId, Vote] = {}
    for vote in sorted(votes, key=_precedence):
        first.setdefault(vote.observer, vote)
    return tuple(first.values())[:QUORUM]


def _precedence(vote: Vote) -> tuple[int, int, int, bytes, bytes]:
    # A DOWN vote is on the session alone; its incarnation must not make a later vote outrank an older one.
    incarnation = vote.incarnation if vote.kind is VoteKind.SUSPECT else 0
    return (-vote.session, -incarnation, vote.issued_unix_s, vote.observer, encode(vote))
