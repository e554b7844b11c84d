"""The py-libp2p host under a mesh: Noise and our Yamux, its loops and memories turned off, its loggers silent."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Final

import libp2p
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_noise_key_pair
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify_push.identify_push import ID_PUSH as IDENTIFY_PUSH
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection import swarm_connection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL

from tela.errors import ConfigError
from tela.identity import KeyPair
from tela.net.foreign import ForeignConnection
from tela.observe import log

LIBP2P_VERSION: Final = "0.8.1"
"""What is here, in tela.net.libp2p and in tela.net.foreign names internals of this version."""
MAX_CONNECTIONS_PER_PEER: Final = 8
"""The library closes a peer's oldest beyond this, 3 by default: a peer that dials while it is dialled, over circuits
and directly, has as many for a moment."""
_UNLIMITED: Final = 1 << 30
"""Turns the swarm's own pruning of connections off; limits are ours."""

_LibraryHandler = Callable[[INetStream], Awaitable[None]]


def make_host(key: KeyPair) -> BasicHost:
    """A host that offers Noise and our Yamux, and does nothing on its own account."""
    if version("libp2p") != LIBP2P_VERSION:
        raise ConfigError(
            f"libp2p {version('libp2p')} is installed, tela needs {LIBP2P_VERSION}", hint="install tela anew"
        )
    _silence(logging.getLogger("libp2p"))
    swarm_connection.logging = logging.getLogger("libp2p.network")  # it writes to the root logger
    keys = create_new_key_pair(key.seed)
    noise = NoiseTransport(keys, noise_privkey=create_new_noise_key_pair().private_key)
    host = libp2p.new_host(
        key_pair=keys,
        sec_opt={NOISE_PROTOCOL: noise},
        muxer_opt={YAMUX_PROTOCOL: ForeignConnection},
        connection_config=ConnectionConfig(
            min_connections=0,
            low_watermark=0,
            high_watermark=_UNLIMITED,
            max_connections=_UNLIMITED,
            max_connections_per_peer=MAX_CONNECTIONS_PER_PEER,
        ),
        disable_identify_address_discovery=True,
    )
    swarm = host.get_network()
    swarm.auto_connector.maybe_connect = _dial_nobody
    swarm.auto_connector.record_disconnect = _forget  # it would remember every peer that ever left
    swarm.set_resource_manager(None)  # it denies a peer that reconnects 50 times; limits are ours
    swarm.notifees.clear()  # no identify by ourselves: a failing one is a failing system task. We answer others'
    del host.get_mux().handlers[IDENTIFY]  # tela.net.identify answers
    del host.get_mux().handlers[IDENTIFY_PUSH]  # a stranger could write into the library's peerstore
    swarm.set_stream_handler(_walled(swarm.common_stream_handler))
    return host


def _silence(logger: logging.Logger) -> None:
    logger.setLevel(logging.CRITICAL)
    logger.addHandler(logging.NullHandler())
    logger.propagate = False  # some of its loggers set a level of their own


async def _dial_nobody() -> None:
    """Stands in for the swarm's auto-connector: whom to dial is decided above the mesh."""


def _forget(_peer: ID) -> None:
    """Stands in for the auto-connector's memory."""


def _walled(handle: _LibraryHandler) -> _LibraryHandler:
    """The wall of the library's own handlers: an exception out of one would end its connection."""

    async def serve(net_stream: INetStream) -> None:
        try:
            await handle(net_stream)
        except Exception as error:  # noqa: BLE001 - the wall
            log.debug("stream.end", reason=repr(error))
            await net_stream.muxed_stream.reset()

    return serve
