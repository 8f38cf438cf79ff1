"""Intake of one chunk: checks, commit, and the reply to it."""

from __future__ import annotations

import logging
from time import monotonic

from routetrace.common.errors import (
    Corrupt,
    InvalidArgument,
    OutOfSequence,
    Overloaded,
    RouteTraceError,
    Unavailable,
)
from routetrace.common.limited import LimitedLog
from routetrace.server.access.admission import Admission
from routetrace.server.common.metrics import Metrics
from routetrace.server.common.rpc import internal
from routetrace.server.common.slices import result_in_slices
from routetrace.server.index.chunk import (
    ParsedChunk,
    check_payload,
    check_sums,
    parse_header,
    parse_in_steps,
)
from routetrace.server.index.history import History
from routetrace.server.index.journal import Journal
from routetrace.server.index.records.record import Sums, encode_chunk
from routetrace.server.index.session import Session
from routetrace.server.index.writer import Writer
from routetrace.server.ingest.fencing import Fencing
from routetrace.server.ingest.replies import Answer
from routetrace.server.retention.retention import Retention
from routetrace.server.retention.room import Room
from routetrace.server.settings.config import ServerConfig
from routetrace.server.wire.messages import Chunk
from routetrace.v1 import routetrace_pb2 as pb

_RESEND_MS = 50

#: Size from which on the header of a chunk is parsed in slices.
_LARGE_HEADER_BYTES = 32 << 10

_log = logging.getLogger(__name__)


class IngestSession(Session):
    """Session with the sequence numbers of its chunks."""

    def __init__(self, writer: Writer, next_sequence: int = 0) -> None:
        super().__init__(writer)
        self.next_sequence = next_sequence
        self.in_flight: dict[int, list[Answer]] = {}
        """By sequence number: the reply to a chunk that is not applied yet, then those to chunks
        that arrived under the same number since."""


