"""Nodes of ``make bench-registry``: several real meshes with their gossip in one process, told what to do by lines.

Lines are JSON: an array in, an answer out. Times are of the host's monotonic clock, which its processes share.

    ["dial", [address, ...]]        link every node with these; answered when all are linked
    ["watch", token, node]          from now on, note when each node sees ``token`` as the name of ``node``
    ["publish", token, node]        ``node``, which is one of ours, takes the name ``token``
    ["seen", token]                 answered when all of our nodes have seen it, with the times
    ["count"]                       members that our nodes see, the least of them
    ["cpu"]                         CPU seconds of this process
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import trio

from tela import observe
from tela.crdt.registry import Snapshot
from tela.gossip.driver import Gossip
from tela.identity import Issuer, KeyPair, issue_issuer
from tela.net.libp2p import open_mesh
from tela.record import Card, Hardware, InstanceState, NodeId, Service, SessionState, SwarmId
from tela.wire import GOSSIP_PROTOCOL, encode

SWARM = SwarmId(bytes(16))
NOW = 1_800_000_000
"""Unix seconds at which every node begins."""
CA = KeyPair(bytes(32))
ISSUER_KEY = KeyPair(bytes([1]) * 32)
ISSUER = Issuer(ISSUER_KEY, issue_issuer(CA, swarm=SWARM, issuer=ISSUER_KEY.public, provider="eth", now=NOW, days=365))
TOKENS = {
    role: ISSUER.token(zone="euler", region="ch", roles=(role,), now=NOW, expires_s=3600, uses=99)
    for role in ("worker", "hub")
}
BASE = Service(0, "vllm", "swiss-ai/Apertus-70B-Instruct-2509", InstanceState.READY, 65_536)
GPUS = Hardware("NVIDIA GH200 120GB", 4, 95 << 30, 288, 850 << 30, "nvidia-smi")


def key_of(number: int) -> KeyPair:
    """The key of a node, known to every process."""
    return KeyPair(bytes([2]) * 30 + number.to_bytes(2))


def card_of(number: int, name: str, role: str) -> Card:
    """A card of common size."""
    certificate = encode(ISSUER.admit(TOKENS[role], key_of(number).public, NOW))
    return Card(certificate=certificate, services=(BASE,), hardware=GPUS, version="0.1.0", name=name)


class BenchNode:
    """One node, and when it saw what is watched for."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.key = key_of(number)
        self.seen_ns: dict[str, int] = {}
        self._watched: dict[str, NodeId] = {}

    async def open(self, stack: AsyncExitStack, *, is_hub: bool) -> None:
        """Start it; it lives as long as ``stack``."""
        self._role = "hub" if is_hub else "worker"
        self.mesh = await stack.enter_async_context(open_mesh(self.key, ["127.0.0.1:0"] if is_hub else []))
        began_s = trio.current_time()
        self.nursery = await stack.enter_async_context(trio.open_nursery())
        self.gossip = Gossip(
            self.mesh,
            self.key,
            SWARM,
            CA.public,
            now=lambda: NOW + trio.current_time() - began_s,
            rng=random.Random(self.number),
            on_change=self._look,
            on_revocations=lambda _revoked: None,
        )
        self.mesh.handle(GOSSIP_PROTOCOL, self.gossip.handler)
        await self.nursery.start(self.gossip.serve)

    async def link(self, addresses: Sequence[str]) -> None:
        """Have a gossip link with each hub, and be in the registry."""
        for address in addresses:
            if self.mesh.node != (peer := await self.mesh.dial([address])):
                self.nursery.start_soon(self.gossip.link, peer)
        self.publish(f"node {self.number}")

    def publish(self, name: str) -> None:
        self.gossip.publish(SessionState.SERVING, card_of(self.number, name, self._role))

    def watch(self, token: str, node: NodeId) -> None:
        self._watched[token] = node

    def _look(self, snapshot: Snapshot) -> None:
        for token, node in list(self._watched.items()):
            member = snapshot.members.get(node)
            if member is not None and member.card is not None and member.card.name == token:
                self.seen_ns[token] = time.monotonic_ns()
                del self._watched[token]


async def obey(nodes: dict[int, BenchNode], words: list[object]) -> object:
    """Do what one line says; what to answer."""
    match words:
        case ["dial", list(addresses)]:
            for node in nodes.values():
                await node.link([each for each in addresses if each not in node.mesh.addresses])
        case ["watch", str(token), int(number)]:
            for node in nodes.values():
                node.watch(token, key_of(number).public)
        case ["publish", str(token), int(number)]:
            began_ns = time.monotonic_ns()
            nodes[number].publish(token)
            return began_ns
        case ["seen", str(token)]:
            while not all(token in node.seen_ns for node in nodes.values()):
                await trio.sleep(0.002)  # nothing is measured by this wait
            return [node.seen_ns.pop(token) for node in nodes.values()]
        case ["count"]:
            return min(len(node.gossip.snapshot.members) for node in nodes.values())
        case ["cpu"]:
            return time.process_time()
    return None


async def main(first: int, last: int, n_hubs: int) -> None:
    observe.configure("error")
    async with AsyncExitStack() as stack:
        nodes = {number: BenchNode(number) for number in range(first, last)}
        for number, node in nodes.items():
            await node.open(stack, is_hub=number < n_hubs)
        print(json.dumps([address for node in nodes.values() for address in node.mesh.addresses]), flush=True)
        async with trio.lowlevel.FdStream(0) as stdin:
            rest = b""
            async for data in stdin:
                *lines, rest = (rest + bytes(data)).split(b"\n")
                for line in lines:
                    print(json.dumps(await obey(nodes, json.loads(line))), flush=True)
        for node in nodes.values():
            node.nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, *map(int, sys.argv[1:]))
