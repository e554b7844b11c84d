"""What the node is told of its engines: state, models, where they answer, and how supervision ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tela.record import Instance, InstanceState, Service


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine answers, on this host only. ``api_key`` never leaves the node."""

    host: str
    port: int
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One entry of the engine's model list."""

    id: str
    max_context_tokens: int = 0  # 0: unknown
    parent: str = ""  # base model of an adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReport:
    """State of one instance, as the node publishes it. ``endpoint`` is set while it is ready."""

    instance: int
    kind: str
    state: InstanceState
    models: tuple[ModelInfo, ...] = ()
    reason: str = ""
    endpoint: Endpoint | None = None
    facts: Instance

    def services(self) -> tuple[Service, ...]:
        """One service a model."""
        return tuple(
            Service(
                instance=self.instance,
                kind=self.kind,
                model=model.id,
                state=self.state,
                max_context_tokens=model.max_context_tokens,
                reason=self.reason,
                parent=model.parent,
            )
            for model in self.models
        )


class Whose(enum.StrEnum):
    """Whose exit code it is."""

    ENGINE = "engine"
    TELA = "tela"


@dataclass(frozen=True, slots=True)
class ExitReport:
    """Why the supervision ended, and the exit code that follows from it (design/engine.md, Life)."""

    exit_code: int
    whose: Whose
    text: str
