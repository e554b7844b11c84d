"""Picking ports and telling whose listener it is, on real sockets and real processes."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import pytest

from tela.engine import ports
from tela.engine.events import Holder
from tela.engine.ports import BLOCK_PORTS, listeners, look_at_port, reserve_block
from tela.errors import EngineError
from tests.lab.engines import running_fake


def can_bind(port: int) -> bool:
    with socket.socket() as candidate:
        try:
            candidate.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_block_is_held_until_the_engine_binds_and_locked_as_long_as_it_lives() -> None:
    with reserve_block(random.Random(1)) as block:
        assert not can_bind(block.port)
        block.let_engine_bind()
        assert can_bind(block.port)
        assert not can_bind(block.port - 1)
    assert can_bind(block.port - 1)


def test_daemons_with_the_same_luck_get_disjoint_blocks() -> None:
    with reserve_block(random.Random(7)) as one, reserve_block(random.Random(7)) as other:
        one.let_engine_bind()  # even while nobody has bound it yet
        with reserve_block(random.Random(7)) as third:
            assert abs(one.port - other.port) >= BLOCK_PORTS
            assert third.port not in {one.port, other.port}
            assert not set(one.helper_ports) & set(other.helper_ports)


def test_blocks_lie_below_the_ephemeral_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "range"
    monkeypatch.setattr(ports, "_EPHEMERAL_RANGE", setting)
    setting.write_text("40000\t60000\n")
    assert ports._block_starts()[-1] + BLOCK_PORTS <= 40_000
    setting.write_text("1024\t65535\n")
    assert len(ports._block_starts()) > ports.MIN_BLOCKS


def test_no_free_block_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserve_block(random.Random(3)) as block:
        monkeypatch.setattr(ports, "_block_starts", lambda: range(block.port - 1, block.port))
        with pytest.raises(EngineError, match="no free port"), reserve_block(random.Random(3)):
            pass


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_listener_is_found_with_its_address(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family is socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        assert [listener.address for listener in listeners() if listener.port == port] == [host]


async def test_port_of_our_descendant_is_the_engines(tmp_path: Path) -> None:
    async with running_fake(tmp_path) as fake:
        seen = look_at_port("127.0.0.1", fake.port, os.getpid())
        assert seen.holder is Holder.ENGINE
        elsewhere = look_at_port("127.0.0.1", 1, os.getpid())
        assert elsewhere.holder is Holder.NOBODY
        assert fake.port in elsewhere.engine_ports


async def test_port_of_somebody_else_is_foreign_and_names_the_pid(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with running_fake(tmp_path) as fake:
            seen = look_at_port("127.0.0.1", server.getsockname()[1], fake.process.pid)
    assert (seen.holder, seen.holder_pid) == (Holder.FOREIGN, os.getpid())


async def test_listener_on_another_address_does_not_answer_for_the_port(tmp_path: Path) -> None:
    async with running_fake(tmp_path) as fake, running_fake(tmp_path / "none", "--host", "127.0.0.2") as other:
        assert look_at_port("127.0.0.1", other.port, os.getpid()).holder is Holder.NOBODY
        assert look_at_port("127.0.0.1", fake.port, os.getpid()).holder is Holder.ENGINE
