"""Who may be a member: certificates and join tokens, exchanged on the one stream that strangers are served.

One exchange makes a connection a member's, ``/tela/admit/1``: the dialer presents its certificate or a join token, the
other side answers with its own certificate, a new one for the dialer where a token was good, or a code and a reason
that both sides log. Only a holder of the provider's issuing key can turn a token, or a certificate that is half
through, into a new certificate. A refusal of what the CA revoked comes with the CA's list: no refuser need be believed.
:func:`decide` is pure; the rest moves bytes (design/overlay.md 4, decision 0009).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from tela.errors import ConfigError, IntegrityError, PeerError, ProtocolError, RefusedError
from tela.identity import (
    CLOCK_SKEW_S,
    Certificate,
    Issuer,
    JoinToken,
    KeyPair,
    check_certificate,
    check_token,
    write_secret,
)
from tela.net.bounds import deadline
from tela.net.messages import receive_message, send_message, wait_end
from tela.net.swarmclock import SwarmClock
from tela.net.transport import Mesh, Stream, StreamHandler
from tela.observe import admissions, log
from tela.record import NodeId, Role, SwarmId, short
from tela.revocation import NOTHING_REVOKED, Revocations, RevokedKind
from tela.wire import ADMISSION_PROTOCOL, PROTOCOL_MAX, PROTOCOL_MIN, decode, negotiate_version

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings trio-stubs, which hide trio's own types from mypy

ADMISSION_TIMEOUT_S: Final = 10.0
"""For one exchange, and for a stranger to begin one before its connection is closed."""
MAX_ADMISSION_BYTES: Final = 8 * 1024
"""One message: two certificates with their chains and a reason take under 2 KiB, a revocation list 5 KiB."""
_REAP_INTERVAL_S: Final = 1.0
VERSIONS: Final = (PROTOCOL_MIN, PROTOCOL_MAX)


class AdmissionRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a dialer presents. ``token`` is used where ``certificate`` is missing or no longer good."""

    versions: tuple[int, int]
    swarm: SwarmId
    certificate: Certificate | None = None
    token: JoinToken | None = None
    is_renewal: bool = False  # a new certificate is wanted for the one presented; no use of a token


class AdmissionReply(msgspec.Struct, frozen=True, array_like=True):
    """The answer. ``code`` is empty where the dialer is a member now."""

    versions: tuple[int, int]
    certificate: Certificate | None = None  # of the one who answers
    issued: Certificate | None = None  # for the dialer, where its token was taken or its certificate renewed
    code: str = ""
    reason: str = ""
    revocations: bytes = b""  # the CA's list, where the code is "revoked"
    unix_s: int = 0  # the time there


_request_decoder = msgspec.msgpack.Decoder(AdmissionRequest)
_reply_decoder = msgspec.msgpack.Decoder(AdmissionReply)


@dataclass(frozen=True, slots=True)
class Membership:
    """What a node knows of its swarm and can prove of itself."""

    swarm: SwarmId
    ca: bytes
    key: KeyPair
    certificate: Certificate | None = None
    token: JoinToken | None = None
    issuers: tuple[Issuer, ...] = ()  # of the providers whose invites this node can redeem
    revoked: Revocations = NOTHING_REVOKED


def certify_self(membership: Membership, now: int) -> Certificate:
    """The certificate of the very first hub, which has an issuing key and nobody to ask.

    Raises:
        RefusedError: it has no invite, or no issuing key for the provider of its invite, or the invite is not good.
        IntegrityError: the invite was altered.
    """
    if membership.token is None:
        raise RefusedError("this node has no invite", code="no-token", hint="give it the line of tela swarm init")
    return _redeem(membership.token, membership.key.public, membership, now)


def decide(
    request: AdmissionRequest, peer: NodeId, membership: Membership, now: int, users: frozenset[NodeId]
) -> tuple[AdmissionReply, Certificate | None]:
    """Answer a dialer: the reply, and the certificate that makes it a member, None where it is refused.

    Args:
        request: what it presented.
        peer: the key that it proved to hold.
        membership: ours.
        now: unix seconds.
        users: the keys that have used the presented token before.
    """
    try:
        version = negotiate_version(VERSIONS, request.versions)
        if version is None:
            raise RefusedError(f"we speak versions {VERSIONS}, not {request.versions}", code="version")
        if request.swarm != membership.swarm:
            raise RefusedError("this node belongs to another swarm", code="foreign-swarm")
        if membership.certificate is None:
            raise RefusedError("this node is not a member itself", code="not-a-member")
        certificate = _certificate_for(request, peer, membership, now, users)
    except (RefusedError, IntegrityError) as error:
        proof = membership.revoked.raw if error.code == "revoked" else b""
        return AdmissionReply(VERSIONS, membership.certificate, None, error.code, str(error), proof), None
    issued = None if certificate == request.certificate else certificate
    return AdmissionReply(VERSIONS, membership.certificate, issued), certificate


