"""Addresses of nodes: libp2p multiaddrs as text, and what is in them.

Four forms, each with the peer id of whom it leads to at its end (libp2p specs, addressing/README.md). Of a circuit, as
in relay/circuit-v2.md, the front part is the relay's own address::

    /ip4/192.0.2.1/tcp/4001/p2p/PEER_ID
    /dns/hub.example/tcp/8080/ws/p2p/PEER_ID
    /dns/hub.example/tcp/443/tls/ws/p2p/PEER_ID
    /ip4/192.0.2.1/tcp/4001/p2p/RELAY_ID/p2p-circuit/p2p/PEER_ID
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Sequence
from typing import Final, NamedTuple

import base58

from tela.errors import ConfigError
from tela.record import NodeId

# libp2p peer id of an Ed25519 key: identity multihash (0x00, 36 bytes) of the key's protobuf (type 1, 32 bytes).
# Source: libp2p specs, peer-ids/peer-ids.md.
_PEER_ID_PREFIX: Final = bytes.fromhex("002408011220")
_FORM_HINT: Final = "the form is /ip4/192.0.2.1/tcp/4001/p2p/PEER_ID"
_HOST_KINDS: Final = frozenset({"ip4", "ip6", "dns", "dns4", "dns6"})
_CIRCUIT: Final = "/p2p-circuit"


class Carrier(enum.StrEnum):
    """What the bytes of a connection are in; the value is how an address spells it behind its port."""

    TCP = ""
    WS = "/ws"
    WSS = "/tls/ws"


class Address(NamedTuple):
    """Where to connect to, to reach ``node``."""

    kind: str  # ip4 | ip6 | dns | dns4 | dns6
    host: str
    port: int
    carrier: Carrier
    node: NodeId  # whom it leads to
    relay: NodeId | None = None  # whose host and port these are, where it is not the node itself

    def __str__(self) -> str:
        end = f"/p2p/{peer_id(self.node)}"
        first = end if self.relay is None else f"/p2p/{peer_id(self.relay)}{_CIRCUIT}{end}"
        return f"/{self.kind}/{self.host}/tcp/{self.port}{self.carrier}{first}"


def parse_address(text: str) -> Address:
    """The parts of one of the four forms; ``/wss`` is taken for ``/tls/ws``.

    Raises:
        ConfigError: it has another form.
    """
    front, circuit, back = text.partition(_CIRCUIT)
    address = _parse_plain(front, text)
    if not circuit:
        return address
    empty, p2p, peer = [*back.split("/"), "", ""][:3]
    if empty or p2p != "p2p" or back.count("/") != 2:
        raise _malformed(text)
    return address._replace(node=node_of_peer_id(peer), relay=address.node)


def _parse_plain(front: str, whole: str) -> Address:
    parts = front.replace("/wss/", "/tls/ws/").split("/")
    empty, kind, host, tcp, port, *carrier, p2p, peer = parts if len(parts) >= 7 else [""] * 7
    spelled = "".join(f"/{part}" for part in carrier)
    well_formed = (
        not empty
        and kind in _HOST_KINDS
        and host
        and tcp == "tcp"
        and port.isdecimal()
        and int(port) < 65_536
        and spelled in set(Carrier)
        and p2p == "p2p"
    )
    if not well_formed:
        raise _malformed(whole)
    return Address(kind, host, int(port), Carrier(spelled), node_of_peer_id(peer))


def _malformed(text: str) -> ConfigError:
    return ConfigError(f"malformed address {text[:128]}", hint=_FORM_HINT)


def address_of(node: NodeId, host: str, port: int, carrier: Carrier = Carrier.TCP) -> Address:
    """The address of a node that is reached at an IP address or a DNS name."""
    try:
        kind = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "dns"
    return Address(kind, host, port, carrier, node)


def node_of_address(text: str) -> NodeId:
    """The peer that an address leads to. Raises what :func:`parse_address` raises."""
    return parse_address(text).node


def node_of_addresses(addresses: Sequence[str]) -> NodeId:
    """The one peer that all ``addresses`` name.

    Raises:
        ConfigError: none given, one is malformed, or they name several peers.
    """
    nodes = {node_of_address(address) for address in addresses}
    if len(nodes) != 1:
        raise ConfigError(f"{len(addresses)} addresses name {len(nodes)} peers instead of one")
    return nodes.pop()


def peer_id(node: NodeId) -> str:
    """The libp2p peer id of a node key, as in ``/p2p/12D3Koo...``."""
    return str(base58.b58encode(raw_peer_id(node)), "ascii")


def raw_peer_id(node: NodeId) -> bytes:
    """The same in bytes, as protocols carry it."""
    return _PEER_ID_PREFIX + node


def node_of_peer_id(text: str) -> NodeId:
    """The node key inside an Ed25519 peer id.

    Raises:
        ConfigError: not the peer id of an Ed25519 key.
    """
    try:
        raw = base58.b58decode(text)
    except ValueError as error:
        raise ConfigError(f"not a peer id: {text[:64]}") from error
    return node_of_raw_peer_id(raw)


def node_of_raw_peer_id(raw: bytes) -> NodeId:
    """The same of the bytes. Raises what :func:`node_of_peer_id` raises."""
    if len(raw) != len(_PEER_ID_PREFIX) + 32 or not raw.startswith(_PEER_ID_PREFIX):
        raise ConfigError(f"not the peer id of an Ed25519 key: {raw[:40].hex()}")
    return NodeId(raw[len(_PEER_ID_PREFIX) :])
