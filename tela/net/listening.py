"""Listening sockets out of endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio

from tela.errors import ConfigError
from tela.net.endpoints import Endpoint
from tela.net.multiaddrs import Carrier

BACKLOG: Final = 1_024
"""Connections that wait for accept(): a swarm that restarts at once finds its hub."""


async def open_listeners(endpoint: Endpoint) -> Sequence[trio.SocketListener]:
    """Listen there; port 0 takes any.

    Raises:
        ConfigError: the address is not ours or in use, or TLS is asked for.
    """
    if endpoint.carrier is Carrier.WSS:
        raise ConfigError(
            "tela ends no TLS itself", hint="listen on ws://127.0.0.1:PORT and put a proxy with a certificate before it"
        )
    try:
        return await trio.open_tcp_listeners(endpoint.port, host=endpoint.host, backlog=BACKLOG)
    except OSError as error:
        where = f"{endpoint.host}:{endpoint.port}"
        raise ConfigError(f"cannot listen on {where}: {error}", hint="choose another port with --listen") from error
