"""A swarm on disk: its CA key, and one issuing key per provider, in ``<state>/swarms/<name>/``.

The CA key signs issuing keys and nothing else, so it can be moved offline once the providers are added; a hub needs the
issuing keys alone.  Files: ``swarm.json`` (public), ``ca.key``, ``issuers/<provider>.key`` and ``.certificate``, after
a rotation those of the key before with ``.outgoing`` at their ends, ``invites/<token id>.json`` for each invite made
here (without its secret), and ``revocations``, the newest list that the CA signed; each 0600.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from tela.errors import ConfigError, IntegrityError, ProtocolError, UsageError
from tela.identity import Issuer, IssuerCertificate, JoinToken, KeyPair, issue_issuer, write_secret
from tela.paths import check_name
from tela.record import SWARM_ID_BYTES, SwarmId
from tela.revocation import NOTHING_REVOKED, Revocations, RevokedKind, newest, read_revocations, revoke
from tela.wire import encode

MIN_SHARED_BYTES: Final = 32
ISSUER_DAYS: Final = 3650
"""An issuing key outlives the project that it was made for; a leaked one is revoked, not waited out."""


T = TypeVar("T")


class Description(msgspec.Struct, frozen=True):
    """swarm.json: what everybody may know."""

    name: str
    swarm: str  # hex
    ca: str  # hex of the public key
    schema_version: int = 1


class InviteEntry(msgspec.Struct, frozen=True):
    """What is remembered of an invite that was made here."""

    id: str  # hex of the token's id
    provider: str
    zone: str
    region: str
    roles: tuple[str, ...]
    uses: int
    expires_unix_s: int
    issuer: str  # hex of the issuing key


@dataclass(frozen=True, slots=True)
class Swarm:
    """A swarm whose keys are on this host."""

    name: str
    swarm: SwarmId
    ca: bytes  # public
    directory: Path

    def providers(self) -> list[str]:
        """Providers whose issuing keys are here."""
        return sorted(path.stem for path in (self.directory / "issuers").glob("*.key"))

    def issuer(self, provider: str) -> Issuer:
        """The issuing key of a provider.

        Raises:
            UsageError: it is not on this host.
            ConfigError: its files cannot be read.
        """
        if provider not in self.providers():
            raise UsageError(
                f"swarm {self.name} has no issuing key of provider {provider!r} here",
                hint=f"providers: {', '.join(self.providers()) or 'none'}; add one: tela provider add {provider}",
            )
        base = self.directory / "issuers"
        key = _read_key(base / f"{provider}.key")
        return Issuer(key, _read_issuer(base / f"{provider}.certificate"))

    def issuer_certificate(self, provider: str) -> IssuerCertificate:
        """What the CA signed for a provider, wherever its issuing key is.

        Raises:
            UsageError: the provider was not added on this host.
            ConfigError: the file cannot be read.
        """
        path = self.directory / "issuers" / f"{provider}.certificate"
        if not path.exists():
            raise UsageError(f"swarm {self.name} has no provider {provider} here", hint="see tela provider list")
        return _read_issuer(path)

    def certified(self) -> list[str]:
        """Providers that the CA certified here, with or without their keys."""
        return sorted(path.stem for path in (self.directory / "issuers").glob("[!.]*.certificate"))

    def add_provider(self, provider: str, *, now: int, key: KeyPair | None = None) -> Issuer:
        """Certify an issuing key for a provider with the CA key: a new one, unless ``key`` is given.

        Raises:
            UsageError: it has one already, or cannot be a name.
            ConfigError: the CA key is not on this host.
        """
        check_name(provider, "provider")
        if provider in self.certified():
            raise UsageError(f"provider {provider} has an issuing key in swarm {self.name} already")
        ca, key = _read_key(self.directory / "ca.key"), key or KeyPair.generate()
        certificate = issue_issuer(
            ca, swarm=self.swarm, issuer=key.public, provider=provider, now=now, days=ISSUER_DAYS
        )
        base = self.directory / "issuers"
        write_secret(base / f"{provider}.certificate", encode(certificate))
        write_secret(base / f"{provider}.key", key.seed)
        return Issuer(key, certificate)

    @property
    def has_ca_key(self) -> bool:
        """Whether new providers and revocations can be signed on this host."""
        return (self.directory / "ca.key").exists()

    # -- invites -----------------------------------------------------------------------------------------------------

    def note_invite(self, token: JoinToken) -> None:
        """Remember that an invite was made, and not its secret."""
        token_id = token.token_id.hex()
        chain = token.chain
        entry = InviteEntry(
            id=token_id,
            provider=chain.provider,
            zone=token.zone,
            region=token.region,
            roles=token.roles,
            uses=token.uses,
            expires_unix_s=token.expires_unix_s,
            issuer=chain.issuer.hex(),
        )
        write_secret(self.directory / "invites" / f"{token_id}.json", msgspec.json.encode(entry))

    def invites(self) -> list[InviteEntry]:
        """Invites made here, those that end first in front.

        Raises:
            ConfigError: a file cannot be read.
        """
        entries = [_read_json(path, InviteEntry) for path in (self.directory / "invites").glob("[!.]*.json")]
        return sorted(entries, key=lambda entry: (entry.expires_unix_s, entry.id))

    # -- revocations -------------------------------------------------------------------------------------------------

    def revocations(self) -> Revocations:
        """The newest list that is kept here.

        Raises:
            ConfigError: the file cannot be read, or its signature is not the CA's.
        """
        path = self.directory / "revocations"
        try:
            return read_revocations(path.read_bytes(), swarm=self.swarm, ca=self.ca)
        except FileNotFoundError:
            return NOTHING_REVOKED
        except (OSError, ProtocolError, IntegrityError) as error:
            raise ConfigError(f"cannot read {path}: {error}", hint=f"remove it: rm {path}") from error

    def revoke(
        self, what: Sequence[tuple[RevokedKind, bytes]], elsewhere: Iterable[Revocations], *, now: int
    ) -> Revocations:
        """Sign and keep the next list: the newest of ours and those known elsewhere, with ``what`` in it.

        Raises:
            ConfigError: the CA key is not on this host.
            UsageError: the list is full.
        """
        ca = _read_key(self.directory / "ca.key")
        revoked = revoke(ca, self.swarm, newest([self.revocations(), *elsewhere]), what, now=now)
        write_secret(self.directory / "revocations", revoked.raw)
        return revoked

    # -- rotation ----------------------------------------------------------------------------------------------------

    def rotate_provider(self, provider: str, *, now: int) -> Issuer:
        """Give a provider a new issuing key; the one before goes on redeeming its invites until it is ended.

        Raises:
            UsageError: the provider has no key here, or its last rotation was not ended.
            ConfigError: the CA key is not on this host.
        """
        if self.outgoing(provider):
            raise UsageError(
                f"the last rotation of provider {provider} was not ended", hint="end it: tela swarm rotate --finish"
            )
        old = self.issuer(provider).certificate
        base = self.directory / "issuers"
        _read_key(self.directory / "ca.key")  # before anything is moved
        for suffix in ("certificate", "key"):
            (base / f"{provider}.{suffix}").rename(base / f"{provider}-{old.issuer[:4].hex()}.{suffix}.outgoing")
        return self.add_provider(provider, now=now)

    def outgoing(self, provider: str) -> list[Issuer]:
        """Issuing keys of a provider that a rotation has replaced: at most one, unless files were copied here."""
        paths = sorted((self.directory / "issuers").glob(f"{provider}-????????.certificate.outgoing"))
        return [Issuer(_read_key(_key_of(path)), _read_issuer(path)) for path in paths]

    def end_rotation(self, provider: str) -> None:
        """Remove the outgoing keys of a provider; revoke them before."""
        for path in (self.directory / "issuers").glob(f"{provider}-????????.certificate.outgoing"):
            _key_of(path).unlink()
            path.unlink()

    def retire_provider(self, provider: str) -> None:
        """Forget the issuing key of a provider that was revoked, so that the provider can get a new one."""
        base = self.directory / "issuers"
        issuer = self.issuer_certificate(provider).issuer
        (base / f"{provider}.key").unlink(missing_ok=True)  # it may be on the hub's host alone
        (base / f"{provider}.certificate").rename(base / f"{provider}-{issuer[:4].hex()}.revoked")

    def retired(self) -> list[IssuerCertificate]:
        """Certificates of issuing keys that were revoked here."""
        return [_read_issuer(path) for path in sorted((self.directory / "issuers").glob("*.revoked"))]


def create_swarm(state_dir: Path, name: str, *, provider: str, now: int, shared: bytes = b"") -> Swarm:
    """Make a swarm with its first provider: all of its files, or none.

    Args:
        state_dir: where.
        name: what it is called here.
        provider: the first one.
        now: unix seconds.
        shared: a secret from which id and keys are derived, so that they are the same wherever it is known (decision
            0016); without it they are random.

    Raises:
        UsageError: there is one of this name, a name cannot be one, or the secret is too short.
    """
    if shared and len(shared) < MIN_SHARED_BYTES:
        raise UsageError(
            f"a shared key of {len(shared)} bytes can be guessed",
            hint=f"make one: openssl rand -hex {MIN_SHARED_BYTES}",
        )
    directory = state_dir / "swarms" / check_name(name, "swarm")
    if directory.exists():
        raise UsageError(f"there is a swarm {name} already: {directory}", hint="choose another with --name")
    partial = directory.with_name(f".{name}.{os.getpid()}")
    ca = KeyPair(_derive(shared, b"ca"))
    swarm_id = SwarmId(_derive(shared, b"swarm")[:SWARM_ID_BYTES])
    issuing = KeyPair(_derive(shared, b"issuer/" + provider.encode()))
    write_secret(partial / "ca.key", ca.seed)
    write_secret(partial / "swarm.json", msgspec.json.encode(Description(name, swarm_id.hex(), bytes(ca.public).hex())))
    Swarm(name, swarm_id, ca.public, partial).add_provider(provider, now=now, key=issuing)
    partial.rename(directory)
    return Swarm(name, swarm_id, ca.public, directory)


def _derive(shared: bytes, purpose: bytes) -> bytes:
    """32 bytes for a purpose; random ones where nothing is shared."""
    return blake2b(purpose, key=blake2b(shared).digest(), digest_size=32).digest() if shared else os.urandom(32)


def load_swarms(state_dir: Path) -> list[Swarm]:
    """Swarms whose keys are on this host, by name.

    Raises:
        ConfigError: a swarm.json cannot be read.
    """
    return [_load(path) for path in sorted((state_dir / "swarms").glob("[!.]*/swarm.json"))]


def choose_swarm(state_dir: Path, name: str | None) -> Swarm:
    """The swarm called ``name``, or the only one.

    Raises:
        UsageError: there is none, or the name is needed to tell several apart.
    """
    swarms = load_swarms(state_dir)
    matching = [swarm for swarm in swarms if name is None or swarm.name == name]
    if len(matching) == 1:
        return matching[0]
    if not swarms:
        raise UsageError(f"no swarm was made here: {state_dir} holds no keys", hint="make one: tela swarm init")
    known = ", ".join(swarm.name for swarm in swarms)
    what = f"there is no swarm {name} here" if name else "there are several swarms here"
    raise UsageError(what, hint=f"choose with --swarm: {known}")


def find_issuers(state_dir: Path, swarm_id: SwarmId) -> tuple[Issuer, ...]:
    """Issuing keys on this host for a swarm: with them a hub admits members of those providers."""
    swarms = [swarm for swarm in load_swarms(state_dir) if swarm.swarm == swarm_id]
    keys = [(swarm, provider) for swarm in swarms for provider in swarm.providers()]
    present = [swarm.issuer(provider) for swarm, provider in keys]
    # Behind the present ones: members are renewed by the first key of their provider.
    return (*present, *(issuer for swarm, provider in keys for issuer in swarm.outgoing(provider)))


def find_revocations(state_dir: Path, swarm_id: SwarmId) -> Revocations:
    """The newest list in the folders of a swarm on this host: what was signed while no daemon ran."""
    return newest(swarm.revocations() for swarm in load_swarms(state_dir) if swarm.swarm == swarm_id)


def _load(path: Path) -> Swarm:
    description = _read_json(path, Description)
    try:
        return Swarm(
            path.parent.name, SwarmId(bytes.fromhex(description.swarm)), bytes.fromhex(description.ca), path.parent
        )
    except ValueError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _read_json(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _read_issuer(path: Path) -> IssuerCertificate:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=IssuerCertificate)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read the certificate of provider {path.stem}: {error}") from error


def _key_of(certificate: Path) -> Path:
    return certificate.with_name(certificate.name.replace(".certificate.", ".key."))


def _read_key(path: Path) -> KeyPair:
    try:
        return KeyPair(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the key {path}: {error}", hint="it may be kept on another host") from error
