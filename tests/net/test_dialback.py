"""Members that dial each other's addresses: what they find, and what they do not do for anybody."""

from __future__ import annotations

import pytest
import trio

from tela.errors import PeerError, RefusedError
from tela.identity import KeyPair
from tela.net import bounds
from tela.net.bounds import ASKS_WINDOW_S, MAX_ASKS, AskLimit
from tela.net.dialback import MAX_ADDRESSES, DialBack, ask, check_target
from tela.net.endpoints import Endpoint
from tela.net.libp2p import open_mesh
from tela.net.multiaddrs import address_of, parse_address
from tela.net.reach import Reach
from tela.net.reachability import Reachability
from tela.wire import REACH_PROTOCOL
from tests.lab.meshes import connected_meshes, wait_until


async def test_addresses_are_told_apart_by_a_fresh_connection():
    """Here the listener asks the dialer, over the connection that the dialer made."""
    async with connected_meshes("libp2p") as pair:
        pair.dialer.handle(REACH_PROTOCOL, DialBack(pair.dialer).serve)
        good = parse_address(pair.listener.addresses[0])
        closed = good._replace(port=1)
        results, observed = await ask(pair.listener, pair.dialer.node, [good, closed])
        assert results[good] == ""
        assert "onnect" in results[closed]
        assert observed.host == "127.0.0.1"
        await wait_until(lambda: len(pair.dialer._connections[pair.listener.node]) == 1)  # what was made to try is gone


async def test_answerer_tells_the_host_that_it_sees():
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(REACH_PROTOCOL, DialBack(pair.listener).serve)
        wrong = address_of(pair.dialer.node, "127.0.0.1", parse_address(pair.listener.addresses[0]).port)
        results, observed = await ask(pair.dialer, pair.listener.node, [wrong])
        assert observed.host == "127.0.0.1"
        assert results[wrong]  # somebody else is there


async def test_address_of_another_node_and_a_circuit_are_not_dialled():
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(REACH_PROTOCOL, DialBack(pair.listener).serve)
        foreign = parse_address(pair.listener.addresses[0])
        circuit = foreign._replace(node=pair.dialer.node, relay=pair.listener.node)
        results, _ = await ask(pair.dialer, pair.listener.node, [foreign, circuit])
        assert set(results.values()) == {"not an address of yours"}


async def test_too_many_addresses_and_too_many_questions_are_refused():
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(REACH_PROTOCOL, DialBack(pair.listener).serve)
        own = address_of(pair.dialer.node, "127.0.0.1", 1)
        with pytest.raises(RefusedError) as caught:
            await ask(pair.dialer, pair.listener.node, [own] * (MAX_ADDRESSES + 1))
        assert caught.value.code == "too-many"
        for _ in range(MAX_ASKS):
            await ask(pair.dialer, pair.listener.node, [own])
        with pytest.raises(RefusedError) as caught:
            await ask(pair.dialer, pair.listener.node, [own])
        assert caught.value.code == "too-often"


def test_memory_of_askers_is_bounded(monkeypatch):
    monkeypatch.setattr(bounds, "MAX_ASKERS", 3)
    limit = AskLimit()
    for n in range(10):
        assert limit.may_ask(KeyPair.generate().public, n * ASKS_WINDOW_S / 2)
    assert len(limit._asked) <= 3


@pytest.mark.parametrize(
    ("ip", "observed", "words"),
    [
        ("0.0.0.0", "127.0.0.1", "nobody's"),
        ("224.0.0.1", "127.0.0.1", "nobody's"),
        ("127.0.0.1", "10.0.0.5", "whoever dials it"),
        ("127.0.0.1", "", "whoever dials it"),
        ("::1", "8.8.8.8", "whoever dials it"),
        ("10.0.0.9", "8.8.8.8", "private"),
        ("169.254.169.254", "8.8.8.8", "neighbour"),  # the metadata service of clouds
        ("169.254.169.254", "10.0.0.5", "neighbour"),
        ("::ffff:169.254.169.254", "10.0.0.5", "neighbour"),
        ("fe80::1%eth0", "10.0.0.5", "neighbour"),
        ("::ffff:127.0.0.1", "10.0.0.5", "whoever dials it"),
        ("64:ff9b::7f00:1", "10.0.0.5", "whoever dials it"),
        ("2002:7f00:1::1", "10.0.0.5", "whoever dials it"),  # 6to4
        ("64:ff9b::a00:1", "8.8.8.8", "private"),
        ("100.64.0.7", "8.8.8.8", "private"),  # of a carrier's own NAT
        ("100.64.0.7", "", "private"),
        ("fd00::1", "", "private"),
    ],
)
def test_targets_that_are_no_business_of_a_member(ip, observed, words):
    """Attack "SSRF through an advertised endpoint" of opentela.md 3.4."""
    with pytest.raises(PeerError, match=words):
        check_target(ip, observed)


@pytest.mark.parametrize(
    ("ip", "observed"),
    [
        ("8.8.8.8", ""),
        ("8.8.8.8", "10.0.0.5"),
        ("10.0.0.9", "10.9.9.9"),
        ("127.0.0.1", "127.0.0.1"),
        ("10.1.1.1",) * 2,
        ("10.0.0.9", "::ffff:10.9.9.9"),
        ("100.64.0.7", "10.0.0.5"),
        ("203.0.113.10", "203.0.113.21"),
    ],
)
def test_targets_that_are(ip, observed):
    check_target(ip, observed)


async def test_name_is_judged_by_where_it_leads(monkeypatch):
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle(REACH_PROTOCOL, DialBack(pair.listener).serve)
        monkeypatch.setattr(pair.listener, "observed", lambda _peer: Endpoint("8.8.8.8", 1))
        named = address_of(pair.dialer.node, "localhost", 22)
        results, _ = await ask(pair.dialer, pair.listener.node, [named])
        assert "whoever dials it" in results[named]


async def test_node_finds_out_which_of_its_addresses_work():
    async with (
        open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as hub,
        open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as ours,
        trio.open_nursery() as nursery,
    ):
        hub.handle(REACH_PROTOCOL, DialBack(hub).serve)
        right = parse_address(ours.addresses[0])
        core = Reach([right._replace(port=1), right], trusts_claims=False)
        changed = trio.Event()
        await nursery.start(Reachability(ours, core, members=ours.peers, on_change=changed.set).serve)
        await ours.dial(hub.addresses)
        with trio.fail_after(5):
            await changed.wait()
        assert core.announced == (right,)
        assert list(core.failures) == [right._replace(port=1)]
        nursery.cancel_scope.cancel()
