"""Hypothesis drives three cores step by step; whatever it does, they agree once they are linked and time passes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tela.crdt.lattice import Status
from tela.gossip.events import Publish, Suspect, Tick
from tela.record import SessionState
from tests.lab.cores import Cores
from tests.lab.statements import NOW, card, node

NODES = [node(number) for number in range(1, 4)]
nodes = st.sampled_from(NODES)


class ThreeCores(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cores = Cores(*NODES)
        for each in NODES:
            self.cores.publish(each)

    @rule(opener=nodes, other=nodes)
    def connect(self, opener, other):
        if opener != other:
            self.cores.connect(opener, other)

    @rule(index=st.integers(0, 20))
    def cut(self, index):
        self.cores.cut_any(index)

    @rule(each=nodes, model=st.sampled_from(["llama", "qwen"]))
    def publish(self, each, model):
        self.cores.handle(each, Publish(SessionState.SERVING, card(each, model)))

    @rule(each=nodes, peer=nodes)
    def suspect(self, each, peer):
        self.cores.handle(each, Suspect(peer))

    @rule(each=nodes)
    def restart(self, each):
        self.cores.cut(each)
        self.cores.restart(each)

    @rule(n_frames=st.integers(1, 9), is_twice=st.booleans())
    def deliver(self, n_frames, is_twice):
        for _ in range(n_frames):
            self.cores.deliver(is_twice=is_twice)

    @rule(step_s=st.sampled_from([0.25, 0.5, 3.0]))
    def wait(self, step_s):
        self.cores.now += step_s
        for each in NODES:
            self.cores.handle(each, Tick(NOW + self.cores.now))

    def teardown(self):
        for index, opener in enumerate(NODES):
            for other in NODES[index + 1 :]:
                self.cores.connect(opener, other)
        self.cores.settle()
        for each in NODES:
            self.cores.publish(each)
        self.cores.run(14.0)
        assert len(self.cores.roots()) == 1
        for core in self.cores.cores.values():
            assert {core.map.node(each).status for each in NODES} == {Status.SERVING}


TestThreeCores = ThreeCores.TestCase
TestThreeCores.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
