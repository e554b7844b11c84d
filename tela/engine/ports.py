"""Which port an engine gets, and who really listens on it.

Jobs of one or many users share a node and its ports (faults.md I01).  A port that is probed and let go again may be
gone when the engine binds it; so tela picks a *block*: its first port stays bound, never listening, for the engine's
whole life and keeps other daemons off, the second is the engine's and is held until the engine is spawned, the rest are
for helper ports (VLLM_PORT and up).  Before an engine counts as ready, the listener must belong to its process tree:
another server may have been faster, and answer 200 on /health as well.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tela.engine.events import Holder, PortSeen
from tela.engine.guard import descendants
from tela.errors import EngineError

BLOCK_PORTS: Final = 64
"""vLLM counts up from VLLM_PORT, a few ports per rank; 62 of them serve one node."""
FIRST_PORT: Final = 20_480
"""Above the well-known ports of other services, below the ephemeral range, whose ports come and go by themselves."""
LAST_PORT: Final = 65_535
MIN_BLOCKS: Final = 16
_EPHEMERAL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SOCKET_TABLES: Final = ((Path("/proc/net/tcp"), socket.AF_INET), (Path("/proc/net/tcp6"), socket.AF_INET6))
_LISTEN: Final = "0A"  # TCP_LISTEN of linux/tcp_states.h
_WILDCARDS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - read, never bound


class PortBlock:
    """Ports of one engine's start."""

    def __init__(self, first: int, lock: socket.socket, held: socket.socket) -> None:
        self.port = first + 1
        self.helper_ports = range(first + 2, first + BLOCK_PORTS)
        self._lock = lock
        self._held = held

    def let_engine_bind(self) -> None:
        """Free the engine's port, right before the engine is spawned. The lock stays."""
        self._held.close()

    def close(self) -> None:
        """Give the block back."""
        self._held.close()
        self._lock.close()


@contextmanager
def reserve_block(rng: random.Random) -> Iterator[PortBlock]:
    """A block that no other daemon of this host has.

    Raises:
        EngineError: every block is taken.
    """
    block = _reserve(rng)
    try:
        yield block
    finally:
        block.close()


def _reserve(rng: random.Random) -> PortBlock:
    firsts = _block_starts()
    for first in rng.sample(firsts, len(firsts)):
        lock = _bind(first)
        if lock is None:
            continue
        held = _bind(first + 1)
        if held is not None:
            return PortBlock(first, lock, held)
        lock.close()
    raise EngineError(f"no free port for the engine from {firsts[0]} on", hint="give the engine a --port of its own")


def _block_starts() -> range:
    try:
        ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        ephemeral = 32_768  # the kernel's default
    starts = range(FIRST_PORT, min(ephemeral, LAST_PORT) - BLOCK_PORTS + 1, BLOCK_PORTS)
    return starts if len(starts) >= MIN_BLOCKS else range(FIRST_PORT, LAST_PORT - BLOCK_PORTS, BLOCK_PORTS)


def _bind(port: int) -> socket.socket | None:
    """A socket that keeps ``port`` of every address from being bound; it does not listen. None where it is taken."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.bind(("", port))
    except OSError as error:
        holder.close()
        if error.errno in {errno.EADDRINUSE, errno.EACCES}:
            return None
        raise EngineError(f"cannot bind port {port}: {error.strerror}") from error
    return holder


# -- who listens ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening TCP socket of this network namespace."""

    address: str
    port: int
    inode: int


def look_at_port(host: str, port: int, guard_pid: int) -> PortSeen:
    """Who answers on ``host``:``port``, seen from the engine below ``guard_pid``. Needs no root for own processes."""
    all_listeners = listeners()
    inodes = _inodes_of(key.pid for key in descendants(guard_pid))
    rivals = _answering(all_listeners, host, port)
    foreign = [listener for listener in rivals if listener.inode not in inodes]
    if foreign:
        return PortSeen(Holder.FOREIGN, _holder_of(foreign[0].inode))
    engine_ports = sorted({listener.port for listener in all_listeners if listener.inode in inodes} - {port})
    return PortSeen(Holder.ENGINE if rivals else Holder.NOBODY, 0, tuple(engine_ports))


def listeners() -> list[Listener]:
    """Every listening TCP socket of this network namespace."""
    found = []
    for table, family in _SOCKET_TABLES:
        if table.exists():  # IPv6 may be off
            rows = (line.split() for line in table.read_text().splitlines()[1:])
            found += [_listener(row[1], row[9], family) for row in rows if row[3] == _LISTEN]
    return found


def _listener(local_address: str, inode: str, family: int) -> Listener:
    """One row: the address is hexadecimal in words of host byte order, as in ``0100007F:1F90``."""
    words, _, port = local_address.partition(":")
    raw = b"".join(struct.pack("=I", int(words[start : start + 8], 16)) for start in range(0, len(words), 8))
    address = socket.inet_ntop(family, raw).removeprefix("::ffff:")
    return Listener(address, int(port, 16), int(inode))


def _answering(found: Iterable[Listener], host: str, port: int) -> list[Listener]:
    """The sockets that a connection to ``host``:``port`` may reach: those of the very address before wildcards."""
    on_port = [listener for listener in found if listener.port == port]
    exact = [listener for listener in on_port if listener.address == host]
    return exact or [listener for listener in on_port if listener.address in _WILDCARDS]


def _inodes_of(pids: Iterable[int]) -> set[int]:
    return {inode for pid in pids for inode in _socket_inodes(pid)}


def _socket_inodes(pid: int) -> Iterator[int]:
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - the names only, many times
    except OSError:
        return  # ended, or of another user
    for descriptor in descriptors:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH115
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            yield int(target[8:-1])


def _holder_of(inode: int) -> int:
    """The pid that has the socket open; 0 where it is not ours to see."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return next((pid for pid in pids if inode in _socket_inodes(pid)), 0)
