"""Circuits with js-libp2p in each role: caller, called, relay."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio

from tela.identity import KeyPair
from tela.net.circuit import HOP_PROTOCOL, STOP_PROTOCOL
from tela.net.libp2p import Libp2pMesh, open_mesh
from tela.net.multiaddrs import peer_id
from tela.net.relay import Relay
from tela.net.transport import PathKind
from tests.interop.test_js import CONTENT, ECHO, echoed
from tests.lab.js_peer import JsPeer, open_js_peer
from tests.lab.meshes import echo, open_relayed

pytestmark = [pytest.mark.js, pytest.mark.timeout(60)]
N_BYTES = 1_000_000


@asynccontextmanager
async def open_two(folder: Path) -> AsyncIterator[tuple[JsPeer, JsPeer]]:
    async with open_js_peer(folder) as one, open_js_peer(folder) as other:
        yield one, other


async def test_js_calls_us_through_our_relay(tmp_path):
    async with open_relayed() as net, open_js_peer(tmp_path) as js:
        net.called.handle(ECHO, echo)
        peer = await js.ask("dial", address=net.called.addresses[0])
        assert peer == peer_id(net.called.node)
        assert await js.ask("echo", peer=peer, nBytes=N_BYTES) == {"isSame": True, "nBytes": N_BYTES}
        assert net.hops.n_circuits == 1


@asynccontextmanager
async def open_relay() -> AsyncIterator[tuple[Libp2pMesh, Relay]]:
    async with open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as mesh:
        relay = Relay(mesh, now=lambda: datetime.now(UTC).timestamp())
        mesh.handle(HOP_PROTOCOL, relay.serve_hop)
        yield mesh, relay


async def test_we_call_js_through_our_relay(tmp_path):
    async with (
        open_relay() as (hub, relay),
        open_mesh(KeyPair.generate(), []) as caller,
        open_js_peer(tmp_path) as js,
    ):
        await js.ask("listen", address=f"{hub.addresses[0]}/p2p-circuit")
        assert relay.n_reservations == 1
        peer = await caller.dial([f"{hub.addresses[0]}/p2p-circuit/p2p/{js.peer}"])
        assert caller.paths()[peer].kind is PathKind.RELAYED
        assert await echoed(caller, peer, CONTENT[:N_BYTES]) == CONTENT[:N_BYTES]


async def test_we_relay_between_two_of_js(tmp_path):
    async with open_relay() as (hub, relay), open_two(tmp_path) as (called, caller):
        await called.ask("listen", address=f"{hub.addresses[0]}/p2p-circuit")
        peer = await caller.ask("dial", address=f"{hub.addresses[0]}/p2p-circuit/p2p/{called.peer}")
        assert peer == called.peer
        assert await caller.ask("echo", peer=peer, nBytes=N_BYTES) == {"isSame": True, "nBytes": N_BYTES}
        assert relay.n_circuits == 1


async def test_we_call_js_through_js(tmp_path):
    async with open_two(tmp_path) as (hub, called), open_mesh(KeyPair.generate(), []) as caller:
        await called.ask("listen", address=f"{hub.addresses[0]}/p2p-circuit")
        peer = await caller.dial([f"{hub.addresses[0]}/p2p-circuit/p2p/{called.peer}"])
        assert caller.paths()[peer].kind is PathKind.RELAYED
        assert await echoed(caller, peer, CONTENT[:N_BYTES]) == CONTENT[:N_BYTES]


async def test_js_relays_between_us(tmp_path):
    async with AsyncExitStack() as stack:
        js = await stack.enter_async_context(open_js_peer(tmp_path))
        called = await stack.enter_async_context(open_mesh(KeyPair.generate(), []))
        caller = await stack.enter_async_context(open_mesh(KeyPair.generate(), []))
        nursery = await stack.enter_async_context(trio.open_nursery())
        called.handle(STOP_PROTOCOL, called.circuits.serve_stop)
        called.handle(ECHO, echo)
        await nursery.start(called.circuits.hold, await called.dial(js.addresses), lambda: 0)
        peer = await caller.dial([f"{js.addresses[0]}/p2p-circuit/p2p/{peer_id(called.node)}"])
        assert caller.paths()[peer].kind is PathKind.RELAYED
        assert await echoed(caller, peer, CONTENT[:N_BYTES]) == CONTENT[:N_BYTES]
        nursery.cancel_scope.cancel()
