"""``tela swarm``, ``tela provider``, ``tela invite``: who may be a member. The keys are on this host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tela.cli.client import running_daemons
from tela.cli.options import DURATION, NAME, environ, json_option, next_step, state_dir_option
from tela.errors import NoDaemonError, TelaError, UsageError
from tela.paths import open_state_dir
from tela.record import Role, SwarmId, short

if TYPE_CHECKING:  # commands import them when they run: keys need cryptography, 120 ms of help do not
    from tela.swarm import Swarm

_FIRST_HUB_ROLES = (Role.HUB, Role.INGRESS, Role.WORKER)
_FIRST_HUB_EXPIRES_S = 30 * 86_400.0
_WHERE = "local"  # provider, zone and region of a swarm that is not told its own

provider_option = click.option("--provider", type=NAME, default=_WHERE, show_default=True, help="The institution.")
zone_option = click.option("--zone", type=NAME, default=_WHERE, show_default=True, help="Cluster or site of the node.")
region_option = click.option("--region", type=NAME, default=_WHERE, show_default=True, help="Region of the zone.")
swarm_option = click.option("--swarm", "swarm_name", type=NAME, help="The swarm, where keys of several are here.")
expires_option = click.option(
    "--expires", type=DURATION, default="30d", show_default=True, help="How long the invite can be used."
)


@click.group()
def swarm() -> None:
    """Make and manage swarms."""


@swarm.command("init")
@click.option("--name", type=NAME, default="default", show_default=True, help="What you call the swarm here.")
@provider_option
@zone_option
@region_option
@state_dir_option
@json_option
def swarm_init(*, name: str, provider: str, zone: str, region: str, state_dir: Path | None, as_json: bool) -> None:
    """Make a swarm and print the invite of its first hub.

    Its id, its CA key and an issuing key for the provider are kept on this host.
    """
    from tela.swarm import create_swarm

    made = create_swarm(_state_dir(state_dir), name, provider=provider, now=_now())
    line = _invite_line(
        made, provider, zone=zone, region=region, roles=_FIRST_HUB_ROLES, expires_s=_FIRST_HUB_EXPIRES_S, uses=1
    )
    _print_invite(line, made, as_json=as_json)
    next_step(
        f"made swarm {name} ({short(made.swarm)}) with provider {provider}; its keys are in {made.directory}",
        "next: start the first hub here, with the line above in a file: tela ingress --hub FILE",
    )


@click.group()
def provider() -> None:
    """Manage the providers of a swarm."""


@provider.command("add")
@click.argument("name", type=NAME)
@swarm_option
@state_dir_option
def provider_add(*, name: str, swarm_name: str | None, state_dir: Path | None) -> None:
    """Certify an issuing key for a provider. Needs the swarm's CA key on this host."""
    from tela.swarm import choose_swarm

    chosen = choose_swarm(_state_dir(state_dir), swarm_name)
    chosen.add_provider(name, now=_now())
    click.echo(f"swarm {chosen.name} has a provider {name}")
    next_step(f"next: restart hubs that run here, then tela invite create --provider {name}")


@click.group()
def invite() -> None:
    """Make invites."""


@invite.command("create")
@swarm_option
@click.option("--provider", type=NAME, help="The institution whose key signs; needed where the swarm has several.")
@zone_option
@region_option
@click.option("--roles", default="worker", show_default=True, help="What the node may be: worker,ingress,hub.")
@expires_option
@click.option("--uses", type=click.IntRange(min=1), default=100, show_default=True, help="How many nodes may use it.")
@click.option("--hub-address", "hubs", multiple=True, help="Where to join, instead of asking the daemon here.")
@state_dir_option
@json_option
def invite_create(
    *,
    swarm_name: str | None,
    provider: str | None,
    zone: str,
    region: str,
    roles: str,
    expires: float,
    uses: int,
    hubs: tuple[str, ...],
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Print an invite: one line that lets nodes join. Treat it as a password."""
    from tela.net.transport import node_of_address
    from tela.swarm import choose_swarm

    chosen = choose_swarm(_state_dir(state_dir), swarm_name)
    for address in hubs:
        node_of_address(address)  # names the one that is malformed
    line = _invite_line(
        chosen,
        _only_provider(chosen) if provider is None else provider,
        zone=zone,
        region=region,
        roles=_parse_roles(roles),
        expires_s=expires,
        uses=uses,
        hubs=hubs or _running_hubs(chosen.swarm),
    )
    _print_invite(line, chosen, as_json=as_json)
    next_step("next: keep the line above in a file, then on the other host: tela join FILE -- vllm serve MODEL")


def _invite_line(
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
    from tela.net.invite import Invite, render_invite

    token = swarm.issuer(provider).token(
        zone=zone, region=region, roles=tuple(roles), now=_now(), expires_s=int(expires_s), uses=uses
    )
    return render_invite(Invite(swarm.swarm, swarm.ca, tuple(hubs), token))


def _print_invite(line: str, swarm: Swarm, *, as_json: bool) -> None:
    facts = {"invite": line, "swarm": short(swarm.swarm), "name": swarm.name}
    click.echo(json.dumps(facts) if as_json else line)


def _only_provider(swarm: Swarm) -> str:
    providers = swarm.providers()
    if len(providers) != 1:
        raise UsageError(
            f"swarm {swarm.name} has {len(providers)} providers here",
            hint=f"choose with --provider: {', '.join(providers)}",
        )
    return providers[0]


def _parse_roles(text: str) -> tuple[Role, ...]:
    try:
        return tuple(Role(part.strip()) for part in text.split(","))
    except ValueError as error:
        raise UsageError(str(error), hint="roles are worker, ingress and hub, with commas between them") from error


def _running_hubs(swarm_id: SwarmId) -> tuple[str, ...]:
    """Hub addresses that this user's daemons of the swarm know."""
    hubs: dict[str, None] = {}  # a set that keeps the order
    for daemon in running_daemons(environ()):
        try:
            if daemon.status().swarm == short(swarm_id):
                hubs |= dict.fromkeys(daemon.hubs())
        except TelaError as error:
            click.echo(f"warning: {error}", err=True)
    if not hubs:
        raise NoDaemonError(
            "no running daemon here knows a hub of this swarm",
            hint="start one with tela ingress --hub FILE, or give --hub-address /ip4/192.0.2.1/tcp/4001/p2p/PEER_ID",
        )
    return tuple(hubs)


def _state_dir(chosen: Path | None) -> Path:
    state_dir, warning = open_state_dir(chosen, environ())
    if warning:
        click.echo(f"warning: {warning}", err=True)
    return state_dir


def _now() -> int:
    return int(datetime.now(tz=UTC).timestamp())
