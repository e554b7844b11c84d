"""Keys, signatures and who may be what: the only importer of PyNaCl.

A swarm has a CA key that stays offline. It certifies one *issuing key* per provider; an issuing key signs join tokens
(inside invites) and membership certificates. **Provider is the name in the certificate's chain**, never what a node
says of itself (design/overlay.md 4). All times are unix seconds and arrive as arguments.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
from nacl.bindings import crypto_sign, crypto_sign_open, crypto_sign_seed_keypair
from nacl.exceptions import BadSignatureError

from tela.errors import ConfigError, IntegrityError, RefusedError
from tela.record import NODE_ID_BYTES, SIGNATURE_BYTES, Envelope, NodeId, SwarmId, Vote
from tela.wire import Claim, claim_signing_bytes, decode, encode, record_signing_bytes, vote_signing_bytes

CLOCK_SKEW_S: Final = 300
"""Clocks of members may differ by this much (design/registry.md 2.3)."""
MAX_KNOWN_CHAINS: Final = 256
"""Issuers of a swarm: one a provider, and a few that were rotated."""
_ISSUER_PREFIX: Final = b"tela/issuer/1"
_MEMBER_PREFIX: Final = b"tela/member/1"
_TOKEN_PREFIX: Final = b"tela/token/1"


class KeyPair:
    """An Ed25519 key. ``public`` is 32 bytes and, for a node, its NodeId."""

    def __init__(self, seed: bytes) -> None:
        public, self._secret = crypto_sign_seed_keypair(seed)
        self.seed = seed
        self.public = NodeId(public)

    @classmethod
    def generate(cls) -> KeyPair:
        """A new key from the operating system's randomness."""
        return cls(os.urandom(32))

    def sign(self, message: bytes) -> bytes:
        """64-byte signature."""
        return bytes(crypto_sign(message, self._secret)[:SIGNATURE_BYTES])


