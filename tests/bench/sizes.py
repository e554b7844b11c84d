"""Bytes of real records on the wire, signed and with a certificate; the last line is one JSON object."""

from __future__ import annotations

import json

from tela.crdt.catalog import split
from tela.gossip.author import Author
from tela.identity import Issuer, KeyPair, issue_issuer, sign_envelope, sign_vote
from tela.net.multiaddrs import address_of
from tela.record import (
    NO_CATALOG,
    Card,
    Catalog,
    Hardware,
    Instance,
    InstanceState,
    Job,
    Service,
    SessionId,
    SessionState,
    SwarmId,
    Vote,
    VoteKind,
)
from tela.wire import encode

SWARM = SwarmId(bytes(range(16)))
NOW = 1_800_000_000
FACTS = Catalog("nid002841", "ml-ops@cscs.ch", Job("daint", "1284711", "normal", NOW), ("rack=12", "project=swissai"))
BASE = Service(0, "vllm", "swiss-ai/Apertus-70B-Instruct-2509", InstanceState.READY, 65_536)
GPUS = Hardware("NVIDIA GH200 120GB", 4, 95 << 30, 288, 850 << 30, "nvidia-smi")


def certificate(key: KeyPair) -> bytes:
    """As a hub issues it to a worker."""
    ca, issuing = KeyPair.generate(), KeyPair.generate()
    chain = issue_issuer(ca, swarm=SWARM, issuer=issuing.public, provider="cscs", now=NOW, days=365)
    issuer = Issuer(issuing, chain)
    token = issuer.token(zone="daint", region="ch", roles=("worker",), now=NOW, expires_s=3600, uses=1)
    return encode(issuer.admit(token, key.public, NOW))


def records(n_adapters: int, *, is_hub: bool = False) -> list[int]:
    """Sizes of a node's record and of its catalog."""
    key = KeyPair.generate()
    adapters = [
        Service(0, "vllm", f"lora-{n:03}", InstanceState.READY, 65_536, "", BASE.model) for n in range(n_adapters)
    ]
    shared = split([] if is_hub else [BASE, *adapters], FACTS)
    assert shared.n_lost == 0
    card = Card(
        certificate=certificate(key),
        addresses=(str(address_of(key.public, "148.187.20.11", 4001)),) if is_hub else (),
        services=shared.services,
        hardware=GPUS,
        end_unix_s=NOW + 86_400,
        version="0.1.0",
        name="worker-1284711",
        instances=() if is_hub else (Instance(0, "0.11.0", "bfloat16", "", 4),),
    )
    author = Author(key.public, lambda envelope: sign_envelope(key, SWARM, envelope))
    author.begin_session(NOW)
    author.describe(SessionState.SERVING, card, shared.catalog)
    return [len(raw) for raw in author.next_records(NOW)]


def bare_record() -> int:
    """The record of a node that tells nothing of itself but its certificate: what a LEFT is."""
    key = KeyPair.generate()
    author = Author(key.public, lambda envelope: sign_envelope(key, SWARM, envelope))
    author.begin_session(NOW)
    author.describe(SessionState.SERVING, Card(certificate=certificate(key)), NO_CATALOG)
    return len(author.next_records(NOW)[0])


def vote() -> int:
    key = KeyPair.generate()
    unsigned = Vote(key.public, KeyPair.generate().public, SessionId(NOW * 1000), 1, VoteKind.SUSPECT, NOW, b"")
    return len(encode(sign_vote(key, SWARM, unsigned)))


def main() -> None:
    worker, catalog = records(0)
    many, long_catalog = records(200)
    figures = {
        "bench": "sizes",
        "worker_record_bytes": worker,
        "worker_catalog_bytes": catalog,
        "record_200_adapters_bytes": many,
        "catalog_200_adapters_bytes": long_catalog,
        "hub_record_bytes": records(0, is_hub=True)[0],
        "tombstone_bytes": bare_record(),
        "certificate_bytes": len(certificate(KeyPair.generate())),
        "vote_bytes": vote(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
