"""Each attack on membership and records that opentela.md 3.4 lists, tried with real keys, and refused.

Mallory is a member with a worker's certificate unless a test says otherwise; Eve has none. Revocation has its own tests
(tests/crdt/test_revocation.py, tests/net/test_revocation.py), as have altered tokens (tests/test_identity.py), refused
dialers (tests/net/test_admission.py) and the engine's own paths (tests/engine/test_gate.py).
"""

from __future__ import annotations

import msgspec
import pytest
import trio

from tela.cli.join import build_options
from tela.crdt.delta import Delta
from tela.crdt.gmap import GossipMap, Outcome, Verifier
from tela.crdt.lattice import Status
from tela.crdt.registry import Change, Registry, Snapshot
from tela.engine.gate import Gate
from tela.gossip.conduct import MAX_STRIKES
from tela.gossip.core import GossipCore, Signer
from tela.gossip.events import Close, FrameReceived, LinkId, LinkUp
from tela.gossip.frames import FrameCutter, Hello, Records, encode_frame
from tela.identity import (
    Certificate,
    Issuer,
    KeyPair,
    check_certificate,
    is_claim_genuine,
    is_envelope_genuine,
    is_vote_genuine,
    issue_issuer,
    sign_claim,
    sign_envelope,
    sign_vote,
)
from tela.net.circuit import STOP_PROTOCOL
from tela.net.identify import IDENTIFY_PROTOCOL
from tela.net.invite import Invite, render_invite
from tela.net.known_peers import KnownPeers
from tela.net.libp2p import open_mesh
from tela.net.multiaddrs import peer_id
from tela.net.punch import PUNCH_PROTOCOL
from tela.node import Node
from tela.record import (
    Card,
    Envelope,
    InstanceState,
    Kind,
    NodeBody,
    NodeId,
    Role,
    Service,
    SessionId,
    SessionState,
    SwarmId,
    Vote,
    VoteKind,
)
from tela.wire import (
    ADMISSION_PROTOCOL,
    GOSSIP_PROTOCOL,
    HTTP_PROTOCOL,
    REACH_PROTOCOL,
    Claim,
    ErrorFrame,
    RequestHead,
    encode,
)

NOW = 1_800_000_000
NOBODY_KNOWN = KnownPeers(None, now=lambda: float(NOW))
SESSION = SessionId(NOW * 1000)
SWARM, OTHER_SWARM = SwarmId(b"s" * 16), SwarmId(b"o" * 16)
CA, EVES_CA, ISSUING, VICTIM, MALLORY, EVE, OBSERVER = (KeyPair(bytes([n]) * 32) for n in range(1, 8))
MODEL = "llama"


def issuer(ca: KeyPair = CA, swarm: SwarmId = SWARM) -> Issuer:
    certificate = issue_issuer(ca, swarm=swarm, issuer=ISSUING.public, provider="eth", now=NOW, days=365)
    return Issuer(ISSUING, certificate)


def certificate(owner: KeyPair, roles: tuple[str, ...] = ("worker",), by: Issuer | None = None) -> Certificate:
    by = by or issuer()
    token = by.token(zone="euler", region="ch", roles=roles, now=NOW, expires_s=3600, uses=9)
    return by.admit(token, owner.public, NOW)


def record(
    owner: NodeId,
    signer: KeyPair,
    proof: Certificate | None,
    *,
    state: SessionState = SessionState.SERVING,
    version: int = 1,
    swarm: SwarmId = SWARM,
) -> bytes:
    """A record of ``owner`` that serves MODEL, as ``signer`` would write it."""
    services = (Service(0, "vllm", MODEL, InstanceState.READY),)
    card = Card(certificate=encode(proof) if proof else b"", services=services)
    body = encode(NodeBody(state, 0, NOW, NOW + 3600, card=card))
    unsigned = Envelope(Kind.NODE, signer.public, SESSION, version, body, b"")
    signed = sign_envelope(signer, swarm, unsigned)
    return encode(msgspec.structs.replace(signed, owner=owner))


def vote(observer: KeyPair, *, swarm: SwarmId = SWARM, kind: VoteKind = VoteKind.DOWN) -> bytes:
    return encode(sign_vote(observer, swarm, Vote(observer.public, VICTIM.public, SESSION, 0, kind, NOW, b"")))


class Replica:
    """What an honest node believes, with real cryptography."""

    def __init__(self) -> None:
        self.map = GossipMap(VERIFIER)
        self.registry = Registry()
        for member in (VICTIM, MALLORY):
            assert self.take(record(member.public, member, certificate(member))) is Outcome.NEW

    def take(self, *records: bytes, votes: tuple[bytes, ...] = ()) -> Outcome:
        merged = self.map.merge(Delta(records, votes), NOW)
        if merged.key:
            owner = merged.key.owner
            self.registry.apply([Change(owner, self.map.node(owner), self.map.certificate_of(owner))], unix_s=NOW)
        return merged.outcomes[0]

    @property
    def snapshot(self) -> Snapshot:
        return self.registry.snapshot

    def servers(self) -> set[NodeId]:
        return {candidate.node for candidate in self.snapshot.models[MODEL] if candidate.is_ready}


