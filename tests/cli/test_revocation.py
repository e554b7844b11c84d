"""Taking back from the command line: what is signed, where it is kept, who is told, what people see of it."""

import json

import pytest

from tela.cli.main import run
from tela.identity import KeyPair
from tela.net.admission import TokenUses
from tela.net.invite import parse_invite
from tela.net.multiaddrs import peer_id
from tela.revocation import MAX_REVOKED, NOTHING_REVOKED, RevokedKind, read_revocations, revoke
from tela.swarm import choose_swarm
from tests.cli.conftest import serving
from tests.lab.backend import FakeBackend

NODE, OTHER = KeyPair(b"\x01" * 32).public, KeyPair(b"\x02" * 32).public
HUB = f"/ip4/192.0.2.1/tcp/4001/p2p/{peer_id(OTHER)}"


@pytest.fixture
def swarm(tmp_path, capsys):
    """A swarm of two providers whose keys are here."""
    assert run(["swarm", "init", "--provider", "eth"]) == 0
    assert run(["provider", "add", "mit"]) == 0
    capsys.readouterr()
    return choose_swarm(tmp_path / "state", None)


@pytest.fixture
def hub(place, swarm):
    """A running daemon of the swarm."""
    backend = FakeBackend("hub", swarm=swarm.swarm[:4].hex(), keys=(NODE, OTHER))
    with serving(place, backend):
        yield backend


def create_invite(capsys, *options):
    assert run(["invite", "create", "--provider", "eth", "--hub-address", HUB, *options]) == 0
    return parse_invite(capsys.readouterr().out).token


def answer(capsys, *arguments):
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def taken(backend, swarm):
    return read_revocations(backend.revoked, swarm=swarm.swarm, ca=swarm.ca)


def ids(revoked):
    return [(item.kind, item.id) for item in revoked.items]


@pytest.mark.parametrize("digits", [8, 20, 64])
def test_swarm_revoke_signs_keeps_and_hands_over(hub, swarm, capsys, digits):
    assert run(["swarm", "revoke", NODE.hex()[:digits]]) == 0
    assert capsys.readouterr().out == f"revoked node {NODE.hex()[:8]} in swarm default\n"
    assert ids(taken(hub, swarm)) == [(RevokedKind.NODE, NODE)]
    assert swarm.revocations() == taken(hub, swarm)
    assert (swarm.directory / "revocations").stat().st_mode & 0o777 == 0o600


def test_invite_revoke_and_provider_revoke_join_the_same_list(hub, swarm, capsys):
    token = create_invite(capsys)
    issuer = swarm.issuer("mit").certificate.issuer
    assert answer(capsys, "invite", "revoke", token.token_id.hex()[:8])["invite"] == token.token_id.hex()
    assert answer(capsys, "provider", "revoke", "mit") == {"provider": "mit", "issuer": issuer.hex(), "n_revoked": 2}
    assert ids(taken(hub, swarm)) == [(RevokedKind.TOKEN, token.token_id), (RevokedKind.ISSUER, issuer)]
    assert taken(hub, swarm).version == 2


def test_list_that_a_daemon_knows_and_this_host_does_not_is_added_to(hub, swarm, capsys):
    ca = KeyPair((swarm.directory / "ca.key").read_bytes())
    elsewhere = revoke(ca, swarm.swarm, NOTHING_REVOKED, [(RevokedKind.NODE, OTHER)], now=5)
    hub.revoked = elsewhere.raw
    assert run(["swarm", "revoke", NODE.hex()]) == 0
    assert ids(taken(hub, swarm)) == [(RevokedKind.NODE, OTHER), (RevokedKind.NODE, NODE)]


def test_daemon_of_another_swarm_is_told_nothing(place, hub, swarm, capsys):
    other = FakeBackend("other", swarm="ffffffff")
    with serving(place, other):
        assert run(["swarm", "revoke", NODE.hex()]) == 0
    assert (bool(hub.revoked), other.revoked) == (True, b"")


def test_without_a_daemon_the_list_is_kept_and_the_command_says_so(swarm, capsys):
    assert run(["swarm", "revoke", NODE.hex()]) == 3
    error = capsys.readouterr().err
    assert "no daemon of the swarm runs here" in error
    assert "start one on this host" in error
    assert ids(swarm.revocations()) == [(RevokedKind.NODE, NODE)]


