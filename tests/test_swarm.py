import stat

import pytest

from tela.errors import ConfigError, UsageError
from tela.identity import KeyPair, check_token
from tela.net.admission import VERSIONS, AdmissionRequest, Membership, decide, half_life_unix_s
from tela.record import SwarmId
from tela.swarm import choose_swarm, create_swarm, find_issuers, load_swarms

NOW = 1_800_000_000
KEY = KeyPair(bytes(32))


def token_of(issuer):
    return issuer.token(zone="z", region="r", roles=("worker",), now=NOW, expires_s=60, uses=1)


def test_created_swarm_can_be_loaded_and_issues_good_tokens(tmp_path):
    made = create_swarm(tmp_path, "lab", provider="eth", now=NOW)
    loaded = choose_swarm(tmp_path, None)
    assert loaded == made
    assert loaded.providers() == ["eth"]
    check_token(token_of(loaded.issuer("eth")), swarm=made.swarm, ca=made.ca, now=NOW)


def test_files_of_a_swarm_are_their_owners_alone(tmp_path):
    made = create_swarm(tmp_path, "lab", provider="eth", now=NOW)
    files = [path for path in made.directory.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert [path.name for path in (tmp_path / "swarms").iterdir()] == ["lab"]


def test_create_swarm_twice_keeps_the_first(tmp_path):
    made = create_swarm(tmp_path, "lab", provider="eth", now=NOW)
    with pytest.raises(UsageError, match="already"):
        create_swarm(tmp_path, "lab", provider="mit", now=NOW)
    assert load_swarms(tmp_path) == [made]


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden"])
def test_names_that_leave_the_directory_are_refused(tmp_path, name):
    with pytest.raises(UsageError):
        create_swarm(tmp_path, name, provider="eth", now=NOW)
    with pytest.raises(UsageError):
        create_swarm(tmp_path, "lab", provider=name, now=NOW)
    assert load_swarms(tmp_path) == []


def test_added_provider_issues_under_its_own_name(tmp_path):
    made = create_swarm(tmp_path, "lab", provider="eth.ch", now=NOW)
    made.add_provider("mit", now=NOW)
    assert made.providers() == ["eth.ch", "mit"]
    assert token_of(made.issuer("mit")).chain.provider == "mit"
    with pytest.raises(UsageError, match="already"):
        made.add_provider("mit", now=NOW)


def test_unknown_provider_names_those_that_are_here(tmp_path):
    made = create_swarm(tmp_path, "lab", provider="eth", now=NOW)
    with pytest.raises(UsageError) as error:
        made.issuer("mit")
    assert "eth" in error.value.hint


def test_add_provider_without_the_ca_key_says_so(tmp_path):
    made = create_swarm(tmp_path, "lab", provider="eth", now=NOW)
    (made.directory / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca\.key"):
        made.add_provider("mit", now=NOW)
    assert made.issuer("eth").certificate.provider == "eth"


def test_choose_swarm_among_several_needs_a_name(tmp_path):
    with pytest.raises(UsageError, match="no swarm was made here"):
        choose_swarm(tmp_path, None)
    create_swarm(tmp_path, "a", provider="eth", now=NOW)
    b = create_swarm(tmp_path, "b", provider="eth", now=NOW)
    with pytest.raises(UsageError) as error:
        choose_swarm(tmp_path, None)
    assert error.value.hint == "choose with --swarm: a, b"
    with pytest.raises(UsageError, match="no swarm c"):
        choose_swarm(tmp_path, "c")
    assert choose_swarm(tmp_path, "b") == b


def test_find_issuers_gives_those_of_the_swarm_only(tmp_path):
    made = create_swarm(tmp_path, "a", provider="eth", now=NOW)
    made.add_provider("mit", now=NOW)
    create_swarm(tmp_path, "b", provider="other", now=NOW)
    assert [issuer.certificate.provider for issuer in find_issuers(tmp_path, made.swarm)] == ["eth", "mit"]
    assert find_issuers(tmp_path, SwarmId(bytes(16))) == ()
    assert find_issuers(tmp_path / "none", made.swarm) == ()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"name": "a", "swarm": "zz", "ca": ""}'])
def test_damaged_swarm_is_named(tmp_path, content):
    made = create_swarm(tmp_path, "a", provider="eth", now=NOW)
    (made.directory / "swarm.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"swarm\.json"):
        load_swarms(tmp_path)


def test_damaged_issuer_is_named(tmp_path):
    made = create_swarm(tmp_path, "a", provider="eth", now=NOW)
    (made.directory / "issuers" / "eth.certificate").write_bytes(b"x")
    with pytest.raises(ConfigError, match="certificate of provider eth"):
        made.issuer("eth")


def test_rotation_keeps_the_key_before_until_it_is_ended(tmp_path):
    made = create_swarm(tmp_path, "lab", provider="eth", now=NOW)
    before = made.issuer("eth")
    after = made.rotate_provider("eth", now=NOW + 1)
    assert made.issuer("eth").certificate == after.certificate != before.certificate
    assert [issuer.certificate for issuer in find_issuers(tmp_path, made.swarm)] == [
        after.certificate,  # in front: members are renewed by it
        before.certificate,
    ]
    assert made.providers() == made.certified() == ["eth"]
    with pytest.raises(UsageError, match="not ended"):
        made.rotate_provider("eth", now=NOW + 2)
    made.end_rotation("eth")
    assert [issuer.certificate for issuer in find_issuers(tmp_path, made.swarm)] == [after.certificate]
    assert sorted(path.name for path in (made.directory / "issuers").iterdir()) == ["eth.certificate", "eth.key"]


def test_rotation_without_the_ca_key_moves_nothing(tmp_path):
    made = create_swarm(tmp_path, "lab", provider="eth", now=NOW)
    before = made.issuer("eth").certificate
    (made.directory / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca\.key"):
        made.rotate_provider("eth", now=NOW)
    assert made.issuer("eth").certificate == before


def test_rotated_hub_redeems_old_invites_and_renews_members_under_the_new_key(tmp_path):
    made = create_swarm(tmp_path, "lab", provider="eth", now=NOW)
    before = made.issuer("eth")
    member, key = before.admit(token_of(before), KEY.public, NOW), KEY
    after = made.rotate_provider("eth", now=NOW)
    hub = Membership(
        made.swarm, made.ca, KeyPair.generate(), certificate=member, issuers=find_issuers(tmp_path, made.swarm)
    )
    old_invite = AdmissionRequest(VERSIONS, made.swarm, token=token_of(before))
    reply, _ = decide(old_invite, key.public, hub, NOW, frozenset())
    assert (reply.code, reply.issued.chain) == ("", before.certificate)
    renewal = AdmissionRequest(VERSIONS, made.swarm, certificate=member, is_renewal=True)
    reply, _ = decide(renewal, key.public, hub, half_life_unix_s(member), frozenset())
    assert (reply.code, reply.issued.chain) == ("", after.certificate)


SHARED = b"s" * 32


def test_shared_key_makes_the_same_swarm_wherever_it_is_known(tmp_path):
    one = create_swarm(tmp_path / "a", "lab", provider="eth", now=NOW, shared=SHARED)
    other = create_swarm(tmp_path / "b", "lab", provider="eth", now=NOW + 99, shared=SHARED)
    assert (one.swarm, one.ca) == (other.swarm, other.ca)
    token = token_of(other.issuer("eth"))
    check_token(token, swarm=one.swarm, ca=one.ca, now=NOW + 99)
    assert token.chain.issuer == one.issuer("eth").certificate.issuer  # so each one's hub redeems the other's invites
    assert create_swarm(tmp_path / "c", "lab", provider="eth", now=NOW, shared=SHARED + b"!").ca != one.ca
    assert create_swarm(tmp_path / "d", "lab", provider="mit", now=NOW, shared=SHARED).issuer("mit").key.seed not in {
        one.issuer("eth").key.seed,
        SHARED,
    }


def test_swarms_without_a_shared_key_have_nothing_in_common(tmp_path):
    one, other = (create_swarm(tmp_path / name, "lab", provider="eth", now=NOW) for name in "ab")
    assert one.swarm != other.swarm
    assert one.ca != other.ca
    assert one.issuer("eth").key.seed != other.issuer("eth").key.seed


def test_shared_key_that_can_be_guessed_is_refused(tmp_path):
    with pytest.raises(UsageError, match="guessed"):
        create_swarm(tmp_path, "lab", provider="eth", now=NOW, shared=b"password")
    assert load_swarms(tmp_path) == []