VERIFIER = Verifier(
    is_envelope_genuine=lambda envelope: is_envelope_genuine(SWARM, envelope),
    is_vote_genuine=lambda given: is_vote_genuine(SWARM, given),
    check_certificate=lambda node, given, unix_s: check_certificate(
        given, node=node, swarm=SWARM, ca=CA.public, now=unix_s
    ),
    ca=CA.public,
)
BOTH = {VICTIM.public, MALLORY.public}


FORGERIES = {
    "leave": record(VICTIM.public, MALLORY, certificate(VICTIM), state=SessionState.LEFT, version=2),
    "drain": record(VICTIM.public, MALLORY, certificate(VICTIM), state=SessionState.DRAIN, version=2),
    "other services": record(VICTIM.public, MALLORY, certificate(MALLORY), version=2),
    "replayed from another swarm": record(VICTIM.public, VICTIM, certificate(VICTIM), version=2, swarm=OTHER_SWARM),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_record_of_another_key_changes_nothing(forgery):
    replica = Replica()
    before = replica.map.node(VICTIM.public)
    assert replica.take(FORGERIES[forgery]) is Outcome.BAD_SIGNATURE
    assert replica.map.node(VICTIM.public) is before
    assert replica.snapshot.members[VICTIM.public].status is Status.SERVING
    assert replica.servers() == BOTH


def test_own_old_record_replayed_changes_nothing():
    replica = Replica()
    proof = certificate(VICTIM)
    assert replica.take(record(VICTIM.public, VICTIM, proof, state=SessionState.LEFT, version=2)) is Outcome.NEW
    assert replica.take(record(VICTIM.public, VICTIM, proof)) is Outcome.DUPLICATE
    assert replica.servers() == {MALLORY.public}


HIJACKS = {
    "no certificate": None,
    "a copy of the victim's": certificate(VICTIM),
    "by a CA of her own": certificate(EVE, by=issuer(ca=EVES_CA)),
    "of another swarm": certificate(EVE, by=issuer(swarm=OTHER_SWARM)),
    "with a role added": msgspec.structs.replace(certificate(EVE, roles=("ingress",)), roles=("ingress", "worker")),
    "of a provider that she made up": msgspec.structs.replace(
        certificate(EVE), chain=msgspec.structs.replace(issuer().certificate, provider="cscs")
    ),
}


@pytest.mark.parametrize("proof", HIJACKS)
def test_model_name_is_not_hijacked_without_a_certificate_of_her_own(proof):
    replica = Replica()
    assert replica.take(record(EVE.public, EVE, HIJACKS[proof])) is Outcome.REFUSED
    assert EVE.public not in replica.snapshot.members
    assert replica.servers() == BOTH


def test_member_whose_certificate_lets_it_be_an_ingress_only_serves_no_model():
    replica = Replica()
    assert replica.take(record(EVE.public, EVE, certificate(EVE, roles=("ingress",)))) is Outcome.NEW
    assert replica.snapshot.members[EVE.public].roles == ("ingress",)
    assert replica.servers() == BOTH


def test_certificate_that_a_later_record_brings_is_checked_as_the_first():
    replica = Replica()
    promoted = msgspec.structs.replace(certificate(MALLORY), roles=("worker", "hub"))
    assert replica.take(record(MALLORY.public, MALLORY, promoted, version=2)) is Outcome.REFUSED
    assert replica.snapshot.members[MALLORY.public].roles == ("worker",)


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        (vote(EVE), Outcome.REFUSED),
        (vote(VICTIM), Outcome.REFUSED),
        (vote(MALLORY, swarm=OTHER_SWARM), Outcome.BAD_SIGNATURE),
        (
            encode(msgspec.structs.replace(msgspec.msgpack.decode(vote(EVE), type=Vote), observer=MALLORY.public)),
            Outcome.BAD_SIGNATURE,
        ),
    ],
    ids=["by no member", "by the victim itself", "from another swarm", "in a member's name"],
)
def test_vote_that_is_no_member_s_own_does_not_count(given, outcome):
    replica = Replica()
    assert replica.take(votes=(given,)) is outcome
    assert replica.map.node(VICTIM.public).votes == ()
    assert replica.snapshot.members[VICTIM.public].status is Status.SERVING


def test_one_member_does_not_end_another_however_often_it_votes():
    replica = Replica()
    for kind in (VoteKind.SUSPECT, VoteKind.DOWN):
        for _ in range(5):
            replica.take(votes=(vote(MALLORY, kind=kind),))
    assert replica.snapshot.members[VICTIM.public].status is Status.SUSPECT


