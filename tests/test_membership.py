"""What a daemon can prove when it starts, after what was taken back, and what it keeps of a renewal."""

from __future__ import annotations

import stat

import msgspec
import pytest
import trio

from tela.cli.join import build_options
from tela.errors import ConfigError, IntegrityError, RefusedError
from tela.identity import Certificate, Issuer, KeyPair, issue_issuer, write_secret
from tela.membership import certificate_file, load_membership, revocations_file
from tela.net.invite import Invite, render_invite
from tela.net.known_peers import KnownPeers
from tela.net.libp2p import open_mesh
from tela.net.multiaddrs import peer_id
from tela.node import Node
from tela.record import Role, SessionState, SwarmId
from tela.revocation import NOTHING_REVOKED, Revocations, RevokedKind, revoke
from tela.swarm import create_swarm
from tela.wire import encode
from tests.lab.meshes import wait_until

NOW = 1_800_000_000
NOBODY_KNOWN = KnownPeers(None, now=lambda: float(NOW))
SWARM = SwarmId(b"s" * 16)
CA, ISSUING, KEY, HUB, SECOND_HUB = (KeyPair(bytes([n]) * 32) for n in range(1, 6))
ISSUER = Issuer(ISSUING, issue_issuer(CA, swarm=SWARM, issuer=ISSUING.public, provider="eth", now=NOW, days=365))
TOKEN = ISSUER.token(zone="euler", region="ch", roles=("worker",), now=NOW, expires_s=86_400, uses=1)
CERTIFICATE = ISSUER.admit(TOKEN, KEY.public, NOW)
HUB_ADDRESS, SECOND_HUB_ADDRESS = (f"/ip4/127.0.0.1/tcp/4001/p2p/{peer_id(key.public)}" for key in (HUB, SECOND_HUB))


@pytest.fixture
def options(tmp_path, monkeypatch):
    """A worker's options, and nothing kept yet."""
    monkeypatch.setenv("TELA_RUNTIME_DIR", str(tmp_path / "run"))
    line = render_invite(Invite(SWARM, CA.public, (HUB_ADDRESS, SECOND_HUB_ADDRESS), TOKEN))
    flags = {"state_dir": tmp_path / "state", "engine__port": 1}
    return build_options(Role.WORKER, line, flags, is_hub=False, argv=("vllm", "serve", "m"))


def listing(kind: RevokedKind, revoked_id: bytes, *, swarm: SwarmId = SWARM, ca: KeyPair = CA) -> Revocations:
    return revoke(ca, swarm, NOTHING_REVOKED, [(kind, revoked_id)], now=NOW)


def keep(options, revoked: Revocations, certificate: Certificate | None = CERTIFICATE) -> None:
    write_secret(revocations_file(options.paths), revoked.raw)
    if certificate is not None:
        write_secret(certificate_file(options.paths), encode(certificate))


def test_kept_list_is_in_force_from_the_start(options):
    other = listing(RevokedKind.NODE, HUB.public)
    keep(options, other)
    membership = load_membership(options, KEY, now=NOW)
    assert (membership.revoked, membership.certificate) == (other, CERTIFICATE)


def test_revoked_node_does_not_start(options):
    keep(options, listing(RevokedKind.NODE, KEY.public))
    with pytest.raises(RefusedError) as caught:
        load_membership(options, KEY, now=NOW)
    assert (caught.value.code, caught.value.exit_code) == ("revoked", 5)


def test_certificate_of_a_revoked_issuer_is_not_presented_so_that_a_new_invite_can_help(options):
    keep(options, listing(RevokedKind.ISSUER, ISSUING.public))
    membership = load_membership(options, KEY, now=NOW)
    assert (membership.certificate, membership.token) == (None, TOKEN)


def test_list_of_a_former_swarm_is_ignored_and_a_damaged_one_named(options):
    keep(options, listing(RevokedKind.NODE, KEY.public, swarm=SwarmId(bytes(16)), ca=HUB))
    assert load_membership(options, KEY, now=NOW).revoked == NOTHING_REVOKED
    revocations_file(options.paths).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="revocations"):
        load_membership(options, KEY, now=NOW)


def test_list_that_was_signed_while_no_daemon_ran_is_found_in_the_swarm_s_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TELA_RUNTIME_DIR", str(tmp_path / "run"))
    made = create_swarm(tmp_path, "lab", provider="eth", now=NOW)
    token = made.issuer("eth").token(zone="z", region="r", roles=("hub",), now=NOW, expires_s=60, uses=1)
    line = render_invite(Invite(made.swarm, made.ca, (), token))
    options = build_options(Role.HUB, line, {"state_dir": tmp_path}, is_hub=True, argv=())
    first = load_membership(options, KEY, now=NOW)
    assert first.certificate is not None
    signed = made.revoke([(RevokedKind.NODE, HUB.public)], [], now=NOW)
    assert load_membership(options, KEY, now=NOW).revoked == signed
    made.revoke([(RevokedKind.TOKEN, token.token_id)], [], now=NOW)
    with pytest.raises(RefusedError, match="revoked the invite"):
        load_membership(options, KEY, now=NOW)


