"""What the registry costs inside one process: merging, looking up, memory. CPU time, the best of several rounds."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence

from tela.crdt.delta import Delta
from tela.crdt.gmap import GossipMap, Verifier
from tela.crdt.registry import Change, Registry
from tela.gossip.author import Author
from tela.identity import KeyPair, check_certificate, is_envelope_genuine, is_vote_genuine, sign_envelope
from tela.ingress import router
from tela.ingress.router import Query, Sight
from tela.record import NO_CATALOG, Card, InstanceState, ModelId, NodeId, Service, SessionState
from tela.wire import encode
from tests.bench.registry_nodes import CA, GPUS, ISSUER, NOW, SWARM, TOKENS

N_NODES = 1_000
N_MODELS = 142
ROUNDS = 3
MERGES_PER_S = 500
LOOKUPS_PER_MERGE = 40


def verifier() -> Verifier:
    return Verifier(
        is_envelope_genuine=lambda envelope: is_envelope_genuine(SWARM, envelope),
        is_vote_genuine=lambda vote: is_vote_genuine(SWARM, vote),
        check_certificate=lambda node, certificate, unix_s: check_certificate(
            certificate, node=node, swarm=SWARM, ca=CA.public, now=unix_s
        ),
        ca=NodeId(CA.public),
    )


def authors() -> list[Author]:
    """A thousand nodes, each serving one of 142 models."""
    made = []
    for number in range(N_NODES):
        key = KeyPair(bytes([3]) * 30 + number.to_bytes(2))
        author = Author(key.public, lambda envelope, key=key: sign_envelope(key, SWARM, envelope))
        author.begin_session(NOW)
        services = (Service(0, "vllm", f"org/model-{number % N_MODELS}", InstanceState.READY, 65_536),)
        certificate = encode(ISSUER.admit(TOKENS["worker"], key.public, NOW))
        author.describe(SessionState.SERVING, Card(certificate, services=services, hardware=GPUS), NO_CATALOG)
        made.append(author)
    return made


def records_of(made: Sequence[Author]) -> list[Delta]:
    return [Delta((author.next_records(NOW)[0],)) for author in made]


def cpu_s(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def merged(deltas: Sequence[Delta], into: GossipMap) -> GossipMap:
    for delta in deltas:
        into.merge(delta, NOW)
    return into


def memory_bytes(make: Callable[[], object]) -> int:
    tracemalloc.start()
    kept = make()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return size


def lookup_us(made: Sequence[Author], gossip_map: GossipMap, registry: Registry) -> float:
    """Of one judgement with an allowlist, while records of others are merged and indexed in between."""
    reachable = frozenset(author.node for author in made)
    spent_s, n_lookups = 0.0, 0
    for index in range(MERGES_PER_S):
        author = made[index % N_NODES]
        gossip_map.merge(Delta((author.next_records(NOW)[0],)), NOW)
        registry.apply([Change(author.node, gossip_map.node(author.node), None)], unix_s=NOW)
        sight = Sight(registry.snapshot, reachable, NOW)
        began = time.process_time()
        for lookup in range(LOOKUPS_PER_MERGE):
            model = ModelId(f"org/model-{(index + lookup) % N_MODELS}")
            router.fit(router.judge(sight, Query(model, frozenset({"eth", "epfl"}))))
        spent_s += time.process_time() - began
        n_lookups += LOOKUPS_PER_MERGE
    return spent_s / n_lookups * 1e6


def measure() -> dict[str, float]:
    """Figures by name."""
    made = authors()
    deltas = records_of(made)
    fresh = min(cpu_s(lambda: merged(deltas, GossipMap(verifier()))) for _ in range(ROUNDS))
    gossip_map = merged(deltas, GossipMap(verifier()))
    duplicate = min(cpu_s(lambda: merged(deltas, gossip_map)) for _ in range(ROUNDS))
    live = memory_bytes(lambda: merged(deltas, GossipMap(verifier())))
    registry = Registry()
    registry.apply(
        [Change(author.node, gossip_map.node(author.node), gossip_map.certificate_of(author.node)) for author in made],
        unix_s=NOW,
    )
    looked_up_us = lookup_us(made, gossip_map, registry)
    for author in made:
        author.leave()
    gone = records_of(made)
    tombstones = memory_bytes(lambda: merged(gone, GossipMap(verifier())))
    return {
        "merge_per_s": round(N_NODES / fresh),
        "duplicate_per_s": round(N_NODES / duplicate),
        "merge_us": round(fresh / N_NODES * 1e6, 1),
        "lookup_us": round(looked_up_us, 2),
        "bytes_per_record": round(live / N_NODES),
        "tombstone_bytes": round(tombstones / N_NODES),
        "snapshot_kb_1000": round(sum(len(raw) for delta in deltas for raw in delta.records) / 1000),
    }
