"""Where this node can be reached and what it tells the swarm of that: its own addresses, else circuits through hubs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import trio

from tela.errors import TelaError
from tela.identity import Certificate
from tela.net.addresses import is_wanted, local_interfaces
from tela.net.admission import Admission
from tela.net.circuit import HOP_PROTOCOL, STOP_PROTOCOL
from tela.net.circuits import circuit_addresses
from tela.net.dialback import DialBack
from tela.net.endpoints import Choice
from tela.net.libp2p import Libp2pMesh
from tela.net.multiaddrs import parse_address
from tela.net.punch import PUNCH_PROTOCOL
from tela.net.punching import Punching
from tela.net.reach import Reach
from tela.net.reachability import Reachability
from tela.net.relay import Relay
from tela.observe import log
from tela.record import NodeId, Role, short
from tela.views import ReachView
from tela.wire import REACH_PROTOCOL

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings trio-stubs, which hide trio's own types from mypy

MAX_RELAYS: Final = 2
"""Hubs that hold a reservation of ours: one may go down."""
LOOK_INTERVAL_S: Final = 1.0
RESERVE_RETRY_S: Final = 10.0
"""After a hub refused a reservation."""


class Whereabouts:
    """Checks our addresses by dial-back, holds circuits where none works, and answers others who do the same.

    Args:
        mesh: ours.
        admission: who is a member.
        is_hub: relay circuits for members.
        is_called: others open links to us: an ingress. Who only dials out needs no address.
        choice: of interfaces and networks to be reached on.
        trusts_claims: see :class:`tela.net.reach.Reach`.
        addresses_of: the addresses of a hub, as the registry or the invite has them.
        now: unix seconds.
        on_change: what we announce has changed.
    """

    def __init__(
        self,
        mesh: Libp2pMesh,
        admission: Admission,
        *,
        is_hub: bool,
        is_called: bool,
        choice: Choice,
        trusts_claims: bool,
        addresses_of: Callable[[NodeId], Sequence[str]],
        now: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self._mesh = mesh
        self._is_called = is_called
        self._addresses_of = addresses_of
        self._now = now
        self._reach = Reach(
            [parse_address(each) for each in mesh.addresses],
            trusts_claims=trusts_claims,
            is_wanted=lambda host: is_wanted(host, local_interfaces(), choice),
        )
        self._prober = Reachability(
            mesh,
            self._reach,
            members=lambda: frozenset(peer for peer in mesh.peers() if admission.certificate_of(peer)),
            on_change=on_change,
        )
        mesh.circuits.introduce = admission.join
        mesh.circuits.on_change = on_change
        mesh.handle(REACH_PROTOCOL, admission.members_only(DialBack(mesh).serve))
        self._punching = Punching(
            mesh,
            is_member=lambda peer: admission.certificate_of(peer) is not None,
            is_kin=lambda peer: _are_kin(admission.certificate_of(peer), admission.membership.certificate),
        )
        mesh.handle(PUNCH_PROTOCOL, admission.members_only(self._punching.serve_stream))
        mesh.handle(STOP_PROTOCOL, admission.members_only(mesh.circuits.serve_stop, role=Role.HUB))
        if is_hub:
            mesh.handle(HOP_PROTOCOL, admission.members_only(Relay(mesh, now=now).serve_hop))

    async def serve(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Have our addresses checked and better paths tried until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._prober.serve)
            await nursery.start(self._punching.serve)
            task_status.started()

    @property
    def relayed_because(self) -> Mapping[NodeId, str]:
        """Why a peer is reached through a relay and not directly, of those with whom that was tried."""
        return self._punching.reasons

    @property
    def announced(self) -> tuple[str, ...]:
        """Addresses for our card."""
        return tuple(map(str, self._reach.announced)) or self._circuits

    @property
    def _circuits(self) -> tuple[str, ...]:
        reserved = self._mesh.circuits.reserved
        relays = {relay: tuple(map(parse_address, self._addresses_of(relay))) for relay in reserved}
        return circuit_addresses(self._mesh.node, relays)

    async def stand_by(self, hub: NodeId) -> None:
        """Run over a link to a hub: hold a circuit there for as long as nobody reaches us otherwise."""
        self._prober.look()
        while True:
            if not self._needs_relay:
                await trio.sleep(LOOK_INTERVAL_S)
                continue
            try:
                await self._mesh.circuits.hold(hub, self._now)
            except TelaError as error:
                log.info("circuit.retry", peer=short(hub), reason=str(error))
                await trio.sleep(RESERVE_RETRY_S)

    @property
    def _needs_relay(self) -> bool:
        is_decided = self._reach.is_checked or not self._mesh.addresses
        return (
            self._is_called
            and is_decided
            and not self._reach.announced
            and len(self._mesh.circuits.reserved) < MAX_RELAYS
        )

    def view(self, *, is_unreachable: bool) -> ReachView:
        """For people: how others reach us, why not better, and what we announce."""
        kind, reason = self._kind(is_unreachable=is_unreachable)
        failures = [f"{each.host}:{each.port}: {why}" for each, why in self._reach.failures.items()]
        return ReachView(kind=kind, reason="; ".join([reason, *failures]), announced=self.announced)

    def _kind(self, *, is_unreachable: bool) -> tuple[str, str]:
        if is_unreachable:
            return "unreachable", "no link to any member"
        if self._reach.announced:
            is_checked = self._reach.is_checked
            return ("direct", "reached by dial-back") if is_checked else ("claimed", "nobody has dialled back yet")
        if relays := self._mesh.circuits.reserved:
            why = "" if self._mesh.addresses else "; listens nowhere"
            return "relayed", f"through {', '.join(map(short, relays))}{why}"
        if self._mesh.addresses and not self._reach.is_checked:
            return "checking", "no member has answered yet"
        return "outbound", "no member reaches our addresses" if self._mesh.addresses else "listens nowhere"


def _are_kin(one: Certificate | None, other: Certificate | None) -> bool:
    return one is not None and other is not None and one.provider == other.provider
