"""Renewal: from the middle of a certificate's life on, by a hub that holds the key, and without use of an invite."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
import trio

from tela.identity import CLOCK_SKEW_S, KeyPair, check_certificate
from tela.net.admission import Membership, decide, half_life_unix_s
from tela.net.memory import MemoryNetwork
from tela.net.renewal import CHECK_INTERVAL_S, JITTER, Renewal, due_unix_s, hubs_to_ask
from tela.revocation import NOTHING_REVOKED, RevokedKind, revoke
from tests.net.test_admission import (
    CA,
    DAY,
    ETH,
    GOOD,
    HUB,
    MEMBER,
    NOW,
    SWARM,
    WORKER,
    Node,
    hub_and_worker,
    hub_membership,
    issuer,
    request,
    token,
)

HALF = NOW + 15 * DAY
"""The middle of the 30 days of MEMBER; its invite GOOD ended after one."""


def renewal_request(certificate=MEMBER, join_token=None):
    return msgspec.structs.replace(request(certificate, join_token), is_renewal=True)


def answer(presented, *, hub=HUB, peer=WORKER.public, now=HALF):
    return decide(presented, peer, replace(hub, certificate=HUB.certificate), now, frozenset())


def test_certificate_at_half_life_is_renewed_for_as_long_again():
    assert half_life_unix_s(MEMBER) == HALF
    reply, certificate = answer(renewal_request())
    assert (reply.code, reply.issued) == ("", certificate)
    check_certificate(certificate, node=WORKER.public, swarm=SWARM, ca=CA.public, now=HALF + 30 * DAY)
    assert certificate.expires_unix_s == HALF + 30 * DAY
    unchanged = ("node", "zone", "region", "roles", "provider")
    assert [getattr(certificate, name) for name in unchanged] == [getattr(MEMBER, name) for name in unchanged]
    again, _ = answer(renewal_request(certificate), now=HALF + 15 * DAY)
    assert again.issued.expires_unix_s == HALF + 45 * DAY


@pytest.mark.parametrize(
    ("hub", "now"),
    [(replace(HUB, issuers=()), HALF), (replace(HUB, issuers=(issuer("cscs"),)), HALF), (HUB, HALF - 1)],
    ids=["no issuing key", "of another provider", "too early"],
)
def test_hub_that_cannot_or_need_not_renew_recognises_the_member_all_the_same(hub, now):
    reply, certificate = answer(renewal_request(), hub=hub, now=now)
    assert (reply.code, reply.issued, certificate) == ("", None, MEMBER)


def revoked_hub(kind, revoked_id):
    return replace(HUB, revoked=revoke(CA, SWARM, NOTHING_REVOKED, [(kind, revoked_id)], now=NOW))


FOREIGN = issuer("eth", ca=WORKER)


@pytest.mark.parametrize(
    ("presented", "hub", "code"),
    [
        (renewal_request(), revoked_hub(RevokedKind.NODE, WORKER.public), "revoked"),
        (renewal_request(), revoked_hub(RevokedKind.ISSUER, ETH.certificate.issuer), "revoked"),
        (renewal_request(ETH.admit(GOOD, HUB.key.public, NOW)), HUB, "foreign-key"),
        (renewal_request(FOREIGN.admit(token(FOREIGN), WORKER.public, NOW)), HUB, "foreign-ca"),
        (renewal_request(msgspec.structs.replace(MEMBER, roles=("hub",))), HUB, "tampered"),
        (renewal_request(ETH.admit(GOOD, WORKER.public, HALF - 31 * DAY)), HUB, "expired"),
    ],
    ids=["node revoked", "issuer revoked", "of another key", "of another CA", "altered", "expired"],
)
def test_revoked_or_foreign_certificate_is_not_renewed(presented, hub, code):
    reply, certificate = answer(presented, hub=hub)
    assert (reply.code, reply.issued, certificate) == (code, None, None)


def test_renewal_by_a_new_key_of_the_provider_replaces_the_chain():
    fresh = issuer("eth")
    reply, _ = answer(renewal_request(), hub=replace(HUB, issuers=(fresh,)))
    assert reply.issued.chain == fresh.certificate
    check_certificate(reply.issued, node=WORKER.public, swarm=SWARM, ca=CA.public, now=HALF)


def test_due_times_spread_over_a_tenth_of_the_life():
    assert due_unix_s(MEMBER, 0.0) == HALF
    assert due_unix_s(MEMBER, JITTER) == HALF + 3 * DAY
    first, second = (
        Renewal(None, None, now=lambda: NOW, rng=random.Random(seed))._lateness  # type: ignore[arg-type]
        for seed in (1, 2)
    )
    assert first != second
    assert 0 <= first <= JITTER


def test_hubs_of_the_own_provider_are_asked_first_and_workers_never():
    theirs, ours = issuer("cscs"), hub_membership().certificate
    other = theirs.admit(token(theirs, roles=("hub",)), WORKER.public, NOW)
    own_hub = ETH.admit(token(roles=("hub", "ingress")), ours.node, NOW)
    worker = ETH.admit(token(), HUB.key.public, NOW)
    members = {each.node: each for each in (other, own_hub, worker)}
    assert hubs_to_ask("eth", members) == [own_hub.node, other.node]
    assert hubs_to_ask("cscs", members) == [other.node, own_hub.node]


@asynccontextmanager
async def running_renewal(clock):
    """A hub and a worker with a link, and the worker's renewal."""
    async with hub_and_worker("memory", now=lambda: clock[0]) as (hub, worker), trio.open_nursery() as nursery:
        hub_certificate = ETH.admit(token(roles=("hub",)), hub.mesh.node, NOW)
        hub.admission.membership = replace(hub.admission.membership, certificate=hub_certificate)
        await worker.admission.join(hub.mesh.node)
        renewal = Renewal(worker.mesh, worker.admission, now=lambda: clock[0], rng=random.Random(1))
        await nursery.start(renewal.serve)
        yield hub, worker
        nursery.cancel_scope.cancel()


