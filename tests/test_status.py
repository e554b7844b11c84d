"""What people see of a snapshot."""

from __future__ import annotations

import pytest

from tela.crdt.lattice import Status
from tela.crdt.registry import Candidate, Member, Snapshot
from tela.net.transport import PathKind, PathView
from tela.record import Card, Hardware, InstanceState, ModelId, NodeId, Service, SessionId, SessionState
from tela.status import model_views, node_views

OWN, OTHER, THIRD = (NodeId(letter * 32) for letter in (b"o", b"p", b"q"))
MODEL = ModelId("m")


def candidate(node: NodeId, status: Status = Status.SERVING, state: InstanceState = InstanceState.READY) -> Candidate:
    return Candidate(node, SessionId(1), 0, MODEL, "vllm", "eth", "z", "ch", state, status)


def member(node: NodeId, name: str) -> Member:
    service = Service(0, "vllm", MODEL, InstanceState.READY)
    loading = Service(1, "vllm", "other", InstanceState.LOADING)
    card = Card(services=(service, loading), hardware=Hardware("H100", 4, 80 << 30), name=name, version="1")
    return Member(node, SessionId(1), SessionState.SERVING, Status.SERVING, 0, None, card, 0, 10)


@pytest.mark.parametrize(
    ("others", "reachable", "n_ready"),
    [
        ([candidate(OTHER), candidate(THIRD)], None, 2),
        ([candidate(OTHER), candidate(THIRD)], {OTHER}, 1),
        ([candidate(OTHER, Status.SUSPECT)], {OTHER}, 0),
        ([candidate(OTHER, state=InstanceState.LOADING)], {OTHER}, 0),
    ],
)
def test_model_views_count_what_would_be_routed_to(
    others: list[Candidate], reachable: set[NodeId] | None, n_ready: int
) -> None:
    (view,) = model_views(Snapshot({}, {MODEL: tuple(others)}), reachable=reachable)
    assert (view.model, view.n_ready, view.n_replicas, view.providers) == ("m", n_ready, len(others), ("eth",))


def test_node_views_begin_with_ourselves_and_show_the_path() -> None:
    snapshot = Snapshot({node: member(node, name) for node, name in ((THIRD, "a"), (OTHER, "b"), (OWN, "z"))}, {})
    paths = {OTHER: PathView(PathKind.RELAYED, rtt_s=0.02, relay=THIRD)}
    views = node_views(snapshot, own=OWN, paths=paths, reasons={}, last_seen_s={OTHER: 0.5})
    assert (views[2].rtt_s, views[2].relay) == (0.02, "71717171")
    assert [(view.name, view.path, view.last_seen_s) for view in views] == [
        ("z", "self", None),
        ("a", "", None),
        ("b", "relayed", 0.5),
    ]
    assert views[0].models == ("m",)
    assert (views[0].gpu, views[0].n_gpus) == ("H100", 4)


def test_node_view_of_a_peer_that_does_not_answer_says_so() -> None:
    snapshot = Snapshot({node: member(node, "a") for node in (OWN, OTHER, THIRD)}, {})
    views = node_views(
        snapshot,
        own=OWN,
        paths={THIRD: PathView(PathKind.DIRECT)},
        reasons={OTHER: "no route", THIRD: "was away"},
        last_seen_s={},
    )
    assert {view.node: view.reason for view in views} == {"6f6f6f6f": "", "70707070": "no route", "71717171": ""}
    assert {view.node: view.path for view in views} == {
        "6f6f6f6f": "self",
        "70707070": "unreachable",
        "71717171": "direct",
    }
