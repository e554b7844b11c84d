"""``/tela/reach/1``: a member asks another to dial its addresses anew, and learns which lead to it.

Whoever answers opens connections for somebody else, so it does so for members only, seldom, and not to where a member
has no business: not to its own loopback, and into private networks only for who is in one itself. What it sends there
is a Noise handshake that only the asker's key can complete.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec
import trio

from tela.errors import ConfigError, DeadlineError, PeerError, RefusedError
from tela.net.bounds import ASKS_WINDOW_S, MAX_ASKS, AskLimit, deadline
from tela.net.endpoints import NOWHERE, Endpoint, reached_ip
from tela.net.messages import receive_message, send_message, wait_end
from tela.net.multiaddrs import Address, Carrier, parse_address
from tela.net.transport import Mesh, Stream
from tela.record import NodeId, short
from tela.wire import REACH_PROTOCOL, decode

MAX_ADDRESSES: Final = 8
DIAL_TIMEOUT_S: Final = 4.0
"""For one address; all are dialled at once, so an answer is there within 10 s."""
ANSWER_TIMEOUT_S: Final = 8.0
MAX_MESSAGE_BYTES: Final = 8 * 1024
MAX_REASON_CHARS: Final = 200
MAX_IPS: Final = 4
"""That a name may lead to."""


class ReachRequest(msgspec.Struct, frozen=True, array_like=True):
    """Addresses of the asker."""

    addresses: tuple[str, ...]


class ReachReply(msgspec.Struct, frozen=True, array_like=True):
    """For each address "" or why it was not reached, in their order; and where the asker is seen, port 0 if unknown."""

    results: tuple[str, ...]
    observed: str = ""
    code: str = ""  # why nothing was tried
    reason: str = ""
    observed_port: int = 0


class Dialer(Mesh, Protocol):
    """A mesh that can try an address out."""

    async def verify(self, address: Address) -> None:
        """Prove by a fresh connection that ``address`` leads to its node; raises PeerError where it does not."""
        ...

    def observed(self, peer: NodeId) -> Endpoint:
        """The other end of a direct connection with a peer; NOWHERE where there is none."""
        ...


_request_decoder = msgspec.msgpack.Decoder(ReachRequest)
_reply_decoder = msgspec.msgpack.Decoder(ReachReply)


async def ask(mesh: Mesh, peer: NodeId, addresses: Sequence[Address]) -> tuple[dict[Address, str], Endpoint]:
    """What ``peer`` says of our addresses, and where it sees us; NOWHERE where it cannot tell.

    Raises:
        RefusedError: it does not dial for us now.
        PeerError: it does not speak the protocol, or went away.
        DeadlineError: no answer within ANSWER_TIMEOUT_S.
    """
    with deadline(ANSWER_TIMEOUT_S, f"a dial-back by {short(peer)}"):
        stream = await mesh.open(peer, REACH_PROTOCOL)
        try:
            await send_message(stream, ReachRequest(tuple(map(str, addresses))))
            raw = await receive_message(stream, "dial-back", MAX_MESSAGE_BYTES)
            await stream.finish()
        finally:
            stream.reset()
    reply = decode(raw, _reply_decoder, "dial-back reply")
    if reply.code:
        raise RefusedError(reply.reason, code=reply.code)
    if len(reply.results) != len(addresses):
        raise PeerError(f"{short(peer)} answered {len(reply.results)} of {len(addresses)} addresses")
    results = {address: why[:MAX_REASON_CHARS] for address, why in zip(addresses, reply.results, strict=True)}
    return results, _endpoint(reply.observed, reply.observed_port)


def _endpoint(host: str, port: int) -> Endpoint:
    try:
        return Endpoint(str(ipaddress.ip_address(host)), port if 0 < port < 65_536 else 0)
    except ValueError:
        return NOWHERE


class DialBack:
    """The answering side. Serve it to members only."""

    def __init__(self, mesh: Dialer) -> None:
        self._mesh = mesh
        self._limit = AskLimit()

    async def serve(self, stream: Stream) -> None:
        """Answer one question."""
        with deadline(ANSWER_TIMEOUT_S + DIAL_TIMEOUT_S, f"a dial-back for {short(stream.peer)}"):
            raw = await receive_message(stream, "dial-back", MAX_MESSAGE_BYTES)
            request = decode(raw, _request_decoder, "dial-back request")
            await send_message(stream, await self._answer(stream.peer, request))
            await wait_end(stream)

    async def _answer(self, peer: NodeId, request: ReachRequest) -> ReachReply:
        observed = self._mesh.observed(peer)
        if len(request.addresses) > MAX_ADDRESSES:
            return ReachReply((), code="too-many", reason=f"at most {MAX_ADDRESSES} addresses at once")
        if not self._limit.may_ask(peer, trio.current_time()):
            return ReachReply((), code="too-often", reason=f"at most {MAX_ASKS} questions in {ASKS_WINDOW_S:g} s")
        results = [""] * len(request.addresses)

        async def try_one(index: int, text: str) -> None:
            try:
                with deadline(DIAL_TIMEOUT_S, "the dial"):
                    await self._verify(peer, text, observed.host)
            except (ConfigError, PeerError, DeadlineError) as error:
                results[index] = str(error)[:MAX_REASON_CHARS]

        async with trio.open_nursery() as nursery:
            for index, text in enumerate(request.addresses):
                nursery.start_soon(try_one, index, text)
        return ReachReply(tuple(results), observed.host, observed_port=observed.port)

    async def _verify(self, peer: NodeId, text: str, observed: str) -> None:
        address = parse_address(text)
        if address.node != peer or address.relay is not None:
            raise ConfigError("not an address of yours")
        ips = await _resolve(address)
        for ip in ips:
            check_target(ip, observed)
        if address.carrier is not Carrier.WSS:  # whose certificate is for the name, and for nobody else behind it
            # The very address that was checked: a name might lead elsewhere the next time.
            address = address._replace(kind=f"ip{ipaddress.ip_address(ips[0]).version}", host=ips[0])
        await self._mesh.verify(address)


async def _resolve(address: Address) -> list[str]:
    try:
        found = await trio.socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerError(f"{address.host} cannot be resolved here: {error.strerror}") from error
    return [str(sockaddr[0]) for *_, sockaddr in found[:MAX_IPS]]


def check_target(ip: str, observed: str) -> None:
    """Whether to dial ``ip`` for a member whose own link comes from ``observed``.

    Raises:
        PeerError: it is none of our business.
    """
    target = reached_ip(ip)
    source = reached_ip(observed) if observed else None
    if target.is_unspecified or target.is_multicast:
        raise PeerError(f"{ip} is nobody's address")
    if target.is_link_local:  # of which one is the metadata service of clouds
        raise PeerError(f"{ip} leads to a neighbour of whoever dials it")
    if target == source:
        return
    if target.is_loopback and not (source and source.is_loopback):
        raise PeerError(f"{ip} leads to whoever dials it")
    if not target.is_global and (source is None or source.is_global):
        raise PeerError(f"{ip} is private, and you are in another network than this member")
