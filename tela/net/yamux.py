"""Yamux (``/yamux/1.0.0``) as a machine without I/O: frames, streams, windows, fairness and limits of one connection.

Bytes that came in go to :meth:`YamuxMachine.receive`; records to encrypt and send come from :meth:`YamuxMachine.take`.
What happens to a stream is told by calling its hooks at once, not by event objects: a frame costs microseconds, and an
object for each would double it. The driver (:mod:`tela.net.muxer`) subclasses :class:`YamuxStream`; hooks never raise.

Out of the machine: control frames and small writes first, in order ("urgent"); then queued writes, one record's worth a
stream in turn. While writes are queued a part of each record is theirs, so neither starves the other. A frame is never
cut by a cancelled writer: a write is either framed whole or waits in its stream's queue.

A peer that breaks the protocol or a limit gets ProtocolError out of ``receive``: say go-away and close.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from tela.errors import PeerError, ProtocolError

HEADER: Final = struct.Struct("!BBHII")
"""Version, type, flags, stream, length."""
DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
NORMAL, PROTOCOL_ERROR = 0, 1
"""Codes of go-away."""

INITIAL_WINDOW_BYTES: Final = 256 * 1024
"""Fixed by the protocol."""
MAX_WINDOW_BYTES: Final = 1 << 20
"""What one slow reader lets its peer send ahead; 1 MiB fills 10 MB/s at 100 ms."""
MAX_STREAMS: Final = 4_096
"""Open at once on a connection, each side's and ours together. A peer's streams beyond it are reset."""
MAX_BACKLOG: Final = 3_072
"""Streams that the peer opened and we have not answered yet; more are reset. 2,000 at once are a burst of requests."""
MAX_UNREAD_BYTES: Final = 64 << 20
"""Received on all streams of a connection and not read: 4,096 windows would be 1 GiB. A stream beyond it is reset."""
MAX_GROWTH_BYTES: Final = MAX_UNREAD_BYTES // 2
"""By which the windows of a connection may exceed INITIAL_WINDOW_BYTES, together and in equal shares. With up to 128
busy streams a peer that keeps to its windows cannot meet MAX_UNREAD_BYTES."""
MAX_RECORD_BYTES: Final = 65_519
"""Plaintext of one Noise message: 65,535 less the tag of 16."""
MAX_SMALL_BYTES: Final = 16 * 1024
"""Writes up to this are framed at once and go ahead of queued ones."""
MAX_SMALL_QUEUED_BYTES: Final = 64 * 1024
"""Of framed small writes that wait for the socket; above it small writes queue as large ones do."""
MAX_URGENT_BYTES: Final = 1 << 20
"""Of framed small writes and control frames: a peer that makes us answer but does not read is cut off."""
RESERVED_BYTES: Final = 16 * 1024
"""Of each record for queued writes, however many small frames wait."""
MIN_PAYLOAD_BYTES: Final = 4_096
"""Room in a record below which no further queued write is begun in it."""
BUDGETS: Final = {"pings": 1_000, "resets": 20_000, "openings": 200_000, "stray bytes": 256 << 20}
"""What a peer may do between two calls of :meth:`YamuxMachine.renew_budgets` (one heartbeat, 5 s): far above what an
honest peer needs, and below what would keep a core busy. Stray bytes are data for streams that we reset meanwhile."""
_MAX_SEND_WINDOW: Final = (1 << 32) - 1


class YamuxStream:
    """What the machine knows about one stream."""

    def __init__(self, stream_id: int, first_flag: int) -> None:
        self.stream_id = stream_id
        self.first_flag = first_flag
        """SYN or ACK until a frame carried it, then 0."""
        self.send_window = INITIAL_WINDOW_BYTES
        self.receive_window = INITIAL_WINDOW_BYTES
        """What the peer may still send."""
        self.target_window = INITIAL_WINDOW_BYTES
        self.n_unread = 0
        self.n_uncredited = 0
        """Bytes read that the peer has not been given credit for."""
        self.queue: deque[memoryview] = deque()
        self.is_lined_up = False
        self.n_put = 0
        """How many urgent frames of the connection were put by the time of this stream's last one."""
        self.is_finished = False
        """We want to send nothing more; FIN goes out behind what is queued."""
        self.is_fin_sent = False
        self.is_ended = False
        """The peer sent FIN."""
        self.is_broken = False
        """Reset by either side, or the connection is gone."""
        self.is_over = False
        """The machine has forgotten it."""

    def on_data(self, chunk: memoryview) -> None:
        """Bytes came in; ``chunk`` is valid only during the call. Report them as consumed once they are read."""

    def on_end(self) -> None:
        """The peer sends nothing more."""

    def on_reset(self) -> None:
        """The stream broke, and not by our own reset."""

    def on_sent(self) -> None:
        """All that was queued is framed."""


