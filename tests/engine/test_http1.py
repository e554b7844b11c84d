"""HTTP/1.1 towards the engine: heads that are sent, answers in any split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.engine.http1 import (
    MAX_ANSWER_HEAD_BYTES,
    BodyFraming,
    ForwardError,
    ResponseParser,
    content_length,
    end_to_end,
    render_request_head,
)
from tela.engine.report import Endpoint
from tela.record import NodeId
from tela.wire import Claim, GateCode, RequestHead

CLAIM = Claim(NodeId(b"i" * 32), 1, "", "", 0, 60)
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n5;x=y\r\ndefgh\r\n0\r\nT: 1\r\n\r\n"
)
SIZED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 8\r\nConnection: keep-alive, X-B\r\nX-B: 1\r\n\r\nabcdefgh"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + SIZED
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabcdefgh"


def head(*headers: tuple[bytes, bytes], method: str = "POST", target: str = "/v1/completions") -> RequestHead:
    return RequestHead(CLAIM, 0, "r", 0.0, method, target, headers)


def render(request: RequestHead, api_key: str = "", n_bytes: int | None = 2) -> list[bytes]:
    return render_request_head(request, Endpoint("127.0.0.1", 8000, api_key), BodyFraming(n_bytes)).split(b"\r\n")


def parse(data: bytes, sizes: list[int]) -> tuple[ResponseParser, bytes]:
    parser, content = ResponseParser(), b""
    for size in [*sizes, len(data)]:
        piece, data = data[:size], data[size:]
        content += parser.feed(piece) if piece else b""
    return parser, content


def test_request_keeps_end_to_end_headers_as_they_came_and_replaces_the_rest() -> None:
    sent = head(
        (b"X-Request-ID", b"7"),
        (b"authorization", b"Bearer of-the-caller"),
        (b"Connection", b"close, x-hop"),
        (b"X-Hop", b"1"),
        (b"Accept-Encoding", b"gzip"),
        (b"Content-Length", b"2"),
        (b"Transfer-Encoding", b"chunked"),
        (b"host", b"ingress"),
    )
    assert render(sent, api_key="own") == [
        b"POST /v1/completions HTTP/1.1",
        b"X-Request-ID: 7",
        b"Host: 127.0.0.1:8000",
        b"Accept-Encoding: identity",
        b"Content-Length: 2",
        b"Authorization: Bearer own",
        b"",
        b"",
    ]


def test_body_of_unknown_length_is_chunked() -> None:
    assert b"Transfer-Encoding: chunked" in render(head(), n_bytes=None)
    framing = BodyFraming(None)
    assert framing.chunk(b"x" * 17) + framing.end() == b"11\r\n" + b"x" * 17 + b"\r\n0\r\n\r\n"


def test_body_must_have_the_length_that_was_announced() -> None:
    framing = BodyFraming(4)
    assert framing.chunk(b"abc") == b"abc"
    with pytest.raises(ForwardError, match="shorter"):
        framing.end()
    with pytest.raises(ForwardError, match="longer"):
        framing.chunk(b"de")


@pytest.mark.parametrize(
    "request_head",
    [
        head((b"X", b"a\r\nEvil: 1")),
        head((b"X: 1\r\nEvil", b"a")),
        head((b"", b"a")),
        head(target="/v1 HTTP/1.1\r\nEvil: 1"),
        head(method="POST /evil"),
    ],
)
def test_head_that_breaks_out_of_its_line_is_refused(request_head: RequestHead) -> None:
    with pytest.raises(ForwardError) as caught:
        render(request_head)
    assert (caught.value.code, caught.value.is_accepted) == (GateCode.PROTOCOL, False)


@pytest.mark.parametrize("values", [[b"1", b"2"], [b"+1"], [b"1, 1"], [b""], [b"9" * 16]])
def test_content_length_that_is_no_number_is_refused(values: list[bytes]) -> None:
    with pytest.raises(ForwardError):
        content_length(tuple((b"Content-Length", value) for value in values))


def test_content_length_is_read() -> None:
    assert content_length(((b"content-length", b"12"), (b"Content-Length", b"12"))) == 12
    assert content_length(()) is None


@pytest.mark.parametrize(("data", "status", "n_headers"), [(CHUNKED, 200, 1), (SIZED, 404, 1), (INTERIM, 404, 1)])
@given(sizes=st.lists(st.integers(1, 30), max_size=30))
def test_answer_is_the_same_in_any_split(data: bytes, status: int, n_headers: int, sizes: list[int]) -> None:
    parser, content = parse(data, sizes)
    assert parser.head is not None
    assert (parser.head.status, len(parser.head.headers), content) == (status, n_headers, b"abcdefgh")
    assert parser.is_complete
    assert parser.is_reusable


def test_answer_that_ends_with_its_connection_is_complete_then() -> None:
    parser, content = parse(UNTIL_CLOSE, [])
    assert not parser.is_complete
    assert (content, parser.finish()) == (b"abcdefgh", b"")
    assert parser.is_complete
    assert not parser.is_reusable


@pytest.mark.parametrize("data", [b"", SIZED[:-1], CHUNKED[:-20], SIZED[:20]])
def test_answer_that_breaks_off_is_never_a_clean_end(data: bytes) -> None:
    parser, _ = parse(data, [])
    with pytest.raises(ForwardError) as caught:
        parser.finish()
    assert (caught.value.code, caught.value.is_accepted) == (GateCode.ENGINE_DISCONNECTED, True)


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * MAX_ANSWER_HEAD_BYTES,
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    ],
)
def test_answer_that_is_no_http_is_refused(data: bytes) -> None:
    with pytest.raises(ForwardError, match=r"^the (head of the )?engine's answer"):
        ResponseParser().feed(data)


@pytest.mark.parametrize("surplus", [b"HTTP/1.1 200 OK\r\n", b"garbage"])
def test_surplus_after_the_answer_spoils_the_connection_alone(surplus: bytes) -> None:
    parser, content = parse(SIZED + surplus, [])
    assert (content, parser.is_complete, parser.is_reusable) == (b"abcdefgh", True, False)


@given(st.lists(st.tuples(st.sampled_from([b"TE", b"Keep-Alive", b"X-1", b"x-2"]), st.binary(max_size=3))))
def test_end_to_end_keeps_order_and_drops_only_hop_by_hop(headers: list[tuple[bytes, bytes]]) -> None:
    assert end_to_end(headers) == tuple(header for header in headers if header[0].lower().startswith(b"x-"))