def test_invite_whose_hubs_were_all_revoked_is_refused(options):
    keep(
        options, revoke(CA, SWARM, NOTHING_REVOKED, [(RevokedKind.NODE, h.public) for h in (HUB, SECOND_HUB)], now=NOW)
    )
    with pytest.raises(RefusedError, match="every hub"):
        load_membership(options, KEY, now=NOW)


async def test_revoked_hub_of_the_invite_is_dialled_no_more(options):
    keep(options, listing(RevokedKind.NODE, HUB.public))
    async with open_mesh(KEY, []) as mesh, trio.open_nursery() as nursery:
        node = Node(options, KEY, mesh, nursery, known=NOBODY_KNOWN, hubs=set())
        assert set(node._targets.links()) == {SECOND_HUB.public}
        nursery.cancel_scope.cancel()


async def test_renewed_certificate_is_kept_and_published(options, monkeypatch):
    monkeypatch.setattr("tela.node._unix_s", lambda: float(NOW))
    keep(options, listing(RevokedKind.NODE, HUB.public))
    renewed = ISSUER.renew(CERTIFICATE, NOW + 5)
    async with open_mesh(KEY, []) as mesh, trio.open_nursery() as nursery:
        node = Node(options, KEY, mesh, nursery, known=NOBODY_KNOWN, hubs=set())
        await nursery.start(node._gossip.serve)
        node._keep_certificate(CERTIFICATE)  # the first one comes before the node has anything to say
        assert node._gossip.session == 0
        node._enter(SessionState.SERVING)
        await wait_until(lambda: _is_published(node, CERTIFICATE))
        node._admission._take_certificate(renewed)
        await wait_until(lambda: _is_published(node, renewed))
        assert certificate_file(options.paths).read_bytes() == encode(renewed)
        assert stat.S_IMODE(certificate_file(options.paths).stat().st_mode) == 0o600
        nursery.cancel_scope.cancel()


async def test_address_that_is_verified_while_the_first_word_is_on_its_way_is_published(options, monkeypatch):
    """Gossip takes words from a mailbox: the session began after we spoke, and what changed in between was lost."""
    monkeypatch.setattr("tela.node._unix_s", lambda: float(NOW))
    keep(options, listing(RevokedKind.NODE, HUB.public))
    async with open_mesh(KEY, []) as mesh, trio.open_nursery() as nursery:
        node = Node(options, KEY, mesh, nursery, known=NOBODY_KNOWN, hubs=set())
        await nursery.start(node._gossip.serve)
        node._keep_certificate(CERTIFICATE)
        node._admission._take_certificate(CERTIFICATE)
        node._enter(SessionState.SERVING)
        assert node._gossip.session == 0
        node._base_url = "http://127.0.0.1:1/v1"  # anything that the card tells
        node._publish_again()
        await wait_until(lambda: node._gossip.session)
        await wait_until(lambda: node._gossip.snapshot.members[KEY.public].card.http_url == node._base_url)
        nursery.cancel_scope.cancel()


async def test_node_that_finds_itself_revoked_relays_for_a_moment_and_ends(options, monkeypatch, autojump_clock):
    monkeypatch.setattr("tela.node._unix_s", lambda: float(NOW))
    keep(options, listing(RevokedKind.NODE, HUB.public))
    async with open_mesh(KEY, []) as mesh, trio.open_nursery() as nursery:
        node = Node(options, KEY, mesh, nursery, known=NOBODY_KNOWN, hubs=set())
        await nursery.start(node._gossip.serve)
        later = revoke(CA, SWARM, listing(RevokedKind.NODE, HUB.public), [(RevokedKind.NODE, KEY.public)], now=NOW)
        with pytest.raises(IntegrityError):
            await node.revoke(listing(RevokedKind.NODE, KEY.public, ca=HUB).raw)
        await node.revoke(later.raw)
        await wait_until(lambda: node.revocations() == later.raw)
        assert not node._ended.is_set()
        with trio.fail_after(5.0):
            await node._ended.wait()
        assert (node._exit_code, node._failure.code) == (5, "revoked")
        assert revocations_file(options.paths).read_bytes() == later.raw
        nursery.cancel_scope.cancel()


def _is_published(node: Node, certificate: Certificate) -> bool:
    """Whether our own registry shows it; its signature is in the record alone."""
    member = node._gossip.snapshot.members.get(KEY.public)
    return member is not None and member.certificate == msgspec.structs.replace(certificate, signature=b"")
