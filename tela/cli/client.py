"""Talks to daemons of this user over their control sockets, with the standard library alone."""

from __future__ import annotations

import functools
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import msgspec

import tela
from tela.errors import DeadlineError, NoDaemonError, TelaError, UsageError
from tela.paths import find_sockets
from tela.views import Status, parse_status

REQUEST_TIMEOUT_S: Final = 5.0
"""A daemon answers from memory; one that takes longer hangs."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon by the name of its socket; it may be dead."""

    name: str
    path: Path

    def status(self) -> Status:
        """Its status. Raises what :meth:`request` raises."""
        content = self.request("GET", "/status")
        try:
            return parse_status(content)
        except msgspec.DecodeError as error:
            raise TelaError(f"daemon {self.name} sent a status that cannot be read: {error}") from error

    def hubs(self) -> tuple[str, ...]:
        """Hub addresses for invites, as it knows them. Raises what :meth:`request` raises."""
        return msgspec.json.decode(self.request("GET", "/hubs"), type=dict[str, tuple[str, ...]])["hubs"]

    def request(self, method: str, target: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> bytes:
        """The body of a good answer.

        Raises:
            NoDaemonError: nobody listens, or it went away before the answer.
            DeadlineError: no answer in ``timeout_s``.
            TelaError: the daemon said no.
        """
        import http.client  # 20 ms that help and start-up need not pay

        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(timeout_s)
        try:
            connection.sock.connect(str(self.path))
            connection.request(method, target)
            reply = connection.getresponse()
            content = reply.read()
        except TimeoutError as error:
            raise DeadlineError(f"daemon {self.name} did not answer {method} {target} in {timeout_s:.0f} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise NoDaemonError(f"no daemon {self.name} answers on {self.path}", hint=_HOW_TO_START) from error
        finally:
            connection.close()
        warn_of_skew(self.name, reply.headers.get("x-tela-version", tela.__version__))
        if reply.status >= 400:
            raise TelaError(f"daemon {self.name} answered {reply.status} to {method} {target}")
        return content

    def is_alive(self) -> bool:
        """Whether somebody listens on the socket."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(REQUEST_TIMEOUT_S)
            try:
                probe.connect(str(self.path))
            except TimeoutError:
                return True  # its backlog is full: it hangs, but it is there
            except OSError:
                return False
        return True


_HOW_TO_START: Final = "start one with tela join or tela ingress"


@functools.cache
def warn_of_skew(name: str, version: str) -> None:
    """Say once per daemon that it runs another version of tela than this command."""
    if version != tela.__version__:
        click.echo(f"warning: daemon {name} runs tela {version}, this is {tela.__version__}", err=True)


def running_daemons(environ: Mapping[str, str]) -> list[Daemon]:
    """This user's daemons on this host, without dead sockets."""
    found = [Daemon(name, path) for name, path in find_sockets(environ).items()]
    return [daemon for daemon in found if daemon.is_alive()]


def choose_daemon(environ: Mapping[str, str], name: str | None) -> Daemon:
    """The daemon called ``name``, or the only one.

    Raises:
        NoDaemonError: none runs, or none of this name.
        UsageError: the name is needed to tell several apart.
    """
    daemons = running_daemons(environ)
    matching = [daemon for daemon in daemons if name is None or daemon.name == name]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(daemon.name for daemon in daemons)
    if matching:
        raise UsageError("several daemons run here", hint=f"choose one with --name: {names}")
    if name and daemons:
        raise NoDaemonError(f"no daemon called {name} runs here", hint=f"running: {names}")
    raise NoDaemonError(f"no daemon{f' called {name}' if name else ''} runs here", hint=_HOW_TO_START)
