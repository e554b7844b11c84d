from __future__ import annotations

import random
from collections.abc import Callable

import trio

from tela.crdt.lattice import Status
from tela.crdt.registry import Snapshot
from tela.errors import StreamResetError
from tela.gossip.driver import WRITE_TIMEOUT_S, Gossip
from tela.gossip.frames import Hello, encode_frame
from tela.identity import Issuer, KeyPair, issue_issuer
from tela.net.memory import MemoryMesh, MemoryNetwork
from tela.record import Card, NodeId, SessionState, SwarmId, short
from tela.revocation import NOTHING_REVOKED, Revocations, RevokedKind, revoke
from tela.wire import GOSSIP_PROTOCOL, encode
from tests.lab.statements import NOW

SWARM = SwarmId(bytes(16))
CA = KeyPair(bytes(32))
ISSUER_KEY = KeyPair(bytes([1]) * 32)
ISSUER = Issuer(ISSUER_KEY, issue_issuer(CA, swarm=SWARM, issuer=ISSUER_KEY.public, provider="eth", now=NOW, days=365))
TOKEN = ISSUER.token(zone="euler", region="ch", roles=("worker",), now=NOW, expires_s=3600, uses=99)


def unix_now() -> float:
    return NOW + trio.current_time()


class Peer:
    """A Gossip on a memory mesh, with real keys."""

    def __init__(self, network: MemoryNetwork, number: int) -> None:
        self.key = KeyPair(bytes([number]) * 32)
        self.node = self.key.public
        self.mesh: MemoryMesh = network.mesh(self.node)
        self.snapshots: list[Snapshot] = []
        self.revocations: list[Revocations] = []
        self.gossip = Gossip(
            self.mesh,
            self.key,
            SWARM,
            CA.public,
            now=unix_now,
            rng=random.Random(number),
            on_change=self.snapshots.append,
            on_revocations=self.revocations.append,
        )
        self.mesh.handle(GOSSIP_PROTOCOL, self.gossip.handler)
        self.card = Card(certificate=encode(ISSUER.admit(TOKEN, self.node, NOW)), name=f"peer {number}")

    async def link(self, nursery: trio.Nursery, other: Peer) -> None:
        await self.mesh.dial(other.mesh.addresses)
        nursery.start_soon(self.gossip.link, other.node)

    def status_of(self, other: Peer) -> Status | None:
        member = self.gossip.snapshot.members.get(other.node)
        return member.status if member else None


async def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    with trio.fail_after(limit_s):
        while not condition():
            await trio.sleep(0.05)


async def start(nursery: trio.Nursery, network: MemoryNetwork, n_peers: int) -> list[Peer]:
    """Peers that are all linked and published."""
    peers = [Peer(network, number) for number in range(10, 10 + n_peers)]
    for index, peer in enumerate(peers):
        await nursery.start(peer.gossip.serve)
        for other in peers[:index]:
            await peer.link(nursery, other)
        if index:
            assert await peer.gossip.wait_synced(5.0)
        peer.gossip.publish(SessionState.SERVING, peer.card)
    await until(lambda: all(peer.status_of(other) is Status.SERVING for peer in peers for other in peers))
    return peers


async def test_peers_see_each_other_and_an_update(autojump_clock):
    async with trio.open_nursery() as nursery:
        one, other, third = await start(nursery, MemoryNetwork(nursery), 3)
        assert one.gossip.snapshot.members[other.node].provider == "eth"
        assert one.gossip.session > 0
        other.gossip.publish(SessionState.DRAIN, other.card)
        await until(lambda: third.status_of(other) is Status.DRAIN)
        assert third.snapshots[-1] is third.gossip.snapshot
        nursery.cancel_scope.cancel()


async def test_session_begins_by_the_clock_as_it_is_when_we_publish(autojump_clock):
    """Admission may have put it right a moment ago, and the next tick is not due yet."""
    async with trio.open_nursery() as nursery:
        peer = Peer(MemoryNetwork(nursery), 10)
        error_s = [-86_400.0]
        peer.gossip._unix_now = lambda: unix_now() + error_s[0]
        await nursery.start(peer.gossip.serve)
        await trio.sleep(1.0)
        error_s[0] = 0.0
        peer.gossip.publish(SessionState.SERVING, peer.card)
        await until(lambda: peer.gossip.session > 0)
        assert peer.gossip.session >= NOW * 1000
        nursery.cancel_scope.cancel()


async def test_wait_synced_without_a_peer_gives_up(autojump_clock):
    async with trio.open_nursery() as nursery:
        peer = Peer(MemoryNetwork(nursery), 10)
        await nursery.start(peer.gossip.serve)
        assert not await peer.gossip.wait_synced(2.0)
        assert await peer.gossip.leave(2.0) == 0
        nursery.cancel_scope.cancel()


async def test_leave_is_acknowledged_and_shown(autojump_clock):
    async with trio.open_nursery() as nursery:
        one, other, third = await start(nursery, MemoryNetwork(nursery), 3)
        assert await one.gossip.leave(2.0) == 2
        assert (other.status_of(one), third.status_of(one)) == (Status.LEFT, Status.LEFT)
        last = other.gossip.changes[-1]
        assert (last.name, last.was, last.status, last.reason) == (one.card.name, "serving", "left", "it says so")
        assert last.heard_from in {short(one.node), short(third.node)}
        assert one.gossip.changes[-1].heard_from == ""
        nursery.cancel_scope.cancel()


async def test_dead_node_is_suspected_then_down(autojump_clock):
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        *peers, dead = await start(nursery, network, 4)
        network.remove(dead.node)
        began = trio.current_time()
        await until(lambda: all(peer.status_of(dead) is Status.SUSPECT for peer in peers))
        assert trio.current_time() - began < 2.0
        await until(lambda: all(peer.status_of(dead) is Status.DOWN for peer in peers))
        nursery.cancel_scope.cancel()


