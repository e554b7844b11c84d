from __future__ import annotations

from libp2p.crypto.serialization import deserialize_public_key
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from tela import __version__
from tela.identity import KeyPair
from tela.net.identify import IDENTIFY_PROTOCOL, MAX_ADDRESSES, identify_answer
from tela.net.multiaddrs import peer_id
from tela.net.protobuf import MessageCutter
from tests.lab.meshes import connected_meshes, receive_all

NODE = KeyPair(bytes(32)).public


def parsed(answer: bytes) -> Identify:
    message = MessageCutter(8_192).feed(answer)
    assert message is not None
    identify = Identify()
    identify.ParseFromString(message)
    return identify


def test_answer_is_read_by_the_library():
    address = Multiaddr("/ip4/192.0.2.1/tcp/4001")
    identify = parsed(identify_answer(NODE, [address.to_bytes()], ["/b/1", "/a/1"]))
    assert str(ID.from_pubkey(deserialize_public_key(identify.public_key))) == peer_id(NODE)
    assert [Multiaddr(raw) for raw in identify.listen_addrs] == [address]
    assert list(identify.protocols) == ["/a/1", "/b/1"]
    assert identify.agent_version == f"tela/{__version__}"
    assert not identify.HasField("observed_addr")


def test_addresses_are_bounded():
    addresses = [bytes([index]) for index in range(MAX_ADDRESSES + 1)]
    assert list(parsed(identify_answer(NODE, addresses, [])).listen_addrs) == addresses[:MAX_ADDRESSES]


async def test_mesh_tells_its_addresses_and_all_protocols():
    async with connected_meshes("libp2p") as pair:
        pair.listener.handle("/tela/echo/1", receive_all)
        stream = await pair.dialer.open(pair.listener.node, IDENTIFY_PROTOCOL)
        identify = parsed(await stream.receive())
        assert [str(Multiaddr(raw)) for raw in identify.listen_addrs] == list(pair.listener.addresses)
        assert set(identify.protocols) == {IDENTIFY_PROTOCOL, "/ipfs/ping/1.0.0", "/tela/echo/1"}
