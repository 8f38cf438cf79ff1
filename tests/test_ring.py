"""The ring, and the engine's end of it: order, room, and what is remembered of the rest."""

from __future__ import annotations

import itertools
import mmap
import pickle
import threading
import time
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routetrace.capture_agent import feed as feed_module
from routetrace.capture_agent.feed import AGAIN, EVENT, RECORD, Feed, rows_at
from routetrace.capture_agent.ring import Ring
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.errors import InvalidArgument
from routetrace.v1.layout import RoutingLayout

LAYOUT = RoutingLayout((0, 1), 2, 64, 2)


def ends(size: int) -> tuple[Ring, Ring]:
    buffer = memoryview(bytearray(size))
    return Ring(buffer), Ring(buffer)


def write(ring: Ring, data: bytes) -> bool:
    record = ring.reserve(len(data))
    if record is None:
        return False
    record[:] = data
    ring.commit()
    return True


def read(ring: Ring) -> bytes | None:
    record = ring.peek()
    if record is None:
        return None
    data = bytes(record)
    ring.consume()
    return data


@settings(deadline=None)
@given(
    st.integers(400, 1600),
    st.lists(st.one_of(st.none(), st.integers(0, 600)), min_size=1, max_size=200),
)
def test_a_queue_of_any_records(size, actions):
    """None reads; a number writes a record of that length."""
    producer, consumer = ends(size)
    expected: deque[bytes] = deque()
    number = 0
    for action in actions:
        if action is None:
            assert read(consumer) == (expected.popleft() if expected else None)
            continue
        number = (number + 1) % 256
        data = bytes([number]) * action
        held = sum(8 + len(d) for d in expected)
        if write(producer, data):
            expected.append(data)
            assert len(data) <= producer.max_record
            assert held + len(data) <= producer.size
        else:
            # Refused only if too large, or if there is no such room in one piece.
            assert action > producer.max_record or expected
    while expected:
        assert read(consumer) == expected.popleft()
    assert read(consumer) is None


@given(st.integers(400, 1600), st.integers(0, 60))
def test_the_largest_record_fits_wherever_an_empty_ring_stands(size, lead):
    producer, consumer = ends(size)
    for _ in range(lead):
        assert write(producer, b"12345678")
        read(consumer)
    data = b"x" * producer.max_record
    assert write(producer, data)
    assert read(consumer) == data
    assert not write(producer, data + b"x")


def test_nothing_is_seen_before_commit_and_a_second_reservation_is_refused():
    producer, consumer = ends(512)
    record = producer.reserve(5)
    assert record is not None
    assert consumer.peek() is None
    assert producer.reserve(5) is None
    record[:] = b"first"
    assert consumer.peek() is None
    producer.commit()
    assert read(consumer) == b"first"


def test_two_threads():
    """Records of changing sizes, each telling its number and length."""
    memory = memoryview(mmap.mmap(-1, 5000))
    producer, consumer = Ring(memory), Ring(memory)
    total = 10_000
    seen: list[int] = []

    def consume() -> None:
        while len(seen) < total:
            data = read(consumer)
            if data is None:
                time.sleep(0)
                continue
            number = int.from_bytes(data[:4], "little")
            assert data[4:] == bytes([number % 251]) * (number % 300)
            seen.append(number)

    thread = threading.Thread(target=consume)
    thread.start()
    number = 0
    while number < total and thread.is_alive():
        data = number.to_bytes(4, "little") + bytes([number % 251]) * (number % 300)
        if write(producer, data):
            number += 1
        else:
            time.sleep(0)
    thread.join(30)
    assert seen == list(range(total))


