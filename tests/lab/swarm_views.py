"""Snapshots made by hand, as the registry would show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tela.crdt.lattice import Status
from tela.crdt.registry import Candidate, Member, Snapshot
from tela.identity import Certificate, IssuerCertificate
from tela.record import Card, InstanceState, ModelId, NodeId, Service, SessionId, SessionState, SwarmId

SWARM = SwarmId(b"sixteen-byte-id.")


def node_id(name: str) -> NodeId:
    return NodeId(name.encode().ljust(32, b"."))


def candidate(name: str, *, provider: str = "a", model: str = "org/M", **facts: Any) -> Candidate:
    known: dict[str, Any] = {
        "node": node_id(name),
        "session": SessionId(1),
        "instance": 0,
        "model": ModelId(model),
        "kind": "vllm",
        "provider": provider,
        "zone": "z",
        "region": "r",
        "state": InstanceState.READY,
        "status": Status.SERVING,
    }
    return Candidate(**(known | facts))


def member(
    name: str, *, provider: str = "a", models: Sequence[str] = ("org/M",), status: Status = Status.SERVING
) -> Member:
    chain = IssuerCertificate(SWARM, b"i" * 32, provider, 0, 1)
    services = tuple(Service(0, "vllm", model, InstanceState.READY) for model in models)
    return Member(
        node=node_id(name),
        session=SessionId(1),
        state=SessionState.SERVING,
        status=status,
        incarnation=0,
        certificate=Certificate(node_id(name), "z", "r", ("worker",), 0, 1, chain),
        card=Card(services=services),
        n_suspect_votes=0,
        expires_unix_s=0,
    )


def snapshot(*candidates: Candidate, dead: Sequence[Member] = ()) -> Snapshot:
    """A snapshot with these candidates, a live member for each node, and ``dead`` members besides."""
    models: dict[ModelId, tuple[Candidate, ...]] = {}
    for one in sorted(candidates, key=lambda one: (one.node, one.instance)):
        models[one.model] = (*models.get(one.model, ()), one)
    alive = [member(one.node.decode().rstrip("."), provider=one.provider, models=[one.model]) for one in candidates]
    return Snapshot({one.node: one for one in (*alive, *dead)}, models)
