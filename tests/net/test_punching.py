"""Relayed peers that meet directly: over real sockets of this host, where each is seen as it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import trio

from tela.errors import PeerError
from tela.net import punching
from tela.net.bounds import MAX_ASKS
from tela.net.dialback import DialBack
from tela.net.endpoints import NOWHERE, Endpoint
from tela.net.libp2p import Libp2pMesh
from tela.net.punch import PUNCH_PROTOCOL, Kind, Message, encode_message
from tela.net.punching import Punching
from tela.net.requests import IncomingCall, RequestClient, request_handler
from tela.net.transport import PathKind
from tela.record import NodeId
from tela.wire import HTTP_PROTOCOL, REACH_PROTOCOL, Claim, RequestHead, ResponseHead
from tests.lab.meshes import Relayed, echo, open_relayed, wait_until

HEAD = RequestHead(Claim(NodeId(bytes(32)), 1, "", "", 0, 1), 0, "request", 60.0, "POST", "/", ())


@dataclass
class Met:
    """A relayed pair; ``lead`` and ``follow`` are their sides of the punching."""

    relayed: Relayed
    lead: Punching
    follow: Punching

    @property
    def kinds(self) -> tuple[PathKind, PathKind]:
        called, caller = self.relayed.called, self.relayed.caller
        return called.paths()[caller.node].kind, caller.paths()[called.node].kind


def _punching(mesh: Libp2pMesh) -> Punching:
    made = Punching(mesh, is_member=lambda _peer: True, is_kin=lambda _peer: True)
    mesh.handle(PUNCH_PROTOCOL, made.serve_stream)
    return made


@asynccontextmanager
async def relayed_pair() -> AsyncIterator[Met]:
    async with open_relayed() as relayed:
        relayed.relay.handle(REACH_PROTOCOL, DialBack(relayed.relay).serve)
        met = Met(relayed, _punching(relayed.called), _punching(relayed.caller))
        await relayed.caller.dial(relayed.relay.addresses)
        await relayed.caller.dial(relayed.called.addresses)
        await wait_until(lambda: relayed.caller.node in relayed.called.peers())
        assert met.kinds == (PathKind.RELAYED, PathKind.RELAYED)
        yield met


@asynccontextmanager
async def punched_pair() -> AsyncIterator[Met]:
    async with relayed_pair() as met, trio.open_nursery() as nursery:
        await nursery.start(met.lead.serve)
        await nursery.start(met.follow.serve)
        await wait_until(lambda: set(met.kinds) == {PathKind.PUNCHED})
        yield met
        nursery.cancel_scope.cancel()


async def test_relayed_peers_meet_and_need_no_hub_any_more() -> None:
    async with punched_pair() as met:
        called, caller = met.relayed.called, met.relayed.caller
        called.handle("/echo/1", echo)
        await called.disconnect(met.relayed.relay.node)
        await caller.disconnect(met.relayed.relay.node)
        stream = await caller.open(called.node, "/echo/1")
        await stream.send(b"x" * 100_000)
        await stream.finish()
        received = 0
        while data := await stream.receive():
            received += len(data)
        assert received == 100_000
        assert (met.lead.reasons, met.follow.reasons) == ({}, {})


async def test_request_in_flight_ends_where_it_began_and_the_next_goes_straight() -> None:
    """The circuit goes when nothing is left on it."""
    release = trio.Event()

    async def slow(call: IncomingCall) -> None:
        await call.respond(ResponseHead(200, b"", ()))
        await release.wait()
        await call.end(b"done")

    async def ask(client: RequestClient) -> tuple[bytes, bool]:
        async with client.call(met.relayed.called.node, HEAD) as call:
            await call.end(b"")
            await call.response()
            began.set()
            return await call.receive(), call._framed.stream.is_superseded

    async with relayed_pair() as met, trio.open_nursery() as nursery:
        met.relayed.called.handle(HTTP_PROTOCOL, request_handler(slow))
        client = RequestClient(met.relayed.caller)
        await nursery.start(client.serve)
        outcomes: list[tuple[bytes, bool]] = []
        for _ in range(2):
            began = trio.Event()
            nursery.start_soon(lambda: _collect(outcomes, ask, client))
            await began.wait()
        await nursery.start(met.lead.serve)
        await wait_until(lambda: set(met.kinds) == {PathKind.PUNCHED})
        release.set()
        await wait_until(lambda: len(outcomes) == 2)
        assert outcomes == [(b"done", True)] * 2
        assert await ask(client) == (b"done", False)
        await wait_until(lambda: met.relayed.hops.n_circuits == 0, limit_s=12)
        assert await ask(client) == (b"done", False)
        nursery.cancel_scope.cancel()


async def _collect(outcomes: list[tuple[bytes, bool]], ask, client: RequestClient) -> None:
    outcomes.append(await ask(client))


async def test_both_sides_say_why_they_did_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody_answers(_local: Endpoint, _target: Endpoint) -> trio.SocketStream:
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(punching, "connect_from", nobody_answers)
    monkeypatch.setattr(punching, "DIAL_TIMEOUT_S", 0.05)
    async with relayed_pair() as met, trio.open_nursery() as nursery:
        await nursery.start(met.lead.serve)
        await wait_until(lambda: met.lead.reasons and met.follow.reasons)
        assert "maps each connection anew" in met.lead.reasons[met.relayed.caller.node]
        assert "maps each connection anew" in met.follow.reasons[met.relayed.called.node]
        assert set(met.kinds) == {PathKind.RELAYED}
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("side", ["called", "caller"])
async def test_side_behind_a_proxy_is_told_of(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with relayed_pair() as met, trio.open_nursery() as nursery:
        monkeypatch.setattr(getattr(met.relayed, side), "vantage", lambda _peer: NOWHERE)
        await nursery.start(met.lead.serve)
        await wait_until(lambda: met.lead.reasons)
        words = {"called": "goes through a proxy", "caller": "it knows no address of its own"}
        assert words[side] in met.lead.reasons[met.relayed.caller.node]
        nursery.cancel_scope.cancel()


async def test_connection_to_somebody_else_is_not_taken() -> None:
    async with relayed_pair() as met:
        tcp = await trio.open_tcp_stream("127.0.0.1", int(met.relayed.relay.addresses[0].split("/")[4]))
        with pytest.raises(PeerError):
            await met.relayed.called.take_punched(tcp, met.relayed.caller.node, is_client=True)
        assert set(met.kinds) == {PathKind.RELAYED}


async def test_peer_cannot_have_us_dial_without_end() -> None:
    async with relayed_pair() as met:
        answered = 0
        for _ in range(MAX_ASKS + 2):
            stream = await met.relayed.called.open(met.relayed.caller.node, PUNCH_PROTOCOL)
            try:
                await stream.send(encode_message(Message(Kind.CONNECT, (Endpoint("127.0.0.1", 9),))))
                answered += bool(await stream.receive())
            except PeerError:
                pass
            stream.reset()
        assert answered == MAX_ASKS
