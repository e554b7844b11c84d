"""What ``tela status`` shows and ``--json`` promises: one schema for the admin socket, scripts and people.

The JSON form is public.  It evolves like the wire (decision 0002): fields are added with defaults, none is removed or
changes its meaning within one ``schema_version``.  Units are seconds and bytes.  Nothing here is sent between nodes.
Nothing heavy is imported: a CLI that prints a table loads msgspec and no more (style.md 3.6).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

SCHEMA_VERSION: Final = 1


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One member as this daemon's registry shows it."""

    node: str  # 8 hex digits
    name: str = ""
    provider: str = ""  # "": its certificate is not known yet
    zone: str = ""
    region: str = ""
    roles: tuple[str, ...] = ()
    state: str  # join | serving | drain | left | suspect | down
    models: tuple[str, ...] = ()  # ready ones
    gpu: str = ""
    n_gpus: int = 0
    vram_bytes: int = 0  # of one GPU; 0: unknown
    path: str = ""  # self | direct | unreachable: it does not answer our dials; "": known through others only
    last_seen_s: float | None = None  # seconds since it was last heard over our own link
    version: str = ""  # of its tela
    key: str = ""  # 64 hex digits: all of its id


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """One model name and who serves it."""

    model: str
    n_ready: int
    n_replicas: int
    providers: tuple[str, ...] = ()
    max_context_tokens: int = 0  # 0: unknown


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One daemon: itself, and the swarm as it sees it."""

    version: str  # of the daemon's tela
    pid: int
    name: str
    node: str  # 8 hex digits
    swarm: str  # 8 hex digits
    roles: tuple[str, ...]
    state: str  # join | serving | drain | left
    uptime_s: float
    n_links: int = 0
    n_inflight: int = 0  # requests that this daemon answers or forwards now
    base_url: str = ""  # of its OpenAI API; "": it is no ingress
    addresses: tuple[str, ...] = ()  # where it accepts links; empty: outbound only
    nodes: tuple[NodeView, ...] = ()
    models: tuple[ModelView, ...] = ()
    warnings: tuple[str, ...] = ()

    def n_ready(self, model: str) -> int:
        """Ready replicas of a model; 0 for an unknown one."""
        return next((view.n_ready for view in self.models if view.model == model), 0)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ``tela status --json`` prints: one object, however many daemons answered."""

    daemons: tuple[Status, ...]
    schema_version: int = SCHEMA_VERSION


def parse_status(data: bytes) -> Status:
    """A status from a daemon of this or another version of tela; fields that we do not know are ignored.

    Raises:
        msgspec.DecodeError: it is not a status.
    """
    return msgspec.json.decode(data, type=Status)


def report_schema() -> dict[str, Any]:
    """JSON Schema of :class:`Report`."""
    return msgspec.json.schema(Report)
