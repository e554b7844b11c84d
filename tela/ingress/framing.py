"""Requests out of bytes, without I/O: what llhttp accepts, less what two parsers could read in two ways (RFC 9112).

A :class:`RequestParser` turns bytes in any split into events in order. A refusal is the last event: what follows it on
the connection has no meaning any more.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import Final

import httptools

from tela.ingress import openai
from tela.ingress.openai import ApiError

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may cost."""

    max_body_bytes: int = 256 * 1024 * 1024  # setting max_request_body: images in prompts are large (faults.md A03)
    max_head_bytes: int = 32 * 1024  # faults.md A04
    head_timeout_s: float = 30.0  # from a request's first byte to the end of its head: slow-header attacks end here
    body_idle_s: float = 60.0  # silence in the middle of a body
    idle_s: float = 120.0  # silence between requests; longer than the pools of common clients keep a connection


@dataclass(frozen=True, slots=True)
class Request:
    """A whole request. Header names are lower-case, values as they came; ``body`` is content, without chunk framing."""

    method: str
    target: str
    version: str  # "1.0" or "1.1"
    headers: Headers = ()
    body: bytes = b""
    is_persistent: bool = True  # the connection may serve another request after this one

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header by its lower-case name."""
        return next((value for key, value in self.headers if key == name), None)

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]


class Continue:
    """The client waits for ``100 Continue`` before it sends a body that we would take."""


Event = Request | Continue | ApiError


class Phase(enum.Enum):
    """Where in a message the next byte belongs."""

    BETWEEN = "between"
    HEAD = "head"
    BODY = "body"


_UPGRADES: Final = frozenset({b"upgrade", b"http2-settings"})


class RequestParser:
    """The parser of one connection. Events gather in ``events``; the owner takes them from the left."""

    def __init__(self, limits: Limits) -> None:
        self.events: deque[Event] = deque()
        self.phase = Phase.BETWEEN
        self.is_refused = False
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._n_steps = 0  # heads, bodies and ends seen: tells progress from an endless line
        self._n_stuck_bytes = 0
        self._start()

    def _start(self) -> None:
        self._target: list[bytes] = []
        self._headers: list[tuple[bytes, bytes]] = []
        self._n_trailer_bytes = 0
        self._body: list[bytes] = []
        self._n_body_bytes = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes, in any split. After a refusal they are ignored."""
        if self.is_refused:
            return
        n_steps = self._n_steps
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self.refuse(openai.invalid(f"malformed HTTP request: {error}"))
        # llhttp gathers an endless header or trailer line without telling; one feed of slack is accepted.
        self._n_stuck_bytes = self._n_stuck_bytes + len(data) if self._n_steps == n_steps else 0
        if self._n_stuck_bytes > self._limits.max_head_bytes:
            self.refuse(openai.head_too_large(self._limits.max_head_bytes))

    def refuse(self, error: ApiError) -> None:
        """Make ``error`` the last event."""
        self._emit(error)
        self.is_refused = True

    def _emit(self, event: Event) -> None:
        if not self.is_refused:
            self.events.append(event)

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Ignore an offer to speak another protocol, as RFC 9110 section 7.8 lets us: Java clients offer h2c.

        llhttp takes everything behind such a head for the other protocol, so the head is read once more without it.
        """
        method, target, headers = self._parser.get_method(), b"".join(self._target), self._headers
        if method == b"CONNECT":
            self.refuse(openai.method_not_allowed("CONNECT", "GET, POST"))
            return
        lines = [b"%s %s HTTP/1.1" % (method, target)]
        lines += [b"%s: %s" % header for header in headers if header[0] not in _UPGRADES]
        self._parser = httptools.HttpRequestParser(self)
        self.feed(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    # -- what httptools calls -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._start()
        self._n_steps += 1
        self.phase = Phase.HEAD

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._target.append(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer: those are dropped."""
        if self.phase is Phase.HEAD:
            self._headers.append((name.lower(), value))
            return
        self._n_trailer_bytes += len(name) + len(value)
        if self._n_trailer_bytes > self._limits.max_head_bytes:
            self.refuse(openai.head_too_large(self._limits.max_head_bytes))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._n_steps += 1
        if self._parser.should_upgrade():
            return
        self.phase = Phase.BODY
        try:
            self._check_head()
        except ApiError as error:
            self.refuse(error)

    def on_body(self, body: bytes) -> None:
        """Content, without framing."""
        self._n_steps += 1
        self._n_body_bytes += len(body)
        if self._n_body_bytes > self._limits.max_body_bytes:
            self.refuse(openai.body_too_large(self._limits.max_body_bytes))
        if not self.is_refused:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._n_steps += 1
        if self._parser.should_upgrade():
            return
        version = self._parser.get_http_version()
        request = Request(
            method=self._parser.get_method().decode(),
            target=b"".join(self._target).decode("latin-1"),
            version=version,
            headers=tuple(self._headers),
            body=b"".join(self._body),
            is_persistent=version == "1.1" and self._parser.should_keep_alive(),
        )
        self._emit(request)
        self._start()  # lets go of the body, which may be large
        self.phase = Phase.BETWEEN

    # -- what llhttp leaves open --------------------------------------------------------------------------------------

    def _values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self._headers if key == name]

    def _check_head(self) -> None:
        n_bytes = sum(map(len, self._target)) + sum(len(name) + len(value) + 4 for name, value in self._headers)
        if n_bytes > self._limits.max_head_bytes:
            raise openai.head_too_large(self._limits.max_head_bytes)
        if len(self._values(b"authorization")) > 1:
            raise openai.invalid("more than one Authorization header")
        self._check_framing()
        for encoding in self._values(b"content-encoding"):
            if encoding.lower() != b"identity":
                raise openai.unsupported_encoding(encoding.decode("latin-1"))
        self._check_expectation()

    def _check_framing(self) -> None:
        if self._parser.get_http_version() not in {"1.0", "1.1"}:
            raise openai.invalid("HTTP/1.0 and HTTP/1.1 are spoken here")
        lengths, codings = self._values(b"content-length"), self._values(b"transfer-encoding")
        if codings and [coding.lower() for coding in codings] != [b"chunked"]:
            raise openai.invalid("a Transfer-Encoding other than chunked")
        if lengths and int(lengths[0]) > self._limits.max_body_bytes:
            raise openai.body_too_large(self._limits.max_body_bytes)

    def _check_expectation(self) -> None:
        expectation = b",".join(self._values(b"expect"))
        if not expectation:
            return
        if expectation.lower() != b"100-continue":
            raise openai.unknown_expectation(expectation.decode("latin-1"))
        if self._parser.get_http_version() == "1.1":
            self._emit(Continue())
