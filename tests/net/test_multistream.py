"""multistream-select without I/O: both ends, any split, wrong peers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.errors import PeerError, ProtocolError
from tela.net.multistream import HEADER, MAX_PROPOSALS, REFUSAL, Offer, Selected, Selection, line

OURS, THEIRS = "/tela/echo/1", "/ipfs/ping/1.0.0"


def selection() -> Selection:
    return Selection(lambda name: name == OURS, lambda name: name == THEIRS)


def feed(taker, content: bytes, cuts) -> list:
    """Results of ``content`` given in pieces."""
    edges = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
    return [taker.receive(content[start:stop]) for start, stop in itertools.pairwise(edges)]


@given(st.lists(st.integers(0, 1000)), st.lists(st.integers(0, 1000)), st.binary(max_size=20))
def test_offer_and_selection_agree_however_the_bytes_are_cut(cuts, other_cuts, payload):
    offer, accepting = Offer(OURS), selection()
    answers = feed(accepting, offer.opening, cuts)
    assert answers[-1][1] == Selected(OURS, is_native=True, rest=b"")
    assert accepting.n_received == len(offer.opening)
    reply = b"".join(answer for answer, _ in answers)
    got = []
    edges = sorted({0, len(reply), *(cut % (len(reply) + 1) for cut in other_cuts)})
    for start, stop in itertools.pairwise(edges):
        got.append(offer.receive(reply[start:stop] + (payload if stop == len(reply) else b"")))
    assert got[:-1] == [None] * (len(got) - 1)
    assert got[-1] == payload


def test_first_data_behind_the_proposal_is_kept():
    _, selected = selection().receive(Offer(OURS).opening + b"data")
    assert selected == Selected(OURS, is_native=True, rest=b"data")


def test_header_is_answered_before_the_proposal_comes():
    accepting = selection()
    assert accepting.receive(HEADER) == (HEADER, None)
    assert accepting.receive(line(OURS)) == (line(OURS), Selected(OURS, is_native=True, rest=b""))


def test_library_protocol_is_handed_over_with_its_proposal():
    answer, selected = selection().receive(HEADER + line(THEIRS) + b"data")
    assert answer == HEADER
    assert selected == Selected(THEIRS, is_native=False, rest=HEADER + line(THEIRS) + b"data")


def test_unknown_protocols_are_refused_one_by_one():
    accepting = selection()
    assert accepting.receive(HEADER + line("/a") + line("/b")) == (HEADER + REFUSAL * 2, None)
    assert accepting.receive(line(OURS))[1].protocol == OURS
    with pytest.raises(ProtocolError, match="proposed"):
        selection().receive(HEADER + line("/a") * (MAX_PROPOSALS + 1))


@pytest.mark.parametrize("content", [b"\x00", b"\xff" * 9, b"\x03abc", line("/x"), b"GET / HTTP/1.1" * 9])
def test_what_is_no_multistream_is_an_error(content):
    with pytest.raises(ProtocolError):
        selection().receive(content)


def test_refused_offer_is_a_peer_error():
    offer = Offer(OURS)
    assert offer.receive(HEADER) is None
    with pytest.raises(PeerError, match="does not speak"):
        offer.receive(REFUSAL)


def test_offer_wants_multistream_back():
    with pytest.raises(ProtocolError):
        Offer(OURS).receive(b"HTTP/1.1 400\r\n")
