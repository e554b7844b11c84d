"""Errors in OpenAI's shape, and how the end of a stream is told."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.errors import DeadlineError, RefusedError
from tela.ingress import openai
from tela.ingress.openai import StreamTail


def test_error_has_the_shape_that_sdks_read() -> None:
    assert openai.model_not_found("org/\ud800").value() == {
        "error": {
            "message": 'the model "org/\\ud800" does not exist; GET /v1/models lists those that do',
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    assert json.loads(openai.render_json({"x": "\ud800"})) == {"x": "\ud800"}


@pytest.mark.parametrize(("seconds", "expected"), [(0, b"1"), (0.2, b"1"), (1, b"1"), (1.01, b"2"), (12, b"12")])
def test_retry_after_is_whole_and_positive(seconds: float, expected: bytes) -> None:
    assert openai.unavailable("x", retry_after_s=seconds).headers == ((b"retry-after", expected),)


def test_errors_of_ours_become_answers() -> None:
    refused = openai.from_error(RefusedError("no", code="foreign-swarm"))
    assert (refused.status, refused.code, refused.kind) == (403, "foreign_swarm", "invalid_request_error")
    late = openai.from_error(DeadlineError("late"))
    assert (late.status, late.code, late.kind) == (504, "deadline", "server_error")
    assert openai.from_error(late) is late


def test_error_event_is_one_event_without_done() -> None:
    event = openai.error_event("gone", "upstream_disconnected")
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n\n") == 1
    assert json.loads(event[6:])["error"]["code"] == "upstream_disconnected"
    assert b"[DONE]" not in event


ENDINGS = [
    (b"", True, False),
    (b"data: {}\n\n", True, False),
    (b"data: {}\r\n\r\n", True, False),
    (b"data: {}\n", False, False),
    (b"data: {", False, False),
    (b'data: {"choices":[{"finish_reason":null}]}\n\n', True, False),
    (b'data: {"choices":[{"finish_reason": "stop"}]}\n\n', True, True),
    (b"data: x\n\ndata: [DONE]\n\n", True, True),
    (b"data:[DONE]\n\n", True, True),
    (b"data: " + b"x" * 10_000 + b"\n\ndata: [DONE]\n\n", True, True),
]


@pytest.mark.parametrize(("stream", "is_between", "is_finished"), ENDINGS, ids=lambda value: repr(value)[:30])
@given(cuts=st.lists(st.integers(0, 11_000), max_size=5))
def test_tail_judges_the_end_in_any_split(stream: bytes, is_between: bool, is_finished: bool, cuts: list[int]) -> None:
    tail = StreamTail()
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, end in itertools.pairwise(edges):
        tail.feed(stream[start:end])
    assert (tail.is_between_events, tail.is_finished, tail.is_empty) == (is_between, is_finished, not stream)
