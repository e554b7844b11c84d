"""When an engine may be given requests: a state machine over what probes saw (design/engine.md, Life).

An instance is LOADING until, in this order, the listener on its port belongs to the engine's process tree, the health
path answers 200 (or 404/405: the engine has none), the model list names a model, and a canary request was answered.
Any failure starts over at the port.  READY, it is looked at again every few seconds: new models are told, a failing
engine becomes DOWN and walks the same path back.  Log text decides nothing (faults.md H01); the process' exit is not
seen here, since its supervisor hears of it at once.

Slow is not dead: a busy engine may leave probes unanswered for a while, so silence is borne for UNRESPONSIVE_S, whereas
a health path that says 5xx is believed the second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
    ReadinessEffect,
    ReadinessEvent,
    Started,
    Step,
)
from tela.engine.report import ModelInfo
from tela.record import InstanceState

MIN_RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 2.0
RETRY_SHARE: Final = 0.1
"""While loading, the pause between looks grows with the time spent: a fast engine is found in 0.1 s, and one that loads
for twenty minutes costs no CPU worth naming."""
REPROBE_S: Final = 3.0
"""A new adapter is routable this much later, plus a second for gossip."""
UNRESPONSIVE_S: Final = 30.0
MAX_BAD_HEALTH: Final = 2
WRONG_PORT_HINT_S: Final = 10.0
"""Engines open helper ports early; before this a port of theirs proves nothing."""
PROGRESS_S: Final = 60.0
HEALTH_ABSENT: Final = frozenset({404, 405})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessPlan:
    """What one start of an engine is held against. ``own_ports`` are helper ports that tela gave to the engine."""

    port: int
    is_canary: bool = True
    start_timeout_s: float
    own_ports: range = range(0)


class Readiness:
    """One start of one engine. :meth:`handle` is its only door."""

    def __init__(self, plan: ReadinessPlan) -> None:
        self.plan = plan
        self.state = InstanceState.LOADING
        self.models: tuple[ModelInfo, ...] = ()
        self.reason = "starting"
        self._was_ready = False
        self._started_s = 0.0
        self._progress_s = 0.0
        self._answered_s = 0.0
        self._n_bad_health = 0

    def handle(self, event: ReadinessEvent, now: float) -> list[ReadinessEffect]:
        """Take in what was seen at ``now`` (monotonic seconds); exactly one Check follows, or GiveUp."""
        match event:
            case Started():
                self._started_s = self._progress_s = now
                return [Notify(self.state, (), self.reason), Check(Step.PORT, MIN_RETRY_S)]
            case PortSeen():
                return self._on_port(event, now)
            case HealthSeen():
                return self._on_health(event.status, now)
            case ModelsSeen():
                return self._on_models(event.models, now)
            case CanaryPassed():
                return self._become_ready(self.models, now)
            case ProbeFailed():
                return self._on_trouble(event.text, now)

    def validate(self) -> None:
        """Invariants, checked after every event in tests."""
        assert self.state is not InstanceState.READY or self.models
        assert self.state is not InstanceState.LOADING or not self._was_ready
        assert 0 <= self._n_bad_health < MAX_BAD_HEALTH or self.state is not InstanceState.READY

    def _on_port(self, seen: PortSeen, now: float) -> list[ReadinessEffect]:
        port = self.plan.port
        if seen.holder is Holder.ENGINE:
            return [Check(Step.HEALTH, 0.0)]
        if seen.holder is Holder.FOREIGN:
            return self._on_trouble(foreign_text(port, seen.holder_pid), now)
        others = [other for other in seen.engine_ports if other not in self.plan.own_ports]
        if others and now - self._started_s >= WRONG_PORT_HINT_S:
            return self._on_trouble(f"engine listens on {', '.join(map(str, others))}, probing {port}", now)
        return self._on_trouble(f"nothing listens on port {port} yet", now)

    def _on_health(self, status: int, now: float) -> list[ReadinessEffect]:
        if status == 200 or status in HEALTH_ABSENT:
            self._n_bad_health = 0
            return [Check(Step.MODELS, 0.0)]
        self._n_bad_health += 1
        return self._on_trouble(f"the health path answers {status}", now)

    def _on_models(self, models: tuple[ModelInfo, ...], now: float) -> list[ReadinessEffect]:
        if not models:
            return self._on_trouble("the model list is empty", now)
        if self.state is InstanceState.READY or not self.plan.is_canary:
            return self._become_ready(models, now)
        self.models = models
        return [Check(Step.CANARY, 0.0)]

    def _become_ready(self, models: tuple[ModelInfo, ...], now: float) -> list[ReadinessEffect]:
        is_news = self.state is not InstanceState.READY or models != self.models
        self.state, self.models, self.reason = InstanceState.READY, models, ""
        self._was_ready, self._answered_s, self._n_bad_health = True, now, 0
        check = Check(Step.HEALTH, REPROBE_S)
        return [Notify(self.state, models, ""), check] if is_news else [check]

    def _on_trouble(self, text: str, now: float) -> list[ReadinessEffect]:
        if self.state is InstanceState.READY:
            is_dead = self._n_bad_health >= MAX_BAD_HEALTH or now - self._answered_s >= UNRESPONSIVE_S
            return self._become_down(text) if is_dead else [Check(Step.HEALTH, MIN_RETRY_S * 10)]
        if not self._was_ready and now - self._started_s >= self.plan.start_timeout_s:
            return [GiveUp(f"not ready after {self.plan.start_timeout_s:g} s: {text}")]
        return [*self._tell_reason(text), *self._tell_progress(now), Check(Step.PORT, self._retry_delay_s(now))]

    def _become_down(self, text: str) -> list[ReadinessEffect]:
        self.state, self.reason, self._n_bad_health = InstanceState.DOWN, text, 0
        return [Notify(self.state, self.models, text), Check(Step.PORT, MAX_RETRY_S)]

    def _tell_reason(self, text: str) -> list[ReadinessEffect]:
        if text == self.reason:
            return []
        self.reason = text
        return [Notify(self.state, self.models if self._was_ready else (), text)]

    def _tell_progress(self, now: float) -> list[ReadinessEffect]:
        if now - self._progress_s < PROGRESS_S:
            return []
        self._progress_s = now
        return [Progress(f"not ready after {now - self._started_s:.0f} s: {self.reason}")]

    def _retry_delay_s(self, now: float) -> float:
        return min(MAX_RETRY_S, max(MIN_RETRY_S, RETRY_SHARE * (now - self._started_s)))


def foreign_text(port: int, holder_pid: int) -> str:
    """Who has the engine's port; a pid of 0 is one that is not ours to see."""
    whom = f"pid {holder_pid}" if holder_pid else "a process of another user"
    return f"port {port} is held by {whom}, not by my engine"
