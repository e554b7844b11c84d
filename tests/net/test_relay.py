"""A relay, who reserves at it, and who calls."""

from __future__ import annotations

import random

import pytest
import trio

from tela.errors import PeerError, RefusedError, StreamResetError
from tela.identity import KeyPair
from tela.net import relay as relay_module
from tela.net.circuit import HOP_PROTOCOL, STOP_PROTOCOL, Kind, Message, Status, encode_message
from tela.net.circuits import receive_message
from tela.net.libp2p import open_mesh
from tela.net.relay import splice
from tela.net.transport import PathKind
from tests.lab.meshes import connected_meshes, echo, open_relayed, receive_all, wait_until

ECHO = "/tela/echo/1"


async def hop(mesh, relay, message: bytes) -> Message:
    """The relay's answer to one raw message."""
    stream = await mesh.open(relay.node, HOP_PROTOCOL)
    await stream.send(message)
    answer, _ = await receive_message(stream, HOP_PROTOCOL)
    stream.reset()
    return answer


async def test_paths_tell_the_relay_and_that_the_other_end_is_called():
    async with open_relayed() as net:
        await net.caller.dial(net.called.addresses)
        path = net.caller.paths()[net.called.node]
        assert (path.kind, path.relay) == (PathKind.RELAYED, net.relay.node)
        assert net.caller.paths()[net.relay.node].kind is PathKind.DIRECT
        await wait_until(lambda: net.caller.node in net.called.peers())
        assert net.called.paths()[net.caller.node].kind is PathKind.RELAYED
        assert (net.hops.n_reservations, net.hops.n_circuits) == (1, 1)
        await net.caller.disconnect(net.called.node)
        await wait_until(lambda: net.hops.n_circuits == 0)


async def test_direct_connection_is_preferred_whichever_came_first():
    async with open_relayed() as net, open_mesh(net.called_key, ["127.0.0.1:0"]) as twin:
        twin.handle(ECHO, echo)  # the same node, as seen where it can be dialled
        await net.caller.dial(net.called.addresses)
        (connection,) = net.caller._connections[net.called.node]
        assert connection.relay == net.relay.node
        await net.caller._adopt(await net.caller._connect(twin.node, twin.addresses[0]), "outbound")
        assert net.caller.paths()[net.called.node].kind is PathKind.DIRECT
        stream = await net.caller.open(net.called.node, ECHO)  # which the called one does not serve
        await stream.send(b"direct")
        assert await stream.receive() == b"direct"


async def test_circuit_is_the_last_address_to_be_tried():
    async with open_relayed() as net, open_mesh(net.called_key, ["127.0.0.1:0"]) as twin:
        await net.caller.dial([*net.called.addresses, *twin.addresses])
        assert net.caller.paths()[net.called.node].kind is PathKind.DIRECT
        assert net.relay.node not in net.caller.peers()


@pytest.mark.defect(9)
async def test_two_circuits_of_a_peer_do_not_tear_each_other_down():
    async with open_relayed() as net, open_mesh(net.caller_key, []) as other:
        net.called.handle(ECHO, echo)
        for caller in (net.caller, other):
            await caller.dial(net.called.addresses)
        await wait_until(lambda: net.hops.n_circuits == 2)
        first = await net.caller.open(net.called.node, ECHO)
        await other.disconnect(net.called.node)
        await wait_until(lambda: net.hops.n_circuits == 1)
        await first.send(b"still here")
        assert await first.receive() == b"still here"


async def test_reservation_goes_with_its_connection():
    async with open_relayed() as net:
        addresses = net.called.addresses
        await net.relay.disconnect(net.called.node)
        await wait_until(lambda: net.hops.n_reservations == 0)
        with pytest.raises(PeerError, match="no reservation"):
            await net.caller.dial(addresses)


async def test_hold_reserves_again_and_gives_up_with_its_scope():
    async with open_relayed() as net, open_mesh(KeyPair.generate(), []) as worker, trio.open_nursery() as nursery:
        changes = []
        worker.circuits.on_change = lambda: changes.append(worker.circuits.reserved)
        await worker.dial(net.relay.addresses)
        await nursery.start(worker.circuits.hold, net.relay.node, lambda: 0)
        nursery.cancel_scope.cancel()
    assert changes == [(net.relay.node,), ()]


