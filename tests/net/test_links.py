"""Links that come back by themselves."""

from __future__ import annotations

import itertools
import random
from contextlib import asynccontextmanager

import pytest
import trio

from tela.errors import PeerError
from tela.identity import KeyPair
from tela.net.admission import Admission, Membership, TokenUses
from tela.net.links import HUB_BACKOFF_S, HUB_REDIAL_TIMEOUT_S, LinkKeeper
from tela.net.memory import MemoryNetwork
from tela.net.swarmclock import SwarmClock
from tests.net.test_admission import CA, GOOD, NOW, SWARM, hub_membership, issuer, token


class Peer:
    """A node of the test: mesh, admission, and a keeper where it has targets."""

    def __init__(self, network, membership, *, is_listening):
        self.mesh = network.mesh(membership.key.public, is_listening=is_listening)
        self.admission = Admission(
            self.mesh,
            membership,
            clock=SwarmClock(lambda: NOW, monotonic=trio.current_time),
            uses=TokenUses(),
            on_certificate=lambda certificate: None,
            on_proof=lambda _raw: None,
        )


class Bench:
    def __init__(self, nursery):
        self.nursery = nursery
        self.network = MemoryNetwork(nursery)
        self.hub_key = KeyPair.generate()
        self.targets = {}
        self.up = []
        self.refusals = []
        self.n_running = 0

    async def hub(self):
        hub = Peer(self.network, hub_membership(self.hub_key), is_listening=True)
        await self.nursery.start(hub.admission.serve)
        self.targets[hub.mesh.node] = hub.mesh.addresses
        return hub

    async def worker(self, invite=GOOD, on_link=None):
        membership = Membership(SWARM, CA.public, KeyPair.generate(), token=invite)
        worker = Peer(self.network, membership, is_listening=False)
        await self.nursery.start(worker.admission.serve)
        keeper = self.keeper = LinkKeeper(
            worker.mesh,
            worker.admission,
            targets=lambda: dict(self.targets),
            hubs=frozenset({self.hub_key.public}),
            on_link=on_link or self.on_link,
            on_refused=self.refusals.append,
            rng=random.Random(1),
        )
        await self.nursery.start(keeper.serve)
        return worker

    async def on_link(self, peer, certificate):
        assert certificate.node == peer
        self.up.append(trio.current_time())
        self.n_running += 1
        try:
            await trio.sleep_forever()
        finally:
            self.n_running -= 1


@asynccontextmanager
async def bench():
    async with trio.open_nursery() as nursery:
        yield Bench(nursery)
        nursery.cancel_scope.cancel()


async def test_link_comes_up_and_runs_what_it_carries(autojump_clock):
    async with bench() as b:
        hub = await b.hub()
        worker = await b.worker()
        await trio.sleep(1)
        assert worker.mesh.peers() == {hub.mesh.node}
        assert len(b.up) == b.n_running == 1


async def test_lost_link_is_cancelled_and_comes_back_within_the_first_pause(autojump_clock):
    async with bench() as b:
        hub = await b.hub()
        worker = await b.worker()
        await trio.sleep(100)
        await hub.mesh.disconnect(worker.mesh.node)
        lost = trio.current_time()
        await trio.sleep(0.01)
        assert b.n_running == 0
        await trio.sleep(2)
        assert b.n_running == 1
        assert b.up[-1] - lost <= HUB_BACKOFF_S[0]


async def test_hub_that_is_away_for_an_hour_is_found_within_five_seconds(autojump_clock):
    async with bench() as b:
        hub = await b.hub()
        worker = await b.worker()
        await trio.sleep(1)
        b.network.cut(hub.mesh.node, worker.mesh.node)
        await trio.sleep(3600)
        assert b.n_running == 0
        b.network.heal(hub.mesh.node, worker.mesh.node)
        healed = trio.current_time()
        await trio.sleep(HUB_BACKOFF_S[1] + 0.1)
        assert b.n_running == 1
        assert b.up[-1] - healed <= HUB_BACKOFF_S[1]


async def test_restarted_hub_is_joined_again(autojump_clock):
    async with bench() as b:
        await b.hub()
        await b.worker()
        await trio.sleep(1)
        b.network.remove(b.hub_key.public)
        await trio.sleep(30)
        await b.hub()
        await trio.sleep(6)
        assert (len(b.up), b.n_running) == (2, 1)


