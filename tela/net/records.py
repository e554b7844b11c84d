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


class NoiseSession:
    """The transport phase of Noise with ChaCha20-Poly1305: length, ciphertext; nonces count on after the handshake.

    64 bits of nonce do not run out: a million records a second take 580,000 years.
    """

    def __init__(
        self,
        *,
        encrypt: Cipher,
        n_encrypted: int,
        decrypt: Cipher,
        n_decrypted: int,
        ciphertext: bytes,
        plaintext: bytes,
    ) -> None:
        """``ciphertext`` and ``plaintext`` were read ahead during the handshake."""
        self._encrypt, self._n_encrypted = encrypt, n_encrypted
        self._decrypt, self._n_decrypted = decrypt, n_decrypted
        self._early: Sequence[bytes] | None = [plaintext] if plaintext else []
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._buffer[: len(ciphertext)] = ciphertext
        self._start, self._end = 0, len(ciphertext)  # of what is received and not decrypted

    def take_early(self) -> Sequence[bytes] | None:
        """What the handshake read ahead, at the first call."""
        if self._early is None:
            return None
        early, self._early = self._early, None
        return [*early, *self._open()]

    @property
    def room(self) -> memoryview:
        """Where the next bytes of the connection go; :meth:`received` tells how many."""
        return self._buffer[self._end :]

    def received(self, n_bytes: int) -> Sequence[bytes]:
        """The records that ``n_bytes`` more in :attr:`room` complete."""
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

    def seal(self, source: Source) -> list[bytes | memoryview]:
        """Up to BATCH records of ``source``, encrypted, in pieces."""
        pieces: list[bytes | memoryview] = []
        for _ in range(BATCH):
            record = source.take()
            if not record:
                break
            sealed = self._encrypt(_nonce(self._n_encrypted), record, None)
            self._n_encrypted += 1
            pieces += (len(sealed).to_bytes(2, "big"), sealed)
        return pieces

    def close(self) -> None:
        """Let the buffer go: not to wait for the cyclic collector."""
        self._buffer = memoryview(b"")


class NoiseRecords:
    """A Noise session on a socket of our own."""

    def __init__(self, stream: trio.SocketStream, session: NoiseSession) -> None:
        self._stream = stream
        self._socket = stream.socket
        self._session = session
        self._unsent: memoryview | None = None

    async def read(self) -> Sequence[bytes] | None:
        """See Records."""
        if (early := self._session.take_early()) is not None:
            return early
        await trio.lowlevel.wait_readable(self._socket.fileno())
        try:
            n_bytes = os.readv(self._socket.fileno(), [self._session.room])
        except BlockingIOError:
            return ()
        return self._session.received(n_bytes) if n_bytes else None

    def write_nowait(self, source: Source) -> bool:
        """See Records. Raises OSError where the connection is broken."""
        pieces = [self._unsent] if self._unsent is not None else self._session.seal(source)
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

    async def drain(self, source: Source) -> None:
        """See Records."""
        while not self.write_nowait(source):
            await trio.lowlevel.wait_writable(self._socket.fileno())

    async def close(self) -> None:
        """See Records."""
        self._socket.close()
        self._session.close()
        await trio.lowlevel.checkpoint()


class NoiseStreamRecords:
    """A Noise session over any stream of bytes: a circuit through a relay, a websocket."""

    def __init__(self, stream: trio.abc.Stream, session: NoiseSession) -> None:
        self._stream = stream
        self._session = session

    async def read(self) -> Sequence[bytes] | None:
        """See Records."""
        if (early := self._session.take_early()) is not None:
            return early
        room = self._session.room
        data = await self._stream.receive_some(len(room))
        room[: len(data)] = data
        return self._session.received(len(data)) if data else None

    def write_nowait(self, source: Source) -> bool:
        """See Records."""
        return not source.has_output

    async def drain(self, source: Source) -> None:
        """See Records. The writer task alone sends: nothing is cut short by a caller's cancel scope."""
        while pieces := self._session.seal(source):
            await self._stream.send_all(b"".join(pieces))

    async def close(self) -> None:
        """See Records."""
        await trio.aclose_forcefully(self._stream)
        self._session.close()


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
    """Any session, through its own read and write: other ciphers than ours."""

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
