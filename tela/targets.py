"""Whom this node keeps links to, out of its invite, the registry and what it remembers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from tela.crdt.registry import Snapshot
from tela.net.multiaddrs import node_of_address
from tela.record import NodeId, Role


class Targets:
    """Hubs of the invite, and every member that accepts links: workers dial out to each ingress (overlay.md 5).

    Args:
        own: our node.
        hubs: addresses in the invite.
        revoked: nodes that the CA took back.
        snapshot: the registry.
        remembered: members that we knew, while we are alone; what the registry shows is newer.
    """

    def __init__(
        self,
        *,
        own: NodeId,
        hubs: Sequence[str],
        revoked: Callable[[], Collection[NodeId]],
        snapshot: Callable[[], Snapshot],
        remembered: Callable[[], Mapping[NodeId, Sequence[str]]],
    ) -> None:
        self._own = own
        self._hubs = hubs
        self._revoked = revoked
        self._snapshot = snapshot
        self._remembered = remembered

    def links(self) -> dict[NodeId, Sequence[str]]:
        """Each node's addresses."""
        targets = dict(self._remembered())
        for member in self._snapshot().members.values():
            if member.card and member.card.addresses and {Role.HUB, Role.INGRESS} & set(member.roles):
                targets[member.node] = member.card.addresses
        for address in self.other_hubs():
            targets.setdefault(node_of_address(address), [address])
        return targets

    def other_hubs(self) -> list[str]:
        """Addresses of the invite's hubs but ourselves."""
        return [
            address
            for address in self._hubs
            if (node := node_of_address(address)) != self._own and node not in self._revoked()
        ]

    def known_hubs(self) -> list[str]:
        """Addresses of hubs that the registry shows."""
        return [
            address
            for member in self._snapshot().members.values()
            if member.card and Role.HUB in member.roles and member.node != self._own
            for address in member.card.addresses
        ]
