"""CPU time of Ed25519 by tela.identity beside ``cryptography``, in one run; the last line is one JSON object."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tela.identity import KeyPair, is_signed_by

ROUNDS = 7
CALLS = 400
MESSAGE = bytes(371)
"""A full record of registry.md 2.1."""


def cpu_us(call: Callable[[], object]) -> float:
    """Of one call: the least over ROUNDS, which is what disturbs least."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(CALLS):
            call()
        best = min(best, time.process_time() - began)
    return best / CALLS * 1e6


def main() -> None:
    key = KeyPair(bytes(range(32)))
    theirs = Ed25519PrivateKey.from_private_bytes(key.seed)
    their_public = theirs.public_key()
    signature = key.sign(MESSAGE)
    figures = {
        "sign_us": cpu_us(lambda: key.sign(MESSAGE)),
        "verify_us": cpu_us(lambda: is_signed_by(key.public, signature, MESSAGE)),
        "cryptography_sign_us": cpu_us(lambda: theirs.sign(MESSAGE)),
        "cryptography_verify_us": cpu_us(lambda: their_public.verify(signature, MESSAGE)),
    }
    print(json.dumps({"bench": "signatures", **{name: round(value, 1) for name, value in figures.items()}}))


if __name__ == "__main__":
    main()
