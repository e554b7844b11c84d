"""``tela status``, ``tela metrics`` and ``tela wait``: they ask, and change nothing."""

from __future__ import annotations

import time
import urllib.parse
from typing import Final

import click
import msgspec

from tela.cli.client import choose_daemon, running_daemons
from tela.cli.options import DURATION, environ, json_option, name_option, next_step
from tela.cli.render import render_node, render_route, render_status
from tela.errors import DeadlineError, NoDaemonError, TelaError, UsageError
from tela.views import Report, RouteView, Status

POLL_INTERVAL_S: Final = 0.2
"""Cost of a poll: under 1 ms of the daemon's CPU; nobody notices a delay of 0.2 s after minutes of loading."""


@click.command()
@name_option
@json_option
@click.option("--no-color", is_flag=True, help="Print without colours [NO_COLOR].")
@click.option("--watch", type=DURATION, help="Print it again each so often, until interrupted.")
@click.option("--as-routed", metavar="MODEL", help="Show who would get a request for MODEL, and why not others.")
@click.option("--node", metavar="NODE", help="Show all that is known of one node, by its name or the start of its id.")
@click.option("--provider", "providers", multiple=True, help="With --as-routed: as if only these were allowed.")
def status(
    *,
    name: str | None,
    as_json: bool,
    no_color: bool,
    watch: float | None,
    as_routed: str | None,
    node: str | None,
    providers: tuple[str, ...],
) -> int:
    """Show your daemons on this host, and the swarm they see.

    Fails with 3 where none runs. The JSON form is {"schema_version": 1, "daemons": [...]}; its schema is in
    docs/reference/status.schema.json. With --watch it is one object a line.

    With --as-routed, fails with 1 where nobody would get the request. With --node, the JSON form is that node's.
    """
    color = False if no_color or environ().get("NO_COLOR") else None

    def show() -> int:
        if node:
            return _show_node(name, node, as_json)
        return _show_route(name, as_routed, providers, as_json) if as_routed else _show_status(name, as_json, color)

    if providers and not as_routed:
        raise UsageError("--provider goes with --as-routed")
    while watch is not None:
        if not as_json:
            click.clear()  # nothing where stdout is no terminal
        show()
        time.sleep(watch)
    return show()


def _show_status(name: str | None, as_json: bool, color: bool | None) -> int:
    report = Report(daemons=tuple(_collect(name)))
    if as_json:
        click.echo(msgspec.json.encode(report))
        return 0
    click.echo("\n\n".join(render_status(daemon) for daemon in report.daemons), color=color)
    next_step(*_advice(report.daemons))
    return 0


def _show_node(name: str | None, wanted: str, as_json: bool) -> int:
    views = [view for daemon in _collect(name) for view in daemon.nodes]
    found = {view.node: view for view in views if view.name == wanted or view.key.startswith(wanted.lower())}
    if len(found) != 1:
        hint = ", ".join(f"{view.node} {view.name}" for view in found.values()) or "tela status lists them"
        raise UsageError(f"{len(found)} nodes are called {wanted}", hint=hint)
    (view,) = found.values()
    click.echo(msgspec.json.encode(view) if as_json else render_node(view))
    return 0


def _show_route(name: str | None, model: str, providers: tuple[str, ...], as_json: bool) -> int:
    query = urllib.parse.urlencode([("model", model), *(("provider", each) for each in providers)])
    answer = choose_daemon(environ(), name).request("GET", f"/route?{query}")
    route = msgspec.json.decode(answer, type=RouteView)
    click.echo(msgspec.json.encode(route) if as_json else render_route(route))
    return 0 if any(candidate.is_fit for candidate in route.candidates) else 1


def _collect(name: str | None) -> list[Status]:
    """Every daemon that answers; those that hang are told on stderr where others answer."""
    daemons = [choose_daemon(environ(), name)] if name else running_daemons(environ())
    answers: list[Status] = []
    errors: list[TelaError] = []
    for daemon in daemons:
        try:
            answers.append(daemon.status())
        except TelaError as error:
            errors.append(error)
    if not answers:
        raise (
            errors[0]
            if errors
            else NoDaemonError("no daemon runs here", hint="start one with tela join or tela ingress")
        )
    for silent in errors:
        click.echo(f"warning: {silent}", err=True)
    return answers


def _advice(daemons: tuple[Status, ...]) -> list[str]:
    lines = []
    for daemon in daemons:
        if daemon.base_url and daemon.models:
            lines.append(f"\nnext: point an OpenAI client at {daemon.base_url}")
        elif daemon.base_url:
            lines.append(
                "\nnext: no model yet; tela invite create > worker.invite, then tela join worker.invite -- ENGINE"
            )
    return lines[:1]


@click.command()
@name_option
def metrics(*, name: str | None) -> None:
    """Print a daemon's metrics in Prometheus' text format."""
    click.echo(choose_daemon(environ(), name).request("GET", "/metrics"), nl=False)


@click.command()
@click.option(
    "--for", "condition", type=click.Choice(["serving"]), default="serving", show_default=True, help="The condition."
)
@click.option("--model", help="Wait for this model, anywhere in the swarm; without it, for the daemon itself.")
@click.option("--replicas", type=click.IntRange(min=1), default=1, show_default=True, help="How many of the model.")
@click.option("--timeout", type=DURATION, default="60s", show_default=True, help="Give up after this long.")
@name_option
def wait(*, condition: str, model: str | None, replicas: int, timeout: float, name: str | None) -> None:
    """Wait until a model, or the daemon, is serving.

    The daemon may still be starting. Fails with 4 where that does not happen in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        is_met, seen = _look(name, model, replicas)
        if is_met:
            return
        if time.monotonic() >= deadline:
            what = f"model {model}" if model else "the daemon"
            raise DeadlineError(f"{what} is not {condition} after {timeout:g} s: {seen}", hint="look at tela status")
        time.sleep(POLL_INTERVAL_S)


def _look(name: str | None, model: str | None, replicas: int) -> tuple[bool, str]:
    """Whether the condition holds now, and what was seen."""
    try:
        view = choose_daemon(environ(), name).status()
    except (NoDaemonError, DeadlineError) as error:
        return False, str(error)
    if model is None:
        return view.state == "serving", f"{view.name} is in state {view.state}"
    n_ready = view.n_ready(model)
    return n_ready >= replicas, f"{n_ready} of {replicas} replicas are ready"
