"""The four forms of an address, there and back, and what is none."""

from __future__ import annotations

import pytest

from tela.errors import ConfigError
from tela.net.multiaddrs import Carrier, address_of, node_of_addresses, parse_address, peer_id
from tela.record import NodeId

NODE, RELAY = NodeId(b"n" * 32), NodeId(b"r" * 32)
END = f"/p2p/{peer_id(NODE)}"
CIRCUIT = f"/p2p/{peer_id(RELAY)}/p2p-circuit{END}"


@pytest.mark.parametrize(
    ("text", "carrier", "relay"),
    [
        (f"/ip4/192.0.2.1/tcp/4001{END}", Carrier.TCP, None),
        (f"/ip6/2001:db8::1/tcp/4001{END}", Carrier.TCP, None),
        (f"/dns/hub.example/tcp/8080/ws{END}", Carrier.WS, None),
        (f"/dns4/hub.example/tcp/443/tls/ws{END}", Carrier.WSS, None),
        (f"/ip4/192.0.2.1/tcp/4001{CIRCUIT}", Carrier.TCP, RELAY),
        (f"/dns/hub.example/tcp/443/tls/ws{CIRCUIT}", Carrier.WSS, RELAY),
    ],
)
def test_forms_there_and_back(text: str, carrier: Carrier, relay: NodeId | None) -> None:
    address = parse_address(text)
    assert (address.node, address.carrier, address.relay) == (NODE, carrier, relay)
    assert str(address) == text


def test_wss_is_another_spelling() -> None:
    assert parse_address(f"/dns/hub.example/tcp/443/wss{END}").carrier is Carrier.WSS


@pytest.mark.parametrize(
    "text",
    [
        "",
        "192.0.2.1:4001",
        "/ip4/192.0.2.1/tcp/4001",
        f"/ip4/192.0.2.1/tcp/70000{END}",
        f"/ip4//tcp/4001{END}",
        f"/ip4/192.0.2.1/udp/4001{END}",
        f"/ip4/192.0.2.1/tcp/4001/quic{END}",
        f"x/ip4/192.0.2.1/tcp/4001{END}",
        f"/ip4/192.0.2.1/tcp/4001{END}{END}",
        f"/ip4/192.0.2.1/tcp/4001{END}/ip4/192.0.2.1/tcp/4001{END}",  # pasted twice (faults.md G03)
        f"/ip4/192.0.2.1/tcp/4001{END}/p2p-circuit",
        f"/ip4/192.0.2.1/tcp/4001/p2p-circuit{END}",
        f"/ip4/192.0.2.1/tcp/4001{CIRCUIT}/p2p-circuit{END}",
        "/ip4/192.0.2.1/tcp/4001/p2p/QmNotAnEd25519Key",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(text)


@pytest.mark.parametrize(("host", "start"), [("192.0.2.1", "/ip4/"), ("::1", "/ip6/"), ("gpu.example", "/dns/")])
def test_kind_of_a_host(host: str, start: str) -> None:
    assert str(address_of(NODE, host, 4001)).startswith(start)


def test_addresses_of_several_peers_are_an_error() -> None:
    with pytest.raises(ConfigError):
        node_of_addresses([str(address_of(node, "192.0.2.1", 1)) for node in (NODE, RELAY)])
