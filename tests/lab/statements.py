"""Signed statements for tests of crdt and gossip, with signatures that are cheap and still tell who signed what."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from tela.crdt.delta import Delta
from tela.crdt.gmap import Verifier
from tela.crdt.lattice import Record, parse_record
from tela.errors import RefusedError
from tela.gossip.core import Signer
from tela.identity import Certificate, IssuerCertificate
from tela.record import (
    Card,
    Envelope,
    InstanceState,
    Kind,
    NodeBody,
    NodeId,
    Service,
    SessionId,
    SessionState,
    SwarmId,
    Vote,
    VoteKind,
)
from tela.wire import encode, record_signing_bytes, vote_signing_bytes

SWARM = SwarmId(bytes(16))
NOW = 1_800_000_000
"""Unix seconds at which tests begin."""


def node(number: int) -> NodeId:
    """A node id that sorts by its number and spreads over the buckets."""
    return NodeId(number.to_bytes(2, "big") + blake2b(bytes([number % 256]), digest_size=30).digest())


CA = node(65_535)


def certificate(owner: NodeId, provider: str = "eth", roles: tuple[str, ...] = ("worker",)) -> Certificate:
    chain = IssuerCertificate(SWARM, bytes(32), provider, 0, 1 << 40)
    return Certificate(owner, "euler", "ch", roles, 0, 1 << 40, chain, signature=b"genuine")


def card(
    owner: NodeId,
    *models: str,
    state: InstanceState = InstanceState.READY,
    roles: tuple[str, ...] = ("worker",),
) -> Card:
    services = tuple(Service(index, "vllm", model, state) for index, model in enumerate(models))
    return Card(certificate=encode(certificate(owner, roles=roles)), services=services)


def _signature(signer: NodeId, message: bytes) -> bytes:
    return blake2b(message, key=signer, digest_size=64).digest()


def sign_envelope(envelope: Envelope) -> Envelope:
    signature = _signature(envelope.owner, record_signing_bytes(SWARM, envelope))
    return msgspec.structs.replace(envelope, signature=signature)


def sign_vote(vote: Vote) -> Vote:
    return msgspec.structs.replace(vote, signature=_signature(vote.observer, vote_signing_bytes(SWARM, vote)))


def check_certificate(owner: NodeId, given: Certificate, unix_s: int) -> None:
    if given.node != owner or given.signature != b"genuine":
        raise RefusedError("no member")


SIGNER = Signer(sign_envelope, sign_vote)


class CountingVerifier:
    """Verifies for real and counts how often it was asked."""

    def __init__(self) -> None:
        self.n_verified = 0
        self.verifier = Verifier(self._envelope, self._vote, check_certificate, CA)

    def _envelope(self, envelope: Envelope) -> bool:
        self.n_verified += 1
        return envelope.signature == sign_envelope(envelope).signature

    def _vote(self, vote: Vote) -> bool:
        self.n_verified += 1
        return vote.signature == sign_vote(vote).signature


def raw_record(
    owner: NodeId,
    *,
    session: int = NOW * 1000,
    state: SessionState = SessionState.SERVING,
    version: int = 1,
    incarnation: int = 0,
    issued: int = NOW,
    lease_s: int = 3600,
    models: tuple[str, ...] = (),
    extra: tuple[object, ...] = (),
) -> bytes:
    body = NodeBody(state, incarnation, issued, issued + lease_s, card=card(owner, *models))
    encoded = encode(body)
    if extra:
        encoded = msgspec.msgpack.encode([*msgspec.msgpack.decode(encoded), *extra])
    return raw_envelope(owner, encoded, session=session, version=version)


def raw_envelope(
    owner: NodeId, body: bytes, *, session: int = NOW * 1000, version: int = 1, kind: int = Kind.NODE
) -> bytes:
    return encode(sign_envelope(Envelope(kind, owner, SessionId(session), version, body, b"")))


def raw_revocations(*items: tuple[int, bytes], version: int = 1, owner: NodeId = CA) -> bytes:
    body = msgspec.msgpack.encode([(kind, revoked_id, NOW) for kind, revoked_id in items])
    return raw_envelope(owner, body, session=1, version=version, kind=Kind.REVOCATION)


def record(owner: NodeId, **fields: object) -> Record:
    return parse_record(raw_record(owner, **fields))  # type: ignore[arg-type]


def vote(
    observer: NodeId,
    subject: NodeId,
    *,
    session: int = NOW * 1000,
    incarnation: int = 0,
    kind: VoteKind = VoteKind.SUSPECT,
    issued: int = NOW,
) -> Vote:
    return sign_vote(Vote(observer, subject, SessionId(session), incarnation, kind, issued, b""))


def delta(*facts: bytes | Vote) -> Delta:
    return Delta(
        tuple(fact for fact in facts if isinstance(fact, bytes)),
        tuple(encode(fact) for fact in facts if isinstance(fact, Vote)),
    )