async def test_hop_answers_what_is_no_request_by_its_status():
    async with connected_meshes("libp2p") as pair:
        hops = relay_module.Relay(pair.listener, now=lambda: 0)
        pair.listener.handle(HOP_PROTOCOL, hops.serve_hop)
        for message, status in [
            (b"\x02\xff\xff", Status.MALFORMED_MESSAGE),
            (b"\xff\x7f", Status.MALFORMED_MESSAGE),  # longer than a message may be
            (encode_message(HOP_PROTOCOL, Message(Kind.STATUS, status=100)), Status.UNEXPECTED_MESSAGE),
            (encode_message(HOP_PROTOCOL, Message(Kind.CONNECT, pair.dialer.node)), Status.NO_RESERVATION),
        ]:
            assert (await hop(pair.dialer, pair.listener, message)).status == status
        assert (await hop(pair.dialer, pair.listener, RESERVE)).status == Status.OK
        itself = encode_message(HOP_PROTOCOL, Message(Kind.CONNECT, pair.dialer.node))
        assert (await hop(pair.dialer, pair.listener, itself)).status == Status.PERMISSION_DENIED


RESERVE = encode_message(HOP_PROTOCOL, Message(Kind.RESERVE))


async def test_limits_refuse_with_their_status(monkeypatch):
    monkeypatch.setattr(relay_module, "MAX_RESERVATIONS", 1)
    monkeypatch.setattr(relay_module, "MAX_CIRCUITS_PER_PEER", 1)
    async with open_relayed() as net, open_mesh(KeyPair.generate(), []) as other:
        await other.dial(net.relay.addresses)
        assert (await hop(other, net.relay, RESERVE)).status == Status.RESERVATION_REFUSED
        assert (await hop(net.called, net.relay, RESERVE)).status == Status.OK  # it has one already
        await net.caller.dial(net.called.addresses)
        await wait_until(lambda: net.hops.n_circuits == 1)
        with pytest.raises(PeerError, match="resource limit exceeded"):
            await other.dial(net.called.addresses)


async def test_reservation_over_a_circuit_is_refused():
    async with open_relayed() as net:
        second = relay_module.Relay(net.called, now=lambda: 0)
        net.called.handle(HOP_PROTOCOL, second.serve_hop)
        await net.caller.dial(net.called.addresses)
        await wait_until(lambda: net.caller.node in net.called.peers())
        with pytest.raises(RefusedError, match="permission denied"):
            await net.caller.circuits.hold(net.called.node, lambda: 0)


async def test_relay_that_connects_somebody_else_is_found_out():
    """Attack "redirected relay" of opentela.md 3.4: the handshake inside names who is there."""
    async with open_relayed() as net, open_mesh(KeyPair.generate(), []) as impostor:

        async def redirect(stream):
            await receive_message(stream, HOP_PROTOCOL)
            onward = await net.relay.open(impostor.node, STOP_PROTOCOL)
            await onward.send(encode_message(STOP_PROTOCOL, Message(Kind.CONNECT, stream.peer)))
            await receive_message(onward, STOP_PROTOCOL)
            await stream.send(encode_message(HOP_PROTOCOL, Message(Kind.STATUS, status=Status.OK)))
            await splice(stream, b"", onward, b"")

        impostor.handle(STOP_PROTOCOL, impostor.circuits.serve_stop)
        await impostor.dial(net.relay.addresses)
        net.relay.handle(HOP_PROTOCOL, redirect)
        with pytest.raises(PeerError, match="no answer"):
            await net.caller.dial(net.called.addresses)
        assert net.called.node not in net.caller.peers()


async def test_called_node_that_does_not_take_calls_is_a_failed_connection():
    async with open_relayed() as net:
        net.called.handle(STOP_PROTOCOL, lambda stream: trio.sleep(0))  # as for a relay that is no hub: reset
        with pytest.raises(PeerError, match="connection failed"):
            await net.caller.dial(net.called.addresses)
        await wait_until(lambda: net.hops.n_circuits == 0)


async def test_relay_sees_no_plaintext(monkeypatch):
    seen = bytearray()

    class Spied:
        """A stream that tells what is read from it."""

        def __init__(self, stream):
            self.stream = stream

        async def receive(self):
            data = await self.stream.receive()
            seen.extend(data)
            return data

    pump = relay_module._pump

    async def spy(source, early, sink):
        seen.extend(early)
        await pump(Spied(source), early, sink)

    monkeypatch.setattr(relay_module, "_pump", spy)
    async with open_relayed() as net:
        net.called.handle(ECHO, echo)
        await net.caller.dial(net.called.addresses)
        stream = await net.caller.open(net.called.node, ECHO)
        secret = random.Random(1).randbytes(4096)
        await stream.send(secret)
        await stream.finish()
        assert await receive_all(stream) == secret
    assert len(seen) > 2 * len(secret)
    assert secret[:16] not in seen
    assert ECHO.encode() not in seen


async def test_end_of_the_relay_ends_the_circuit():
    async with open_relayed() as net:
        net.called.handle(ECHO, echo)
        await net.caller.dial(net.called.addresses)
        stream = await net.caller.open(net.called.node, ECHO)
        await net.relay.disconnect(net.caller.node)
        with pytest.raises(StreamResetError):
            await stream.receive()
        await wait_until(lambda: net.caller.node not in net.called.peers())
