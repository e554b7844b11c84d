r"""The guard: a small process between tela and an engine that ends the engine's whole tree when tela is gone.

Run as ``python -I -S guard.py CONTROL_FD COMMAND...`` in a process session of its own, with nothing but the standard
library.  CONTROL_FD is one end of a SOCK_SEQPACKET pair: tela sends TERMINATE or KILL, the guard sends one message when
the engine's first process ended (``CODE\n`` and the last bytes of its stderr; a negative code is a signal) and closes
the socket when nothing of the tree is left.  End of file from tela, which even ``kill -9`` of tela brings about, means:
TERM to the tree, KILL after ORPHAN_GRACE_S.

It is a child subreaper, so that descendants whose parents ended become its children: the tree below it is complete,
double-forked daemons included. Processes are named by pid and start time, never by name. PR_SET_PDEATHSIG would not
do: it fires when the *thread* ends that forked, and trio forks in threads that end after ten idle seconds.

stdout is inherited untouched. stderr too where it is a terminal; else it is copied through a pipe byte by byte to keep
its last lines for the reason, by a thread, since a stuck reader of our stderr must not stop the guard from guarding.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import NamedTuple

TERMINATE = b"terminate"
KILL = b"kill"
ORPHAN_GRACE_S = 5.0
"""From TERM to KILL where tela is gone: all is over well within the 10 s that are promised."""
LEFTOVER_GRACE_S = 2.0
"""From TERM to KILL of what an engine left behind when its first process ended."""
POLL_S = 0.1
TAIL_BYTES = 2048
TAIL_WAIT_S = 0.2
"""The last lines may still be in the pipe when the engine's end is noticed."""
CANNOT_RUN = 127
SUBREAPER_OPTION = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""A batch system signals every process of a job; the guard must be the last one to go."""
PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
"""Ignored by every Python process; an engine must start with the defaults."""


class ProcessKey(NamedTuple):
    """One process for good: a pid alone may be given to another."""

    pid: int
    start_ticks: int


class _Stat(NamedTuple):
    parent: int
    start_ticks: int
    is_alive: bool


def _stat(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib doubles the start time of the guard
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # Fields from the third on (proc(5)): state, parent, ..., the 22nd is the start time.
    return _Stat(int(fields[1]), int(fields[19]), fields[0] not in (b"Z", b"X"))


def descendants(root: int) -> list[ProcessKey]:
    """Every living process below ``root``, nearest first."""
    stats = {int(name): stat for name in os.listdir("/proc") if name.isdigit() and (stat := _stat(int(name)))}  # noqa: PTH208
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    found, pending = [], list(children.get(root, ()))
    for pid in pending:  # grows as it goes
        pending += children.get(pid, ())
        if stats[pid].is_alive:
            found.append(ProcessKey(pid, stats[pid].start_ticks))
    return found


def signal_all(keys: list[ProcessKey], number: int) -> None:
    """Signal those that still are who they were."""
    for key in keys:
        stat = _stat(key.pid)
        if stat is not None and stat.start_ticks == key.start_ticks:
            try:
                os.kill(key.pid, number)
            except (ProcessLookupError, PermissionError):
                pass  # ended just now, or changed its user: nothing that we can do


class StderrCopier(threading.Thread):
    """Copies the engine's stderr to ours and keeps its end."""

    def __init__(self, source: int) -> None:
        super().__init__(daemon=True)
        self._source = source
        self.tail = b""

    def run(self) -> None:
        """Copy until every writer has closed."""
        while data := os.read(self._source, 65_536):
            self.tail = (self.tail + data)[-TAIL_BYTES:]
            try:
                while data:
                    data = data[os.write(2, data) :]
            except OSError:
                pass  # our reader is gone; the engine must not notice


class Guard:
    """Watches one engine from its start until nothing of its tree is left."""

    def __init__(self, control: socket.socket, engine_pid: int, copier: StderrCopier | None) -> None:
        self._control = control
        self._engine_pid = engine_pid
        self._copier = copier
        self._is_engine_alive = True
        self._kill_at_s: float | None = None

    def run(self, child_ended: int) -> None:
        """Serve until the tree is gone. ``child_ended`` becomes readable when a child ended."""
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(child_ended, select.POLLIN)
        while self._reap() or descendants(os.getpid()):
            is_hurried = self._kill_at_s is not None or not self._is_engine_alive
            for descriptor, _ in poller.poll(POLL_S * 1000 if is_hurried else None):
                if descriptor == child_ended:
                    os.read(child_ended, 4096)
                elif not self._obey():
                    poller.unregister(self._control)
            if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
                signal_all(descendants(os.getpid()), signal.SIGKILL)

    def _obey(self) -> bool:
        """Take one command; False where tela is gone."""
        try:
            command = self._control.recv(64)
        except OSError:
            command = b""
        if command == KILL:
            self._kill_at_s = time.monotonic()
        else:
            self._end_tree(None if command else ORPHAN_GRACE_S)
        return bool(command)

    def _end_tree(self, grace_s: float | None) -> None:
        signal_all(descendants(os.getpid()), signal.SIGTERM)
        if grace_s is not None:
            deadline_s = time.monotonic() + grace_s
            self._kill_at_s = min(deadline_s, self._kill_at_s or deadline_s)

    def _reap(self) -> bool:
        """Collect ended children; whether the engine's first process lives on."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return self._is_engine_alive
            if pid == 0:
                return self._is_engine_alive
            if pid == self._engine_pid:
                self._is_engine_alive = False
                self._report(os.waitstatus_to_exitcode(status))
                self._end_tree(LEFTOVER_GRACE_S)

    def _report(self, exit_code: int) -> None:
        tail = b""
        if self._copier is not None:
            self._copier.join(TAIL_WAIT_S)
            tail = self._copier.tail
        try:
            self._control.send(b"%d\n%s" % (exit_code, tail))
        except OSError:
            pass  # tela is gone


def become_subreaper() -> None:
    """Adopt every descendant whose parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER_OPTION, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become a child subreaper")


def spawn(command: list[str], stderr: int | None) -> int:
    """Start the engine, in a process group of its own: engines and shell scripts signal theirs. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            for number in (*IGNORED, *PYTHON_IGNORES):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            if stderr is not None:
                os.dup2(stderr, 2)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"tela: cannot run {command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(CANNOT_RUN)
    return pid


def main(arguments: list[str]) -> None:
    """Guard one engine."""
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    become_subreaper()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    copied, stderr = (None, None) if os.isatty(2) else os.pipe()
    child_ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    engine_pid = spawn(arguments[1:], stderr)
    copier = None
    if copied is not None and stderr is not None:
        os.close(stderr)
        copier = StderrCopier(copied)
        copier.start()
    Guard(control, engine_pid, copier).run(child_ended)


if __name__ == "__main__":
    main(sys.argv[1:])
