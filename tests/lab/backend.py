"""A node's control side without the node: what the admin socket and the CLI see in tests."""

from __future__ import annotations

import os
from collections.abc import Sequence

import trio

from tela.errors import ProtocolError, UsageError
from tela.views import (
    CandidateView,
    ChangesView,
    ChangeView,
    EntryView,
    ModelView,
    NodeView,
    RegistryView,
    RouteView,
    Status,
)
from tests.lab.statements import NOW


class FakeBackend:
    """Records what its owner asked for."""

    def __init__(
        self, name: str = "worker", *, state: str = "serving", swarm: str = "00112233", keys: Sequence[bytes] = ()
    ) -> None:
        self.name, self.state, self.swarm = name, state, swarm
        self.keys = keys  # of further nodes that it shows
        self.hubs: tuple[str, ...] = ()
        self.left = trio.Event()
        self.revoked = b""
        self.is_refusing = False
        self.candidates: tuple[CandidateView, ...] = ()
        self.entries: tuple[EntryView, ...] = ()
        self.changed: tuple[ChangeView, ...] = ()

    def status(self) -> Status:
        return Status(
            version="0.1.0",
            pid=os.getpid(),
            name=self.name,
            node="a1b2c3d4",
            swarm=self.swarm,
            roles=("worker",),
            state=self.state,
            uptime_s=192.0,
            base_url="http://127.0.0.1:8080/v1",
            nodes=(
                NodeView(
                    node="a1b2c3d4",
                    name=self.name,
                    provider="eth",
                    zone="euler",
                    state=self.state,
                    models=("tiny",),
                    gpu="NVIDIA H200",
                    n_gpus=4,
                    vram_bytes=150_754_820_096,
                    path="self",
                    last_seen_s=0.0,
                    key="a1b2c3d4" * 8,
                ),
                NodeView(node="ffffffff", name="evil\x1b[2J\nname", state="down", key="ff" * 32),
                *(NodeView(node=key.hex()[:8], state="serving", key=key.hex()) for key in self.keys),
            ),
            models=(ModelView(model="tiny", n_ready=1, n_replicas=2, providers=("eth", "mit")),),
            warnings=("the clock of ffffffff is 400 s off",),
        )

    def route(self, model: str, allowlist: frozenset[str] | None) -> RouteView:
        if self.is_refusing:
            raise UsageError("it is no ingress and routes nothing")
        allowed = [one for one in self.candidates if allowlist is None or one.provider in allowlist]
        return RouteView(model=model, candidates=tuple(allowed))

    def registry(self) -> RegistryView:
        return RegistryView(
            swarm=self.swarm, node="a1b2c3d4", name=self.name, unix_s=NOW, root="00" * 8, entries=self.entries
        )

    def changes(self) -> ChangesView:
        return ChangesView(changes=self.changed)

    def metrics(self) -> bytes:
        return b"tela_links 1.0\n"

    def is_ready(self) -> bool:
        return self.state == "serving"

    def invite_hubs(self) -> tuple[str, ...]:
        return self.hubs

    def revocations(self) -> bytes:
        return self.revoked

    async def revoke(self, raw: bytes) -> None:
        if self.is_refusing:
            raise ProtocolError("no list")
        self.revoked = raw

    async def drain(self) -> None:
        self.state = "drain"

    async def leave(self) -> None:
        self.state = "left"
        self.left.set()
