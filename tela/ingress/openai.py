"""What clients of OpenAI's API expect to read: errors, the model list, and how a stream of events ends.

Nothing here looks into requests (:mod:`tela.ingress.body`) or knows sockets. Error codes are written as OpenAI writes
them, with underscores: SDKs and agents compare them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from tela.errors import TelaError

INVALID_REQUEST: Final = "invalid_request_error"
SERVER_ERROR: Final = "server_error"
UPSTREAM_ERROR: Final = "upstream_error"

JSON_TYPE: Final = (b"content-type", b"application/json")


class ApiError(TelaError):
    """An answer in OpenAI's error shape. Raised anywhere before the first byte of the answer is out."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message, code=code)
        self.status = status
        self.kind = kind
        self.param = param
        self.headers = headers

    def value(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def render_json(value: object) -> bytes:
    """JSON in pure ASCII: a lone surrogate from a client's ``model`` can be named in a message."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()


def from_error(error: TelaError) -> ApiError:
    """What a client reads of an error of ours that nobody turned into an answer on purpose."""
    if isinstance(error, ApiError):
        return error
    message = f"{error}; {error.hint}" if error.hint else str(error)
    kind = INVALID_REQUEST if error.http_status < 500 else SERVER_ERROR
    return ApiError(message, status=error.http_status, code=error.code.replace("-", "_"), kind=kind)


# -- the errors that the request path answers -------------------------------------------------------------------------


def invalid(message: str, *, code: str = "invalid_request", param: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(message, status=400, code=code, param=param)


def caller_refused(message: str) -> ApiError:
    """403: this process may not call this ingress."""
    return ApiError(message, status=403, code="caller_not_allowed", kind="permission_error")


def provider_not_allowed(message: str) -> ApiError:
    """403: nobody within the caller's allowlist serves the model. Never answered by going outside it."""
    return ApiError(message, status=403, code="provider_not_allowed", kind="permission_error")


def model_not_found(model: str) -> ApiError:
    """404: no member serves a model of this exact name."""
    message = f"the model {json.dumps(model)} does not exist; GET /v1/models lists those that do"
    return ApiError(message, status=404, code="model_not_found", param="model")


def path_not_found(path: str) -> ApiError:
    """404: no such endpoint."""
    return ApiError(f"unknown path {path[:128]}", status=404, code="not_found")


def method_not_allowed(method: str, allowed: str) -> ApiError:
    """405: the endpoint takes another method."""
    headers = ((b"allow", allowed.encode()),)
    return ApiError(
        f"{method} is not allowed here, {allowed} is", status=405, code="method_not_allowed", headers=headers
    )


def timed_out(message: str) -> ApiError:
    """408: the client was too slow in sending its request."""
    return ApiError(message, status=408, code="request_timeout")


def body_too_large(limit_bytes: int) -> ApiError:
    """413: over the limit, which is named."""
    message = f"the request body is over {limit_bytes} bytes (setting max_request_body)"
    return ApiError(message, status=413, code="request_too_large")


def unsupported_encoding(encoding: str) -> ApiError:
    """415: bodies are read as they are, never decompressed."""
    message = f"content-encoding {encoding[:32]} is not accepted, send the body uncompressed"
    return ApiError(message, status=415, code="unsupported_content_encoding")


def unknown_expectation(expectation: str) -> ApiError:
    """417: only 100-continue is known."""
    return ApiError(f"unknown expectation {expectation[:64]}", status=417, code="expectation_failed")


def head_too_large(limit_bytes: int) -> ApiError:
    """431: the header block is over the limit."""
    return ApiError(f"the header block is over {limit_bytes} bytes", status=431, code="headers_too_large")


def internal() -> ApiError:
    """500: a defect of ours; the log has it."""
    return ApiError("internal error, see the log of this ingress", status=500, code="internal_error", kind=SERVER_ERROR)


def upstream_failed(message: str) -> ApiError:
    """502: the instance was given the request and broke, so nobody else may be asked."""
    return ApiError(message, status=502, code="upstream_error", kind=UPSTREAM_ERROR)


def unavailable(message: str, *, code: str = "no_capacity", retry_after_s: float = 1) -> ApiError:
    """503 ``no_capacity``, ``model_loading`` or ``draining``, with a whole number of seconds in Retry-After."""
    seconds = max(1, -int(-retry_after_s // 1))
    headers = ((b"retry-after", b"%d" % seconds),)
    return ApiError(message, status=503, code=code, kind=SERVER_ERROR, headers=headers)


def deadline_passed(message: str) -> ApiError:
    """504: the limit that fired is named."""
    return ApiError(message, status=504, code="deadline_exceeded", kind=UPSTREAM_ERROR)


# -- streams of events ------------------------------------------------------------------------------------------------


def error_event(message: str, code: str) -> bytes:
    """The one event that ends a broken stream; no ``[DONE]`` follows it."""
    return (
        b"data: "
        + render_json({"error": {"message": message, "type": UPSTREAM_ERROR, "param": None, "code": code}})
        + b"\n\n"
    )


TAIL_BYTES: Final = 4096
"""What is kept of a stream to judge its end: the last event and ``[DONE]``, usage included."""
_FINISHED: Final = re.compile(rb'data: ?\[DONE\]|"finish_reason" ?: ?"')
_BOUNDARIES: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")


class StreamTail:
    """The last bytes of an event stream, whatever chunks it came in: is it between events, was it finished?"""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._tail = (self._tail + data)[-TAIL_BYTES:] if len(data) < TAIL_BYTES else data[-TAIL_BYTES:]

    @property
    def is_between_events(self) -> bool:
        """True where another event may follow: a half event cannot be taken back."""
        return not self._tail or self._tail.endswith(_BOUNDARIES)

    @property
    def is_finished(self) -> bool:
        """Whether the engine said that the answer is complete."""
        return _FINISHED.search(self._tail) is not None

    @property
    def is_empty(self) -> bool:
        """No byte was seen."""
        return not self._tail


# -- the model list ---------------------------------------------------------------------------------------------------


def model_entry(
    model: str,
    *,
    created_unix_s: int,
    max_context_tokens: int,
    parent: str,
    providers: Collection[str],
    n_replicas: int,
) -> dict[str, Any]:
    """One entry of ``GET /v1/models``: vLLM's shape, and what a mesh adds under ``tela``."""
    entry: dict[str, Any] = {"id": model, "object": "model", "created": created_unix_s, "owned_by": "tela"}
    if max_context_tokens:
        entry["max_model_len"] = max_context_tokens
    if parent:
        entry["parent"] = parent
    return entry | {"tela": {"providers": sorted(providers), "n_replicas": n_replicas}}


def model_list(entries: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    """The answer to ``GET /v1/models``."""
    return {"object": "list", "data": list(entries)}