async def test_member_renews_in_the_background_and_its_link_lives_on(autojump_clock):
    clock = [float(NOW)]
    async with running_renewal(clock) as (hub, worker):
        (first,) = worker.certificates
        await trio.sleep(10 * CHECK_INTERVAL_S)
        assert worker.certificates == [first]
        clock[0] = HALF + 3.0 * DAY
        await trio.sleep(2 * CHECK_INTERVAL_S)
        _, second = worker.certificates
        assert second.expires_unix_s == clock[0] + 30 * DAY
        assert worker.admission.membership.certificate == second
        assert hub.admission.certificate_of(worker.mesh.node) == second
        assert hub.uses.users(GOOD.token_id) == {worker.mesh.node}
        clock[0] = float(first.expires_unix_s + CLOCK_SKEW_S + 60)  # the hub's own certificate is not the question here
        hub.admission.membership = replace(hub.admission.membership, certificate=second)
        worker.admission._members[hub.mesh.node] = second
        await trio.sleep(5)
        assert hub.mesh.peers() == {worker.mesh.node}


async def test_renewal_is_tried_again_until_a_hub_can(autojump_clock):
    clock = [float(NOW)]
    async with running_renewal(clock) as (hub, worker):
        hub.admission.membership = replace(hub.admission.membership, issuers=())
        clock[0] = HALF + 3.0 * DAY
        await trio.sleep(3 * CHECK_INTERVAL_S)
        assert len(worker.certificates) == 1
        assert hub.mesh.peers() == {worker.mesh.node}
        hub.admission.membership = replace(hub.admission.membership, issuers=(ETH,))
        await trio.sleep(2 * CHECK_INTERVAL_S)
        assert len(worker.certificates) == 2


async def test_hub_with_the_issuing_key_renews_itself_alone(autojump_clock):
    clock = [float(NOW)]
    async with hub_and_worker("memory", now=lambda: clock[0]) as (hub, _), trio.open_nursery() as nursery:
        await nursery.start(Renewal(hub.mesh, hub.admission, now=lambda: clock[0], rng=random.Random(1)).serve)
        clock[0] = HALF + 3.0 * DAY
        await trio.sleep(2 * CHECK_INTERVAL_S)
        (renewed,) = hub.certificates
        assert (renewed.node, renewed.expires_unix_s) == (hub.mesh.node, clock[0] + 30 * DAY)
        nursery.cancel_scope.cancel()


async def test_bogus_invite_with_a_renewal_is_not_counted():
    async with hub_and_worker("memory", now=lambda: HALF, certificate=MEMBER) as (hub, worker):
        certificate = ETH.admit(GOOD, worker.mesh.node, NOW)
        presented = msgspec.structs.replace(renewal_request(certificate), token=token(uses=1, now=NOW - 9 * DAY))
        reply, _ = hub.admission._judge(presented, worker.mesh.node)
        assert reply.issued is not None
        assert hub.uses.users(presented.token.token_id) == frozenset()


async def test_new_certificate_is_shown_on_every_link(autojump_clock):
    clock = [float(NOW)]
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        ingress_key, worker_key = KeyPair.generate(), KeyPair.generate()
        ingress_membership = Membership(
            SWARM, CA.public, ingress_key, ETH.admit(token(roles=("ingress",)), ingress_key.public, NOW)
        )
        hub, ingress, worker = (
            Node(network.mesh(each.key.public), each, lambda: clock[0])
            for each in (hub_membership(), ingress_membership, Membership(SWARM, CA.public, worker_key, None, GOOD))
        )
        hub_certificate = ETH.admit(token(roles=("hub",)), hub.mesh.node, NOW)
        hub.admission.membership = replace(hub.admission.membership, certificate=hub_certificate)
        for node in (hub, ingress, worker):
            await nursery.start(node.admission.serve)
        for peer in (hub, ingress):
            await worker.mesh.dial(peer.mesh.addresses)
            await worker.admission.join(peer.mesh.node)
        await nursery.start(Renewal(worker.mesh, worker.admission, now=lambda: clock[0], rng=random.Random(1)).serve)
        clock[0] = HALF + 3.0 * DAY
        await trio.sleep(2 * CHECK_INTERVAL_S)
        _, renewed = worker.certificates
        assert ingress.admission.certificate_of(worker.mesh.node) == renewed
        nursery.cancel_scope.cancel()
