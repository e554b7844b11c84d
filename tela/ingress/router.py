"""Who may get a request, and why the others may not: candidates → allowlist → health → the best that are left.

One filter for the first attempt and for every further one, so a policy holds on every path (faults.md J06). Pure: the
reasons are values, and what ``tela status --as-routed`` will show.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tela.crdt.lattice import Status
from tela.crdt.registry import Candidate, Snapshot
from tela.ingress import openai
from tela.ingress.openai import ApiError
from tela.record import InstanceState, ModelId, NodeId, SessionId, SessionState

AVOID_S: Final = 5.0
"""For how long an instance that failed is left alone (faults.md D07); a new session of its node is tried at once."""
LOADING_RETRY_S: Final = 5
"""Retry-After while a model loads: a weight file takes tens of seconds, an SDK's own patience is two retries."""
MAX_FAILURES: Final = 4096
"""Instances remembered as failing; a swarm has fewer, and each is forgotten after AVOID_S."""


class Replica(NamedTuple):
    """One life of one instance: what fails, is tried and is counted."""

    node: NodeId
    session: SessionId
    instance: int


def replica_of(candidate: Candidate) -> Replica:
    """The instance behind a candidate."""
    return Replica(candidate.node, candidate.session, candidate.instance)


class Reason(enum.StrEnum):
    """Why a candidate was passed over; OK where it was not."""

    OK = "ok"
    PROVIDER = "provider-not-allowed"
    TRIED = "tried"
    ENDED = "allocation-ended"
    LOADING = "loading"
    DOWN = "instance-down"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"
    FAILED = "failed-recently"
    SUSPECT = "suspect"  # only while another one is OK


class Verdict(NamedTuple):
    """A candidate and what the router thinks of it."""

    candidate: Candidate
    reason: Reason


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked for. ``allowlist`` None: any provider; empty: none."""

    model: ModelId
    allowlist: frozenset[str] | None = None
    tried: frozenset[Replica] = frozenset()


@dataclass(frozen=True, slots=True)
class Sight:
    """What this ingress sees at one moment."""

    snapshot: Snapshot
    reachable: frozenset[NodeId]
    now_unix_s: float
    avoid_s: Mapping[Replica, float] = field(default_factory=dict)  # who failed, and for how long it is still avoided
    doubted: frozenset[NodeId] = frozenset()  # who does not answer us now, whatever the swarm has heard of it


class FailureMemory:
    """Instances that failed a moment ago, shared by all requests of this ingress. ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self._until: dict[Replica, float] = {}

    def note(self, replica: Replica, now: float) -> None:
        """``replica`` failed: leave it alone for AVOID_S."""
        self._forget_old(now)
        if len(self._until) < MAX_FAILURES:
            self._until[replica] = now + AVOID_S

    def left_s(self, now: float) -> dict[Replica, float]:
        """Who is to be avoided, and for how many seconds."""
        self._forget_old(now)
        return {replica: until - now for replica, until in self._until.items()}

    def _forget_old(self, now: float) -> None:
        for replica in [replica for replica, until in self._until.items() if until <= now]:
            del self._until[replica]


def judge(sight: Sight, query: Query) -> tuple[Verdict, ...]:
    """A verdict on every candidate of the model, in the order of the snapshot."""
    candidates = sight.snapshot.models.get(query.model, ())
    verdicts = [Verdict(candidate, _reason(candidate, sight, query)) for candidate in candidates]
    if any(verdict.reason is Reason.OK for verdict in verdicts):
        return tuple(verdicts)
    # Nobody else is left: a suspect may well be alive, and is better than no answer.
    return tuple(Verdict(one, Reason.OK) if why is Reason.SUSPECT else Verdict(one, why) for one, why in verdicts)


def fit(verdicts: Sequence[Verdict]) -> tuple[Candidate, ...]:
    """Those that may get the request."""
    return tuple(candidate for candidate, reason in verdicts if reason is Reason.OK)


def _reason(candidate: Candidate, sight: Sight, query: Query) -> Reason:
    if query.allowlist is not None and candidate.provider not in query.allowlist:
        return Reason.PROVIDER
    if not candidate.is_ready:
        return _unready_reason(candidate)
    if 0 < candidate.end_unix_s <= sight.now_unix_s:
        return Reason.ENDED
    return _health(candidate, sight, query)


def _health(candidate: Candidate, sight: Sight, query: Query) -> Reason:
    replica = replica_of(candidate)
    if replica in query.tried:
        return Reason.TRIED
    if candidate.node not in sight.reachable:
        return Reason.UNREACHABLE
    if replica in sight.avoid_s:
        return Reason.FAILED
    is_suspect = candidate.status is Status.SUSPECT or candidate.node in sight.doubted
    return Reason.SUSPECT if is_suspect else Reason.OK


def _unready_reason(candidate: Candidate) -> Reason:
    if candidate.session_state is SessionState.DRAIN:
        return Reason.DRAINING
    if (
        candidate.session_state in {SessionState.JOIN, SessionState.SERVING}
        and candidate.state is not InstanceState.DOWN
    ):
        return Reason.LOADING
    return Reason.DOWN


def refusal(sight: Sight, query: Query, verdicts: Sequence[Verdict]) -> ApiError:
    """What the client reads where nobody fits."""
    mine = [verdict for verdict in verdicts if verdict.reason is not Reason.PROVIDER]
    if not mine:
        return _refusal_without_candidates(sight, query, is_served=bool(verdicts))
    reasons = {reason for _, reason in mine}
    if Reason.LOADING in reasons:
        return openai.unavailable(f"{query.model} is loading", code="model_loading", retry_after_s=LOADING_RETRY_S)
    if reasons <= {Reason.DRAINING, Reason.DOWN, Reason.ENDED} and Reason.DRAINING in reasons:
        return openai.unavailable(f"every replica of {query.model} is draining", code="draining")
    waits = [sight.avoid_s[replica_of(candidate)] for candidate, reason in mine if reason is Reason.FAILED]
    counts = ", ".join(f"{sum(one == reason for _, one in mine)} {reason}" for reason in sorted(reasons))
    return openai.unavailable(
        f"no replica of {query.model} can answer now: {counts}", retry_after_s=min(waits, default=1)
    )


def _refusal_without_candidates(sight: Sight, query: Query, *, is_served: bool) -> ApiError:
    """Nobody (within the allowlist) serves it. A dead member that did is a reason to wait, not to give up."""
    providers = {
        member.provider
        for member in sight.snapshot.members.values()
        if member.card is not None and any(service.model == query.model for service in member.card.services)
    }
    allowed = providers if query.allowlist is None else providers & query.allowlist
    if allowed:
        return openai.unavailable(f"every replica of {query.model} that you may use is down")
    if is_served or providers:
        return openai.provider_not_allowed(f"no provider that you allow serves {query.model}")
    return openai.model_not_found(query.model)
