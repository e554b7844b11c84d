"""An engine process under its guard, as trio sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from tela.engine import guard
from tela.engine.guard import ProcessKey, descendants, signal_all
from tela.errors import EngineError

_GUARD_SCRIPT: Final = Path(guard.__file__)
_MESSAGE_BYTES: Final = guard.TAIL_BYTES + 64
_CLOSE_S: Final = 2.0
"""How long leaving the block waits for a tree that ends on TERM; the guard needs nobody for the rest."""
_NOT_FOR_ENGINES: Final = "TELA_INVITE"
"""A secret that engines, their plugins and their crash reports have no use for."""
GUARD_LOST: Final = -signal.SIGKILL
"""Exit code of an engine whose guard was killed: we kill the engine then."""


@dataclass(frozen=True, slots=True)
class EngineExit:
    """How the engine's first process ended: its code (negative: signal) and the end of its stderr."""

    code: int
    tail: str


class GuardedEngine:
    """One running engine. Everything below its guard is the engine's tree."""

    def __init__(self, process: trio.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._messages = trio.socket.from_stdlib_socket(control)
        self._tree: list[ProcessKey] = []

    @property
    def guard_pid(self) -> int:
        """The guard; the engine's tree is below it."""
        return self._process.pid

    def remember_tree(self) -> None:
        """Note who belongs to the engine, for the case that the guard is killed."""
        self._tree = descendants(self.guard_pid)

    async def wait_exit(self) -> EngineExit:
        """Wait for the end of the engine's first process; what it leaves behind is being ended then."""
        try:
            message = await self._messages.recv(_MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:
            self._end_unguarded_tree()
            return EngineExit(GUARD_LOST, "the guard of the engine was killed")
        code, _, tail = message.partition(b"\n")
        return EngineExit(int(code), tail.decode(errors="replace"))

    async def wait_gone(self) -> None:
        """Wait until nothing of the tree is left."""
        await self._process.wait()

    def terminate(self) -> None:
        """TERM to the whole tree."""
        self._command(guard.TERMINATE)

    def kill(self) -> None:
        """KILL to the whole tree."""
        self._command(guard.KILL)

    def close(self) -> None:
        """Let go: the guard ends what is left of the tree within 10 s, whether we live or not."""
        self._messages.close()

    def _command(self, command: bytes) -> None:
        try:
            self._control.send(command)  # not blocking: a few bytes always fit
        except OSError:
            pass  # the guard is gone, and so is the tree

    def _end_unguarded_tree(self) -> None:
        orphans = [below for key in self._tree for below in descendants(key.pid)]
        signal_all([*self._tree, *orphans], signal.SIGKILL)


@asynccontextmanager
async def open_engine(argv: Sequence[str], environ: Mapping[str, str]) -> AsyncIterator[GuardedEngine]:
    """Spawn ``argv`` under a guard, with ``environ`` over our own; leaving the block ends its tree.

    Raises:
        EngineError: the guard could not be spawned. An argv that cannot be run is an engine that exits 127.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-I", "-S", str(_GUARD_SCRIPT), str(theirs.fileno()), *argv]
    inherited = {name: value for name, value in os.environ.items() if name != _NOT_FOR_ENGINES}
    try:
        process = await trio.lowlevel.open_process(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**inherited, **environ},
            start_new_session=True,  # Ctrl-C at our terminal is ours to handle: drain first
        )
    except OSError as error:
        ours.close()
        raise EngineError(f"cannot start the guard of the engine: {error.strerror}") from error
    finally:
        theirs.close()
    ours.setblocking(False)
    engine = GuardedEngine(process, ours)
    try:
        yield engine
    finally:
        engine.close()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_S):
            await engine.wait_gone()
