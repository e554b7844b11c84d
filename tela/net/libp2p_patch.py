"""Stock Yamux of py-libp2p 0.8.1 made safe to use; deleted when tela has a Yamux of its own.

A single task writes, so no cancelled call cuts a frame in two; writers wait without limit; a reset is no clean end.
"""

import struct
from typing import Any, Final

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamReset
from libp2p.stream_muxer.yamux import yamux as stock

MAX_WINDOW_BYTES: Final = 1 << 20  # what a slow reader lets its peer send ahead; 1 MiB fills 10 MB/s at 100 ms
MAX_QUEUED_BYTES: Final = 256 * 1024  # of a connection, waiting for its socket; writers wait above it
MAX_PAYLOAD_BYTES: Final = 65_519 - stock.HEADER_SIZE  # header and payload fill one Noise message
MAX_STREAMS: Final = 4_096  # that we open on one connection (stock: 256); more wait until the deadline of open
HEADER: Final = struct.Struct(stock.YAMUX_HEADER_FORMAT)


class SafeStream(stock.YamuxStream):
    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name in {"send_window", "send_closed", "closed"} and "_changed" in self.__dict__:
            self.__dict__.pop("_changed").set()

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        view = memoryview(data)
        while view:
            while self.conn.n_queued_bytes > MAX_QUEUED_BYTES and not self.closed:
                await self.conn.sent.wait()
            if self.send_closed or self.closed:
                raise MuxedStreamReset("the stream is closed for sending")
            if (size := min(self.send_window, MAX_PAYLOAD_BYTES, len(view))) > 0:
                self.send_window -= size
                self.conn.queue_frame(HEADER.pack(0, stock.TYPE_DATA, 0, self.stream_id, size) + view[:size])
                view = view[size:]
            else:
                await self.__dict__.setdefault("_changed", trio.Event()).wait()

    async def read(self, n: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not (buffer := self.conn.stream_buffers.get(self.stream_id)):
            if self.recv_closed and not self.conn.event_shutting_down.is_set():
                raise MuxedStreamEOF("the peer sent all")
            if self.reset_received or buffer is None:
                raise MuxedStreamReset("the stream broke")
            arrived = self.conn.stream_events[self.stream_id] = trio.Event()
            await arrived.wait()
        data = bytes(buffer if n is None or n < 0 else buffer[:n])
        del buffer[: len(data)]
        self._pending_recv_release += len(data)
        if self._pending_recv_release >= self.target_recv_window // 4:
            growth = min(self.target_recv_window, MAX_WINDOW_BYTES - self.target_recv_window)
            credit, self._pending_recv_release = self._pending_recv_release + growth, 0
            self.target_recv_window, self.recv_window = self.target_recv_window + growth, self.recv_window + credit
            self.conn.queue_frame(HEADER.pack(0, stock.TYPE_WINDOW_UPDATE, 0, self.stream_id, credit))
        return data

    async def reset(self) -> None:
        self.conn.stream_buffers.get(self.stream_id, bytearray()).clear()
        arrived = self.conn.stream_events.get(self.stream_id, trio.Event())
        await super().reset()
        arrived.set()


class SafeYamux(stock.Yamux):
    def __init__(self, secured_conn: Any, peer_id: Any) -> None:
        super().__init__(secured_conn, peer_id, secured_conn.is_initiator)
        self.stream_backlog_semaphore = trio.Semaphore(MAX_STREAMS)
        self._queue, self.n_queued_bytes, self._queued, self.sent = [b""], 0, trio.Event(), trio.Event()

    async def start(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_queued)
            await super().start()
            nursery.cancel_scope.cancel()
        self.sent.set()

    def queue_frame(self, data: bytes) -> None:
        self._queue.append(data)
        self.n_queued_bytes += len(data)
        self._queued.set()

    async def _write_frame(self, data: bytes) -> None:  # every frame of the stock half comes through here
        self.queue_frame(data)

    async def _send_queued(self) -> None:
        while True:
            await self._queued.wait()
            batch, self._queue, self.n_queued_bytes, self._queued = b"".join(self._queue), [], 0, trio.Event()
            self.sent.set()
            self.sent = trio.Event()
            try:
                await self.secured_conn.write(batch)
            except Exception:  # noqa: BLE001 - the wall: out of start() it would end the host
                await self._cleanup_on_error()


stock.YamuxStream = SafeStream  # what the stock half of SafeYamux makes
