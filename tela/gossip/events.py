"""What goes into the gossip core and what comes out. Frozen values; the core knows no other language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from tela.crdt.gmap import Outcome
from tela.record import NO_CATALOG, Card, Catalog, NodeId, SessionId, SessionState, VoteKind
from tela.revocation import Revocations

LinkId = NewType("LinkId", int)
"""Names one stream of this process; never used twice."""


# -- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A gossip stream is open; ``is_ours``: we opened it."""

    link: LinkId
    peer: NodeId
    is_ours: bool


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The stream is gone, for whatever reason."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """One payload came in."""

    link: LinkId
    payload: bytes


@dataclass(frozen=True, slots=True)
class Sent:
    """The last Send of this link has been written: it may get another."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; due each TICK_S. ``unix_s`` is the wall clock: it stamps leases and times nothing."""

    unix_s: float


@dataclass(frozen=True, slots=True)
class Publish:
    """Our own records shall say this."""

    state: SessionState
    card: Card
    catalog: Catalog = NO_CATALOG


@dataclass(frozen=True, slots=True)
class Leave:
    """Publish LEFT and count who has it."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """The data plane saw this peer fail: look at once."""

    peer: NodeId


@dataclass(frozen=True, slots=True)
class Revoke:
    """Take in a revocation list that came otherwise than by gossip: signed here, kept on disk, or as a proof."""

    raw: bytes


Event = LinkUp | LinkDown | FrameReceived | Sent | Tick | Publish | Leave | Suspect | Revoke


# -- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Write this to the link, then report Sent. Never a second one before that: the shell needs no queue."""

    link: LinkId
    data: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """Reset the link. The core has forgotten it already."""

    link: LinkId
    peer: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Changed:
    """These nodes' entries are others now, or gone."""

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class Received:
    """What became of the facts in one frame."""

    peer: NodeId
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Voted:
    """We signed a vote."""

    subject: NodeId
    session: SessionId
    kind: VoteKind


@dataclass(frozen=True, slots=True)
class SessionTaken:
    """We go on under a new session."""

    session: SessionId
    reason: str


@dataclass(frozen=True, slots=True)
class Synced:
    """We have everything that this peer had when the link opened."""

    peer: NodeId


@dataclass(frozen=True, slots=True)
class Farewell:
    """``n_acks`` peers have our LEFT; ``is_enough`` says that nothing more need be waited for."""

    n_acks: int
    is_enough: bool


@dataclass(frozen=True, slots=True)
class RevocationsTaken:
    """The CA's list is another one now, and has been offered to every link."""

    revocations: Revocations


Effect = Send | Close | Changed | Received | Voted | SessionTaken | Synced | Farewell | RevocationsTaken
