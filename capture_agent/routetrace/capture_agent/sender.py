"""The sender: an outbox of sealed chunks, and the stream that empties it.

Chunks are sent in order, up to WINDOW of them ahead of their acknowledgement, and stay in the
outbox until that comes; their payloads, once much waits, on disk. Whatever breaks the stream, the
server says in its Welcome where to go on, and how often it wants a sign of life.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc

from routetrace.capture_agent import counters
from routetrace.capture_agent.chunks import Chunk, ChunkBuilder
from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.counters import Ended, Word
from routetrace.capture_agent.ledger import Ledger
from routetrace.capture_agent.spill import Record, Spill
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.errors import ERROR_METADATA_KEY, InvalidArgument
from routetrace.v1.forks import keep_grpc_up
from routetrace.v1.security import Security

_INGEST = f"/{pb.DESCRIPTOR.services_by_name['IngestService'].full_name}/Ingest"

#: Chunks that may be on the wire without an acknowledgement.
WINDOW = 16

_BACKOFF_S = (0.05, 2.0)
#: Seconds between two tries where files have to change first: certificates, tokens.
_REFUSED_S = 5.0
#: Seconds that a server may ask to wait, at most.
_MOST_PAUSE_S = 60.0
#: Seconds that a fork waits for the channel to be closed, at most.
_FORK_S = 1.0
#: Bytes that a chunk takes in memory, beside its own.
_ENTRY_BYTES = 512

_MAX_MESSAGE_BYTES = 64 << 20
_CHANNEL_OPTIONS = (
    # A pool of its own: one shared with a process that forked is broken in the child.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Of one attempt; gRPC's 20 seconds would outlast whatever was in the way.
    ("grpc.min_reconnect_backoff_ms", 4_000),
)

_REFUSED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}

_log = logging.getLogger(__name__)


@dataclass
class _Entry:
    sequence: int
    chunk: Chunk
    ticket: int  # counts put() calls; survives another numbering
    record: Record | None = None  # the payload, if it is on disk

    @property
    def nbytes(self) -> int:
        """In memory."""
        return _ENTRY_BYTES + self.chunk.nbytes


class Sender:
    """Sends chunks, in a thread of its own and gRPC's.

    Args:
        config: whom to send to, and as whom.
        words: the counters.
        builder: told what the server takes, and asked what to send in place of a refused chunk.
        notify: called, in some thread, after `Word.FLUSHED` or `ended` changed.
    """

    def __init__(
        self,
        config: AgentConfig,
        words: memoryview,
        builder: ChunkBuilder,
        notify: Callable[[], None],
    ) -> None:
        self._config = config
        self._security = cast("Security", config.security)
        self._words = words
        self._builder = builder
        self._notify = notify
        self._spill = _spill_of(config)
        self._changed = threading.Condition()
        # All below is guarded by it.
        self._outbox: deque[_Entry] = deque()
        self._ledger = Ledger()
        self._epoch = 0
        self._next_sequence = 1  # of the next chunk put
        self._send_next = 0  # next to send; 0 before the Welcome
        self._not_before = 0.0  # no chunk is sent earlier
        self._beat_s = 0.0  # between two heartbeats; 0: none are asked for
        self._beat_at = math.inf
        self._stale = 0  # refusals up to this number are echoes of an earlier one
        self._stream: object = None  # the one stream whose generator may send
        self._call: grpc.Call | None = None
        self._has_channel = False
        self._connections = 0
        self._ticket = 0
        self._flushes: deque[tuple[int, int]] = deque()  # (ticket, token)
        self._closing = False
        self._trouble = ""  # the kind that was logged last
        self._share = config.queue_bytes // 2  # above it, payloads go to disk
        #: No more will be sent: a newer epoch took over, or the server takes nothing from us.
        self.ended = False
        #: Bytes in the outbox, in memory.
        self.nbytes = 0
        self._thread = threading.Thread(target=self._run, name="routetrace-sender", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ for the worker

    @property
    def idle(self) -> bool:
        """Whether a chunk put now would be sent at once."""
        with self._changed:
            return self._send_next == self._next_sequence

    @property
    def held_bytes(self) -> int:
        """Bytes in memory: the outbox, and what is known of running requests."""
        return self.nbytes + self._ledger.nbytes

    def put(self, chunk: Chunk) -> None:
        """Adds a chunk."""
        record = None
        if self._spill and chunk.payload and self.nbytes + chunk.nbytes > self._share:
            record = self._spill.write(chunk.payload)
            if record:
                chunk = replace(chunk, payload=b"")
        with self._changed:
            self._ticket += 1
            entry = _Entry(self._next_sequence, chunk, self._ticket, record)
            self._outbox.append(entry)
            self._next_sequence += 1
            self._hold(entry.nbytes)
            self._changed.notify_all()

    def flush(self, token: int) -> None:
        """Sets `Word.FLUSHED` to `token` once every chunk put so far is acknowledged."""
        with self._changed:
            if self._flushes and self._flushes[-1][0] == self._ticket:
                self._flushes.pop()
            self._flushes.append((self._ticket, token))
            self._flushed()

    def drain(self, deadline: float) -> bool:
        """Waits for every chunk to be acknowledged, at most until `deadline` (monotonic)."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.ended or not self._outbox, deadline - time.monotonic()
            )

    def close(self, deadline: float) -> None:
        """Ends the stream and the thread."""
        with self._changed:
            self._closing = True
            call = self._call
            self._stop()
        # The end of our requests ends a healthy stream; another is cancelled.
        self._thread.join(max(0.0, min(0.5, deadline - time.monotonic())))
        if call is not None:
            call.cancel()

    def disconnect(self) -> None:
        """Closes the channel; returns when that is done."""
        with self._changed:
            call = self._call
            self._stop()
        if call is not None:
            call.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._has_channel, _FORK_S)

    def go_on(self) -> None:
        """Looks again whether there may be a channel."""
        with self._changed:
            self._changed.notify_all()

    def forget_in_child(self) -> None:
        """After a fork, in the child: lets go of the disk."""
        if self._spill:
            self._spill.close()

    def _stop(self) -> None:
        self._stream = None
        self._changed.notify_all()

    def _hold(self, nbytes: int) -> None:
        """The outbox takes so many bytes of memory more."""
        self.nbytes += nbytes
        self._words[Word.QUEUED_BYTES] = self.nbytes
        self._words[Word.SPILLED_BYTES] = self._spill.nbytes if self._spill else 0

    def _forget(self, entry: _Entry) -> None:
        """The chunk of an entry is not needed any more."""
        if entry.record and self._spill:
            self._spill.give_back(entry.record)
        self._hold(-entry.nbytes)

    # ------------------------------------------------------------------ the stream

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
            except grpc.RpcError as error:
                delay = self._failed(error)
            except InvalidArgument as error:  # a file that is being replaced, or is no more
                delay = _REFUSED_S
                with self._changed:
                    self._complain(error.field, error.message)
            except Exception:  # a thread can not be started at interpreter exit, for one
                _log.exception("routetrace: the ingest stream failed")
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
        """One stream, from Hello to its end."""
        stream = object()
        with self._changed:
            if self._closing or _forks:
                return
            self._has_channel = True
        try:
            keep_grpc_up()
            # A channel per attempt: no reconnection backoff but ours, and no stale addresses.
            with self._security.channel(self._config.target, _CHANNEL_OPTIONS) as channel:
                metadata = self._security.metadata()
                with self._changed:
                    if self._closing or _forks:
                        return
                    self._stream = stream
                    self._send_next = self._not_before = self._stale = 0
                    self._beat_s, self._beat_at = 0.0, math.inf
                    ingest: Any = channel.stream_stream(_INGEST, None, pb.IngestResponse.FromString)
                    self._call = call = ingest(self._requests(stream), metadata=metadata)
                for response in call:
                    self._take(response)
                    if self._stream is not stream and not self._closing:
                        return
        except grpc.RpcError:
            if self._stream is stream or self._closing:  # else we have hung up ourselves
                raise
        finally:
            with self._changed:
                self._send_next = 0
                self._has_channel = False
                self._stop()

    def _requests(self, stream: object) -> Iterator[bytes]:
        """Serialized IngestRequests."""
        config = self._config
        hello = pb.IngestRequest(
            hello=pb.Hello(
                run=config.run,
                engine_id=config.engine_id,
                shard=config.shard,
                epoch=self._epoch,
                layout=config.layout.to_proto(),
                block_size=config.block_size,
                num_blocks=config.num_blocks,
                attributes=config.attributes,
                boot_id=config.boot_id,
            )
        )
        yield hello.SerializeToString()
        while True:
            with self._changed:
                self._wait(stream)
                over = self._stream is not stream
                beats = self._beat_s > 0 and self._closing if over else self._beats()
                entry = None if over or beats else self._next()
            if beats:
                yield self._heartbeat().SerializeToString()
            if over:
                return
            if entry and (message := self._message(entry)):
                yield message

    def _wait(self, stream: object) -> None:
        """Waits until there is something to send, or the stream is over."""
        while self._stream is stream and not self._may_send():
            now = time.monotonic()
            if now >= self._beat_at:
                return
            at = min(self._beat_at, self._not_before if self._not_before > now else math.inf)
            self._changed.wait(at - now if at < math.inf else None)

    def _beats(self) -> bool:
        """Whether a heartbeat is due; it is then taken for sent."""
        now = time.monotonic()
        if now < self._beat_at:
            return False
        self._beat_at = now + self._beat_s
        return True

    def _next(self) -> _Entry:
        entry = self._outbox[self._send_next - self._outbox[0].sequence]
        self._send_next += 1
        return entry

    def _may_send(self) -> bool:
        return (
            0 < self._send_next < self._next_sequence
            and self._send_next < self._outbox[0].sequence + WINDOW
            and time.monotonic() >= self._not_before
        )

    def _message(self, entry: _Entry) -> bytes | None:
        """What is sent of an entry; None if that was acknowledged in the meantime."""
        with self._changed:
            sequence, chunk, record = entry.sequence, entry.chunk, entry.record
        if record is None:
            return chunk.message(sequence)
        assert self._spill is not None
        payload = self._spill.read(record)
        if payload is not None:
            return replace(chunk, payload=payload).message(sequence)
        with self._changed:
            if record.free or not any(each is entry for each in self._outbox):
                return None
            self._complain("spill", f"{chunk.rows} rows came back damaged from the disk: lost")
            self._words[Word.CORRUPT] += chunk.rows
            self._put_instead(entry, pb.MISSING_REASON_CORRUPT)
            return entry.chunk.message(entry.sequence)

    def _put_instead(self, entry: _Entry, reason: int) -> None:
        """Puts what says that its rows are missing in the place of a chunk."""
        self._forget(entry)
        entry.chunk, entry.record = self._builder.degrade(entry.chunk, reason), None
        self._hold(entry.nbytes)

    def _heartbeat(self) -> pb.IngestRequest:
        stats = counters.read(self._words, None)
        return pb.IngestRequest(
            heartbeat=pb.Heartbeat(
                offered_rows=stats.offered_rows,
                acknowledged_rows=stats.acknowledged_rows,
                dropped_rows=stats.dropped_rows,
                in_flight_rows=stats.in_flight_rows,
                queued_bytes=stats.queued_bytes,
                spilled_bytes=stats.spilled_bytes,
            )
        )

    def _take(self, response: pb.IngestResponse) -> None:
        kind = response.WhichOneof("message")
        with self._changed:
            if kind == "welcome":
                self._welcome(response.welcome)
            elif kind == "ack":
                self._acknowledged(response.ack.sequence)
            elif kind == "reject":
                self._rejected(response.reject)
            self._changed.notify_all()

    def _welcome(self, welcome: pb.Welcome) -> None:
        if self._trouble:
            _log.warning("routetrace: connected to %s again", self._config.target)
            self._trouble = ""
        if self._connections:
            self._words[Word.RECONNECTS] += 1
        self._connections += 1
        # A little more often than it wants them, and one at once.
        self._beat_s = 0.9 * welcome.heartbeat_ms / 1000
        self._beat_at = 0.0 if self._beat_s else math.inf
        self._builder.limit(welcome.max_chunk_bytes)
        if welcome.epoch != self._epoch:
            self._number_anew(welcome)
        first = self._outbox[0].sequence if self._outbox else self._next_sequence
        if not first <= welcome.next_sequence <= self._next_sequence:
            # Acknowledged chunks are gone. Those that follow would hang in the air: a new epoch.
            _log.error(
                "routetrace: the server asks for chunk %d, not one of %d to %d; a new epoch begins",
                welcome.next_sequence,
                first,
                self._next_sequence,
            )
            self._epoch = 0
            self._stop()
            return
        self._acknowledged(welcome.next_sequence - 1)

    def _number_anew(self, welcome: pb.Welcome) -> None:
        """A new epoch knows nothing: tells it about live requests, then what was not stored."""
        chunks = self._ledger.begin_anew(self._config.layout, self._config.block_size)
        self._ledger = Ledger()
        self._epoch = welcome.epoch
        ticket = self._outbox[0].ticket if self._outbox else self._ticket
        anew = [_Entry(0, chunk, ticket) for chunk in chunks]
        self._outbox.extendleft(reversed(anew))
        self._hold(sum(entry.nbytes for entry in anew))
        self._next_sequence = welcome.next_sequence
        for entry in self._outbox:
            entry.sequence = self._next_sequence
            self._next_sequence += 1

    def _acknowledged(self, sequence: int) -> None:
        while self._outbox and self._outbox[0].sequence <= sequence:
            entry = self._outbox.popleft()
            self._forget(entry)
            self._ledger.apply(entry.chunk)
            self._words[Word.ACKNOWLEDGED] += entry.chunk.rows
            self._words[Word.SENT_BYTES] += entry.chunk.nbytes
            self._words[Word.SENT_BYTES] += entry.record.size if entry.record else 0
            self._words[Word.CHUNKS] += 1
        self._send_next = max(self._send_next, sequence + 1)
        self._flushed()

    def _flushed(self) -> None:
        before = self._outbox[0].ticket if self._outbox else self._ticket + 1
        done = 0
        while self._flushes and self._flushes[0][0] < before:
            done = self._flushes.popleft()[1]
        if done:
            self._words[Word.FLUSHED] = done
            self._notify()

    def _rejected(self, reject: pb.Reject) -> None:
        sequence, error = reject.sequence, reject.error
        if error.kind == pb.ERROR_KIND_FENCED:
            self._end(Ended.FENCED, error)
            return
        if error.kind == pb.ERROR_KIND_OUT_OF_SEQUENCE and sequence <= self._stale:
            return
        index = sequence - self._outbox[0].sequence if self._outbox else -1
        if not 0 <= index < len(self._outbox):
            return  # acknowledged since
        # What was sent after it is refused too, for the gap; all of it is sent again.
        self._stale = max(self._stale, self._send_next - 1)
        self._send_next = sequence
        self._not_before = time.monotonic() + min(error.retry_after_ms / 1000, _MOST_PAUSE_S)
        if error.retry_after_ms:
            return
        entry = self._outbox[index]
        lost = f"chunk refused, its {entry.chunk.rows} rows are lost"
        self._complain("refused", f"{lost}: {error.message}")
        self._words[Word.REJECTED] += entry.chunk.rows
        if entry.chunk.degraded > 1:
            self._end(Ended.REJECTED, error)
            return
        self._put_instead(entry, pb.MISSING_REASON_REJECTED)

    # ------------------------------------------------------------------ trouble

    def _failed(self, error: grpc.RpcError) -> float:
        """Says what went wrong, once; returns seconds after which to try again."""
        assert isinstance(error, grpc.Call)
        detail = pb.ErrorDetail()
        for item in error.trailing_metadata() or ():
            if item.key == ERROR_METADATA_KEY:
                detail.ParseFromString(item.value)
        with self._changed:
            if detail.kind == pb.ERROR_KIND_FENCED:
                self._end(Ended.FENCED, detail)
            elif not self._closing:
                code, details = error.code(), detail.message or error.details() or ""
                hint = "" if detail.kind else self._security.hint(details)
                self._complain(code.name, f"{details} ({hint})" if hint else details)
                if code in _REFUSED:
                    return _REFUSED_S
        return min(detail.retry_after_ms / 1000, _MOST_PAUSE_S)

    def _complain(self, kind: str, trouble: str) -> None:
        if kind != self._trouble:
            self._trouble = kind
            _log.warning("routetrace: %s: %s: %s", self._config.target, kind, trouble)

    def _end(self, why: Ended, error: pb.ErrorDetail) -> None:
        _log.error("routetrace: %s, all further rows are dropped: %s", why.name, error.message)
        self._words[Word.ENDED] = why
        self.ended = True
        self._stop()
        self._notify()


def _spill_of(config: AgentConfig) -> Spill | None:
    try:
        return Spill(config.spill_dir, config.spill_bytes) if config.spill_dir else None
    except OSError as error:
        _log.warning("routetrace: nothing goes to disk, as %s failed: %s", config.spill_dir, error)
        return None


# gRPC's threads go on in a forked child, and would speak there in the name of the parent: during a
# fork, no sender has a channel.

_running: set[Sender] = set()
#: One for each fork that is under way.
_forks: list[None] = []


def _before_fork() -> None:
    _forks.append(None)  # first: who comes later sees it
    for sender in list(_running):
        sender.disconnect()


def _after_fork_in_parent() -> None:
    _forks.pop()
    for sender in list(_running):
        sender.go_on()


def _after_fork_in_child() -> None:
    _forks.clear()
    _running.clear()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
