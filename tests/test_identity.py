"""Keys, and the chain CA → issuing key → token or certificate, with the ways to cheat of design/overlay.md 4."""

import stat

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.errors import ConfigError, IntegrityError, ProtocolError, RefusedError
from tela.identity import (
    CLOCK_SKEW_S,
    Issuer,
    KeyPair,
    check_certificate,
    check_token,
    decode_certificate,
    is_claim_genuine,
    is_envelope_genuine,
    is_signed_by,
    is_vote_genuine,
    issue_issuer,
    load_or_create_key,
    sign_claim,
    sign_envelope,
    sign_vote,
    write_secret,
)
from tela.record import Envelope, SessionId, SwarmId, Vote, VoteKind
from tela.wire import Claim, encode

NOW = 1_800_000_000
DAY_S = 86_400
SWARM = SwarmId(b"s" * 16)
CA, ISSUING, NODE, MALLORY = (KeyPair(bytes([n]) * 32) for n in range(1, 5))
ISSUER = Issuer(ISSUING, issue_issuer(CA, swarm=SWARM, issuer=ISSUING.public, provider="eth", now=NOW, days=365))
TOKEN = ISSUER.token(zone="euler", region="ch", roles=("worker",), now=NOW, expires_s=DAY_S, uses=1)
CERTIFICATE = ISSUER.admit(TOKEN, NODE.public, NOW)


def check(value, *, now=NOW, swarm=SWARM, ca=CA.public, node=NODE.public):
    if hasattr(value, "token_id"):
        check_token(value, swarm=swarm, ca=ca, now=now)
    else:
        check_certificate(value, node=node, swarm=swarm, ca=ca, now=now)


def forge(value, **changes):
    return msgspec.structs.replace(value, **changes)


def test_certificate_says_what_the_token_allowed():
    check(CERTIFICATE)
    assert CERTIFICATE.provider == "eth"
    assert (CERTIFICATE.zone, CERTIFICATE.region, CERTIFICATE.roles) == ("euler", "ch", ("worker",))
    assert CERTIFICATE.expires_unix_s == NOW + 30 * DAY_S
    assert decode_certificate(encode(CERTIFICATE)) == CERTIFICATE


def test_certificate_never_outlives_its_issuer():
    late = NOW + 364 * DAY_S
    assert ISSUER.admit(TOKEN, NODE.public, late).expires_unix_s == ISSUER.certificate.expires_unix_s


