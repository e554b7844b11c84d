"""The Yamux machine: any interleaving, any split, and peers that break the protocol."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.errors import PeerError, ProtocolError
from tela.net import yamux
from tela.net.yamux import (
    ACK,
    DATA,
    FIN,
    GO_AWAY,
    HEADER,
    INITIAL_WINDOW_BYTES,
    MAX_RECORD_BYTES,
    MAX_WINDOW_BYTES,
    PING,
    RST,
    SYN,
    WINDOW_UPDATE,
    YamuxMachine,
    YamuxStream,
)


class Recorder(YamuxStream):
    """Keeps what the hooks tell."""

    def __init__(self, stream_id, first_flag):
        super().__init__(stream_id, first_flag)
        self.content = bytearray()
        self.n_held = 0  # received and not reported as consumed
        self.has_end = self.has_reset = False
        self.n_sent = 0

    def on_data(self, chunk):
        assert not self.has_end
        assert not self.has_reset
        self.content += chunk
        self.n_held += len(chunk)
        assert self.n_held <= MAX_WINDOW_BYTES

    def on_end(self):
        assert not self.has_end
        self.has_end = True

    def on_reset(self):
        assert not self.has_reset
        self.has_reset = True

    def on_sent(self):
        self.n_sent += 1


def machine(*, is_client: bool = False) -> YamuxMachine[Recorder]:
    return YamuxMachine(is_client=is_client, make_stream=Recorder)


def frame(kind: int, flags: int, stream_id: int, length: int, body: bytes = b"") -> bytes:
    return HEADER.pack(0, kind, flags, stream_id, length) + body


def taken(sender: YamuxMachine[Recorder]) -> bytes:
    """Everything that the machine has to send."""
    records = []
    while record := sender.take():
        assert len(record) <= MAX_RECORD_BYTES
        records.append(record)
    assert not sender.has_output
    return b"".join(records)


def validate(each: YamuxMachine[Recorder]) -> None:
    assert each._n_grown == sum(stream.target_window - INITIAL_WINDOW_BYTES for stream in each.streams.values())
    assert each._n_grown <= yamux.MAX_GROWTH_BYTES
    assert each.n_unread == sum(stream.n_unread for stream in each.streams.values())
    assert each._n_unanswered == sum(stream.first_flag == ACK for stream in each.streams.values())
    assert each._n_urgent == sum(map(len, each._urgent))
    for stream in each.streams.values():
        assert not stream.is_broken
        assert not (stream.is_fin_sent and stream.is_ended)
        assert 0 <= stream.receive_window <= stream.target_window <= MAX_WINDOW_BYTES
        assert stream.is_lined_up or not stream.queue or stream.send_window == 0


class Wire:
    """Two machines and what is under way between them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.machines = (machine(is_client=True), machine())
        self.under_way = (bytearray(), bytearray())
        self.opened: list[tuple[int, Recorder]] = []
        self.expected: dict[tuple[int, int], bytearray] = {}
        self.seen: dict[tuple[int, int], Recorder] = {}

    def act(self) -> None:
        side = self.rng.randrange(2)
        action = self.rng.choice((self.open, self.write, self.write, self.burst, self.finish, self.reset, self.ping))
        action(side)
        for _ in range(3):
            self.move(self.rng.randrange(2), is_all=False)
            self.consume(self.rng.randrange(2))

    def open(self, side: int) -> None:
        if len(self.opened) < 30:
            stream = self.machines[side].open()
            self.opened.append((side, stream))
            self.expected[side, stream.stream_id] = bytearray()

    def some(self) -> tuple[int, Recorder] | None:
        sendable = [(side, s) for side, s in self.opened if not s.is_finished and not s.is_over]
        return self.rng.choice(sendable) if sendable else None

    def write(self, _: int) -> None:
        if chosen := self.some():
            side, stream = chosen
            data = self.rng.randbytes(self.rng.choice((1, 100, 5_000, 70_000, 400_000)))
            self.machines[side].write(stream, data)
            self.expected[side, stream.stream_id] += data

    def burst(self, _: int) -> None:
        if chosen := self.some():
            side, stream = chosen
            for n_bytes in [self.rng.choice((10, 5_000, 16_000))] * self.rng.randint(2, 20) + [70_000, 3]:
                data = self.rng.randbytes(n_bytes)
                self.machines[side].write(stream, data)
                self.expected[side, stream.stream_id] += data

    def finish(self, _: int) -> None:
        if chosen := self.some():
            self.machines[chosen[0]].finish(chosen[1])

    def reset(self, _: int) -> None:
        if (chosen := self.some()) and self.rng.random() < 0.2:
            self.machines[chosen[0]].reset(chosen[1])

    def ping(self, side: int) -> None:
        self.machines[side].ping(1.0)

    def move(self, side: int, *, is_all: bool) -> None:
        self.under_way[side].extend(taken(self.machines[side]) if is_all else self.machines[side].take())
        other = self.machines[1 - side]
        while pending := self.under_way[side]:
            n_bytes = self.rng.randint(1, self.rng.choice((1, 13, 700, 70_000, len(pending))))
            other.receive(bytes(pending[:n_bytes]), 2.0)
            del pending[:n_bytes]
            validate(other)
            for stream in other.streams.values():
                self.seen[1 - side, stream.stream_id] = stream
            if not is_all and self.rng.random() < 0.5:
                return

    def consume(self, side: int, *, is_all: bool = False) -> None:
        for stream in list(self.machines[side].streams.values()):
            if stream.n_held and (is_all or self.rng.random() < 0.6):
                n_bytes = stream.n_held if is_all else self.rng.randint(1, stream.n_held)
                stream.n_held -= n_bytes
                self.machines[side].consumed(stream, n_bytes)
        validate(self.machines[side])

    def settle(self) -> None:
        is_moving = True
        while is_moving:
            for side in (0, 1):
                self.move(side, is_all=True)
                self.consume(1 - side, is_all=True)
            is_moving = any(each.has_output for each in self.machines)