def _certificate_for(
    request: AdmissionRequest, peer: NodeId, membership: Membership, now: int, users: frozenset[NodeId]
) -> Certificate:
    membership.revoked.check_node(peer)
    if request.certificate is not None:
        try:
            check_member(request.certificate, peer, membership, now)
        except (RefusedError, IntegrityError):
            if request.token is None:
                raise
        else:
            return _renew(request.certificate, membership, now) if request.is_renewal else request.certificate
    if request.token is None:
        raise RefusedError("neither a certificate nor an invite was presented", code="no-token")
    if peer not in users and len(users) >= request.token.uses:
        raise RefusedError(f"the invite was used {request.token.uses} times", code="used-up")
    return _redeem(request.token, peer, membership, now)


def check_member(certificate: Certificate, node: NodeId, membership: Membership, now: int) -> None:
    """Raise RefusedError or IntegrityError unless ``certificate`` makes ``node`` a member of our swarm at ``now``."""
    check_certificate(certificate, node=node, swarm=membership.swarm, ca=membership.ca, now=now)
    membership.revoked.check_certificate(certificate)


def _renew(certificate: Certificate, membership: Membership, now: int) -> Certificate:
    """A new certificate, or the same where it is not half through or another hub must be asked."""
    issuer = issuer_of(certificate.provider, membership)
    if issuer is None or now < half_life_unix_s(certificate):
        return certificate
    return issuer.renew(certificate, now)


def issuer_of(provider: str, membership: Membership) -> Issuer | None:
    """Our issuing key of a provider that was not revoked: a member may be renewed by another key than its first."""
    return next(
        (
            one
            for one in membership.issuers
            if one.certificate.provider == provider
            and not membership.revoked.has(RevokedKind.ISSUER, one.certificate.issuer)
        ),
        None,
    )


def half_life_unix_s(certificate: Certificate) -> int:
    """From when on a certificate is renewed."""
    return (certificate.not_before_unix_s + CLOCK_SKEW_S + certificate.expires_unix_s) // 2


def _redeem(token: JoinToken, node: NodeId, membership: Membership, now: int) -> Certificate:
    check_token(token, swarm=membership.swarm, ca=membership.ca, now=now)
    membership.revoked.check_token(token)
    issuer = next((one for one in membership.issuers if one.certificate.issuer == token.chain.issuer), None)
    if issuer is None:
        raise RefusedError(
            f"this hub holds no issuing key of provider {token.chain.provider}",
            code="no-issuer",
            hint=f"join through a hub of {token.chain.provider}",
        )
    return issuer.admit(token, node, now)


