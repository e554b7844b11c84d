"""Requests in any split; what is refused, and with which answer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.ingress.framing import Continue, Event, Limits, Request, RequestParser
from tela.ingress.openai import ApiError

HEAD = b"POST /v1/x?q=1 HTTP/1.1\r\nHost: x\r\n"
SMALL = Limits(max_body_bytes=16, max_head_bytes=256)


def parse(data: bytes, limits: Limits = SMALL) -> list[Event]:
    parser = RequestParser(limits)
    parser.feed(data)
    return list(parser.events)


def parse_split(data: bytes, cuts: list[int]) -> list[Event]:
    parser = RequestParser(SMALL)
    edges = sorted({0, len(data), *cuts})
    for start, end in itertools.pairwise(edges):
        parser.feed(data[start:end])
    return list(parser.events)


REFUSED = [
    (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "invalid_request"),
    (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n", 400, "invalid_request"),
    (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nab", 400, "invalid_request"),
    (HEAD + b"Content-Length: +2\r\n\r\nab", 400, "invalid_request"),
    (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400, "invalid_request"),
    (HEAD + b"Transfer-Encoding : chunked\r\n\r\n", 400, "invalid_request"),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\nab\r\n0\r\n\r\n", 400, "invalid_request"),
    (HEAD + b"Authorization: a\r\nauthorization: b\r\n\r\n", 400, "invalid_request"),
    (HEAD + b"A: b\r\n folded\r\n\r\n", 400, "invalid_request"),
    (HEAD.replace(b"\r\n", b"\n") + b"\n", 400, "invalid_request"),
    (HEAD + b"A: b\nC: d\r\n\r\n", 400, "invalid_request"),
    (HEAD + b"A: b\x00\r\n\r\n", 400, "invalid_request"),
    (b"GET /\r\n\r\n", 400, "invalid_request"),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_request"),
    (b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", 405, "method_not_allowed"),
    (HEAD + b"Content-Length: 17\r\n\r\n", 413, "request_too_large"),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n11\r\n" + b"x" * 17 + b"\r\n0\r\n\r\n", 413, "request_too_large"),
    (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx", 415, "unsupported_content_encoding"),
    (HEAD + b"Expect: 200-ok\r\nContent-Length: 1\r\n\r\nx", 417, "expectation_failed"),
    (HEAD + b"A: " + b"x" * 300 + b"\r\n\r\n", 431, "headers_too_large"),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nT: " + b"x" * 300 + b"\r\n\r\n", 431, "headers_too_large"),
]


@pytest.mark.parametrize(("data", "status", "code"), REFUSED, ids=lambda value: repr(value)[:60])
def test_request_that_is_ambiguous_or_too_large_is_refused(data: bytes, status: int, code: str) -> None:
    # Byte by byte, so that the limits do not hang on one feed holding everything.
    for events in (parse(data), parse_split(data, list(range(len(data))))):
        (refusal,) = [event for event in events if isinstance(event, ApiError)]
        assert (refusal.status, refusal.code) == (status, code)
        assert not any(isinstance(event, Request) for event in events)


@pytest.mark.parametrize("start", [b"GET /", HEAD + b"A: ", HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nT: "])
def test_endless_line_is_refused_before_it_ends(start: bytes) -> None:
    (refusal,) = parse_split(start + b"x" * 300, list(range(0, 600, 7)))
    assert isinstance(refusal, ApiError)
    assert refusal.status == 431


def test_refusal_for_size_names_limit_and_setting() -> None:
    (refusal,) = parse(HEAD + b"Content-Length: 17\r\n\r\n")
    assert "16 bytes" in str(refusal)
    assert "max_request_body" in str(refusal)


def test_head_of_32_kib_is_accepted() -> None:
    (request,) = parse(HEAD + b"A: " + b"x" * (32 * 1024 - 100) + b"\r\n\r\n", Limits())
    assert isinstance(request, Request)


def test_expectation_is_met_before_the_body_arrives() -> None:
    parser = RequestParser(SMALL)
    parser.feed(HEAD + b"Expect: 100-Continue\r\nContent-Length: 2\r\n\r\n")
    assert [type(event) for event in parser.events] == [Continue]
    parser.feed(b"ab")
    assert isinstance(parser.events[-1], Request)


def test_too_large_a_body_is_not_waited_for() -> None:
    events = parse(HEAD + b"Expect: 100-continue\r\nContent-Length: 17\r\n\r\n")
    assert [type(event) for event in events] == [ApiError]


def test_offer_of_another_protocol_is_ignored_and_the_body_read() -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\nContent-Length: 2\r\n\r\nab"
    first, second = parse(HEAD + offer + HEAD + b"\r\n")
    assert isinstance(first, Request)
    assert isinstance(second, Request)
    assert first.body == b"ab"
    assert first.header(b"upgrade") is None


def test_parser_lets_go_of_the_body() -> None:
    parser = RequestParser(SMALL)
    parser.feed(HEAD + b"Content-Length: 2\r\n\r\nab")
    assert parser._body == []


def test_nothing_is_read_after_a_refusal() -> None:
    assert len(parse(HEAD + b"Content-Length: x\r\n\r\n" + HEAD + b"\r\n")) == 1


def test_http10_is_not_persistent() -> None:
    (request,) = parse(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert isinstance(request, Request)
    assert not request.is_persistent


bodies = st.lists(st.tuples(st.binary(max_size=16), st.booleans()), min_size=1, max_size=4)


def written(body: bytes, is_chunked: bool) -> bytes:
    if not is_chunked:
        return HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    chunks = b"".join(b"%x;ext\r\n%s\r\n" % (len(piece), piece) for piece in (body[:3], body[3:]) if piece)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nTrailer: t\r\n\r\n"


@given(bodies, st.lists(st.integers(0, 600)))
def test_pipelined_requests_in_any_split_keep_order_and_bytes(cases: list[tuple[bytes, bool]], cuts: list[int]) -> None:
    data = b"".join(written(body, is_chunked) for body, is_chunked in cases)
    events = parse_split(data, [cut for cut in cuts if cut < len(data)])
    assert [event.body for event in events if isinstance(event, Request)] == [body for body, _ in cases]
    assert len(events) == len(cases)
    request = events[0]
    assert isinstance(request, Request)
    assert (request.method, request.target, request.path) == ("POST", "/v1/x?q=1", "/v1/x")
    assert b"trailer" not in dict(request.headers)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200)))
def test_arbitrary_bytes_never_break_the_parser(noise: bytes, cuts: list[int]) -> None:
    for event in parse_split(HEAD + noise, cuts):
        assert isinstance(event, Request | ApiError | Continue)
