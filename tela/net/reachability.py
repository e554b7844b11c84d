"""The trio shell of :mod:`tela.net.reach`: tells it who is linked, asks whom it names, and says what changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import trio

from tela.errors import DeadlineError, PeerError, RefusedError
from tela.net.dialback import ask
from tela.net.reach import Answered, Ask, Event, Linked, Reach, Unanswered
from tela.net.transport import Mesh
from tela.observe import log
from tela.record import NodeId, short

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings trio-stubs, which hide trio's own types from mypy

LOOK_INTERVAL_S: Final = 1.0


class Reachability:
    """Keeps a :class:`Reach` up to date.

    Args:
        mesh: to ask over.
        reach: the core.
        members: peers that are linked and members.
        on_change: what is announced has changed.
    """

    def __init__(
        self, mesh: Mesh, reach: Reach, *, members: Callable[[], frozenset[NodeId]], on_change: Callable[[], None]
    ) -> None:
        self._mesh = mesh
        self._reach = reach
        self._members = members
        self._on_change = on_change
        self._nursery: trio.Nursery | None = None

    async def serve(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look each second who is linked, until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            while True:
                self.look()
                await trio.sleep(LOOK_INTERVAL_S)

    def look(self) -> None:
        """See at once who is linked: a new link need not wait for its question."""
        self._handle(Linked(self._members()))

    def _handle(self, event: Event) -> None:
        before = self._reach.announced
        asks = self._reach.handle(event, trio.current_time())
        if self._nursery is not None:
            for each in asks:
                self._nursery.start_soon(self._ask, each)
        if self._reach.announced != before:
            log.info("reach.change", announced=[str(address) for address in self._reach.announced])
            self._on_change()

    async def _ask(self, question: Ask) -> None:
        try:
            results, observed = await ask(self._mesh, question.peer, question.addresses)
        except (PeerError, DeadlineError, RefusedError) as error:
            log.debug("reach.retry", peer=short(question.peer), reason=str(error))
            self._handle(Unanswered(question.peer))
        else:
            self._handle(Answered(question.peer, results, observed.host))