async def test_dead_node_with_one_observer_is_down_after_a_while(autojump_clock):
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        one, dead = await start(nursery, network, 2)
        network.remove(dead.node)
        began = trio.current_time()
        await until(lambda: one.status_of(dead) is Status.DOWN, limit_s=600)
        assert 290 < trio.current_time() - began < 310
        assert one.gossip.changes[-1].reason == f"voted down by {short(one.node)}"
        nursery.cancel_scope.cancel()


async def test_cut_and_healed_peers_agree_again(autojump_clock):
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        one, other = await start(nursery, network, 2)
        network.cut(one.node, other.node)
        one.gossip.publish(SessionState.DRAIN, one.card)
        await until(lambda: one.status_of(other) is Status.SUSPECT)
        network.heal(one.node, other.node)
        await one.link(nursery, other)
        await until(lambda: other.status_of(one) is Status.DRAIN and one.status_of(other) is Status.SERVING)
        nursery.cancel_scope.cancel()


async def test_broken_stream_on_a_live_connection_is_opened_anew(autojump_clock):
    async with trio.open_nursery() as nursery:
        one, other = await start(nursery, MemoryNetwork(nursery), 2)
        for stream in list(one.mesh._streams[other.node]):
            stream.reset()
        one.gossip.publish(SessionState.DRAIN, one.card)
        await until(lambda: other.status_of(one) is Status.DRAIN)
        nursery.cancel_scope.cancel()


async def test_data_plane_suspicion_of_a_dead_peer_votes(autojump_clock):
    async with trio.open_nursery() as nursery:
        one, other = await start(nursery, MemoryNetwork(nursery), 2)
        one.gossip.suspect(other.node)
        await trio.sleep(5.0)
        assert one.status_of(other) is Status.SERVING  # it answered the probe
        nursery.cancel_scope.cancel()


class StuckStream:
    """A peer that says hello and then neither reads nor writes."""

    def __init__(self, peer: NodeId) -> None:
        self.peer = peer
        self.is_reset = False
        self._greeting = [encode_frame(Hello(1, 1, 1))]

    async def send(self, data: bytes) -> None:
        await trio.sleep_forever()

    async def receive(self) -> bytes:
        if self._greeting:
            await trio.lowlevel.checkpoint()
            return self._greeting.pop()
        await trio.sleep_forever()
        raise StreamResetError("unreachable")

    async def finish(self) -> None:
        await trio.lowlevel.checkpoint()

    def reset(self) -> None:
        self.is_reset = True


async def test_peer_that_reads_nothing_is_closed_and_others_go_on(autojump_clock):
    async with trio.open_nursery() as nursery:
        one, other = await start(nursery, MemoryNetwork(nursery), 2)
        stuck = StuckStream(KeyPair(bytes([99]) * 32).public)
        nursery.start_soon(one.gossip.handler, stuck)
        one.gossip.publish(SessionState.DRAIN, one.card)
        await until(lambda: other.status_of(one) is Status.DRAIN, limit_s=1.0)
        await until(lambda: stuck.is_reset, limit_s=WRITE_TIMEOUT_S + 1)
        nursery.cancel_scope.cancel()


async def test_garbage_ends_its_own_link_only(autojump_clock):
    async with trio.open_nursery() as nursery:
        one, other = await start(nursery, MemoryNetwork(nursery), 2)
        stuck = StuckStream(KeyPair(bytes([98]) * 32).public)
        stuck._greeting = [b"\xff" * 8]
        with trio.fail_after(5.0):
            await one.gossip.handler(stuck)
        assert stuck.is_reset
        one.gossip.publish(SessionState.DRAIN, one.card)
        await until(lambda: other.status_of(one) is Status.DRAIN)
        nursery.cancel_scope.cancel()


async def test_revocation_spreads_and_takes_the_revoked_node_away(autojump_clock):
    async with trio.open_nursery() as nursery:
        one, other, third = await start(nursery, MemoryNetwork(nursery), 3)
        listed = revoke(CA, SWARM, NOTHING_REVOKED, [(RevokedKind.NODE, third.node)], now=NOW)
        one.gossip.revoke(listed.raw)
        began = trio.current_time()
        await until(lambda: all(peer.revocations == [listed] for peer in (one, other, third)))
        assert trio.current_time() - began < 1.0
        assert one.status_of(third) is other.status_of(third) is None
        assert one.status_of(other) is Status.SERVING
        third.gossip.publish(SessionState.DRAIN, third.card)
        other.gossip.revoke(listed.raw)
        await trio.sleep(3.0)
        assert one.status_of(third) is other.status_of(third) is None
        assert other.revocations == [listed]
        nursery.cancel_scope.cancel()


async def test_newcomer_learns_of_revocations_and_a_forged_list_changes_nothing(autojump_clock):
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        one, other = await start(nursery, network, 2)
        forged = revoke(other.key, SWARM, NOTHING_REVOKED, [(RevokedKind.NODE, one.node)], now=NOW)
        other.gossip.revoke(forged.raw)
        listed = revoke(CA, SWARM, NOTHING_REVOKED, [(RevokedKind.NODE, other.node)], now=NOW)
        one.gossip.revoke(listed.raw)
        newcomer = Peer(network, 77)
        await nursery.start(newcomer.gossip.serve)
        await newcomer.link(nursery, one)
        await until(lambda: newcomer.revocations == [listed])
        assert one.revocations == [listed]
        assert one.status_of(one) is Status.SERVING
        nursery.cancel_scope.cancel()
