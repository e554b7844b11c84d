"""A claim is signed once and reused while it is good."""

from __future__ import annotations

from tela.claims import CLAIM_LIFE_S, Claims
from tela.identity import KeyPair, is_claim_genuine
from tela.record import SwarmId

SWARM = SwarmId(b"s" * 16)


def test_claim_is_genuine_and_reused_for_half_of_its_life() -> None:
    clock = [1000.0]
    key = KeyPair(b"k" * 32)
    claims = Claims(key, SWARM, session=lambda: 7, now=lambda: clock[0])
    first = claims.present()
    assert is_claim_genuine(SWARM, first)
    assert not is_claim_genuine(SwarmId(b"t" * 16), first)
    assert (first.ingress, first.session, first.expires_unix_s) == (key.public, 7, 1000 + CLAIM_LIFE_S)
    clock[0] += CLAIM_LIFE_S / 2 - 1
    assert claims.present() is first
    clock[0] += 1
    assert claims.present().issued_unix_s == int(clock[0])
