"""A js-libp2p peer in a process of its own, told what to do by lines of JSON (tests/interop/peer.mjs)."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from scripts.lab.js_modules import PACKAGES, ensure_modules

ANSWER_TIMEOUT_S = 15.0
"""Of node on two busy cores, its start included."""
POLL_INTERVAL_S = 0.05


class JsError(Exception):
    """What the js peer says went wrong."""


class JsPeer:
    """One command at a time. ``peer`` is its peer id, ``addresses`` where it listens."""

    def __init__(self, process: trio.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._unread = b""
        self.peer = ""
        self.addresses: list[str] = []

    async def start(self) -> None:
        """Wait until it listens."""
        hello = await self._receive()
        self.peer, self.addresses = hello["peer"], hello["addresses"]

    async def ask(self, command: str, **arguments: Any) -> Any:
        """The result of a command of peer.mjs. Raises JsError."""
        await self._stdin.send_all(json.dumps({"id": 0, "do": command, **arguments}).encode() + b"\n")
        answer = await self._receive()
        if "error" in answer:
            raise JsError(answer["error"])
        return answer["result"]

    async def _receive(self) -> dict[str, Any]:
        with trio.fail_after(ANSWER_TIMEOUT_S):
            while b"\n" not in self._unread:
                data = await self._stdout.receive_some()
                if not data:
                    raise JsError("it ended")
                self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def open_js_peer(folder: Path) -> AsyncIterator[JsPeer]:
    """A peer that lives as long as the block; ``folder`` is for its program, which finds its modules beside itself."""
    shutil.copy(PACKAGES.with_name("peer.mjs"), folder)
    if not (folder / "node_modules").exists():
        (folder / "node_modules").symlink_to(ensure_modules())
    async with trio.open_nursery() as nursery:
        argv = ["node", str(folder / "peer.mjs")]
        process: trio.Process = await nursery.start(
            lambda task_status: trio.run_process(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=False, task_status=task_status
            )
        )
        peer = JsPeer(process)
        await peer.start()
        yield peer
        nursery.cancel_scope.cancel()
