"""Reads that follow a trace: rows as they arrive, until it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator

from routetrace.server.access.admission import Admission
from routetrace.server.common.rpc import Context
from routetrace.server.read.checks import Checks
from routetrace.server.read.finding import Finder
from routetrace.server.read.read_log import ReadLog
from routetrace.server.rows import answers
from routetrace.server.rows.absence import no_incarnation
from routetrace.server.rows.reader import Reader
from routetrace.server.rows.sending import Piece, Sending
from routetrace.server.rows.served import segments_of, served
from routetrace.server.rows.view import Segment
from routetrace.v1 import routetrace_pb2 as pb


class Follower:
    """Sends the rows of running traces as they arrive."""

    def __init__(
        self,
        *,
        admission: Admission,
        checks: Checks,
        finder: Finder,
        reader: Reader,
        reads: ReadLog,
    ) -> None:
        self._admission = admission
        self._checks = checks
        self._finder = finder
        self._reader = reader
        self._reads = reads

    async def messages(
        self, request: pb.GetTraceRequest, context: Context, owner: str
    ) -> AsyncIterator[bytes]:
        """Yield rows as they arrive, until the trace ends; rows that change are sent again."""
        prefix_rows = request.prefix_rows
        known = await self._finder.find_to_follow(request, context, owner)
        trace, incarnation = known.trace, known.incarnation
        self._reads.note(trace, context)
        info = self._reader.describe(known)
        yield answers.message(Piece(info))
        sending = Sending(self._reader, trace.sources)
        sent: dict[int, list[Segment]] = {}
        # A source stays itself, also where reports that come late divide its request.
        source = incarnation.request.sources[0]
        while True:
            self._checks.call(context, "read", request.run)  # a token may be revoked meanwhile
            trace = await self._finder.again(trace, request, owner)
            seen = trace.changes
            last = trace.join.request_of(source)
            if last is None:
                raise no_incarnation(trace, incarnation.request.number)
            while last.successor and not (request.incarnation or request.nonce):
                last = last.successor  # it contains all rows sent so far
            source = last.sources[0]
            incarnation = trace.join.incarnation(last.number)
            known = self._reader.known(trace, incarnation, prefix_rows)
            info = self._reader.describe(known)
            selection = self._finder.select(known, request)
            sending.sources = known.sources
            rows = self._reader.rows(known, selection)
            running = info.state == pb.TRACE_STATE_RUNNING
            ended = not running and self._reader.settled(self._reader.known(trace, incarnation))
            # Computed with the rows, and sent with the last of them.
            missing = self._reader.missing(info.state, known, selection, rows) if ended else []
            fresh = served(unsent(segments_of(rows), sent))
            with self._reader.frames.pinned(fresh):
                for batch in self._reader.frames.batches(fresh, selection.layers):
                    async with self._admission.turn(owner) as turn:
                        fetched, number = await sending.fetch(batch, selection)
                        await turn.sending()
                        yield turn.charged(answers.message(Piece(info, fetched, number)))
            if ended:
                yield answers.message(Piece(end=sending.end(info, missing, selection)))
                return
            if trace.changes == seen:
                places, seconds = self._finder.places(trace), self._finder.look_again()
                await self._finder.changed(request, places, pb.AWAITED_ROWS, seconds)


def unsent(segments: list[Segment], sent: dict[int, list[Segment]]) -> list[Segment]:
    """Return the parts of segments that were not sent, or not with the same rows.

    Args:
        segments: current segments.
        sent: segments sent so far by source; updated.
    """
    fresh = []
    by_source: dict[int, list[Segment]] = {}
    for segment in segments:
        by_source.setdefault(segment.source, []).append(segment)
    for source, now in by_source.items():
        before = {
            (s.span.ref - s.span.position, s.layers): (s.span.position, s.span.stop)
            for s in sent.get(source, ())
        }
        for segment in now:
            # Rows that were sent have the same reference at the same position.
            key = segment.span.ref - segment.span.position, segment.layers
            a, b = before.get(key, (0, 0))
            for start, stop in (
                (segment.span.position, min(segment.span.stop, max(a, segment.span.position))),
                (max(segment.span.position, b), segment.span.stop),
            ):
                if start < stop:
                    fresh.append(segment._replace(span=segment.span.cut(start, stop)))
    sent.clear()  # what is not served any more may be served again
    sent.update(by_source)
    fresh.sort(key=lambda s: s.span.position)
    return fresh
