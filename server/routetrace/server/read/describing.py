"""Origin of a trace: its incarnations, its times, and the agent that reported each row."""

from __future__ import annotations

from routetrace.server.common.slices import Turns
from routetrace.server.read.read_log import Reads
from routetrace.server.rows.preparing import prepare_standing
from routetrace.server.rows.reader import Reader, finish_reason_of
from routetrace.server.rows.served import Known, Row
from routetrace.server.rows.view import Selection
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum origins of an answer.
MAX_ORIGINS = 1 << 14


async def described(
    reader: Reader,
    known: Known,
    selection: Selection,
    reads: Reads | None,
    turns: Turns,
    *,
    origins: bool = True,
) -> pb.DescribeTraceResponse:
    """Return the description of a trace at the time of the call.

    Incarnations may include changes of the next milliseconds.

    Args:
        reader: describes traces.
        known: view of the incarnation.
        selection: all of its rows.
        reads: reads of the trace.
        turns: slices of the caller's work.
        origins: whether the origins of its rows are wanted.
    """
    rows = reader.rows(known, selection)
    info = reader.describe(known, digests=False)
    response = pb.DescribeTraceResponse(
        info=info,
        missing=reader.missing(info.state, known, selection, rows),
        times=_times(known, reads),
    )
    if origins:
        adding = _Origins(response, known)
        async for row in turns.over(rows.tolist()):
            if not adding.add(row):
                response.more_origins = True
                break
    async for _ in turns.over(prepare_standing(known.trace)):
        pass
    views = turns.over(reader.standing(known.trace))
    incarnations = [_incarnation(reader, view) async for view in views]
    response.incarnations.extend(reversed(incarnations))
    return response


class _Origins:
    """Adds rows to the origins of a response, and their sources, as few as possible."""

    def __init__(self, response: pb.DescribeTraceResponse, known: Known) -> None:
        self._response = response
        self._known = known
        self._sources: dict[int, int] = {}
        self._choices: dict[tuple[int, ...], int] = {(): 0}
        self._last: dict[tuple[object, ...], pb.RowOrigin] = {}

    def add(self, row: Row) -> bool:
        """Add a record of `Served`; return whether there was room for it."""
        start, stop, _, version, source, attempt, provenance, layers = row
        key = version, source, attempt, provenance, layers
        last = self._last.get(key)
        if last is not None and last.stop == start:
            last.stop = stop
            return True
        if len(self._response.origins) == MAX_ORIGINS:
            return False
        self._last[key] = self._response.origins.add(
            start=start,
            stop=stop,
            choice=self._choice(layers),
            source=self._index(source),
            attempt=attempt,
            weight_version=version,
            provenance=provenance,
        )
        return True

    def _choice(self, layers: tuple[int, ...]) -> int:
        if layers not in self._choices:
            self._choices[layers] = len(self._choices)
            self._response.layer_choices.add(layer_ids=layers)
        return self._choices[layers]

    def _index(self, number: int) -> int:
        if number not in self._sources:
            self._sources[number] = len(self._sources)
            source = self._known.sources[number]
            self._response.sources.add(
                engine_id=source.writer.engine_id,
                shard=source.writer.shard,
                layer_ids=[i for i in self._known.layout.layer_ids if i in source.layout.column],
            )
        return self._sources[number]


def _incarnation(reader: Reader, known: Known) -> pb.IncarnationInfo:
    request = known.incarnation.request
    return pb.IncarnationInfo(
        number=request.number,
        state=reader.state_of(known),  # type: ignore[arg-type]
        finish_reason=finish_reason_of(request.sources),
        num_tokens=known.num_tokens,
        num_rows=known.num_rows,
        begun_ms=_ms(request.began),
        nonce=request.nonce,
    )


def _times(known: Known, reads: Reads | None) -> pb.TraceTimes:
    incarnation = known.incarnation
    own = incarnation.request.sources
    sources = [*own, *(source for request in incarnation.continued for source in request.sources)]
    times = pb.TraceTimes(begun_ms=_ms(min(source.began for source in sources)))
    if known.num_tokens:
        ended = [source for source in own if source.reported]
        times.sampled_ms = _ms(max((source.sampled for source in ended), default=0.0))
        times.acknowledged_ms = _ms(min((source.reported for source in ended), default=0.0))
        if all(source.reported for source in sources):
            times.readable_ms = _ms(max(source.reported for source in sources))
    if reads is not None:
        times.first_read_ms, times.last_read_ms = _ms(reads.first), _ms(reads.last)
        times.num_reads = reads.count
    return times


def _ms(seconds: float) -> int:
    return int(1000 * seconds)
