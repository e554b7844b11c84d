"""What callers ask by headers, and what crosses the ingress."""

from __future__ import annotations

import pytest

from tela.ingress import headers
from tela.ingress.headers import Wishes, read_wishes
from tela.ingress.openai import ApiError
from tela.ingress.policy import Policy

PROVIDERS = {"a", "b", ""}

ALLOWLISTS = [
    (b"a", {"a"}),
    (b" a , ", {"a"}),
    (b"a,b", {"a", "b"}),
    (b"a , b,", {"a", "b"}),
    (b"", set()),
    (b"  ", set()),
]


@pytest.mark.parametrize(("value", "expected"), ALLOWLISTS)
def test_allowlist_is_read(value: bytes, expected: set[str]) -> None:
    assert read_wishes(((b"x-tela-providers", value),), PROVIDERS).allowlist == expected


REFUSED = [
    (b"x-tela-providers", b"A"),
    (b"x-tela-providers", b"a,,b"),
    (b"x-tela-providers", b"*"),
    (b"x-tela-providers", b","),
    (b"x-tela-providers", b"a;b"),
    (b"x-tela-providers", "ä".encode()),
    (b"x-tela-providers", b"a,zurich"),
    (b"x-tela-provider", b"a"),
    (b"x-tela-require", b"gpu=H100"),
    (b"x-tela-policy", b"nonsense"),
    (b"x-tela-policy", b""),
    (b"x-tela-timeout", b"0"),
    (b"x-tela-timeout", b"-1"),
    (b"x-tela-timeout", b"1e3"),
    (b"x-tela-timeout", b"nan"),
    (b"x-tela-timeout", b"100000"),
    (b"x-tela-no-retry", b"yes"),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_header_that_is_not_understood_is_refused(name: bytes, value: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_wishes(((name, value),), PROVIDERS)
    assert caught.value.status == 400


def test_refusal_names_the_legal_values() -> None:
    with pytest.raises(ApiError, match="random, round-robin"):
        read_wishes(((b"x-tela-policy", b"best"),), PROVIDERS)
    with pytest.raises(ApiError, match="known are: a, b"):
        read_wishes(((b"x-tela-providers", b"c"),), PROVIDERS)
    with pytest.raises(ApiError, match="x-tela-timeout"):
        read_wishes(((b"x-tela-require", b"c"),), PROVIDERS)


def test_second_header_of_a_name_is_refused() -> None:
    with pytest.raises(ApiError, match="more than one"):
        read_wishes(((b"x-tela-providers", b"a"), (b"x-tela-providers", b"b")), PROVIDERS)


def test_wishes_are_read_and_have_defaults() -> None:
    assert read_wishes(((b"host", b"x"),), PROVIDERS) == Wishes(None, Policy.ROUND_ROBIN, 3600.0, may_retry=True)
    asked = ((b"x-tela-policy", b"random"), (b"x-tela-timeout", b"1.5"), (b"x-tela-no-retry", b"1"))
    assert read_wishes(asked, PROVIDERS) == Wishes(None, Policy.RANDOM, 1.5, may_retry=False)


def test_credentials_and_hop_by_hop_headers_are_not_forwarded() -> None:
    given = (
        (b"host", b"x"),
        (b"authorization", b"Bearer secret"),
        (b"cookie", b"secret"),
        (b"x-api-key", b"secret"),
        (b"api-key", b"secret"),
        (b"proxy-authorization", b"secret"),
        (b"x-tela-providers", b"a"),
        (b"connection", b"close, X-Private"),
        (b"x-private", b"hop"),
        (b"transfer-encoding", b"chunked"),
        (b"te", b"trailers"),
        (b"expect", b"100-continue"),
        (b"accept-encoding", b"gzip"),
        (b"content-type", b"application/json"),
        (b"x-custom", b"1"),
        (b"x-custom", b"2"),
    )
    assert headers.forwarded(given, n_body_bytes=7, request_id="id") == (
        (b"content-type", b"application/json"),
        (b"x-custom", b"1"),
        (b"x-custom", b"2"),
        (b"content-length", b"7"),
        (b"accept-encoding", b"identity"),
        (b"x-request-id", b"id"),
    )


def test_answer_keeps_what_is_end_to_end() -> None:
    given = (
        (b"Content-Type", b"application/json"),
        (b"Content-Length", b"7"),
        (b"Retry-After", b"7"),
        (b"x-ratelimit-remaining-requests", b"0"),
        (b"Connection", b"keep-alive"),
        (b"Keep-Alive", b"timeout=5"),
        (b"X-Request-Id", b"theirs"),
        (b"X-Tela-Node", b"forged"),
    )
    kept = [
        (b"content-type", b"application/json"),
        (b"retry-after", b"7"),
        (b"x-ratelimit-remaining-requests", b"0"),
    ]
    assert headers.answered(given, is_events=False) == kept
    assert headers.content_length(given) == 7


def test_events_are_marked_against_buffering() -> None:
    given = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"max-age=1"))
    assert headers.is_event_stream(given)
    assert headers.answered(given, is_events=True)[1:] == [
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]


@pytest.mark.parametrize("values", [[], [b"x"], [b"-1"], [b"1", b"2"], [b"9" * 16]])
def test_unclear_length_is_no_length(values: list[bytes]) -> None:
    assert headers.content_length([(b"content-length", value) for value in values]) is None


@pytest.mark.parametrize(("value", "expected"), [(b"abc-1", "abc-1"), (b"", None), (b"a b", None), (b"x" * 129, None)])
def test_request_id_is_taken_where_it_is_fit(value: bytes, expected: str | None) -> None:
    assert headers.request_id(((b"x-request-id", value),)) == expected
