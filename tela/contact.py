"""Whether this node has a link to any member, and what to do and say while it has none (faults.md G03, G04).

Hubs are dialled for ever by :class:`tela.net.links.LinkKeeper`. A node that none of them answers turns to the members
that it knew, and says that it is unreachable and why: in ``tela status``, in /ready, and in the log once a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import trio

from tela.net.known_peers import KnownPeers
from tela.observe import log
from tela.record import NodeId, short

if TYPE_CHECKING:
    from trio_typing import TaskStatus  # libp2p brings trio-stubs, which hide trio's own types from mypy

LOOK_INTERVAL_S: Final = 1.0
KNOWN_PEERS_AFTER_S: Final = 5.0
"""Without a link for this long, known peers are dialled as well: a hub that restarts is back sooner."""
UNREACHABLE_AFTER_S: Final = 8.0
"""Said within 10 s (overlay.md 5); a lost link is re-dialled several times before."""
REPEAT_S: Final = 60.0
MAX_REASONS: Final = 3
"""Of a warning; a swarm has few hubs, and one reason is mostly that of all."""


class Contact:
    """Watches the links of a node.

    Args:
        is_linked: whether there is a link to a member now.
        failures: why there is none, by whom we dial.
        known: members that accepted links before.
        has_hubs: whether the invite names a hub other than ourselves; the first hub of a swarm is not alone.
    """

    def __init__(
        self,
        *,
        is_linked: Callable[[], bool],
        failures: Callable[[], Mapping[NodeId, str]],
        known: KnownPeers,
        has_hubs: bool,
    ) -> None:
        self._is_linked = is_linked
        self._failures = failures
        self._known = known
        self._has_hubs = has_hubs
        self._linked_s = trio.current_time()

    async def serve(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look each second, and log once a minute while alone, until cancelled."""
        task_status.started()
        silent_until_s = 0.0
        while True:
            if self._alone_s() == 0.0:
                silent_until_s = 0.0
            elif self.is_unreachable and trio.current_time() >= silent_until_s:
                log.warning("node.isolated", alone_s=round(self._alone_s()), reason=self._reason())
                silent_until_s = trio.current_time() + REPEAT_S
            await trio.sleep(LOOK_INTERVAL_S)

    @property
    def is_unreachable(self) -> bool:
        """Whether nobody has been linked with us for UNREACHABLE_AFTER_S."""
        return self._has_hubs and self._alone_s() >= UNREACHABLE_AFTER_S

    def warnings(self) -> tuple[str, ...]:
        """What ``tela status`` shows: nothing while there is a link."""
        if not self.is_unreachable:
            return ()
        return (f"unreachable: no link to any member for {self._alone_s():.0f} s; {self._reason()}",)

    def targets(self) -> Mapping[NodeId, Sequence[str]]:
        """Known peers, while there is no link; their links keep them wanted until a hub is back as well."""
        return self._known.addresses() if self._alone_s() >= KNOWN_PEERS_AFTER_S else {}

    def _alone_s(self) -> float:
        if self._is_linked():
            self._linked_s = trio.current_time()
        return trio.current_time() - self._linked_s

    def _reason(self) -> str:
        failures = [f"{short(peer)}: {reason}" for peer, reason in sorted(self._failures().items())]
        return "; ".join(failures[:MAX_REASONS]) or "no hub of the invite answers"
