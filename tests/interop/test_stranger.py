"""A real hub and a js-libp2p peer without certificate: what it is served, what it is told, and when it is sent away."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
import pytest
import trio

from scripts.demo.local_swarm import Daemon, LocalSwarm
from tela.net.admission import ADMISSION_TIMEOUT_S, VERSIONS, AdmissionReply, AdmissionRequest
from tela.net.circuit import HOP_PROTOCOL
from tela.net.invite import parse_invite
from tela.net.multiaddrs import node_of_peer_id
from tela.record import short
from tela.wire import ADMISSION_PROTOCOL, GOSSIP_PROTOCOL
from tests.lab.js_peer import POLL_INTERVAL_S, JsError, JsPeer, open_js_peer

pytestmark = [pytest.mark.js, pytest.mark.timeout(60)]

RESET = "the peer reset the stream|StreamResetError|StreamStateError"
"""What js says of a stream that was reset behind what it wrote, while it chose the protocol, or before it wrote."""
SLACK_S = 5.0
"""Strangers are looked for once a second; the rest is for busy machines."""


@pytest.fixture(scope="module")
def hub() -> Iterator[tuple[LocalSwarm, Daemon, str]]:
    """A swarm, its hub, and where that listens."""
    with LocalSwarm() as swarm:
        swarm.init()
        daemon = swarm.start_hub()
        yield swarm, daemon, swarm.status()["addresses"][0]


def refusal(daemon: Daemon, js: JsPeer) -> str:
    """The line in which the hub's log says why it sent the peer away; "" before."""
    who = short(node_of_peer_id(js.peer))
    lines = (line for line in daemon.text().splitlines() if "admission.refuse" in line and who in line)
    return next(lines, "")


async def wait_gone(js: JsPeer) -> None:
    with trio.fail_after(ADMISSION_TIMEOUT_S + SLACK_S):
        while await js.ask("peers"):
            await trio.sleep(POLL_INTERVAL_S)


async def test_stranger_that_asks_is_told_why_not(tmp_path, hub):
    swarm, daemon, address = hub
    body = msgspec.msgpack.encode(AdmissionRequest(VERSIONS, parse_invite(swarm.hub_invite).swarm))
    async with open_js_peer(tmp_path) as js:
        peer = await js.ask("dial", address=address)
        sent = struct.pack(">I", len(body)) + body
        answer = bytes.fromhex(await js.ask("exchange", peer=peer, protocol=ADMISSION_PROTOCOL, hex=sent.hex()))
        reply = msgspec.msgpack.decode(answer[4:], type=AdmissionReply)
        assert reply.code == "no-token"
        assert reply.reason in refusal(daemon, js)
        await wait_gone(js)


async def test_silent_stranger_is_sent_away_and_served_no_more_than_identify_and_ping(tmp_path, hub):
    _, daemon, address = hub
    async with open_js_peer(tmp_path) as js:
        peer = await js.ask("dial", address=address)
        assert await js.ask("ping", peer=peer) >= 0
        assert ADMISSION_PROTOCOL in (await js.ask("identify", peer=peer))["protocols"]
        for protocol in (GOSSIP_PROTOCOL, HOP_PROTOCOL):
            with pytest.raises(JsError, match=RESET):
                await js.ask("exchange", peer=peer, protocol=protocol, hex="00")
        await wait_gone(js)
        assert "not admitted within 10 s" in refusal(daemon, js)
