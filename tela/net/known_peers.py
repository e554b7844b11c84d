"""Members that accepted a link from us, on disk: the way back into a swarm whose hubs have all moved or died (G04).

The file helps and is never needed: one that cannot be read is set aside, one that cannot be written costs a warning.
Who is really there is for Noise and admission to say, so a forged file costs failed dials and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tela.errors import ConfigError
from tela.identity import write_secret
from tela.net.multiaddrs import node_of_addresses
from tela.observe import log
from tela.record import NodeId, short

MAX_KNOWN_PEERS: Final = 32
"""Enough that some are alive after weeks away, few enough to dial them all at once."""
MAX_ADDRESSES: Final = 8
"""Of one peer; a host has few networks."""
MAX_FILE_BYTES: Final = 128 * 1024
"""32 peers with 8 addresses of 350 bytes fit; anything longer was not written by us."""


class KnownPeer(msgspec.Struct, frozen=True):
    """One member: where it accepted a link, and when it last did."""

    addresses: tuple[str, ...]
    linked_unix_s: int
    is_hub: bool = False


class KnownPeers:
    """The peers of one node, in ``path`` (JSON); in memory only where it is None.

    Args:
        path: in the node's state directory.
        now: unix seconds.
    """

    def __init__(self, path: Path | None, *, now: Callable[[], float]) -> None:
        self._path = path
        self._now = now
        self._peers = _read(path) if path is not None else {}

    def addresses(self) -> Mapping[NodeId, Sequence[str]]:
        """Where each peer accepted a link."""
        return {peer: known.addresses for peer, known in self._peers.items()}

    def hubs(self) -> frozenset[NodeId]:
        """Those that were certified as hubs."""
        return frozenset(peer for peer, known in self._peers.items() if known.is_hub)

    def remember(self, peer: NodeId, addresses: Sequence[str], *, is_hub: bool) -> None:
        """Note that ``peer`` accepted a link at one of ``addresses``; the longest-unseen peer makes room."""
        self._peers.pop(peer, None)
        self._peers[peer] = KnownPeer(tuple(addresses)[:MAX_ADDRESSES], int(self._now()), is_hub)
        newest = sorted(self._peers, key=lambda one: self._peers[one].linked_unix_s, reverse=True)
        for forgotten in newest[MAX_KNOWN_PEERS:]:
            del self._peers[forgotten]
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        content = {peer.hex(): known for peer, known in self._peers.items()}
        try:
            write_secret(self._path, msgspec.json.encode(content))
        except OSError as error:  # a full disk must not cost the link
            log.warning("peers.file", path=str(self._path), reason=f"cannot write: {error.strerror}")


def _read(path: Path) -> dict[NodeId, KnownPeer]:
    """What the file holds, without what is malformed."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"longer than {MAX_FILE_BYTES} bytes")
        found = msgspec.json.decode(content, type=dict[str, KnownPeer])
        peers = {node_of_addresses(known.addresses): known for known in found.values()}
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, ConfigError) as error:
        log.warning("peers.file", path=str(path), reason=f"ignored: {error}")
        return {}
    log.debug("peers.file", peers=[short(peer) for peer in peers])
    return dict(list(peers.items())[:MAX_KNOWN_PEERS])
