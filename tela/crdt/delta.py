"""What replicas tell each other of an entry, and the hashes by which they notice that they differ.

A *fact* is one signed statement of an entry: a record or a vote. A *delta* carries facts on one owner; joining deltas
in any order and any split gives the entry that joining the whole would (invariant I4). The digest is a root hash
(XOR of the entries' fingerprints), 16 bucket sums that ride on every ping, and lines of (id, fingerprint) for a bucket
that differs (registry.md 2.6).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

import msgspec

from tela.crdt.lattice import QUORUM, Entry, Record, parse_record
from tela.errors import ProtocolError
from tela.record import Kind, NodeId, Vote
from tela.wire import decode_vote, encode

N_BUCKETS: Final = 16
ALL_BUCKETS: Final = (1 << N_BUCKETS) - 1
"""A set of buckets is a bit mask."""
SUM_BYTES: Final = 2
ID_BYTES: Final = 8
LINE_BYTES: Final = 16
"""Id and fingerprint of one entry."""
MAX_FACTS: Final = 2 + 2 * QUORUM
"""In a delta: rec, ref and the kept votes of both kinds."""

FactId = tuple[int, int, int, bytes] | Vote


class Key(NamedTuple):
    """What an entry is on. One owner has one entry of each kind."""

    owner: NodeId
    kind: int


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Facts of one entry on the wire, each as its signer's bytes: one bad fact spoils none of its neighbours."""

    records: tuple[bytes, ...]
    votes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """A parsed delta."""

    key: Key
    records: tuple[Record, ...]
    votes: tuple[Vote, ...]

    @property
    def ids(self) -> frozenset[FactId]:
        """Which facts these are."""
        return frozenset((*(record.rank for record in self.records), *self.votes))


def facts_of(entry: Entry) -> Facts:
    """Everything that proves an entry."""
    records = (entry.rec,) if entry.ref is entry.rec else (entry.rec, entry.ref)
    return Facts(Key(entry.rec.owner, entry.rec.kind), records, entry.votes)


def delta_of(entry: Entry, known: frozenset[FactId] = frozenset()) -> Delta | None:
    """The facts of ``entry`` that a peer with ``known`` lacks; None where it lacks none."""
    facts = facts_of(entry)
    records = tuple(record.raw for record in facts.records if record.rank not in known)
    votes = tuple(encode(vote) for vote in facts.votes if vote not in known)
    return Delta(records, votes) if records or votes else None


def parse_delta(delta: Delta) -> Facts:
    """Read a delta; signatures are not checked here.

    Raises:
        ProtocolError: a fact is undecodable, facts are on different entries, or there are none or too many.
    """
    if not 0 < len(delta.records) + len(delta.votes) <= MAX_FACTS:
        raise ProtocolError(f"delta of {len(delta.records)} records and {len(delta.votes)} votes")
    records = tuple(map(parse_record, delta.records))
    votes = tuple(map(decode_vote, delta.votes))
    keys = {Key(record.owner, record.kind) for record in records} | {Key(vote.subject, Kind.NODE) for vote in votes}
    if len(keys) != 1:
        raise ProtocolError("delta on more than one entry")
    return Facts(keys.pop(), records, votes)


class Digest:
    """Hashes of a map's content, kept up to date entry by entry."""

    def __init__(self) -> None:
        self.root = 0
        self._sums = [0] * N_BUCKETS
        self._buckets: list[dict[bytes, bytes]] = [{} for _ in range(N_BUCKETS)]  # id -> fingerprint
        self._keys: dict[bytes, Key] = {}

    def put(self, key: Key, fingerprint: bytes | None) -> None:
        """Note the entry's new fingerprint; None: it is gone."""
        entry_id = _id_of(key)
        bucket = _bucket_of(entry_id)
        previous = self._buckets[bucket].pop(entry_id, None)
        self._keys.pop(entry_id, None)
        if fingerprint is not None:
            self._buckets[bucket][entry_id] = fingerprint
            self._keys[entry_id] = key
        for changed in filter(None, (previous, fingerprint)):
            self.root ^= int.from_bytes(changed, "big")
            self._sums[bucket] ^= int.from_bytes(changed[:SUM_BYTES], "big")

    @property
    def sums(self) -> bytes:
        """The bucket sums, SUM_BYTES each."""
        return b"".join(value.to_bytes(SUM_BYTES, "big") for value in self._sums)

    def differing(self, root: int, sums: bytes) -> int:
        """Buckets in which a peer with these hashes differs from us. All, where only the root tells it."""
        if root == self.root:
            return 0
        ours = self.sums
        mask = 0
        for bucket in range(N_BUCKETS):
            span = slice(bucket * SUM_BYTES, (bucket + 1) * SUM_BYTES)
            mask |= (ours[span] != sums[span]) << bucket
        return mask or ALL_BUCKETS

    def lines(self, mask: int) -> bytes:
        """(id, fingerprint) of every entry in these buckets."""
        chosen = (items for bucket, items in enumerate(self._buckets) if mask >> bucket & 1)
        return b"".join(part for items in chosen for line in sorted(items.items()) for part in line)

    def compare(self, mask: int, lines: bytes) -> tuple[list[Key], list[bytes]]:
        """Against a peer's lines of these buckets: entries that it lacks or has otherwise, ids to ask for."""
        theirs = {
            lines[at : at + ID_BYTES]: lines[at + ID_BYTES : at + LINE_BYTES]
            for at in range(0, len(lines) - LINE_BYTES + 1, LINE_BYTES)
        }
        ours: dict[bytes, bytes] = {}
        for bucket, items in enumerate(self._buckets):
            if mask >> bucket & 1:
                ours |= items
        send = [self._keys[entry_id] for entry_id in ours if theirs.get(entry_id) != ours[entry_id]]
        ask = [entry_id for entry_id in theirs if ours.get(entry_id) != theirs[entry_id]]
        # NODE records first: a peer takes an owner's other kinds only when it knows the owner.
        return sorted(send, key=lambda key: (key.kind, key.owner)), sorted(ask)

    def key_of(self, entry_id: bytes) -> Key | None:
        """The entry that an id names."""
        return self._keys.get(entry_id)


def _id_of(key: Key) -> bytes:
    return blake2b(key.owner + bytes((key.kind,)), digest_size=ID_BYTES).digest()


def _bucket_of(entry_id: bytes) -> int:
    return entry_id[0] % N_BUCKETS
