"""Headers on the way in and out: what a caller asks of tela, what is passed on, what never leaves.

``X-Tela-*`` headers restrict, so they fail closed: an unknown one, a second one and a value that is not understood are
400, never ignored (faults.md J04, J06).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from tela.ingress import openai
from tela.ingress.framing import Headers
from tela.ingress.policy import Policy

DEFAULT_TIMEOUT_S: Final = 3600.0
"""Queue, prefill and answer of one request; long reasoning takes many minutes (faults.md C03)."""
MAX_TIMEOUT_S: Final = 86_400.0

PROVIDERS: Final = b"x-tela-providers"
POLICY: Final = b"x-tela-policy"
TIMEOUT: Final = b"x-tela-timeout"
NO_RETRY: Final = b"x-tela-no-retry"
_KNOWN: Final = (PROVIDERS, POLICY, TIMEOUT, NO_RETRY)

HOP_BY_HOP: Final = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade",
    }
)  # fmt: skip
"""RFC 9110 section 7.6.1: they belong to one connection."""
_NOT_FORWARDED: Final = frozenset(
    {
        b"host", b"content-length", b"expect", b"accept-encoding",  # set anew for the next hop
        b"authorization", b"cookie", b"x-api-key", b"api-key",  # credentials never leave the ingress
        b"x-request-id",
    }
)  # fmt: skip
_SET_BY_US: Final = frozenset({b"content-length", b"x-request-id"})
_SET_BY_US_ON_EVENTS: Final = frozenset({b"cache-control", b"x-accel-buffering"})
_REQUEST_ID: Final = re.compile(rb"[!-~]{1,128}")
_SECONDS: Final = re.compile(r"\d{1,6}(\.\d{1,6})?")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a caller asked for by ``X-Tela-*``."""

    allowlist: frozenset[str] | None = None  # None: any provider; empty: none
    policy: Policy = Policy.ROUND_ROBIN
    timeout_s: float = DEFAULT_TIMEOUT_S
    may_retry: bool = True


def read_wishes(headers: Headers, providers: Collection[str]) -> Wishes:
    """Read the ``X-Tela-*`` headers; ``providers`` are the names that the registry knows.

    Raises:
        ApiError: 400, and the message names the legal values.
    """
    texts = _tela_headers(headers)
    return Wishes(
        allowlist=_allowlist(texts[PROVIDERS], providers) if PROVIDERS in texts else None,
        policy=_policy(texts[POLICY]) if POLICY in texts else Policy.ROUND_ROBIN,
        timeout_s=_timeout(texts[TIMEOUT]) if TIMEOUT in texts else DEFAULT_TIMEOUT_S,
        may_retry=not (NO_RETRY in texts and _flag(texts[NO_RETRY])),
    )


def _tela_headers(headers: Headers) -> dict[bytes, str]:
    texts: dict[bytes, str] = {}
    for name, value in headers:
        if not name.startswith(b"x-tela-"):
            continue
        shown = name.decode("latin-1")
        if name not in _KNOWN:
            known = ", ".join(known.decode() for known in _KNOWN)
            raise openai.invalid(f"unknown header {shown[:64]}; there are {known}", param=shown[:64])
        if name in texts:
            raise openai.invalid(f"more than one {shown}", param=shown)
        if not value.isascii():
            raise openai.invalid(f"{shown} must be ASCII", param=shown)
        texts[name] = value.decode().strip()
    return texts


def _allowlist(text: str, providers: Collection[str]) -> frozenset[str]:
    """``a, b`` → both; empty → nobody. A comma at the end is forgiven, an empty name in between is not."""
    if not text:
        return frozenset()
    names = [name.strip() for name in text.removesuffix(",").split(",")]
    unknown = [name for name in names if name not in providers or not name]
    if unknown:
        known = ", ".join(sorted(filter(None, providers))) or "none"
        raise openai.invalid(f"unknown provider '{unknown[0][:64]}'; known are: {known}", param="x-tela-providers")
    return frozenset(names)


def _policy(text: str) -> Policy:
    try:
        return Policy(text)
    except ValueError:
        legal = ", ".join(Policy)
        raise openai.invalid(f"unknown policy '{text[:64]}'; there are: {legal}", param="x-tela-policy") from None


def _timeout(text: str) -> float:
    seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise openai.invalid(f"X-Tela-Timeout is seconds, up to {MAX_TIMEOUT_S:.0f}", param="x-tela-timeout")
    return seconds


def _flag(text: str) -> bool:
    if text not in {"0", "1"}:
        raise openai.invalid("X-Tela-No-Retry is 0 or 1", param="x-tela-no-retry")
    return text == "1"


def request_id(headers: Headers) -> str | None:
    """The caller's own id, where it is fit to be logged and sent on."""
    given = next((value for name, value in headers if name == b"x-request-id"), b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else None


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    lowered = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in lowered if name == b"connection" for token in value.split(b",")}
    return [(name, value) for name, value in lowered if name not in HOP_BY_HOP and name not in named]


def forwarded(headers: Headers, *, n_body_bytes: int, request_id: str) -> Headers:
    """What the gate gets: end-to-end headers without credentials, a length, and no compression of the answer.

    An answer that is not compressed can be followed for its end, and is never held back by a compressor.
    """
    kept = [
        (name, value)
        for name, value in _end_to_end(headers)
        if name not in _NOT_FORWARDED and not name.startswith(b"x-tela-")
    ]
    kept.append((b"content-length", b"%d" % n_body_bytes))
    kept.append((b"accept-encoding", b"identity"))
    kept.append((b"x-request-id", request_id.encode()))
    return tuple(kept)


def answered(headers: Iterable[tuple[bytes, bytes]], *, is_events: bool) -> list[tuple[bytes, bytes]]:
    """What the client gets of an engine's headers. Event streams are marked so that no proxy holds them back."""
    dropped = _SET_BY_US | _SET_BY_US_ON_EVENTS if is_events else _SET_BY_US
    kept = [
        (name, value) for name, value in _end_to_end(headers) if name not in dropped and not name.startswith(b"x-tela-")
    ]
    if is_events:
        kept += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    return kept


def content_length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The length that an answer announces; None where it does not, or not clearly."""
    values = {value for name, value in headers if name.lower() == b"content-length"}
    value = values.pop() if len(values) == 1 else b""
    return int(value) if value.isdigit() and len(value) <= 15 else None


def is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether an answer is ``text/event-stream``."""
    return any(
        name.lower() == b"content-type" and value.lower().startswith(b"text/event-stream") for name, value in headers
    )
