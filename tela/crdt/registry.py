"""The read side: what routing and people see. Immutable snapshots, rebuilt only where something changed.

A reader holds a :class:`Snapshot` as long as it likes: it never locks and never sees half an update (invariant I27).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from tela.crdt.catalog import services_of
from tela.crdt.lattice import Entry, Status
from tela.errors import ProtocolError
from tela.identity import Certificate
from tela.record import (
    NO_CATALOG,
    Card,
    Catalog,
    InstanceState,
    ModelId,
    NodeId,
    Role,
    Service,
    SessionId,
    SessionState,
)
from tela.wire import decode_catalog, decode_node_body


@dataclass(frozen=True, slots=True)
class Member:
    """One node as this replica sees it.

    ``card`` is None where it is opaque: too large, or newer than we can read. The catalog is empty where it is, or has
    not come yet.
    """

    node: NodeId
    session: SessionId
    state: SessionState
    status: Status
    incarnation: int
    certificate: Certificate | None
    card: Card | None
    n_suspect_votes: int
    expires_unix_s: int
    catalog: Catalog = NO_CATALOG

    @property
    def provider(self) -> str:
        """The institution that certified the node; never what the node says of itself."""
        return self.certificate.provider if self.certificate else ""

    @property
    def zone(self) -> str:
        """The site, from the certificate."""
        return self.certificate.zone if self.certificate else ""

    @property
    def region(self) -> str:
        """The jurisdiction, from the certificate."""
        return self.certificate.region if self.certificate else ""

    @property
    def roles(self) -> tuple[str, ...]:
        """What the certificate allows the node to be."""
        return self.certificate.roles if self.certificate else ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One model at one instance of a node that is not dead."""

    node: NodeId
    session: SessionId
    instance: int
    model: ModelId
    kind: str
    provider: str
    zone: str
    region: str
    state: InstanceState
    status: Status
    n_suspect_votes: int = 0
    end_unix_s: int = 0
    max_context_tokens: int = 0
    parent: str = ""
    session_state: SessionState = SessionState.SERVING

    @property
    def is_ready(self) -> bool:
        """Whether a request may go there. Suspicion does not forbid it, a draining session does."""
        return (
            self.session_state is SessionState.SERVING
            and self.status in {Status.SERVING, Status.SUSPECT}
            and self.state is InstanceState.READY
        )


class Change(NamedTuple):
    """What the map holds of a node now; ``entry`` is None where it is forgotten."""

    node: NodeId
    entry: Entry | None
    certificate: Certificate | None
    catalog: Entry | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The whole registry at one moment. ``models`` also lists loading and draining candidates, sorted by node."""

    members: Mapping[NodeId, Member] = field(default_factory=lambda: MappingProxyType({}))
    models: Mapping[ModelId, tuple[Candidate, ...]] = field(default_factory=lambda: MappingProxyType({}))


class Registry:
    """Turns changed entries into the next snapshot."""

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        self._candidates: dict[NodeId, tuple[Candidate, ...]] = {}

    def apply(self, changes: Iterable[Change], *, unix_s: float) -> Snapshot:
        """Replace what is shown of these nodes as of now."""
        members = dict(self.snapshot.members)
        gone: list[Candidate] = []
        fresh: list[Candidate] = []
        for node, entry, certificate, catalog in changes:
            members.pop(node, None)
            gone += self._candidates.pop(node, ())
            if entry is not None:
                members[node] = member_of(entry, catalog, certificate, unix_s=unix_s)
                self._candidates[node] = candidates_of(members[node])
                fresh += self._candidates[node]
        self.snapshot = Snapshot(MappingProxyType(members), self._reindex(gone, fresh))
        return self.snapshot

    def _reindex(self, gone: list[Candidate], fresh: list[Candidate]) -> Mapping[ModelId, tuple[Candidate, ...]]:
        if gone == fresh:
            return self.snapshot.models
        models = dict(self.snapshot.models)
        nodes = {candidate.node for candidate in gone}
        for model in {candidate.model for candidate in (*gone, *fresh)}:
            kept = [candidate for candidate in models.pop(model, ()) if candidate.node not in nodes]
            kept += [candidate for candidate in fresh if candidate.model == model]
            if kept:
                models[model] = tuple(sorted(kept, key=lambda candidate: (candidate.node, candidate.instance)))
        return MappingProxyType(models)


def member_of(entry: Entry, catalog: Entry | None, certificate: Certificate | None, *, unix_s: float) -> Member:
    """How a node's entries are shown."""
    try:
        card = decode_node_body(entry.rec.envelope.body).card
    except ProtocolError:
        card = None
    return Member(
        node=entry.rec.owner,
        session=entry.rec.session,
        state=entry.rec.state,
        status=entry.status_at(unix_s),
        incarnation=entry.ref.incarnation,
        certificate=certificate,
        card=card,
        catalog=_catalog_of(catalog) if catalog else NO_CATALOG,
        n_suspect_votes=entry.n_suspect_votes,
        expires_unix_s=entry.end_unix_s,
    )


def _catalog_of(entry: Entry) -> Catalog:
    try:
        return decode_catalog(entry.rec.envelope.body)
    except ProtocolError:
        return NO_CATALOG


def candidates_of(member: Member) -> tuple[Candidate, ...]:
    """The member's instances; none where it is dead or opaque, or its certificate does not let it serve models."""
    if member.card is None or member.status in {Status.LEFT, Status.DOWN} or Role.WORKER not in member.roles:
        return ()
    services = services_of(member.card, member.catalog)
    return tuple(_candidate(member, member.card, service) for service in services)


def _candidate(member: Member, card: Card, service: Service) -> Candidate:
    return Candidate(
        node=member.node,
        session=member.session,
        instance=service.instance,
        model=ModelId(service.model),
        kind=service.kind,
        provider=member.provider,
        zone=member.zone,
        region=member.region,
        state=service.state,
        status=member.status,
        n_suspect_votes=member.n_suspect_votes,
        end_unix_s=card.end_unix_s,
        max_context_tokens=service.max_context_tokens,
        parent=service.parent,
        session_state=member.state,
    )