def test_revoked_provider_can_invite_no_more_and_gets_a_new_key(hub, swarm, capsys):
    old = swarm.issuer("mit").certificate.issuer
    assert run(["provider", "revoke", "mit"]) == 0
    assert not (swarm.directory / "issuers" / "mit.key").exists()
    assert run(["invite", "create", "--provider", "mit", "--hub-address", HUB]) == 2
    assert run(["provider", "revoke", "mit"]) == 2
    assert run(["provider", "add", "mit"]) == 0
    capsys.readouterr()
    states = [(each["provider"], each["state"], each["is_here"]) for each in _providers(capsys)]
    assert states == [("eth", "good", True), ("mit", "good", True), ("mit", "revoked", False)]
    assert swarm.issuer("mit").certificate.issuer != old
    assert run(["provider", "list"]) == 0
    assert old[:4].hex() in capsys.readouterr().out


def _providers(capsys):
    return answer(capsys, "provider", "list")["providers"]


def test_provider_whose_key_is_on_another_host_can_be_revoked(hub, swarm, capsys):
    issuer = swarm.issuer("mit").certificate.issuer
    (swarm.directory / "issuers" / "mit.key").unlink()
    assert [(each["provider"], each["is_here"]) for each in _providers(capsys)] == [("eth", True), ("mit", False)]
    assert run(["provider", "add", "mit"]) == 2  # its certificate must not be lost: it names what to revoke
    assert run(["provider", "revoke", "mit"]) == 0
    assert ids(taken(hub, swarm)) == [(RevokedKind.ISSUER, issuer)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["swarm", "revoke", "w1"], "is no node"),
        (["swarm", "revoke", "abc"], "8 to 64 hex digits"),
        (["swarm", "revoke", "f" * 65], "is no node"),
        (["swarm", "revoke", "00000000"], "give all 64 digits"),
        (["invite", "revoke", "00000000"], "give all 16 digits"),
        (["provider", "revoke", "cscs"], "tela provider list"),
    ],
)
def test_what_is_not_known_here_must_be_named_whole(hub, arguments, words, capsys):
    assert run(arguments) == 2
    output = capsys.readouterr()
    assert words in output.err
    assert (output.out, hub.revoked) == ("", b"")


def test_digits_that_several_nodes_share_are_refused_with_their_names(place, swarm, capsys):
    twins = (NODE, NODE[:4] + OTHER[4:])
    with serving(place, FakeBackend("hub", swarm=swarm.swarm[:4].hex(), keys=twins)):
        assert run(["swarm", "revoke", NODE.hex()[:8]]) == 2
        error = capsys.readouterr().err
        assert all(twin.hex() in error for twin in twins)


def test_without_the_ca_key_nothing_is_revoked(hub, swarm, capsys):
    (swarm.directory / "ca.key").unlink()
    assert run(["swarm", "revoke", NODE.hex()]) == 2
    assert "ca.key" in capsys.readouterr().err
    assert hub.revoked == b""


def test_full_list_says_what_to_do(hub, swarm, capsys):
    ca = KeyPair((swarm.directory / "ca.key").read_bytes())
    many = [(RevokedKind.NODE, number.to_bytes(32, "big")) for number in range(MAX_REVOKED)]
    hub.revoked = revoke(ca, swarm.swarm, NOTHING_REVOKED, many, now=5).raw
    assert run(["swarm", "revoke", NODE.hex()]) == 2
    error = capsys.readouterr().err
    assert f"full: {MAX_REVOKED} of {MAX_REVOKED}" in error
    assert "tela provider revoke" in error


