"""HTTP/1.1 towards the engine, without I/O: the request head with exact framing, and the parser of the answer.

Hop-by-hop headers end at each hop (RFC 9110 section 7.6.1), content is framed anew for each (RFC 9112 section 6). The
caller's credentials stay out; the engine's own key goes in. Content codings are declined: a stream must not wait in
somebody's compressor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import httptools

from tela.engine.report import Endpoint
from tela.errors import TelaError
from tela.wire import GateCode, RequestHead, ResponseHead

Headers = tuple[tuple[bytes, bytes], ...]

MAX_ANSWER_HEAD_BYTES: Final = 32 * 1024
"""As much as the ingress takes from clients (faults.md A04); it fits into a RESPONSE frame."""
_HOP_BY_HOP: Final = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
_REPLACED: Final = frozenset({b"host", b"authorization", b"accept-encoding", b"content-length", b"expect"})
_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 section 5.6.2
_FIELD_VALUE: Final = re.compile(rb"[^\x00\r\n]*")
_TARGET: Final = re.compile(r"/[!-~]*")  # nothing that could end the request line


class ForwardError(TelaError):
    """The gate cannot answer a request. ``is_accepted`` says whether the engine may have seen it.

    The caller's stream stays usable; where ``is_accepted`` is False another instance may be tried.
    """

    http_status = 502

    def __init__(self, code: GateCode, message: str, *, is_accepted: bool) -> None:
        super().__init__(message, code=code)
        self.is_accepted = is_accepted


def malformed(message: str, *, is_accepted: bool = False) -> ForwardError:
    """The caller broke the protocol."""
    return ForwardError(GateCode.PROTOCOL, message, is_accepted=is_accepted)


def disconnected(message: str) -> ForwardError:
    """The engine had the request and did not answer it to the end."""
    return ForwardError(GateCode.ENGINE_DISCONNECTED, message, is_accepted=True)


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """``headers`` without those of this hop alone, including what ``Connection`` names."""
    kept = tuple(headers)
    named = {
        token.strip().lower() for name, value in kept if name.lower() == b"connection" for token in value.split(b",")
    }
    dropped = _HOP_BY_HOP | named
    return tuple((name, value) for name, value in kept if name.lower() not in dropped)


class BodyFraming:
    """How a request body is framed: by its length where that is known, else in chunks. Counts what goes out."""

    def __init__(self, n_bytes: int | None) -> None:
        self._n_left = n_bytes
        self.header = (b"Transfer-Encoding", b"chunked") if n_bytes is None else (b"Content-Length", b"%d" % n_bytes)

    def chunk(self, content: bytes) -> bytes:
        """Bytes for one part of the body.

        Raises:
            ForwardError: more content than was announced.
        """
        if self._n_left is None:
            return b"%x\r\n%s\r\n" % (len(content), content)
        self._n_left -= len(content)
        if self._n_left < 0:
            raise malformed("the request's body is longer than its content-length", is_accepted=True)
        return content

    def end(self) -> bytes:
        """Bytes that end the body.

        Raises:
            ForwardError: less content than was announced.
        """
        if self._n_left:
            raise malformed("the request's body is shorter than its content-length", is_accepted=True)
        return b"0\r\n\r\n" if self._n_left is None else b""


def content_length(headers: Headers) -> int | None:
    """The one content-length of a request, None where it has none.

    Raises:
        ForwardError: several, or not a number.
    """
    values = {value for name, value in headers if name.lower() == b"content-length"}
    if not values:
        return None
    value = values.pop()
    if values or not re.fullmatch(rb"[0-9]{1,15}", value):
        raise malformed("the request's content-length is no number")
    return int(value)


def render_request_head(head: RequestHead, endpoint: Endpoint, framing: BodyFraming) -> bytes:
    """Request line and headers for the engine.

    Raises:
        ForwardError: something in the head would break out of its line.
    """
    headers = [(name, value) for name, value in end_to_end(head.headers) if name.lower() not in _REPLACED]
    if not _TARGET.fullmatch(head.target) or not _TOKEN.fullmatch(head.method.encode()):
        raise malformed("the request line is malformed")
    if not all(_TOKEN.fullmatch(name) and _FIELD_VALUE.fullmatch(value) for name, value in headers):
        raise malformed("a request header is malformed")
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    headers += [(b"Host", f"{host}:{endpoint.port}".encode()), (b"Accept-Encoding", b"identity"), framing.header]
    if endpoint.api_key:
        headers.append((b"Authorization", f"Bearer {endpoint.api_key}".encode()))
    lines = [f"{head.method} {head.target} HTTP/1.1".encode(), *(b"%s: %s" % header for header in headers)]
    return b"\r\n".join([*lines, b"", b""])


class ResponseParser:
    """Takes the engine's bytes, gives head and content. One response; httptools calls the ``on_*`` methods."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._reason = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._content: list[bytes] = []
        self._n_head_bytes = 0
        self._has_surplus = False
        self._keeps_alive = False
        self.head: ResponseHead | None = None
        self.is_complete = False

    @property
    def is_reusable(self) -> bool:
        """Whether the connection is clean for another request after this response."""
        return self.is_complete and self._keeps_alive and not self._has_surplus

    def feed(self, data: bytes) -> bytes:
        """Take bytes, return the content in them, free of any framing.

        Raises:
            ForwardError: not an HTTP response.
        """
        if self.head is None:
            self._n_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._has_surplus = True
            if not self.is_complete:  # what follows a whole response is not this request's trouble
                raise disconnected(f"the engine's answer is no HTTP response: {error}") from error
        if self.head is None and self._n_head_bytes > MAX_ANSWER_HEAD_BYTES:
            raise disconnected(f"the head of the engine's answer is longer than {MAX_ANSWER_HEAD_BYTES} bytes")
        content, self._content = b"".join(self._content), []
        return content

    @property
    def is_untouched(self) -> bool:
        """Whether nothing came yet."""
        return not self._n_head_bytes

    def finish(self) -> bytes:
        """The engine closed the connection. Returns the content that is left: none.

        Raises:
            ForwardError: in the middle of the response.
        """
        if self.head is None:
            raise disconnected("the engine closed the connection before answering")
        names = {name.lower() for name, _ in self._headers}
        if names & {b"content-length", b"transfer-encoding"}:
            raise disconnected("the engine closed the connection within its answer")
        self.is_complete = True  # RFC 9112 section 6.3: such a response ends with its connection
        return b""

    # -- called by httptools -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A response begins: ours, the one after an interim one, or one that nobody asked for."""
        self._has_surplus = self.is_complete
        if not self.is_complete:
            self._reason, self._headers = b"", []

    def on_status(self, reason: bytes) -> None:
        """A part of the reason phrase."""
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is complete; interim ones (1xx) are not passed on."""
        status = self._parser.get_status_code()
        if status >= 200 and not self.is_complete:
            self.head = ResponseHead(status, self._reason, end_to_end(self._headers))

    def on_body(self, content: bytes) -> None:
        """A part of the content."""
        if not self.is_complete:
            self._content.append(content)

    def on_message_complete(self) -> None:
        """The response is complete, unless it was an interim one."""
        if self.head is not None and not self.is_complete:
            self.is_complete = True
            self._keeps_alive = self._parser.should_keep_alive()
