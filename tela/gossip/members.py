"""When this node says of another that it is gone: SUSPECT at once, DOWN after a grace without refutation.

Evidence is our own: a link that broke and did not come back, a link that fell silent, a data-plane failure. The vote,
flooded, is the indirect probe: whoever is alive refutes it by any of its other links (registry.md 2.7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tela.crdt.lattice import Entry
from tela.record import NodeId, SessionId, VoteKind

RECONNECT_GRACE_S: Final = 1.0
"""A link that comes back within one ping interval was no death: streams get replaced, hubs get re-dialled."""
DOWN_AFTER_S: Final = 15.0
"""Above the longest plausible stall of a loaded host; simulated: 5 s gave false deaths, 15 s none (registry.md 3.5)."""
VOTES_WINDOW_S: Final = 30.0
MAX_VOTES: Final = 3
"""SUSPECT votes per subject within the window: one in 10 s bounds the traffic around a node that stalls again and again
(registry.md 3.5); as a burst of three, since a node that fails twice must be avoided as soon the second time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A vote to sign."""

    subject: NodeId
    session: SessionId
    incarnation: int
    kind: VoteKind


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """Our standing vote: about one incarnation, since then."""

    session: SessionId
    incarnation: int
    since: float


class Observer:
    """Turns evidence into verdicts. Every map here holds at most one item per peer that we had a link to or failed."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._doubts: dict[NodeId, float] = {}  # peer -> when our patience ends
        self._suspicions: dict[NodeId, _Suspicion] = {}
        self._voted_at: dict[NodeId, tuple[float, ...]] = {}

    def trust(self, peer: NodeId) -> None:
        """The peer is there: a link is up and speaks."""
        self._doubts.pop(peer, None)
        self._suspicions.pop(peer, None)

    def doubt(self, peer: NodeId, now: float, grace_s: float) -> None:
        """The peer may be gone: without :meth:`trust` within ``grace_s`` it is suspected."""
        if peer != self._node:
            self._doubts.setdefault(peer, now + grace_s)

    def forgive(self, now: float) -> None:
        """We ourselves stood still: what was not heard meanwhile proves nothing."""
        self._doubts = dict.fromkeys(self._doubts, now + RECONNECT_GRACE_S)
        self._suspicions = {
            peer: _Suspicion(own.session, own.incarnation, now) for peer, own in self._suspicions.items()
        }

    def due(self, now: float, entry_of: Callable[[NodeId], Entry | None]) -> list[Verdict]:
        """The votes to sign now."""
        self._forget_votes(now)
        verdicts = [self._suspect(peer, now, entry_of(peer)) for peer in self._ripe_doubts(now)]
        verdicts += [self._condemn(peer, now, entry_of(peer)) for peer in sorted(self._suspicions)]
        return [verdict for verdict in verdicts if verdict is not None]

    def _ripe_doubts(self, now: float) -> list[NodeId]:
        may_vote = (peer for peer in self._doubts if len(self._voted_at.get(peer, ())) < MAX_VOTES)
        return sorted(peer for peer in may_vote if self._doubts[peer] <= now)

    def _forget_votes(self, now: float) -> None:
        recent = {peer: tuple(at for at in ats if now - at < VOTES_WINDOW_S) for peer, ats in self._voted_at.items()}
        self._voted_at = {peer: ats for peer, ats in recent.items() if ats}

    def _suspect(self, peer: NodeId, now: float, entry: Entry | None) -> Verdict | None:
        del self._doubts[peer]
        if entry is None or entry.is_dead:
            return None
        self._voted_at[peer] = (*self._voted_at.get(peer, ()), now)
        session, incarnation = entry.ref.session, entry.ref.incarnation
        self._suspicions[peer] = _Suspicion(session, incarnation, now)
        return Verdict(peer, session, incarnation, VoteKind.SUSPECT)

    def _condemn(self, peer: NodeId, now: float, entry: Entry | None) -> Verdict | None:
        own = self._suspicions[peer]
        if entry is None or entry.is_dead or entry.ref.refutation != (own.session, own.incarnation):
            del self._suspicions[peer]
            return None
        if now - own.since < DOWN_AFTER_S:
            return None
        del self._suspicions[peer]
        return Verdict(peer, own.session, own.incarnation, VoteKind.DOWN)
