"""Requests in flight are counted exactly once, whatever ends them."""

from __future__ import annotations

import pytest
import trio
from prometheus_client import CollectorRegistry, Gauge

from tela.net.inflight import InFlight


def in_flight() -> tuple[InFlight, Gauge]:
    gauge = Gauge("n", "n", registry=CollectorRegistry())
    return InFlight(gauge), gauge


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_scope_is_left_once_on_any_exit(error: type[BaseException] | None) -> None:
    counted, gauge = in_flight()
    try:
        with counted.scope(), counted.scope():
            assert (counted.n, gauge._value.get()) == (2, 2)
            if error:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert (counted.n, gauge._value.get()) == (0, 0)


async def test_wait_idle_returns_when_the_last_one_ends(autojump_clock: trio.testing.MockClock) -> None:
    counted, _ = in_flight()

    async def request(duration_s: float) -> None:
        with counted.scope():
            await trio.sleep(duration_s)

    await counted.wait_idle()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(request, 1.0)
        nursery.start_soon(request, 3.0)
        await trio.sleep(0.5)
        await counted.wait_idle()
        assert trio.current_time() >= 3.0
