"""Admission: the pure decision as a table, and the exchange over both meshes."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
import trio
from structlog.testing import capture_logs

from tela.errors import ConfigError, IntegrityError, PeerError, RefusedError, StreamResetError, TelaError
from tela.identity import Issuer, KeyPair, check_certificate, issue_issuer
from tela.net import admission
from tela.net.admission import (
    VERSIONS,
    Admission,
    AdmissionRequest,
    Membership,
    TokenUses,
    certify_self,
    decide,
)
from tela.net.swarmclock import SwarmClock
from tela.record import Role, SwarmId
from tela.wire import ADMISSION_PROTOCOL
from tests.lab.meshes import KINDS, echo, two_meshes, wait_until

NOW = 1_800_000_000
DAY = 86_400
SWARM = SwarmId(b"s" * 16)
CA = KeyPair(b"\x01" * 32)
over_both = pytest.mark.parametrize("kind", KINDS)


def issuer(provider="eth", ca=CA, swarm=SWARM):
    key = KeyPair.generate()
    return Issuer(key, issue_issuer(ca, swarm=swarm, issuer=key.public, provider=provider, now=NOW, days=365))


ETH = issuer()


def token(of=ETH, *, now=NOW, expires_s=DAY, uses=2, roles=("worker",)):
    return of.token(zone="euler", region="ch", roles=roles, now=now, expires_s=expires_s, uses=uses)


def hub_membership(key=None, of=ETH, roles=("worker",)):
    bare = Membership(SWARM, CA.public, key or KeyPair.generate(), token=token(of, roles=roles), issuers=(of,))
    return replace(bare, certificate=certify_self(bare, NOW))


HUB = hub_membership()
WORKER = KeyPair.generate()
GOOD = token()
MEMBER = ETH.admit(GOOD, WORKER.public, NOW)


def request(certificate=None, join_token=None, swarm=SWARM, versions=VERSIONS):
    return AdmissionRequest(versions, swarm, certificate, join_token)


REFUSALS = {
    "nothing": (request(), "no-token"),
    "expired": (request(join_token=token(now=NOW - 2 * DAY, expires_s=DAY)), "expired"),
    "not-yet-valid": (request(join_token=token(now=NOW + DAY)), "not-yet-valid"),
    "foreign-ca": (request(join_token=token(issuer(ca=KeyPair.generate()))), "foreign-ca"),
    "foreign-swarm token": (request(join_token=token(issuer(swarm=SwarmId(bytes(16))))), "foreign-swarm"),
    "foreign-swarm": (request(join_token=GOOD, swarm=SwarmId(bytes(16))), "foreign-swarm"),
    "tampered": (request(join_token=msgspec.structs.replace(GOOD, roles=("hub",))), "tampered"),
    "no-issuer": (request(join_token=token(issuer("cscs"))), "no-issuer"),
    "version": (request(join_token=GOOD, versions=(98, 99)), "version"),
    "foreign-key": (request(ETH.admit(GOOD, KeyPair.generate().public, NOW)), "foreign-key"),
    "tampered certificate": (request(msgspec.structs.replace(MEMBER, zone="else")), "tampered"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_has_a_code_and_a_reason(case):
    presented, code = REFUSALS[case]
    reply, certificate = decide(presented, WORKER.public, HUB, NOW, frozenset())
    assert (reply.code, certificate, reply.issued) == (code, None, None)
    assert reply.reason
    assert decide(presented, WORKER.public, HUB, NOW, frozenset()) == (reply, None)


def test_token_becomes_a_certificate_with_the_provider_of_its_chain():
    reply, certificate = decide(request(join_token=GOOD), WORKER.public, HUB, NOW, frozenset())
    assert reply.code == ""
    assert reply.issued == certificate
    assert reply.certificate == HUB.certificate
    assert (certificate.provider, certificate.zone, certificate.roles) == ("eth", "euler", ("worker",))
    check_certificate(certificate, node=WORKER.public, swarm=SWARM, ca=CA.public, now=NOW)


def test_certificate_is_recognised_by_a_node_without_an_issuer():
    plain = replace(HUB, issuers=())
    reply, certificate = decide(request(MEMBER), WORKER.public, plain, NOW, frozenset())
    assert (reply.code, reply.issued, certificate) == ("", None, MEMBER)


def test_expired_certificate_is_replaced_where_the_token_is_good():
    later = NOW + 31 * DAY
    fresh = token(now=later)
    reply, certificate = decide(request(MEMBER, fresh), WORKER.public, HUB, later, frozenset())
    assert reply.issued == certificate
    assert certificate.expires_unix_s > later


def test_uses_count_keys_and_the_same_key_costs_nothing():
    others = frozenset({KeyPair.generate().public, KeyPair.generate().public})
    assert decide(request(join_token=GOOD), WORKER.public, HUB, NOW, others)[0].code == "used-up"
    again = frozenset({WORKER.public, KeyPair.generate().public})
    assert decide(request(join_token=GOOD), WORKER.public, HUB, NOW, again)[0].code == ""


def test_node_that_is_no_member_admits_nobody():
    stranger = replace(HUB, certificate=None)
    assert decide(request(MEMBER), WORKER.public, stranger, NOW, frozenset())[0].code == "not-a-member"


@pytest.mark.parametrize(("theirs", "code"), [((1, 1), ""), ((1, 2), ""), ((2, 3), ""), ((3, 4), "version")])
def test_version_n_and_its_neighbours_meet(monkeypatch, theirs, code):
    monkeypatch.setattr(admission, "VERSIONS", (1, 2))
    assert decide(request(MEMBER, versions=theirs), WORKER.public, HUB, NOW, frozenset())[0].code == code


def test_first_hub_certifies_itself_and_nobody_else_can():
    assert HUB.certificate.node == HUB.key.public
    with pytest.raises(RefusedError) as caught:
        certify_self(replace(HUB, issuers=()), NOW)
    assert caught.value.code == "no-issuer"
    with pytest.raises(RefusedError):
        certify_self(replace(HUB, token=None), NOW)


def test_token_uses_survive_a_restart(tmp_path):
    path = tmp_path / "state" / "uses.json"
    uses = TokenUses(path)
    uses.add(GOOD, WORKER.public)
    uses.add(GOOD, WORKER.public)
    assert TokenUses(path).users(GOOD.token_id) == {WORKER.public}
    assert json.loads(path.read_bytes()) == {GOOD.token_id.hex(): [WORKER.public.hex()]}
    path.write_text("{")
    with pytest.raises(ConfigError):
        TokenUses(path)


YEAR = 365 * DAY


class Node:
    """Admission on one mesh, with what it called back."""

    def __init__(self, mesh, membership, now=lambda: NOW, uses=None):
        self.certificates = []
        self.proofs = []
        self.mesh = mesh
        self.uses = uses or TokenUses()
        self.clock = SwarmClock(now, monotonic=trio.current_time, earliest_unix_s=NOW - DAY)
        self.admission = Admission(
            mesh,
            membership,
            clock=self.clock,
            uses=self.uses,
            on_certificate=self.certificates.append,
            on_proof=self.proofs.append,
        )

    @property
    def members(self):
        """Peers that are admitted now, with what they proved."""
        proved = {peer: self.admission.certificate_of(peer) for peer in self.mesh.peers()}
        return {peer: certificate for peer, certificate in proved.items() if certificate is not None}


@asynccontextmanager
async def hub_and_worker(
    kind, *, invite=GOOD, of=ETH, now=lambda: NOW, worker_now=None, certificate=None, ca=CA, roles=("worker",)
):
    async with two_meshes(kind) as pair, trio.open_nursery() as nursery:
        hub = Node(pair.listener, hub_membership(pair.listener_key, of, roles), now)
        worker = Node(
            pair.dialer, Membership(SWARM, ca.public, pair.dialer_key, certificate, invite), worker_now or now
        )
        await nursery.start(hub.admission.serve)
        await nursery.start(worker.admission.serve)
        await pair.dialer.dial(pair.listener.addresses)
        yield hub, worker
        nursery.cancel_scope.cancel()


@over_both
async def test_joining_makes_both_sides_members(kind):
    async with hub_and_worker(kind) as (hub, worker):
        checked = await worker.admission.join(hub.mesh.node)
        assert checked == hub.admission.membership.certificate
        await wait_until(lambda: hub.members)
        (issued,) = worker.certificates
        assert hub.members == {worker.mesh.node: issued}
        assert worker.members == {hub.mesh.node: checked}
        assert hub.admission.certificate_of(worker.mesh.node) == issued
        assert worker.admission.membership.certificate == issued
        assert hub.uses.users(GOOD.token_id) == {worker.mesh.node}
        await worker.mesh.disconnect(hub.mesh.node)
        assert worker.admission.certificate_of(hub.mesh.node) is None
        await wait_until(lambda: hub.admission.certificate_of(worker.mesh.node) is None)
        await worker.mesh.dial(hub.mesh.addresses)
        await worker.admission.join(hub.mesh.node)
        assert worker.certificates == [issued]  # the second time, the certificate was enough


@over_both
@pytest.mark.parametrize(
    ("invite", "code", "error"),
    [
        (token(now=NOW - 2 * DAY, expires_s=DAY), "expired", RefusedError),
        (token(issuer(ca=KeyPair.generate())), "foreign-ca", RefusedError),
        (msgspec.structs.replace(GOOD, roles=("hub",)), "tampered", IntegrityError),
        (token(issuer("cscs")), "no-issuer", RefusedError),
    ],
    ids=["expired", "foreign-ca", "tampered", "no-issuer"],
)
async def test_refusal_reaches_both_sides_with_its_reason(kind, invite, code, error):
    with capture_logs() as logs:
        await _be_refused(kind, invite, code, error)
    told = {entry["event"]: (entry["code"], entry["reason"]) for entry in logs if "refuse" in entry["event"]}
    assert told["admission.refuse"] == told["admission.refused"]
    assert told["admission.refuse"][0] == code


async def _be_refused(kind, invite, code, error):
    async with hub_and_worker(kind, invite=invite) as (hub, worker):
        with pytest.raises(error) as caught:
            await worker.admission.join(hub.mesh.node)
        assert caught.value.code == code
        await wait_until(lambda: not hub.mesh.peers())
        assert not hub.members
        assert not worker.members


@over_both
@pytest.mark.parametrize("error_s", [-YEAR, YEAR])
async def test_node_whose_clock_is_a_year_off_joins_by_the_time_of_the_hub(kind, error_s):
    async with hub_and_worker(kind, worker_now=lambda: NOW + error_s, roles=("hub",)) as (hub, worker):
        await worker.admission.join(hub.mesh.node)
        assert worker.clock.now() == pytest.approx(NOW, abs=5)
        assert worker.clock.skew_s == pytest.approx(error_s, abs=5)
        await wait_until(lambda: hub.members)
        await trio.sleep(2 * admission._REAP_INTERVAL_S)
        assert (len(hub.members), len(worker.members)) == (1, 1)  # nobody takes the other for expired


async def test_time_is_not_taken_from_who_is_no_hub():
    async with hub_and_worker("memory", worker_now=lambda: NOW + YEAR) as (hub, worker):
        with pytest.raises(RefusedError) as caught:
            await worker.admission.join(hub.mesh.node)
        assert caught.value.code == "expired"
        assert worker.clock.skew_s == 0


async def test_hub_with_an_expired_certificate_cannot_turn_the_time_back_before_the_invite():
    async with hub_and_worker("memory", worker_now=lambda: NOW + YEAR, roles=("hub",)) as (
        hub,
        worker,
    ):
        worker.admission._clock._earliest_unix_s = NOW + DAY
        with pytest.raises(RefusedError) as caught:
            await worker.admission.join(hub.mesh.node)
        assert caught.value.code == "expired"


async def test_dialer_checks_the_hub_against_the_ca_of_its_invite():
    async with hub_and_worker("memory", ca=KeyPair.generate()) as (hub, worker):
        with pytest.raises(RefusedError) as caught:
            await worker.admission.join(hub.mesh.node)
        assert caught.value.code == "foreign-ca"
        assert not worker.certificates


@over_both
async def test_strangers_get_no_stream_and_are_disconnected(kind, monkeypatch):
    monkeypatch.setattr(admission, "ADMISSION_TIMEOUT_S", 0.2)
    monkeypatch.setattr(admission, "_REAP_INTERVAL_S", 0.05)
    async with hub_and_worker(kind) as (hub, worker):
        hub.mesh.handle("/tela/echo/1", hub.admission.members_only(echo))
        stream = await worker.mesh.open(hub.mesh.node, "/tela/echo/1")
        with pytest.raises(StreamResetError):
            await stream.receive()
        await wait_until(lambda: not hub.mesh.peers())


async def test_members_get_streams_and_stay():
    async with hub_and_worker("memory") as (hub, worker):
        hub.mesh.handle("/tela/echo/1", hub.admission.members_only(echo))
        await worker.admission.join(hub.mesh.node)
        stream = await worker.mesh.open(hub.mesh.node, "/tela/echo/1")
        await stream.send(b"member")
        assert await stream.receive() == b"member"


async def test_members_without_the_role_get_no_stream():
    async with hub_and_worker("memory") as (hub, worker):
        hub.mesh.handle("/tela/echo/1", hub.admission.members_only(echo, role=Role.INGRESS))
        await worker.admission.join(hub.mesh.node)  # its invite makes it a worker, no ingress
        stream = await worker.mesh.open(hub.mesh.node, "/tela/echo/1")
        with pytest.raises(StreamResetError):
            await stream.receive()


def test_a_hub_with_several_issuing_keys_redeems_invites_of_each():
    other = issuer(provider="psi")
    hub = replace(HUB, issuers=(ETH, other))
    for key in (ETH, other):
        reply, certificate = decide(request(join_token=token(key)), WORKER.public, hub, NOW, frozenset())
        assert reply.code == ""
        assert certificate is not None
        assert certificate.provider == key.certificate.provider


async def test_member_whose_certificate_expires_is_disconnected(autojump_clock):
    clock = [float(NOW)]
    async with hub_and_worker("memory", now=lambda: clock[0]) as (hub, worker):
        await worker.admission.join(hub.mesh.node)
        await trio.sleep(60)
        assert hub.mesh.peers()
        clock[0] = NOW + 32.0 * DAY
        await trio.sleep(2)
        assert not hub.mesh.peers()


@pytest.mark.parametrize(
    "message",
    [b"\x00\x00\x00\x02\xc1\xc1", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x01ab", b"\xa5" * 64],
    ids=["undecodable", "too long", "more than said", "noise"],
)
async def test_malformed_request_closes_the_connection(message):
    async with hub_and_worker("memory") as (hub, worker):
        stream = await worker.mesh.open(hub.mesh.node, ADMISSION_PROTOCOL)
        await stream.send(message)
        await wait_until(lambda: not hub.mesh.peers())
        assert not hub.members


@pytest.mark.defect(12)
async def test_silent_hub_is_a_deadline_and_a_silent_dialer_is_dropped(autojump_clock):
    async with hub_and_worker("memory") as (hub, worker):
        await worker.mesh.open(hub.mesh.node, ADMISSION_PROTOCOL)
        await trio.sleep(admission.ADMISSION_TIMEOUT_S + 2)
        assert not hub.mesh.peers()
        await worker.mesh.dial(hub.mesh.addresses)
        hub.mesh.handle(ADMISSION_PROTOCOL, lambda stream: trio.sleep_forever())
        with pytest.raises(TelaError) as caught:
            await worker.admission.join(hub.mesh.node)
        assert caught.value.code in {"deadline", "stream-reset"}


async def test_join_without_a_connection_is_a_peer_error():
    async with hub_and_worker("memory") as (_, worker):
        with pytest.raises(PeerError):
            await worker.admission.join(KeyPair.generate().public)
