"""Where to listen and what to advertise, as users write it: ``HOST:PORT``, ``ws://HOST:PORT``, ``wss://HOST[:443]``."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final, NamedTuple

from tela.errors import ConfigError
from tela.net.multiaddrs import Carrier

_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_SCHEMES: Final = {"": Carrier.TCP, "ws": Carrier.WS, "wss": Carrier.WSS}
_DEFAULT_PORTS: Final = {Carrier.WS: 80, Carrier.WSS: 443}


class Endpoint(NamedTuple):
    """One end of connections."""

    host: str
    port: int
    carrier: Carrier = Carrier.TCP


NOWHERE: Final = Endpoint("", 0)
"""Not known."""


class Choice(NamedTuple):
    """Which interfaces the user wants to be reached on."""

    names: tuple[str, ...] = ()  # these only; empty: all
    excluded: tuple[str, ...] = ()  # networks, as 10.0.0.0/8


EVERY_INTERFACE: Final = Choice()


def parse_endpoint(text: str) -> Endpoint:
    """The parts of one of the three forms; an IPv6 address stands in brackets.

    >>> parse_endpoint("wss://hub.example.org")
    Endpoint(host='hub.example.org', port=443, carrier=<Carrier.WSS: '/tls/ws'>)

    Raises:
        ValueError: another form, or no such port.
    """
    scheme, separator, rest = text.rpartition("://")
    carrier = _SCHEMES.get(scheme)
    if carrier is None or (separator and not scheme):
        raise ValueError(f"{text!r} has an unknown scheme: write HOST:PORT, ws://HOST:PORT or wss://HOST")
    rest = rest.rstrip("/") if separator else rest
    host, colon, port = rest.rpartition(":")
    if carrier in _DEFAULT_PORTS and (not colon or rest.endswith("]")):
        host, port = rest, str(_DEFAULT_PORTS[carrier])
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or "/" in host or not port.isdecimal() or not port.isascii() or int(port) > 65_535:
        raise ValueError(f"{text!r} is no address: write it as 127.0.0.1:8080, [::1]:8080 or wss://hub.example.org")
    return Endpoint(host, int(port), carrier)


def endpoints_of(texts: Sequence[str]) -> tuple[Endpoint, ...]:
    """All of them. Raises ConfigError for a malformed one."""
    try:
        return tuple(map(parse_endpoint, texts))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def reached_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """What is really dialled: an IPv6 address may stand for an IPv4 one (RFC 4291 section 2.5.5.2, RFC 6052)."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address
