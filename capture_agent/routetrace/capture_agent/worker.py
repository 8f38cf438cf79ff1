"""The background: from the ring through framer and chunks to the sender.

Runs in a thread of the engine's process, or in a process of its own; all it shares with the engine
is a block of memory and a socket. The engine's end of the socket wakes it and, when it is closed by
close() or by the engine's death, tells it to finish.
"""

from __future__ import annotations

import gc
import logging
import math
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import time
from contextlib import suppress

import numpy as np

from routetrace.capture_agent.chunks import ChunkBuilder
from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.counters import COUNTER_BYTES, Word
from routetrace.capture_agent.feed import AGAIN, BLOCKS, EVENT, RECORD, SLOTS, STEP, rows_at
from routetrace.capture_agent.framer import Framer
from routetrace.capture_agent.ring import Ring
from routetrace.capture_agent.sender import Sender

#: Share of the time for close() that is kept back for ending in good order.
_RESERVE = 0.1

#: Records taken from the ring before timers and memory are looked at again.
_BATCH = 64
#: Of memory that may be held: what is in the ring and not yet bounded, a chunk that is being put
#: together, and each of the steps in which things are given up.
_SHARES = 16

_log = logging.getLogger(__name__)


class Worker:
    """The background of one agent.

    Args:
        config: of the agent.
        memory: counters and ring.
        sock: its end of the socket.
        parent: process id of the engine where that is another process, else 0.
    """

    def __init__(
        self, config: AgentConfig, memory: memoryview, sock: socket.socket, parent: int
    ) -> None:
        self._config = config
        self._words = memory[:COUNTER_BYTES].cast("Q")
        self._ring = Ring(memory[COUNTER_BYTES:])
        self._sock = sock
        self._parent = parent
        self._row_bytes = config.layout.row_bytes
        self._share = config.queue_bytes // _SHARES
        self._builder = ChunkBuilder(config.layout, config.block_size, self._share)
        self._sender = Sender(config, self._words, self._builder, self._notify)
        self._framer = Framer(
            config.layout,
            config.block_size,
            config.num_blocks,
            config.frame_rows,
            self._builder,
            self._drop,
        )
        self._pending_since = 0.0
        self._warned = False
        # When the ring was last looked at; what is read came after the look before.
        self._looked = self._since = time.monotonic()
        # Rows that are due soon go along with those that are due.
        self._early_s = min(config.flush_interval_s, config.linger_s)

    def run(self) -> None:
        """Works until the engine's end of the socket is closed, then finishes."""
        self._sock.setblocking(False)
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        try:
            more = False
            while not self._sender.ended:
                ready = poll.poll(0 if more else self._pause_ms())
                if (ready and self._hung_up()) or (self._parent and self._orphaned()):
                    self._finish()
                    break
                more = self._work()
        finally:
            self._sender.close(time.monotonic() + 1)
            self._sock.close()

    def forget_in_child(self) -> None:
        """After a fork, in the child: lets go of what belongs to the parent."""
        self._sock.close()
        self._sender.forget_in_child()

    def _hung_up(self) -> bool:
        try:
            return not self._sock.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _orphaned(self) -> bool:
        """The engine died, but some process that it forked still holds its end of the socket."""
        return os.getppid() != self._parent

    def _pause_ms(self) -> int:
        """For how long there is nothing to do, as far as is known."""
        now = time.monotonic()
        due = [self._framer.oldest + self._config.linger_s]
        if self._builder:
            due.append(self._pending_since + self._config.flush_interval_s)
        # What is overdue waits for the sender.
        pause = min([self._config.flush_interval_s, *(at - now for at in due if at > now)])
        return max(1, math.ceil(pause * 1000))

    def _work(self) -> bool:
        """One round; returns whether the ring may hold more."""
        taken = nbytes = 0
        while (more := taken < _BATCH and nbytes < self._share) and (
            record := self._peek()
        ) is not None:
            nbytes += len(record)
            self._take(record)
            self._ring.consume()
            taken += 1
        self._framer.settle()
        if not taken and not self._holds:  # idle: there is nothing that could be due
            self._pending_since = self._looked
            return False
        self._hand_on()
        self._bound()  # before rows that linger go where they can not be dropped
        self._ship()
        return not more

    @property
    def _holds(self) -> bool:
        """Whether there is anything here that a timer, or room in memory, has to do with."""
        framer = self._framer
        return bool(self._builder) or framer.nbytes > 0 or framer.muted or self._warned

    def _peek(self) -> memoryview | None:
        if self._ring.caught_up:
            self._since, self._looked = self._looked, time.monotonic()
        return self._ring.peek()

    def _take(self, record: memoryview) -> None:
        since = self._since
        kind, m, n, step, version = RECORD.unpack_from(record)
        at = RECORD.size
        if kind == EVENT:
            name, *args = pickle.loads(record[at:])
            if name == "flush":
                self._framer.flush()
                self._ship_all()
                self._sender.flush(*args)
            else:
                self._framer.events[name](*args)
            return
        if kind == BLOCKS:
            handles, blocks = np.frombuffer(record, np.int64, 2 * m, at).reshape(m, 2).T
            self._framer.add_blocks_of(handles, blocks)
            return
        start = rows_at({STEP: 24 * m, SLOTS: 8 * n, AGAIN: 0}[kind])
        rows = np.frombuffer(record, np.uint8, n * self._row_bytes, start)
        rows = rows.reshape(n, self._row_bytes)
        if kind == STEP:
            runs = np.frombuffer(record, np.int64, 3 * m, at).reshape(3, m).copy()
            self._framer.step(since, step, version, runs, rows)
        elif kind == AGAIN:
            self._framer.again(since, step, version, rows)
        elif kind == SLOTS:
            slots = np.frombuffer(record, np.uint64, n, at)
            self._framer.step_slots(since, step, version, slots, rows)

    def _ship(self) -> None:
        """Hands on rows that lingered, and a part of a chunk that waited, for long enough."""
        now, linger_s, oldest = time.monotonic(), self._config.linger_s, self._framer.oldest
        if not self._builder:
            self._pending_since = now
        late = oldest <= now - linger_s
        if late:  # such rows wait for nothing else
            self._pending_since = min(self._pending_since, oldest + linger_s - self._early_s)
        # A part of a chunk that could not be sent yet may as well grow.
        due = now - self._pending_since >= self._config.flush_interval_s and self._sender.idle
        if late or due:  # with them goes what would follow in a chunk of its own
            self._framer.tick(now - linger_s + self._early_s)
        if due:
            self._builder.seal()
        self._hand_on()

    def _ship_all(self) -> None:
        """Hands on whatever the framer has let go of."""
        self._builder.seal()
        self._hand_on()

    def _hand_on(self) -> None:
        """Hands full chunks to the sender."""
        ready = self._builder.ready
        if ready:
            self._pending_since = time.monotonic()
        while ready:
            self._sender.put(ready.popleft())

    def _bound(self) -> None:
        """Keeps memory in bounds: rows go first, then events, then the names of requests."""
        framer, share = self._framer, self._share
        most = (_SHARES - 2) * share
        full = self._held() > most or framer.nbytes > 2 * share
        if full and self._held() - framer.held_bytes < most - 2 * share:
            framer.flush_rows()  # they take less in the outbox, or go to disk
            self._hand_on()
        if (over := self._held() - most) > 0:
            framer.shed(over)
        held = self._held()
        framer.muted, framer.silent = held > (_SHARES - 1) * share, held > _SHARES * share
        if framer.silent and not self._warned:
            _log.warning("routetrace: memory is used up; requests begin that nobody will hear of")
        self._warned = held > _SHARES // 2 * share and (self._warned or framer.silent)

    def _held(self) -> int:
        return self._sender.held_bytes + self._builder.nbytes + self._framer.held_bytes

    def _finish(self) -> None:
        """Sends what is left, within the time there is."""
        now = time.monotonic()
        deadline = self._words[Word.DEADLINE] / 1e9 or now + self._config.close_timeout_s
        deadline -= _RESERVE * (deadline - now)
        while self._work() and time.monotonic() < deadline:
            pass
        self._framer.close()
        self._ship_all()
        if not self._sender.drain(deadline):
            _log.warning("routetrace: closed with chunks that the server did not acknowledge")

    def _drop(self, word: Word, rows: int) -> None:
        self._words[word] += rows

    def _notify(self) -> None:
        with suppress(OSError):  # full: it will be read; closed: nobody waits
            self._sock.send(b"\0")


def main() -> None:
    """The process: reads what it needs from stdin and runs a Worker."""
    # It ends with the engine, and is the last to know: what ends the engine must not end it first.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    gc.freeze()  # nothing of what was imported will go
    config, memory_fd, sock_fd, parent = pickle.load(sys.stdin.buffer)
    memory = mmap.mmap(memory_fd, 0)
    os.close(memory_fd)
    Worker(config, memoryview(memory), socket.socket(fileno=sock_fd), parent).run()
