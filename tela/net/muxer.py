"""A connection under trio: drives :class:`tela.net.yamux.YamuxMachine` over encrypted records.

Who sends what: a write goes into the machine and, where the line was quiet, to the socket at once; what follows within
COALESCE_S goes together, by the writer task. What the reader's frames call for goes out when all that was read is
dispatched. Nothing is encrypted or sent under a caller's cancel scope in a way that could be cut: a cancelled call
leaves the connection whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio

from tela.errors import ProtocolError
from tela.net import yamux
from tela.net.bounds import serve_stream
from tela.net.endpoints import NOWHERE
from tela.net.multistream import Offer, Selected, Selection
from tela.net.records import Records
from tela.net.streams import MuxedStream, Waiter
from tela.net.transport import StreamHandler
from tela.net.yamux import YamuxMachine
from tela.record import NodeId

COALESCE_S: Final = 25e-6
"""Writes that follow another this soon are sent together. A request's round trip on loopback takes 100 us, a write of a
burst 5 us."""
CLOSE_TIMEOUT_S: Final = 2.0
_BY_PEER: Final = "closed by the peer"
_BY_US: Final = "closed by us"


class Connection:
    """One connection to ``peer``. :meth:`run` serves it; :meth:`close` ends it at once, from anywhere."""

    def __init__(
        self,
        records: Records,
        peer: NodeId,
        *,
        is_client: bool,
        handlers: Mapping[str, StreamHandler],
        is_foreign: Callable[[str], bool],
        heartbeat_s: float,
        dead_after_s: float,
        offer: Offer | None = None,
    ) -> None:
        """``handlers`` serve our protocols; streams of ``is_foreign`` ones go to :meth:`accept_foreign`.

        ``offer`` proposes the muxer itself, where that is not agreed on yet.
        """
        self.peer = peer
        self.is_dialled = is_client
        self.machine: YamuxMachine[MuxedStream] = YamuxMachine(is_client=is_client, make_stream=self._make_stream)
        self.agreed_protocols: set[str] = set()
        """What the peer has agreed to once, it is not asked again before data is sent."""
        self.started = trio.Event()
        self.closed = trio.Event()
        self.on_closed: Callable[[], None] = lambda: None
        self.reason = ""
        self.relay: NodeId | None = None
        """Through whom the connection goes, where it is a circuit."""
        self.remote = NOWHERE
        """The other end of a direct connection, whichever side made it; port 0 where a proxy hides it."""
        self.local = NOWHERE
        """Our end of one that we made straight over TCP."""
        self.is_punched = False
        self.is_superseded = False
        """A better one to the peer is up: what has begun here may end here."""
        self.heard_at = trio.current_time()
        self._records = records
        self._handlers = handlers
        self._is_foreign = is_foreign
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._foreign_in, self._foreign_out = trio.open_memory_channel[MuxedStream](yamux.MAX_BACKLOG)
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._handled: dict[MuxedStream, trio.CancelScope] = {}
        self._writer = Waiter()
        self._is_writer_due = False
        self._is_dispatching = False
        self._kicked_at = 0.0
        self._offer = offer
        if offer is not None:
            self.machine.put_first(offer.opening)

    def _make_stream(self, stream_id: int, first_flag: int) -> MuxedStream:
        return MuxedStream(self, stream_id, first_flag)

    def selection(self) -> Selection:
        """For a stream that the peer opened."""
        return Selection(self._handlers.__contains__, self._is_foreign)

    # -- streams ------------------------------------------------------------------------------------------------------

    async def open(self, protocol: str) -> MuxedStream:
        """A stream for ``protocol``. Costs no round trip once the peer has agreed to the protocol before.

        Raises:
            PeerError: it does not speak it, or the connection takes no stream.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        stream = self.machine.open()
        stream.propose(Offer(protocol))
        if protocol not in self.agreed_protocols:
            try:
                await stream.agree()
            except BaseException:
                stream.reset()
                raise
        return stream

    def start_handler(self, stream: MuxedStream, selected: Selected) -> None:
        """The peer opened a stream and its protocol is known."""
        if not selected.is_native:
            try:
                self._foreign_in.send_nowait(stream)
            except (trio.WouldBlock, trio.BrokenResourceError):
                stream.reset()
        elif self._nursery is not None:
            # Looked up now: what was agreed on is served, whatever happens before the task starts.
            self._nursery.start_soon(self._handle, stream, self._handlers[selected.protocol], selected.protocol)

    async def _handle(self, stream: MuxedStream, handler: StreamHandler, protocol: str) -> None:
        with trio.CancelScope() as self._handled[stream]:
            await serve_stream(handler, stream, protocol)
        del self._handled[stream]

    async def accept_foreign(self) -> MuxedStream:
        """The next stream that the peer opened for a protocol of the library.

        Raises:
            trio.EndOfChannel: the connection is over.
        """
        return await self._foreign_out.receive()

    # -- out ----------------------------------------------------------------------------------------------------------

    def kick(self) -> None:
        """Let what the machine holds go out, soon enough and seldom enough."""
        if self._is_dispatching or self._is_writer_due or not self.machine.has_output:
            return
        now = trio.current_time()
        if now - self._kicked_at < COALESCE_S:
            self._wake_writer()
        else:
            self._kicked_at = now
            self._flush()

    def _flush(self) -> None:
        try:
            if not self._records.write_nowait(self.machine):
                self._wake_writer()
        except OSError as error:
            self._end(str(error))

    def _wake_writer(self) -> None:
        self._is_writer_due = True
        self._writer.wake()

    async def _write(self) -> None:
        try:
            while True:
                if not self._is_writer_due:
                    await self._writer.wait()
                await self._records.drain(self.machine)
                self._is_writer_due = False
        except Exception as error:  # noqa: BLE001 - the wall of a connection: library code under it
            self._end(str(error) or type(error).__name__)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the connection until it is over, however it ends."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._beat)
                    self.started.set()
                    await self._read()
                    nursery.cancel_scope.cancel()
        finally:
            self.started.set()
            self._end(_BY_US)
            with trio.move_on_after(CLOSE_TIMEOUT_S) as scope:  # lost: a polite end of a foreign session
                scope.shield = True
                await self._records.close()

    async def _read(self) -> None:
        try:
            while not self._is_over_for_peer and (records := await self._records.read()) is not None:
                self.heard_at = trio.current_time()
                self._dispatch(records)
            self._end(_BY_PEER)
        except ProtocolError as error:
            self.machine.go_away(yamux.PROTOCOL_ERROR)
            self._flush()
            self._end(str(error))
        except Exception as error:  # noqa: BLE001 - the wall of a connection: broken ciphertext, broken sockets
            self._end(str(error) or type(error).__name__)

    @property
    def _is_over_for_peer(self) -> bool:
        return self.machine.peer_code is not None and not self.machine.streams

    def _dispatch(self, records: Sequence[bytes]) -> None:
        self._is_dispatching = True
        try:
            for record in records:
                self.machine.receive(self._without_answer(record), self.heard_at)
        finally:
            self._is_dispatching = False
        if self.machine.has_output and not self._is_writer_due:
            self._flush()

    def _without_answer(self, record: bytes) -> bytes:
        """What is left of a record behind the peer's answer to our proposal of the muxer."""
        if self._offer is None:
            return record
        rest = self._offer.receive(record)
        if rest is None:
            return b""
        self._offer = None
        return rest

    async def _beat(self) -> None:
        """Keep the connection alive, notice a dead peer, reset what nobody wants, give budgets anew."""
        while True:
            self.machine.ping(trio.current_time())
            self.kick()
            await trio.sleep(self._heartbeat_s)
            if self.silence_s >= self._dead_after_s:
                self._end(f"silent for {self.silence_s:.0f} s")
            elif self._is_over_for_peer:
                self._end(_BY_PEER)
            elif self.is_superseded and not self.machine.streams:
                self.close()
            self.machine.renew_budgets()
            for stream in list(self.machine.streams.values()):
                stream.heartbeat()
            for stream, scope in self._handled.items():
                if stream.is_broken:  # one that reads has noticed; this one sleeps
                    scope.cancel()

    @property
    def silence_s(self) -> float:
        """Since the peer was last heard of."""
        return trio.current_time() - self.heard_at

    def close(self) -> None:
        """End the connection: what the socket takes at once is still sent, every stream breaks."""
        if not self.closed.is_set():
            self.machine.go_away(yamux.NORMAL)
            self._flush()
            self._end(_BY_US)

    async def aclose(self) -> None:
        """Close it with its socket, whether it was ever served or not."""
        self.close()
        await self._records.close()

    def _end(self, reason: str) -> None:
        if self.closed.is_set():
            return
        self.reason = reason
        self.closed.set()
        self.machine.abandon()
        self._foreign_in.close()
        self._scope.cancel()
        self.on_closed()
