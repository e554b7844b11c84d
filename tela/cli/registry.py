"""``tela registry``: what a daemon believes of the swarm, fact by fact, and how that came about."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, BinaryIO, Final

import click
import msgspec

from tela.cli.client import choose_daemon
from tela.cli.options import environ, json_option, name_option
from tela.cli.render import render_duration, render_table
from tela.errors import TelaError, UsageError
from tela.views import ChangesView, EntryView, RegistryView

if TYPE_CHECKING:
    from tela.views import ChangeView

EXIT_DIFFERS: Final = 1
"""As diff(1)."""
_ENTRY_HEADERS: Final = ("NODE", "NAME", "KIND", "STATUS", "SESSION", "VERSION", "INC", "ENDS IN", "BYTES", "VOTES")
_CHANGE_HEADERS: Final = ("TIME", "NODE", "NAME", "WAS", "IS", "WHY", "FROM")
_DIFFERENCE_HEADERS: Final = ("NODE", "NAME", "KIND", "HERE", "THERE", "WHY")


@click.group()
def registry() -> None:
    """Look into a daemon's replica of the registry."""


@registry.command("dump")
@name_option
@json_option
def registry_dump(*, name: str | None, as_json: bool) -> None:
    """Print every entry that a daemon holds.

    Its JSON form is what tela registry diff compares with.
    """
    view = _registry_of(name)
    if as_json:
        click.echo(msgspec.json.encode(view))
        return
    click.echo(render_table(_ENTRY_HEADERS, [_entry_row(entry, view.unix_s) for entry in view.entries]))
    click.echo(f"\n{len(view.entries)} entries, root {view.root}")


@registry.command("diff")
@click.argument("other", type=click.File("rb"))
@name_option
@json_option
def registry_diff(*, other: BinaryIO, name: str | None, as_json: bool) -> int:
    """Compare a daemon's replica with another's.

    OTHER is a file that tela registry dump --json wrote, or - for stdin:

    \b
      ssh HOST tela registry dump --json | tela registry diff -

    Fails with 1 where they differ. News takes milliseconds to travel: a difference that passes is no fault.
    """  # noqa: D301 - \b is click's mark for lines to be left as they are
    there = _parse(other.read(), "OTHER")
    here = _registry_of(name)
    if here.swarm != there.swarm:
        raise UsageError(f"OTHER is of swarm {there.swarm}, this daemon is in {here.swarm}")
    rows = _differences(here, there)
    if as_json:
        facts = [dict(zip(("node", "name", "kind", "here", "there", "why"), row, strict=True)) for row in rows]
        click.echo(msgspec.json.encode({"here": here.node, "there": there.node, "differences": facts}))
    elif rows:
        click.echo(render_table(_DIFFERENCE_HEADERS, [(node[:8], *rest) for node, *rest in rows]))
    else:
        click.echo(f"the same {len(here.entries)} entries as at {there.node}, root {here.root}")
    return EXIT_DIFFERS if rows else 0


@registry.command("log")
@name_option
@json_option
@click.option("--node", "prefix", default="", help="Of this node only: the first digits of its id.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="The last so many.")
def registry_log(*, name: str | None, as_json: bool, prefix: str, limit: int) -> None:
    """Print what changed lately in a daemon's registry, and why.

    The oldest comes first. The daemon remembers the last 1,000 changes.
    """
    answer = choose_daemon(environ(), name).request("GET", "/changes")
    view = msgspec.json.decode(answer, type=ChangesView)
    changes = tuple(change for change in view.changes if change.node.startswith(prefix[:8].lower()))[-limit:]
    if as_json:
        click.echo(msgspec.json.encode(ChangesView(changes=changes)))
    else:
        click.echo(render_table(_CHANGE_HEADERS, [_change_row(change) for change in changes]))


def _registry_of(name: str | None) -> RegistryView:
    daemon = choose_daemon(environ(), name)
    return _parse(daemon.request("GET", "/registry"), f"daemon {daemon.name}")


def _parse(content: bytes, origin: str) -> RegistryView:
    try:
        return msgspec.json.decode(content, type=RegistryView)
    except msgspec.DecodeError as error:
        raise TelaError(
            f"{origin} holds no dump of a registry: {error}", hint="make one with tela registry dump --json"
        ) from error


def _entry_row(entry: EntryView, unix_s: float) -> tuple[str, ...]:
    votes = ", ".join(f"{vote.kind} by {vote.observer}" for vote in entry.votes)
    return (
        entry.node[:8],
        entry.name,
        entry.kind,
        entry.status,
        str(entry.session),
        str(entry.version),
        str(entry.incarnation),
        render_duration(max(0.0, entry.end_unix_s - unix_s)),
        str(entry.size_bytes),
        votes,
    )


def _change_row(change: ChangeView) -> tuple[str, ...]:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(change.unix_s))
    was, status = change.was or "unknown", change.status or "forgotten"
    return (at, change.node, change.name, was, status, change.reason, change.heard_from or "us")


def _differences(here: RegistryView, there: RegistryView) -> list[tuple[str, ...]]:
    ours = {(entry.node, entry.kind): entry for entry in here.entries}
    theirs = {(entry.node, entry.kind): entry for entry in there.entries}
    rows: list[tuple[str, ...]] = []
    for key in sorted(ours.keys() | theirs.keys()):
        our, their = ours.get(key), theirs.get(key)
        if our is None or their is None or our.fingerprint != their.fingerprint:
            name = next(entry.name for entry in (our, their) if entry)
            rows.append((key[0], name, key[1], _summary(our), _summary(their), _why(our, their)))
    return rows


def _summary(entry: EntryView | None) -> str:
    return f"{entry.status or entry.kind} {entry.session}.{entry.version}" if entry else ""


def _why(our: EntryView | None, their: EntryView | None) -> str:
    """Which replica is behind; by the order that merging uses."""
    if our is None or their is None:
        return "only here" if our else "only there"
    ranks = [(entry.session, entry.version, entry.incarnation) for entry in (our, their)]
    if ranks[0] == ranks[1]:
        return "the votes differ" if our.votes != their.votes else "two records of one version"
    return "newer here" if ranks[0] > ranks[1] else "newer there"
