"""The background's timers, with a clock that goes on when it is told to and nobody to send to."""

from __future__ import annotations

import mmap
import socket
from typing import Any

import numpy as np
import pytest

from routetrace.capture_agent import AgentConfig, counters
from routetrace.capture_agent.counters import COUNTER_BYTES
from routetrace.capture_agent.step_path.feed import Feed
from routetrace.capture_agent.step_path.ring import Ring
from routetrace.capture_agent.worker import Worker
from routetrace.codec.records import OP, OpKind, unpack
from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb
from support.servers.ingest_server import read_chunk

LAYOUT = ModelLayout((1, 2), 4, 256, 2)


class Clock:
    """Seconds that the test sets."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Background:
    """A worker that works when it is called, its stream, and the engine's end of the ring."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        config = AgentConfig("127.0.0.1:1", "e0", LAYOUT, **settings)
        memory = memoryview(mmap.mmap(-1, COUNTER_BYTES + (1 << 16)))
        self.words = memory[:COUNTER_BYTES].cast("Q")
        self.worker = Worker(config, memory, socket.socket(), 0, clock=self.clock.monotonic)
        self.sender = self.worker.sender
        self.sender.open()
        welcome = pb.Welcome(epoch=1, next_sequence=1, max_chunk_bytes=1 << 20)
        self.sender.receive(pb.IngestResponse(welcome=welcome))
        self.sent: list[list[int]] = []  # kinds of ops, by chunk
        self.feed = Feed(Ring(memory[COUNTER_BYTES:]), LAYOUT)
        self.began = 0

    def at(self, now: float) -> None:
        """The worker looks at the ring at that time."""
        self.clock.now = 1000 + now
        self.worker._work()
        while message := self.sender.next_message():
            chunk = pb.IngestRequest.FromString(message).chunk
            header, _ = read_chunk(chunk.header, chunk.payload)
            self.sent.append(unpack(header.ops, OP, "ops")["kind"].tolist())
            self.sender.receive(pb.IngestResponse(ack=pb.Ack(sequence=chunk.sequence)))

    def pace(self, awaited: pb.Awaited.ValueType) -> None:
        """The server says what readers wait for."""
        self.sender.receive(pb.IngestResponse(pace=pb.Pace(awaited=awaited)))

    def begin(self) -> int:
        self.began += 1
        name, facts = f"r{self.began}", pb.RequestBegin().SerializeToString()
        self.feed.event("begin", self.began, name, facts, self.began - 1, 0, 0, b"", None)
        return self.began

    def row(self, handle: int, position: int) -> None:
        rows = np.array([[[1, 2], [3, 4]]], np.uint8)
        assert self.feed.step(np.array([[handle], [position], [1]]), rows, position + 1, 0, None)


def test_rows_that_are_due_soon_go_in_the_chunk_that_events_are_due_for():
    background = Background(linger_seconds=1, flush_interval_seconds=0.1)
    background.at(0.0)
    handle = background.begin()
    background.row(handle, 0)
    background.at(0.05)
    background.at(0.12)
    assert background.sent == [[OpKind.BEGIN]]
    background.at(0.87)
    background.begin()
    background.at(0.9)
    assert len(background.sent) == 1
    background.at(0.98)  # the row is due at 1.0
    assert background.sent[1:] == [[OpKind.BEGIN, OpKind.ROWS]]
    background.at(1.2)
    assert len(background.sent) == 2


def test_a_record_counts_whole_or_not_at_all(monkeypatch):
    """It is read again by the next background if this one is killed before it was consumed."""
    background = Background()
    handle = background.begin()
    background.feed.event("preempt", 0, handle=handle)
    background.at(0.0)
    background.row(handle, 0)  # late

    def killed(*_: int) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Ring, "consume", killed)
        with pytest.raises(SystemExit):
            background.at(0.1)
    assert counters.read(background.words, None).dropped_rows == {}
    background = Background()
    handle = background.begin()
    background.feed.event("preempt", 0, handle=handle)
    background.row(handle, 0)
    background.at(0.0)
    assert counters.read(background.words, None).dropped_rows == {"late": 1}


