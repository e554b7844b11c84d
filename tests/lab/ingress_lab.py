"""The whole ingress over a mesh in memory, and gates that behave as a test needs."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
import trio.testing

from tela.crdt.registry import Candidate, Snapshot
from tela.ingress.http1 import Limits, serve_connection
from tela.ingress.server import Ingress
from tela.net.memory import MemoryMesh, MemoryNetwork
from tela.net.requests import IncomingCall, RequestClient, request_handler
from tela.observe import REGISTRY
from tela.record import NodeId
from tela.wire import HTTP_PROTOCOL, Claim, ErrorFrame, GateCode, ResponseHead
from tests.lab.swarm_views import candidate, node_id, snapshot

US = node_id("ingress")
BODY = b'{ "model" : "org/M", "messages":[{"content":"\\u00e9 \xc3\xa9"}], "n": 0.1000 }'
JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream")
EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"

Gate = Callable[[IncomingCall], Awaitable[None]]


async def body_of(call: IncomingCall) -> bytes:
    parts = []
    while part := await call.receive():
        parts.append(part)
    return b"".join(parts)


async def answer(call: IncomingCall, content: bytes, *headers: tuple[bytes, bytes], status: int = 200) -> None:
    await call.respond(ResponseHead(status, b"", headers or (JSON,)))
    await call.send(content)
    await call.end()


def gate_named(name: str) -> Gate:
    async def gate(call: IncomingCall) -> None:
        digest = hashlib.sha256(await body_of(call)).hexdigest()
        await answer(call, json.dumps({"node": name, "sha256": digest, "target": call.head.target}).encode())

    return gate


async def refuse(call: IncomingCall) -> None:
    await call.fail(ErrorFrame(GateCode.DRAINING, "draining", is_accepted=False))


@dataclass
class Lab:
    """An ingress and gates behind it; ``gates`` may be exchanged at any time."""

    network: MemoryNetwork
    mesh: MemoryMesh
    ingress: Ingress
    view: list[Snapshot]
    gates: dict[str, Gate]
    hits: dict[str, int] = field(default_factory=dict)
    dead: list[NodeId] = field(default_factory=list)

    async def add(self, name: str, gate: Gate) -> None:
        self.gates[name], self.hits[name] = gate, 0

        async def handle(call: IncomingCall) -> None:
            self.hits[name] += 1
            await self.gates[name](call)

        worker = self.network.mesh(node_id(name))
        worker.handle(HTTP_PROTOCOL, request_handler(handle))
        await self.mesh.dial(worker.addresses)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[trio.StapledStream[Any, Any]]:
        client, server = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: serve_connection(server, self.ingress.handle, limits=Limits()))
            yield client
            await client.aclose()

    async def raw(self, data: bytes) -> bytes:
        """Everything that is answered until the connection closes."""
        async with self.connected() as client:
            await client.send_all(data)
            return b"".join([bytes(part) async for part in client])

    async def post(self, body: bytes = BODY, *lines: str, path: str = "/v1/chat/completions") -> Answer:
        return Answer(await self.raw(request(body, *lines, path=path)))

    async def get(self, target: str, method: str = "GET") -> Answer:
        return Answer(await self.raw(f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()))


class Answer:
    def __init__(self, raw: bytes) -> None:
        head, _, self.raw_body = raw.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {name: value for name, _, value in (line.partition(": ") for line in lines[1:])}

    @property
    def body(self) -> bytes:
        """The content; chunks joined, and the last one must be there."""
        if self.headers.get("transfer-encoding") != "chunked":
            return self.raw_body
        content, rest = b"", self.raw_body
        while True:
            size, _, rest = rest.partition(b"\r\n")
            if not int(size, 16):
                return content
            content, rest = content + rest[: int(size, 16)], rest[int(size, 16) + 2 :]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return self.json["error"]["code"]


def request(body: bytes = BODY, *lines: str, path: str = "/v1/chat/completions") -> bytes:
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", "Connection: close", *lines]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body


@asynccontextmanager
async def lab(*candidates: Candidate, **gates: Gate) -> AsyncIterator[Lab]:
    """A lab with one worker per keyword; unless candidates are given, all of them serve org/M as provider a."""
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        mesh = network.mesh(US)
        client = RequestClient(mesh)
        await nursery.start(client.serve)
        view = [snapshot(*(candidates or [candidate(name) for name in gates]))]
        dead: list[NodeId] = []
        ingress = Ingress(
            snapshot=lambda: view[0],
            reachable=mesh.peers,
            client=client,
            claim=lambda: Claim(US, 1, "", "", 0, 1),
            on_dead=dead.append,
            rng=random.Random(1),
            is_ready=lambda: bool(view[0].models),
            now=lambda: 1_700_000_000.0,
        )
        built = Lab(network, mesh, ingress, view, {}, dead=dead)
        for name, gate in gates.items():
            await built.add(name, gate)
        before = metric("tela_ingress_inflight_requests")
        yield built
        assert metric("tela_ingress_inflight_requests") == before
        nursery.cancel_scope.cancel()


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def plain(text: str) -> str:
    """Log output without colours."""
    return "".join(part.partition("m")[2] if index else part for index, part in enumerate(text.split("\x1b[")))
