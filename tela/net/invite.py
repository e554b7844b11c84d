"""The one line of text that lets a node join: swarm, CA key, hubs, join token."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Final

import msgspec

from tela.errors import ConfigError, ProtocolError
from tela.identity import JoinToken
from tela.net.multiaddrs import node_of_address
from tela.record import SwarmId
from tela.wire import decode, encode

_PREFIX: Final = "tela1-"
_CHECKSUM_BYTES: Final = 4
MAX_INVITE_BYTES: Final = 8 * 1024


class Invite(msgspec.Struct, frozen=True, array_like=True):
    """What a node must know to join. ``hubs`` is empty for the first hub only."""

    swarm: SwarmId
    ca: bytes
    hubs: tuple[str, ...]
    token: JoinToken


_decoder = msgspec.msgpack.Decoder(Invite)


def render_invite(invite: Invite) -> str:
    """The invite as one line; :func:`parse_invite` is its inverse."""
    body = encode(invite)
    return _PREFIX + base64.urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")


def parse_invite(text: str) -> Invite:
    """Read an invite. Whether its signatures hold is for the hub to say, at admission.

    Raises:
        ConfigError: it is not an invite, was cut or mistyped, or names a malformed hub address.
    """
    hint = "paste the whole line that tela invite create printed, or pass it as a file or in TELA_INVITE"
    line = text.strip()
    if not line.startswith(_PREFIX):
        raise ConfigError(f"not an invite: it starts with {_PREFIX!r}", hint=hint)
    if len(line) > MAX_INVITE_BYTES:
        raise ConfigError(f"not an invite: longer than {MAX_INVITE_BYTES} bytes", hint=hint)
    encoded = line.removeprefix(_PREFIX)
    try:
        raw = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError("the invite is incomplete or mistyped: it is not base64", hint=hint) from error
    body, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    if checksum != _checksum(body):
        raise ConfigError("the invite is incomplete or mistyped: its checksum does not match", hint=hint)
    try:
        invite = decode(body, _decoder, "invite")
    except ProtocolError as error:
        raise ConfigError(
            f"the invite cannot be read: {error}", hint="it may come from another version of tela"
        ) from error
    for address in invite.hubs:
        node_of_address(address)
    return invite


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]
