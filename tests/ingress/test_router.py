"""Who is chosen, who is passed over and why, and what the client reads where nobody is left."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.crdt.lattice import Status
from tela.crdt.registry import Candidate, Snapshot
from tela.ingress.policy import MAX_TURNS, Chooser, Policy
from tela.ingress.router import (
    AVOID_S,
    MAX_FAILURES,
    FailureMemory,
    Query,
    Reason,
    Replica,
    Sight,
    fit,
    judge,
    refusal,
    replica_of,
)
from tela.record import InstanceState, ModelId, SessionId, SessionState
from tests.lab.swarm_views import candidate, member, node_id, snapshot

MODEL = ModelId("org/M")
NOW = 1_000_000.0
LOADING: dict[str, Any] = {"state": InstanceState.LOADING}
DOWN: dict[str, Any] = {"state": InstanceState.DOWN}
JOINING: dict[str, Any] = {"status": Status.JOIN, "session_state": SessionState.JOIN}
DRAINING: dict[str, Any] = {"status": Status.DRAIN, "session_state": SessionState.DRAIN}
SUSPECT: dict[str, Any] = {"status": Status.SUSPECT}
ENDED: dict[str, Any] = {"end_unix_s": int(NOW) - 1}


def sight(
    *candidates: Candidate, unreachable: str = "", failed: str = "", doubted: str = "", view: Snapshot | None = None
) -> Sight:
    failures = {replica_of(one): 3.2 for one in candidates if one.node[:1].decode() in failed}
    reachable = frozenset(one.node for one in candidates if one.node[:1].decode() not in unreachable)
    overdue = frozenset(one.node for one in candidates if one.node[:1].decode() in doubted)
    return Sight(view or snapshot(*candidates), reachable, NOW, failures, overdue)


def reasons(seen: Sight, query: Query) -> str:
    return " ".join(f"{one.node[:1].decode()}:{reason}" for one, reason in judge(seen, query))


A, B, C = candidate("a"), candidate("b", provider="b"), candidate("c")

CASES: list[tuple[Sight, Query, str]] = [
    (sight(A, B), Query(MODEL), "a:ok b:ok"),
    (sight(A, B), Query(ModelId("org/m")), ""),
    (sight(A, B), Query(MODEL, frozenset({"b"})), "a:provider-not-allowed b:ok"),
    (sight(A, B), Query(MODEL, frozenset()), "a:provider-not-allowed b:provider-not-allowed"),
    (sight(candidate("a", provider="")), Query(MODEL, frozenset({"a"})), "a:provider-not-allowed"),
    (sight(A, B, unreachable="a"), Query(MODEL), "a:unreachable b:ok"),
    (sight(A, B, doubted="a"), Query(MODEL), "a:suspect b:ok"),
    (sight(A, B, doubted="ab"), Query(MODEL), "a:ok b:ok"),
    (sight(A, B, failed="a"), Query(MODEL), "a:failed-recently b:ok"),
    (sight(A, B), Query(MODEL, None, frozenset({replica_of(A)})), "a:tried b:ok"),
    (sight(candidate("a", **SUSPECT), B), Query(MODEL), "a:suspect b:ok"),
    (sight(candidate("a", **SUSPECT), B, unreachable="b"), Query(MODEL), "a:ok b:unreachable"),
    (sight(candidate("a", **SUSPECT, provider="x"), B), Query(MODEL, frozenset({"b"})), "a:provider-not-allowed b:ok"),
    (sight(candidate("a", **LOADING), B), Query(MODEL), "a:loading b:ok"),
    (sight(candidate("a", **JOINING), B), Query(MODEL), "a:loading b:ok"),
    (sight(candidate("a", **DRAINING), B), Query(MODEL), "a:draining b:ok"),
    (sight(candidate("a", **DOWN), B), Query(MODEL), "a:instance-down b:ok"),
    (sight(candidate("a", **ENDED), B), Query(MODEL), "a:allocation-ended b:ok"),
]


@pytest.mark.parametrize(
    ("seen", "query", "expected"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_verdicts(seen: Sight, query: Query, expected: str) -> None:
    assert reasons(seen, query) == expected


REFUSALS: list[tuple[Sight, Query, int, str]] = [
    (sight(A), Query(ModelId("org/m")), 404, "model_not_found"),
    (sight(A, B), Query(MODEL, frozenset({"c"})), 403, "provider_not_allowed"),
    (sight(A, B), Query(MODEL, frozenset()), 403, "provider_not_allowed"),
    (sight(A, B, unreachable="b"), Query(MODEL, frozenset({"b"})), 503, "no_capacity"),
    (
        sight(B, view=snapshot(B, dead=[member("a", status=Status.DOWN)])),
        Query(MODEL, frozenset({"a"})), 503, "no_capacity",
    ),
    (sight(view=snapshot(dead=[member("a", status=Status.DOWN)])), Query(MODEL), 503, "no_capacity"),
    (
        sight(view=snapshot(dead=[member("a", status=Status.DOWN)])),
        Query(MODEL, frozenset({"b"})), 403, "provider_not_allowed",
    ),
    (sight(candidate("a", **LOADING)), Query(MODEL), 503, "model_loading"),
    (sight(candidate("a", **LOADING), candidate("b", **DRAINING)), Query(MODEL), 503, "model_loading"),
    (sight(candidate("a", **DRAINING), candidate("b", **DOWN)), Query(MODEL), 503, "draining"),
    (sight(candidate("a", **DRAINING), B, unreachable="b"), Query(MODEL), 503, "no_capacity"),
    (sight(candidate("a", **DOWN)), Query(MODEL), 503, "no_capacity"),
    (sight(A, failed="a"), Query(MODEL), 503, "no_capacity"),
    (sight(candidate("a", **LOADING), B), Query(MODEL, frozenset({"a"})), 503, "model_loading"),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "query", "status", "code"), REFUSALS)
def test_refusals(seen: Sight, query: Query, status: int, code: str) -> None:
    verdicts = judge(seen, query)
    assert not fit(verdicts)
    error = refusal(seen, query, verdicts)
    assert (error.status, error.code) == (status, code)
    if status == 503:
        (name, value), = error.headers  # fmt: skip
        assert name == b"retry-after"
        assert int(value) >= 1


def test_retry_after_is_what_is_left_of_the_shortest_wait() -> None:
    seen = sight(A, failed="a")
    error = refusal(seen, Query(MODEL), judge(seen, Query(MODEL)))
    assert error.headers == ((b"retry-after", b"4"),)
    assert "1 failed-recently" in str(error)


providers = st.sampled_from(["a", "b", "c", ""])
some_candidates = st.lists(
    st.builds(
        lambda name, provider, state, status: candidate(name, provider=provider, state=state, status=status),
        st.text("abcdefgh", min_size=1, max_size=2),
        providers,
        st.sampled_from(InstanceState),
        st.sampled_from(Status),
    ),
    max_size=8,
    unique_by=lambda one: one.node,
)


@given(some_candidates, st.sets(providers), st.text("abcdefgh", max_size=4), st.text("abcdefgh", max_size=4))
def test_nobody_outside_the_allowlist_is_ever_fit(
    candidates: list[Candidate], allowed: set[str], unreachable: str, failed: str
) -> None:
    seen = sight(*candidates, unreachable=unreachable, failed=failed)
    query = Query(MODEL, frozenset(allowed - {""}))
    verdicts = judge(seen, query)
    for one in fit(verdicts):
        assert one.provider in query.allowlist  # type: ignore[operator]
        assert one.is_ready
        assert one.node in seen.reachable
        assert replica_of(one) not in seen.avoid_s
    if not fit(verdicts):
        assert refusal(seen, query, verdicts).status in {403, 404, 503}


def test_failure_is_remembered_for_a_while_and_only_for_that_session() -> None:
    memory = FailureMemory()
    memory.note(replica_of(A), 100.0)
    assert memory.left_s(100.0) == {replica_of(A): AVOID_S}
    assert Replica(A.node, SessionId(2), 0) not in memory.left_s(101.0)
    assert memory.left_s(100.0 + AVOID_S) == {}


def test_failure_memory_is_bounded() -> None:
    memory = FailureMemory()
    for index in range(MAX_FAILURES + 5):
        memory.note(Replica(node_id("a"), SessionId(index + 1), 0), 0.0)
    assert len(memory.left_s(1.0)) == MAX_FAILURES
    memory.note(Replica(node_id("b"), SessionId(1), 0), AVOID_S)
    assert len(memory.left_s(AVOID_S)) == 1


def test_round_robin_takes_turns_per_model() -> None:
    chooser = Chooser(random.Random(1))
    other = [candidate("x", model="other"), candidate("y", model="other")]
    chosen = [chooser.choose(Policy.ROUND_ROBIN, pair) for _ in range(4) for pair in ([A, B], other)]
    assert chosen == [A, other[0], B, other[1]] * 2


def test_random_reaches_everyone() -> None:
    chooser = Chooser(random.Random(1))
    chosen = [chooser.choose(Policy.RANDOM, [A, B, C]) for _ in range(300)]
    assert all(70 < chosen.count(one) < 130 for one in (A, B, C))


def test_turns_are_bounded() -> None:
    chooser = Chooser(random.Random(1))
    for index in range(MAX_TURNS + 2):
        chooser.choose(Policy.ROUND_ROBIN, [candidate("a", model=str(index))])
    assert len(chooser._turns) == 2


def test_reasons_are_words_for_people() -> None:
    assert all(reason.islower() and " " not in reason for reason in Reason)
