"""Which of our addresses to announce (faults.md G03, I07, I08).

A wildcard listener is announced as the addresses of the interfaces that others could reach: up, not loopback, not
link-local, not a container bridge, and as the user chose. A listener on loopback is announced as it is: that swarm is
local on purpose. What a member can really dial is found out by dial-back (:mod:`tela.net.reach`).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Final, NamedTuple

import psutil

from tela.errors import ConfigError
from tela.net.endpoints import EVERY_INTERFACE, Choice, Endpoint
from tela.net.multiaddrs import address_of
from tela.record import NodeId

_BRIDGE_PREFIXES: Final = ("docker", "br-", "veth", "virbr", "cni", "flannel", "lxc")
"""Interfaces that lead to containers of this host and to nobody else."""


class Interface(NamedTuple):
    """One address of one network interface."""

    name: str
    address: str
    is_up: bool


def announced_addresses(
    node: NodeId,
    listening: Sequence[Endpoint],
    advertised: Sequence[Endpoint],
    interfaces: Sequence[Interface],
    choice: Choice = EVERY_INTERFACE,
) -> tuple[str, ...]:
    """Multiaddrs to announce, without duplicates: what the user advertises, else what we listen on, made concrete.

    Args:
        node: whose addresses they are.
        listening: what is really bound.
        advertised: what the user wants announced instead.
        interfaces: of this host.
        choice: of those, and of networks; what the user advertises is announced whatever it says.

    Raises:
        ConfigError: the choice names an interface that is none, or leaves nothing.
    """
    if choice != EVERY_INTERFACE:
        _check_names(choice, interfaces)
    concrete = [bound._replace(host=host) for bound in listening for host in _concrete(bound.host, interfaces, choice)]
    if listening and not (advertised or concrete) and choice != EVERY_INTERFACE:
        raise ConfigError("--iface and --exclude-cidr leave no address to be reached at", hint=_hint(interfaces))
    return tuple(dict.fromkeys(str(address_of(node, *endpoint)) for endpoint in advertised or concrete))


def is_wanted(host: str, interfaces: Sequence[Interface], choice: Choice) -> bool:
    """Whether the user wants to be reached at an IP address: of one of our interfaces, or of a NAT before us."""
    names = {interface.name for interface in interfaces if interface.address == host}
    return (not names or not choice.names or bool(names & set(choice.names))) and not _is_excluded(host, choice)


def _is_excluded(host: str, choice: Choice) -> bool:
    return any(ipaddress.ip_address(host) in ipaddress.ip_network(each) for each in choice.excluded)


def unknown_names(choice: Choice, interfaces: Sequence[Interface]) -> list[str]:
    """Interfaces that were chosen and have no address here."""
    return sorted(set(choice.names) - {interface.name for interface in interfaces})


def _check_names(choice: Choice, interfaces: Sequence[Interface]) -> None:
    if unknown := unknown_names(choice, interfaces):
        raise ConfigError(f"no interface {', '.join(unknown)} with an address", hint=_hint(interfaces))


def _hint(interfaces: Sequence[Interface]) -> str:
    addresses = ", ".join(f"{each.name} {each.address}" for each in interfaces if not why_left_out(each))
    return f"this host has: {addresses or 'loopback alone'}; tela doctor tells more"


def local_interfaces() -> list[Interface]:
    """Every IPv4 and IPv6 address of this host."""
    states = psutil.net_if_stats()
    return [
        Interface(name, address.address.partition("%")[0], name in states and states[name].isup)
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for address in addresses
        if address.family in {socket.AF_INET, socket.AF_INET6}
    ]


def _concrete(bound: str, interfaces: Sequence[Interface], choice: Choice) -> list[str]:
    address = ipaddress.ip_address(bound)
    if not address.is_unspecified:
        return [bound] if is_wanted(bound, interfaces, choice) else []
    return [
        interface.address
        for interface in interfaces
        if ipaddress.ip_address(interface.address).version == address.version and not why_left_out(interface, choice)
    ]


def why_left_out(interface: Interface, choice: Choice = EVERY_INTERFACE) -> str:
    """Why an interface's address is not announced; "" where it is."""
    address = ipaddress.ip_address(interface.address)
    reasons = {
        "down": not interface.is_up,
        "loopback": address.is_loopback,
        "link-local": address.is_link_local,
        "leads to containers of this host": interface.name.startswith(_BRIDGE_PREFIXES),
        "not chosen with --iface": bool(choice.names) and interface.name not in choice.names,
        "excluded with --exclude-cidr": _is_excluded(interface.address, choice),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
