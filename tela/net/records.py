"""Encrypted records over a connection: a Noise session's ciphers on a socket of our own, or a foreign session as it is.

The ciphers on the socket are worth a factor of 4 in CPU per request (design/mux.md 2): nothing is copied twice, nothing
waits under a caller's cancel scope, and one system call carries several records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import trio

RECEIVE_BYTES: Final = 256 * 1024
"""Of one read of a socket: four records. Pages of it that an idle connection never touches cost no memory."""
MAX_RECORD_BYTES: Final = 2 + 65_535
"""A Noise message with its length in front."""
BATCH: Final = 4
"""Records that go to the socket with one system call; more than a socket takes at once would wait encrypted."""

Cipher = Callable[[bytes, "bytes | memoryview", None], bytes]
"""Encrypts or decrypts: nonce, data, no associated data."""


class Source(Protocol):
    """What has records to send: :class:`tela.net.yamux.YamuxMachine`."""

    @property
    def has_output(self) -> bool:
        """Whether :meth:`take` may have one."""
        ...

    def take(self) -> bytes:
        """The next record, ``b""`` for none."""
        ...


class Records(Protocol):
    """One connection's records. One reader; :meth:`drain` by one task."""

    async def read(self) -> Sequence[bytes] | None:
        """Wait for records; possibly none yet. None at the end of the connection."""
        ...

    def write_nowait(self, source: Source) -> bool:
        """Send what can be sent without waiting; False if something may be left for :meth:`drain`."""
        ...

    async def drain(self, source: Source) -> None:
        """Send all of it, waiting for the socket."""
        ...

    async def close(self) -> None:
        """Close the connection. Safe to call twice."""
        ...


class NoiseRecords:
    """The transport phase of Noise with ChaCha20-Poly1305: length, ciphertext; nonces count on after the handshake.

    64 bits of nonce do not run out: a million records a second take 580,000 years.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        *,
        encrypt: Cipher,
        n_encrypted: int,
        decrypt: Cipher,
        n_decrypted: int,
        ciphertext: bytes,
        plaintext: bytes,
    ) -> None:
        """``ciphertext`` and ``plaintext`` were read ahead during the handshake."""
        self._stream = stream
        self._socket = stream.socket
        self._encrypt, self._n_encrypted = encrypt, n_encrypted
        self._decrypt, self._n_decrypted = decrypt, n_decrypted
        self._early: Sequence[bytes] | None = [plaintext] if plaintext else []
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._buffer[: len(ciphertext)] = ciphertext
        self._start, self._end = 0, len(ciphertext)  # of what is received and not decrypted
        self._unsent: memoryview | None = None

    async def read(self) -> Sequence[bytes] | None:
        """See Records."""
        if self._early is not None:
            early, self._early = self._early, None
            return [*early, *self._open()]
        await trio.lowlevel.wait_readable(self._socket.fileno())
        try:
            n_bytes = os.readv(self._socket.fileno(), [self._buffer[self._end :]])
        except BlockingIOError:
            return ()
        if not n_bytes:
            return None
        self._end += n_bytes
        return self._open()

    def _open(self) -> Sequence[bytes]:
        """Decrypt what is complete, and make room for a whole record behind the rest."""
        records = []
        buffer, start, end = self._buffer, self._start, self._end
        while end - start >= 2:
            stop = start + 2 + (buffer[start] << 8 | buffer[start + 1])
            if stop > end:
                break
            records.append(self._decrypt(_nonce(self._n_decrypted), buffer[start + 2 : stop], None))
            self._n_decrypted += 1
            start = stop
        if start == end:
            start = end = 0
        elif len(buffer) - end < MAX_RECORD_BYTES:
            buffer[: end - start] = buffer[start:end]
            start, end = 0, end - start
        self._start, self._end = start, end
        return records

    def write_nowait(self, source: Source) -> bool:
        """See Records. Raises OSError where the connection is broken."""
        pieces: list[bytes | memoryview] = [self._unsent] if self._unsent is not None else self._seal(source)
        if not pieces:
            return True
        try:
            n_sent = os.writev(self._socket.fileno(), pieces)
        except BlockingIOError:
            n_sent = 0
        if n_sent < sum(map(len, pieces)):
            self._unsent = memoryview(b"".join(pieces))[n_sent:]
            return False
        self._unsent = None
        return not source.has_output

    def _seal(self, source: Source) -> list[bytes | memoryview]:
        pieces: list[bytes | memoryview] = []
        for _ in range(BATCH):
            record = source.take()
            if not record:
                break
            sealed = self._encrypt(_nonce(self._n_encrypted), record, None)
            self._n_encrypted += 1
            pieces += (len(sealed).to_bytes(2, "big"), sealed)
        return pieces

    async def drain(self, source: Source) -> None:
        """See Records."""
        while not self.write_nowait(source):
            await trio.lowlevel.wait_writable(self._socket.fileno())

    async def close(self) -> None:
        """See Records."""
        self._socket.close()
        self._buffer = memoryview(b"")  # not to wait for the cyclic collector
        await trio.lowlevel.checkpoint()


def _nonce(n_records: int) -> bytes:
    return b"\0\0\0\0" + n_records.to_bytes(8, "little")


class Session(Protocol):
    """An encrypted session of the library, over whatever transport."""

    async def read(self, n: int | None = None) -> bytes:
        """Some bytes; raises at the end."""
        ...

    async def write(self, data: bytes) -> None:
        """Send all of ``data``."""
        ...

    async def close(self) -> None:
        """Close it with its transport."""
        ...


class SessionRecords:
    """Any session, through its own read and write: relayed circuits, websockets, other ciphers."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def read(self) -> Sequence[bytes] | None:
        """See Records."""
        return [await self._session.read()]

    def write_nowait(self, source: Source) -> bool:
        """See Records."""
        return not source.has_output

    async def drain(self, source: Source) -> None:
        """See Records."""
        while record := source.take():
            await self._session.write(record)

    async def close(self) -> None:
        """See Records."""
        await self._session.close()
