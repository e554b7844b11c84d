"""Fake engines for tests: their command, a running one, and what it logged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


def fake_command(*flags: str) -> list[str]:
    """The argv of a fake engine."""
    return [sys.executable, "-I", "-S", str(FAKE_ENGINE), *flags]


class FakeLog:
    """What a fake engine with ``--log`` wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def events(self, name: str) -> list[dict[str, Any]]:
        """Every event called ``name`` so far."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    async def wait(self, name: str, *, n: int = 1, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """Wait until ``n`` such events happened."""
        await wait_until(lambda: len(self.events(name)) >= n, f"{n} {name}", timeout_s)
        return self.events(name)


class FakeEngine:
    """A running fake engine."""

    def __init__(self, port: int, log: FakeLog, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self.log = log
        self.process = process


@asynccontextmanager
async def running_fake(folder: Path, *flags: str) -> AsyncIterator[FakeEngine]:
    """A fake engine on a free port, ended with the block."""
    folder.mkdir(exist_ok=True)
    log = FakeLog(folder / "engine.log")
    process = subprocess.Popen(fake_command("--port", "0", "--log", str(log.path), *flags))
    try:
        started = await log.wait("start")
        yield FakeEngine(started[-1]["port"], log, process)
    finally:
        process.kill()
        process.wait()


async def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Poll real processes; fails naming ``what`` after ``timeout_s``."""
    with trio.move_on_after(timeout_s):
        while not condition():
            await trio.sleep(0.02)
        return
    raise AssertionError(f"waited {timeout_s:g} s for {what}")
