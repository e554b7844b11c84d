"""py-libp2p's view of our connections and streams, and what we take out of its Noise session.

Its swarm and ping go on working for peers that are no tela: streams of their protocols pass through
:class:`ForeignStream`. Ours never touch it.
"""

from __future__ import annotations

from typing import Any, Final, cast

import trio
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamEOF, MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL
from multiaddr import Multiaddr

from tela.errors import PeerError
from tela.net.multistream import HEADER, Offer
from tela.net.muxer import Connection
from tela.net.records import NoiseRecords, NoiseSession, NoiseStreamRecords, Records, Session, SessionRecords
from tela.net.streams import MuxedStream
from tela.observe import log

RECEIVE_BYTES: Final = 64 * 1024
"""Of one read of a socket during the handshake: a whole Noise message."""
CIPHER: Final = "ChaCha20Poly1305"
"""The only one of libp2p's Noise; our records know no other."""
_SPENT_NONCE: Final = (1 << 64) - 1
"""With this the library's own cipher state refuses to encrypt or decrypt once more."""


class BufferedConnection(RawConnection):
    """Reads ahead and gives exactly what is asked for.

    The library asks for the two bytes of a length and then for a message, and takes a message that comes in over a
    hundred pieces for a broken one. Where we dial, its negotiation is ours: the name of the protocol goes out with the
    first data and the answer is taken off what comes back, which saves two round trips.
    """

    def __init__(self, bytes_stream: trio.abc.Stream, is_initiator: bool) -> None:
        # The library's wrapper asks for a socket only where there is one.
        super().__init__(TrioTCPStream(cast("trio.SocketStream", bytes_stream)), is_initiator)
        self.bytes_stream = bytes_stream
        self._buffer = bytearray()
        self._offer: Offer | None = None
        self._unsent_opening = b""

    def propose(self, offer: Offer) -> None:
        """What is written next is for the protocol of ``offer``."""
        self._offer = offer
        self._unsent_opening = offer.opening

    async def write(self, data: bytes) -> None:
        """Send all of ``data``, behind a proposal that is not sent yet."""
        opening, self._unsent_opening = self._unsent_opening, b""
        await super().write(opening + data)

    async def read(self, n: int | None = None) -> bytes:
        """Exactly ``n`` bytes, or some.

        Raises:
            ConnectionClosedError: the peer closed the connection before.
            PeerError: it does not speak what was proposed.
        """
        while len(self._buffer) < (n or 1):
            data = await super().read(RECEIVE_BYTES)
            if not data:
                raise ConnectionClosedError("the peer closed the connection")
            self._buffer += self._without_answer(data)
        return self._take(n)

    def _without_answer(self, data: bytes) -> bytes:
        rest = data if self._offer is None else self._offer.receive(data)
        if rest is None:
            return b""
        self._offer = None
        return rest

    def take_rest(self) -> bytes:
        """What was read ahead."""
        return self._take(None)

    def _take(self, n: int | None) -> bytes:
        data = bytes(self._buffer[:n])
        del self._buffer[:n]
        return data


def raw_address(address: str) -> bytes:
    """A multiaddr as bytes."""
    return bytes(Multiaddr(address).to_bytes())


def records_of(secured: ISecureConn) -> Records:
    """Take the connection over from the library after its handshake, or go through its session where we cannot."""
    raw = getattr(getattr(getattr(secured, "conn", None), "read_writer", None), "read_write_closer", None)
    if isinstance(raw, BufferedConnection):
        try:
            return _take_over(secured, raw)
        except AttributeError as error:
            log.warning("mesh.slow", reason=f"py-libp2p's Noise session has changed: {error}")
    return SessionRecords(cast("Session", secured))


def _take_over(secured: Any, raw: BufferedConnection) -> Records:  # noqa: ANN401 - internals of the library
    noise = secured.conn.noise_state.noise_protocol
    encrypting, decrypting = noise.cipher_state_encrypt, noise.cipher_state_decrypt
    if {type(state.cipher.cipher).__name__ for state in (encrypting, decrypting)} != {CIPHER}:
        raise AttributeError("another cipher")
    session = NoiseSession(
        encrypt=encrypting.cipher.cipher.encrypt,
        n_encrypted=encrypting.n,
        decrypt=decrypting.cipher.cipher.decrypt,
        n_decrypted=decrypting.n,
        ciphertext=raw.take_rest(),
        plaintext=secured._drain(None),  # noqa: SLF001 - the one that knows what it has read ahead
    )
    encrypting.n = decrypting.n = _SPENT_NONCE
    if isinstance(raw.bytes_stream, trio.SocketStream):
        return NoiseRecords(raw.bytes_stream, session)
    return NoiseStreamRecords(raw.bytes_stream, session)


