"""A connection and its streams under trio: drives :class:`tela.net.yamux.YamuxMachine` over encrypted records.

Who sends what: a write goes into the machine and, where the line was quiet, to the socket at once; what follows within
COALESCE_S goes together, by the writer task. What the reader's frames call for goes out when all that was read is
dispatched. Nothing is encrypted or sent under a caller's cancel scope in a way that could be cut: a cancelled call
leaves the connection whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio

from tela.errors import PeerError, ProtocolError, StreamResetError
from tela.net import yamux
from tela.net.bounds import serve_stream
from tela.net.multistream import Offer, Selected, Selection
from tela.net.records import Records
from tela.net.transport import StreamHandler
from tela.net.yamux import SYN, YamuxMachine, YamuxStream
from tela.record import NodeId, short

COALESCE_S: Final = 25e-6
"""Writes that follow another this soon are sent together. A request's round trip on loopback takes 100 us, a write of a
burst 5 us."""
GATHER_BYTES: Final = 64 * 1024
"""Of small chunks that one receive() joins."""
NEGOTIATION_HEARTBEATS: Final = 2
"""What a peer may take to name the protocol of a stream that it opened."""
ABANDONED_HEARTBEATS: Final = 12
"""A minute: a stream that we finished, that nobody reads and on which nothing happens for so long is reset."""
CLOSE_TIMEOUT_S: Final = 2.0
_BY_PEER: Final = "closed by the peer"
_BY_US: Final = "closed by us"


class _Waiter:
    """Where one task waits for its next turn; an Event would be made anew for each wait."""

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    @property
    def is_waiting(self) -> bool:
        return self._task is not None

    async def wait(self) -> None:
        if self._task is not None:
            raise trio.BusyResourceError("another task waits for this stream already")
        self._task = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def wake(self) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)


class MuxedStream(YamuxStream):
    """A :class:`tela.net.transport.Stream`. Made by its connection."""

    def __init__(self, connection: Connection, stream_id: int, first_flag: int) -> None:
        super().__init__(stream_id, first_flag)
        self.connection = connection
        self._chunks: deque[bytes] = deque()
        self._reader = _Waiter()
        self._writer = _Waiter()
        self._offer: Offer | None = None
        self._unsent_opening = b""
        self._selection: Selection | None = None if first_flag == SYN else connection.selection()
        self._is_reset = False
        self._is_discarding = False
        self._reason: PeerError | None = None
        self._n_idle_heartbeats = 0

    @property
    def peer(self) -> NodeId:
        """The key that the peer proved to hold."""
        return self.connection.peer

    # -- what the machine tells ---------------------------------------------------------------------------------------

    def on_data(self, chunk: memoryview) -> None:
        """See YamuxStream."""
        self._n_idle_heartbeats = 0
        if self._is_discarding:
            self.connection.machine.consumed(self, len(chunk))
        elif self._offer is not None:
            self._take_answer(self._offer, bytes(chunk))
        elif self._selection is not None:
            self._take_proposal(self._selection, bytes(chunk))
        else:
            self._chunks.append(bytes(chunk))  # a copy: a view would keep the whole record in memory
            self._reader.wake()

    def on_end(self) -> None:
        """See YamuxStream."""
        if self._offer is not None or self._selection is not None:
            self._fail(ProtocolError(f"{short(self.peer)} ended a stream before its protocol was agreed on"))
        self._wake()

    def on_reset(self) -> None:
        """See YamuxStream. What came before stays readable."""
        self._wake()

    def on_sent(self) -> None:
        """See YamuxStream."""
        self._writer.wake()

    def _take_answer(self, offer: Offer, data: bytes) -> None:
        try:
            rest = offer.receive(data)
        except PeerError as error:
            self._fail(error)
            return
        if rest is not None:
            self._offer = None
            self.connection.agreed_protocols.add(offer.protocol)
            self._begin(offer.n_received, rest)

    def _take_proposal(self, selection: Selection, data: bytes) -> None:
        try:
            answer, selected = selection.receive(data)
        except ProtocolError as error:
            self._fail(error)
            return
        if answer:
            self.connection.machine.write(self, answer)
        if selected is not None:
            self._selection = None
            self._begin(selection.n_received, selected.rest)
            self.connection.start_handler(self, selected)

    def _begin(self, n_received: int, rest: bytes) -> None:
        """The protocol is agreed on; ``rest`` of the bytes received so far is for who uses the stream."""
        self.connection.machine.consumed(self, n_received - len(rest))
        if rest:
            self._chunks.append(rest)
        self._reader.wake()

    def _fail(self, reason: PeerError) -> None:
        self._reason = reason
        self.connection.machine.reset(self)
        self._wake()
        self.connection.kick()

    def _wake(self) -> None:
        self._reader.wake()
        self._writer.wake()

    # -- what its user calls ------------------------------------------------------------------------------------------

    def propose(self, offer: Offer) -> None:
        """Open for a protocol: its name goes out with the first data, or when an answer is waited for."""
        self._offer = offer
        self._unsent_opening = offer.opening

    async def agree(self) -> None:
        """Wait until the peer agreed to the protocol.

        Raises:
            PeerError: it did not.
        """
        self._send_opening()
        while self._offer is not None:
            if self.is_broken:
                raise self._broken()
            await self._reader.wait()

    async def send(self, data: bytes) -> None:
        """See Stream. A cancelled call may have sent a part."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.is_finished or self.is_over:
            raise self._broken()
        if not data:
            return
        self._put_opening()
        self.connection.machine.write(self, data)
        self.connection.kick()
        if self.queue:
            await self._wait_sent()
        if self.is_broken:
            raise self._broken()

    async def _wait_sent(self) -> None:
        try:
            await self._writer.wait()
        except BaseException:
            self.connection.machine.drop_queue(self)
            raise

    async def receive(self) -> bytes:
        """See Stream. A cancelled call has taken nothing."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._n_idle_heartbeats = 0
        while not self._chunks:
            if self.is_ended and not self._is_reset:
                return b""
            if self.is_broken or self._is_reset:
                raise self._broken()
            self._send_opening()
            await self._reader.wait()
        data = self._chunks.popleft()
        if self._chunks and len(data) < GATHER_BYTES:
            data = self._gather(data)
        self.connection.machine.consumed(self, len(data))
        self.connection.kick()
        return data

    def _gather(self, first: bytes) -> bytes:
        pieces, n_bytes = [first], len(first)
        while self._chunks and n_bytes < GATHER_BYTES:
            pieces.append(self._chunks.popleft())
            n_bytes += len(pieces[-1])
        return b"".join(pieces)

    async def finish(self) -> None:
        """See Stream."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self.finish_nowait()

    def finish_nowait(self) -> None:
        """Half-close without a checkpoint."""
        if not self.is_finished and not self.is_over:
            self._put_opening()
            self.connection.machine.finish(self)
            self.connection.kick()

    def discard(self) -> None:
        """Whatever comes is dropped from now on, so that the peer can come to its end."""
        self._is_discarding = True
        self.connection.machine.consumed(self, sum(map(len, self._chunks)))
        self._chunks.clear()
        self.connection.kick()

    def reset(self) -> None:
        """See Stream."""
        if not self._is_reset:
            self._is_reset = True
            self._chunks.clear()
            self.connection.machine.reset(self)
            self._wake()
            self.connection.kick()

    def _put_opening(self) -> None:
        if self._unsent_opening:
            opening, self._unsent_opening = self._unsent_opening, b""
            self.connection.machine.write(self, opening)

    def _send_opening(self) -> None:
        if self._unsent_opening and not self.is_over:
            self._put_opening()
            self.connection.kick()

    def _broken(self) -> StreamResetError:
        if self._is_reset:
            return StreamResetError(f"stream with {short(self.peer)} was reset by us")
        if self._reason is not None:
            return StreamResetError(f"stream with {short(self.peer)} broke: {self._reason}")
        if self.is_finished and not self.is_broken:
            return StreamResetError(f"stream to {short(self.peer)} is finished")
        return StreamResetError(
            f"stream with {short(self.peer)} broke: {self.connection.reason or 'reset by the peer'}"
        )

    def heartbeat(self) -> None:
        """Another heartbeat passed: give up if nobody seems to want the stream any more."""
        self._n_idle_heartbeats += 1
        if self._selection is not None:
            is_abandoned = self._n_idle_heartbeats > NEGOTIATION_HEARTBEATS
        else:
            is_waited_for = self._reader.is_waiting or bool(self.queue)
            is_abandoned = self.is_finished and not is_waited_for and self._n_idle_heartbeats > ABANDONED_HEARTBEATS
        if is_abandoned:
            self.reset()


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
    ) -> None:
        """``handlers`` serve our protocols; streams of ``is_foreign`` ones go to :meth:`accept_foreign`."""
        self.peer = peer
        self.machine: YamuxMachine[MuxedStream] = YamuxMachine(is_client=is_client, make_stream=self._make_stream)
        self.agreed_protocols: set[str] = set()
        """What the peer has agreed to once, it is not asked again before data is sent."""
        self.started = trio.Event()
        self.closed = trio.Event()
        self.on_closed: Callable[[], None] = lambda: None
        self.reason = ""
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
        self._writer = _Waiter()
        self._is_writer_due = False
        self._is_dispatching = False
        self._kicked_at = 0.0

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
            self._nursery.start_soon(self._handle, stream, selected.protocol)

    async def _handle(self, stream: MuxedStream, protocol: str) -> None:
        with trio.CancelScope() as self._handled[stream]:
            await serve_stream(self._handlers[protocol], stream, protocol)
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
                self.machine.receive(record, self.heard_at)
        finally:
            self._is_dispatching = False
        if self.machine.has_output and not self._is_writer_due:
            self._flush()

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
