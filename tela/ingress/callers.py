"""Which local process calls: loopback is shared by all users of a host, so without keys only our own may call.

The kernel's table of TCP sockets names the owner of the other end. Source: proc(5), /proc/net/tcp.
"""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import trio

_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_WORD: Final = struct.Struct("=I")  # addresses are printed as 32-bit words in the machine's order

Endpoint = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]


async def is_own_process(stream: trio.SocketStream) -> bool:
    """Whether the client is on loopback and belongs to the user that we run as."""
    ours, theirs = _endpoint(stream.socket.getsockname()), _endpoint(stream.socket.getpeername())
    if not theirs[0].is_loopback:
        return False
    uid = await trio.to_thread.run_sync(uid_of_socket, theirs, ours)
    return uid == os.getuid()


def _endpoint(name: tuple[str, int]) -> Endpoint:
    return _plain(ipaddress.ip_address(name[0].partition("%")[0])), name[1]


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """IPv4 in IPv6's clothes is IPv4: a dual-stack listener and its client stand in different tables."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def uid_of_socket(local: Endpoint, remote: Endpoint) -> int | None:
    """The owner of the socket that is bound to ``local`` and connected to ``remote``; None where there is none."""
    for table in _TABLES:
        if not table.exists():
            continue
        for candidate_local, candidate_remote, uid in _rows(table.read_text()):
            if candidate_local == local and candidate_remote == remote:
                return uid
    return None


def _rows(table: str) -> Iterator[tuple[Endpoint, Endpoint, int]]:
    for line in table.splitlines()[1:]:
        fields = line.split()
        yield parse_endpoint(fields[1]), parse_endpoint(fields[2]), int(fields[7])


def parse_endpoint(text: str) -> Endpoint:
    """``0100007F:1F90`` on a little-endian machine → 127.0.0.1, 8080."""
    digits, _, port = text.partition(":")
    packed = b"".join(_WORD.pack(int(digits[start : start + 8], 16)) for start in range(0, len(digits), 8))
    return _plain(ipaddress.ip_address(packed)), int(port, 16)