@pytest.mark.parametrize("value", [TOKEN, CERTIFICATE], ids=["token", "certificate"])
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"zone": "elsewhere"}, "zone"),
        ({"region": "us"}, "region"),
        ({"roles": ("worker", "hub")}, "roles"),
        ({"expires_unix_s": NOW + 9999 * DAY_S}, "expires"),
        ({"not_before_unix_s": 0}, "not before"),
        ({"signature": b""}, "no signature"),
        ({"signature": bytes(64)}, "zero signature"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_altered_value_is_tampered(value, changes, field):
    with pytest.raises(IntegrityError) as error:
        check(forge(value, **changes))
    assert error.value.code == "tampered"


@pytest.mark.parametrize("changes", [{"uses": 99}, {"token_id": b"other678"}, {"member_days": 9999}])
def test_altered_token_is_tampered(changes):
    with pytest.raises(IntegrityError):
        check(forge(TOKEN, **changes))


@pytest.mark.parametrize("value", [TOKEN, CERTIFICATE], ids=["token", "certificate"])
@pytest.mark.parametrize(
    "changes",
    [{"provider": "mit"}, {"issuer": MALLORY.public}, {"expires_unix_s": NOW + 9999 * DAY_S}, {"signature": bytes(64)}],
    ids=["provider", "issuer", "expires", "signature"],
)
def test_altered_chain_is_of_a_foreign_ca(value, changes):
    with pytest.raises(RefusedError) as error:
        check(forge(value, chain=forge(value.chain, **changes)))
    assert error.value.code == "foreign-ca"


def test_chain_of_another_swarm_ca_is_refused():
    chain = issue_issuer(MALLORY, swarm=SWARM, issuer=ISSUING.public, provider="eth", now=NOW, days=365)
    token = Issuer(ISSUING, chain).token(zone="z", region="r", roles=(), now=NOW, expires_s=DAY_S, uses=1)
    with pytest.raises(RefusedError) as error:
        check(token)
    assert error.value.code == "foreign-ca"


def test_token_signed_by_another_key_than_the_chains_is_tampered():
    token = Issuer(MALLORY, ISSUER.certificate).token(zone="z", region="r", roles=(), now=NOW, expires_s=DAY_S, uses=1)
    with pytest.raises(IntegrityError):
        check(token)


def test_certificate_presented_as_a_token_does_not_pass():
    """Prefixes keep the three kinds of signed values apart."""
    token = forge(TOKEN, signature=CERTIFICATE.signature)
    with pytest.raises(IntegrityError):
        check(token)


def test_value_for_another_swarm_is_refused():
    for value in (TOKEN, CERTIFICATE):
        with pytest.raises(RefusedError) as error:
            check(value, swarm=SwarmId(b"x" * 16))
        assert error.value.code == "foreign-swarm"


def test_certificate_of_another_node_is_refused():
    with pytest.raises(RefusedError) as error:
        check(CERTIFICATE, node=MALLORY.public)
    assert error.value.code == "foreign-key"


@pytest.mark.parametrize(
    ("at", "code"),
    [
        (NOW - 2 * CLOCK_SKEW_S - 1, "not-yet-valid"),
        (NOW - 2 * CLOCK_SKEW_S, None),
        (NOW + DAY_S + CLOCK_SKEW_S, None),
        (NOW + DAY_S + CLOCK_SKEW_S + 1, "expired"),
    ],
)
def test_token_is_good_between_its_times_give_or_take_the_skew(at, code):
    if code is None:
        check(TOKEN, now=at)
        return
    with pytest.raises(RefusedError) as error:
        check(TOKEN, now=at)
    assert error.value.code == code
    assert error.value.hint


def test_expired_issuer_is_refused_although_the_token_would_be_good():
    old = Issuer(ISSUING, issue_issuer(CA, swarm=SWARM, issuer=ISSUING.public, provider="eth", now=NOW, days=1))
    token = old.token(zone="z", region="r", roles=(), now=NOW, expires_s=99 * DAY_S, uses=1)
    with pytest.raises(RefusedError) as error:
        check(token, now=NOW + 2 * DAY_S)
    assert error.value.code == "expired"


@given(st.binary(max_size=200))
def test_decode_certificate_of_any_bytes_is_a_certificate_or_a_protocol_error(data):
    try:
        decode_certificate(data)
    except ProtocolError:
        pass


@pytest.mark.parametrize("public", [b"", b"short", bytes(32), b"\xff" * 32, bytes(33)])
def test_is_signed_by_malformed_key_is_false(public):
    assert not is_signed_by(public, NODE.sign(b"message"), b"message")


ENVELOPE = Envelope(1, NODE.public, SessionId(5), 7, b"body", b"")
VOTE = Vote(NODE.public, MALLORY.public, SessionId(5), 1, VoteKind.DOWN, NOW, b"")
CLAIM = Claim(NODE.public, 5, "key", "eth", NOW, NOW + 60)


@pytest.mark.parametrize(
    ("value", "sign", "is_genuine", "changes"),
    [
        (
            ENVELOPE,
            sign_envelope,
            is_envelope_genuine,
            [("body", b"x"), ("version", 8), ("session", 6), ("kind", 2), ("owner", MALLORY.public)],
        ),
        (
            VOTE,
            sign_vote,
            is_vote_genuine,
            [("subject", NODE.public), ("kind", VoteKind.SUSPECT), ("incarnation", 2), ("observer", MALLORY.public)],
        ),
        (
            CLAIM,
            sign_claim,
            is_claim_genuine,
            [("organisation", "mit"), ("expires_unix_s", 0), ("ingress", MALLORY.public)],
        ),
    ],
    ids=["envelope", "vote", "claim"],
)
def test_signed_value_holds_in_its_swarm_and_unaltered_only(value, sign, is_genuine, changes):
    signed = sign(NODE, SWARM, value)
    assert is_genuine(SWARM, signed)
    assert not is_genuine(SwarmId(b"x" * 16), signed)
    for field, other in changes:
        assert not is_genuine(SWARM, forge(signed, **{field: other})), field


def test_load_or_create_key_makes_one_key_and_keeps_it(tmp_path):
    path = tmp_path / "nodes" / "a" / "node.key"
    key = load_or_create_key(path)
    assert load_or_create_key(path).public == key.public
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["node.key"]


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"x" * 33])
def test_load_or_create_key_of_another_file_says_how_to_go_on(tmp_path, content):
    path = tmp_path / "node.key"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_or_create_key(path)
    assert str(path) in error.value.hint
    assert path.read_bytes() == content


def test_load_or_create_key_of_a_directory_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_or_create_key(tmp_path)


def test_write_secret_replaces_whole_and_closes_what_was_open(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"long old content")
    path.chmod(0o644)
    write_secret(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_keys_are_not_shown_by_their_repr():
    assert NODE.seed.hex() not in repr(NODE)
    assert repr(NODE.seed) not in repr(ISSUER)


@pytest.mark.parametrize(
    ("seed", "public", "message", "signature"),
    [
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
            "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "72",
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
            "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
        ),
    ],
)
def test_signatures_are_those_of_rfc_8032(seed, public, message, signature):
    """Section 7.1, tests 1 and 2."""
    key = KeyPair(bytes.fromhex(seed))
    assert key.public.hex() == public
    assert key.sign(bytes.fromhex(message)).hex() == signature
    assert is_signed_by(key.public, bytes.fromhex(signature), bytes.fromhex(message))


GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493  # RFC 8032 section 5.1


def test_signature_has_no_second_form_and_weak_keys_sign_nothing():
    good = NODE.sign(b"message")
    unreduced = (int.from_bytes(good[32:], "little") + GROUP_ORDER).to_bytes(32, "little")
    assert not is_signed_by(NODE.public, good[:32] + unreduced, b"message")
    identity_point = bytes([1]) + bytes(31)
    assert not is_signed_by(identity_point, identity_point + bytes(32), b"any message")


@pytest.mark.parametrize("n_bytes", [0, 63, 65])
def test_signature_of_another_length_is_none(n_bytes):
    assert not is_signed_by(NODE.public, (NODE.sign(b"message") + b"!")[:n_bytes], b"message")
