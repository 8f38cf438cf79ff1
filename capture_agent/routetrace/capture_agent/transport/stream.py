"""The Ingest protocol as an agent speaks it: one stream at a time, over any transport.

Chunks are sent in order, up to WINDOW of them ahead of their acknowledgement. After a broken
stream the server's Welcome says where to continue. No thread and no network: the caller holds a
lock, and passes messages in and out.
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from routetrace.capture_agent import counters
from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.counters import Ended, Word
from routetrace.capture_agent.pipeline.chunks import ChunkBuilder
from routetrace.capture_agent.transport.outbox import Entry, Outbox
from routetrace.common.errors import counted
from routetrace.common.model_hash import model_number
from routetrace.common.version import installed_version
from routetrace.v1 import routetrace_pb2 as pb

#: Chunks that may be on the wire without an acknowledgement.
WINDOW = 16

#: Most seconds from Hello to Welcome; a server that takes longer is called anew, or the next one.
WELCOME_S = 60.0

#: Most seconds that a server may ask an agent to wait.
MAX_PAUSE_S = 60.0

_log = logging.getLogger(__name__)


class StreamState(Enum):
    """State of an agent's stream."""

    CLOSED = "closed"
    """No stream."""
    OPENING = "opening"
    """Hello is sent; chunks wait for the Welcome."""
    OPEN = "open"
    """Chunks are sent."""
    ENDED = "ended"
    """Nothing more is sent: a newer epoch took over, or the server refuses all chunks."""


