"""The sender: a thread that keeps one stream to the server open and empties the outbox."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.counters import Ended, Word
from routetrace.capture_agent.pipeline.chunks import Chunk, ChunkBuilder
from routetrace.capture_agent.transport.connection import (
    Call,
    ConnectionFailed,
    GrpcTransport,
    Transport,
)
from routetrace.capture_agent.transport.outbox import Entry, Outbox
from routetrace.capture_agent.transport.spill import Spill
from routetrace.capture_agent.transport.stream import (
    MAX_PAUSE_S,
    Heartbeat,
    IngestStream,
    StreamState,
)
from routetrace.common.errors import InvalidArgument
from routetrace.v1 import routetrace_pb2 as pb

_BACKOFF_S = (0.05, 2.0)
#: Seconds between two attempts where files have to change first: certificates, tokens.
_REFUSED_S = 5.0
#: Most seconds that a fork waits for the channel to be closed. A child with a call hangs when it
#: collects it, if a thread of the parent held the call's lock.
_FORK_S = 10.0

_log = logging.getLogger(__name__)


class Sender:
    """Outbox and stream of one agent, behind a lock; `start` runs them over the transport.

    A caller without threads (a simulation, a test) does not start it, and moves the messages
    itself: `open`, `next_message`, `receive`, `closed`.

    Args:
        config: of the agent.
        words: counters of the agent.
        builder: makes replacements of refused chunks; its limit is set by the server.
        notify: called, in some thread, after `Word.FLUSHED` or `ended` changed.
        transport: network; gRPC to the configured target if None.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: AgentConfig,
        words: memoryview,
        builder: ChunkBuilder,
        notify: Callable[[], None],
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target = config.target
        self._engine_id = config.engine_id
        self._transport = transport or GrpcTransport(config)
        self._clock = clock
        self._words = words
        self._changed = threading.Condition()
        # All below is guarded by it.
        self.outbox = Outbox(
            config.layout,
            words,
            builder,
            _spill_of(config),
            config.queue_bytes // 2,
        )
        self.stream = IngestStream(
            config, self.outbox, words, builder, clock, self._complain, notify
        )
        self._attempt = 0  # number of the stream whose generator may send
        self._call: Call | None = None
        self._has_channel = False
        self._closing = False
        self._trouble = ""  # the kind that was logged last
        self._thread = threading.Thread(target=self._run, name="routetrace-sender", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # ------------------------------------------------------------------ for the worker

    @property
    def ended(self) -> bool:
        """Whether nothing will be sent any more."""
        return self.stream.ended

    @property
    def awaited(self) -> int:
        """Demand of readers, a pb.Awaited."""
        return self.stream.awaited

    @property
    def idle(self) -> bool:
        """Whether a chunk put now would be sent at once."""
        with self._changed:
            return self.stream.idle

    @property
    def held_bytes(self) -> int:
        """Bytes in memory of chunks and of the state of live requests."""
        return self.outbox.held_bytes

    def put(self, chunk: Chunk) -> None:
        """Append a chunk; called by one thread."""
        prepared = self.outbox.prepare(chunk)
        with self._changed:
            self.outbox.put(*prepared, self._clock())
            self._changed.notify_all()

    def flush(self, token: int) -> None:
        """Set `Word.FLUSHED` to `token` once every chunk put so far is acknowledged."""
        with self._changed:
            self.stream.flush(token)

    def drain(self, deadline: float) -> bool:
        """Wait for every chunk to be acknowledged, at most until `deadline` (monotonic)."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.ended or not self.outbox, deadline - self._clock()
            )

    def unacknowledged(self) -> tuple[int, int]:
        """Return the chunks, and rows in them, that are not acknowledged."""
        with self._changed:
            return len(self.outbox), self.outbox.num_rows

    def close(self, deadline: float) -> None:
        """End the stream and the thread."""
        with self._changed:
            self._closing = True
            call = self._call
            self._stop()
        if self._thread.ident is None:
            return
        # The end of the requests ends a healthy stream; another one is cancelled.
        self._thread.join(max(0.0, min(0.5, deadline - self._clock())))
        if call is not None:
            call.cancel()

    def disconnect(self) -> None:
        """Close the channel; return once it is closed."""
        with self._changed:
            call = self._call
            self._stop()
        if call is not None:
            call.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._has_channel, _FORK_S)

    def resume(self) -> None:
        """Look again whether a channel is allowed."""
        with self._changed:
            self._changed.notify_all()

    def forget_in_child(self) -> None:
        """After a fork, in the child: close the spill file."""
        self.outbox.forget_in_child()

    # ------------------------------------------------------------------ messages

    def open(self) -> bytes:
        """Begin a stream; return its first message."""
        with self._changed:
            self._attempt += 1
            return self.stream.open()

    def next_message(self) -> bytes | None:
        """Return the next message that is due, if any."""
        while True:
            with self._changed:
                found = self.stream.next()
                if found is None:
                    return None
                if isinstance(found, Heartbeat):
                    return self.stream.heartbeat()
            if message := self._message(found):
                return message

    def receive(self, response: pb.IngestResponse) -> None:
        """Take one message of the server."""
        with self._changed:
            self.stream.receive(response)
            if self._trouble and response.HasField("welcome"):
                _log.warning("routetrace: connected to %s again", self._target)
                self._trouble = ""
            self._changed.notify_all()

    def closed(self) -> None:
        """End the stream on this side: unanswered messages may or may not have arrived."""
        with self._changed:
            self._stop()

    def _stop(self) -> None:
        self._attempt += 1
        self.stream.close()
        self._changed.notify_all()

    def _message(self, entry: Entry) -> bytes | None:
        with self._changed:
            if message := self.stream.message(entry):
                return message
            record = entry.record
        payload = self.outbox.read(record) if record else None
        with self._changed:
            return self.stream.message_from_disk(entry, payload)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        _running.add(self)
        try:
            self._keep_connected()
        finally:
            _running.discard(self)

    def _keep_connected(self) -> None:
        low, high = _BACKOFF_S
        backoff = low
        while True:
            acknowledged = self._words[Word.CHUNKS]
            delay = 0.0
            try:
                self._connect()
            except ConnectionFailed as error:
                delay = self._failed(error)
            except InvalidArgument as error:  # a file that is being replaced, or is missing
                delay = _REFUSED_S
                with self._changed:
                    self._complain(error.field, error.message)
            except Exception:  # no thread can be started at interpreter exit, for one
                _log.exception("routetrace: the ingest stream failed")
            with self._changed:
                self._call = None  # the last reference: errors and frames had others until here
                self._has_channel = False
                self._changed.notify_all()
            if self._words[Word.CHUNKS] > acknowledged:
                backoff = low
            delay = max(delay, backoff * random.uniform(0.8, 1.2))
            backoff = min(2 * backoff, high)
            with self._changed:
                self._changed.wait_for(lambda: self._over or _forks, delay)
                self._changed.wait_for(lambda: self._over or not _forks)
                if self._over:
                    return

    @property
    def _over(self) -> bool:
        return self._closing or self.ended

    def _connect(self) -> None:
        """Run one stream, from Hello to its end."""
        with self._changed:
            if self._closing or _forks:
                return
            self._has_channel = True
        attempt = 0
        try:
            with self._transport.connect() as start:
                with self._changed:
                    if self._closing or _forks:
                        return
                    hello = self.open()
                    attempt = self._attempt
                    self._call = call = start(self._requests(attempt, hello))
                for response in call:
                    self.receive(response)
                    if not self._current(attempt) and not self._closing:
                        return
        except ConnectionFailed:
            if self._current(attempt) or self._closing:  # else this side hung up
                raise
        finally:
            with self._changed:
                self._stop()

    def _current(self, attempt: int) -> bool:
        return self._attempt == attempt and self.stream.state in (
            StreamState.OPENING,
            StreamState.OPEN,
        )

    def _requests(self, attempt: int, hello: bytes) -> Iterator[bytes]:
        """Yield serialized IngestRequests until the stream is over."""
        yield hello
        while True:
            with self._changed:
                self._wait(attempt)
                unanswered = self._call if self._hang_up(attempt) else None
                over = not self._current(attempt)
            if unanswered is not None:
                unanswered.cancel()  # without the lock
            if over:
                # The last heartbeat carries the final counters.
                if self._closing and self.stream.has_heartbeats:
                    yield self.stream.heartbeat()
                return
            if message := self.next_message():
                yield message

    def _wait(self, attempt: int) -> None:
        """Wait until there is something to send, or the stream is over."""
        while self._current(attempt):
            now, due = self._clock(), self.stream.due()
            if self.stream.may_send(now) or (due is not None and now >= due):
                return
            self._changed.wait(due - now if due is not None else None)

    def _hang_up(self, attempt: int) -> bool:
        """End a stream whose Hello got no answer in time; return whether it was one."""
        if not (self._current(attempt) and self.stream.overdue):
            return False
        self._complain("welcome", f"no answer from {self._target}; connecting again")
        self._stop()
        return True

    # ------------------------------------------------------------------ trouble

    def _failed(self, error: ConnectionFailed) -> float:
        """Log a failure once; return seconds after which to try again."""
        with self._changed:
            if error.detail.kind == pb.ERROR_KIND_FENCED:
                self.stream.end(Ended.FENCED, error.detail)
                self._changed.notify_all()
            elif not self._closing and not error.moved:
                self._complain(error.kind, f"{error} (retrying, and rows wait in memory)")
                if error.refused:
                    return _REFUSED_S
        return min(error.detail.retry_after_ms / 1000, MAX_PAUSE_S)

    def _complain(self, kind: str, text: str) -> None:
        if kind != self._trouble:
            self._trouble = kind
            _log.warning("routetrace: engine %r: %s", self._engine_id, text)


def _spill_of(config: AgentConfig) -> Spill | None:
    try:
        return Spill(config.spill_dir, config.spill_bytes) if config.spill_dir is not None else None
    except OSError as error:
        _log.warning("routetrace: cannot spill to %s: %s", config.spill_dir, error)
        return None


# gRPC's threads continue in a forked child and would send there on the parent's channel: during a
# fork, no sender has a channel.

_running: set[Sender] = set()
#: One item for each fork that is under way.
_forks: list[None] = []


def _before_fork() -> None:
    _forks.append(None)  # first: a sender that connects later sees it
    for sender in list(_running):
        sender.disconnect()


def _after_fork_in_parent() -> None:
    _forks.pop()
    for sender in list(_running):
        sender.resume()


def _after_fork_in_child() -> None:
    _forks.clear()
    _running.clear()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
