"""The word of an ingress on who calls: signed once, reused for a while (decision 0003)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tela.identity import KeyPair, sign_claim
from tela.record import SwarmId
from tela.wire import Claim

CLAIM_LIFE_S: Final = 60
"""How long a claim is good; renewed at half of it, so that a request's claim outlives its way."""


class Claims:
    """Signs the claims of one ingress. Until it has API keys, every caller is its own user."""

    def __init__(self, key: KeyPair, swarm: SwarmId, *, session: Callable[[], int], now: Callable[[], float]) -> None:
        """Args: whose word it is, in which swarm; our present session; unix seconds."""
        self._key = key
        self._swarm = swarm
        self._session = session
        self._now = now
        self._claim: Claim | None = None

    def present(self) -> Claim:
        """A claim that is good for at least half of its life."""
        now = int(self._now())
        if self._claim is None or now >= self._claim.expires_unix_s - CLAIM_LIFE_S // 2:
            unsigned = Claim(self._key.public, self._session(), "", "", now, now + CLAIM_LIFE_S)
            self._claim = sign_claim(self._key, self._swarm, unsigned)
        return self._claim