def test_a_ring_whose_reader_keeps_up_stays_in_front():
    memory = bytearray(8 << 20)
    producer, consumer = Ring(memoryview(memory)), Ring(memoryview(memory))
    told = []
    producer._behind = lambda: told.append(producer.written)
    for i in range(2000):
        data = bytes([1 + i % 255]) * 10_000
        assert write(producer, data)
        if i % 3:  # sometimes two wait
            continue
        while read(consumer) is not None:
            pass
    assert producer.written > 2 * producer.size
    assert not any(memory[1 << 20 :])
    assert not told
    # One that does not is told of it, but not for each record.
    while write(producer, bytes(10_000)):
        pass
    assert 4 <= len(told) <= 8
    for i in range(2000):
        assert write(producer, bytes([i % 256]) * 500) or read(consumer) is not None


# ---------------------------------------------------------------------- the engine's end


def rows_of(n: int, value: int = 0) -> np.ndarray:
    return np.full((n, 2, 2), value, np.uint8)


def drain(ring: Ring) -> list[tuple]:
    out: list[tuple] = []
    while (data := read(ring)) is not None:
        if not data:
            continue
        kind, m, n, step, version = RECORD.unpack_from(data)
        if kind == EVENT:
            out.append(pickle.loads(data[RECORD.size :]))
        elif kind == AGAIN:
            ids = np.frombuffer(data, np.uint8, 4 * n, rows_at(0))
            out.append(("again", step, version, ids.tolist()))
        else:
            column = np.frombuffer(data, np.int64, 3 * m, RECORD.size).reshape(3, m).T.tolist()
            ids = np.frombuffer(data, np.uint8, 4 * n, rows_at(24 * m))
            out.append((column, step, version, ids.tolist()))
    return out


def test_what_does_not_fit_is_told_in_order_once_there_is_room():
    producer, consumer = ends(1000)
    feed = Feed(producer, LAYOUT)
    full = pb.MISSING_REASON_QUEUE_FULL
    steps = itertools.count(1)

    def step(handle: int, position: int, count: int) -> bool:
        runs = np.array([[handle], [position], [count]], np.int64)
        number = next(steps)
        if feed.step(runs, rows_of(count), number, 0, None):
            return True
        feed.lose(handle, position, count, full, number)
        return False

    while write(producer, b""):
        pass
    position = 100
    assert not step(1, position, 40)
    # Consecutive losses of one request make one span, of others their own.
    assert not step(1, position + 40, 40)
    assert not step(2, 0, 40)
    feed.event("rewind", position + 60, handle=1)
    assert not step(1, position + 60, 40)
    assert not step(2, 40, 40)
    feed.lose_blocks([9, 3, 9])
    assert feed.behind
    drain(consumer)
    assert feed.drain()
    blocks = np.array([3, 9], "<u4").tobytes()
    assert drain(consumer) == [
        ("lost", [(1, position, position + 80, full, 2), (2, 0, 80, full, 5)], b""),
        ("rewind", 1, position + 60),
        ("lost", [(1, position + 60, position + 100, full, 4)], blocks),
    ]
    # What was told is not told again.
    assert step(1, position + 100, 40)
    assert not feed.behind
    assert len(drain(consumer)) == 1


def test_a_stuck_reader_is_noticed_by_the_bytes_that_wait_for_it(monkeypatch):
    monkeypatch.setattr(feed_module, "MAX_BACKLOG_BYTES", 1 << 14)
    producer, consumer = ends(4096)
    feed = Feed(producer, LAYOUT)
    for i in range(1000):
        feed.lose(i % 8, 10 * i, 1, 0, i)  # with gaps, so that no two can be one
        feed.event("rewind", 5, handle=i % 8)
        if feed.stuck:
            break
    assert feed.stuck
    feed.clear()
    assert not feed.stuck
    for i in range(200):  # what was told does not count
        while write(producer, b""):
            pass
        feed.lose(1, 10 * i, 1, 0, i)
        feed.event("rewind", 5, handle=2)
        drain(consumer)
        assert feed.drain()
        drain(consumer)
    assert not feed.stuck
    assert not feed.behind


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32, np.int64])
def test_rows_are_narrowed_on_the_way(dtype):
    producer, consumer = ends(4096)
    feed = Feed(producer, LAYOUT)
    rows = np.arange(20).reshape(5, 2, 2).astype(dtype)
    bad = np.zeros((5, 2), bool)
    bad[3, 1] = dtype is not np.uint8
    runs = np.array([[1], [0], [5]])
    assert feed.step(runs, rows, 7, -3, bad if bad.any() else None)
    (column, step, version, ids), *_ = drain(consumer)
    expected = list(range(20))
    if bad.any():
        expected[14:16] = [0, 0]  # an id twice: no router chose that
    assert (column, step, version, ids) == ([[1, 0, 5]], 7, -3, expected)
    strided = np.arange(40).reshape(10, 2, 2).astype(dtype)[::2]
    assert feed.step(runs, strided, 7, 0, None)
    assert drain(consumer)[0][3] == strided.reshape(-1).tolist()


