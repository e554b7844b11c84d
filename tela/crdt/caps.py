"""How much one member may say: token buckets by who signed it, so that a hostile owner costs a bounded amount of work.

What is over is dropped before its signature is looked at; anti-entropy brings the newest once there is room again. Only
what proved genuine counts, so nobody can use up somebody else's room.
"""

from __future__ import annotations

from typing import Final

from tela.record import NodeId

RECORDS: Final = (20.0, 4.0)
"""Of one owner: at once, and a second. Twice what an author allows itself, with a catalog beside each record."""
VOTES: Final = (256.0, 10.0)
"""Of one observer: a rack that loses power is that many votes at once."""
_SWEEP_ABOVE: Final = 1_024


class Buckets:
    """A bucket for each node. One that is full again is forgotten."""

    def __init__(self, burst: float, refill_per_s: float) -> None:
        self._burst = burst
        self._refill_per_s = refill_per_s
        self._levels: dict[NodeId, tuple[float, float]] = {}  # (tokens, when)

    def __len__(self) -> int:
        return len(self._levels)

    def has_room(self, node: NodeId, now: float) -> bool:
        """Whether it may say one thing more."""
        return self._level(node, now) >= 1.0

    def count(self, node: NodeId, now: float, n: float = 1.0) -> None:
        """It said ``n`` things."""
        if len(self._levels) > _SWEEP_ABOVE and node not in self._levels:
            self._levels = {each: at for each, at in self._levels.items() if self._level(each, now) < self._burst}
        self._levels[node] = (self._level(node, now) - n, now)

    def _level(self, node: NodeId, now: float) -> float:
        tokens, at = self._levels.get(node, (self._burst, now))
        return min(self._burst, tokens + (now - at) * self._refill_per_s)


class Caps:
    """What members may say, as of the moment that was last set: the map itself keeps no clock."""

    def __init__(self) -> None:
        self.now = 0.0  # on a monotonic clock
        self._records = Buckets(*RECORDS)
        self._votes = Buckets(*VOTES)

    def has_room(self, node: NodeId, *, is_vote: bool = False) -> bool:
        """Whether a record of this owner, or a vote of this observer, is worth looking at."""
        return self._of(is_vote).has_room(node, self.now)

    def count(self, node: NodeId, *, is_vote: bool = False) -> None:
        """It proved genuine."""
        self._of(is_vote).count(node, self.now)

    def _of(self, is_vote: bool) -> Buckets:
        return self._votes if is_vote else self._records
