"""Which of several equally fit candidates gets a request. Pure but for an injected ``random.Random``."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from typing import Final

from tela.crdt.registry import Candidate
from tela.record import ModelId

MAX_TURNS: Final = 4096
"""Models whose turn is remembered; when they are more, all turns start anew, which only costs evenness for a moment."""


class Policy(enum.StrEnum):
    """How to choose; the value of ``X-Tela-Policy``."""

    RANDOM = "random"
    ROUND_ROBIN = "round-robin"


class Chooser:
    """Chooses by policy; holds the turns of round robin, one per model."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._turns: dict[ModelId, int] = {}

    def choose(self, policy: Policy, candidates: Sequence[Candidate]) -> Candidate:
        """One of ``candidates``: not empty, all of one model, in the order of the snapshot."""
        if policy is Policy.RANDOM:
            return self._rng.choice(candidates)
        model = candidates[0].model
        if model not in self._turns and len(self._turns) >= MAX_TURNS:
            self._turns.clear()
        turn = self._turns.get(model, 0)
        self._turns[model] = turn + 1
        return candidates[turn % len(candidates)]
