"""What a node says of itself to whoever asks: identify 1.0.0, for peers that are no tela and choose protocols by it.

Anybody may ask: the answer holds what a dial or a proposed protocol would show anyway. We ask nobody and take no push:
what a peer is, its certificate says. No observed address is told: members prove theirs by dial-back (decision 0012).
Source: libp2p specs, identify/README.md and peer-ids/peer-ids.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tela import __version__
from tela.net.protobuf import encode_fields, varint
from tela.record import NodeId

IDENTIFY_PROTOCOL: Final = "/ipfs/id/1.0.0"
AGENT: Final = f"tela/{__version__}"
PROTOCOL_VERSION: Final = "ipfs/0.1.0"
"""The same in every libp2p that names one."""
MAX_ADDRESSES: Final = 32
"""js-libp2p reads answers of at most 8 KiB; an address takes some 60 bytes, a protocol 30."""
_ED25519: Final = 1
_KEY_TYPE, _KEY = 1, 2
_PUBLIC_KEY, _LISTEN, _PROTOCOL, _PROTOCOL_VERSION, _AGENT = 1, 2, 3, 5, 6


def identify_answer(node: NodeId, addresses: Iterable[bytes], protocols: Iterable[str]) -> bytes:
    """The answer with its length in front.

    Args:
        node: our key.
        addresses: raw multiaddrs that we are reached on; what is beyond MAX_ADDRESSES is left out.
        protocols: that we serve.
    """
    key = encode_fields((_KEY_TYPE, _ED25519), (_KEY, node))
    message = encode_fields(
        (_PUBLIC_KEY, key),
        *((_LISTEN, address) for address in list(addresses)[:MAX_ADDRESSES]),
        *((_PROTOCOL, protocol.encode()) for protocol in sorted(protocols)),
        (_PROTOCOL_VERSION, PROTOCOL_VERSION.encode()),
        (_AGENT, AGENT.encode()),
    )
    return varint(len(message)) + message
