"""Where others can reach us, as a state machine: which addresses to have checked, by whom, and which to announce.

``handle(event, now) -> asks``. An address counts once a member has dialled it anew and found our key behind it
(overlay.md 5); it counts no more when all who had reached it fail to. What a peer sees as our host, with the ports that
we listen on, is a candidate too: a virtual machine in a cloud knows its public address in no other way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tela.net.multiaddrs import Address, address_of
from tela.record import NodeId

RECHECK_S: Final = 600.0
"""Between questions to a member that reached us: a router may forget a forwarding."""
RETRY_S: Final = 5.0
"""After the first that it did not answer, or answered with failures only; doubled each time, up to RECHECK_S. A busy
moment must not cost us our address, and a NAT that never opens must not be knocked at for ever."""
ENOUGH: Final = 2
"""Members that have answered: one may sit in our own network and reach what nobody else does."""
MAX_ANSWERERS: Final = 4
"""Members that are asked where none of the first reached us: they may sit where we cannot be reached from."""
GONE_S: Final = 60.0
"""How long the word of a member counts once it is linked no more; a hub that restarts is back by then."""
MAX_CANDIDATES: Final = 8
"""Addresses to be checked; a host has few networks."""


@dataclass(frozen=True, slots=True)
class Linked:
    """These members are linked with us now: all of them."""

    peers: frozenset[NodeId]


@dataclass(frozen=True, slots=True)
class Answered:
    """What ``peer`` found: for each address "" or why not; and the host that it sees us at, "" where it cannot tell."""

    peer: NodeId
    results: Mapping[Address, str]
    observed: str = ""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """``peer`` did not answer our question."""

    peer: NodeId


Event = Linked | Answered | Unanswered


@dataclass(frozen=True, slots=True)
class Ask:
    """Have ``peer`` dial these."""

    peer: NodeId
    addresses: tuple[Address, ...]


class Reach:
    """One node's knowledge of its own reachability.

    Args:
        claimed: addresses that we listen on or were told to advertise, as they are.
        trusts_claims: announce them until somebody has answered: the first hub of a swarm has nobody to ask.
        is_wanted: whether the user wants to be reached at an IP address, however it is found.
    """

    def __init__(
        self, claimed: Sequence[Address], *, trusts_claims: bool, is_wanted: Callable[[str], bool] = lambda _host: True
    ) -> None:
        self._candidates = list(dict.fromkeys(claimed))[:MAX_CANDIDATES]
        self._ports = {address.port: address for address in claimed}
        self._trusts_claims = trusts_claims
        self._is_wanted = is_wanted
        self._peers: frozenset[NodeId] = frozenset()
        self._due: dict[NodeId, float] = {}  # when a member may be asked again
        self._n_failures: Counter[NodeId] = Counter()  # of each, in a row
        self._reached: dict[Address, set[NodeId]] = {}
        self._reasons: dict[Address, str] = {}
        self._answerers: set[NodeId] = set()
        self._asked: set[NodeId] = set()  # whose answer is awaited
        self._gone_at: dict[NodeId, float] = {}  # since when a member that we know of is not linked

    @property
    def announced(self) -> tuple[Address, ...]:
        """What to tell the swarm."""
        if not self._answerers and self._trusts_claims:
            return tuple(self._candidates)
        return tuple(address for address in self._candidates if self._reached.get(address))

    @property
    def is_checked(self) -> bool:
        """Whether somebody has answered."""
        return bool(self._answerers)

    @property
    def failures(self) -> Mapping[Address, str]:
        """Why an address is not announced, of those that were tried."""
        return {
            address: self._reasons[address]
            for address in self._candidates
            if address in self._reasons and not self._reached.get(address)
        }

    def handle(self, event: Event, now: float) -> list[Ask]:
        """Take one event in; what is returned is to be asked."""
        match event:
            case Linked():
                self._peers = event.peers
                self._forget_gone(now)
            case Answered():
                return self._take_answer(event, now) + self._next_asks(now)
            case Unanswered():
                self._fail(event.peer, now)
        return self._next_asks(now)

    def _next_asks(self, now: float) -> list[Ask]:
        """Questions until ENOUGH have reached us or MAX_ANSWERERS have not; then to those alone, each RECHECK_S."""
        if not self._candidates:
            return []
        known = self._answerers & self._peers
        others = sorted(self._peers - known)
        n_left = min(ENOUGH - len(known & self._reachers), MAX_ANSWERERS - len(known))
        n_wanted = max(0, n_left - sum(self._is_being_asked(peer, now) for peer in others))
        ripe = [peer for peer in others if self._due.get(peer, now) <= now][:n_wanted]
        ripe += [peer for peer in sorted(known) if self._due.get(peer, now) <= now]
        return [self._ask(peer, self._candidates, now) for peer in ripe]

    @property
    def _reachers(self) -> set[NodeId]:
        return {peer for address in self._candidates for peer in self._reached.get(address, ())}

    def _forget_gone(self, now: float) -> None:
        """The word of who left is void, where there is anybody else to ask."""
        for peer in self._peers:
            self._gone_at.pop(peer, None)
        for peer in (self._due.keys() | self._answerers) - self._peers:
            if now - self._gone_at.setdefault(peer, now) >= GONE_S and self._peers:
                self._forget(peer)

    def _forget(self, peer: NodeId) -> None:
        for known in (self._gone_at, self._due, self._n_failures):
            known.pop(peer, None)
        for those in (self._answerers, self._asked, *self._reached.values()):
            those.discard(peer)

    def _is_being_asked(self, peer: NodeId, now: float) -> bool:
        return peer in self._asked and self._due.get(peer, now) > now

    def _fail(self, peer: NodeId, now: float) -> None:
        self._asked.discard(peer)
        self._due[peer] = now + min(RECHECK_S, RETRY_S * 2 ** self._n_failures[peer])
        self._n_failures[peer] = min(self._n_failures[peer] + 1, 10)

    def _ask(self, peer: NodeId, addresses: Sequence[Address], now: float) -> Ask:
        self._due[peer] = now + RECHECK_S
        self._asked.add(peer)
        return Ask(peer, tuple(addresses))

    def _take_answer(self, event: Answered, now: float) -> list[Ask]:
        self._answerers.add(event.peer)
        for address, reason in event.results.items():
            reached = self._reached.setdefault(address, set())
            if reason:
                reached.discard(event.peer)
                self._reasons[address] = reason
            else:
                reached.add(event.peer)
        if any(event.peer in self._reached.get(address, ()) for address in self._candidates):
            self._asked.discard(event.peer)
            self._n_failures[event.peer] = 0
        else:
            self._fail(event.peer, now)
        fresh = self._observed(event.observed)
        return [self._ask(event.peer, fresh, now)] if fresh else []

    def _observed(self, host: str) -> list[Address]:
        if not host or not self._is_wanted(host):
            return []
        seen = [
            address_of(claimed.node, host, port, claimed.carrier)
            for port, claimed in self._ports.items()
            if all((one.host, one.port) != (host, port) for one in self._candidates)
        ]
        fresh = seen[: MAX_CANDIDATES - len(self._candidates)]
        self._candidates += fresh
        return fresh
