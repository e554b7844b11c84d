"""The values that travel: who a node is, what it serves, and what others say of it.

Pure data. Encoding and the signed bytes are in :mod:`tela.wire`, keys in :mod:`tela.identity`, merging in
:mod:`tela.crdt`.  Wire structs are ``array_like``: they evolve only by fields with defaults appended at the end, and an
older reader ignores what it does not know (decision 0002).
"""

from __future__ import annotations

import enum
from typing import NewType

import msgspec

NodeId = NewType("NodeId", bytes)
"""32 bytes: the node's Ed25519 public key. The libp2p peer id is derived from it."""
SessionId = NewType("SessionId", int)
"""One life of a node: max(unix milliseconds at start, own last session + 1)."""
ModelId = NewType("ModelId", str)
"""A name as a client sends it in ``model``: exact, case-sensitive."""
SwarmId = NewType("SwarmId", bytes)
"""16 random bytes drawn by ``tela swarm init``."""

NODE_ID_BYTES = 32
SWARM_ID_BYTES = 16
SIGNATURE_BYTES = 64

# Limits on what a peer may send. Sources: design/registry.md 2.1; every one is enforced in tela.wire.
MAX_RECORD_BYTES = 5 * 1024
"""One envelope on the wire: a card of 4 KiB and its frame."""
MAX_SERVICES = 32
"""(instance, model) pairs in a card; what is beyond it, or beyond MAX_SERVICES_BYTES, is in the catalog record."""
MAX_SERVICES_BYTES = 2 * 1024
"""Of a card of 4 KiB; addresses, certificate and facts take the rest."""
MAX_CATALOG_BYTES = 4 * 1024
MAX_LABELS = 16
MAX_INSTANCES = 32
MAX_STRING_BYTES = 256
"""Any single string from a peer."""
MAX_ADDRESSES = 16
"""Announced multiaddrs of one node."""


class Kind(enum.IntEnum):
    """What an envelope holds. Unknown kinds are relayed untouched and never read."""

    NODE = 1
    CATALOG = 2
    REVOCATION = 3
    WEIGHTS = 4
    SYNC = 5  # reserved: model chunks
    KV = 6  # reserved: KV-cache transfer
    POOL = 7  # reserved: elastic pools


class SessionState(enum.IntEnum):
    """Lifecycle of a session. Monotone: not even its owner takes a step back (invariant I7)."""

    JOIN = 1
    SERVING = 2
    DRAIN = 3
    LEFT = 4


class InstanceState(enum.IntEnum):
    """One engine of a session. Not monotone (an engine may restart); ordered by the record's version."""

    LOADING = 1
    READY = 2
    DOWN = 3


class Role(enum.StrEnum):
    """What a certificate allows a node to be."""

    WORKER = "worker"
    INGRESS = "ingress"
    HUB = "hub"


class Service(msgspec.Struct, frozen=True, array_like=True):
    """One model that one engine instance behind the owner serves. Never a host or a port (no SSRF)."""

    instance: int
    kind: str  # engine preset: vllm, sglang, llama.cpp, ollama, tgi, generic
    model: str
    state: InstanceState
    max_context_tokens: int = 0  # 0: unknown
    reason: str = ""  # why DOWN; engines' last words, shortened
    parent: str = ""  # base model of an adapter


class Hardware(msgspec.Struct, frozen=True, array_like=True):
    """What the node has: facts as found or declared, zero where unknown."""

    gpu: str = ""
    n_gpus: int = 0
    vram_bytes: int = 0  # of one GPU
    n_cpus: int = 0
    ram_bytes: int = 0
    origin: str = "unknown"  # declared | nvidia-smi | unknown


class Instance(msgspec.Struct, frozen=True, array_like=True):
    """One engine, as its command and its answers tell; "" and 0 where they do not."""

    number: int
    version: str = ""  # of the engine
    dtype: str = ""
    quantization: str = ""
    tensor_parallel: int = 0
    pipeline_parallel: int = 0
    data_parallel: int = 0


class Job(msgspec.Struct, frozen=True, array_like=True):
    """The allocation that a node runs in: facts of its batch system."""

    cluster: str = ""
    job_id: str = ""
    partition: str = ""
    start_unix_s: int = 0  # 0: unknown


class Card(msgspec.Struct, frozen=True, array_like=True):
    """What routing needs to know of a node, again with each renewal; what stays is in the catalog record."""

    certificate: bytes = b""  # encoded tela.identity.Certificate; proves provider, zone, region, roles
    addresses: tuple[str, ...] = ()  # verified multiaddrs; empty: outbound only
    services: tuple[Service, ...] = ()
    hardware: Hardware = Hardware()
    end_unix_s: int = 0  # end of the allocation; 0: none known
    version: str = ""  # of tela
    catalog_hash: bytes = b""
    name: str = ""  # what the owner calls this daemon, for people
    http_url: str = ""  # base URL of an ingress, for people; never dialled
    instances: tuple[Instance, ...] = ()
    price: float | None = None  # of an hour of one GPU, in the unit that the swarm agreed on; None: not stated
    tier: str = ""  # of service, as the swarm agreed on: stable, spot, ...


class Listing(msgspec.Struct, frozen=True, array_like=True):
    """Models of one instance that found no room in the card; kind and state are those of its services there."""

    instance: int
    max_context_tokens: int
    parent: str
    models: tuple[str, ...]


class Catalog(msgspec.Struct, frozen=True, array_like=True):
    """Body of a CATALOG record: what is said once a session. It lives as long as its owner's session."""

    host: str = ""
    contact: str = ""  # of who runs the node
    job: Job = Job()
    labels: tuple[str, ...] = ()  # key=value
    listings: tuple[Listing, ...] = ()


NO_CATALOG = Catalog()


class NodeBody(msgspec.Struct, frozen=True, array_like=True):
    """Body of a NODE record. ``card`` is None where only the state changed; ``card_hash`` then names the last one."""

    state: SessionState
    incarnation: int  # raised by the owner to refute suspicion
    issued_unix_s: int
    expires_unix_s: int
    flags: int = 0
    card: Card | None = None
    card_hash: bytes = b""  # 8 bytes


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A record as it travels: owner-signed, versioned, opaque to forwarders."""

    kind: int
    owner: NodeId
    session: SessionId
    version: int
    body: bytes
    signature: bytes


class VoteKind(enum.IntEnum):
    """What an observer says of a subject."""

    SUSPECT = 1
    DOWN = 2


class Vote(msgspec.Struct, frozen=True, array_like=True, order=True):
    """An observer's signed statement about a session (DOWN) or one incarnation of it (SUSPECT)."""

    observer: NodeId
    subject: NodeId
    session: SessionId
    incarnation: int
    kind: VoteKind
    issued_unix_s: int
    signature: bytes


def clipped(text: str) -> str:
    """As much of a text as a peer takes: MAX_STRING_BYTES, and no half character at the end."""
    return text.encode()[:MAX_STRING_BYTES].decode(errors="ignore")


def short(node: bytes) -> str:
    """A node id for people: the first 8 hex digits."""
    return node[:4].hex()
