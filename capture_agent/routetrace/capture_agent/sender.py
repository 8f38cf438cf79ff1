"""The sender: an outbox of sealed chunks, and the stream that empties it.

Chunks are sent in order, up to WINDOW of them ahead of their acknowledgement, and stay in the
outbox until that comes. Whatever breaks the stream, the server says in its Welcome where to go on.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from routetrace.capture_agent.chunks import Chunk, ChunkBuilder
from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.counters import Ended, Word
from routetrace.capture_agent.ledger import Ledger
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.errors import ERROR_METADATA_KEY
from routetrace.v1.routetrace_pb2_grpc import IngestServiceStub

#: Chunks that may be on the wire without an acknowledgement.
WINDOW = 16

_BACKOFF_S = (0.05, 5.0)

_MAX_MESSAGE_BYTES = 64 << 20
_CHANNEL_OPTIONS = (
    # A pool of its own: one shared with a process that forked is broken in the child.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

_log = logging.getLogger(__name__)


@dataclass
class _Entry:
    sequence: int
    chunk: Chunk
    ticket: int  # counts put() calls; survives another numbering


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
        self._words = words
        self._builder = builder
        self._notify = notify
        self._changed = threading.Condition()
        # All below is guarded by it.
        self._outbox: deque[_Entry] = deque()
        self._ledger = Ledger()
        self._epoch = 0
        self._next_sequence = 1  # of the next chunk put
        self._send_next = 0  # next to send; 0 before the Welcome
        self._not_before = 0.0  # nothing is sent earlier
        self._stale = 0  # refusals up to this number are echoes of an earlier one
        self._stream: object = None  # the one stream whose generator may send
        self._call: grpc.Call | None = None
        self._connections = 0
        self._ticket = 0
        self._flushes: deque[tuple[int, int]] = deque()  # (ticket, token)
        self._closing = False
        self._trouble = ""  # what was logged last
        #: No more will be sent: a newer epoch took over, or the server takes nothing from us.
        self.ended = False
        #: Bytes in the outbox.
        self.nbytes = 0
        self._thread = threading.Thread(target=self._run, name="routetrace-sender", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ for the worker

    @property
    def idle(self) -> bool:
        """Whether a chunk put now would be sent at once."""
        with self._changed:
            return self._send_next == self._next_sequence

    def put(self, chunk: Chunk) -> None:
        """Adds a chunk."""
        with self._changed:
            self._ticket += 1
            self._outbox.append(_Entry(self._next_sequence, chunk, self._ticket))
            self._next_sequence += 1
            self.nbytes += chunk.nbytes
            self._changed.notify_all()

    def flush(self, token: int) -> None:
        """Sets `Word.FLUSHED` to `token` once every chunk put so far is acknowledged."""
        with self._changed:
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

    def _stop(self) -> None:
        self._stream = None
        self._changed.notify_all()

    # ------------------------------------------------------------------ the stream

    def _run(self) -> None:
        low, high = _BACKOFF_S
        backoff = low
        while True:
            acknowledged = self._words[Word.CHUNKS]
            delay = 0.0
            try:
                self._connect()
            except grpc.RpcError as error:
                delay = self._failed(error)
            except Exception:  # a thread can not be started at interpreter exit, for one
                _log.exception("routetrace: the ingest stream failed")
            if self._words[Word.CHUNKS] > acknowledged:
                backoff = low
            delay = max(delay, backoff * random.uniform(0.8, 1.2))
            backoff = min(2 * backoff, high)
            with self._changed:
                if self._changed.wait_for(lambda: self._closing or self.ended, delay):
                    return

    def _connect(self) -> None:
        """One stream, from Hello to its end."""
        stream = object()
        # A channel per attempt: no reconnection backoff but ours, and no stale addresses.
        with grpc.insecure_channel(self._config.target, options=_CHANNEL_OPTIONS) as channel:
            try:
                with self._changed:
                    if self._closing:
                        return
                    self._stream = stream
                    self._send_next = self._not_before = self._stale = 0
                    self._call = call = IngestServiceStub(channel).Ingest(self._requests(stream))
                for response in call:
                    self._take(response)
                    if self._stream is not stream:
                        return
            finally:
                with self._changed:
                    self._send_next = 0
                    self._stop()

    def _requests(self, stream: object) -> Iterator[pb.IngestRequest]:
        config = self._config
        yield pb.IngestRequest(
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
        while True:
            with self._changed:
                while self._stream is stream and not self._may_send():
                    wait = self._not_before - time.monotonic()
                    self._changed.wait(wait if wait > 0 else None)
                if self._stream is not stream:
                    return
                entry = self._outbox[self._send_next - self._outbox[0].sequence]
                self._send_next += 1
            yield entry.chunk.message(entry.sequence)

    def _may_send(self) -> bool:
        return (
            0 < self._send_next < self._next_sequence
            and self._send_next < self._outbox[0].sequence + WINDOW
            and time.monotonic() >= self._not_before
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
        anew = self._ledger.begin_anew(self._config.layout, self._config.block_size)
        self._ledger = Ledger()
        self._epoch = welcome.epoch
        ticket = self._outbox[0].ticket if self._outbox else self._ticket
        self._outbox.extendleft(_Entry(0, chunk, ticket) for chunk in reversed(anew))
        self.nbytes += sum(chunk.nbytes for chunk in anew)
        self._next_sequence = welcome.next_sequence
        for entry in self._outbox:
            entry.sequence = self._next_sequence
            self._next_sequence += 1

    def _acknowledged(self, sequence: int) -> None:
        while self._outbox and self._outbox[0].sequence <= sequence:
            chunk = self._outbox.popleft().chunk
            self.nbytes -= chunk.nbytes
            self._ledger.apply(chunk)
            self._words[Word.ACKNOWLEDGED] += chunk.rows
            self._words[Word.SENT_BYTES] += chunk.nbytes
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
        self._not_before = time.monotonic() + error.retry_after_ms / 1000
        if error.retry_after_ms:
            return
        entry = self._outbox[index]
        self._complain(f"chunk refused, its {entry.chunk.rows} rows are lost: {error.message}")
        self._words[Word.REJECTED] += entry.chunk.rows
        self.nbytes -= entry.chunk.nbytes
        if entry.chunk.degraded > 1:
            self._end(Ended.REJECTED, error)
            return
        entry.chunk = self._builder.degrade(entry.chunk, pb.MISSING_REASON_REJECTED)
        self.nbytes += entry.chunk.nbytes

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
                self._complain(f"{error.code().name}: {detail.message or error.details()}")
        return detail.retry_after_ms / 1000

    def _complain(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            _log.warning("routetrace: %s: %s", self._config.target, trouble)

    def _end(self, why: Ended, error: pb.ErrorDetail) -> None:
        _log.error("routetrace: %s, all further rows are dropped: %s", why.name, error.message)
        self._words[Word.ENDED] = why
        self.ended = True
        self._stop()
        self._notify()
