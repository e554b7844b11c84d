"""Who is at the other end of a loopback connection."""

from __future__ import annotations

import ipaddress
import os
import sys

import pytest
import trio
import trio.testing

from tela.ingress import callers

HOST = "127.0.0.1"


async def connected() -> tuple[trio.SocketStream, trio.SocketStream]:
    (listener,) = await trio.open_tcp_listeners(0, host=HOST)
    client = await trio.testing.open_stream_to_socket_listener(listener)
    server = await listener.accept()
    await listener.aclose()
    return client, server


async def test_own_process_is_recognised() -> None:
    client, server = await connected()
    async with client, server:
        assert await callers.is_own_process(server)


async def test_other_user_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = await connected()
    async with client, server:
        monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
        assert not await callers.is_own_process(server)


async def test_connection_that_is_unknown_to_the_kernel_has_no_owner() -> None:
    endpoint = (ipaddress.ip_address(HOST), 1)
    assert callers.uid_of_socket(endpoint, endpoint) is None


def test_kernel_table_is_read_in_its_byte_order() -> None:
    loopback = "0100007F" if sys.byteorder == "little" else "7F000001"
    expected = (ipaddress.ip_address(HOST), 8080)
    assert callers.parse_endpoint(f"{loopback}:1F90") == expected
    prefix = "0000FFFF" if sys.byteorder == "big" else "FFFF0000"
    assert callers.parse_endpoint(f"0000000000000000{prefix}{loopback}:1F90") == expected
