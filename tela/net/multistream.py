"""multistream-select 1.0.0 without I/O: who opens a stream names its protocol, who accepts it agrees or says "na".

The opener sends header and protocol at once, with its first data behind them (optimistic), so agreeing costs no round
trip of its own. Source: libp2p specs, connections/README.md, protocol negotiation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tela.errors import PeerError, ProtocolError

MAX_LINE_BYTES: Final = 127
"""Of a protocol's name with its line end: what a length of one byte can tell. The longest known name has 40."""
MAX_PROPOSALS: Final = 16
"""Protocols that an opener may try on one stream."""


def line(text: str) -> bytes:
    """A line on the wire: length, text, line end."""
    content = text.encode() + b"\n"
    assert len(content) <= MAX_LINE_BYTES
    return bytes([len(content)]) + content


HEADER: Final = line("/multistream/1.0.0")
REFUSAL: Final = line("na")


class Offer:
    """The opener's end: what it sends first, and the answer that it waits for."""

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol
        self.opening = HEADER + line(protocol)
        self.n_received = 0
        self._answer = b""

    def receive(self, data: bytes) -> bytes | None:
        """Take bytes in: None while the answer is incomplete, then what came behind it.

        Raises:
            PeerError: the peer does not speak the protocol.
            ProtocolError: the answer is none.
        """
        self.n_received += len(data)
        self._answer += data
        if self._answer.startswith(self.opening):
            return self._answer[len(self.opening) :]
        if self._answer.startswith(HEADER + REFUSAL):
            raise PeerError(f"the peer does not speak {self.protocol}")
        if not any(expected.startswith(self._answer) for expected in (self.opening, HEADER + REFUSAL)):
            raise ProtocolError("the answer to an opened stream is no multistream-select")
        return None


@dataclass(frozen=True, slots=True)
class Selected:
    """A protocol that is agreed on, or one that the library negotiates: then ``rest`` begins with the header."""

    protocol: str
    is_native: bool
    rest: bytes


class Selection:
    """The accepting end. The header is answered as soon as it comes: some openers wait for it before they propose."""

    def __init__(self, is_native: Callable[[str], bool], is_foreign: Callable[[str], bool]) -> None:
        self.n_received = 0
        self._is_native = is_native
        self._is_foreign = is_foreign
        self._buffer = b""
        self._is_greeted = False
        self._n_proposals = 0

    def receive(self, data: bytes) -> tuple[bytes, Selected | None]:
        """Take bytes in: what to answer now, and the protocol once it is selected.

        Raises:
            ProtocolError: no multistream-select, or no end of proposals.
        """
        self.n_received += len(data)
        self._buffer += data
        answer = b""
        while (content := self._next_line()) is not None:
            if not self._is_greeted:
                if content != HEADER[1:-1]:
                    raise ProtocolError("a stream does not begin with multistream-select")
                self._is_greeted = True
                answer += HEADER
                continue
            proposal = content.decode("utf-8", "replace")
            if self._is_native(proposal):
                return answer + line(proposal), Selected(proposal, is_native=True, rest=self._buffer)
            if self._is_foreign(proposal):
                rest = HEADER + bytes([len(content) + 1]) + content + b"\n" + self._buffer
                return answer, Selected(proposal, is_native=False, rest=rest)
            self._n_proposals += 1
            if self._n_proposals > MAX_PROPOSALS:
                raise ProtocolError(f"more than {MAX_PROPOSALS} protocols proposed on a stream")
            answer += REFUSAL
        return answer, None

    def _next_line(self) -> bytes | None:
        if not self._buffer:
            return None
        size = self._buffer[0]
        if not 0 < size <= MAX_LINE_BYTES:
            raise ProtocolError("a line of multistream-select is empty or too long")
        if len(self._buffer) <= size:
            return None
        content, self._buffer = self._buffer[1 : size + 1], self._buffer[size + 1 :]
        if not content.endswith(b"\n"):
            raise ProtocolError("a line of multistream-select does not end")
        return content[:-1]