@given(st.integers(0, 1 << 32), st.integers(5, 80))
def test_any_interleaving_in_any_pieces_delivers_in_order(seed, n_actions):
    wire = Wire(seed)
    for _ in range(n_actions):
        wire.act()
    wire.settle()
    for side, stream in wire.opened:
        there = wire.seen.get((1 - side, stream.stream_id))
        expected = wire.expected[side, stream.stream_id]
        if there is None:
            assert not expected or stream.is_broken
        elif stream.is_broken:
            assert expected.startswith(there.content)
            assert there.has_reset
        else:
            assert there.content == expected
            assert there.has_end == stream.is_finished
            assert not stream.queue
    assert all(each.n_unread == 0 for each in wire.machines)


def test_ping_measures_the_round_trip():
    one, other = machine(is_client=True), machine()
    one.ping(10.0)
    other.receive(taken(one), 10.1)
    one.receive(taken(other), 10.25)
    assert one.rtt_s == pytest.approx(0.25)
    one.receive(frame(PING, ACK, 0, 77), 99.0)  # an answer that nobody asked for
    assert one.rtt_s == pytest.approx(0.25)


def test_write_beyond_the_window_waits_for_credit_and_tells_when_it_is_framed():
    one, other = machine(is_client=True), machine()
    stream = one.open()
    one.write(stream, bytes(INITIAL_WINDOW_BYTES + 5))
    other.receive(taken(one), 0.0)
    there = other.streams[1]
    assert (len(there.content), stream.n_sent, len(stream.queue)) == (INITIAL_WINDOW_BYTES, 0, 1)
    other.consumed(there, INITIAL_WINDOW_BYTES // 2)
    one.receive(taken(other), 0.0)
    other.receive(taken(one), 0.0)
    assert (len(there.content), stream.n_sent) == (INITIAL_WINDOW_BYTES + 5, 1)
    assert there.target_window == 2 * INITIAL_WINDOW_BYTES


def test_queued_writers_take_turns_and_small_frames_go_first():
    one, other = machine(is_client=True), machine()
    bulk = [one.open() for _ in range(3)]
    for stream in bulk:
        one.write(stream, bytes(200_000))
    small = one.open()
    one.write(small, b"urgent")
    other.receive(one.take(), 0.0)
    assert bytes(other.streams[small.stream_id].content) == b"urgent"
    for _ in range(4):
        other.receive(one.take(), 0.0)
    sizes = [len(other.streams[stream.stream_id].content) for stream in bulk]
    assert min(sizes) > 60_000
    other.receive(taken(one), 0.0)
    assert [len(other.streams[stream.stream_id].content) for stream in bulk] == [200_000] * 3


def test_flood_of_small_frames_leaves_room_for_bulk():
    one, other = machine(is_client=True), machine()
    bulk, small = one.open(), one.open()
    one.write(bulk, bytes(100_000))
    for _ in range(8):
        one.write(small, bytes(10_000))
    other.receive(one.take(), 0.0)
    assert len(other.streams[bulk.stream_id].content) > yamux.RESERVED_BYTES // 2


def test_end_lies_behind_what_is_queued():
    one, other = machine(is_client=True), machine()
    stream = one.open()
    one.write(stream, bytes(INITIAL_WINDOW_BYTES + 1))
    one.finish(stream)
    other.receive(taken(one), 0.0)
    assert not other.streams[1].has_end
    other.consumed(other.streams[1], INITIAL_WINDOW_BYTES)
    one.receive(taken(other), 0.0)
    other.receive(taken(one), 0.0)
    assert other.streams[1].has_end
    other.finish(other.streams[1])
    one.receive(taken(other), 0.0)
    assert not one.streams
    assert not other.streams


def test_stream_that_was_never_told_of_is_reset_in_silence():
    one = machine(is_client=True)
    one.reset(one.open())
    assert taken(one) == b""
    stream = one.open()
    one.write(stream, bytes(100_000))
    one.reset(stream)
    assert taken(one) == b""


def test_writer_that_gave_up_leaves_what_was_framed():
    one, other = machine(is_client=True), machine()
    stream = one.open()
    one.write(stream, bytes(400_000))
    other.receive(taken(one), 0.0)
    one.drop_queue(stream)
    other.consumed(other.streams[1], INITIAL_WINDOW_BYTES)
    one.receive(taken(other), 0.0)
    assert taken(one) == b""
    one.write(stream, b"more")
    other.receive(taken(one), 0.0)
    assert len(other.streams[1].content) == INITIAL_WINDOW_BYTES + 4


def test_no_stream_is_opened_after_go_away():
    one, other = machine(is_client=True), machine()
    other.go_away(yamux.NORMAL)
    one.receive(taken(other), 0.0)
    assert one.peer_code == yamux.NORMAL
    with pytest.raises(PeerError):
        one.open()
    other.receive(frame(WINDOW_UPDATE, SYN, 1, 0), 0.0)  # crossed it
    assert taken(other) == frame(WINDOW_UPDATE, RST, 1, 0)


def test_abandoned_machine_breaks_every_stream():
    one = machine(is_client=True)
    streams = [one.open() for _ in range(3)]
    one.abandon()
    assert all(stream.has_reset for stream in streams)
    assert not one.streams


HOSTILE = {
    "version": HEADER.pack(1, DATA, SYN, 1, 0),
    "type": frame(4, 0, 1, 0),
    "window overrun": frame(DATA, SYN, 1, INITIAL_WINDOW_BYTES + 1),
    "window overrun in two": frame(DATA, SYN, 1, 1 << 18, bytes(1 << 18)) + frame(DATA, 0, 1, 1),
    "window overflow": frame(WINDOW_UPDATE, SYN, 1, (1 << 32) - 1),
    "duplicate SYN": frame(WINDOW_UPDATE, SYN, 1, 0) * 2,
    "SYN of our parity": frame(WINDOW_UPDATE, SYN, 2, 0),
    "SYN of stream 0": frame(WINDOW_UPDATE, SYN, 0, 0),
    "data on stream 0": frame(DATA, 0, 0, 1),
    "data on a stream that we never opened": frame(DATA, 0, 2, 1),
    "data after FIN": frame(DATA, SYN | FIN, 1, 1, b"x") + frame(DATA, 0, 1, 1),
    "ping flood": frame(PING, SYN, 0, 1) * (yamux.BUDGETS["pings"] + 1),
    "reset flood": (frame(WINDOW_UPDATE, SYN, 1, 0) + frame(WINDOW_UPDATE, RST, 1, 0)) * (yamux.BUDGETS["resets"] + 1),
}


@pytest.mark.defect(10)
@pytest.mark.parametrize("frames", HOSTILE.values(), ids=HOSTILE)
def test_peer_that_breaks_the_protocol_is_an_error(frames):
    with pytest.raises(ProtocolError):
        machine().receive(frames, 0.0)


def test_streams_above_the_limits_are_reset(monkeypatch):
    monkeypatch.setattr(yamux, "MAX_STREAMS", 8)
    each = machine()
    for stream_id in range(1, 41, 2):
        each.receive(frame(WINDOW_UPDATE, SYN, stream_id, 0), 0.0)
    assert len(each.streams) == 8
    assert taken(each).count(HEADER.pack(0, WINDOW_UPDATE, RST, 39, 0)) == 1
    with pytest.raises(PeerError, match="open already"):
        each.open()


def test_streams_that_we_did_not_answer_yet_are_bounded(monkeypatch):
    monkeypatch.setattr(yamux, "MAX_BACKLOG", 3)
    each = machine()
    for stream_id in (1, 3, 5, 7):
        each.receive(frame(WINDOW_UPDATE, SYN, stream_id, 0), 0.0)
    assert sorted(each.streams) == [1, 3, 5]
    each.write(each.streams[1], b"answer")
    each.receive(frame(WINDOW_UPDATE, SYN, 9, 0), 0.0)
    assert 9 in each.streams


def test_openings_are_budgeted_a_heartbeat(monkeypatch):
    monkeypatch.setitem(yamux.BUDGETS, "openings", 5)
    each = machine()
    opened = [frame(WINDOW_UPDATE, SYN, stream_id, 0) for stream_id in range(1, 30, 2)]
    each.receive(b"".join(opened[:5]), 0.0)
    each.renew_budgets()
    each.receive(b"".join(opened[5:10]), 0.0)
    with pytest.raises(ProtocolError, match="openings"):
        each.receive(opened[10], 0.0)


def test_data_for_streams_that_we_reset_is_dropped_and_bounded(monkeypatch):
    monkeypatch.setitem(yamux.BUDGETS, "stray bytes", 1_000)
    each = machine()
    each.receive(frame(WINDOW_UPDATE, SYN, 1, 0), 0.0)
    each.reset(each.streams[1])
    each.receive(frame(DATA, 0, 1, 600, bytes(600)), 0.0)
    with pytest.raises(ProtocolError, match="stray"):
        each.receive(frame(DATA, 0, 1, 600, bytes(600)), 0.0)


def test_peer_that_asks_and_does_not_read_is_cut_off(monkeypatch):
    monkeypatch.setattr(yamux, "MAX_URGENT_BYTES", 600)
    each = machine()
    with pytest.raises(ProtocolError, match="does not read"):
        each.receive(frame(PING, SYN, 0, 1) * 60, 0.0)
    with pytest.raises(PeerError, match="does not read"):
        each.open()


def test_unread_bytes_of_a_connection_are_bounded(monkeypatch):
    monkeypatch.setattr(yamux, "MAX_UNREAD_BYTES", 1_000)
    each = machine()
    each.receive(frame(DATA, SYN, 1, 600, bytes(600)), 0.0)
    first = each.streams[1]
    each.receive(frame(DATA, SYN, 3, 600, bytes(600)), 0.0)
    assert (sorted(each.streams), each.n_unread) == ([1], 600)
    assert taken(each) == frame(WINDOW_UPDATE, RST, 3, 0)
    each.consumed(first, 600)
    assert each.n_unread == 0


def test_peer_that_keeps_to_the_windows_of_many_streams_loses_none():
    """64 windows of 1 MiB, all of them filled, were more than a connection may hold unread."""
    each, ids = machine(), range(1, 129, 2)
    for stream_id in ids:
        each.receive(frame(WINDOW_UPDATE, SYN, stream_id, 0), 0.0)
    for _ in range(3):  # read at once: windows grow
        for stream_id in ids:
            n_bytes = each.streams[stream_id].receive_window
            each.receive(frame(DATA, 0, stream_id, n_bytes, bytes(n_bytes)), 0.0)
            each.consumed(each.streams[stream_id], n_bytes)
            each.streams[stream_id].n_held = 0
    assert {stream.target_window for stream in each.streams.values()} == {2 * INITIAL_WINDOW_BYTES}  # a fair share
    for stream_id in ids:  # read nothing
        n_bytes = each.streams[stream_id].receive_window
        each.receive(frame(DATA, 0, stream_id, n_bytes, bytes(n_bytes)), 0.0)
    assert sorted(each.streams) == list(ids)
    validate(each)


def test_fin_has_a_frame_of_its_own_behind_what_was_queued():
    """js-libp2p looks at a frame's FIN before its data."""
    each = machine(is_client=True)
    stream = each.open()
    each.write(stream, bytes(100_000))
    each.finish(stream)
    sent = taken(each)
    assert sent.endswith(frame(DATA, FIN, 1, 0))
    assert len(sent) > 100_000


def test_no_window_grows_under_pressure(monkeypatch):
    monkeypatch.setattr(yamux, "MAX_GROWTH_BYTES", 0)
    each = machine()
    half = INITIAL_WINDOW_BYTES // 2
    each.receive(frame(DATA, SYN, 1, half, bytes(half)), 0.0)
    each.consumed(each.streams[1], half)
    assert taken(each) == frame(WINDOW_UPDATE, ACK, 1, half)
    validate(each)


def test_go_away_is_remembered_with_its_code():
    each = machine()
    each.receive(frame(GO_AWAY, 0, 0, yamux.PROTOCOL_ERROR), 0.0)
    assert each.peer_code == yamux.PROTOCOL_ERROR
