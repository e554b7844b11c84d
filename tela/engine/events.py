"""Events and effects of the readiness core (:mod:`tela.engine.readiness`)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tela.engine.report import ModelInfo
from tela.record import InstanceState

# -- events of the readiness core -----------------------------------------------------------------------------------


class Holder(enum.Enum):
    """Who listens on the engine's port."""

    NOBODY = enum.auto()
    ENGINE = enum.auto()
    FOREIGN = enum.auto()


@dataclass(frozen=True, slots=True)
class Started:
    """The engine was spawned."""


@dataclass(frozen=True, slots=True)
class PortSeen:
    """Who holds the port. ``engine_ports`` are others that the engine's tree listens on."""

    holder: Holder
    holder_pid: int = 0  # 0: not ours to see
    engine_ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HealthSeen:
    """Status of the health path."""

    status: int


@dataclass(frozen=True, slots=True)
class ModelsSeen:
    """The model list."""

    models: tuple[ModelInfo, ...]


@dataclass(frozen=True, slots=True)
class CanaryPassed:
    """A real one-token request was answered, or the engine serves no kind that has one."""


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """A probe got no usable answer; ``text`` says what was asked and what came."""

    text: str


ReadinessEvent = Started | PortSeen | HealthSeen | ModelsSeen | CanaryPassed | ProbeFailed


# -- effects --------------------------------------------------------------------------------------------------------


class Step(enum.Enum):
    """What to look at next."""

    PORT = enum.auto()
    HEALTH = enum.auto()
    MODELS = enum.auto()
    CANARY = enum.auto()


@dataclass(frozen=True, slots=True)
class Check:
    """Look at ``step`` after ``delay_s`` and hand in what was seen."""

    step: Step
    delay_s: float


@dataclass(frozen=True, slots=True)
class Notify:
    """The instance changed."""

    state: InstanceState
    models: tuple[ModelInfo, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Still loading; worth a line in the log."""

    text: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The engine did not become ready in time: end it."""

    text: str


ReadinessEffect = Check | Notify | Progress | GiveUp
