"""Daemons' control sockets without daemons, and a place of their own for every test."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from tela.admin import serve_admin
from tela.cli.client import warn_of_skew
from tests.lab.backend import FakeBackend


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where state and sockets of this test are; the folder is short because socket paths are."""
    for variable in ("TELA_INVITE", "TELA_NAME", "TELA_CONFIG", "SLURM_JOB_ID", "NO_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    warn_of_skew.cache_clear()
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setenv("TELA_STATE_DIR", str(tmp_path / "state"))
        monkeypatch.setenv("TELA_RUNTIME_DIR", name)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        yield Path(name)


@contextmanager
def serving(place: Path, *backends: FakeBackend) -> Iterator[None]:
    """Control sockets for the backends, in a thread of their own; one that leaves takes its socket along."""
    is_up, stop = threading.Event(), None

    async def serve_one(backend: FakeBackend, *, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_admin, place / f"{backend.name}.sock", backend)
            task_status.started()
            await backend.left.wait()
            await trio.testing.wait_all_tasks_blocked()  # the answer to leave is out
            nursery.cancel_scope.cancel()

    async def serve_all() -> None:
        nonlocal stop
        async with trio.open_nursery() as nursery:
            token = trio.lowlevel.current_trio_token()
            for backend in backends:
                await nursery.start(serve_one, backend)
            stop = lambda: token.run_sync_soon(nursery.cancel_scope.cancel)  # noqa: E731
            is_up.set()
            await trio.sleep_forever()

    thread = threading.Thread(target=trio.run, args=(serve_all,))
    thread.start()
    assert is_up.wait(5)
    try:
        yield
    finally:
        assert stop is not None
        stop()
        thread.join(5)
        assert not thread.is_alive()
