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
MAX_REPLY_BYTES: Final = 64 * 1024 * 1024
"""The status of 10,000 nodes is about 5 MB; metrics are less."""


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

    def request(self, method: str, target: str, *, content: bytes = b"", timeout_s: float = REQUEST_TIMEOUT_S) -> bytes:
        """The body of a good answer to a request with ``content``.

        Raises:
            NoDaemonError: nobody listens, or it went away before the answer.
            DeadlineError: no answer in ``timeout_s``.
            TelaError: the daemon said no.
        """
        try:
            status, headers, answer = _parse_reply(_exchange(self.path, method, target, content, timeout_s))
        except TimeoutError as error:
            raise DeadlineError(f"daemon {self.name} did not answer {method} {target} in {timeout_s:.0f} s") from error
        except (OSError, ValueError) as error:
            raise NoDaemonError(f"no daemon {self.name} answers on {self.path}", hint=_HOW_TO_START) from error
        warn_of_skew(self.name, headers.get("x-tela-version", tela.__version__))
        if status >= 400:
            raise TelaError(f"daemon {self.name} answered {status} to {method} {target}{_reason(answer)}")
        return answer

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


def _exchange(path: Path, method: str, target: str, content: bytes, timeout_s: float) -> bytes:
    """The whole reply. HTTP/1.0: it ends with the connection and is never chunked.

    http.client would do, but its import is a fifth of what ``tela status`` may cost (style.md 3.6).
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        head = f"{method} {target} HTTP/1.0\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        reply = bytearray()
        while data := connection.recv(65_536):
            reply += data
            if len(reply) > MAX_REPLY_BYTES:
                raise ValueError(f"a reply over {MAX_REPLY_BYTES} bytes")
        return bytes(reply)


def _parse_reply(reply: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers by lower-case name, and content.

    Raises:
        ValueError: it is not, or not all of, an HTTP reply.
    """
    head, separator, content = reply.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if not separator or len(content) != int(headers.get("content-length", len(content))):
        raise ValueError("the reply was cut off")
    return int(first.split(" ")[1]), headers, content


def _reason(answer: bytes) -> str:
    try:
        return f": {msgspec.json.decode(answer)['error']['message']}"
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""


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
