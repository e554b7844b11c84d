"""What changed in the registry and why, for ``tela registry log``: a pure comparison of a member before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tela.crdt.lattice import Status
from tela.crdt.registry import Member
from tela.record import Service, Vote, VoteKind, short

MAX_CHANGES: Final = 1000
"""Remembered; about 300 B each. A swarm of 1,000 nodes changes so often within minutes, a usual one within a day."""


def explain(before: Member | None, after: Member | None, votes: Sequence[Vote], *, is_revoked: bool) -> str | None:
    """Why a reader sees the node otherwise now, in a few words; None where nothing it would notice has changed.

    Args:
        before: the member as it was shown; None: it was unknown.
        after: as it is shown now; None: it is forgotten.
        votes: those on it that stand now.
        is_revoked: whether the CA took its membership back.
    """
    if after is None:
        return "revoked" if is_revoked else "its lease ended"
    if before is None:
        return "heard of for the first time"
    if before.session != after.session:
        return "a new session"
    parts = [_explain_status(before, after, votes), *_explain_card(before, after)]
    return "; ".join(filter(None, parts)) or None


def _explain_status(before: Member, after: Member, votes: Sequence[Vote]) -> str | None:
    if after.status is Status.SUSPECT and before.n_suspect_votes != after.n_suspect_votes:
        return f"suspected by {_observers(votes, VoteKind.SUSPECT)}"
    if before.status is after.status:
        return None
    if after.status is Status.DOWN:
        return f"voted down by {_observers(votes, VoteKind.DOWN)}"
    if before.status is Status.SUSPECT and after.incarnation > before.incarnation:
        return f"refuted with incarnation {after.incarnation}"
    return "suspicion faded" if before.status is Status.SUSPECT and before.state is after.state else "it says so"


def _observers(votes: Sequence[Vote], kind: VoteKind) -> str:
    return ", ".join(sorted({short(vote.observer) for vote in votes if vote.kind is kind}))


def _explain_card(before: Member, after: Member) -> list[str]:
    old, new = before.card, after.card
    if old is None or new is None:
        return [] if old is new else ["its card can be read now" if new else "its card cannot be read"]
    if after.status in {Status.LEFT, Status.DOWN}:
        return []
    parts = [_say(service) for service in new.services if service not in old.services]
    gone = {service.model for service in old.services} - {service.model for service in new.services}
    parts += [f"{model} is gone" for model in sorted(gone)]
    if old.addresses != new.addresses:
        parts.append(f"announces {len(new.addresses)} addresses")
    return parts


def _say(service: Service) -> str:
    reason = f" ({service.reason})" if service.reason else ""
    return f"{service.model} is {service.state.name.lower()}{reason}"
