"""The one error tree: whose fault it was, what state is left, what to do next.

Every class carries four facts that the edges need: a stable ``code`` (kebab case, goes into OpenAI error bodies,
metrics and ``--json``), an ``http_status``, an ``exit_code`` (docs/reference/exit-codes.md) and a ``hint`` that names
the next step.  Foreign exceptions are mapped to these at the door that imports the library, and nowhere else.
"""

from __future__ import annotations

from typing import ClassVar


class TelaError(Exception):
    """Root of every error that tela raises on purpose."""

    code: str = "internal-error"
    hint: str = ""
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, code: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        if hint is not None:
            self.hint = hint


class UsageError(TelaError):
    """The user's command line or request is wrong. Nothing was changed; correct it and call again."""

    code = "usage"
    http_status = 400
    exit_code = 2


class ConfigError(UsageError):
    """A configuration file, environment variable or invite is malformed. Nothing was started."""

    code = "config"


class NoDaemonError(TelaError):
    """No daemon answers on the control socket. Start one, or name the right one with ``--name``."""

    code = "no-daemon"
    http_status = 503
    exit_code = 3


class DeadlineError(TelaError):
    """A limit in seconds passed. What was waited for may still happen; the operation itself was given up."""

    code = "deadline"
    http_status = 504
    exit_code = 4


class RefusedError(TelaError):
    """Policy said no: an allowlist, a certificate, a key. Asking again unchanged will not help."""

    code = "refused"
    http_status = 403
    exit_code = 5


class IntegrityError(TelaError):
    """A signature or hash did not match. The data was dropped and nothing was stored."""

    code = "integrity"
    http_status = 502
    exit_code = 6


class PeerError(TelaError):
    """A peer misbehaved or went away. Our own state is intact; try another peer."""

    code = "peer"
    http_status = 502


class StreamResetError(PeerError):
    """The stream broke before its end: bytes may be missing. Never to be taken for a clean end."""

    code = "stream-reset"


class ProxyError(PeerError):
    """The proxy on our way out is away or said no. Nothing was sent to the peer; ``code`` tells which of them."""

    code = "proxy"


class ProtocolError(PeerError):
    """A peer sent bytes that the protocol does not allow. The stream is closed."""

    code = "protocol"


class UnavailableError(TelaError):
    """Nobody can serve this now. The same request may succeed after ``retry_after_s``."""

    code = "no-capacity"
    http_status = 503

    def __init__(
        self, message: str, *, code: str | None = None, hint: str | None = None, retry_after_s: int = 1
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.retry_after_s = retry_after_s


class EngineError(TelaError):
    """The wrapped engine failed or could not be started. Its instance is down; peers have been told."""

    code = "engine"
    http_status = 502
