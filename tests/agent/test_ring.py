"""The ring, and the engine's end of it: order, room, and what is remembered of the rest."""

from __future__ import annotations

import itertools
import mmap
import pickle
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routetrace.capture_agent.link import WorkerLink
from routetrace.capture_agent.step_path import feed as feed_module
from routetrace.capture_agent.step_path import ring as ring_module
from routetrace.capture_agent.step_path.feed import AGAIN, BLOCKS, EVENT, RECORD, Feed, rows_at
from routetrace.capture_agent.step_path.ring import Ring
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.common.limits import MAX_POSITION
from routetrace.v1 import routetrace_pb2 as pb

LAYOUT = ModelLayout((0, 1), 2, 64, 2)


def ends(size: int) -> tuple[Ring, Ring]:
    buffer = memoryview(mmap.mmap(-1, size))
    return Ring(buffer), Ring(buffer)


def write(ring: Ring, data: bytes) -> bool:
    at = ring.reserve(len(data))
    if not at:
        return False
    ring.memory[at : at + len(data)] = data
    ring.commit()
    return True


def read(ring: Ring) -> bytes | None:
    record = ring.peek()
    if record is None:
        return None
    data = bytes(record)
    ring.consume()
    return data


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
    at = producer.reserve(5)
    assert at
    assert consumer.peek() is None
    assert not producer.reserve(5)
    producer.memory[at : at + 5] = b"first"
    assert consumer.peek() is None
    producer.commit()
    assert read(consumer) == b"first"


class Killed(BaseException):
    """A consumer that is killed between two lines of its code."""


def killed_after(lines: int, call: Callable[[], object]) -> bool:
    """Kill a call after so many lines of the ring's code; return False if it ended before."""
    left = lines

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != ring_module.__file__:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Killed:
        return True
    finally:
        sys.settrace(before)
    return False


@given(st.integers(400, 1600), st.integers(0, 1 << 32).map(random.Random))
def test_another_consumer_goes_on_wherever_one_is_killed(size, rng):
    memory = memoryview(mmap.mmap(-1, size))
    producer, consumer = Ring(memory), Ring(memory)
    expected: deque[bytes] = deque()
    number = counted = 0

    def consume() -> bytes | None:
        record = consumer.peek()
        if record is None:
            return None
        data = bytes(record)
        consumer.consume(1 + len(data))
        return data

    for _ in range(300):
        if rng.random() < 0.5:
            number = (number + 1) % 256
            data = bytes([number]) * rng.randint(0, rng.choice((8, 200)))
            if write(producer, data):
                expected.append(data)
            continue
        read_before = producer.read
        if rng.random() < 0.5:
            assert consume() == (expected[0] if expected else None)
        elif killed_after(rng.randint(0, 30), consume):
            consumer = Ring(memory)
        # What was consumed is counted, and nothing else is, whenever it was killed.
        if producer.read > read_before:
            counted += 1 + len(expected.popleft())
        assert producer.consumed == consumer.consumed == counted
    while expected:
        assert consume() == expected.popleft()
    assert consume() is None


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
    memory = mmap.mmap(-1, 8 << 20)
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
        elif kind == BLOCKS:
            pairs = np.frombuffer(data, np.int64, 2 * m, RECORD.size)
            out.append(("blocks", *map(tuple, pairs.reshape(m, 2).tolist())))
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
        spans = np.array([[handle], [position], [count]], np.int64)
        number = next(steps)
        if feed.step(spans, rows_of(count), number, 0, None):
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
    spans = np.array([[1], [0], [5]])
    assert feed.step(spans, rows, 7, -3, bad if bad.any() else None)
    (column, step, version, ids), *_ = drain(consumer)
    expected = list(range(20))
    if bad.any():
        expected[14:16] = [0, 0]  # an id twice: no router chose that
    assert (column, step, version, ids) == ([[1, 0, 5]], 7, -3, expected)
    strided = np.arange(40).reshape(10, 2, 2).astype(dtype)[::2]
    assert feed.step(spans, strided, 7, 0, None)
    assert drain(consumer)[0][3] == strided.reshape(-1).tolist()


