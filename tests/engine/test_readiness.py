"""The readiness core: what may make an instance ready, and what takes it down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.engine.events import (
    CanaryPassed,
    Check,
    GiveUp,
    HealthSeen,
    Holder,
    ModelsSeen,
    Notify,
    PortSeen,
    ProbeFailed,
    Progress,
    ReadinessEvent,
    Started,
    Step,
)
from tela.engine.readiness import (
    MAX_RETRY_S,
    REPROBE_S,
    UNRESPONSIVE_S,
    WRONG_PORT_HINT_S,
    Readiness,
    ReadinessPlan,
)
from tela.engine.report import ModelInfo
from tela.record import InstanceState

MODELS = (ModelInfo("m", 4096),)
OURS = PortSeen(Holder.ENGINE)
PATH = [OURS, HealthSeen(200), ModelsSeen(MODELS), CanaryPassed()]


def readiness(**options: object) -> Readiness:
    return Readiness(ReadinessPlan(**{"port": 8000, "start_timeout_s": 600.0, **options}))


def feed(core: Readiness, events: list[ReadinessEvent], now: float = 0.0) -> list:
    effects = []
    for event in events:
        effects = core.handle(event, now)
        core.validate()
    return effects


def ready_core(now: float = 0.0) -> Readiness:
    core = readiness()
    feed(core, [Started(), *PATH], now)
    return core


def reason_after(core: Readiness, event: ReadinessEvent, now: float = 1.0) -> str:
    core.handle(event, now)
    return core.reason


def test_ready_comes_after_every_step_and_not_before() -> None:
    core = readiness()
    core.handle(Started(), 0.0)
    for event, step in zip(PATH[:-1], [Step.HEALTH, Step.MODELS, Step.CANARY], strict=True):
        assert core.handle(event, 0.0) == [Check(step, 0.0)]
        assert core.state is InstanceState.LOADING
    assert feed(core, [CanaryPassed()]) == [
        Notify(InstanceState.READY, MODELS, ""),
        Check(Step.HEALTH, REPROBE_S),
    ]


def test_canary_that_is_off_is_not_asked_for() -> None:
    core = readiness(is_canary=False)
    feed(core, [Started(), *PATH[:-1]])
    assert core.state is InstanceState.READY


@pytest.mark.parametrize(("status", "may_go_on"), [(200, True), (404, True), (405, True), (503, False), (401, False)])
def test_health_path_may_be_absent_but_not_failing(status: int, may_go_on: bool) -> None:
    core = readiness()
    (*_, check) = feed(core, [Started(), OURS, HealthSeen(status)])
    assert (check == Check(Step.MODELS, 0.0)) is may_go_on


@pytest.mark.parametrize(
    ("event", "now", "reason"),
    [
        (PortSeen(Holder.FOREIGN, 42), 1, "port 8000 is held by pid 42, not by my engine"),
        (PortSeen(Holder.FOREIGN), 1, "port 8000 is held by a process of another user, not by my engine"),
        (PortSeen(Holder.NOBODY, 0, (8080,)), WRONG_PORT_HINT_S - 1, "nothing listens on port 8000 yet"),
        (PortSeen(Holder.NOBODY, 0, (8080,)), WRONG_PORT_HINT_S, "engine listens on 8080, probing 8000"),
        (PortSeen(Holder.NOBODY, 0, (9001,)), WRONG_PORT_HINT_S, "nothing listens on port 8000 yet"),
        (ModelsSeen(()), 1, "the model list is empty"),
        (ProbeFailed("GET /health: refused"), 1, "GET /health: refused"),
    ],
)
def test_reason_says_why_it_is_not_ready(event: ReadinessEvent, now: float, reason: str) -> None:
    core = readiness(own_ports=range(9000, 9010))
    core.handle(Started(), 0.0)
    effects = core.handle(event, now)
    assert effects[0] == Notify(InstanceState.LOADING, (), reason)
    assert effects[-1].step is Step.PORT
    assert core.handle(event, now) == [effects[-1]]  # told once


def test_pause_between_looks_grows_with_the_time_spent() -> None:
    core = readiness()
    core.handle(Started(), 0.0)
    delays = [core.handle(PortSeen(Holder.NOBODY), now)[-1].delay_s for now in (0.0, 3.0, 500.0)]
    assert delays == [0.1, pytest.approx(0.3), MAX_RETRY_S]


def test_loading_that_takes_too_long_is_given_up_with_the_last_reason() -> None:
    core = readiness(start_timeout_s=60.0)
    core.handle(Started(), 0.0)
    assert core.handle(PortSeen(Holder.NOBODY), 59.9)[-1] == Check(Step.PORT, MAX_RETRY_S)
    assert core.handle(PortSeen(Holder.NOBODY), 60.0) == [
        GiveUp("not ready after 60 s: nothing listens on port 8000 yet")
    ]


def test_progress_is_told_once_a_minute() -> None:
    core = readiness()
    core.handle(Started(), 0.0)
    told = [now for now in range(0, 200, 10) if any(isinstance(e, Progress) for e in core.handle(ModelsSeen(()), now))]
    assert told == [60, 120, 180]


def test_new_models_are_told_and_old_ones_are_not() -> None:
    core = ready_core()
    more = (*MODELS, ModelInfo("adapter", 4096, "m"))
    assert core.handle(ModelsSeen(MODELS), 3.0) == [Check(Step.HEALTH, REPROBE_S)]
    assert core.handle(ModelsSeen(more), 6.0)[0] == Notify(InstanceState.READY, more, "")


def test_failing_health_takes_a_ready_instance_down_at_the_second_time() -> None:
    core = ready_core()
    assert core.handle(HealthSeen(503), 3.0) == [Check(Step.HEALTH, 1.0)]
    assert core.handle(HealthSeen(503), 4.0)[0] == Notify(InstanceState.DOWN, MODELS, "the health path answers 503")


def test_slow_engine_stays_ready_until_it_was_silent_for_long() -> None:
    core = ready_core()
    silent = ProbeFailed("GET /health: timed out")
    feed(core, [silent] * 5, now=UNRESPONSIVE_S - 1)
    assert core.state is InstanceState.READY
    feed(core, [silent], now=UNRESPONSIVE_S)
    assert core.state is InstanceState.DOWN


def test_instance_that_was_down_comes_back_by_the_same_path() -> None:
    core = ready_core()
    feed(core, [HealthSeen(503), HealthSeen(503)], now=5.0)
    effects = feed(core, PATH, now=9.0)
    assert effects[0] == Notify(InstanceState.READY, MODELS, "")


EVENTS = st.one_of(
    st.builds(PortSeen, st.sampled_from(Holder), st.integers(0, 9), st.tuples(st.integers(8000, 8010))),
    st.builds(HealthSeen, st.sampled_from([200, 404, 500, 503])),
    st.builds(ModelsSeen, st.sampled_from([(), MODELS, (ModelInfo("other"),)])),
    st.just(ProbeFailed("no answer")),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 20)), max_size=60), st.booleans())
def test_any_history_keeps_the_invariants_and_always_says_what_is_next(history: list, is_canary: bool) -> None:
    core = readiness(is_canary=is_canary)
    effects, now = core.handle(Started(), 0.0), 0.0
    for event, step_s in history:
        now += step_s
        asked = effects[-1].step
        effects = core.handle(CanaryPassed() if asked is Step.CANARY else event, now)
        core.validate()
        assert isinstance(effects[-1], Check | GiveUp)
        assert not any(isinstance(effect, Check | GiveUp) for effect in effects[:-1])
        if isinstance(effects[-1], GiveUp):
            return
