"""What a node makes of its options when it starts: the supervisor of its engine, the listeners of its API."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Final

import trio

from tela.config import EngineOptions, parse_host_port
from tela.engine.command import parse_command
from tela.engine.process import EngineSpec, Supervisor
from tela.engine.report import InstanceReport
from tela.errors import ConfigError

INSTANCE: Final = 0
"""Number of the one engine that a node wraps."""


def make_supervisor(
    engine: EngineOptions, *, on_change: Callable[[InstanceReport], None], rng: random.Random
) -> Supervisor:
    """Of the engine that the user's command launches.

    Raises:
        ConfigError: the command cannot be wrapped.
    """
    spec = EngineSpec(
        command=parse_command(engine.argv, engine_port=engine.engine_port, environ=os.environ),
        instance=INSTANCE,
        health_path=engine.health_path,
        models_path=engine.models_path,
        is_canary=engine.is_canary,
        start_timeout_s=engine.start_timeout_s,
        n_restarts=engine.restart,
    )
    return Supervisor(spec, on_change=on_change, rng=rng)


async def open_http(address: str) -> tuple[Sequence[trio.SocketListener], str]:
    """Listeners on HOST:PORT, and the base URL for clients.

    Raises:
        ConfigError: the address cannot be had.
    """
    host, port = parse_host_port(address)
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise ConfigError(f"cannot serve on {address}: {error.strerror}", hint="choose with --http") from error
    bound = listeners[0].socket.getsockname()
    return listeners, f"http://{f'[{host}]' if ':' in host else host}:{bound[1]}/v1"