def is_signed_by(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether ``signature`` over ``message`` is by ``public``; False for malformed and for weak keys too.

    libsodium's check (RFC 8032 section 5.1.7 without a cofactor) also refuses keys and points of small order and an S
    that is not reduced: no signature has a second form.
    """
    if len(public) != NODE_ID_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        crypto_sign_open(signature + message, public)
    except BadSignatureError:
        return False
    return True


def load_or_create_key(path: Path) -> KeyPair:
    """The key in ``path`` (32 bytes, mode 0600), made on first use.

    Raises:
        ConfigError: the file exists but is not a key, or cannot be read.
    """
    try:
        seed = path.read_bytes()
    except FileNotFoundError:
        key = KeyPair.generate()
        write_secret(path, key.seed)
        return key
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}") from error
    if len(seed) != 32:
        raise ConfigError(
            f"{path} is not a key: {len(seed)} bytes instead of 32", hint=f"remove it to get a new one: rm {path}"
        )
    return KeyPair(seed)


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    partial.replace(path)


# -- certificates and tokens ----------------------------------------------------------------------------------------


class IssuerCertificate(msgspec.Struct, frozen=True, array_like=True):
    """The CA's word that a key issues for a provider."""

    swarm: SwarmId
    issuer: bytes
    provider: str
    not_before_unix_s: int
    expires_unix_s: int
    signature: bytes = b""


class Certificate(msgspec.Struct, frozen=True, array_like=True):
    """An issuer's word that a node key is a member. ``chain`` leads to the CA."""

    node: NodeId
    zone: str
    region: str
    roles: tuple[str, ...]
    not_before_unix_s: int
    expires_unix_s: int
    chain: IssuerCertificate
    signature: bytes = b""

    @property
    def provider(self) -> str:
        """The institution whose key certified the node."""
        return self.chain.provider


class JoinToken(msgspec.Struct, frozen=True, array_like=True):
    """The right of ``uses`` keys to get a certificate until it expires. The secret part of an invite."""

    token_id: bytes
    zone: str
    region: str
    roles: tuple[str, ...]
    not_before_unix_s: int
    expires_unix_s: int
    uses: int
    member_days: int
    chain: IssuerCertificate
    signature: bytes = b""


_Signed = IssuerCertificate | Certificate | JoinToken
_PREFIX: Final[dict[type, bytes]] = {
    IssuerCertificate: _ISSUER_PREFIX,
    Certificate: _MEMBER_PREFIX,
    JoinToken: _TOKEN_PREFIX,
}


def _signing_bytes(value: _Signed) -> bytes:
    return _PREFIX[type(value)] + encode(msgspec.structs.replace(value, signature=b""))


def issue_issuer(
    ca: KeyPair, *, swarm: SwarmId, issuer: bytes, provider: str, now: int, days: int
) -> IssuerCertificate:
    """Certify an issuing key for a provider."""
    unsigned = IssuerCertificate(swarm, issuer, provider, now - CLOCK_SKEW_S, now + days * 86_400)
    return msgspec.structs.replace(unsigned, signature=ca.sign(_signing_bytes(unsigned)))


class Issuer(msgspec.Struct, frozen=True):
    """An issuing key with its certificate: what a hub needs to admit members of a provider."""

    key: KeyPair
    certificate: IssuerCertificate

    def token(
        self,
        *,
        zone: str,
        region: str,
        roles: tuple[str, ...],
        now: int,
        expires_s: int,
        uses: int,
        member_days: int = 30,
    ) -> JoinToken:
        """A join token for an invite."""
        unsigned = JoinToken(
            os.urandom(8), zone, region, roles, now - CLOCK_SKEW_S, now + expires_s, uses, member_days, self.certificate
        )
        return msgspec.structs.replace(unsigned, signature=self.key.sign(_signing_bytes(unsigned)))

    def admit(self, token: JoinToken, node: NodeId, now: int) -> Certificate:
        """A membership certificate with the token's provider, zone, region and roles. The token was checked before."""
        expires = min(now + token.member_days * 86_400, self.certificate.expires_unix_s)
        unsigned = Certificate(
            node, token.zone, token.region, token.roles, now - CLOCK_SKEW_S, expires, self.certificate
        )
        return msgspec.structs.replace(unsigned, signature=self.key.sign(_signing_bytes(unsigned)))

    def renew(self, certificate: Certificate, now: int) -> Certificate:
        """A certificate like this one and for as long, from now on, by our key. The old one was checked before."""
        life_s = certificate.expires_unix_s - certificate.not_before_unix_s - CLOCK_SKEW_S
        unsigned = msgspec.structs.replace(
            certificate,
            not_before_unix_s=now - CLOCK_SKEW_S,
            expires_unix_s=min(now + life_s, self.certificate.expires_unix_s),
            chain=self.certificate,
            signature=b"",
        )
        return msgspec.structs.replace(unsigned, signature=self.key.sign(_signing_bytes(unsigned)))


def check_token(token: JoinToken, *, swarm: SwarmId, ca: bytes, now: int) -> None:
    """Raise RefusedError (foreign-ca, expired) or IntegrityError (tampered) unless the token is good at ``now``."""
    _check_chain(token.chain, swarm=swarm, ca=ca, now=now)
    _check_signed(token, "invite", now)


def check_certificate(certificate: Certificate, *, node: NodeId, swarm: SwarmId, ca: bytes, now: int) -> None:
    """Raise RefusedError or IntegrityError unless ``certificate`` makes ``node`` a member at ``now``."""
    if certificate.node != node:
        raise RefusedError("the certificate belongs to another key", code="foreign-key")
    _check_chain(certificate.chain, swarm=swarm, ca=ca, now=now)
    _check_signed(certificate, "certificate", now)


def _check_chain(chain: IssuerCertificate, *, swarm: SwarmId, ca: bytes, now: int) -> None:
    if chain.swarm != swarm:
        raise RefusedError("it is for another swarm", code="foreign-swarm")
    if not _is_chain_genuine(ca, chain):
        raise RefusedError("its issuer is not certified by this swarm's CA", code="foreign-ca")
    _check_times(chain, "issuer certificate", now)


@lru_cache(maxsize=MAX_KNOWN_CHAINS)
def _is_chain_genuine(ca: bytes, chain: IssuerCertificate) -> bool:
    """Remembered, since a swarm has a few issuers and a thousand members that show the same chain."""
    return is_signed_by(ca, chain.signature, _signing_bytes(chain))


def _check_signed(value: Certificate | JoinToken, what: str, now: int) -> None:
    if not is_signed_by(value.chain.issuer, value.signature, _signing_bytes(value)):
        raise IntegrityError(f"the {what} was altered: its signature does not match", code="tampered")
    _check_times(value, what, now)


def _check_times(value: _Signed, what: str, now: int) -> None:
    if now > value.expires_unix_s + CLOCK_SKEW_S:
        raise RefusedError(
            f"the {what} expired {now - value.expires_unix_s} s ago",
            code="expired",
            hint="ask for a new invite: tela invite create",
        )
    if now < value.not_before_unix_s - CLOCK_SKEW_S:
        raise RefusedError(f"the {what} is not valid yet", code="not-yet-valid", hint="check this host's clock")


_certificate_decoder = msgspec.msgpack.Decoder(Certificate)


def decode_certificate(data: bytes) -> Certificate:
    """A certificate; what a thousand members have alike is one object.

    Raises:
        ProtocolError: the bytes are none.
    """
    certificate = decode(data, _certificate_decoder, "certificate")
    zone, region, roles, chain = _alike(certificate.zone, certificate.region, certificate.roles, certificate.chain)
    return msgspec.structs.replace(certificate, zone=zone, region=region, roles=roles, chain=chain)


@lru_cache(maxsize=MAX_KNOWN_CHAINS)
def _alike(*values: Any) -> tuple[Any, ...]:  # noqa: ANN401 - whatever it is given, and always the first of equals
    return values


# -- signing what travels -------------------------------------------------------------------------------------------


def sign_envelope(key: KeyPair, swarm: SwarmId, envelope: Envelope) -> Envelope:
    """The envelope with its owner's signature."""
    assert envelope.owner == key.public
    return msgspec.structs.replace(envelope, signature=key.sign(record_signing_bytes(swarm, envelope)))


def is_envelope_genuine(swarm: SwarmId, envelope: Envelope) -> bool:
    """Whether the owner signed it, in this swarm."""
    return is_signed_by(envelope.owner, envelope.signature, record_signing_bytes(swarm, envelope))


def sign_vote(key: KeyPair, swarm: SwarmId, vote: Vote) -> Vote:
    """The vote with its observer's signature."""
    assert vote.observer == key.public
    return msgspec.structs.replace(vote, signature=key.sign(vote_signing_bytes(swarm, vote)))


def is_vote_genuine(swarm: SwarmId, vote: Vote) -> bool:
    """Whether the observer signed it, in this swarm."""
    return is_signed_by(vote.observer, vote.signature, vote_signing_bytes(swarm, vote))


def sign_claim(key: KeyPair, swarm: SwarmId, claim: Claim) -> Claim:
    """The claim with its ingress' signature."""
    assert claim.ingress == key.public
    return msgspec.structs.replace(claim, signature=key.sign(claim_signing_bytes(swarm, claim)))


def is_claim_genuine(swarm: SwarmId, claim: Claim) -> bool:
    """Whether the ingress named in it signed it, in this swarm."""
    return is_signed_by(claim.ingress, claim.signature, claim_signing_bytes(swarm, claim))
