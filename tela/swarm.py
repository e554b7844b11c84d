"""A swarm on disk: its CA key, and one issuing key per provider, in ``<state>/swarms/<name>/``.

The CA key signs issuing keys and nothing else, so it can be moved offline once the providers are added; a hub needs the
issuing keys alone.  Files: ``swarm.json`` (public), ``ca.key``, ``issuers/<provider>.key`` and ``.certificate``, each
0600.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from tela.errors import ConfigError, UsageError
from tela.identity import Issuer, IssuerCertificate, KeyPair, issue_issuer, write_secret
from tela.paths import check_name
from tela.record import SWARM_ID_BYTES, SwarmId
from tela.wire import encode

ISSUER_DAYS: Final = 3650
"""An issuing key outlives the project that it was made for; a leaked one is revoked, not waited out."""


class Description(msgspec.Struct, frozen=True):
    """swarm.json: what everybody may know."""

    name: str
    swarm: str  # hex
    ca: str  # hex of the public key
    schema_version: int = 1


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
        try:
            certificate = msgspec.msgpack.decode(
                (base / f"{provider}.certificate").read_bytes(), type=IssuerCertificate
            )
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"cannot read the certificate of provider {provider}: {error}") from error
        return Issuer(key, certificate)

    def add_provider(self, provider: str, *, now: int) -> Issuer:
        """Make an issuing key for a provider and certify it with the CA key.

        Raises:
            UsageError: it has one already, or cannot be a name.
            ConfigError: the CA key is not on this host.
        """
        check_name(provider, "provider")
        if provider in self.providers():
            raise UsageError(f"provider {provider} has an issuing key in swarm {self.name} already")
        ca, key = _read_key(self.directory / "ca.key"), KeyPair.generate()
        certificate = issue_issuer(
            ca, swarm=self.swarm, issuer=key.public, provider=provider, now=now, days=ISSUER_DAYS
        )
        base = self.directory / "issuers"
        write_secret(base / f"{provider}.certificate", encode(certificate))
        write_secret(base / f"{provider}.key", key.seed)
        return Issuer(key, certificate)


def create_swarm(state_dir: Path, name: str, *, provider: str, now: int) -> Swarm:
    """Make a swarm with its first provider: all of its files, or none.

    Raises:
        UsageError: there is one of this name, or a name cannot be one.
    """
    directory = state_dir / "swarms" / check_name(name, "swarm")
    if directory.exists():
        raise UsageError(f"there is a swarm {name} already: {directory}", hint="choose another with --name")
    partial = directory.with_name(f".{name}.{os.getpid()}")
    ca, swarm_id = KeyPair.generate(), SwarmId(os.urandom(SWARM_ID_BYTES))
    write_secret(partial / "ca.key", ca.seed)
    write_secret(partial / "swarm.json", msgspec.json.encode(Description(name, swarm_id.hex(), bytes(ca.public).hex())))
    Swarm(name, swarm_id, ca.public, partial).add_provider(provider, now=now)
    partial.rename(directory)
    return Swarm(name, swarm_id, ca.public, directory)


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
    swarms = (swarm for swarm in load_swarms(state_dir) if swarm.swarm == swarm_id)
    return tuple(swarm.issuer(provider) for swarm in swarms for provider in swarm.providers())


def _load(path: Path) -> Swarm:
    try:
        description = msgspec.json.decode(path.read_bytes(), type=Description)
        return Swarm(
            path.parent.name, SwarmId(bytes.fromhex(description.swarm)), bytes.fromhex(description.ca), path.parent
        )
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _read_key(path: Path) -> KeyPair:
    try:
        return KeyPair(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the key {path}: {error}", hint="it may be kept on another host") from error
