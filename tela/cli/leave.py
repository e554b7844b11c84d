"""``tela drain`` and ``tela leave``: how a daemon goes without failing a request."""

from __future__ import annotations

import time
from typing import Final

import click

from tela.cli.client import Daemon, choose_daemon
from tela.cli.options import DURATION, environ, name_option, next_step
from tela.errors import DeadlineError

POLL_INTERVAL_S: Final = 0.1

timeout_option = click.option(
    "--timeout", type=DURATION, default="60s", show_default=True, help="Give up after this long."
)


@click.command()
@name_option
@timeout_option
def drain(*, name: str | None, timeout: float) -> None:
    """Take no new requests; those in flight may end.

    The daemon stays until tela leave.
    """
    daemon = choose_daemon(environ(), name)
    daemon.request("POST", "/drain", timeout_s=timeout)
    click.echo(f"{daemon.name} is draining")
    next_step(f"next: tela leave --name {daemon.name}")


@click.command()
@name_option
@timeout_option
def leave(*, name: str | None, timeout: float) -> None:
    """Drain a daemon, and wait until it has stopped."""
    daemon = choose_daemon(environ(), name)
    deadline = time.monotonic() + timeout
    daemon.request("POST", "/leave", timeout_s=timeout)
    _wait_gone(daemon, deadline)
    click.echo(f"{daemon.name} has left")


def _wait_gone(daemon: Daemon, deadline: float) -> None:
    while daemon.is_alive():
        if time.monotonic() >= deadline:
            raise DeadlineError(
                f"{daemon.name} is still stopping", hint=f"see tela status --name {daemon.name}, or wait with --timeout"
            )
        time.sleep(POLL_INTERVAL_S)