def test_link_that_brings_forgeries_is_cut_and_stays_so():
    signer = Signer(lambda envelope: sign_envelope(OBSERVER, SWARM, envelope), lambda v: sign_vote(OBSERVER, SWARM, v))
    core = GossipCore(OBSERVER.public, VERIFIER, signer, now=0.0, unix_s=NOW)

    def send(*frames: object) -> list[object]:
        data = b"".join(encode_frame(frame) for frame in frames)
        return [
            effect for payload in FrameCutter().feed(data) for effect in core.handle(FrameReceived(link, payload), 0.0)
        ]

    link = LinkId(1)
    core.handle(LinkUp(link, MALLORY.public, is_ours=False), 0.0)
    genuine = Delta((record(VICTIM.public, VICTIM, certificate(VICTIM)),))
    send(Hello(1, 1, 1), Records((genuine,)))
    effects = send(Records(tuple(Delta((FORGERIES["leave"],)) for _ in range(MAX_STRIKES))))
    assert Close(link, MALLORY.public, "bad facts") in effects
    assert core.map.node(VICTIM.public).status is Status.SERVING
    again = core.handle(LinkUp(LinkId(2), MALLORY.public, is_ours=False), 1.0)
    assert again == [Close(LinkId(2), MALLORY.public, "muted")]


class Call:
    """A request from the mesh that must not get through."""

    def __init__(self, peer: KeyPair, claim: Claim, method: str = "POST", target: str = "/v1/completions") -> None:
        self.peer = peer.public
        self.head = RequestHead(claim, 0, "r", 0.0, method, target, ())
        self.error: ErrorFrame | None = None

    async def fail(self, error: ErrorFrame) -> None:
        await trio.lowlevel.checkpoint()
        self.error = error


def claim(signer: KeyPair, ingress: KeyPair | None = None, swarm: SwarmId = SWARM, organisation: str = "eth") -> Claim:
    unsigned = Claim(signer.public, SESSION, "key", organisation, NOW, NOW + 60)
    return msgspec.structs.replace(sign_claim(signer, swarm, unsigned), ingress=(ingress or signer).public)


CALLS = {
    "claim of another ingress": (Call(MALLORY, claim(VICTIM)), "another ingress"),
    "claim in another's name": (Call(MALLORY, claim(MALLORY, ingress=VICTIM)), "another ingress"),
    "claim with another's signature": (Call(MALLORY, claim(VICTIM, ingress=MALLORY)), "signature"),
    "claim of another organisation": (
        Call(MALLORY, msgspec.structs.replace(claim(MALLORY), organisation="mit")),
        "signature",
    ),
    "claim from another swarm": (Call(MALLORY, claim(MALLORY, swarm=OTHER_SWARM)), "signature"),
    "remote leave": (Call(MALLORY, claim(MALLORY), target="/leave"), "not forwarded"),
    "remote revocation": (Call(MALLORY, claim(MALLORY), target="/revocations"), "not forwarded"),
    "remote delete": (Call(MALLORY, claim(MALLORY), method="DELETE", target="/v1/completions"), "not forwarded"),
    "a foreign host": (Call(MALLORY, claim(MALLORY), target="http://169.254.169.254/v1/completions"), "not forwarded"),
}


@pytest.mark.parametrize("attack", CALLS)
async def test_gate_refuses_spoofed_callers_and_remote_administration(attack):
    def reached(_instance: int) -> None:
        raise AssertionError("the gate looked for an engine")

    call, words = CALLS[attack]
    gate = Gate(endpoint_of=reached, is_genuine=lambda given: is_claim_genuine(SWARM, given), now=lambda: NOW)
    await gate.handle(call)  # type: ignore[arg-type]
    assert (call.error.code, call.error.is_accepted) == ("refused", False)
    assert words in call.error.message


async def test_mesh_serves_few_protocols_and_none_of_them_administers(tmp_path, monkeypatch):
    """What a peer can open on a whole worker: admission and identify, and for members gossip, inference, dial-back,
    calls through a hub and meeting behind NATs. The admin socket is not among them."""
    token = issuer().token(zone="z", region="r", roles=("worker",), now=NOW, expires_s=3600, uses=1)
    monkeypatch.setenv("TELA_RUNTIME_DIR", str(tmp_path))
    async with open_mesh(MALLORY, []) as mesh, trio.open_nursery() as nursery:
        address = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id(VICTIM.public)}"
        line = render_invite(Invite(SWARM, CA.public, (address,), token))
        flags = {"state_dir": tmp_path, "engine__port": 1}
        options = build_options(Role.WORKER, line, flags, is_hub=False, argv=("vllm", "serve", MODEL))
        node = Node(options, MALLORY, mesh, nursery, known=NOBODY_KNOWN, hubs=set())
        await nursery.start(node._admission.serve)
        members_only = {GOSSIP_PROTOCOL, HTTP_PROTOCOL, REACH_PROTOCOL, STOP_PROTOCOL, PUNCH_PROTOCOL}
        assert set(mesh._handlers) == {ADMISSION_PROTOCOL, IDENTIFY_PROTOCOL, *members_only}
        nursery.cancel_scope.cancel()
