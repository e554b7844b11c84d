"""What the CA took back: one signed list of node keys, join tokens and issuing keys, carried as a record of the CA.

The list is an :class:`Envelope` of kind REVOCATION whose owner is the CA's public key, so it floods and is kept like
any record, and forwarders need not trust each other. It only grows: each version holds the one before it, and versions
are compared as those of other records (decision 0009).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import msgspec

from tela.errors import IntegrityError, ProtocolError, RefusedError, UsageError
from tela.identity import Certificate, JoinToken, KeyPair, is_envelope_genuine, sign_envelope
from tela.record import Envelope, Kind, NodeId, SessionId, SwarmId, short
from tela.wire import decode, decode_envelope, encode

MAX_REVOKED: Final = 120
"""Entries of 41 bytes in a record of 5 KiB. Who needs more revokes the provider whose key certified them all."""
_SESSION: Final = SessionId(1)
"""The CA has one life: its list is ordered by version alone."""


class RevokedKind(enum.IntEnum):
    """What an entry takes back. Kinds that a reader does not know are kept and relayed, and deny nothing."""

    NODE = 1
    TOKEN = 2
    ISSUER = 3


class Revoked(msgspec.Struct, frozen=True, array_like=True):
    """One entry: a node key, the id of a join token, or a provider's issuing key."""

    kind: int
    id: bytes
    revoked_unix_s: int


_body_decoder = msgspec.msgpack.Decoder(tuple[Revoked, ...])


@dataclass(frozen=True)
class Revocations:
    """The list as this node knows it; ``raw`` is its envelope, b"" where the CA never took anything back."""

    items: tuple[Revoked, ...] = ()
    version: int = 0
    raw: bytes = b""

    @property
    def nodes(self) -> frozenset[NodeId]:
        """The node keys on the list."""
        return frozenset(NodeId(item.id) for item in self.items if item.kind == RevokedKind.NODE)

    @cached_property
    def _ids(self) -> frozenset[tuple[int, bytes]]:
        return frozenset((item.kind, item.id) for item in self.items)

    def has(self, kind: RevokedKind, revoked_id: bytes) -> bool:
        """Whether this very thing was taken back."""
        return (kind, revoked_id) in self._ids

    def denies(self, certificate: Certificate) -> bool:
        """Whether the certificate makes nobody a member any more: its key or its issuer was revoked."""
        return self.has(RevokedKind.NODE, certificate.node) or self.has(RevokedKind.ISSUER, certificate.chain.issuer)

    def check_certificate(self, certificate: Certificate) -> None:
        """Raise RefusedError (revoked) where the list denies ``certificate``."""
        self.check_node(certificate.node)
        self._check_issuer(certificate.chain.issuer, certificate.provider)

    def check_node(self, node: NodeId) -> None:
        """Raise RefusedError (revoked) where the key of a node was taken back."""
        if self.has(RevokedKind.NODE, node):
            raise RefusedError(f"the swarm's CA revoked the key of node {short(node)}", code="revoked", hint=_ASK)

    def check_token(self, token: JoinToken) -> None:
        """Raise RefusedError (revoked) where the list denies ``token``."""
        if self.has(RevokedKind.TOKEN, token.token_id):
            raise RefusedError(
                f"the swarm's CA revoked the invite {token.token_id.hex()}",
                code="revoked",
                hint="ask for a new invite: tela invite create",
            )
        self._check_issuer(token.chain.issuer, token.chain.provider)

    def _check_issuer(self, issuer: bytes, provider: str) -> None:
        if self.has(RevokedKind.ISSUER, issuer):
            raise RefusedError(f"the swarm's CA revoked a key of provider {provider}", code="revoked", hint=_ASK)


NOTHING_REVOKED: Final = Revocations()
_ASK: Final = "ask those who run the swarm; a new invite needs a new key"


def read_body(envelope: Envelope, raw: bytes) -> Revocations:
    """The list in an envelope whose owner and signature were checked.

    Raises:
        ProtocolError: the body is no list, or has more than MAX_REVOKED entries.
    """
    items = decode(envelope.body, _body_decoder, "revocation list")
    if len(items) > MAX_REVOKED:
        raise ProtocolError(f"revocation list of {len(items)} entries, at most {MAX_REVOKED}")
    return Revocations(items, envelope.version, raw)


def read_revocations(raw: bytes, *, swarm: SwarmId, ca: bytes) -> Revocations:
    """A list from a file, a command or a peer.

    Raises:
        ProtocolError: it is no revocation list.
        IntegrityError: the CA of this swarm did not sign it.
    """
    envelope = decode_envelope(raw)
    if envelope.kind != Kind.REVOCATION:
        raise ProtocolError(f"a record of kind {envelope.kind} is no revocation list")
    if envelope.owner != ca or not is_envelope_genuine(swarm, envelope):
        raise IntegrityError("this swarm's CA did not sign the revocation list")
    return read_body(envelope, raw)


def revoke(
    ca: KeyPair, swarm: SwarmId, known: Revocations, what: Iterable[tuple[RevokedKind, bytes]], *, now: int
) -> Revocations:
    """The next list: all of ``known`` and ``what``, signed. ``known`` itself where it holds all of it already.

    Raises:
        UsageError: it would have more than MAX_REVOKED entries.
    """
    fresh = [Revoked(kind, revoked_id, now) for kind, revoked_id in what if not known.has(kind, revoked_id)]
    if not fresh:
        return known
    items = (*known.items, *fresh)
    if len(items) > MAX_REVOKED:
        raise UsageError(
            f"the list of revocations is full: {len(known.items)} of {MAX_REVOKED}",
            code="revocations-full",
            hint="revoke the provider whose key certified them, and give its good nodes new invites: "
            "tela provider revoke NAME",
        )
    version = known.version + 1
    unsigned = Envelope(Kind.REVOCATION, ca.public, _SESSION, version, msgspec.msgpack.encode(items), b"")
    return Revocations(items, version, encode(sign_envelope(ca, swarm, unsigned)))


def newest(lists: Iterable[Revocations]) -> Revocations:
    """The list with the highest version; an empty one where there is none."""
    return max(lists, key=lambda each: each.version, default=NOTHING_REVOKED)
