"""What ``tela status`` shows and ``--json`` promises: one schema for the admin socket, scripts and people.

The JSON form is public.  It evolves like the wire (decision 0002): fields are added with defaults, none is removed or
changes its meaning within one ``schema_version``.  Units are seconds and bytes.  Nothing here is sent between nodes.
Nothing heavy is imported: a CLI that prints a table loads msgspec and no more (style.md 3.6).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

SCHEMA_VERSION: Final = 1


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a node: its state, and what its command and its answers tell; "" and 0 where they do not."""

    instance: int
    kind: str = ""
    state: str = ""  # loading | ready | down
    reason: str = ""
    version: str = ""
    dtype: str = ""
    quantization: str = ""
    tensor_parallel: int = 0
    pipeline_parallel: int = 0
    data_parallel: int = 0


class ServedView(msgspec.Struct, frozen=True, kw_only=True):
    """One model of a node, ready or not."""

    model: str
    instance: int
    max_context_tokens: int = 0  # 0: unknown
    parent: str = ""  # base model of an adapter


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
    path: str = ""  # self | direct | punched | relayed | unreachable: no answer to our dials; "": through others only
    rtt_s: float | None = None  # of our connection's last heartbeat
    relay: str = ""  # 8 hex digits: the hub through which it is relayed
    address: str = ""  # the first that it announces
    reason: str = ""  # why it is unreachable, or relayed
    last_seen_s: float | None = None  # seconds since it was last heard over our own link
    version: str = ""  # of its tela
    key: str = ""  # 64 hex digits: all of its id
    host: str = ""
    contact: str = ""  # of who runs it
    cluster: str = ""  # this and the next: what its batch system says
    job_id: str = ""
    partition: str = ""
    start_unix_s: int = 0  # of its allocation; 0: unknown, or none
    end_unix_s: int = 0
    price: float | None = None  # of an hour of one GPU, in the unit that the swarm agreed on
    tier: str = ""
    labels: tuple[str, ...] = ()  # key=value
    n_cpus: int = 0
    ram_bytes: int = 0
    addresses: tuple[str, ...] = ()  # all that it announces
    engines: tuple[EngineView, ...] = ()
    served: tuple[ServedView, ...] = ()


class ReachView(msgspec.Struct, frozen=True, kw_only=True):
    """How others reach this daemon."""

    kind: str = ""  # direct | claimed | relayed | checking | outbound | unreachable
    reason: str = ""
    announced: tuple[str, ...] = ()  # multiaddrs that the registry shows


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
    reach: ReachView = ReachView()
    nodes: tuple[NodeView, ...] = ()
    models: tuple[ModelView, ...] = ()
    warnings: tuple[str, ...] = ()

    def n_ready(self, model: str) -> int:
        """Ready replicas of a model; 0 for an unknown one."""
        return next((view.n_ready for view in self.models if view.model == model), 0)


class CandidateView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of a model, and what the router thinks of it."""

    node: str  # 8 hex digits
    name: str
    provider: str
    zone: str
    instance: int
    kind: str  # engine preset
    status: str  # of the node: join | serving | drain | suspect
    is_fit: bool  # a request may be sent there now
    reason: str  # "ok", or why not


class RouteView(msgspec.Struct, frozen=True, kw_only=True):
    """What ``tela status --as-routed MODEL --json`` prints."""

    model: str
    candidates: tuple[CandidateView, ...]
    schema_version: int = SCHEMA_VERSION


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What ``tela status --json`` prints: one object, however many daemons answered."""

    daemons: tuple[Status, ...]
    schema_version: int = SCHEMA_VERSION


class VoteView(msgspec.Struct, frozen=True, kw_only=True):
    """One observer's standing vote on a session."""

    observer: str  # 8 hex digits
    kind: str  # suspect | down
    session: int
    incarnation: int
    issued_unix_s: int


class EntryView(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the replicated registry, with what decides how it merges."""

    node: str  # 64 hex digits: the owner
    kind: str  # node | catalog | revocation | ...; a number where this version has no name for it
    name: str = ""
    provider: str = ""
    status: str  # join | serving | drain | left | suspect | down; "" where the kind has none
    session: int
    version: int
    incarnation: int
    floor: int  # the highest session known dead
    issued_unix_s: int
    end_unix_s: int  # when every replica forgets it
    size_bytes: int  # of the record as it travels
    fingerprint: str  # 16 hex digits: equal fingerprints, equal entries
    votes: tuple[VoteView, ...] = ()


class RegistryView(msgspec.Struct, frozen=True, kw_only=True):
    """What ``tela registry dump --json`` prints: one node's replica at one moment."""

    swarm: str  # 8 hex digits
    node: str  # 8 hex digits: whose replica
    name: str
    unix_s: float  # by that node's clock
    root: str  # 16 hex digits: equal roots, equal replicas
    entries: tuple[EntryView, ...]
    schema_version: int = SCHEMA_VERSION


class ChangeView(msgspec.Struct, frozen=True, kw_only=True):
    """One change of what the registry shows of a node."""

    unix_s: float
    node: str  # 8 hex digits
    name: str
    was: str  # "": unknown until then
    status: str  # "": forgotten
    reason: str
    heard_from: str  # 8 hex digits of the peer that told us; "": we came to it ourselves


class ChangesView(msgspec.Struct, frozen=True, kw_only=True):
    """What ``tela registry log --json`` prints, oldest first."""

    changes: tuple[ChangeView, ...]
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