class TokenUses:
    """Which keys used which tokens: a key counts once. Kept in ``path`` (JSON), in memory only where it is None.

    Each hub counts for itself: ``uses`` is a bound per hub that holds the issuing key.

    Raises:
        ConfigError: the file cannot be read.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._users: dict[str, list[str]] = {}
        if path is not None and path.exists():
            try:
                self._users = msgspec.json.decode(path.read_bytes(), type=dict[str, list[str]])
            except (OSError, msgspec.DecodeError) as error:
                raise ConfigError(f"cannot read {path}: {error}", hint=f"remove it: rm {path}") from error

    def users(self, token_id: bytes) -> frozenset[NodeId]:
        """The keys that used a token."""
        return frozenset(NodeId(bytes.fromhex(user)) for user in self._users.get(token_id.hex(), ()))

    def tokens_of(self, node: NodeId) -> list[bytes]:
        """The ids of the tokens that a key used."""
        return sorted(bytes.fromhex(token_id) for token_id, users in self._users.items() if node.hex() in users)

    def add(self, token: JoinToken, node: NodeId) -> None:
        """Count a use, on disk before it returns."""
        users = self._users.setdefault(token.token_id.hex(), [])
        if node.hex() not in users:
            users.append(node.hex())
            if self._path is not None:
                write_secret(self._path, msgspec.json.encode(self._users))


class Admission:
    """Both ends of admission on one node. :meth:`serve` must run before connections are made."""

    def __init__(
        self,
        mesh: Mesh,
        membership: Membership,
        *,
        clock: SwarmClock,
        uses: TokenUses,
        on_certificate: Callable[[Certificate], None],
        on_proof: Callable[[bytes], None],
    ) -> None:
        self._mesh = mesh
        self._clock = clock
        self._now = clock.now
        self._uses = uses
        self._on_certificate = on_certificate
        self._on_proof = on_proof
        self._members: dict[NodeId, Certificate] = {}
        self._strangers: dict[NodeId, float] = {}  # peer -> trio time until which it may stay one
        self.membership = membership

    async def serve(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer dialers; close connections of peers that stay strangers or whose certificate is good no more."""
        self._mesh.on_connection(self._on_connection)
        self._mesh.handle(ADMISSION_PROTOCOL, self._answer)
        task_status.started()
        while True:
            await trio.sleep(_REAP_INTERVAL_S)
            for peer, code, reason in self._overdue():
                log.info("admission.refuse", peer=short(peer), code=code, reason=reason)
                await self._mesh.disconnect(peer)

    def certificate_of(self, peer: NodeId) -> Certificate | None:
        """The checked certificate of a peer on its present connection, None for strangers."""
        return self._members.get(peer)

    def members_only(self, handler: StreamHandler, *, role: Role | None = None) -> StreamHandler:
        """``handler`` for members, with ``role`` in their certificate where it is given; other streams are reset."""

        async def serve(stream: Stream) -> None:
            certificate = self._members.get(stream.peer)
            if certificate is not None and (role is None or role in certificate.roles):
                await handler(stream)

        return serve

    def revoke(self, revoked: Revocations) -> None:
        """Refuse what this list names from now on; links of members that it names are closed within a second."""
        self.membership = replace(self.membership, revoked=revoked)

    def renew_by_ourselves(self) -> bool:
        """Where this node holds its provider's issuing key: a new certificate, asking nobody."""
        ours, now = self.membership, int(self._now())
        if ours.certificate is None:
            return False
        renewed = _renew(ours.certificate, ours, now)
        if renewed == ours.certificate:
            return False
        self._take_certificate(renewed)
        return True

    async def renew(self, peer: NodeId) -> bool:
        """Ask a peer, who is a member, for a new certificate; whether it gave one. Raises what :meth:`join` raises."""
        before = self.membership.certificate
        await self._present(peer, is_renewal=True)
        return self.membership.certificate != before

    async def join(self, peer: NodeId) -> Certificate:
        """Present ourselves to a peer that we are connected to, and check who it is.

        Returns:
            The peer's certificate.

        Raises:
            RefusedError, IntegrityError: it refused us, or is no member itself; ``code`` says why.
            PeerError: it went away or does not speak the protocol.
            DeadlineError: ADMISSION_TIMEOUT_S passed.
        """
        certificate = await self._present(peer)
        log.info("admission.join", peer=short(peer), provider=certificate.provider)
        return certificate

    async def _present(self, peer: NodeId, *, is_renewal: bool = False) -> Certificate:
        """One exchange from the dialer's side; returns the peer's certificate, with the errors of :meth:`join`."""
        try:
            with deadline(ADMISSION_TIMEOUT_S, f"admission by {short(peer)}"):
                stream = await self._mesh.open(peer, ADMISSION_PROTOCOL)
                try:
                    await send_message(stream, self._request(is_renewal=is_renewal))
                    raw = await receive_message(stream, "admission", MAX_ADMISSION_BYTES)
                    reply = decode(raw, _reply_decoder, "admission reply")
                    certificate = self._check_reply(peer, reply)
                    self._admit(peer, certificate)  # before the peer reads our end, and may open streams
                    await stream.finish()
                finally:
                    stream.reset()
        except (RefusedError, IntegrityError) as error:
            log.warning("admission.refused", peer=short(peer), code=error.code, reason=str(error))
            raise
        return certificate

    def _request(self, *, is_renewal: bool) -> AdmissionRequest:
        """Our certificate; the token only where there is no good one: it is a secret between us and a hub."""
        ours = self.membership
        if ours.certificate is not None and ours.certificate.expires_unix_s > self._now():
            return AdmissionRequest(VERSIONS, ours.swarm, ours.certificate, is_renewal=is_renewal)
        return AdmissionRequest(VERSIONS, ours.swarm, ours.certificate, ours.token)

    def _check_reply(self, peer: NodeId, reply: AdmissionReply) -> Certificate:
        if reply.code == "tampered":
            raise IntegrityError(reply.reason, code=reply.code, hint="ask for a new invite: tela invite create")
        if reply.revocations:
            self._on_proof(reply.revocations)
        if reply.code:
            raise RefusedError(reply.reason, code=reply.code)
        if negotiate_version(VERSIONS, reply.versions) is None:
            raise RefusedError(f"the peer speaks versions {reply.versions}, not {VERSIONS}", code="version")
        if reply.certificate is None:
            raise ProtocolError(f"{short(peer)} admitted us without a certificate of its own")
        self._check_peer(peer, reply.certificate, reply.unix_s)
        if reply.issued is not None:
            self._check(reply.issued, self.membership.key.public)
            self._take_certificate(reply.issued)
        return reply.certificate

    def _check_peer(self, peer: NodeId, certificate: Certificate, unix_s: int) -> None:
        """Check it by our clock or, where that may be off, by the time that a hub tells; then believe the hub."""
        is_telling_time = Role.HUB in certificate.roles and unix_s > 0
        try:
            self._check(certificate, peer)
        except RefusedError as error:
            is_about_time = error.code in {"expired", "not-yet-valid"} and self._clock.is_plausible(unix_s)
            if not (is_telling_time and is_about_time):
                raise
            check_member(certificate, peer, self.membership, unix_s)
        if is_telling_time:
            self._clock.learn(peer, unix_s)

    def _take_certificate(self, certificate: Certificate) -> None:
        self.membership = replace(self.membership, certificate=certificate)
        self._on_certificate(certificate)

    def _check(self, certificate: Certificate, node: NodeId) -> None:
        check_member(certificate, node, self.membership, int(self._now()))

    async def _answer(self, stream: Stream) -> None:
        peer = stream.peer
        is_done = False
        try:
            with deadline(ADMISSION_TIMEOUT_S, f"admission of {short(peer)}"):
                raw = await receive_message(stream, "admission", MAX_ADMISSION_BYTES)
                request = decode(raw, _request_decoder, "admission request")
                reply, certificate = self._judge(request, peer)
                if certificate is not None:
                    self._admit(peer, certificate)  # before the peer reads the reply, and may open streams
                await send_message(stream, reply)
                await wait_end(stream)
                is_done = certificate is not None
        finally:
            if not is_done:
                with trio.CancelScope(shield=True):  # short: it closes a socket
                    await self._mesh.disconnect(peer)

    def _judge(self, request: AdmissionRequest, peer: NodeId) -> tuple[AdmissionReply, Certificate | None]:
        if request.is_renewal:  # uses no invite, whatever was presented with it
            request = msgspec.structs.replace(request, token=None)
        users = frozenset() if request.token is None else self._uses.users(request.token.token_id)
        reply, certificate = decide(request, peer, self.membership, int(self._now()), users)
        if reply.issued is not None and request.token is not None:
            self._uses.add(request.token, peer)
        reply = msgspec.structs.replace(reply, unix_s=int(self._now()))
        admissions.labels(reply.code or "ok").inc()
        if certificate is None:
            log.warning("admission.refuse", peer=short(peer), code=reply.code, reason=reply.reason)
        else:
            log.info(
                "admission.admit", peer=short(peer), provider=certificate.provider, issued=reply.issued is not None
            )
        return reply, certificate

    def _admit(self, peer: NodeId, certificate: Certificate) -> None:
        if peer not in self._mesh.peers():
            raise PeerError(f"{short(peer)} went away during admission")
        self._strangers.pop(peer, None)
        self._members[peer] = certificate

    def _overdue(self) -> list[tuple[NodeId, str, str]]:
        late = trio.current_time()
        expired = self._now() - CLOCK_SKEW_S
        strangers = [
            (peer, "expired", f"not admitted within {ADMISSION_TIMEOUT_S:g} s")
            for peer, end in self._strangers.items()
            if end <= late
        ]
        members = [
            (peer, "expired", "its certificate expired")
            for peer, certificate in self._members.items()
            if certificate.expires_unix_s < expired
        ]
        revoked = [
            (peer, "revoked", "the swarm's CA revoked it")
            for peer, certificate in self._members.items()
            if self.membership.revoked.denies(certificate)
        ]
        return strangers + members + revoked

    def _on_connection(self, peer: NodeId, is_up: bool) -> None:
        if is_up:
            self._strangers[peer] = trio.current_time() + ADMISSION_TIMEOUT_S
        else:
            self._strangers.pop(peer, None)
            self._members.pop(peer, None)
