"""What a peer did wrong lately, and whether it is heard at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from tela.crdt.caps import Buckets
from tela.crdt.gmap import Outcome
from tela.record import NodeId

MAX_STRIKES: Final = 3
"""Bad facts from a peer before its link is closed: an honest peer verifies before it forwards."""
MUTE_S: Final = 600.0
"""How long such a peer is refused, and how long strikes count."""
USELESS_FACTS: Final = (20_000.0, 2_000.0)
"""From one peer, at once and a second, that were known before or are no good. An honest peer sends of each update one
or two that we had from others; 2,000 a second cost a hundredth of a core."""

_STRIKING: Final = frozenset({Outcome.BAD_SIGNATURE, Outcome.MALFORMED})


class Conduct:
    """Keeps count. Every map here is emptied each MUTE_S."""

    def __init__(self, now: float) -> None:
        self._strikes: Counter[NodeId] = Counter()
        self._since = now
        self._muted: set[NodeId] = set()
        self._useless = Buckets(*USELESS_FACTS)

    def is_muted(self, peer: NodeId) -> bool:
        """Whether its links are refused."""
        return peer in self._muted

    def note(self, peer: NodeId, outcomes: Sequence[Outcome], now: float) -> str:
        """What became of facts that it sent; why it is muted from now on, "" where it is not."""
        self._strikes[peer] += sum(outcome in _STRIKING for outcome in outcomes)
        self._useless.count(peer, now, sum(outcome is not Outcome.NEW for outcome in outcomes))
        reason = ""
        if self._strikes[peer] >= MAX_STRIKES:
            reason = "bad facts"
        elif not self._useless.has_room(peer, now):
            reason = "flood"
        if reason:
            self._muted.add(peer)
        return reason

    def sweep(self, now: float) -> None:
        """Forgive what is long ago."""
        if now - self._since >= MUTE_S:
            self._since = now
            self._strikes.clear()
            self._muted.clear()
