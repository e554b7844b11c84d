"""From a registry snapshot to what people see: pure, so that a table tests it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from tela.crdt.catalog import services_of
from tela.crdt.lattice import Status
from tela.crdt.registry import Candidate, Member, Snapshot
from tela.ingress.router import Reason, Verdict
from tela.net.transport import PathKind, PathView
from tela.record import Card, Instance, InstanceState, NodeId, Service, short
from tela.views import CandidateView, EngineView, ModelView, NodeView, RouteView, ServedView


def node_views(
    snapshot: Snapshot,
    *,
    own: NodeId,
    paths: Mapping[NodeId, PathView],
    reasons: Mapping[NodeId, str],
    last_seen_s: Mapping[NodeId, float],
) -> tuple[NodeView, ...]:
    """Every member, ourselves first, then by name.

    Args:
        snapshot: the registry.
        own: our node.
        paths: how peers with a live link are reached.
        reasons: of peers that do not answer our dials, and of relayed ones that are not reached directly.
        last_seen_s: seconds since a peer was heard over our own link.
    """
    members = sorted(snapshot.members.values(), key=lambda member: (member.node != own, _name(member), member.node))
    return tuple(
        _node_view(
            member,
            path="self" if member.node == own else "",
            link=paths.get(member.node),
            reason=reasons.get(member.node, ""),
            last_seen_s=last_seen_s.get(member.node),
        )
        for member in members
    )


def model_views(snapshot: Snapshot, *, reachable: Collection[NodeId] | None) -> tuple[ModelView, ...]:
    """Every model name that some live instance claims, by name.

    Args:
        snapshot: the registry.
        reachable: nodes that requests from here can be sent to; None where this node routes none.
    """
    return tuple(_model_view(model, snapshot.models[model], reachable) for model in sorted(snapshot.models))


def route_view(model: str, verdicts: Iterable[Verdict], snapshot: Snapshot) -> RouteView:
    """The router's verdicts, those that may get a request first."""
    views = [_candidate_view(one, reason, snapshot) for one, reason in verdicts]
    return RouteView(model=model, candidates=tuple(sorted(views, key=lambda view: not view.is_fit)))


def _candidate_view(candidate: Candidate, reason: Reason, snapshot: Snapshot) -> CandidateView:
    return CandidateView(
        node=short(candidate.node),
        name=_name(snapshot.members[candidate.node]),
        provider=candidate.provider,
        zone=candidate.zone,
        instance=candidate.instance,
        kind=candidate.kind,
        status=candidate.status.value,
        is_fit=reason is Reason.OK,
        reason=reason.value,
    )


def _node_view(member: Member, *, path: str, link: PathView | None, reason: str, last_seen_s: float | None) -> NodeView:
    card, catalog = member.card or Card(), member.catalog
    services = services_of(card, catalog)
    return NodeView(
        node=short(member.node),
        name=_name(member),
        provider=member.provider,
        zone=member.zone,
        region=member.region,
        roles=member.roles,
        state=member.status.name.lower(),
        models=tuple(sorted({s.model for s in services if s.state is InstanceState.READY})),
        gpu=card.hardware.gpu,
        n_gpus=card.hardware.n_gpus,
        vram_bytes=card.hardware.vram_bytes,
        path=path or (link.kind.value if link else "unreachable" if reason else ""),
        rtt_s=link.rtt_s if link else None,
        relay=short(link.relay) if link and link.relay else "",
        address=card.addresses[0] if card.addresses else "",
        reason="" if link and link.kind is not PathKind.RELAYED else reason,
        last_seen_s=last_seen_s,
        version=card.version,
        key=member.node.hex(),
        host=catalog.host,
        contact=catalog.contact,
        cluster=catalog.job.cluster,
        job_id=catalog.job.job_id,
        partition=catalog.job.partition,
        start_unix_s=catalog.job.start_unix_s,
        end_unix_s=card.end_unix_s,
        price=card.price,
        tier=card.tier,
        labels=catalog.labels,
        n_cpus=card.hardware.n_cpus,
        ram_bytes=card.hardware.ram_bytes,
        addresses=card.addresses,
        engines=_engine_views(card),
        served=tuple(map(_served_view, services)),
    )


def _engine_views(card: Card) -> tuple[EngineView, ...]:
    """Of the instances that have a service: kind and state are told with it."""
    facts = {instance.number: instance for instance in card.instances}
    first = {service.instance: service for service in reversed(card.services)}
    return tuple(_engine_view(first[number], facts.get(number, Instance(number))) for number in sorted(first))


def _engine_view(service: Service, facts: Instance) -> EngineView:
    return EngineView(
        instance=service.instance,
        kind=service.kind,
        state=service.state.name.lower(),
        reason=service.reason,
        version=facts.version,
        dtype=facts.dtype,
        quantization=facts.quantization,
        tensor_parallel=facts.tensor_parallel,
        pipeline_parallel=facts.pipeline_parallel,
        data_parallel=facts.data_parallel,
    )


def _served_view(service: Service) -> ServedView:
    return ServedView(
        model=service.model,
        instance=service.instance,
        max_context_tokens=service.max_context_tokens,
        parent=service.parent,
    )


def _name(member: Member) -> str:
    return member.card.name if member.card else ""


def _model_view(model: str, candidates: tuple[Candidate, ...], reachable: Collection[NodeId] | None) -> ModelView:
    ready = [one for one in candidates if one.is_ready and one.status is not Status.SUSPECT]
    return ModelView(
        model=model,
        n_ready=sum(reachable is None or one.node in reachable for one in ready),
        n_replicas=len(candidates),
        providers=tuple(sorted({candidate.provider for candidate in candidates})),
        max_context_tokens=min((c.max_context_tokens for c in candidates if c.max_context_tokens), default=0),
    )
