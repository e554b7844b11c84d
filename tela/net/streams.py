"""A stream of our muxer under trio: reading, writing, agreeing on the protocol. Its connection is in tela.net.muxer."""

from __future__ import annotations

from collections import deque
from typing import Final, Protocol

import trio

from tela.errors import PeerError, ProtocolError, StreamResetError
from tela.net.multistream import Offer, Selected, Selection
from tela.net.yamux import MAX_SMALL_BYTES, SYN, YamuxMachine, YamuxStream
from tela.record import NodeId, short

GATHER_BYTES: Final = 64 * 1024
"""Of small chunks that one receive() joins."""
MAX_CHUNKS: Final = 256
"""Unread of a stream before they are joined: a chunk of one byte takes forty of memory."""
NEGOTIATION_HEARTBEATS: Final = 2
"""What a peer may take to name the protocol of a stream that it opened."""
ABANDONED_HEARTBEATS: Final = 12
"""A minute: a stream that we finished, that nobody reads and on which nothing happens for so long is reset."""


class Waiter:
    """Where one task waits for its next turn; an Event would be made anew for each wait."""

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a task waits."""
        return self._task is not None

    async def wait(self) -> None:
        """Wait for :meth:`wake`. Raises BusyResourceError if another task does."""
        if self._task is not None:
            raise trio.BusyResourceError("another task waits for this stream already")
        self._task = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def wake(self) -> None:
        """Let the task go on, if one waits."""
        if self._task is not None:
            task, self._task = self._task, None
            trio.lowlevel.reschedule(task)


class Carrier(Protocol):
    """What a stream needs of its connection."""

    peer: NodeId
    reason: str
    """Why the connection is over."""
    machine: YamuxMachine[MuxedStream]
    is_superseded: bool
    agreed_protocols: set[str]

    def kick(self) -> None:
        """Let go out what the machine holds."""
        ...

    def selection(self) -> Selection:
        """For a stream that the peer opened."""
        ...

    def start_handler(self, stream: MuxedStream, selected: Selected) -> None:
        """The protocol of a stream that the peer opened is known."""
        ...


class MuxedStream(YamuxStream):
    """A :class:`tela.net.transport.Stream`. Made by its connection."""

    def __init__(self, connection: Carrier, stream_id: int, first_flag: int) -> None:
        super().__init__(stream_id, first_flag)
        self.connection = connection
        self._chunks: deque[bytes] = deque()
        self._reader = Waiter()
        self._writer = Waiter()
        self._offer: Offer | None = None
        self._unsent_opening = b""
        self._selection: Selection | None = None if first_flag == SYN else connection.selection()
        self._is_sent = False  # the last write was framed whole, by the time that it was waited for
        self._is_reset = False
        self._is_discarding = False
        self._reason: PeerError | None = None
        self._n_idle_heartbeats = 0

    @property
    def peer(self) -> NodeId:
        """The key that the peer proved to hold."""
        return self.connection.peer

    @property
    def is_superseded(self) -> bool:
        """See Stream."""
        return self.connection.is_superseded

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
            if len(self._chunks) > MAX_CHUNKS:
                self._chunks = deque([b"".join(self._chunks)])
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
        self._is_sent = True
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
        self._is_sent = False
        self._put_opening()
        self.connection.machine.write(self, data)
        self.connection.kick()
        if self.queue:
            await self._wait_sent()
        elif len(data) > MAX_SMALL_BYTES:
            await trio.lowlevel.checkpoint()  # a socket that takes all at once must not make others wait their turn
        if self.is_broken and not self._is_sent:  # a peer that has it all may answer and be gone before we wake
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
