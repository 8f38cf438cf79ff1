"""The trace service: reads, look-ups, and what forgets traces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

from routetrace.server.admission import Admission
from routetrace.server.chunk import MAX_LABELS, MAX_POSITION, check_id
from routetrace.server.ingest import check_blocks
from routetrace.server.joins import Incarnation
from routetrace.server.reader import MAX_RANGES, MESSAGE_BYTES, Message, Reader
from routetrace.server.record import encode_control
from routetrace.server.rpc import Context, streaming, unary
from routetrace.server.tokens import Scope
from routetrace.server.trace_index import Source, Trace
from routetrace.server.view import Segment, Selection, view
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from routetrace.v1.errors import InvalidArgument, NotFound
from routetrace.v1.layout import MAX_LAYERS

if TYPE_CHECKING:
    from routetrace.server.core import Core

DEFAULT_PAGE_SIZE = 1000
MAX_PAGE_SIZE = 10_000
_LONGEST_PAGE_TOKEN = 20

#: Traces of one call, at most.
MAX_TRACE_IDS = 100_000

#: How often a waiting call looks again although nothing changed: agents get lost in silence.
_LOOK_AGAIN_SECONDS = 1.0

Response = TypeVar("Response", pb.GetTraceResponse, pb.GetBlocksResponse)


class TraceServicer(pb_grpc.TraceServiceServicer):
    """routetrace.v1.TraceService."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._reader = core.reader
        self._journal = core.journal
        self._access = core.access
        self._admission = core.admission

    # ------------------------------------------------------------------ reads

    @streaming
    async def GetTrace(  # noqa: N802, D102
        self, request: pb.GetTraceRequest, context: Context
    ) -> AsyncIterator[pb.GetTraceResponse]:
        self._check(context, "read", request.run)
        check_id("trace_id", request.trace_id)
        _at_most("token_ranges", len(request.token_ranges), MAX_RANGES)
        _at_most("layer_ids", len(request.layer_ids), MAX_LAYERS)
        if request.policy not in pb.ReadPolicy.values():
            raise InvalidArgument(field="policy", value=request.policy, expected="a ReadPolicy")
        if request.wait_for not in pb.WaitFor.values():
            raise InvalidArgument(field="wait_for", value=request.wait_for, expected="a WaitFor")
        if request.follow and request.token_ranges:
            raise InvalidArgument(
                field="token_ranges", value=len(request.token_ranges), expected="none to follow"
            )
        with self._admission.read():
            if request.follow:
                async for response in self._follow(request, context):
                    yield response
                return
            trace, incarnation = await self._find(request, context)
            selection = self._select(incarnation, request)
            digests = not request.omit_token_digests
            info = self._reader.describe(trace, incarnation, digests=digests)
            async for response in self._send(
                pb.GetTraceResponse, info, trace, incarnation, selection
            ):
                yield response

    @streaming
    async def GetBlocks(  # noqa: N802, D102
        self, request: pb.GetBlocksRequest, context: Context
    ) -> AsyncIterator[pb.GetBlocksResponse]:
        self._check(context, "read", request.run)
        writers = self._core.state.engine_writers(request.run, request.engine_id)
        if not writers:
            raise NotFound(
                field="engine_id", value=request.engine_id, expected=f"an engine of {request.run!r}"
            )
        _at_most("num_tokens", request.num_tokens, MAX_POSITION)
        _at_most("layer_ids", len(request.layer_ids), MAX_LAYERS)
        # The blocks as a request that ended with them: everything else is the same.
        now = self._journal.clock.now()
        trace = Trace((request.run, ""), 0, {}, 0, now, now, now)
        for writer in writers:
            check_blocks(writer, request.block_ids)
            capacity = len(request.block_ids) * writer.slots.block_size
            if request.num_tokens > capacity:
                raise InvalidArgument(
                    field="num_tokens",
                    value=request.num_tokens,
                    expected=f"at most {capacity}, the slots of the blocks",
                )
            if any(b >= writer.slots.num_blocks for b in request.block_ids):
                raise InvalidArgument(
                    field="block_ids",
                    value=max(request.block_ids),
                    expected=f"ids below num_blocks = {writer.slots.num_blocks}",
                )
            source = Source(writer.key, writer.epoch, "", "blocks", writer.layout)
            source.ended, source.num_tokens = True, request.num_tokens + 1
            self._core.state.inherit(writer, source, list(request.block_ids), request.num_tokens)
            trace.sources.append(source)
        incarnation = trace.join.incarnation(1)
        start = min(request.token_start, request.num_tokens)
        selection = self._reader.select(incarnation, start, request.num_tokens, request.layer_ids)
        info = self._reader.describe(trace, incarnation)
        with self._admission.read():
            async for response in self._send(
                pb.GetBlocksResponse, info, trace, incarnation, selection
            ):
                yield response

    def _check(self, context: Context, scope: Scope, run: str) -> None:
        check_id("run", run)
        self._access.check(context, scope, run)
        self._core.check_ready()

    async def _send(
        self,
        make: type[Response],
        info: pb.TraceInfo,
        trace: Trace,
        incarnation: Incarnation,
        selection: Selection,
    ) -> AsyncIterator[Response]:
        """What is there now: info, rows, end."""
        sending = _Sending(self._reader, self._admission, trace, incarnation)
        segments = view(trace.sources, incarnation, selection)
        # From now on: what was called complete must not be forgotten while it is on its way.
        with self._reader.pinned(segments):
            yield make(info=info)
            async for message in sending.rows(segments, selection):
                yield make(
                    spans=message.spans,
                    frame_lengths=message.frame_lengths,
                    payload=message.payload,
                )
            info.ClearField("token_digests")  # said above
            yield make(end=sending.end(info, segments, selection))

    async def _follow(
        self, request: pb.GetTraceRequest, context: Context
    ) -> AsyncIterator[pb.GetTraceResponse]:
        """Rows as they come in, until the trace ends. Rows that were dropped again come anew."""
        trace, incarnation = self._reader.find(request.run, request.trace_id, request.incarnation)
        yield pb.GetTraceResponse(info=self._reader.describe(trace, incarnation))
        sending = _Sending(self._reader, self._admission, trace, incarnation)
        sent: dict[int, list[Segment]] = {}
        while True:
            self._check(context, "read", request.run)  # a token may be taken back meanwhile
            if self._core.state.traces.traces.get(trace.key) is not trace:
                raise NotFound(
                    field="trace_id", value=request.trace_id, expected="a trace that stays"
                )
            seen = trace.changes
            last = trace.join.requests[incarnation.request.number - 1]
            while last.successor and not request.incarnation:
                last = last.successor  # what was sent is a part of it
            sending.incarnation = incarnation = trace.join.incarnation(last.number)
            info = self._reader.describe(trace, incarnation)
            selection = self._select(incarnation, request)
            segments = view(trace.sources, incarnation, selection)
            async for message in sending.rows(unsent(segments, sent), selection):
                yield pb.GetTraceResponse(
                    info=info,
                    spans=message.spans,
                    frame_lengths=message.frame_lengths,
                    payload=message.payload,
                )
            if info.state != pb.TRACE_STATE_RUNNING:
                break
            if trace.changes == seen:
                await self._journal.changes.wait(trace.key, _LOOK_AGAIN_SECONDS)
        yield pb.GetTraceResponse(end=sending.end(info, segments, selection))

    def _select(self, incarnation: Incarnation, request: pb.GetTraceRequest) -> Selection:
        return self._reader.select(
            incarnation,
            request.token_start,
            request.token_stop,
            request.layer_ids,
            request.policy or pb.READ_POLICY_AS_SAMPLED,
            request.weight_version if request.HasField("weight_version") else None,
            [(r.start, r.stop) for r in request.token_ranges],
        )

    async def _find(
        self, request: pb.GetTraceRequest, context: Context
    ) -> tuple[Trace, Incarnation]:
        """The trace that is asked for, once it is what is waited for. The deadline bounds it."""
        while True:
            try:
                trace, incarnation = self._reader.find(
                    request.run, request.trace_id, request.incarnation
                )
            except NotFound:
                if request.wait_for == pb.WAIT_FOR_UNSPECIFIED:
                    raise
            else:
                if self._is_there(trace, incarnation, request):
                    return trace, incarnation
            self._core.check_ready()
            key = (request.run, request.trace_id)
            await self._journal.changes.wait(key, _LOOK_AGAIN_SECONDS)
            self._check(context, "read", request.run)  # a token may be taken back meanwhile

    def _is_there(
        self, trace: Trace, incarnation: Incarnation, request: pb.GetTraceRequest
    ) -> bool:
        if request.wait_for == pb.WAIT_FOR_END:
            return self._reader.state_of(trace, incarnation) != pb.TRACE_STATE_RUNNING
        if request.wait_for == pb.WAIT_FOR_ROWS:
            bounded = bool(request.token_stop or request.token_ranges or incarnation.num_tokens)
            selection = self._select(incarnation, request)
            return bounded and self._reader.is_covered(trace, incarnation, selection)
        return True

    # ------------------------------------------------------------------ look-ups

    @unary
    async def StatTrace(  # noqa: N802, D102
        self, request: pb.StatTraceRequest, context: Context
    ) -> pb.StatTraceResponse:
        self._check(context, "read", request.run)
        check_id("trace_id", request.trace_id)
        with self._admission.read():
            trace, incarnation = await self._find(
                pb.GetTraceRequest(
                    run=request.run,
                    trace_id=request.trace_id,
                    incarnation=request.incarnation,
                    wait_for=pb.WAIT_FOR_END if request.wait else pb.WAIT_FOR_UNSPECIFIED,
                ),
                context,
            )
        selection = self._reader.select(incarnation, 0, 0, ())
        segments = view(trace.sources, incarnation, selection)
        info = self._reader.describe(trace, incarnation)
        missing = self._reader.missing(info.state, trace, incarnation, selection, segments)
        return pb.StatTraceResponse(info=info, missing=missing)

    @unary
    async def ListTraces(  # noqa: N802, D102
        self, request: pb.ListTracesRequest, context: Context
    ) -> pb.ListTracesResponse:
        self._check(context, "read", request.run)
        _at_most("labels", len(request.labels), MAX_LABELS)
        _at_most("states", len(request.states), len(pb.TraceState.values()))
        token = request.page_token or "0"
        if not (len(token) <= _LONGEST_PAGE_TOKEN and token.isascii() and token.isdigit()):
            raise InvalidArgument(
                field="page_token", value=token, expected="next_page_token of an earlier answer"
            )
        most = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        response = pb.ListTracesResponse()
        last = size = 0
        for trace in self._core.state.traces.newest_first(request.run, int(token)):
            if any(trace.labels.get(key) != value for key, value in request.labels.items()):
                continue
            info = self._reader.describe(*self._reader.find(*trace.key), digests=False)
            if request.states and info.state not in request.states:
                continue
            if len(response.traces) == most or size > MESSAGE_BYTES:
                response.next_page_token = str(last)
                break
            response.traces.append(info)
            size += info.ByteSize()
            last = trace.serial
        return response

    # ------------------------------------------------------------------ forgetting

    @unary
    async def DeleteTrace(  # noqa: N802, D102
        self, request: pb.DeleteTraceRequest, context: Context
    ) -> pb.DeleteTraceResponse:
        self._check(context, "admin", request.run)
        self._reader.find(request.run, request.trace_id)
        await self._core.retention.forget(request.run, [request.trace_id], "deleted")
        return pb.DeleteTraceResponse()

    @unary
    async def RetireTraces(  # noqa: N802, D102
        self, request: pb.RetireTracesRequest, context: Context
    ) -> pb.RetireTracesResponse:
        self._check(context, "admin", request.run)
        retired = []
        for trace in self._core.state.traces.newest_first(request.run):
            newer = any(
                span.weight_version > request.through_weight_version
                for source in trace.sources
                for spans in source.attempts
                for span in spans
            )
            if not newer and self._reader.ended(trace):
                retired.append(trace.key[1])
        count = 0
        if retired:
            count = await self._core.retention.forget(request.run, retired, "retired")
        return pb.RetireTracesResponse(num_retired=count)

    @unary
    async def RenewLease(  # noqa: N802, D102
        self, request: pb.RenewLeaseRequest, context: Context
    ) -> pb.RenewLeaseResponse:
        self._check(context, "read", request.run)
        _at_most("trace_ids", len(request.trace_ids), MAX_TRACE_IDS)
        for trace_id in request.trace_ids:
            check_id("trace_ids", trace_id)
        record = encode_control(
            "renew",
            self._journal.clock.now(),
            run=request.run,
            trace_ids=list(request.trace_ids),
            ttl=request.ttl_seconds or self._core.config.default_ttl_seconds,
        )
        return pb.RenewLeaseResponse(num_renewed=await self._journal.append(record))

    # ------------------------------------------------------------------ the server

    @unary
    async def GetServerInfo(  # noqa: N802, D102
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        self._check(context, "read", request.run)
        core, config, run = self._core, self._core.config, request.run
        stats = await asyncio.to_thread(core.store.stats)
        return pb.GetServerInfoResponse(
            version=version("routetrace"),
            ack_mode=config.ack_mode,
            store=config.store,
            started_ms=int(core.started * 1000),
            now_ms=int(self._journal.clock.now() * 1000),
            used_bytes=stats.used_bytes,
            capacity_bytes=stats.capacity_bytes,
            damaged_records=stats.damaged_records,
            num_agents=sum(key.run == run for key in core.agents.connected),
            num_traces=core.state.traces.run_counts[run],
            run_bytes=core.state.run_bytes[run],
            run_quota_bytes=config.quota_of(run),
        )


def _at_most(field: str, value: int, most: int) -> None:
    if value > most:
        raise InvalidArgument(field=field, value=value, expected=f"at most {most}")


class _Sending:
    """Rows on their way out of one call."""

    def __init__(
        self, reader: Reader, admission: Admission, trace: Trace, incarnation: Incarnation
    ) -> None:
        self.incarnation = incarnation
        self._reader = reader
        self._admission = admission
        self._trace = trace
        self._num_spans = 0
        self._num_frames = 0
        self._unread: list[Segment] = []

    async def rows(self, segments: list[Segment], selection: Selection) -> AsyncIterator[Message]:
        """The rows of segments, a message at a time."""
        with self._reader.pinned(segments):
            for batch in self._reader.batches(segments):
                async with self._admission.turn():
                    message, lost = await self._reader.fetch(batch, selection, self._num_frames)
                    self._unread += lost
                    self._num_spans += message.num_spans
                    self._num_frames += len(message.frame_lengths) // 4
                    yield message

    def end(self, info: pb.TraceInfo, segments: list[Segment], selection: Selection) -> pb.ReadEnd:
        """What closes the call: what was sent, and which cells were not."""
        missing = self._reader.missing(
            info.state, self._trace, self.incarnation, selection, segments
        )
        for segment in self._unread:
            held = self._trace.sources[segment.source].layout.column
            missing.append(
                pb.MissingRange(
                    start=segment.span.position,
                    stop=segment.span.stop,
                    layer_ids=[i for i in selection.layers if i in held],
                    reason=pb.MISSING_REASON_CORRUPT,
                )
            )
        return pb.ReadEnd(
            info=info,
            token_start=selection.start,
            token_stop=selection.stop,
            missing=missing,
            num_spans=self._num_spans,
        )


def unsent(segments: list[Segment], sent: dict[int, list[Segment]]) -> list[Segment]:
    """Parts of the segments that were not sent before, or not with the same rows.

    Args:
        segments: what a reader gets now.
        sent: by source, what it got; brought up to date.
    """
    fresh = []
    by_source: dict[int, list[Segment]] = {}
    for segment in segments:
        by_source.setdefault(segment.source, []).append(segment)
    for source, now in by_source.items():
        before = {
            (s.span.ref - s.span.position): (s.span.position, s.span.stop)
            for s in sent.get(source, ())
        }
        for segment in now:
            # Rows that were sent have the same reference at the same position.
            a, b = before.get(segment.span.ref - segment.span.position, (0, 0))
            for start, stop in (
                (segment.span.position, min(segment.span.stop, max(a, segment.span.position))),
                (max(segment.span.position, b), segment.span.stop),
            ):
                if start < stop:
                    fresh.append(segment._replace(span=segment.span.cut(start, stop)))
        sent[source] = now
    fresh.sort(key=lambda s: s.span.position)
    return fresh
