"""Our own record: session, version, incarnation, lease. Only this file stamps it (faults.md F12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from tela.crdt.lattice import LEASE_S
from tela.record import NO_CATALOG, Card, Catalog, Envelope, Kind, NodeBody, NodeId, SessionId, SessionState
from tela.wire import encode

RENEW_S: Final = LEASE_S // 2
"""A record is renewed at half its lease: one lost renewal, or a clock five minutes off, costs nothing."""


class Author:
    """Stamps and signs what we say of ourselves."""

    def __init__(self, node: NodeId, sign: Callable[[Envelope], Envelope]) -> None:
        self.node = node
        self.session = SessionId(0)  # none before the first record
        self.state = SessionState.JOIN
        self.incarnation = 0
        self.heard = 0  # the highest session of ours that anybody showed us
        self._sign = sign
        self._card = Card()
        self._catalog = NO_CATALOG
        self._is_catalog_due = False
        self._version = 0
        self._issued_unix_s = 0

    @property
    def has_published(self) -> bool:
        """Whether we are in the registry by our own word."""
        return self.session > 0

    @property
    def has_issued(self) -> bool:
        """Whether a record of this session is out."""
        return self._version > 0

    @property
    def has_left(self) -> bool:
        """Whether our last word was LEFT."""
        return self.state is SessionState.LEFT

    def hear(self, session: int) -> None:
        """Somebody has a genuine record of this session of ours, or proof of its death."""
        self.heard = max(self.heard, session)

    def begin_session(self, unix_s: float) -> None:
        """Take a session above all that the swarm knows of, even where the clock went back (invariant I29)."""
        self.session = SessionId(max(int(unix_s * 1000), self.heard + 1, self.session + 1))
        self._version = 0
        self.incarnation = 0
        self._is_catalog_due = self._catalog != NO_CATALOG  # the last session's ends with it

    def describe(self, state: SessionState, card: Card, catalog: Catalog) -> None:
        """What the next records say. A session never goes back (invariant I7)."""
        self.state = max(self.state, state)
        self._is_catalog_due |= catalog != self._catalog
        self._catalog = catalog
        # A tombstone is kept for 70 minutes by everybody: it shrinks to what proves it.
        self._card = Card(certificate=card.certificate) if self.has_left else card

    def leave(self) -> None:
        """The next record says LEFT."""
        self.describe(SessionState.LEFT, self._card, self._catalog)

    def is_renewal_due(self, unix_s: float) -> bool:
        """Whether half the lease has passed."""
        return self.has_published and not self.has_left and unix_s >= self._issued_unix_s + RENEW_S

    def refute(self, incarnation: int) -> None:
        """The next record answers suspicion of every incarnation up to this one."""
        self.incarnation = max(self.incarnation, incarnation) + 1

    def next_records(self, unix_s: float) -> list[bytes]:
        """The next version of our record, signed; behind it the catalog's, where that is another one."""
        records = [self._next_record(unix_s)]
        if self._is_catalog_due and not self.has_left:  # a LEFT ends it by itself
            self._is_catalog_due = False
            records.append(self._signed(Kind.CATALOG, self._catalog))
        return records

    def _next_record(self, unix_s: float) -> bytes:
        assert self.has_published
        self._version += 1
        # Never before the last one: a record that was issued after the LEFT of its session could outlive its tombstone.
        self._issued_unix_s = max(int(unix_s), self._issued_unix_s)
        body = NodeBody(
            state=self.state,
            incarnation=self.incarnation,
            issued_unix_s=self._issued_unix_s,
            expires_unix_s=self._issued_unix_s + LEASE_S,
            card=self._card,
        )
        return self._signed(Kind.NODE, body)

    def _signed(self, kind: Kind, body: msgspec.Struct) -> bytes:
        envelope = Envelope(kind, self.node, self.session, self._version, encode(body), b"")
        return msgspec.msgpack.encode(self._sign(envelope))

    @property
    def version(self) -> int:
        """Of the last record."""
        return self._version
