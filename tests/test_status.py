"""What people see of a snapshot."""

from __future__ import annotations

import pytest

from tela.cli.render import render_node
from tela.crdt.lattice import Status
from tela.crdt.registry import Candidate, Member, Snapshot
from tela.net.transport import PathKind, PathView
from tela.record import (
    Card,
    Catalog,
    Hardware,
    Instance,
    InstanceState,
    Job,
    Listing,
    ModelId,
    NodeId,
    Service,
    SessionId,
    SessionState,
)
from tela.status import model_views, node_views
from tela.views import NodeView

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


def test_node_view_tells_all_that_card_and_catalog_say() -> None:
    service = Service(0, "vllm", MODEL, InstanceState.READY, 4096)
    card = Card(
        services=(service,),
        end_unix_s=20,
        instances=(Instance(0, "0.11.0", "bfloat16", "fp8", 4, 1, 2),),
        price=2.5,
        tier="stable",
    )
    catalog = Catalog("h1", "ops", Job("alps", "17", "gpu", 10), ("rack=1",), (Listing(0, 4096, MODEL, ("lora",)),))
    one = Member(OWN, SessionId(1), SessionState.SERVING, Status.SERVING, 0, None, card, 0, 10, catalog)
    (view,) = node_views(Snapshot({OWN: one}, {}), own=OWN, paths={}, reasons={}, last_seen_s={})
    assert (view.host, view.contact, view.cluster, view.job_id, view.partition) == ("h1", "ops", "alps", "17", "gpu")
    assert (view.start_unix_s, view.end_unix_s, view.price, view.tier) == (10, 20, 2.5, "stable")
    assert view.labels == ("rack=1",)
    (engine,) = view.engines
    assert (engine.kind, engine.state, engine.version, engine.dtype) == ("vllm", "ready", "0.11.0", "bfloat16")
    assert (engine.tensor_parallel, engine.pipeline_parallel, engine.data_parallel) == (4, 1, 2)
    assert [(served.model, served.parent) for served in view.served] == [("m", ""), ("lora", "m")]
    assert view.models == ("lora", "m")
    words = render_node(view)
    assert "engine 0  vllm 0.11.0 ready bfloat16 fp8 tp=4 pp=1 dp=2" in words
    assert "model     lora on m, 4096 tokens" in words
    assert "job       17 in gpu" in words
    assert "ends      1970-01-01 00:00:20 UTC" in words


def test_node_of_which_little_is_known_has_few_lines() -> None:
    view = NodeView(node="0a0b0c0d", state="serving", end_unix_s=1 << 62)
    assert render_node(view) == "node   0a0b0c0d \nstate  serving"
