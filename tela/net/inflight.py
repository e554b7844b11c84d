"""How many requests are in flight: counted by a scope that is left exactly once on any exit (faults.md J02)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio
from prometheus_client import Gauge


class InFlight:
    """A count with a gauge, and a way to wait until it is zero."""

    def __init__(self, gauge: Gauge) -> None:
        self.n = 0
        self._gauge = gauge
        self._idle = trio.lowlevel.ParkingLot()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Count one request for as long as the block runs."""
        self.n += 1
        self._gauge.inc()
        try:
            yield
        finally:
            self.n -= 1
            self._gauge.dec()
            if not self.n:
                self._idle.unpark_all()

    async def wait_idle(self) -> None:
        """Return once nothing is in flight."""
        while self.n:
            await self._idle.park()
