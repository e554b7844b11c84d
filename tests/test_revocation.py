"""The CA's list: who may sign it, how it grows, that the longest one still fits a record and an admission reply."""

import msgpack
import msgspec
import pytest

from tela.errors import IntegrityError, ProtocolError, RefusedError, UsageError
from tela.identity import Issuer, KeyPair, issue_issuer, sign_envelope
from tela.net.admission import MAX_ADMISSION_BYTES, VERSIONS, AdmissionReply
from tela.record import MAX_RECORD_BYTES, Envelope, Kind, NodeId, SessionId, SwarmId
from tela.revocation import (
    MAX_REVOKED,
    NOTHING_REVOKED,
    Revoked,
    RevokedKind,
    newest,
    read_revocations,
    revoke,
)
from tela.wire import encode

NOW = 1_800_000_000
SWARM, OTHER_SWARM = SwarmId(b"s" * 16), SwarmId(b"o" * 16)
CA, ISSUING, NODE, MALLORY = (KeyPair(bytes([n]) * 32) for n in range(1, 5))
ISSUER = Issuer(ISSUING, issue_issuer(CA, swarm=SWARM, issuer=ISSUING.public, provider="eth", now=NOW, days=365))
TOKEN = ISSUER.token(zone="euler", region="ch", roles=("worker",), now=NOW, expires_s=86_400, uses=1)
CERTIFICATE = ISSUER.admit(TOKEN, NODE.public, NOW)


def nodes(first: int, last: int) -> list[tuple[RevokedKind, bytes]]:
    return [(RevokedKind.NODE, number.to_bytes(32, "big")) for number in range(first, last)]


def read(raw: bytes):
    return read_revocations(raw, swarm=SWARM, ca=CA.public)


def raw_list(*, signer: KeyPair = CA, swarm: SwarmId = SWARM, kind: int = Kind.REVOCATION, items: object = ()) -> bytes:
    body = msgspec.msgpack.encode(items)
    return encode(sign_envelope(signer, swarm, Envelope(kind, signer.public, SessionId(1), 1, body, b"")))


def test_each_list_holds_the_one_before_and_outranks_it():
    first = revoke(CA, SWARM, NOTHING_REVOKED, [(RevokedKind.NODE, NODE.public)], now=NOW)
    second = revoke(CA, SWARM, first, [(RevokedKind.TOKEN, TOKEN.token_id)], now=NOW + 5)
    assert read(first.raw) == first
    assert read(second.raw) == second
    assert second.items == (*first.items, Revoked(RevokedKind.TOKEN, TOKEN.token_id, NOW + 5))
    assert newest([second, first, NOTHING_REVOKED]) == second
    assert newest([]) == NOTHING_REVOKED
    assert second.nodes == {NODE.public}


def test_revoking_again_changes_nothing():
    first = revoke(CA, SWARM, NOTHING_REVOKED, [(RevokedKind.NODE, NODE.public)], now=NOW)
    assert revoke(CA, SWARM, first, [(RevokedKind.NODE, NODE.public)], now=NOW + 9) is first


@pytest.mark.parametrize(
    ("what", "denies_node", "denies_certificate", "denies_token"),
    [
        ((RevokedKind.NODE, NODE.public), True, True, False),
        ((RevokedKind.ISSUER, ISSUING.public), False, True, True),
        ((RevokedKind.TOKEN, TOKEN.token_id), False, False, True),
        ((RevokedKind.NODE, MALLORY.public), False, False, False),
        ((RevokedKind.ISSUER, NODE.public), False, False, False),
    ],
    ids=["node", "issuer", "token", "another node", "a node's key as issuer"],
)
def test_list_denies_what_it_names_and_nothing_else(what, denies_node, denies_certificate, denies_token):
    revoked = revoke(CA, SWARM, NOTHING_REVOKED, [what], now=NOW)
    cases = (
        (lambda: revoked.check_node(NODE.public), denies_node),
        (lambda: revoked.check_certificate(CERTIFICATE), denies_certificate),
        (lambda: revoked.check_token(TOKEN), denies_token),
    )
    for check, is_denied in cases:
        if is_denied:
            with pytest.raises(RefusedError) as caught:
                check()
            assert caught.value.code == "revoked"
            assert caught.value.hint
        else:
            check()
    assert revoked.denies(CERTIFICATE) == denies_certificate


def test_longest_list_fits_a_record_and_a_reply_and_one_more_entry_is_refused_clearly():
    full = revoke(CA, SWARM, NOTHING_REVOKED, nodes(0, MAX_REVOKED), now=NOW)
    assert len(full.raw) <= MAX_RECORD_BYTES
    assert len(read(full.raw).items) == MAX_REVOKED
    reply = AdmissionReply(VERSIONS, CERTIFICATE, None, "revoked", "x" * 256, full.raw)
    assert len(encode(reply)) <= MAX_ADMISSION_BYTES
    with pytest.raises(UsageError, match=f"full: {MAX_REVOKED} of {MAX_REVOKED}") as caught:
        revoke(CA, SWARM, full, nodes(MAX_REVOKED, MAX_REVOKED + 1), now=NOW)
    assert (caught.value.code, "tela provider revoke" in caught.value.hint) == ("revocations-full", True)
    assert revoke(CA, SWARM, full, nodes(3, 4), now=NOW) is full


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (raw_list(signer=MALLORY), IntegrityError),
        (raw_list(signer=ISSUING), IntegrityError),
        (raw_list(swarm=OTHER_SWARM), IntegrityError),
        (raw_list()[:-1] + b"\x00", IntegrityError),
        (raw_list(kind=Kind.NODE), ProtocolError),
        (raw_list(items="nonsense"), ProtocolError),
        (raw_list(items=[(1, b"", 1)] * (MAX_REVOKED + 1)), ProtocolError),
        (b"nonsense", ProtocolError),
        (b"", ProtocolError),
    ],
    ids=["mallory", "issuing key", "other swarm", "bad signature", "kind", "body", "too many", "noise", "empty"],
)
def test_only_the_ca_s_own_list_is_read(raw, error):
    with pytest.raises(error):
        read(raw)


def test_body_is_an_array_of_kind_id_and_time():
    """Golden: written by the msgpack package, so that the format is not what our encoder happens to do."""
    listed = revoke(CA, SWARM, NOTHING_REVOKED, [(RevokedKind.NODE, NODE.public)], now=NOW)
    kind, owner, session, version, body, _ = msgpack.unpackb(listed.raw)
    assert (kind, owner, session, version) == (3, bytes(CA.public), 1, 1)
    assert body == msgpack.packb([[1, bytes(NODE.public), NOW]])


def test_entry_of_a_later_kind_is_kept_and_denies_nothing():
    known = read(raw_list(items=[(9, bytes(NODE.public), NOW)]))
    assert not known.denies(CERTIFICATE)
    grown = revoke(CA, SWARM, known, nodes(0, 1), now=NOW)
    assert [item.kind for item in read(grown.raw).items] == [9, RevokedKind.NODE]
    assert grown.nodes == {NodeId(bytes(32))}
