"""Unix time as the swarm has it: our own clock, unless the hubs say that it is off.

Leases and certificates need a common time, within minutes. A host whose clock is off by a year, or is stepped while a
daemon runs, goes on by what hubs told on admission and the time that has passed since on a clock that nobody steps
(registry.md 2.3). Who tells is a hub with a certificate; what it tells is bounded by our invite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from tela.record import NodeId

TOLERANCE_S: Final = 60.0
"""By which our own clock may differ from the hubs' and is still believed: a fifth of what leases allow."""
MAX_HUBS: Final = 8


class _Sample(NamedTuple):
    unix_s: float
    at_s: float  # on the monotonic clock

    def unix_at(self, monotonic_s: float) -> float:
        return self.unix_s + (monotonic_s - self.at_s)


class SwarmClock:
    """Tells the time to the parts of one daemon.

    Args:
        own: unix seconds by the clock of this host.
        monotonic: seconds on a clock that is never stepped.
        earliest_unix_s: the swarm is older than that: the time of our invite. A hub that tells less is not believed.
    """

    def __init__(
        self, own: Callable[[], float], *, monotonic: Callable[[], float], earliest_unix_s: float = 0.0
    ) -> None:
        self._own = own
        self._monotonic = monotonic
        self._earliest_unix_s = earliest_unix_s
        self._samples: dict[NodeId, _Sample] = {}

    def now(self) -> float:
        """Unix seconds."""
        own_s = self._own()
        return own_s - self._skew_s(own_s)

    @property
    def skew_s(self) -> float:
        """By how much the clock of this host is ahead; 0 where it is believed."""
        return self._skew_s(self._own())

    @property
    def warnings(self) -> tuple[str, ...]:
        """For people."""
        skew_s = self.skew_s
        side = "ahead" if skew_s > 0 else "behind"
        return (
            (f"the clock of this host is {abs(skew_s):.0f} s {side}: the time of the hubs is used",) if skew_s else ()
        )

    def is_plausible(self, unix_s: float) -> bool:
        """Whether a hub may say so: it bounds what a stolen certificate that has expired is good for."""
        return unix_s >= self._earliest_unix_s

    def learn(self, hub: NodeId, unix_s: float) -> None:
        """A hub, whose certificate was checked, told its time just now."""
        if not self.is_plausible(unix_s):
            return
        self._samples.pop(hub, None)
        self._samples[hub] = _Sample(unix_s, self._monotonic())
        while len(self._samples) > MAX_HUBS:
            del self._samples[next(iter(self._samples))]

    def _skew_s(self, own_s: float) -> float:
        """Against the median of what the hubs told; of two in the middle, the one that our own clock is nearer to."""
        if not self._samples:
            return 0.0
        monotonic_s = self._monotonic()
        skews_s = sorted(own_s - sample.unix_at(monotonic_s) for sample in self._samples.values())
        middle = skews_s[(len(skews_s) - 1) // 2 : len(skews_s) // 2 + 1]
        skew_s = min(middle, key=abs)
        return skew_s if abs(skew_s) > TOLERANCE_S else 0.0
