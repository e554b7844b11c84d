"""``tela provider``: the institutions whose keys may certify members."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tela.cli.options import NAME, json_option, next_step, state_dir_option
from tela.cli.render import render_table
from tela.cli.signing import chosen_state_dir, render_time, sign_list, spread, swarm_option, unix_now

if TYPE_CHECKING:  # see tela.cli.signing
    from tela.identity import IssuerCertificate


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

    chosen = choose_swarm(chosen_state_dir(state_dir), swarm_name)
    chosen.add_provider(name, now=unix_now())
    click.echo(f"swarm {chosen.name} has a provider {name}")
    next_step(f"next: restart hubs that run here, then tela invite create --provider {name}")


@provider.command("list")
@swarm_option
@state_dir_option
@json_option
def provider_list(*, swarm_name: str | None, state_dir: Path | None, as_json: bool) -> None:
    """List the issuing keys that were certified here.

    Revoked ones are listed too, and those that a rotation has replaced.
    """
    from tela.swarm import choose_swarm

    chosen = choose_swarm(chosen_state_dir(state_dir), swarm_name)
    keys_here = set(chosen.providers())
    facts = [_facts(chosen.issuer_certificate(name), is_here=name in keys_here) for name in chosen.certified()]
    facts += [
        _facts(issuer.certificate, is_here=True, state="outgoing")
        for name in chosen.certified()
        for issuer in chosen.outgoing(name)
    ]
    facts += [_facts(certificate, is_here=False, state="revoked") for certificate in chosen.retired()]
    if as_json:
        click.echo(json.dumps({"swarm": chosen.name, "providers": facts}))
        return
    rows = [
        (
            each["provider"],
            each["issuer"][:8],
            "here" if each["is_here"] else "",
            render_time(each["expires_unix_s"]),
            each["state"],
        )
        for each in facts
    ]
    click.echo(render_table(("PROVIDER", "KEY", "WHERE", "EXPIRES", "STATE"), rows))


def _facts(certificate: IssuerCertificate, *, is_here: bool, state: str = "good") -> dict[str, Any]:
    is_expired = state == "good" and certificate.expires_unix_s < unix_now()
    return {
        "provider": certificate.provider,
        "issuer": certificate.issuer.hex(),
        "is_here": is_here,
        "expires_unix_s": certificate.expires_unix_s,
        "state": "expired" if is_expired else state,
    }


@provider.command("revoke")
@click.argument("name", type=NAME)
@swarm_option
@state_dir_option
@json_option
def provider_revoke(*, name: str, swarm_name: str | None, state_dir: Path | None, as_json: bool) -> None:
    """Take back a provider's key, members and invites.

    Needs the swarm's CA key on this host. Within seconds every member that the key certified is out, hubs among them;
    the key itself is removed from this host.
    """
    from tela.revocation import RevokedKind
    from tela.swarm import choose_swarm

    chosen = choose_swarm(chosen_state_dir(state_dir), swarm_name)
    issuer = chosen.issuer_certificate(name).issuer
    outgoing = [each.certificate.issuer for each in chosen.outgoing(name)]
    revoked = sign_list(chosen, [(RevokedKind.ISSUER, each) for each in (issuer, *outgoing)])
    chosen.end_rotation(name)
    chosen.retire_provider(name)
    spread(chosen, revoked)
    facts = {"provider": name, "issuer": issuer.hex(), "n_revoked": len(revoked.items)}
    click.echo(json.dumps(facts) if as_json else f"revoked provider {name} in swarm {chosen.name}")
    next_step(f"next: to let its good nodes in again under a new key: tela provider add {name}")
