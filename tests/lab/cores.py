"""Gossip cores joined by links in memory, driven by hand: for tests of single exchanges."""

from __future__ import annotations

import itertools

from tela.gossip.core import TICK_S, GossipCore
from tela.gossip.events import Close, Effect, FrameReceived, LinkDown, LinkId, LinkUp, Publish, Send, Sent, Tick
from tela.gossip.frames import Frame, FrameCutter, decode_frame
from tela.record import NodeId, SessionState
from tests.lab.statements import NOW, SIGNER, CountingVerifier, card


class Cores:
    """A set of nodes. Frames wait until :meth:`settle`; time stands still until :meth:`run`."""

    def __init__(self, *nodes: NodeId) -> None:
        self.now = 0.0
        self.counting = {node: CountingVerifier() for node in nodes}
        self.cores = {node: self._new(node) for node in nodes}
        self.effects: dict[NodeId, list[Effect]] = {node: [] for node in nodes}
        self.sent: list[tuple[NodeId, NodeId, Frame]] = []
        self._ends: dict[LinkId, tuple[NodeId, NodeId, LinkId]] = {}  # link -> (our node, their node, their link)
        self._wire: list[tuple[LinkId, bytes]] = []
        self._ids = map(LinkId, itertools.count(1))
        self.is_mute: set[NodeId] = set()

    def _new(self, node: NodeId) -> GossipCore:
        return GossipCore(node, self.counting[node].verifier, SIGNER, now=self.now, unix_s=NOW)

    def restart(self, node: NodeId) -> None:
        self.cores[node] = self._new(node)

    def __getitem__(self, node: NodeId) -> GossipCore:
        return self.cores[node]

    def handle(self, node: NodeId, event: object) -> list[Effect]:
        effects = self.cores[node].handle(event, self.now)
        self.cores[node].validate()
        self.effects[node] += effects
        for effect in effects:
            if isinstance(effect, Send):
                self._wire.append((effect.link, effect.data))
            elif isinstance(effect, Close):
                self.cut_link(effect.link)
        return effects

    def connect(self, opener: NodeId, other: NodeId) -> LinkId:
        ours, theirs = next(self._ids), next(self._ids)
        self._ends[ours] = (opener, other, theirs)
        self._ends[theirs] = (other, opener, ours)
        self.handle(opener, LinkUp(ours, other, is_ours=True))
        self.handle(other, LinkUp(theirs, opener, is_ours=False))
        return ours

    def cut_link(self, link: LinkId) -> None:
        node, peer, other = self._ends.pop(link, (None, None, None))
        if other in self._ends:
            del self._ends[other]
            self.handle(node, LinkDown(link))
            self.handle(peer, LinkDown(other))

    def cut(self, node: NodeId) -> None:
        for link, (owner, _, _) in list(self._ends.items()):
            if owner == node:
                self.cut_link(link)

    def settle(self) -> None:
        """Deliver until nothing is on its way."""
        while self._wire:
            self.deliver()

    def deliver(self, *, is_twice: bool = False) -> None:
        """Deliver the oldest frame, if there is one."""
        if not self._wire:
            return
        link, data = self._wire.pop(0)
        if link not in self._ends:
            return
        sender, receiver, other = self._ends[link]
        self.handle(sender, Sent(link))
        if sender in self.is_mute:
            return
        for payload in FrameCutter().feed(data) * (2 if is_twice else 1):
            self.sent.append((sender, receiver, decode_frame(payload)))
            self.handle(receiver, FrameReceived(other, payload))

    def cut_any(self, index: int) -> None:
        """Cut one of the links, if there is one."""
        links = sorted(self._ends)
        if links:
            self.cut_link(links[index % len(links)])

    def run(self, duration_s: float) -> None:
        """Let time pass, tick by tick."""
        for _ in range(round(duration_s / TICK_S)):
            self.now += TICK_S
            for node in self.cores:
                self.handle(node, Tick(NOW + self.now))
            self.settle()

    def publish(self, node: NodeId, *models: str, state: SessionState = SessionState.SERVING) -> None:
        self.handle(node, Publish(state, card(node, *models)))
        self.settle()

    def roots(self) -> set[int]:
        return {core.map.digest.root for core in self.cores.values()}

    def frames(self, kind: type, since: int = 0) -> list[Frame]:
        return [frame for _, _, frame in self.sent[since:] if isinstance(frame, kind)]