def test_invite_list_shows_uses_and_states(hub, swarm, capsys, tmp_path):
    good, used_up, over, revoked = (
        create_invite(capsys, *options.split())
        for options in ("--uses 3 --zone euler", "--uses 1", "--expires 0", "--roles worker,ingress")
    )
    for hub_name, token, node in (
        ("hub", good, NODE),
        ("hub2", good, NODE),
        ("hub2", good, OTHER),
        ("hub", used_up, NODE),
    ):
        TokenUses(tmp_path / "state" / "nodes" / hub_name / "token-uses.json").add(token, node)
    assert run(["invite", "revoke", revoked.token_id.hex()]) == 0
    capsys.readouterr()
    listed = {each["id"]: each for each in answer(capsys, "invite", "list")["invites"]}
    shown = {token_id: (each["n_used"], each["uses"], each["state"]) for token_id, each in listed.items()}
    assert shown[good.token_id.hex()] == (2, 3, "good")
    assert shown[used_up.token_id.hex()] == (1, 1, "used up")
    assert shown[revoked.token_id.hex()] == (0, 100, "revoked")
    assert listed[good.token_id.hex()]["zone"] == "euler"
    assert listed[revoked.token_id.hex()]["roles"] == ["worker", "ingress"]
    assert run(["invite", "list"]) == 0
    text = capsys.readouterr().out
    assert "2/3" in text
    assert all(token.signature.hex() not in text for token in (good, used_up, over, revoked))


def test_revoked_node_s_invite_is_pointed_at_while_it_lasts(hub, swarm, capsys, tmp_path):
    token = create_invite(capsys)
    TokenUses(tmp_path / "state" / "nodes" / "hub" / "token-uses.json").add(token, NODE)
    assert run(["swarm", "revoke", NODE.hex()]) == 0
    hint = f"tela invite revoke {token.token_id.hex()}"
    assert hint in capsys.readouterr().err
    assert run(["invite", "revoke", token.token_id.hex()]) == 0
    assert run(["swarm", "revoke", NODE.hex()]) == 0
    assert hint not in capsys.readouterr().err


def test_swarm_show_tells_all_but_secrets(hub, swarm, capsys):
    assert run(["swarm", "revoke", NODE.hex()]) == 0
    capsys.readouterr()
    facts = answer(capsys, "swarm", "show")
    assert (facts["name"], facts["swarm"], facts["ca"]) == ("default", swarm.swarm.hex(), swarm.ca.hex())
    assert (facts["providers"], facts["has_ca_key"], facts["n_invites"]) == (["eth", "mit"], True, 1)
    assert [(each["kind"], each["id"]) for each in facts["revoked"]] == [("node", NODE.hex())]
    assert run(["swarm", "show"]) == 0
    text = capsys.readouterr().out
    assert f"1 of at most {MAX_REVOKED}" in text
    assert NODE.hex() in text
    secrets = [path.read_bytes().hex() for path in swarm.directory.rglob("*.key")]
    assert not any(secret in text + json.dumps(facts) for secret in secrets)


def test_daemon_that_refuses_the_list_is_named(place, swarm, capsys):
    backend = FakeBackend("hub", swarm=swarm.swarm[:4].hex(), keys=(NODE,))
    backend.is_refusing = True
    with serving(place, backend):
        assert run(["swarm", "revoke", NODE.hex()]) == 3
    assert "400 to POST /revocations: no list" in capsys.readouterr().err


def test_rotation_is_told_listed_and_ended_by_revoking_the_keys_before(hub, swarm, capsys):
    before = swarm.issuer("eth").certificate.issuer
    assert answer(capsys, "swarm", "rotate", "--provider", "eth") == {"swarm": "default", "rotated": ["eth"]}
    states = {each["issuer"]: each["state"] for each in answer(capsys, "provider", "list")["providers"]}
    assert states[before.hex()] == "outgoing"
    assert sorted(states.values()) == ["good", "good", "outgoing"]
    assert create_invite(capsys).chain.issuer != before
    assert hub.revoked == b""
    assert run(["swarm", "rotate", "--finish"]) == 0
    assert capsys.readouterr().out == "ended the rotation of eth in swarm default\n"
    assert ids(taken(hub, swarm)) == [(RevokedKind.ISSUER, before)]
    assert "outgoing" not in {each["state"] for each in answer(capsys, "provider", "list")["providers"]}
    assert answer(capsys, "swarm", "rotate", "--finish") == {"swarm": "default", "finished": []}


def test_revoked_provider_loses_its_outgoing_key_too(hub, swarm, capsys):
    before = swarm.issuer("eth").certificate.issuer
    answer(capsys, "swarm", "rotate", "--provider", "eth")
    after = swarm.issuer("eth").certificate.issuer
    assert run(["provider", "revoke", "eth"]) == 0
    assert {one for _, one in ids(taken(hub, swarm))} == {before, after}
    assert not swarm.outgoing("eth")