def going_on(feed: Feed, rows: np.ndarray, spans: object) -> bool:
    """Whether the step was written as one that goes on."""
    steady, feed.steady = feed.steady, None
    return steady is not None and steady.matches(rows, spans) and feed.again(steady, rows, 9, 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_a_step_that_goes_on_is_rows_alone(dtype):
    producer, consumer = ends(1 << 16)
    feed = Feed(producer, LAYOUT)
    rows, spans = rows_of(3).astype(dtype), np.array([[7, 4, 1], [8, 9, 2]])
    growth = np.array([0, 1, 0]) * spans[:, 2:]

    def begin() -> None:
        assert feed.step(np.ascontiguousarray(spans.T), rows, 1, 0, None)

    begin()
    for i in range(1, 5):
        assert going_on(feed, rows + dtype(i), spans + i * growth)
    again = [("again", 9, 1, [i] * 12) for i in range(1, 5)]
    assert drain(consumer) == [(spans.tolist(), 1, 0, [0] * 12), *again]
    after = spans + growth
    others = [
        (rows, spans),
        (rows, spans + 2 * growth),
        (rows, after[::-1]),
        (rows, np.asfortranarray(after)),
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
    # Rows that are not contiguous are copied another way; more steps than are predicted at a time.
    begin()
    drain(consumer)
    for i in range(1, 40):
        strided = np.repeat(rows + dtype(i), 2, axis=0)[::2]
        assert going_on(feed, strided, spans + i * growth)
        assert drain(consumer) == [("again", 9, 1, [i] * 12)]
    assert not going_on(feed, rows, spans + 39 * growth)
    # What came in between: the end of a request, or a signal handler that wrote a step.
    begin()
    feed.interrupt()
    assert not going_on(feed, rows, after)
    begin()
    steady, feed.steady = feed.steady, None
    assert steady is not None
    assert steady.matches(rows, after)
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


@pytest.mark.parametrize("many", [1, 20, 400, 5000])
def test_many_steps_that_go_on(many):
    """However many of them are predicted at a time, and up to the last position that there is."""
    producer, consumer = ends(1 << 21)
    feed = Feed(producer, LAYOUT)
    counts = 1 + np.arange(many) % 2
    rows = rows_of(counts.sum())
    for first in (7, MAX_POSITION - 50):
        spans = np.stack([np.arange(many), np.full(many, first), counts], axis=1)
        for step in range(100):
            if (spans[:, 1] + counts).max() > MAX_POSITION:
                assert not going_on(feed, rows, spans)
                break
            if not going_on(feed, rows, spans):
                assert step == 0 or first > 7
                assert feed.step(spans.T.copy(), rows, step, 0, None)
            assert len(drain(consumer)) == 1
            spans[:, 1] += counts


def give(feed: Feed, handle: int, *blocks: int) -> None:
    feed.blocks([handle] * len(blocks), blocks)


def test_blocks_are_told_together_before_whatever_comes_next():
    producer, consumer = ends(1 << 18)
    feed = Feed(producer, LAYOUT)
    rows, spans = rows_of(2), np.array([[7, 0, 1], [8, 0, 1]])
    growth = np.array([0, 1, 0])

    give(feed, 7, 3)
    give(feed, 8, 4, 5)
    assert drain(consumer) == []
    give(feed, 7, 6)
    assert feed.step(np.ascontiguousarray(spans.T), rows, 1, 0, None)
    give(feed, 8, 9)
    assert going_on(feed, rows, spans + growth)
    give(feed, 8, 10)
    feed.event("rewind", 5, handle=7)
    give(feed, 7, 11)
    assert feed.drain()
    assert drain(consumer) == [
        ("blocks", (7, 3), (8, 4), (8, 5), (7, 6)),
        (spans.tolist(), 1, 0, [0] * 8),
        ("blocks", (8, 9)),
        ("again", 9, 1, [0] * 8),
        ("blocks", (8, 10)),
        ("rewind", 7, 5),
        ("blocks", (7, 11)),
    ]
    give(feed, 7, *range(50_000))  # more than a record of this ring holds
    while not feed.drain():
        assert drain(consumer)
    assert not feed.behind
    # Blocks end a span of lost rows: what is lost later is lost after them.
    feed.lose(7, 0, 1, 0, 1)
    give(feed, 7, 1)
    feed.lose(7, 1, 1, 0, 1)
    drain(consumer)
    assert feed.drain()
    assert [name for name, *_ in drain(consumer)] == ["lost", "blocks", "lost"]


def test_what_a_signal_handler_tells_comes_after_what_is_being_told():
    producer, consumer = ends(1 << 16)
    feed = Feed(producer, LAYOUT)
    write_now, handled = feed._write, []

    def interrupted(record: bytes) -> bool:
        if not handled:
            handled.append(True)
            feed.event("rewind", 1, handle=7)
            give(feed, 7, 2)
            feed.lose(8, 1, 1, 0, 1)
        return write_now(record)

    give(feed, 7, 1)
    feed.lose(8, 0, 1, 0, 1)
    feed._write = interrupted  # type: ignore[method-assign]
    assert feed.drain()
    told = drain(consumer)
    assert [name for name, *_ in told] == ["blocks", "lost", "rewind", "blocks"]
    assert told[:2] == [("blocks", (7, 1)), ("lost", [(8, 0, 2, 0, 1)], b"")]
    # As does what it loses while that is being told: no row is lost without a word.
    handled.clear()
    feed.lose(8, 5, 1, 0, 1)

    def losing(record: bytes) -> bool:
        if not handled:
            handled.append(True)
            feed.lose(8, 6, 1, 0, 1)
        return write_now(record)

    feed._write = losing  # type: ignore[method-assign]
    assert feed.drain()
    assert [told[1] for told in drain(consumer)] == [[(8, 5, 6, 0, 1)], [(8, 6, 7, 0, 1)]]


def test_the_background_is_woken_once_for_what_it_has_yet_to_read():
    link = object.__new__(WorkerLink)
    link.ring, consumer = ends(4096)
    sent: list[bytes] = []
    link._sock = SimpleNamespace(send=sent.append)  # type: ignore[assignment]
    link._woken = 0
    for _ in range(3):
        write(link.ring, b"finish")
        link.wake()
    assert len(sent) == 1
    assert read(consumer)
    write(link.ring, b"finish")  # it may have stopped there
    link.wake()
    assert len(sent) == 2
    while read(consumer):
        pass
    link.wake()  # as close() does, with nothing new
    write(link.ring, b"finish")
    link.wake()
    assert len(sent) == 4


def test_positions_do_not_go_on_for_ever():
    producer, consumer = ends(1 << 16)
    feed = Feed(producer, LAYOUT)
    spans, growth = np.array([[7, MAX_POSITION - 5, 2]]), np.array([[0, 2, 0]])
    assert feed.step(np.ascontiguousarray(spans.T), rows_of(2), 1, 0, None)
    assert going_on(feed, rows_of(2), spans + growth)
    assert not going_on(feed, rows_of(2), spans + 2 * growth), "its second row is behind the last"
    drain(consumer)


def test_an_event_that_can_never_fit_is_an_error():
    producer, _ = ends(4096)
    with pytest.raises(InvalidArgument, match="ring_bytes"):
        Feed(producer, LAYOUT).event("begin", b"x" * 4096, handle=1)
