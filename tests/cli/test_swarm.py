import json
import stat

import pytest

from tela.cli.main import run
from tela.identity import KeyPair, check_token
from tela.net.invite import parse_invite
from tela.net.multiaddrs import peer_id
from tests.cli.conftest import serving
from tests.lab.backend import FakeBackend

HUB = f"/ip4/192.0.2.1/tcp/4001/p2p/{peer_id(KeyPair(bytes(32)).public)}"


def invite_of(capsys, *arguments):
    assert run(arguments) == 0
    return parse_invite(capsys.readouterr().out)


def test_swarm_init_prints_the_first_hubs_invite_and_nothing_else(tmp_path, capsys):
    assert run(["swarm", "init", "--provider", "eth", "--zone", "euler", "--region", "ch"]) == 0
    output = capsys.readouterr()
    invite = parse_invite(output.out)
    assert len(output.out.splitlines()) == 1
    assert invite.hubs == ()
    token = invite.token
    assert (token.chain.provider, token.zone, token.region, token.uses) == ("eth", "euler", "ch", 1)
    assert set(token.roles) == {"hub", "ingress", "worker"}
    check_token(token, swarm=invite.swarm, ca=invite.ca, now=token.not_before_unix_s + 1000)
    assert "next: " in output.err
    assert stat.S_IMODE((tmp_path / "state/swarms/default/ca.key").stat().st_mode) == 0o600


def test_swarm_init_twice_changes_nothing(capsys):
    assert run(["swarm", "init"]) == 0
    assert run(["swarm", "init"]) == 2
    assert "--name" in capsys.readouterr().err
    assert run(["swarm", "init", "--name", "second"]) == 0


def test_json_holds_the_invite(capsys):
    assert run(["swarm", "init", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["name"] == "default"
    assert parse_invite(facts["invite"]).swarm.hex().startswith(facts["swarm"])
    assert run(["invite", "create", "--json", "--hub-address", HUB]) == 0
    assert parse_invite(json.loads(capsys.readouterr().out)["invite"]).hubs == (HUB,)


def test_invite_create_says_what_it_was_told(capsys):
    first = invite_of(capsys, "swarm", "init", "--provider", "eth")
    where = ["--provider", "eth", "--zone", "euler", "--region", "ch", "--roles", "worker,ingress"]
    limits = f"--expires 12h --uses 3 --hub-address {HUB}".split()
    invite = invite_of(capsys, "invite", "create", *where, *limits)
    token = invite.token
    assert (invite.swarm, invite.ca, invite.hubs) == (first.swarm, first.ca, (HUB,))
    assert (token.zone, token.region, token.roles, token.uses) == ("euler", "ch", ("worker", "ingress"), 3)
    assert 12 * 3600 <= token.expires_unix_s - token.not_before_unix_s <= 13 * 3600


def test_invite_create_asks_running_daemons_of_the_swarm_for_hubs(place, capsys):
    first = invite_of(capsys, "swarm", "init")
    ours = FakeBackend("ours", swarm=first.swarm[:4].hex())
    other = FakeBackend("other", swarm="ffffffff")
    ours.hubs, other.hubs = (HUB,), (HUB.replace("192.0.2.1", "192.0.2.66"),)
    with serving(place, ours, other):
        assert invite_of(capsys, "invite", "create").hubs == (HUB,)
        ours.hubs = ()
        assert run(["invite", "create"]) == 3
    error = capsys.readouterr().err
    assert "knows a hub of this swarm" in error
    assert "--hub-address" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hub-address", "192.0.2.1:4001"], "malformed address"),
        (["--hub-address", HUB, "--roles", "worker,king"], "king"),
        (["--hub-address", HUB, "--roles", ""], "Role"),
        (["--hub-address", HUB, "--provider", "mit"], "tela provider add mit"),
        (["--hub-address", HUB, "--swarm", "other"], "no swarm other"),
        (["--hub-address", HUB, "--expires", "soon"], "is no duration"),
    ],
)
def test_invite_create_with_a_bad_value_tells_which(arguments, words, capsys):
    run(["swarm", "init"])
    capsys.readouterr()
    assert run(["invite", "create", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert words in output.err


def test_invite_create_without_a_swarm_says_how_to_make_one(capsys):
    assert run(["invite", "create", "--hub-address", HUB]) == 2
    assert "tela swarm init" in capsys.readouterr().err


def test_added_provider_can_invite_and_must_be_named(capsys):
    run(["swarm", "init", "--provider", "eth"])
    assert run(["provider", "add", "mit"]) == 0
    capsys.readouterr()
    assert run(["invite", "create", "--hub-address", HUB]) == 2
    assert "--provider: eth, mit" in capsys.readouterr().err
    invite = invite_of(capsys, "invite", "create", "--provider", "mit", "--hub-address", HUB)
    assert invite.token.chain.provider == "mit"


def test_init_with_a_shared_key_warns_and_gives_the_same_swarm(tmp_path, capsys):
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4 + "\n")
    found = []
    for place in ("a", "b"):
        assert run(["swarm", "init", "--shared-key", str(secret), "--state-dir", str(tmp_path / place), "--json"]) == 0
        output = capsys.readouterr()
        assert "for development" in output.err
        found.append(json.loads(output.out)["swarm"])
    assert found[0] == found[1]
    secret.write_text(" \n")
    assert run(["swarm", "init", "--shared-key", str(secret), "--state-dir", str(tmp_path / "c")]) == 2
    assert "openssl rand" in capsys.readouterr().err