class Intake:
    """Stores chunks and decides their replies. All calls belong to the event loop's thread."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        admission: Admission,
        fencing: Fencing,
        history: History,
        journal: Journal,
        retention: Retention,
        room: Room,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._admission = admission
        self._fencing = fencing
        self._history = history
        self._journal = journal
        self._retention = retention
        self._room = room
        self._metrics = metrics
        self._refusals = LimitedLog(_log, "refused chunks")

    async def parse(self, session: IngestSession, chunk: Chunk) -> ParsedChunk | Exception | None:
        """Return the parsed header of a chunk with many ops, or the error; None for others."""
        if len(chunk.header) < _LARGE_HEADER_BYTES:
            return None
        writer = session.writer
        try:
            return await result_in_slices(parse_in_steps(chunk.header, writer.layout, writer.slots))
        except Exception as error:
            return error

    def take(
        self,
        session: IngestSession,
        chunk: Chunk,
        answer: Answer,
        parsed: ParsedChunk | Exception | None = None,
    ) -> None:
        """Store one chunk; the reply is known once it is applied or refused.

        Args:
            session: stream of the chunk.
            chunk: the chunk.
            answer: reply to set.
            parsed: result of `parse`.
        """
        try:
            self._store(session, chunk, answer, parsed)
        except Exception as error:
            self._refuse(session, answer, error)

    def _refuse(self, session: IngestSession, answer: Answer, error: Exception) -> None:
        cause = None
        if not isinstance(error, RouteTraceError):
            cause, error = error, Unavailable(internal(error), retry_after=1.0)
        detail = error.to_detail()
        if isinstance(error, (Corrupt, OutOfSequence)):
            # Damaged in transit, or too early: the agent resends the same bytes.
            detail.retry_after_ms = _RESEND_MS
        kind = _kind_name(detail)
        self._metrics.rejected.labels(kind).inc()
        writer = session.writer.key
        text = "chunk %d of %s refused: %s"
        self._refusals.warning((writer, kind), text, answer.sequence, writer, error, error=cause)
        self._answer(answer, detail)

    def _answer(self, answer: Answer, reject: pb.ErrorDetail | None = None) -> None:
        self._admission.committed(answer.nbytes)
        answer.give(reject)

    def _store(
        self,
        session: IngestSession,
        chunk: Chunk,
        answer: Answer,
        parsed: ParsedChunk | Exception | None,
    ) -> None:
        writer, sequence, sums = session.writer, chunk.sequence, answer.sums
        if pending := session.in_flight.get(sequence):
            pending.append(answer)  # replied to with the first one
            return
        if sequence <= writer.sequence:
            self._reply_to_duplicate(session, writer.recent.get(sequence), answer)
            return
        if session.closed:
            # The stream that replaced this one got its next sequence before this chunk.
            raise self._fencing.refused(session)
        if sequence != session.next_sequence:
            raise OutOfSequence(
                field="sequence", value=sequence, expected=str(session.next_sequence)
            )
        if chunk.nbytes > self._config.max_chunk_bytes:
            raise InvalidArgument(
                field="chunk",
                value=f"{chunk.nbytes} bytes",
                expected=f"at most max_chunk_bytes = {self._config.max_chunk_bytes}",
            )
        self._room.check_chunk(writer)
        running = check_sums(chunk)
        if isinstance(parsed, Exception):
            raise parsed
        if parsed is None:
            parsed = parse_header(chunk.header, writer.layout, writer.slots)
        check_payload(parsed, chunk.payload, writer.layout)
        record = encode_chunk(
            writer.key, writer.epoch, sequence, sums, self._journal.clock.now(), chunk.header
        )
        begun, rows = monotonic(), sum(parsed.frame_rows.tolist())

        def done(counted: bool | None, error: Exception | None) -> None:
            took = monotonic() - begun
            self._metrics.commit.observe(took)
            if counted:
                self._history.stored(writer.key, rows, chunk.nbytes, took)
                self._metrics.agents_closed.inc(parsed.closed)
            self._stored(session, sequence, rows if counted else None, error)

        try:
            self._journal.submit(record, done, chunk.payload, running, parsed)
        except Overloaded:
            self._retention.no_room()
            raise
        session.in_flight[sequence] = [answer]
        session.next_sequence = sequence + 1

    def _stored(
        self, session: IngestSession, sequence: int, rows: int | None, error: Exception | None
    ) -> None:
        """Reply to a chunk that is applied; `rows` is None if it does not count."""
        first, *others = session.in_flight.pop(sequence)
        if rows is None:
            session.next_sequence = min(session.next_sequence, sequence)
            if isinstance(error, Overloaded):
                self._retention.no_room()
            expected = str(session.writer.sequence + 1)
            error = error or OutOfSequence(field="sequence", value=sequence, expected=expected)
            for answer in (first, *others):
                self._refuse(session, answer, error)
            return
        metrics = self._metrics
        metrics.chunks.inc()
        metrics.rows.inc(rows)
        metrics.ingest_bytes.inc(first.nbytes)
        self._answer(first)
        for answer in others:
            self._reply_to_duplicate(session, first.sums, answer)

    def _reply_to_duplicate(
        self, session: IngestSession, known: Sums | None, answer: Answer
    ) -> None:
        """Reply to a chunk that is stored already; `known` are its checksums, None if dropped."""
        if known in (None, answer.sums):
            self._metrics.duplicates.inc()
            self._answer(answer)
            return
        self._metrics.conflicts.inc()
        conflict = InvalidArgument(
            field="sequence",
            value=answer.sequence,
            expected="a new number for new content; this number is stored with other content",
        )
        self._refuse(session, answer, conflict)


def _kind_name(detail: pb.ErrorDetail) -> str:
    """Return a metric label: "out_of_sequence", "corrupt", "overloaded", ..."""
    return pb.ErrorKind.Name(detail.kind).removeprefix("ERROR_KIND_").lower()