S = TypeVar("S", bound=YamuxStream)


class YamuxMachine(Generic[S]):
    """One end of a connection. ``make_stream(stream_id, first_flag)`` makes the streams of both sides."""

    def __init__(self, *, is_client: bool, make_stream: Callable[[int, int], S]) -> None:
        self.streams: dict[int, S] = {}
        self.n_unread = 0
        self._n_grown = 0
        self.rtt_s: float | None = None
        """Of the last ping that was answered."""
        self.peer_code: int | None = None
        """The code of the peer's go-away: it takes no further streams."""
        self._is_leaving = False
        self._make_stream = make_stream
        self._next_id = 1 if is_client else 2
        self._n_unanswered = 0
        self._urgent: list[bytes] = []
        self._n_urgent = 0  # bytes of them
        self._n_put = 0  # frames ever put there
        self._lined_up: deque[S] = deque()
        self._partial = b""  # of a header
        self._n_body = 0  # bytes of a DATA frame still to come
        self._body_of: S | None = None
        self._end_flags = 0
        self._ping_id = 0
        self._pinged_at: float | None = None
        self._budgets = dict(BUDGETS)

    # -- in -----------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes, now: float) -> None:
        """Take bytes in, cut anywhere.

        Raises:
            ProtocolError: the peer broke the protocol or a limit; the machine is of no further use but for go-away.
        """
        view = memoryview(data)
        position, end = 0, len(view)
        while position < end:
            if self._n_body:
                position = self._take_body(view, position)
            elif self._partial or end - position < HEADER.size:
                piece = view[position : position + HEADER.size - len(self._partial)]
                self._partial += piece
                position += len(piece)
                if len(self._partial) == HEADER.size:
                    header, self._partial = self._partial, b""
                    self._on_frame(header, 0, now)
            else:
                self._on_frame(view, position, now)
                position += HEADER.size

    def _on_frame(self, buffer: bytes | memoryview, position: int, now: float) -> None:
        version, kind, flags, stream_id, length = HEADER.unpack_from(buffer, position)
        if version:
            raise ProtocolError(f"yamux version {version}")
        if kind == DATA:
            self._on_data(flags, stream_id, length)
        elif kind == WINDOW_UPDATE:
            self._on_window_update(flags, stream_id, length)
        elif kind == PING:
            self._on_ping(flags, length, now)
        elif kind == GO_AWAY:
            self.peer_code = length
        else:
            raise ProtocolError(f"yamux frame of type {kind}")

    def _on_data(self, flags: int, stream_id: int, length: int) -> None:
        stream = self._addressed(flags, stream_id)
        if stream is None:
            self._spend("stray bytes", length)
        elif length > stream.receive_window:
            raise ProtocolError(f"{length} bytes where the window has {stream.receive_window}")
        elif length and stream.is_ended:
            raise ProtocolError("data after its end")
        else:
            stream.receive_window -= length
        self._n_body = length
        self._body_of = stream
        self._end_flags = flags & (FIN | RST)
        if not length:
            self._end_of_frame()

    def _take_body(self, view: memoryview, position: int) -> int:
        chunk = view[position : position + self._n_body]
        self._n_body -= len(chunk)
        stream = self._body_of
        if stream is not None and not stream.is_over:
            stream.n_unread += len(chunk)
            self.n_unread += len(chunk)
            if self.n_unread > MAX_UNREAD_BYTES:
                self.reset(stream)
                stream.on_reset()
            else:
                stream.on_data(chunk)
        if not self._n_body:
            self._end_of_frame()
        return position + len(chunk)

    def _on_window_update(self, flags: int, stream_id: int, length: int) -> None:
        stream = self._addressed(flags, stream_id)
        if stream is None:
            return
        stream.send_window += length
        if stream.send_window > _MAX_SEND_WINDOW:
            raise ProtocolError("window above 32 bits")
        if stream.queue:
            self._line_up(stream)
        self._body_of = stream
        self._end_flags = flags & (FIN | RST)
        self._end_of_frame()

    def _on_ping(self, flags: int, ping_id: int, now: float) -> None:
        if flags & SYN:
            self._spend("pings")
            self._answer(HEADER.pack(0, PING, ACK, 0, ping_id))
        elif self._pinged_at is not None and ping_id == self._ping_id:
            self.rtt_s = now - self._pinged_at
            self._pinged_at = None

    def _addressed(self, flags: int, stream_id: int) -> S | None:
        """The stream that a frame is for, a new one for SYN; None where it is over already or was refused."""
        if flags & SYN:
            return self._accept(stream_id)
        stream = self.streams.get(stream_id)
        if stream is None and (stream_id == 0 or (self._is_ours(stream_id) and stream_id >= self._next_id)):
            raise ProtocolError(f"frame for stream {stream_id} that nobody opened")
        return stream

    def _accept(self, stream_id: int) -> S | None:
        if stream_id == 0 or stream_id in self.streams or self._is_ours(stream_id):
            raise ProtocolError(f"stream {stream_id} cannot be opened by the peer")
        self._spend("openings")
        if self._is_leaving or len(self.streams) >= MAX_STREAMS or self._n_unanswered >= MAX_BACKLOG:
            self._answer(HEADER.pack(0, WINDOW_UPDATE, RST, stream_id, 0))
            return None
        stream = self.streams[stream_id] = self._make_stream(stream_id, ACK)
        self._n_unanswered += 1
        return stream

    def _is_ours(self, stream_id: int) -> bool:
        return not (stream_id ^ self._next_id) & 1

    def _end_of_frame(self) -> None:
        """Apply FIN or RST of the frame whose body is complete."""
        stream, flags = self._body_of, self._end_flags
        self._body_of, self._end_flags = None, 0
        if not flags:
            return
        if flags & RST:
            self._spend("resets")
        if stream is None or stream.is_over:
            return
        if flags & RST:
            self._break(stream)
            stream.on_reset()
        elif not stream.is_ended:
            stream.is_ended = True
            if stream.is_fin_sent:
                self._forget(stream)
            stream.on_end()

    def _spend(self, what: str, amount: int = 1) -> None:
        self._budgets[what] -= amount
        if self._budgets[what] < 0:
            raise ProtocolError(f"more than {BUDGETS[what]} {what} in a heartbeat")

    def renew_budgets(self) -> None:
        """A heartbeat has passed: the peer may spend its budgets anew."""
        self._budgets = dict(BUDGETS)

    # -- streams ------------------------------------------------------------------------------------------------------

    def open(self) -> S:
        """A stream of ours. The peer hears of it with the first frame.

        Raises:
            PeerError: the peer goes away, does not read, or MAX_STREAMS are open.
        """
        if self._is_leaving or self.peer_code is not None:
            raise PeerError("the connection is going away")
        if len(self.streams) >= MAX_STREAMS:
            raise PeerError(f"{MAX_STREAMS} streams are open already")
        if self._n_urgent > MAX_URGENT_BYTES:
            raise PeerError("the peer does not read")
        stream = self.streams[self._next_id] = self._make_stream(self._next_id, SYN)
        self._next_id += 2
        return stream

    def write(self, stream: S, data: bytes) -> None:
        """Send ``data``: framed now if it is small and may go, else queued; then ``stream.queue`` is not empty."""
        n_bytes = len(data)
        assert not stream.is_finished
        assert not stream.is_over
        if (
            n_bytes <= MAX_SMALL_BYTES
            and n_bytes <= stream.send_window
            and not stream.queue
            and self._n_urgent < MAX_SMALL_QUEUED_BYTES
        ):
            stream.send_window -= n_bytes
            self._put(HEADER.pack(0, DATA, self._take_first_flag(stream), stream.stream_id, n_bytes) + data)
            stream.n_put = self._n_put
        else:
            stream.queue.append(memoryview(data))
            self._line_up(stream)

    def finish(self, stream: S) -> None:
        """Half-close: FIN behind what is queued."""
        if stream.is_finished or stream.is_over:
            return
        stream.is_finished = True
        if not stream.queue:
            self._put_fin(stream)

    def _put_fin(self, stream: S) -> None:
        """FIN in a frame of its own: js-libp2p takes a FIN in before the data of its frame, and may drop that."""
        self._put(HEADER.pack(0, DATA, FIN | self._take_first_flag(stream), stream.stream_id, 0))
        self._fin_sent(stream)

    def reset(self, stream: S) -> None:
        """Break the stream; the peer is told unless it has not heard of it."""
        if stream.is_over:
            return
        is_known = stream.first_flag != SYN
        self._break(stream)
        if is_known:
            self._put(HEADER.pack(0, WINDOW_UPDATE, RST, stream.stream_id, 0))

    def drop_queue(self, stream: S) -> None:
        """Forget what is not framed yet: its writer gave up, and the stream is cut short."""
        stream.queue.clear()
        if stream.is_finished and not stream.is_over:
            self.reset(stream)

    def consumed(self, stream: S, n_bytes: int) -> None:
        """``n_bytes`` of the stream were read: the peer gets credit once half of the window is due."""
        if stream.is_over:
            return
        stream.n_unread -= n_bytes
        self.n_unread -= n_bytes
        stream.n_uncredited += n_bytes
        if stream.n_uncredited * 2 >= stream.target_window and not stream.is_ended:
            self._credit(stream)

    def _credit(self, stream: S) -> None:
        credit = stream.n_uncredited
        if stream.target_window < MAX_WINDOW_BYTES and self._may_grow(stream):
            self._n_grown += stream.target_window
            credit += stream.target_window
            stream.target_window *= 2
        stream.n_uncredited = 0
        stream.receive_window += credit
        self._put(HEADER.pack(0, WINDOW_UPDATE, self._take_first_flag(stream), stream.stream_id, credit))

    def _may_grow(self, stream: S) -> bool:
        """Whether the window may double: within its share, or a stream that came first would be served first."""
        share = MAX_GROWTH_BYTES // len(self.streams)
        is_fair = 2 * stream.target_window - INITIAL_WINDOW_BYTES <= share
        return is_fair and self._n_grown + stream.target_window <= MAX_GROWTH_BYTES

    def _take_first_flag(self, stream: S) -> int:
        flag = stream.first_flag
        if flag:
            stream.first_flag = 0
            self._n_unanswered -= flag == ACK
        return flag

    def _fin_sent(self, stream: S) -> None:
        stream.is_fin_sent = True
        if stream.is_ended:
            self._forget(stream)

    def _break(self, stream: S) -> None:
        stream.is_broken = True
        stream.queue.clear()
        self._forget(stream)

    def _forget(self, stream: S) -> None:
        stream.is_over = True
        del self.streams[stream.stream_id]
        self._n_unanswered -= stream.first_flag == ACK
        self.n_unread -= stream.n_unread
        self._n_grown -= stream.target_window - INITIAL_WINDOW_BYTES

    # -- the connection -----------------------------------------------------------------------------------------------

    def put_first(self, data: bytes) -> None:
        """Bytes that go out ahead of every frame: the proposal of this very protocol."""
        assert not self._n_put
        self._put(data)

    def ping(self, now: float) -> None:
        """Ask for a sign of life; its answer sets ``rtt_s``."""
        self._ping_id = (self._ping_id + 1) & 0xFFFFFFFF
        self._pinged_at = now
        self._put(HEADER.pack(0, PING, SYN, 0, self._ping_id))

    def go_away(self, code: int) -> None:
        """Tell the peer that we close."""
        self._is_leaving = True
        self._put(HEADER.pack(0, GO_AWAY, 0, 0, code))

    def abandon(self) -> None:
        """The connection is gone: every stream breaks."""
        self._is_leaving = True
        for stream in list(self.streams.values()):
            self._break(stream)
            stream.on_reset()

    # -- out ----------------------------------------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        """Whether :meth:`take` may have something to send."""
        return bool(self._urgent or self._lined_up)

    def take(self) -> bytes:
        """The next record, at most MAX_RECORD_BYTES; ``b""`` when there is nothing to send."""
        pieces, room = self._take_urgent()
        for _ in range(len(self._lined_up)):
            if room > MIN_PAYLOAD_BYTES:
                room -= self._take_turn(pieces, room - HEADER.size)
        return b"".join(pieces)

    def _take_urgent(self) -> tuple[list[bytes | memoryview], int]:
        """Urgent frames for a record, and the room that they leave."""
        pieces: list[bytes | memoryview] = list(self._urgent)
        room = MAX_RECORD_BYTES - (RESERVED_BYTES if self._lined_up else 0)
        if self._n_urgent > room:
            n_bytes = n_frames = 0
            while n_bytes + len(self._urgent[n_frames]) <= room:
                n_bytes += len(self._urgent[n_frames])
                n_frames += 1
            del pieces[n_frames:]
            del self._urgent[:n_frames]
            self._n_urgent -= n_bytes
            return pieces, MAX_RECORD_BYTES - n_bytes
        room = MAX_RECORD_BYTES - self._n_urgent
        self._urgent.clear()
        self._n_urgent = 0
        return pieces, room

    def _take_turn(self, pieces: list[bytes | memoryview], room: int) -> int:
        """Frame what the next stream in line may send, at most ``room`` bytes; the size of the frame."""
        stream = self._lined_up.popleft()
        stream.is_lined_up = False
        room = min(room, stream.send_window)
        if not stream.queue or room <= 0:
            return 0
        if stream.n_put > self._n_put - len(self._urgent):  # what it wrote before is not out yet
            self._line_up(stream)
            return 0
        header_index, n_bytes = len(pieces), 0
        pieces.append(b"")
        while stream.queue and n_bytes < room:
            piece = stream.queue[0][: room - n_bytes]
            if len(piece) == len(stream.queue[0]):
                stream.queue.popleft()
            else:
                stream.queue[0] = stream.queue[0][len(piece) :]
            pieces.append(piece)
            n_bytes += len(piece)
        stream.send_window -= n_bytes
        pieces[header_index] = HEADER.pack(0, DATA, self._take_first_flag(stream), stream.stream_id, n_bytes)
        if stream.queue:
            self._line_up(stream)
        else:
            if stream.is_finished:
                self._put_fin(stream)
            stream.on_sent()
        return HEADER.size + n_bytes

    def _line_up(self, stream: S) -> None:
        if not stream.is_lined_up and stream.send_window > 0:
            stream.is_lined_up = True
            self._lined_up.append(stream)

    def _put(self, frame: bytes) -> None:
        self._urgent.append(frame)
        self._n_urgent += len(frame)
        self._n_put += 1

    def _answer(self, frame: bytes) -> None:
        """A control frame that the peer asked for: one that asks and does not read is cut off."""
        if self._n_urgent > MAX_URGENT_BYTES:
            raise ProtocolError("the peer asks and does not read the answers")
        self._put(frame)
