"""Only addresses that others could dial are announced."""

from __future__ import annotations

import pytest

from tela.errors import ConfigError
from tela.net.addresses import Interface, announced_addresses, is_wanted, local_interfaces, why_left_out
from tela.net.endpoints import Choice, Endpoint
from tela.net.multiaddrs import node_of_address, parse_address, peer_id
from tela.record import NodeId

NODE = NodeId(b"n" * 32)
INTERFACES = [
    Interface("lo", "127.0.0.1", True),
    Interface("docker0", "172.17.0.1", True),
    Interface("eth0", "10.1.2.3", True),
    Interface("eth1", "10.9.9.9", False),
    Interface("hsn0", "172.30.0.5", True),
    Interface("ib0", "169.254.7.7", True),
    Interface("eth0", "fe80::1", True),
    Interface("eth0", "2001:db8::5", True),
]


@pytest.mark.parametrize(
    ("listening", "advertised", "hosts"),
    [
        ([("0.0.0.0", 4001)], [], ["/ip4/10.1.2.3/tcp/4001", "/ip4/172.30.0.5/tcp/4001"]),
        ([("::", 4001)], [], ["/ip6/2001:db8::5/tcp/4001"]),
        ([("127.0.0.1", 4001)], [], ["/ip4/127.0.0.1/tcp/4001"]),
        ([("0.0.0.0", 4001)], [("gpu.example.org", 443)], ["/dns/gpu.example.org/tcp/443"]),
        ([], [], []),
    ],
)
def test_announced_addresses(
    listening: list[tuple[str, int]], advertised: list[tuple[str, int]], hosts: list[str]
) -> None:
    bound, wanted = ([Endpoint(*pair) for pair in pairs] for pairs in (listening, advertised))
    addresses = announced_addresses(NODE, bound, wanted, INTERFACES)
    assert list(addresses) == [f"{host}/p2p/{peer_id(NODE)}" for host in hosts]
    assert all(node_of_address(address) == NODE for address in addresses)


def test_local_interfaces_hold_loopback() -> None:
    assert any(interface.address == "127.0.0.1" for interface in local_interfaces())


@pytest.mark.parametrize(
    ("choice", "hosts"),
    [
        (Choice(names=("hsn0",)), ["172.30.0.5"]),
        (Choice(names=("eth0", "lo")), ["10.1.2.3"]),  # loopback is nobody's way to us, whatever is chosen
        (Choice(excluded=("10.0.0.0/8",)), ["172.30.0.5"]),
    ],
)
def test_user_chooses_interfaces_and_excludes_networks(choice: Choice, hosts: list[str]) -> None:
    addresses = announced_addresses(NODE, [Endpoint("0.0.0.0", 4001)], [], INTERFACES, choice)
    assert [parse_address(address).host for address in addresses] == hosts


EXCLUDED = Choice(excluded=("10.0.0.0/8",))


@pytest.mark.parametrize(
    ("listening", "choice", "words"),
    [
        ([("0.0.0.0", 4001)], Choice(names=("eht0",)), "no interface eht0"),
        ([], Choice(names=("eht0",)), "no interface eht0"),
        ([("0.0.0.0", 4001)], Choice(excluded=("10.0.0.0/8", "172.16.0.0/12")), "leave no address"),
        ([("0.0.0.0", 4001)], Choice(names=("lo",)), "leave no address"),
        ([("10.1.2.3", 4001)], EXCLUDED, "leave no address"),
        ([("10.1.2.3", 4001)], Choice(names=("hsn0",)), "leave no address"),
    ],
)
def test_choice_that_cannot_be_meant_is_told(listening: list[tuple[str, int]], choice: Choice, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        announced_addresses(NODE, [Endpoint(*pair) for pair in listening], [], INTERFACES, choice)
    assert "eth0 10.1.2.3, hsn0 172.30.0.5" in (caught.value.hint or "")


def test_what_is_advertised_is_announced_whatever_the_choice() -> None:
    advertised = [Endpoint("10.5.5.5", 1)]
    (address,) = announced_addresses(NODE, [Endpoint("0.0.0.0", 4001)], advertised, INTERFACES, EXCLUDED)
    assert parse_address(address).host == "10.5.5.5"


@pytest.mark.parametrize(
    ("host", "choice", "wanted"),
    [
        ("198.51.100.7", Choice(names=("eth0",)), True),  # of the NAT before us
        ("172.30.0.5", Choice(names=("eth0",)), False),
        ("10.1.2.3", Choice(names=("eth0",)), True),
        ("10.7.7.7", EXCLUDED, False),
        ("198.51.100.7", EXCLUDED, True),
    ],
)
def test_address_that_others_see_obeys_the_choice(host: str, choice: Choice, wanted: bool) -> None:
    assert is_wanted(host, INTERFACES, choice) is wanted


def test_each_interface_that_is_left_out_has_its_reason() -> None:
    reasons = [why_left_out(interface) for interface in INTERFACES]
    bridge = "leads to containers of this host"
    assert reasons == ["loopback", bridge, "", "down", "", "link-local", "link-local", ""]