async def test_new_target_is_linked_and_a_dropped_one_is_left_alone(autojump_clock):
    async with bench() as b:
        await b.hub()
        worker = await b.worker()
        b.targets.clear()
        await trio.sleep(5)
        await worker.mesh.disconnect(b.hub_key.public)
        await trio.sleep(60)
        assert not worker.mesh.peers()
        await b.hub()
        await trio.sleep(2)
        assert worker.mesh.peers() == {b.hub_key.public}


async def test_refusal_of_a_hub_is_reported_with_its_code(autojump_clock):
    async with bench() as b:
        await b.hub()
        worker = await b.worker(invite=token(issuer("cscs")))
        await trio.sleep(1)
        assert b.refusals[0].code == "no-issuer"
        assert not worker.mesh.peers()
        assert not b.up


async def test_admitted_inbound_link_is_enough(autojump_clock):
    async with bench() as b:
        hub = await b.hub()
        first = await b.worker()
        await trio.sleep(1)
        b.targets = {first.mesh.node: ["/never/dialled"]}
        keeper = LinkKeeper(
            hub.mesh,
            hub.admission,
            targets=lambda: b.targets,
            hubs=frozenset(),
            on_link=b.on_link,
            on_refused=b.refusals.append,
            rng=random.Random(1),
        )
        await b.nursery.start(keeper.serve)
        await trio.sleep(60)
        assert len(b.up) == b.n_running == 1  # the worker's; the hub dialled nobody


async def test_failures_tell_why_there_is_no_link_and_end_with_it(autojump_clock):
    async with bench() as b:
        hub = await b.hub()
        b.network.remove(hub.mesh.node)
        worker = await b.worker()
        await trio.sleep(10)
        assert set(b.keeper.failures) == {hub.mesh.node}
        assert all(b.keeper.failures.values())
        await b.hub()
        await trio.sleep(HUB_BACKOFF_S[1] + 0.1)
        assert worker.mesh.peers()
        assert not b.keeper.failures


async def test_silent_hub_is_redialled_in_seconds_after_its_first_attempt(autojump_clock, monkeypatch):
    async with bench() as b:
        await b.hub()
        attempts = []

        async def never_answers(addresses):
            attempts.append(trio.current_time())
            await trio.sleep_forever()

        monkeypatch.setattr("tela.net.memory.MemoryMesh.dial", lambda mesh, addresses: never_answers(addresses))
        await b.worker()
        await trio.sleep(60)
        assert b.keeper.failures[b.hub_key.public].endswith(
            "took longer than 10 s"
        )  # not 2 s: the longest wait is told
        gaps = [later - earlier for earlier, later in itertools.pairwise(attempts)]
        assert 10 <= gaps[0] <= 10 + HUB_BACKOFF_S[1]
        assert max(gaps[1:]) <= HUB_REDIAL_TIMEOUT_S + HUB_BACKOFF_S[1]


async def test_failing_link_work_takes_the_link_down_for_a_fresh_start(autojump_clock):
    async with bench() as b:
        attempts = []

        async def fail(peer, certificate):
            attempts.append(trio.current_time())
            raise PeerError("the peer talked nonsense")

        await b.hub()
        await b.worker(on_link=fail)
        await trio.sleep(10)
        assert len(attempts) > 2


async def test_own_address_among_the_targets_is_not_dialled(autojump_clock):
    async with bench() as b:
        hub = await b.hub()
        assert hub.mesh.node in b.targets
        keeper = LinkKeeper(
            hub.mesh,
            hub.admission,
            targets=lambda: b.targets,
            hubs=frozenset(),
            on_link=b.on_link,
            on_refused=b.refusals.append,
            rng=random.Random(1),
        )
        await b.nursery.start(keeper.serve)
        await trio.sleep(5)
        assert not hub.mesh.peers()


@pytest.mark.parametrize("seed", range(3))
def test_back_off_is_bounded_and_jittered(seed):
    from tela.net.links import backoff_s

    rng = random.Random(seed)
    pauses = [backoff_s(n, HUB_BACKOFF_S, rng) for n in range(50)]
    assert all(pauses[n] <= HUB_BACKOFF_S[1] for n in range(50))
    assert pauses[0] <= HUB_BACKOFF_S[0]
    assert min(pauses[10:]) >= HUB_BACKOFF_S[1] / 2
    assert len(set(pauses)) == 50