def going_on(feed: Feed, rows: np.ndarray, runs: object) -> bool:
    """Whether the step was written as one that goes on."""
    steady, feed.steady = feed.steady, None
    return steady is not None and steady.goes_on(rows, runs) and feed.again(steady, rows, 9, 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_a_step_that_goes_on_is_rows_alone(dtype):
    producer, consumer = ends(1 << 16)
    feed = Feed(producer, LAYOUT)
    rows, runs = rows_of(3).astype(dtype), np.array([[7, 4, 1], [8, 9, 2]])
    growth = np.array([0, 1, 0]) * runs[:, 2:]

    def begin() -> None:
        assert feed.step(np.ascontiguousarray(runs.T), rows, 1, 0, None)

    begin()
    for i in range(1, 5):
        assert going_on(feed, rows + dtype(i), runs + i * growth)
    again = [("again", 9, 1, [i] * 12) for i in range(1, 5)]
    assert drain(consumer) == [(runs.tolist(), 1, 0, [0] * 12), *again]
    after = runs + growth
    others = [
        (rows, runs),
        (rows, runs + 2 * growth),
        (rows, after[::-1]),
        (rows, after[:1]),
        (rows, after.tolist()),
        (rows, after.astype(np.uint64)),
        (rows, after.reshape(3, 2)),
        (rows, after + np.array([[0, 0, 0], [0, 0, 1]])),
        (rows[:2], after),
        (rows.astype(np.int16), after),
        (rows.reshape(3, 4, 1), after),
    ]
    for other in others:
        begin()
        assert not going_on(feed, *other)
        assert not going_on(feed, rows, after)  # it was not the next one, so nothing is
    # What came in between: the end of a request, or a signal handler that wrote a step.
    begin()
    feed.forget()
    assert not going_on(feed, rows, after)
    begin()
    steady, feed.steady = feed.steady, None
    assert steady is not None
    assert steady.goes_on(rows, after)
    begin()
    assert not feed.again(steady, rows, 9, 1)
    begin()
    if dtype is not np.uint8:
        assert not going_on(feed, rows - dtype(1), after)
    drain(consumer)
    while write(producer, b""):
        pass
    feed.event("rewind", 5, handle=7)  # which waits for room, and is told first
    drain(consumer)
    begin()
    assert drain(consumer)[0] == ("rewind", 7, 5)


def test_positions_do_not_go_on_for_ever():
    producer, consumer = ends(1 << 16)
    feed = Feed(producer, LAYOUT)
    last = (1 << 31) - 1
    runs, growth = np.array([[7, last - 4, 2]]), np.array([[0, 2, 0]])
    assert feed.step(np.ascontiguousarray(runs.T), rows_of(2), 1, 0, None)
    assert going_on(feed, rows_of(2), runs + growth)
    assert going_on(feed, rows_of(2), runs + 2 * growth)
    assert not going_on(feed, rows_of(2), runs + 3 * growth)
    drain(consumer)


def test_an_event_that_can_never_fit_is_an_error():
    producer, _ = ends(4096)
    with pytest.raises(InvalidArgument, match="ring_bytes"):
        Feed(producer, LAYOUT).event("begin", b"x" * 4096, handle=1)
