"""Keeps links to hubs and announced nodes up, for ever: dial, admission, and again after a back-off.

A link that the other side dialled is as good: only admission counts. ``on_link`` runs for as long as the link that we
made is up, and is cancelled when it goes down.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import trio

from tela.errors import DeadlineError, IntegrityError, RefusedError, TelaError
from tela.identity import Certificate
from tela.net.admission import Admission
from tela.net.bounds import deadline
from tela.net.transport import DIAL_TIMEOUT_S, Mesh
from tela.observe import links, log
from tela.record import NodeId, short

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings trio-stubs, which hide trio's own types from mypy

TARGETS_INTERVAL_S: Final = 1.0
"""How often the targets are looked at again."""
HUB_BACKOFF_S: Final = (1.0, 5.0)
"""First and longest pause between attempts at a hub: it is the way back into the swarm."""
HUB_REDIAL_TIMEOUT_S: Final = 2.0
"""For every attempt at a hub but the first: with the pause it bounds how long after its return we are back (G04). A SYN
that was lost is sent again after 1 s, so a path that works answers within it."""
NODE_BACKOFF_S: Final = (1.0, 30.0)
"""The same for other nodes: one that left for good stays announced for minutes."""

OnLink = Callable[[NodeId, Certificate], Awaitable[None]]


def backoff_s(n_failures: int, bounds_s: tuple[float, float], rng: random.Random) -> float:
    """The pause after ``n_failures`` attempts in a row: doubling between the bounds, with jitter of a half."""
    shortest_s, longest_s = bounds_s
    pause_s: float = min(longest_s, shortest_s * 2 ** min(n_failures, 10))
    return pause_s * rng.uniform(0.5, 1.0)


class LinkKeeper:
    """Keeps a link to each target.

    Args:
        mesh: to dial over.
        admission: joins each new link.
        targets: node → its addresses, as wanted now.
        hubs: those of the invite; they are retried sooner and their refusals are reported.
        on_link: what to run over a link that we made.
        on_refused: a hub refused us, with its code and reason.
        rng: jitter of the back-off.
    """

    def __init__(
        self,
        mesh: Mesh,
        admission: Admission,
        *,
        targets: Callable[[], Mapping[NodeId, Sequence[str]]],
        hubs: frozenset[NodeId],
        on_link: OnLink,
        on_refused: Callable[[RefusedError | IntegrityError], None],
        rng: random.Random,
    ) -> None:
        self._mesh = mesh
        self._admission = admission
        self._targets = targets
        self._hubs = hubs
        self._on_link = on_link
        self._on_refused = on_refused
        self._rng = rng
        self._kept: set[NodeId] = set()
        self._failures: dict[NodeId, str] = {}
        self._down: dict[NodeId, trio.Event] = {}
        mesh.on_connection(self._on_connection)

    @property
    def failures(self) -> Mapping[NodeId, str]:
        """Why there is no link to a target now; nothing of those whose first attempt is under way."""
        return self._failures

    async def serve(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep links until cancelled."""
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                for peer in sorted(self._targets()):
                    if peer not in self._kept and peer != self._mesh.node:
                        self._kept.add(peer)
                        nursery.start_soon(self._keep, peer)
                await trio.sleep(TARGETS_INTERVAL_S)

    async def _keep(self, peer: NodeId) -> None:
        """Keep one link for as long as it is wanted."""
        bounds_s = HUB_BACKOFF_S if peer in self._hubs else NODE_BACKOFF_S
        n_failures, timeout_s = 0, DIAL_TIMEOUT_S
        while addresses := self._targets().get(peer):
            if await self._link(peer, addresses, timeout_s):
                n_failures = 0
            else:
                n_failures += 1
            if peer in self._hubs:
                timeout_s = HUB_REDIAL_TIMEOUT_S
            if n_failures or peer not in self._mesh.peers():
                await trio.sleep(backoff_s(n_failures, bounds_s, self._rng))
        self._kept.discard(peer)
        self._failures.pop(peer, None)

    async def _link(self, peer: NodeId, addresses: Sequence[str], timeout_s: float) -> bool:
        """Have a link to ``peer`` until it goes down; False where none came up."""
        try:
            if self._admission.certificate_of(peer) is None:
                with deadline(timeout_s, f"dialling {short(peer)}"):
                    await self._mesh.dial(addresses)
                certificate = await self._admission.join(peer)
                self._failures.pop(peer, None)
                await self._use(peer, certificate)
            else:
                self._failures.pop(peer, None)
                await self._wait_down(peer)
        except TelaError as error:
            log.info("link.retry", peer=short(peer), code=error.code, reason=str(error))
            if peer not in self._failures or not isinstance(error, DeadlineError):  # a shorter wait tells nothing new
                self._failures[peer] = str(error)
            if isinstance(error, RefusedError | IntegrityError) and peer in self._hubs:
                self._on_refused(error)
            if self._admission.certificate_of(peer) is None:
                await self._mesh.disconnect(peer)
            return False
        return True

    async def _use(self, peer: NodeId, certificate: Certificate) -> None:
        log.info("link.up", peer=short(peer), provider=certificate.provider, zone=certificate.zone)
        links.inc()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._run, peer, certificate)
                await self._wait_down(peer)
                nursery.cancel_scope.cancel()
        finally:
            links.dec()
            log.info("link.down", peer=short(peer))

    async def _run(self, peer: NodeId, certificate: Certificate) -> None:
        """Run ``on_link``; one that fails takes the link down, for a fresh start."""
        try:
            await self._on_link(peer, certificate)
        except* TelaError as group:
            log.info("link.retry", peer=short(peer), reason=str(group.exceptions[0]))
            await self._mesh.disconnect(peer)

    async def _wait_down(self, peer: NodeId) -> None:
        if peer in self._mesh.peers():
            await self._down.setdefault(peer, trio.Event()).wait()

    def _on_connection(self, peer: NodeId, is_up: bool) -> None:
        if not is_up and peer in self._down:
            self._down.pop(peer).set()
