"""When this node says of another that it is gone: SUSPECT at once, DOWN after a grace without refutation.

Evidence is our own: a link that broke and did not come back, a link that fell silent, a data-plane failure. The vote,
flooded, is the indirect probe: whoever is alive refutes it by any of its other links (registry.md 2.7). Two things make
us doubt ourselves first: signs that we are slow (:class:`LocalHealth`) and many suspects at once (:class:`MassGuard`).
"""

from __future__ import annotations

from collections import deque
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

MAX_HEALTH: Final = 2
"""Of the score: a sick observer waits up to three times as long. Lifeguard (arXiv 1707.00788, section 3) allows nine,
where suspicion leads to death; ours costs a refutation, and after a lossy minute a dead host must still be left alone
within 5 s."""
RECOVERY_S: Final = 10.0
MASS_WINDOW_S: Final = 10.0
MASS_SHARE: Final = 0.3
MASS_MIN: Final = 4
"""So many members that turn suspect within the window are rather one cut than as many deaths."""
MASS_HOLD_S: Final = 60.0
"""For so long nobody is voted down then: a cut of a minute must cost no session."""


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
        if peer != self._node and peer not in self._suspicions:  # a standing suspicion keeps its time
            self._doubts.setdefault(peer, now + grace_s)

    def forgive(self, now: float) -> None:
        """We ourselves stood still: what was not heard meanwhile proves nothing."""
        self._doubts = dict.fromkeys(self._doubts, now + RECONNECT_GRACE_S)
        self._suspicions = {
            peer: _Suspicion(own.session, own.incarnation, now) for peer, own in self._suspicions.items()
        }

    def due(self, now: float, entry_of: Callable[[NodeId], Entry | None], *, may_condemn: bool = True) -> list[Verdict]:
        """The votes to sign now; those that end a session only where we may."""
        self._forget_votes(now)
        verdicts = [self._suspect(peer, now, entry_of(peer)) for peer in self._ripe_doubts(now)]
        if may_condemn:
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


class LocalHealth:
    """How far we trust our own clock and ears: 0 is well, each point lengthens every wait by its base."""

    def __init__(self) -> None:
        self._score = 0
        self._changed_at = float("-inf")

    @property
    def factor(self) -> int:
        """By which waits are multiplied."""
        return 1 + self._score

    def worsen(self, now: float) -> None:
        """We were late ourselves, or suspected somebody who was there."""
        self._score = min(MAX_HEALTH, self._score + 1)
        self._changed_at = now

    def recover(self, now: float) -> None:
        """Take a point away for each RECOVERY_S without an incident."""
        if self._score and now - self._changed_at >= RECOVERY_S:
            self._score -= 1
            self._changed_at = now


class MassGuard:
    """Notices that many members turned suspect at once: then it is likelier that we, or they, are cut off."""

    def __init__(self) -> None:
        self._turned: deque[tuple[float, NodeId]] = deque()
        self._until = float("-inf")

    def note(self, member: NodeId, now: float, n_members: int) -> None:
        """``member`` of ``n_members`` turned suspect."""
        self._turned.append((now, member))
        while now - self._turned[0][0] > MASS_WINDOW_S:
            self._turned.popleft()
        if len({who for _, who in self._turned}) >= max(MASS_MIN, MASS_SHARE * n_members):
            self._until = now + MASS_HOLD_S

    def is_on(self, now: float) -> bool:
        """Whether nobody may be voted down now."""
        return now < self._until
