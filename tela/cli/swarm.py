"""``tela swarm``: make a swarm, show what is kept here, take a node back, change keys. The keys are on this host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tela.cli.options import NAME, json_option, next_step, state_dir_option
from tela.cli.render import render_table
from tela.cli.signing import (
    WHERE,
    choose_id,
    chosen_state_dir,
    daemons_of,
    invite_line,
    print_invite,
    region_option,
    render_time,
    sign_list,
    spread,
    swarm_option,
    take_back,
    token_uses,
    unix_now,
    zone_option,
)
from tela.errors import UsageError
from tela.record import NODE_ID_BYTES, NodeId, Role, short

if TYPE_CHECKING:  # commands import them when they run: keys need PyNaCl, 120 ms of help do not
    from tela.revocation import Revoked
    from tela.swarm import Swarm

_FIRST_HUB_ROLES = (Role.HUB, Role.INGRESS, Role.WORKER)
_FIRST_HUB_EXPIRES_S = 30 * 86_400.0


@click.group()
def swarm() -> None:
    """Make and manage swarms."""


@swarm.command("init")
@click.option("--name", type=NAME, default="default", show_default=True, help="What you call the swarm here.")
@click.option("--provider", type=NAME, default=WHERE, show_default=True, help="The institution.")
@zone_option
@region_option
@click.option(
    "--shared-key",
    type=click.File("rb"),
    help="For development: derive every key from this file. Whoever has it can be anybody in the swarm.",
)
@state_dir_option
@json_option
def swarm_init(
    *,
    name: str,
    provider: str,
    zone: str,
    region: str,
    shared_key: BinaryIO | None,
    state_dir: Path | None,
    as_json: bool,
) -> None:
    """Make a swarm and print the invite of its first hub.

    Its id, its CA key and an issuing key for the provider are kept on this host.

    With --shared-key the same file makes the same swarm on every host: each can run hubs and make invites.
    """
    from tela.swarm import create_swarm

    shared = shared_key.read().strip() if shared_key else b""
    if shared_key and not shared:
        raise UsageError("the shared key is empty", hint="make one: openssl rand -hex 32")
    if shared:
        click.echo("warning: a swarm of a shared key is for development: who has the file can be anybody", err=True)
    made = create_swarm(chosen_state_dir(state_dir), name, provider=provider, now=unix_now(), shared=shared)
    line = invite_line(
        made, provider, zone=zone, region=region, roles=_FIRST_HUB_ROLES, expires_s=_FIRST_HUB_EXPIRES_S, uses=1
    )
    print_invite(line, made, as_json=as_json)
    next_step(
        f"made swarm {name} ({short(made.swarm)}) with provider {provider}; its keys are in {made.directory}",
        "next: start the first hub here, with the line above in a file: tela ingress --hub FILE",
    )


@swarm.command("show")
@swarm_option
@state_dir_option
@json_option
def swarm_show(*, swarm_name: str | None, state_dir: Path | None, as_json: bool) -> None:
    """Show what is kept of a swarm on this host.

    Its id, CA, providers, and what the CA took back; no secret.
    """
    from tela.revocation import MAX_REVOKED
    from tela.swarm import choose_swarm

    chosen = choose_swarm(chosen_state_dir(state_dir), swarm_name)
    facts = _facts(chosen)
    if as_json:
        click.echo(json.dumps(facts))
        return
    rows = [(name, str(facts[key])) for name, key in _SHOWN]
    rows.append(("providers", ", ".join(chosen.certified())))
    rows.append(("revoked", f"{len(facts['revoked'])} of at most {MAX_REVOKED}"))
    click.echo(render_table(("SWARM", chosen.name), rows))
    if facts["revoked"]:
        listed = [(each["kind"], each["id"], render_time(each["revoked_unix_s"])) for each in facts["revoked"]]
        click.echo("\n" + render_table(("REVOKED", "ID", "SINCE"), listed))


_SHOWN = (
    ("id", "swarm"),
    ("CA", "ca"),
    ("CA key here", "has_ca_key"),
    ("folder", "directory"),
    ("invites made here", "n_invites"),
)


def _facts(chosen: Swarm) -> dict[str, Any]:
    return {
        "name": chosen.name,
        "swarm": chosen.swarm.hex(),
        "ca": chosen.ca.hex(),
        "has_ca_key": chosen.has_ca_key,
        "directory": str(chosen.directory),
        "providers": chosen.certified(),
        "n_invites": len(chosen.invites()),
        "revoked": [_revoked_facts(item) for item in chosen.revocations().items],
    }


def _revoked_facts(item: Revoked) -> dict[str, Any]:
    from tela.revocation import RevokedKind

    kind = RevokedKind(item.kind).name.lower() if item.kind in set(RevokedKind) else f"kind {item.kind}"
    return {"kind": kind, "id": item.id.hex(), "revoked_unix_s": item.revoked_unix_s}


@swarm.command("revoke")
@click.argument("node")
@swarm_option
@state_dir_option
@json_option
def swarm_revoke(*, node: str, swarm_name: str | None, state_dir: Path | None, as_json: bool) -> None:
    """Take a node's membership back, for good.

    NODE is its id as tela status shows it, or as many of its 64 hex digits as tell it apart. Needs the swarm's CA key
    on this host. Within seconds its links
    are closed, its models are served by nobody, and its daemon ends with exit code 5.
    """
    from tela.revocation import RevokedKind
    from tela.swarm import choose_swarm

    place = chosen_state_dir(state_dir)
    chosen = choose_swarm(place, swarm_name)
    uses = token_uses(place)
    seen = {bytes.fromhex(view.key) for daemon in daemons_of(chosen.swarm) for view in daemon.status().nodes}
    key = choose_id(node, sorted(seen), size=NODE_ID_BYTES, what="node")
    revoked = take_back(chosen, [(RevokedKind.NODE, key)])
    facts = {"node": key.hex(), "swarm": short(chosen.swarm), "n_revoked": len(revoked.items)}
    click.echo(json.dumps(facts) if as_json else f"revoked node {short(key)} in swarm {chosen.name}")
    for token_id in sorted({token_id for each in uses for token_id in each.tokens_of(NodeId(key))}):
        if not revoked.has(RevokedKind.TOKEN, token_id):
            next_step(
                f"its owner can join under another key while the invite lasts: tela invite revoke {token_id.hex()}"
            )


@swarm.command("rotate")
@click.option("--provider", "providers", type=NAME, multiple=True, help="Of this provider only; may be given again.")
@click.option("--finish", is_flag=True, help="End a rotation: revoke and remove the keys before.")
@swarm_option
@state_dir_option
@json_option
def swarm_rotate(
    *, providers: tuple[str, ...], finish: bool, swarm_name: str | None, state_dir: Path | None, as_json: bool
) -> None:
    """Give providers new issuing keys. Needs the swarm's CA key on this host.

    The keys before go on redeeming their invites, so nobody is cut off. Members get certificates under the new keys as
    they renew, within half of their certificates' life. When that time is over and the old invites have expired, end
    the rotation with --finish: whoever still holds a certificate under a key before is out then.

    A stolen issuing key is not rotated but revoked at once: tela provider revoke.
    """
    from tela.swarm import choose_swarm

    chosen = choose_swarm(chosen_state_dir(state_dir), swarm_name)
    names = list(providers or chosen.providers())
    done = _finish_rotation(chosen, names) if finish else _rotate(chosen, names)
    facts = {"swarm": chosen.name, "finished" if finish else "rotated": done}
    verb = "ended the rotation of" if finish else "gave new issuing keys to"
    click.echo(json.dumps(facts) if as_json else f"{verb} {', '.join(done) or 'no provider'} in swarm {chosen.name}")
    if done and not finish:
        next_step(
            "next: restart hubs that run here, one after another; make new invites; and when the old certificates have "
            "been renewed: tela swarm rotate --finish"
        )


def _rotate(chosen: Swarm, names: list[str]) -> list[str]:
    for name in names:
        chosen.rotate_provider(name, now=unix_now())
    return names


def _finish_rotation(chosen: Swarm, names: list[str]) -> list[str]:
    from tela.revocation import RevokedKind

    outgoing = {name: [each.certificate.issuer for each in chosen.outgoing(name)] for name in names}
    rotated = [name for name in names if outgoing[name]]
    if rotated:
        revoked = sign_list(chosen, [(RevokedKind.ISSUER, key) for name in rotated for key in outgoing[name]])
        for name in rotated:
            chosen.end_rotation(name)
        spread(chosen, revoked)
    return rotated