TRANSITIONS: dict[StreamState, frozenset[StreamState]] = {
    StreamState.CLOSED: frozenset({StreamState.OPENING, StreamState.ENDED}),
    StreamState.OPENING: frozenset({StreamState.OPEN, StreamState.CLOSED, StreamState.ENDED}),
    StreamState.OPEN: frozenset({StreamState.CLOSED, StreamState.ENDED}),
    StreamState.ENDED: frozenset(),
}


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat that is due."""


class IngestStream:
    """One stream after another: picks the next message, and takes those of the server.

    Args:
        config: of the agent.
        outbox: chunks to send.
        words: counters of the agent.
        builder: its chunk limit is set by the server's Welcome.
        clock: seconds, monotonic.
        complain: called with (kind, text) for trouble; one log line per kind.
        notify: called after `Word.FLUSHED` or the state ENDED changed.
    """

    def __init__(
        self,
        config: AgentConfig,
        outbox: Outbox,
        words: memoryview,
        builder: ChunkBuilder,
        clock: Callable[[], float],
        complain: Callable[[str, str], None],
        notify: Callable[[], None],
    ) -> None:
        self._config = config
        self._outbox = outbox
        self._words = words
        self._builder = builder
        self._clock = clock
        self._complain = complain
        self._notify = notify
        self.state = StreamState.CLOSED
        self.awaited = int(pb.AWAITED_UNSPECIFIED)
        """Demand of readers in the server's last message, a pb.Awaited."""
        self._epoch = 0
        self._send_next = 0
        self._welcome_by = math.inf
        self._not_before = 0.0  # no chunk is sent earlier
        self._beat_s = 0.0  # between two heartbeats; 0: none
        self._beat_at = math.inf
        self._stale = 0  # refusals up to this number repeat an earlier one
        self._connections = 0

    def enter(self, state: StreamState) -> bool:
        """Change to a state; return False, and stay, where `TRANSITIONS` has no such change."""
        if state not in TRANSITIONS[self.state]:
            return False
        self.state = state
        self._words[Word.CONNECTED] = state is StreamState.OPEN
        return True

    @property
    def ended(self) -> bool:
        """Whether nothing will be sent any more."""
        return self.state is StreamState.ENDED

    @property
    def idle(self) -> bool:
        """Whether a chunk put now would be sent at once."""
        return self.state is StreamState.OPEN and self._send_next == self._outbox.next_sequence

    @property
    def overdue(self) -> bool:
        """Whether the server has not answered the Hello in time."""
        return self.state is StreamState.OPENING and self._clock() >= self._welcome_by

    # ------------------------------------------------------------------ out

    def open(self) -> bytes:
        """Begin a stream; return its first message, a serialized IngestRequest."""
        self.enter(StreamState.OPENING)
        self._send_next = self._stale = 0
        self._welcome_by = self._clock() + WELCOME_S
        self._not_before = self._beat_s = 0.0
        self._beat_at = math.inf
        config = self._config
        hello = pb.Hello(
            run=config.run,
            engine_id=config.engine_id,
            shard=config.shard,
            epoch=self._epoch,
            layout=config.layout.to_proto(),
            block_size=config.block_size,
            num_blocks=config.all_blocks,
            attributes={
                "host": socket.gethostname(),
                "routetrace": installed_version(),
                **config.attributes,
            },
            boot_id=config.boot_id,
            model=model_number("model", config.model),
            says_unknown_versions=True,
            former_epoch=0 if self._connections else self._words[Word.EPOCH],
        )
        return pb.IngestRequest(hello=hello).SerializeToString()

    def next(self) -> Entry | Heartbeat | None:
        """Take the next thing to send, if any is due; `message` serializes it."""
        now = self._clock()
        if now >= self._beat_at:
            self._beat_at = now + self._beat_s
            return Heartbeat()
        if not self.may_send(now):
            return None
        entry = self._outbox.entry(self._send_next)
        self._send_next += 1
        return entry

    def may_send(self, now: float) -> bool:
        """Whether a chunk may be sent at this time."""
        return (
            self.state is StreamState.OPEN
            and self._send_next < self._outbox.next_sequence
            and self._send_next < self._outbox.first_sequence + WINDOW
            and now >= self._not_before
        )

    def due(self) -> float | None:
        """Return the time at which something is due without any other change.

        That is a message that `next` takes, or the end of a stream that is `overdue`.
        """
        if self.state is StreamState.OPENING:
            return self._welcome_by
        now = self._clock()
        at = min(self._beat_at, self._not_before if self._not_before > now else math.inf)
        return at if at < math.inf else None

    def message(self, entry: Entry) -> bytes | None:
        """Serialize an entry; None if its payload must be read from disk first."""
        return None if entry.record else entry.chunk.message(entry.sequence)

    def message_from_disk(self, entry: Entry, payload: bytes | None) -> bytes | None:
        """Serialize an entry with its payload; None where it was acknowledged in the meantime.

        A payload that came back damaged (None) is reported as lost.
        """
        if payload is not None:
            return replace(entry.chunk, payload=payload).message(entry.sequence)
        if entry.record is None or entry.record.free or not self._outbox.holds(entry):
            return None
        rows = counted(entry.chunk.rows, "row")
        self._complain("spill", f"{rows} came back damaged from the disk: lost")
        self._words[Word.CORRUPT] += entry.chunk.rows
        self._outbox.replace(entry, pb.MISSING_REASON_CORRUPT)
        return entry.chunk.message(entry.sequence)

    def heartbeat(self) -> bytes:
        """Return a serialized heartbeat with the counters as they stand."""
        stats = counters.read(self._words, None)
        oldest = self._outbox.oldest
        lag = 0.0 if oldest is None else self._clock() - oldest
        return pb.IngestRequest(
            heartbeat=pb.Heartbeat(
                offered_rows=stats.offered_rows,
                acknowledged_rows=stats.acknowledged_rows,
                dropped_rows=stats.dropped_rows,
                in_flight_rows=stats.in_flight_rows,
                queued_bytes=stats.queued_bytes,
                spilled_bytes=stats.spilled_bytes,
                lag_ms=math.ceil(1000 * max(0.0, lag)),
            )
        ).SerializeToString()

    @property
    def has_heartbeats(self) -> bool:
        """Whether the server asked for heartbeats."""
        return self._beat_s > 0

    # ------------------------------------------------------------------ in

    def receive(self, response: pb.IngestResponse) -> None:
        """Take one message of the server."""
        kind = response.WhichOneof("message")
        if kind == "welcome":
            self._welcome(response.welcome)
        elif kind == "ack":
            self._acknowledge(response.ack.sequence)
        elif kind == "reject":
            self._reject(response.reject)
        elif kind == "pace":
            self.awaited = response.pace.awaited

    def flush(self, token: int) -> None:
        """Set `Word.FLUSHED` to `token` once every chunk put so far is acknowledged."""
        if self._outbox.flush(token):
            self._notify()

    def close(self) -> None:
        """End the stream; the next one continues where the server says."""
        self.enter(StreamState.CLOSED)

    def end(self, why: Ended, error: pb.ErrorDetail) -> None:
        """End for good: all further rows are dropped."""
        if self.enter(StreamState.ENDED):
            _log.error("routetrace: %s, all further rows are dropped: %s", why.name, error.message)
            self._words[Word.ENDED] = why
            self._notify()

    def _welcome(self, welcome: pb.Welcome) -> None:
        if not self.enter(StreamState.OPEN):
            return
        if self._connections:
            self._words[Word.RECONNECTS] += 1
        self._connections += 1
        self._words[Word.EPOCH] = welcome.epoch
        # A little more often than the server asks for, and one at once.
        self._beat_s = 0.9 * welcome.heartbeat_ms / 1000
        self._beat_at = 0.0 if self._beat_s else math.inf
        self.awaited = welcome.awaited
        self._builder.limit(welcome.max_chunk_bytes)
        outbox = self._outbox
        if welcome.epoch != self._epoch:
            self._epoch = welcome.epoch
            outbox.renumber(welcome.next_sequence, self._clock())
        if not outbox.first_sequence <= welcome.next_sequence <= outbox.next_sequence:
            # Acknowledged chunks are dropped; the rest would not continue them. A new epoch.
            _log.error(
                "routetrace: the server asks for chunk %d, not one of %d to %d; a new epoch begins",
                welcome.next_sequence,
                outbox.first_sequence,
                outbox.next_sequence,
            )
            self._epoch = 0
            self.close()
            return
        self._acknowledge(welcome.next_sequence - 1)

    def _acknowledge(self, sequence: int) -> None:
        flushed = self._outbox.acknowledge(sequence)
        self._send_next = max(self._send_next, sequence + 1)
        if flushed:
            self._notify()

    def _reject(self, reject: pb.Reject) -> None:
        sequence, error = reject.sequence, reject.error
        if error.kind == pb.ERROR_KIND_FENCED:
            self.end(Ended.FENCED, error)
            return
        if error.kind == pb.ERROR_KIND_OUT_OF_SEQUENCE and sequence <= self._stale:
            return
        entry = self._outbox.entry(sequence)
        if entry is None:
            return  # acknowledged since
        # The server also refuses the chunks after it, for the gap; all are sent again.
        self._stale = max(self._stale, self._send_next - 1)
        self._send_next = sequence
        self._not_before = self._clock() + min(error.retry_after_ms / 1000, MAX_PAUSE_S)
        if error.retry_after_ms:
            return
        lost = f"chunk refused, {counted(entry.chunk.rows, 'row')} lost"
        self._complain("refused", f"{lost}: {error.message}")
        self._words[Word.REJECTED] += entry.chunk.rows
        if entry.chunk.degraded > 1:
            self.end(Ended.REJECTED, error)
            return
        if entry.chunk.degraded:
            # Its events are lost, too: begins, ends, blocks. The server must not go on from the
            # state before them, so a new epoch begins without the requests that they concern.
            self._outbox.forget_requests(entry)
            self._epoch = 0
            self.close()
        self._outbox.replace(entry, pb.MISSING_REASON_REJECTED)