class ForeignStream(IMuxedStream):
    """A stream as py-libp2p's handlers want it."""

    def __init__(self, stream: MuxedStream, muxed_conn: ForeignConnection, *, is_greeted: bool) -> None:
        """``is_greeted``: the header of multistream-select was sent already, so the library's own is left out."""
        self.muxed_conn = muxed_conn
        self._stream = stream
        self._is_greeted = is_greeted
        self._rest = b""

    async def read(self, n: int | None = None) -> bytes:
        """At most ``n`` bytes.

        Raises:
            MuxedStreamEOF: the peer sent all.
            MuxedStreamReset: the stream broke.
        """
        if not self._rest:
            try:
                self._rest = await self._stream.receive()
            except PeerError as error:
                raise MuxedStreamReset(str(error)) from error
            if not self._rest:
                raise MuxedStreamEOF("the peer sent all")
        stop = len(self._rest) if n is None or n < 0 else n
        data, self._rest = self._rest[:stop], self._rest[stop:]
        return data

    async def write(self, data: bytes) -> None:
        """Send all of ``data``. Raises MuxedStreamReset where the stream is broken or finished."""
        if self._is_greeted and data == HEADER:
            self._is_greeted = False
            return
        try:
            await self._stream.send(data)
        except PeerError as error:
            raise MuxedStreamReset(str(error)) from error

    async def close(self) -> None:
        """Send no more and read no more."""
        await self._stream.finish()
        self._stream.discard()

    async def close_write(self) -> None:
        """Send no more."""
        await self._stream.finish()

    async def reset(self) -> None:
        """Break the stream."""
        self._stream.reset()

    def set_deadline(self, ttl: int) -> None:
        """Deadlines are cancel scopes here."""
        raise MuxedStreamReset("streams have no deadline of their own: use a cancel scope")

    def get_remote_address(self) -> tuple[str, int] | None:
        """Address of the peer's socket."""
        return self.muxed_conn.get_remote_address()

    async def __aenter__(self) -> ForeignStream:
        return self


class ForeignConnection(IMuxedConn):
    """A connection as py-libp2p's swarm wants it."""

    def __init__(self, connection: Connection, secured: ISecureConn, peer_id: ID) -> None:
        self.connection = connection
        self.secured_conn = secured
        self.peer_id = peer_id
        self.event_started = connection.started
        self.event_closed = connection.closed
        self.negotiated_security_protocol = NOISE_PROTOCOL
        self.negotiated_muxer_protocol = YAMUX_PROTOCOL

    @property
    def is_initiator(self) -> bool:
        """Whether we dialled."""
        return bool(self.secured_conn.is_initiator)

    @property
    def is_established(self) -> bool:
        """Whether it is being served."""
        return self.connection.started.is_set() and not self.is_closed

    @property
    def is_closed(self) -> bool:
        """Whether it is over."""
        return self.connection.closed.is_set()

    async def start(self) -> None:
        """Serve it until it is over. Raises nothing: that would end the host."""
        await self.connection.run()

    async def close(self) -> None:
        """End it at once."""
        await self.connection.aclose()

    async def open_stream(self) -> ForeignStream:
        """A stream whose protocol the library negotiates. Raises MuxedConnUnavailable."""
        await trio.lowlevel.checkpoint()
        try:
            stream = self.connection.machine.open()
        except PeerError as error:
            raise MuxedConnUnavailable(str(error)) from error
        return ForeignStream(stream, self, is_greeted=False)

    async def accept_stream(self) -> ForeignStream:
        """The next stream of the library's protocols. Raises MuxedConnUnavailable at the end of the connection."""
        try:
            stream = await self.connection.accept_foreign()
        except trio.EndOfChannel as error:
            raise MuxedConnUnavailable("the connection is over") from error
        return ForeignStream(stream, self, is_greeted=True)

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Of the peer's end."""
        return list(self.secured_conn.get_transport_addresses())

    def get_remote_address(self) -> tuple[str, int] | None:
        """Address of the peer's socket."""
        return cast("tuple[str, int] | None", self.secured_conn.get_remote_address())

    def get_connection_type(self) -> ConnectionType:
        """Direct or relayed."""
        return self.secured_conn.get_connection_type()
