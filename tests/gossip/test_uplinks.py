"""Where news goes: two hubs of several, whatever happens to them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tela.gossip.events import Leave, Publish
from tela.gossip.frames import Mode, Records
from tela.gossip.uplinks import UPLINKS, Peer, lazy_links
from tela.record import NodeId, SessionState
from tests.lab.cores import Cores
from tests.lab.statements import card, node

HUBS = [node(number) for number in range(1, 5)]
LEAF, OTHER, FRONT = node(10), node(11), node(12)
ROLES = dict.fromkeys(HUBS, ("hub",)) | {FRONT: ("ingress",), LEAF: ("worker",), OTHER: ("worker",)}

roles = st.sampled_from([(), ("worker",), ("ingress",), ("hub",), ("hub", "ingress")])
links = st.dictionaries(st.integers(1, 40).map(node), st.builds(Peer, roles, st.booleans()), max_size=12)


@given(links)
def test_news_comes_from_two_sound_hubs_or_from_everybody(peers: dict[NodeId, Peer]) -> None:
    lazy = lazy_links(LEAF, ("worker",), peers)
    eager_hubs = {peer for peer, seen in peers.items() if "hub" in seen.roles and seen.is_sound} - lazy
    if lazy:
        assert len(eager_hubs) == UPLINKS
    assert all({"hub", "ingress"} & set(peers[peer].roles) for peer in lazy)
    assert lazy_links(LEAF, ("hub",), peers) == frozenset()


@given(links, st.data())
def test_hub_that_goes_moves_only_who_had_chosen_it(peers: dict[NodeId, Peer], data: st.DataObject) -> None:
    lazy = lazy_links(LEAF, (), peers)
    if lazy:
        gone = data.draw(st.sampled_from(sorted(lazy)))
        rest = {peer: seen for peer, seen in peers.items() if peer != gone}
        assert lazy_links(LEAF, (), rest) == lazy - {gone}


def swarm() -> Cores:
    """Four hubs that know each other; two workers and an ingress that link all of them; workers link the ingress."""
    cores = Cores(*HUBS, LEAF, OTHER, FRONT)
    for index, hub in enumerate(HUBS):
        for other in HUBS[index + 1 :]:
            cores.connect(hub, other)
        for leaf in (LEAF, OTHER, FRONT):
            cores.connect(leaf, hub)
    for leaf in (LEAF, OTHER):
        cores.connect(leaf, FRONT)
    for each, its in ROLES.items():
        cores.handle(each, Publish(SessionState.SERVING, card(each, roles=its)))
    cores.settle()
    cores.run(1.0)
    return cores


def copies(cores: Cores, receiver: NodeId, since: int) -> list[NodeId]:
    """Who sent news there."""
    return [sender for sender, to, frame in cores.sent[since:] if to == receiver and isinstance(frame, Records)]


def update(cores: Cores, owner: NodeId, model: str) -> int:
    start = len(cores.sent)
    cores.handle(owner, Publish(SessionState.SERVING, card(owner, model, roles=ROLES[owner])))
    cores.settle()
    return start


def test_update_comes_twice_to_a_leaf_and_is_everywhere() -> None:
    cores = swarm()
    n_to_hubs, n_to_the_ingress = 2 * 3, 2
    assert sum(frame.is_lazy for frame in cores.frames(Mode)) == n_to_hubs + n_to_the_ingress
    start = update(cores, OTHER, "llama")
    assert len(cores.roots()) == 1
    for leaf in (LEAF, FRONT):
        assert len(copies(cores, leaf, start)) == UPLINKS
        assert set(copies(cores, leaf, start)) <= set(HUBS)


def test_uplink_that_is_lost_is_replaced_and_nothing_is_missed() -> None:
    cores = swarm()
    lost = copies(cores, LEAF, update(cores, OTHER, "one"))[0]
    for link, (owner, peer, _) in sorted(cores._ends.items()):
        if {owner, peer} == {LEAF, lost}:
            cores.cut_link(link)
            break
    cores.settle()
    update(cores, OTHER, "two")
    assert len(cores.roots()) == 1
    cores.run(1.0)
    senders = copies(cores, LEAF, update(cores, OTHER, "three"))
    assert len(senders) == UPLINKS
    assert lost not in senders


def test_farewell_goes_to_everybody() -> None:
    cores = swarm()
    start = len(cores.sent)
    cores.handle(LEAF, Leave())
    cores.settle()
    told = {to for sender, to, frame in cores.sent[start:] if sender == LEAF and isinstance(frame, Records)}
    assert told == {*HUBS, FRONT}
