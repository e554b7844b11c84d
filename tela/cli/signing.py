"""What the commands share that sign: which swarm, what its keys say, and how that reaches its daemons on this host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from tela.cli.client import Daemon, running_daemons
from tela.cli.options import NAME, environ
from tela.errors import NoDaemonError, TelaError, UsageError
from tela.paths import open_state_dir
from tela.record import Role, SwarmId, short

if TYPE_CHECKING:  # commands import them when they run: keys need PyNaCl, 120 ms of help do not
    from tela.net.admission import TokenUses
    from tela.revocation import Revocations, RevokedKind
    from tela.swarm import Swarm

WHERE: Final = "local"
"""Provider, zone and region of a swarm that is not told its own."""

_MIN_DIGITS: Final = 8
"""Of an id, as many as are shown."""

zone_option = click.option("--zone", type=NAME, default=WHERE, show_default=True, help="Cluster or site of the node.")
region_option = click.option("--region", type=NAME, default=WHERE, show_default=True, help="Region of the zone.")
swarm_option = click.option("--swarm", "swarm_name", type=NAME, help="The swarm, where keys of several are here.")


def invite_line(
    swarm: Swarm,
    provider: str,
    *,
    zone: str,
    region: str,
    roles: Sequence[Role],
    expires_s: float,
    uses: int,
    hubs: Sequence[str] = (),
) -> str:
    """A new invite, noted in the swarm's folder."""
    from tela.net.invite import Invite, render_invite

    token = swarm.issuer(provider).token(
        zone=zone, region=region, roles=tuple(roles), now=unix_now(), expires_s=int(expires_s), uses=uses
    )
    swarm.note_invite(token)
    return render_invite(Invite(swarm.swarm, swarm.ca, tuple(hubs), token))


def print_invite(line: str, swarm: Swarm, *, as_json: bool) -> None:
    """An invite on stdout, alone."""
    facts = {"invite": line, "swarm": short(swarm.swarm), "name": swarm.name}
    click.echo(json.dumps(facts) if as_json else line)


def daemons_of(swarm: SwarmId) -> list[Daemon]:
    """This user's daemons of the swarm on this host; those that do not answer are named on stderr."""
    found = []
    for daemon in running_daemons(environ()):
        try:
            if daemon.status().swarm == short(swarm):
                found.append(daemon)
        except TelaError as error:
            click.echo(f"warning: {error}", err=True)
    return found


def take_back(swarm: Swarm, what: Sequence[tuple[RevokedKind, bytes]]) -> Revocations:
    """Sign a list that holds ``what``, and spread it. Raises what :func:`sign_list` and :func:`spread` raise."""
    revoked = sign_list(swarm, what)
    spread(swarm, revoked)
    return revoked


def sign_list(swarm: Swarm, what: Sequence[tuple[RevokedKind, bytes]]) -> Revocations:
    """The next list, signed and kept in the swarm's folder.

    Raises:
        ConfigError: the CA key is not on this host.
        UsageError: the list is full.
    """
    return swarm.revoke(what, _known_by(daemons_of(swarm.swarm), swarm), now=unix_now())


def spread(swarm: Swarm, revoked: Revocations) -> None:
    """Hand a list to the swarm's daemons here, who tell the others.

    Raises:
        NoDaemonError: no daemon took it; it stays signed and kept.
    """
    taken = [daemon for daemon in daemons_of(swarm.swarm) if _hand_over(daemon, revoked)]
    if not taken:
        raise NoDaemonError(
            "revoked, but no daemon of the swarm runs here to spread it",
            hint="start one on this host: it takes the list along from the swarm's folder",
        )


def _known_by(daemons: Sequence[Daemon], swarm: Swarm) -> list[Revocations]:
    """Lists that daemons have: another host may have signed a newer one with the same CA key."""
    from tela.revocation import read_revocations

    lists = []
    for daemon in daemons:
        try:
            if raw := daemon.request("GET", "/revocations"):
                lists.append(read_revocations(raw, swarm=swarm.swarm, ca=swarm.ca))
        except TelaError as error:
            click.echo(f"warning: {error}", err=True)
    return lists


def _hand_over(daemon: Daemon, revoked: Revocations) -> bool:
    try:
        daemon.request("POST", "/revocations", content=revoked.raw)
    except TelaError as error:
        click.echo(f"warning: {error}", err=True)
        return False
    return True


def token_uses(state_dir: Path) -> list[TokenUses]:
    """What the hubs that keep their state here know of used invites."""
    from tela.net.admission import TokenUses

    return [TokenUses(path) for path in sorted(state_dir.glob("nodes/*/token-uses.json"))]


def choose_id(text: str, known: Sequence[bytes], *, size: int, what: str) -> bytes:
    """The id that ``text`` begins, in hex digits; one that nobody here knows must be whole.

    Raises:
        UsageError: it is not hex, fits none, or fits several.
    """
    digits = text.lower()
    if len(digits) < _MIN_DIGITS or len(digits) > 2 * size or set(digits) - set("0123456789abcdef"):
        raise UsageError(f"{text!r} is no {what}", hint=f"give {_MIN_DIGITS} to {2 * size} hex digits")
    if len(digits) == 2 * size:
        return bytes.fromhex(digits)
    matching = sorted({each for each in known if each.hex().startswith(digits)})
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UsageError(f"several match {digits}", hint="one of: " + ", ".join(each.hex() for each in matching))
    raise UsageError(f"no {what} that begins with {digits} is known here", hint=f"give all {2 * size} digits")


def chosen_state_dir(chosen: Path | None) -> Path:
    """The state directory; a warning where it will not last."""
    state_dir, warning = open_state_dir(chosen, environ())
    if warning:
        click.echo(f"warning: {warning}", err=True)
    return state_dir


def unix_now() -> int:
    """The wall clock."""
    return int(datetime.now(tz=UTC).timestamp())


def render_time(unix_s: int) -> str:
    """A moment for people, in UTC.

    >>> render_time(1_800_000_000)
    '2027-01-15 08:00'
    """
    return datetime.fromtimestamp(unix_s, tz=UTC).strftime("%Y-%m-%d %H:%M")
