"""Each of the 14 defects of py-libp2p 0.8.1 (design/overlay.md 1) is a test of ours: ``pytest -m defect``."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
import trio

from tela.net.libp2p import MAX_HANDSHAKES_PER_HOST
from tela.net.multiaddrs import parse_address
from tests.lab.meshes import two_meshes, wait_until

ALL = set(range(1, 15))


def test_every_defect_is_a_test() -> None:
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    marks = {int(number) for text in texts for number in re.findall(r"^@pytest\.mark\.defect\((\d+)\)", text, re.M)}
    assert marks == ALL


@pytest.mark.defect(11)
async def test_half_open_handshakes_from_one_host_keep_nobody_else_out():
    async with two_meshes("libp2p") as pair:
        target = parse_address(pair.listener.addresses[0])
        idle = []
        for _ in range(MAX_HANDSHAKES_PER_HOST + 20):
            each = socket.socket()
            each.bind(("127.0.0.2", 0))
            each.connect((target.host, target.port))
            idle.append(each)
        await wait_until(lambda: pair.listener._handshakes["127.0.0.2"] == MAX_HANDSHAKES_PER_HOST)
        with trio.fail_after(1.0):
            await pair.dialer.dial(pair.listener.addresses)
        for each in idle:
            each.close()
        await wait_until(lambda: not pair.listener._handshakes)


@pytest.mark.defect(13)
async def test_gossipsub_is_not_served():
    """What is left to the library: to answer pings."""
    async with two_meshes("libp2p") as pair:
        served = {str(protocol) for protocol in pair.listener._host.get_mux().handlers}
        assert served == {"/ipfs/ping/1.0.0"}
