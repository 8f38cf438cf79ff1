"""The background's timers, with a clock that goes on when it is told to and nobody to send to."""

from __future__ import annotations

import mmap
import socket
from typing import Any

import numpy as np
import pytest
from ingest_server import read_chunk

from routetrace.capture_agent import AgentConfig
from routetrace.capture_agent import worker as worker_module
from routetrace.capture_agent.counters import COUNTER_BYTES
from routetrace.capture_agent.feed import Feed
from routetrace.capture_agent.ring import Ring
from routetrace.capture_agent.worker import Worker
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import OP, OpKind, unpack

LAYOUT = RoutingLayout((1, 2), 4, 256, 2)


class Clock:
    """In the place of `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Outbox:
    """In the place of a Sender: keeps what it is given."""

    ended = False
    idle = True
    held_bytes = 0

    def __init__(self, *_: object) -> None:
        self.chunks: list[list[int]] = []  # kinds of ops

    def put(self, chunk: Any) -> None:
        header, _ = read_chunk(chunk.header, chunk.payload)
        self.chunks.append(unpack(header.ops, OP, "ops")["kind"].tolist())


class Background:
    """A worker that works when it is told to, and the engine's end of its ring."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.clock = Clock()
        monkeypatch.setattr(worker_module, "time", self.clock)
        monkeypatch.setattr(worker_module, "Sender", Outbox)
        config = AgentConfig("127.0.0.1:1", "e0", LAYOUT, **settings)
        memory = memoryview(mmap.mmap(-1, COUNTER_BYTES + (1 << 16)))
        self.worker = Worker(config, memory, socket.socket(), 0)
        self.sent: list[list[int]] = self.worker._sender.chunks  # type: ignore[attr-defined]
        self.feed = Feed(Ring(memory[COUNTER_BYTES:]), LAYOUT)
        self.began = 0

    def at(self, now: float) -> None:
        """The worker looks at the ring at that time."""
        self.clock.now = 1000 + now
        self.worker._work()

    def begin(self) -> int:
        self.began += 1
        name, facts = f"r{self.began}", pb.RequestBegin().SerializeToString()
        self.feed.event("begin", self.began, name, facts, self.began - 1, 0, 0, b"", None)
        return self.began

    def row(self, handle: int, position: int) -> None:
        rows = np.array([[[1, 2], [3, 4]]], np.uint8)
        assert self.feed.step(np.array([[handle], [position], [1]]), rows, position + 1, 0, None)


def test_rows_that_are_due_soon_go_in_the_chunk_that_events_are_due_for(monkeypatch):
    background = Background(monkeypatch, linger_s=1, flush_interval_s=0.1)
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


def test_rows_that_are_due_later_stay(monkeypatch):
    background = Background(monkeypatch, linger_s=1, flush_interval_s=0.1)
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


def test_an_idle_background_looks_once_in_a_flush_interval(monkeypatch):
    background = Background(monkeypatch, linger_s=1, flush_interval_s=0.1)
    background.at(0.0)
    assert background.worker._pause_ms() == 100
    background.row(background.begin(), 0)  # right after that look
    background.at(0.1)
    assert background.sent == [[OpKind.BEGIN]], "it has waited for as long as it may"
    background.at(0.95)
    assert background.worker._pause_ms() == 50, "until the row is due"
