"""Listening sockets out of ``HOST:PORT`` texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio

from tela.errors import ConfigError

BACKLOG: Final = 1_024
"""Connections that wait for accept(): a swarm that restarts at once finds its hub."""


async def open_listeners(text: str) -> Sequence[trio.SocketListener]:
    """Listen at ``HOST:PORT``; port 0 takes any.

    Raises:
        ConfigError: malformed, or the address is not ours or in use.
    """
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"malformed listen address {text[:128]}", hint="the form is HOST:PORT, as in 0.0.0.0:4001")
    try:
        return await trio.open_tcp_listeners(int(port), host=host.strip("[]") or None, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {text}: {error}", hint="choose another port with --listen") from error
