"""The background: from the ring through pipeline and chunks to the sender.

Runs in a thread of the engine's process or in a separate process, and shares a block of memory and
a socket with the engine. The engine's end of the socket wakes it; when that end is closed, by
close() or by the engine's death, the background finishes.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.counters import COUNTER_BYTES, Word
from routetrace.capture_agent.pipeline.chunks import CODECS, ChunkBuilder
from routetrace.capture_agent.pipeline.intake import Intake
from routetrace.capture_agent.pipeline.pressure import SHARES, Pressure, PressureGauge
from routetrace.capture_agent.step_path.feed import (
    AGAIN,
    BLOCKS,
    EVENT,
    RECORD,
    SLOTS,
    STEP,
    rows_at,
)
from routetrace.capture_agent.step_path.ring import Ring
from routetrace.capture_agent.transport.connection import Transport
from routetrace.capture_agent.transport.sender import Sender
from routetrace.common.errors import counted
from routetrace.v1 import routetrace_pb2 as pb

#: Share of the time for close() that is reserved for an orderly end.
_RESERVE = 0.1

#: Longest times that rows, and then frames and events, wait while a reader waits for them.
_AWAITED_LINGER_S = 1.0
_AWAITED_FLUSH_S = 0.1

#: The same for rows that come with slots alone: a bind without a step takes what has arrived.
_SLOTS_LINGER_S = 1.0

#: Time between two looks at the ring.
_LOOK_S = 0.1

#: Time between two looks at whether the agent before this one has ended, while it is closed.
_HELD_LOOK_S = 0.01

#: Shares of memory that lingering rows may take before all of them are flushed.
_LINGER_SHARES = 2

#: Shares that may be held after that without a disk; the rest is for events, and for rows that can
#: still be dropped.
_FLUSHED_SHARES = 10

#: Records taken from the ring between two looks at timers and memory.
_BATCH = 64

_log = logging.getLogger(__name__)


class Worker:
    """The background of one agent.

    Args:
        config: of the agent.
        memory: counters and ring.
        sock: its end of the socket.
        parent: process id of the engine where that is another process, else 0.
        transport: network; gRPC if None.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: AgentConfig,
        memory: memoryview,
        sock: socket.socket,
        parent: int,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._config = config
        self._words = memory[:COUNTER_BYTES].cast("Q")
        self._ring = Ring(memory[COUNTER_BYTES:])
        self._sock = sock
        self._parent = parent
        self._row_bytes = config.layout.row_bytes
        self._share = config.queue_bytes // SHARES
        self._builder = ChunkBuilder(config.layout, self._share, CODECS[config.codec])
        self.sender = Sender(config, self._words, self._builder, self._notify, transport, clock)
        self._intake = Intake(
            config.layout,
            config.block_size,
            config.all_blocks,
            config.frame_rows,
            self._builder,
            self._drop,
            follows=self._words[Word.DEATHS] > 0,
        )
        self._taking = False
        self._drops: list[tuple[Word, int]] = []  # of the record that is being taken
        self._gauge = PressureGauge(self._share)
        self._sending = False
        # Time of the last look at the ring; records that are read arrived after the look before.
        self._looked = self._since = self._pending_since = self._clock()

    def run(self) -> None:
        """Work until the engine's end of the socket is closed, then finish."""
        self._words[Word.UP] = 1
        self._sock.setblocking(False)
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        try:
            more = False
            while not self.sender.ended:
                if not self._sending and not self._words[Word.HELD]:
                    self._start_sending()
                ready = poll.poll(0 if more else self._pause_ms())
                if (ready and self._hung_up()) or (self._parent and self._orphaned()):
                    self._finish()
                    break
                more = self._work()
        finally:
            self.sender.close(self._clock() + 1)
            self._sock.close()

    def forget_in_child(self) -> None:
        """After a fork, in the child: release the resources of the parent."""
        self._sock.close()
        self.sender.forget_in_child()

    def _start_sending(self) -> None:
        self._sending = True
        self.sender.start()

    def _hung_up(self) -> bool:
        try:
            return not self._sock.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _orphaned(self) -> bool:
        """Whether the engine died; a forked process may still hold its end of the socket."""
        return os.getppid() != self._parent

    def _pause_ms(self) -> int:
        """Time to the next timer that is known, in ms."""
        now = self._clock()
        due = [self._intake.oldest + self._linger_s, self._slots_due]
        if self._builder:
            due.append(self._pending_since + self._flush_s)
        # Overdue rows wait for the sender.
        pause = min([self._flush_s, _LOOK_S, *(at - now for at in due if at > now)])
        return max(1, math.ceil(pause * 1000))

    def _work(self) -> bool:
        """Work one round; return whether the ring may hold more."""
        taken = nbytes = 0
        while (more := taken < _BATCH and nbytes < self._share) and (
            record := self._peek()
        ) is not None:
            nbytes += len(record)
            self._consume(record)
            taken += 1
        self._intake.settle()
        if not taken and not self._holds:  # idle: nothing can be due
            self._pending_since = self._looked
            return False
        self._hand_on()
        self._bound()  # before lingering rows leave for where they cannot be dropped
        self._ship()
        return not more

    @property
    def _holds(self) -> bool:
        """Whether a timer, or the end of memory pressure, may be due."""
        calm = self._gauge.level is Pressure.NORMAL and not self._gauge.alarmed
        return bool(self._builder) or self._intake.nbytes > 0 or not calm

    def _peek(self) -> memoryview | None:
        if self._ring.caught_up:
            self._since, self._looked = self._looked, self._clock()
        return self._ring.peek()

    def _consume(self, record: memoryview) -> None:
        """Take a record; all of it counts, or nothing, whenever the process is killed."""
        self._taking = True
        rows = self._take(record)
        self._ring.consume(rows)
        self._taking = False
        if self._drops:
            for word, dropped in self._drops:
                self._words[word] += dropped
            self._drops.clear()

    def _take(self, record: memoryview) -> int:
        """Take a record; return its rows."""
        since = self._since
        kind, m, n, step, version = RECORD.unpack_from(record)
        at = RECORD.size
        if kind == EVENT:
            name, *args = pickle.loads(record[at:])
            if name == "flush":
                self._intake.report()
                self._ship_all()
                self.sender.flush(*args)
            else:
                self._intake.event(name, *args)
            return 0
        if kind == BLOCKS:
            handles, blocks = np.frombuffer(record, np.int64, 2 * m, at).reshape(m, 2).T
            self._intake.add_blocks(handles, blocks)
            return 0
        start = rows_at(24 * m if kind == STEP else 8 * n if kind == SLOTS else 0)
        rows = np.frombuffer(record, np.uint8, n * self._row_bytes, start)
        rows = rows.reshape(n, self._row_bytes)
        if kind == STEP:
            spans = np.frombuffer(record, np.int64, 3 * m, at).reshape(3, m).copy()
            self._intake.step(since, step, version, spans, rows)
        elif kind == AGAIN:
            self._intake.again(since, step, version, rows)
        elif kind == SLOTS:
            slots = np.frombuffer(record, np.uint64, n, at)
            self._intake.step_slots(since, step, version, slots, rows)
        return int(n)

    def _ship(self) -> None:
        """Flush rows that lingered, and seal a chunk that was pending, for long enough."""
        now, oldest = self._clock(), self._intake.oldest
        linger, flush = self._linger_s, self._flush_s
        early_s = min(flush, linger)
        if not self._builder:
            self._pending_since = now
        late = oldest <= now - linger
        if late:  # such rows wait no longer
            self._pending_since = min(self._pending_since, oldest + linger - early_s)
        if self._slots_due <= now:
            self._intake.flush_slots()
        # The rest of a batch waits for no more; a chunk that cannot be sent yet may as well grow.
        waited = now - self._pending_since >= flush or self._intake.all_ended
        due = waited and self.sender.idle
        if late or due:  # rows due a little later would else take another chunk
            self._intake.tick(now - linger + early_s)
        if due:
            self._builder.seal()
        self._hand_on()

    @property
    def _linger_s(self) -> float:
        awaited = self.sender.awaited in (pb.AWAITED_ROWS, pb.AWAITED_UNSPECIFIED)
        return min(self._config.linger_seconds, _AWAITED_LINGER_S if awaited else math.inf)

    @property
    def _flush_s(self) -> float:
        awaited = self.sender.awaited != pb.AWAITED_NOTHING
        return min(self._config.flush_interval_seconds, _AWAITED_FLUSH_S if awaited else math.inf)

    @property
    def _slots_due(self) -> float:
        return self._intake.slots_since + min(self._linger_s, _SLOTS_LINGER_S)

    def _ship_all(self) -> None:
        """Seal the pending chunk, and hand all chunks to the sender."""
        self._builder.seal()
        self._hand_on()

    def _hand_on(self) -> None:
        """Hand full chunks to the sender."""
        ready = self._builder.ready
        if ready:
            self._pending_since = self._clock()
        while ready:
            self.sender.put(ready.popleft())

    def _bound(self) -> None:
        """Bound memory: drop rows first, then events, then the names of requests."""
        intake, share = self._intake, self._share
        most = (SHARES - 2) * share
        full = self._held() > most or intake.nbytes > _LINGER_SHARES * share
        kept, most_kept = self._held() - intake.held_bytes, most - 2 * share
        if self._config.spill_dir is None:  # rows may take as much in the outbox
            kept, most_kept = kept + intake.nbytes, _FLUSHED_SHARES * share
        if full and kept < most_kept:
            intake.flush()
            intake.compact()
            self._hand_on()
        if (over := self._held() - most) > 0:
            intake.shed(over)
        if self._gauge.measure(self._held()):
            _log.warning("routetrace: queue memory exhausted; new requests will not be recorded")
        intake.pressure = self._gauge.level

    def _held(self) -> int:
        return self.sender.held_bytes + self._builder.nbytes + self._intake.held_bytes

    def _finish(self) -> None:
        """Send the rest within the time that close() has left."""
        now = self._clock()
        deadline = self._words[Word.DEADLINE] / 1e9 or now + self._config.close_timeout_seconds
        deadline -= _RESERVE * (deadline - now)
        while (more := self._work()) and self._clock() < deadline:
            pass
        self._intake.close()
        self._hand_on()
        # For that word alone nobody waits for a server that is away.
        waits = self._builder or self.sender.unacknowledged()[0] or not self._sending
        told = self._words[Word.CLOSED] and not more and (waits or self._words[Word.CONNECTED])
        self._builder.seal(closed=bool(told))
        self._hand_on()
        if not self._sending:
            half = now + (deadline - now) / 2  # the rest is for what this agent holds
            while self._words[Word.HELD] and self._clock() < half:
                time.sleep(_HELD_LOOK_S)
            self._start_sending()
        drained = self.sender.drain(deadline)
        if not drained and not self._words[Word.DEADLINE]:  # else close() itself says it
            _log.warning(
                "routetrace: engine %r of run %r ended without close(), with %s that the server "
                "did not acknowledge; they are lost, unless the server stored them without "
                "acknowledging: close the agent, give it more time (close_timeout_seconds is "
                "%g), and look at the server with routetrace doctor",
                self._config.engine_id,
                self._config.run,
                counted(self.sender.unacknowledged()[1], "row"),
                self._config.close_timeout_seconds,
            )

    def _drop(self, word: Word, rows: int) -> None:
        if (
            rows
            and word is Word.INVALID_IDS
            and not self._words[word]
            and word not in dict(self._drops)
        ):
            _log.warning(
                "routetrace: engine %r: rows with an id twice in one top-k or outside [0, %d) are "
                "reported as missing; stats() counts them as invalid_ids: check num_experts of the "
                "layout, and pass no rows of padding or of buffers that no router has written",
                self._config.engine_id,
                self._config.layout.num_experts,
            )
        if self._taking:
            self._drops.append((word, rows))
        else:
            self._words[word] += rows

    def _notify(self) -> None:
        with suppress(OSError):  # full: the engine's end will read it; closed: it does not wait
            self._sock.send(b"\0")
