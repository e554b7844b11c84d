"""Admission and what the CA took back: refused with the CA's own word, on new links and on live ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from tela.errors import IntegrityError, RefusedError, StreamResetError
from tela.identity import KeyPair
from tela.net.admission import certify_self, decide
from tela.record import SwarmId
from tela.revocation import NOTHING_REVOKED, RevokedKind, read_revocations, revoke
from tests.lab.meshes import KINDS, echo, wait_until
from tests.net.test_admission import (
    CA,
    ETH,
    GOOD,
    HUB,
    MEMBER,
    NOW,
    SWARM,
    WORKER,
    hub_and_worker,
    issuer,
    request,
    token,
)

over_both = pytest.mark.parametrize("kind", KINDS)


def listing(*what: tuple[RevokedKind, bytes]):
    return revoke(CA, SWARM, NOTHING_REVOKED, what, now=NOW)


THE_NODE = listing((RevokedKind.NODE, WORKER.public))
THE_ISSUER = listing((RevokedKind.ISSUER, ETH.certificate.issuer))
THE_TOKEN = listing((RevokedKind.TOKEN, GOOD.token_id))


@pytest.mark.parametrize(
    ("revoked", "presented"),
    [
        (THE_NODE, request(MEMBER)),
        (THE_NODE, request(join_token=GOOD)),
        (THE_NODE, request(join_token=token())),
        (THE_ISSUER, request(MEMBER)),
        (THE_ISSUER, request(join_token=GOOD)),
        (THE_TOKEN, request(join_token=GOOD)),
    ],
    ids=["member", "old invite", "new invite", "issuer's member", "issuer's invite", "invite"],
)
def test_what_was_revoked_is_refused_with_the_proof(revoked, presented):
    hub = replace(HUB, revoked=revoked)
    reply, certificate = decide(presented, WORKER.public, hub, NOW, frozenset())
    assert (reply.code, certificate, reply.issued) == ("revoked", None, None)
    assert read_revocations(reply.revocations, swarm=SWARM, ca=CA.public) == revoked


def test_members_that_a_revoked_invite_admitted_stay_members():
    reply, certificate = decide(request(MEMBER), WORKER.public, replace(HUB, revoked=THE_TOKEN), NOW, frozenset())
    assert (reply.code, reply.revocations, certificate) == ("", b"", MEMBER)


def test_node_of_a_revoked_issuer_gets_in_again_by_another_issuer_of_its_provider():
    fresh = issuer("eth")
    hub = replace(HUB, issuers=(ETH, fresh), revoked=THE_ISSUER)
    reply, certificate = decide(request(MEMBER, token(fresh)), WORKER.public, hub, NOW, frozenset())
    assert (reply.code, certificate.chain) == ("", fresh.certificate)


def test_first_hub_cannot_certify_itself_by_what_was_revoked():
    for revoked in (THE_ISSUER, listing((RevokedKind.TOKEN, HUB.token.token_id))):
        with pytest.raises(RefusedError) as caught:
            certify_self(replace(HUB, revoked=revoked), NOW)
        assert caught.value.code == "revoked"


@over_both
async def test_live_link_of_a_revoked_member_is_closed_and_its_return_refused(kind):
    async with hub_and_worker(kind) as (hub, worker):
        hub.mesh.handle("/tela/echo/1", hub.admission.members_only(echo))
        await worker.admission.join(hub.mesh.node)
        stream = await worker.mesh.open(hub.mesh.node, "/tela/echo/1")
        await stream.send(b"member")
        assert await stream.receive() == b"member"
        revoked = listing((RevokedKind.NODE, worker.mesh.node))
        with trio.fail_after(5.0):  # what overlay.md 4 promises
            hub.admission.revoke(revoked)
            with pytest.raises(StreamResetError):
                await stream.receive()
            await wait_until(lambda: not hub.mesh.peers() and not worker.mesh.peers())
        assert hub.admission.certificate_of(worker.mesh.node) is None
        await worker.mesh.dial(hub.mesh.addresses)
        with pytest.raises(RefusedError) as caught:
            await worker.admission.join(hub.mesh.node)
        assert caught.value.code == "revoked"
        assert worker.proofs == [revoked.raw]


async def test_dialer_refuses_a_hub_that_was_revoked():
    async with hub_and_worker("memory") as (hub, worker):
        worker.admission.revoke(listing((RevokedKind.NODE, hub.mesh.node)))
        with pytest.raises(RefusedError) as caught:
            await worker.admission.join(hub.mesh.node)
        assert caught.value.code == "revoked"
        assert worker.admission.certificate_of(hub.mesh.node) is None
        assert not worker.certificates


async def test_list_of_another_node_closes_no_link(autojump_clock):
    async with hub_and_worker("memory") as (hub, worker):
        await worker.admission.join(hub.mesh.node)
        hub.admission.revoke(listing((RevokedKind.NODE, KeyPair.generate().public), (RevokedKind.TOKEN, GOOD.token_id)))
        await trio.sleep(5)
        assert hub.admission.certificate_of(worker.mesh.node) is not None


def test_altered_proof_is_no_proof():
    """A hub cannot make a node believe that it was revoked: the node checks the list, as gossip does."""
    forged = revoke(KeyPair.generate(), SWARM, NOTHING_REVOKED, [(RevokedKind.NODE, WORKER.public)], now=NOW)
    replayed = revoke(CA, SwarmId(bytes(16)), NOTHING_REVOKED, [(RevokedKind.NODE, WORKER.public)], now=NOW)
    for raw in (forged.raw, replayed.raw):
        with pytest.raises(IntegrityError):
            read_revocations(raw, swarm=SWARM, ca=CA.public)
