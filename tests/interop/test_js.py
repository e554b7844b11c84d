"""Our mesh and js-libp2p, each way round."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tela import __version__
from tela.errors import PeerError, StreamResetError
from tela.identity import KeyPair
from tela.net.identify import IDENTIFY_PROTOCOL
from tela.net.libp2p import Libp2pMesh, open_mesh
from tela.net.multiaddrs import peer_id
from tela.record import NodeId
from tests.lab.js_peer import POLL_INTERVAL_S, JsError, JsPeer, open_js_peer
from tests.lab.meshes import echo, receive_all, wait_until

pytestmark = [pytest.mark.js, pytest.mark.timeout(60)]

ECHO = "/tela/echo/1"
CONTENT = bytes(range(251)) * 16_710  # 4 MiB: more than all windows
N_STREAMS = 200
FEW_BYTES = 1_000


@asynccontextmanager
async def js_and_ours(folder: Path) -> AsyncIterator[tuple[JsPeer, Libp2pMesh]]:
    """Both listen and echo; they are not connected."""
    async with open_js_peer(folder) as js, open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as mesh:
        mesh.handle(ECHO, echo)
        yield js, mesh


async def echoed(mesh: Libp2pMesh, peer: NodeId, content: bytes) -> bytes:
    stream = await mesh.open(peer, ECHO)

    async def write() -> None:
        await stream.send(content)
        await stream.finish()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        return await receive_all(stream)


@pytest.mark.parametrize("n_bytes", [1, FEW_BYTES, len(CONTENT)])
async def test_we_dial_js_and_every_byte_comes_back(tmp_path, n_bytes):
    async with js_and_ours(tmp_path) as (js, mesh):
        peer = await mesh.dial(js.addresses)
        for _ in range(2):  # the second is opened without a round trip
            assert await echoed(mesh, peer, CONTENT[:n_bytes]) == CONTENT[:n_bytes]


@pytest.mark.parametrize("n_bytes", [1, FEW_BYTES, len(CONTENT)])
async def test_js_dials_us_and_every_byte_comes_back(tmp_path, n_bytes):
    async with js_and_ours(tmp_path) as (js, mesh):
        peer = await js.ask("dial", address=mesh.addresses[0])
        assert peer == peer_id(mesh.node)
        for _ in range(2):
            assert await js.ask("echo", peer=peer, nBytes=n_bytes) == {"isSame": True, "nBytes": n_bytes}


async def test_many_streams_at_once_to_js(tmp_path):
    async with js_and_ours(tmp_path) as (js, mesh):
        peer = await mesh.dial(js.addresses)
        await echoed(mesh, peer, b"x")  # js ends a connection that has eleven streams before its upgrade is done
        answers: list[bytes] = []

        async def ask() -> None:
            answers.append(await echoed(mesh, peer, CONTENT[:FEW_BYTES]))

        async with trio.open_nursery() as nursery:
            for _ in range(N_STREAMS):
                nursery.start_soon(ask)
        assert answers == [CONTENT[:FEW_BYTES]] * N_STREAMS


async def test_many_streams_at_once_from_js(tmp_path):
    async with js_and_ours(tmp_path) as (js, mesh):
        peer = await js.ask("dial", address=mesh.addresses[0])
        assert await js.ask("echoes", peer=peer, nStreams=N_STREAMS, nBytes=FEW_BYTES) == N_STREAMS


async def test_streams_over_one_connection_whoever_dialled_it(tmp_path):
    async with js_and_ours(tmp_path) as (js, mesh):
        await mesh.dial(js.addresses)
        assert await js.ask("ping", peer=peer_id(mesh.node)) >= 0
        assert (await js.ask("echo", peer=peer_id(mesh.node), nBytes=FEW_BYTES))["isSame"]


async def test_js_learns_by_identify_who_we_are(tmp_path):
    async with js_and_ours(tmp_path) as (js, mesh):
        seen = await js.ask("identify", peer=await js.ask("dial", address=mesh.addresses[0]))
        assert seen["agent"] == f"tela/{__version__}"
        assert [address.split("/p2p/")[0] for address in seen["listen"]] == [
            address.split("/p2p/")[0] for address in mesh.addresses
        ]
        assert set(seen["protocols"]) == {IDENTIFY_PROTOCOL, "/ipfs/ping/1.0.0", ECHO}


async def test_unknown_protocol_is_told_to_both(tmp_path):
    async with js_and_ours(tmp_path) as (js, mesh):
        peer = await mesh.dial(js.addresses)
        with pytest.raises(PeerError, match="does not speak"):
            await mesh.open(peer, "/tela/nothing/1")
        with pytest.raises(JsError, match="UnsupportedProtocolError"):
            await js.ask("echo", peer=peer_id(mesh.node), protocol="/tela/nothing/1", nBytes=1)


async def test_reset_by_js_is_no_clean_end(tmp_path):
    async with js_and_ours(tmp_path) as (js, mesh):
        stream = await mesh.open(await mesh.dial(js.addresses), "/tela/reset/1")
        await stream.send(b"x")
        with pytest.raises(StreamResetError):
            await stream.receive()


async def test_reset_by_us_is_no_clean_end_for_js(tmp_path):
    async with js_and_ours(tmp_path) as (js, mesh):

        async def reset(stream) -> None:
            await stream.receive()
            stream.reset()

        mesh.handle("/tela/reset/1", reset)
        peer = await js.ask("dial", address=mesh.addresses[0])
        with pytest.raises(JsError, match="the peer reset the stream"):
            await js.ask("echo", peer=peer, protocol="/tela/reset/1", nBytes=1)


@pytest.mark.parametrize("who_leaves", ["js", "we"])
async def test_disconnect_is_seen_by_the_other(tmp_path, who_leaves):
    async with js_and_ours(tmp_path) as (js, mesh):
        peer = await mesh.dial(js.addresses)
        if who_leaves == "js":
            await js.ask("disconnect", peer=peer_id(mesh.node))
            await wait_until(lambda: not mesh.peers())
        else:
            await mesh.disconnect(peer)
            while await js.ask("peers"):
                await trio.sleep(POLL_INTERVAL_S)
