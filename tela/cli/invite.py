"""``tela invite``: the lines that let nodes join."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tela.cli.options import DURATION, NAME, json_option, next_step, state_dir_option
from tela.cli.render import render_table
from tela.cli.signing import (
    choose_id,
    chosen_state_dir,
    daemons_of,
    invite_line,
    print_invite,
    region_option,
    render_time,
    swarm_option,
    take_back,
    token_uses,
    unix_now,
    zone_option,
)
from tela.errors import NoDaemonError, UsageError
from tela.record import Role, SwarmId

if TYPE_CHECKING:  # see tela.cli.signing
    from tela.net.admission import TokenUses
    from tela.revocation import Revocations
    from tela.swarm import InviteEntry, Swarm

_TOKEN_ID_BYTES = 8


@click.group()
def invite() -> None:
    """Make invites, list them and take them back."""


@invite.command("create")
@swarm_option
@click.option("--provider", type=NAME, help="The institution whose key signs; needed where the swarm has several.")
@zone_option
@region_option
@click.option("--roles", default="worker", show_default=True, help="What the node may be: worker,ingress,hub.")
@click.option("--expires", type=DURATION, default="30d", show_default=True, help="How long the invite can be used.")
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
    from tela.net.multiaddrs import node_of_address
    from tela.swarm import choose_swarm

    chosen = choose_swarm(chosen_state_dir(state_dir), swarm_name)
    for address in hubs:
        node_of_address(address)  # names the one that is malformed
    line = invite_line(
        chosen,
        _only_provider(chosen) if provider is None else provider,
        zone=zone,
        region=region,
        roles=_parse_roles(roles),
        expires_s=expires,
        uses=uses,
        hubs=hubs or _running_hubs(chosen.swarm),
    )
    print_invite(line, chosen, as_json=as_json)
    next_step("next: keep the line above in a file, then on the other host: tela join FILE -- vllm serve MODEL")


@invite.command("list")
@swarm_option
@state_dir_option
@json_option
def invite_list(*, swarm_name: str | None, state_dir: Path | None, as_json: bool) -> None:
    """List the invites that were made on this host.

    How often each was used is what hubs that keep their state here have counted.
    """
    from tela.swarm import choose_swarm

    place = chosen_state_dir(state_dir)
    chosen = choose_swarm(place, swarm_name)
    uses, revoked = token_uses(place), chosen.revocations()
    facts = [_facts(entry, uses, revoked) for entry in chosen.invites()]
    if as_json:
        click.echo(json.dumps({"swarm": chosen.name, "invites": facts}))
        return
    rows = [
        (
            each["id"],
            each["provider"],
            each["zone"],
            each["region"],
            ",".join(each["roles"]),
            f"{each['n_used']}/{each['uses']}",
            render_time(each["expires_unix_s"]),
            each["state"],
        )
        for each in facts
    ]
    click.echo(render_table(("INVITE", "PROVIDER", "ZONE", "REGION", "ROLES", "USED", "EXPIRES", "STATE"), rows))


def _facts(entry: InviteEntry, uses: Sequence[TokenUses], revoked: Revocations) -> dict[str, Any]:
    n_used = len(frozenset[bytes]().union(*(each.users(bytes.fromhex(entry.id)) for each in uses)))
    return {**msgspec.to_builtins(entry), "n_used": n_used, "state": _state(entry, n_used, revoked)}


def _state(entry: InviteEntry, n_used: int, revoked: Revocations) -> str:
    from tela.revocation import RevokedKind

    if revoked.has(RevokedKind.TOKEN, bytes.fromhex(entry.id)) or revoked.has(
        RevokedKind.ISSUER, bytes.fromhex(entry.issuer)
    ):
        return "revoked"
    if entry.expires_unix_s < unix_now():
        return "expired"
    return "used up" if n_used >= entry.uses else "good"


@invite.command("revoke")
@click.argument("token_id")
@swarm_option
@state_dir_option
@json_option
def invite_revoke(*, token_id: str, swarm_name: str | None, state_dir: Path | None, as_json: bool) -> None:
    """Take an invite back: nobody joins with it any more.

    TOKEN_ID is as tela invite list shows it. Needs the swarm's CA key on this host. Nodes that joined with it stay
    members: see tela swarm revoke.
    """
    from tela.revocation import RevokedKind
    from tela.swarm import choose_swarm

    chosen = choose_swarm(chosen_state_dir(state_dir), swarm_name)
    known = [bytes.fromhex(entry.id) for entry in chosen.invites()]
    chosen_id = choose_id(token_id, known, size=_TOKEN_ID_BYTES, what="invite")
    revoked = take_back(chosen, [(RevokedKind.TOKEN, chosen_id)])
    facts = {"invite": chosen_id.hex(), "n_revoked": len(revoked.items)}
    click.echo(json.dumps(facts) if as_json else f"revoked invite {chosen_id.hex()} in swarm {chosen.name}")


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
    hubs = dict.fromkeys(hub for daemon in daemons_of(swarm_id) for hub in daemon.hubs())  # a set that keeps the order
    if not hubs:
        raise NoDaemonError(
            "no running daemon here knows a hub of this swarm",
            hint="start one with tela ingress --hub FILE, or give --hub-address /ip4/192.0.2.1/tcp/4001/p2p/PEER_ID",
        )
    return tuple(hubs)
