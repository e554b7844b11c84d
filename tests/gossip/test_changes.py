import msgspec
import pytest

from tela.crdt.lattice import Status
from tela.crdt.registry import Member
from tela.gossip.changes import explain
from tela.record import Card, InstanceState, NodeId, Service, SessionId, SessionState, Vote, VoteKind

OWNER = NodeId(b"o" * 32)


def vote(observer, kind):
    return Vote(NodeId(observer * 32), OWNER, SessionId(7), 0, kind, 0, b"")


def member(**fields):
    usual = {
        "node": OWNER,
        "session": SessionId(7),
        "state": SessionState.SERVING,
        "status": Status.SERVING,
        "incarnation": 0,
        "certificate": None,
        "card": Card(),
        "n_suspect_votes": 0,
        "expires_unix_s": 0,
    }
    return Member(**(usual | fields))


def offering(*services, addresses=()):
    return member(card=Card(services=services, addresses=addresses))


READY = Service(0, "vllm", "tiny", InstanceState.READY)
SUSPECT = member(status=Status.SUSPECT, n_suspect_votes=1)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (None, member(), "heard of for the first time"),
        (member(), None, "its lease ended"),
        (member(), member(), None),
        (member(), member(expires_unix_s=9), None),  # a renewed lease is no news
        (member(), member(session=SessionId(8)), "a new session"),
        (member(status=Status.JOIN, state=SessionState.JOIN), member(), "it says so"),
        (member(), SUSPECT, "suspected by 61616161"),
        (SUSPECT, member(status=Status.SUSPECT, n_suspect_votes=2), "suspected by 61616161"),
        (SUSPECT, member(incarnation=1), "refuted with incarnation 1"),
        (SUSPECT, member(), "suspicion faded"),
        (SUSPECT, member(status=Status.LEFT, state=SessionState.LEFT), "it says so"),
        (SUSPECT, member(status=Status.DOWN), "voted down by 62626262"),
        (offering(), offering(READY), "tiny is ready"),
        (offering(READY), offering(msgspec.structs.replace(READY, state=InstanceState.DOWN, reason="OOM")),
         "tiny is down (OOM)"),
        (member(status=Status.JOIN, state=SessionState.JOIN), offering(READY), "it says so; tiny is ready"),
        (offering(READY), offering(), "tiny is gone"),
        (offering(READY), offering(READY, addresses=("a",)), "announces 1 addresses"),
        (member(), member(card=None), "its card cannot be read"),
        (member(card=None), member(), "its card can be read now"),
    ],
)  # fmt: skip
def test_explain_says_why_a_reader_sees_it_otherwise(before, after, reason):
    votes = (vote(b"a", VoteKind.SUSPECT), vote(b"b", VoteKind.DOWN))
    assert explain(before, after, votes, is_revoked=False) == reason


def test_explain_tells_a_revoked_member_from_one_that_ran_out():
    assert explain(member(), None, (), is_revoked=True) == "revoked"
