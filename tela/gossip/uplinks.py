"""On which of its links a node wants news: two hubs tell it all there is, and more would tell it again.

A node that is no hub links every hub and every ingress, for requests and for the day on which a hub dies. News comes
and goes on UPLINKS of them; the others are *lazy*: they carry pings with hashes, anti-entropy and the farewell, so what
both uplinks lost is repaired within a few exchanges. The node chooses and tells the other side. Links between hubs, and
those of nodes that see fewer hubs, are never lazy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import blake2b
from typing import Final, NamedTuple

from tela.record import NodeId, Role

UPLINKS: Final = 2
"""One may be dead for a second before it is noticed."""


class Peer(NamedTuple):
    """What the choice depends on."""

    roles: Collection[str]  # of its certificate; empty where that has not come yet
    is_sound: bool  # it answers


def lazy_links(own: NodeId, own_roles: Collection[str], peers: Mapping[NodeId, Peer]) -> frozenset[NodeId]:
    """Peers whose links are to be lazy.

    Args:
        own: our node: with the peer's it decides, so that nodes spread over the hubs and keep to their choice.
        own_roles: of our certificate.
        peers: of every link that is up.
    """
    if Role.HUB in own_roles:
        return frozenset()
    sound_hubs = [peer for peer, seen in peers.items() if Role.HUB in seen.roles and seen.is_sound]
    if len(sound_hubs) < UPLINKS:
        return frozenset()
    chosen = sorted(sound_hubs, key=lambda hub: _rank(own, hub))[:UPLINKS]
    fixed = {Role.HUB, Role.INGRESS}
    return frozenset(peer for peer, seen in peers.items() if fixed & set(seen.roles) and peer not in chosen)


def _rank(own: NodeId, hub: NodeId) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar 1998): a hub that goes moves only who had chosen it."""
    return blake2b(own + hub, digest_size=8).digest()
