"""What a daemon can prove when it starts: its kept certificate, its invite, and the issuing keys on this host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tela.config import NodeOptions
from tela.errors import ConfigError, IntegrityError, ProtocolError, RefusedError
from tela.identity import Certificate, KeyPair, check_certificate, decode_certificate
from tela.net.admission import Membership, certify_self
from tela.net.multiaddrs import node_of_address
from tela.paths import Paths
from tela.revocation import Revocations, newest, read_revocations
from tela.swarm import find_issuers, find_revocations


def certificate_file(paths: Paths) -> Path:
    """Where a daemon keeps the certificate that a hub gave it."""
    return paths.node_dir / "certificate"


def revocations_file(paths: Paths) -> Path:
    """Where a daemon keeps the newest list of what the CA took back."""
    return paths.node_dir / "revocations"


def load_membership(options: NodeOptions, key: KeyPair, *, now: int) -> Membership:
    """The membership to present. A node that holds its provider's issuing key and needs no hub certifies itself.

    Raises:
        RefusedError: the node or every hub of its invite was revoked; or it is the first hub, and its invite is not
            good or the issuing key is not on this host.
        ConfigError: what it kept cannot be read.
        IntegrityError: its invite was altered.
    """
    invite = options.invite
    revoked = _kept_revocations(options)
    revoked.check_node(key.public)
    if invite.hubs and all(node_of_address(address) in revoked.nodes for address in invite.hubs):
        raise RefusedError(
            "the swarm's CA revoked every hub of this invite",
            code="revoked",
            hint="ask for a new invite: tela invite create",
        )
    membership = Membership(
        swarm=invite.swarm,
        ca=invite.ca,
        key=key,
        certificate=_kept_certificate(options, key, revoked, now),
        token=invite.token,
        issuers=find_issuers(options.paths.state_dir, invite.swarm),
        revoked=revoked,
    )
    if membership.certificate is None and not invite.hubs:
        return replace(membership, certificate=certify_self(membership, now))
    return membership


def _kept_revocations(options: NodeOptions) -> Revocations:
    """The newest list of a former run, or of the swarm's folder where the CA key is on this host."""
    invite, path = options.invite, revocations_file(options.paths)
    lists = [find_revocations(options.paths.state_dir, invite.swarm)]
    if path.exists():
        try:
            lists.append(read_revocations(path.read_bytes(), swarm=invite.swarm, ca=invite.ca))
        except IntegrityError:
            pass  # of a swarm that this daemon was in before
        except (OSError, ProtocolError) as error:
            raise ConfigError(f"cannot read {path}: {error}", hint=f"remove it: rm {path}") from error
    return newest(lists)


def _kept_certificate(options: NodeOptions, key: KeyPair, revoked: Revocations, now: int) -> Certificate | None:
    """The certificate of a former run, where it still fits: same key, swarm, provider and roles, and good now."""
    try:
        certificate = decode_certificate(certificate_file(options.paths).read_bytes())
        check_certificate(certificate, node=key.public, swarm=options.invite.swarm, ca=options.invite.ca, now=now)
        revoked.check_certificate(certificate)
    except (OSError, ProtocolError, RefusedError, IntegrityError):
        return None  # the invite gets us a new one
    token = options.invite.token
    is_same = (certificate.provider, certificate.zone, certificate.region, certificate.roles) == (
        token.chain.provider,
        token.zone,
        token.region,
        token.roles,
    )
    return certificate if is_same else None