def test_rows_that_are_due_later_stay():
    background = Background(linger_seconds=1, flush_interval_seconds=0.1)
    background.at(0.0)
    handle = background.begin()
    background.at(0.5)
    background.row(handle, 0)
    background.begin()
    background.at(0.55)
    background.at(0.7)
    assert background.sent == [[OpKind.BEGIN], [OpKind.BEGIN]]
    background.at(1.39)
    assert len(background.sent) == 2
    background.at(1.5)
    assert background.sent[2:] == [[OpKind.ROWS]]


def test_an_idle_background_looks_once_in_a_flush_interval():
    background = Background(linger_seconds=1, flush_interval_seconds=0.1)
    background.at(0.0)
    assert background.worker._pause_ms() == 100
    background.row(background.begin(), 0)  # right after that look
    background.at(0.1)
    assert background.sent == [[OpKind.BEGIN]], "it has waited for as long as it may"
    background.at(0.95)
    assert background.worker._pause_ms() == 50, "until the row is due"


def _kinds(background: Background) -> list[int]:
    return [kind for chunk in background.sent for kind in chunk]


def test_rows_wait_for_their_frame_and_events_for_their_chunk_while_no_reader_waits():
    background = Background(linger_seconds=20, flush_interval_seconds=1)
    background.pace(pb.AWAITED_NOTHING)
    background.at(0.0)
    background.row(background.begin(), 0)
    background.at(0.1)
    background.at(0.9)
    assert background.sent == []
    background.at(1.1)
    assert background.sent == [[OpKind.BEGIN]]
    background.at(18.9)
    assert len(background.sent) == 1
    background.at(20.1)
    assert background.sent[1:] == [[OpKind.ROWS]]


def test_an_awaited_end_sends_chunks_early_and_awaited_rows_send_both():
    background = Background(linger_seconds=20, flush_interval_seconds=10)
    background.pace(pb.AWAITED_ENDS)
    background.at(0.0)
    background.row(background.begin(), 0)
    background.at(0.1)
    background.at(0.21)
    assert background.sent == [[OpKind.BEGIN]]
    background.at(5.0)
    assert len(background.sent) == 1, "rows go on waiting"
    background.pace(pb.AWAITED_ROWS)
    background.at(5.1)
    assert background.sent[1:] == [[OpKind.ROWS]], "it has waited for longer than a reader does"
    background.row(1, 1)
    background.at(5.2)
    background.pace(pb.AWAITED_NOTHING)
    background.at(9.0)
    assert len(background.sent) == 2


def test_a_server_that_tells_of_no_reader_is_sent_rows_early():
    background = Background(
        linger_seconds=20, flush_interval_seconds=10
    )  # its Welcome has no demand
    background.at(0.0)
    background.row(background.begin(), 0)
    background.at(0.1)
    background.at(1.2)
    assert _kinds(background) == [OpKind.BEGIN, OpKind.ROWS]


def test_what_is_left_is_sent_when_the_last_request_has_ended():
    background = Background(linger_seconds=20, flush_interval_seconds=10)
    background.pace(pb.AWAITED_NOTHING)
    background.at(0.0)
    first, second = background.begin(), background.begin()
    background.row(first, 0)
    background.feed.event("finish", 1, 1, None, 0, handle=first)
    background.at(0.1)
    background.at(0.2)
    assert background.sent == [], "another one runs"
    background.feed.event("finish", 1, 1, None, 0, handle=second)
    background.at(0.3)
    assert background.sent == [
        [OpKind.BEGIN, OpKind.BEGIN, OpKind.ROWS, OpKind.FINISH, OpKind.FINISH]
    ]


def test_rows_with_slots_alone_wait_for_a_second():
    background = Background(
        linger_seconds=20, flush_interval_seconds=0.1, block_size=4, num_blocks=4
    )
    background.pace(pb.AWAITED_NOTHING)
    background.at(0.0)
    rows = np.array([[[1, 2], [3, 4]]], np.uint8)
    assert background.feed.slots(np.array([1], np.uint64), rows, 1, 0, None)
    background.at(0.05)
    background.at(0.9)
    assert background.sent == []
    background.at(1.1)
    background.at(1.3)
    assert background.sent == [[OpKind.ROWS]]
