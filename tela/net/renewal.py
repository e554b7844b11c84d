"""Renews our certificate in the background, from the middle of its life on.

Nobody is told in advance when: the wall clock is looked at every CHECK_INTERVAL_S, since it may be stepped and the host
may sleep. A hub with the provider's issuing key renews its own certificate; others ask the hubs that they are linked
with, those of their own provider first. Then every link is shown the new certificate, so that none ends with the old.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import trio

from tela.errors import TelaError
from tela.identity import CLOCK_SKEW_S, Certificate
from tela.net.admission import Admission, half_life_unix_s
from tela.net.transport import Mesh
from tela.observe import log
from tela.record import NodeId, Role, short

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings trio-stubs, which hide trio's own types from mypy

CHECK_INTERVAL_S: Final = 60.0
"""Certificates live for days; a minute costs nothing and bounds how often a hub that cannot renew is asked."""
JITTER: Final = 0.1
"""Of its life a certificate may wait beyond the middle: nodes that joined together do not renew together."""
URGENT_S: Final = 86_400
"""With less than a day left an operator should look."""


class Renewal:
    """Keeps our certificate from expiring."""

    def __init__(self, mesh: Mesh, admission: Admission, *, now: Callable[[], float], rng: random.Random) -> None:
        """Args: the mesh and its admission, unix seconds, and jitter."""
        self._mesh = mesh
        self._admission = admission
        self._now = now
        self._rng = rng
        self._lateness = rng.random() * JITTER

    async def serve(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Renew until cancelled."""
        task_status.started()
        while True:
            await trio.sleep(CHECK_INTERVAL_S * self._rng.uniform(0.5, 1.0))
            certificate = self._admission.membership.certificate
            if certificate is not None and self._now() >= due_unix_s(certificate, self._lateness):
                await self._renew(certificate)

    async def _renew(self, certificate: Certificate) -> None:
        if self._admission.renew_by_ourselves() or await self._ask_hubs(certificate):
            self._lateness = self._rng.random() * JITTER
            log.info("certificate.renew", expires_unix_s=self._expires_unix_s())
            await self._show()
        else:
            left_s = certificate.expires_unix_s - self._now()
            tell = log.warning if left_s < URGENT_S else log.info
            tell("certificate.retry", left_s=round(left_s), reason="no linked hub holds the provider's issuing key")

    def _expires_unix_s(self) -> int:
        ours = self._admission.membership.certificate
        return ours.expires_unix_s if ours else 0

    async def _ask_hubs(self, certificate: Certificate) -> bool:
        for hub in hubs_to_ask(certificate.provider, self._members()):
            try:
                if await self._admission.renew(hub):
                    return True
            except TelaError as error:
                log.info("certificate.retry", peer=short(hub), code=error.code, reason=str(error))
        return False

    async def _show(self) -> None:
        """Present the new certificate on every link."""
        for peer in sorted(self._members()):
            try:
                await self._admission.join(peer)
            except TelaError as error:  # lost: the link, which its keeper makes again with the new certificate
                log.info("certificate.retry", peer=short(peer), code=error.code, reason=str(error))

    def _members(self) -> dict[NodeId, Certificate]:
        certificates = {peer: self._admission.certificate_of(peer) for peer in self._mesh.peers()}
        return {peer: certificate for peer, certificate in certificates.items() if certificate is not None}


def due_unix_s(certificate: Certificate, lateness: float) -> float:
    """When to renew: the middle of its life, and ``lateness`` of that life later."""
    life_s = certificate.expires_unix_s - certificate.not_before_unix_s - CLOCK_SKEW_S
    return half_life_unix_s(certificate) + lateness * life_s


def hubs_to_ask(provider: str, members: dict[NodeId, Certificate]) -> list[NodeId]:
    """Linked hubs, those of our provider first: they are the likeliest to hold its issuing key."""
    hubs = [peer for peer, certificate in members.items() if Role.HUB in certificate.roles]
    return sorted(hubs, key=lambda peer: (members[peer].provider != provider, peer))
