"""The trace service: reads, look-ups, and what forgets traces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import grpc

from routetrace.server import answers
from routetrace.server.chunk import MAX_LABELS, MAX_POSITION, check_id
from routetrace.server.ingest import check_blocks
from routetrace.server.joins import Incarnation
from routetrace.server.reader import MAX_RANGES, Fetched, Reader
from routetrace.server.record import encode_control
from routetrace.server.rpc import Context, streaming, unary
from routetrace.server.served import Served, segments_of, served
from routetrace.server.tokens import Scope
from routetrace.server.trace_index import Source, Trace
from routetrace.server.view import Segment, Selection
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1 import routetrace_pb2_grpc as pb_grpc
from routetrace.v1.errors import InvalidArgument, NotFound
from routetrace.v1.layout import MAX_LAYERS

if TYPE_CHECKING:
    from routetrace.server.core import Core

DEFAULT_PAGE_SIZE = 1000
MAX_PAGE_SIZE = 10_000
_PAGE_BYTES = 1 << 20
_LONGEST_PAGE_TOKEN = 20

#: Traces of one call, at most.
MAX_TRACE_IDS = 100_000

#: How often a waiting call looks again although nothing changed: agents get lost in silence.
_LOOK_AGAIN_SECONDS = 1.0


class TraceServicer(pb_grpc.TraceServiceServicer):
    """routetrace.v1.TraceService."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._reader = core.reader
        self._journal = core.journal
        self._access = core.access
        self._admission = core.admission

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service; what streams is handed over as it is to be sent (`answers.py`)."""
        service = pb.DESCRIPTOR.services_by_name["TraceService"]
        handlers: dict[str, Any] = {}
        for method in service.methods:
            handler, request = getattr(self, method.name), getattr(pb, method.input_type.name)
            if method.server_streaming:
                handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                    handler, request.FromString
                )
            else:
                response = getattr(pb, method.output_type.name)
                handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                    handler, request.FromString, response.SerializeToString
                )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service.full_name, handlers),)
        )

    # ------------------------------------------------------------------ reads

    @streaming
    async def GetTrace(  # type: ignore[override] # noqa: N802, D102
        self, request: pb.GetTraceRequest, context: Context
    ) -> AsyncIterator[bytes]:
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
                async for message in self._follow(request, context):
                    yield message
                return
            trace, incarnation = await self._find(request, context)
            selection = self._select(trace, incarnation, request)
            digests = not request.omit_token_digests
            info = self._reader.describe(trace, incarnation, digests=digests)
            async for message in self._send(info, trace, incarnation, selection):
                yield message

    @streaming
    async def GetBlocks(  # type: ignore[override] # noqa: N802, D102
        self, request: pb.GetBlocksRequest, context: Context
    ) -> AsyncIterator[bytes]:
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
        known = self._reader.known(trace, incarnation)
        selection = self._reader.select(known, start, request.num_tokens, request.layer_ids)
        info = self._reader.describe(trace, incarnation)
        with self._admission.read():
            async for message in self._send(info, trace, incarnation, selection):
                yield message

    def _check(self, context: Context, scope: Scope, run: str) -> None:
        check_id("run", run)
        self._access.check(context, scope, run)
        self._core.check_ready()

    async def _send(
        self, info: pb.TraceInfo, trace: Trace, incarnation: Incarnation, selection: Selection
    ) -> AsyncIterator[bytes]:
        """What is there now: info with the first rows, more rows, the end with the last ones."""
        sending = _Sending(self._reader, trace)
        rows = self._reader.rows(trace, incarnation, selection)
        # Of these rows: the trace may be another one when the last of them is sent.
        missing = self._reader.missing(info.state, trace, incarnation, selection, rows)
        first: pb.TraceInfo | None = info
        left = list(self._reader.batches(rows, selection.layers))
        # From now on: what was called complete must not be forgotten while it is on its way.
        with self._reader.pinned(rows):
            while left:
                async with self._admission.turn():
                    fetched, number = await sending.fetch(left.pop(0), selection)
                    end = None if left else sending.end(info, missing, selection)
                    yield answers.message(first, fetched, number, end)
                first = None
            if first is not None:
                yield answers.message(info, end=sending.end(info, missing, selection))

    async def _follow(self, request: pb.GetTraceRequest, context: Context) -> AsyncIterator[bytes]:
        """Rows as they come in, until the trace ends. Rows that were dropped again come anew."""
        trace, incarnation = self._reader.find(request.run, request.trace_id, request.incarnation)
        yield answers.message(self._reader.describe(trace, incarnation))
        sending = _Sending(self._reader, trace)
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
            incarnation = trace.join.incarnation(last.number)
            info = self._reader.describe(trace, incarnation)
            selection = self._select(trace, incarnation, request)
            rows = self._reader.rows(trace, incarnation, selection)
            ended = info.state != pb.TRACE_STATE_RUNNING
            # As above, and needed only for the last of them.
            missing = (
                self._reader.missing(info.state, trace, incarnation, selection, rows)
                if ended
                else []
            )
            fresh = served(unsent(segments_of(rows), sent))
            with self._reader.pinned(fresh):
                for batch in self._reader.batches(fresh, selection.layers):
                    async with self._admission.turn():
                        fetched, number = await sending.fetch(batch, selection)
                        yield answers.message(info, fetched, number)
            if ended:
                yield answers.message(end=sending.end(info, missing, selection))
                return
            if trace.changes == seen:
                await self._journal.changes.wait(trace.key, _LOOK_AGAIN_SECONDS)

    def _select(
        self, trace: Trace, incarnation: Incarnation, request: pb.GetTraceRequest
    ) -> Selection:
        return self._reader.select(
            self._reader.known(trace, incarnation),
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
            selection = self._select(trace, incarnation, request)
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
        selection = self._reader.select(self._reader.known(trace, incarnation), 0, 0, ())
        rows = self._reader.rows(trace, incarnation, selection)
        info = self._reader.describe(trace, incarnation)
        missing = self._reader.missing(info.state, trace, incarnation, selection, rows)
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
            if len(response.traces) == most or size > _PAGE_BYTES:
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

    def __init__(self, reader: Reader, trace: Trace) -> None:
        self._reader = reader
        self._trace = trace
        self._num_spans = 0
        self._num_frames = 0
        self._unread: list[Served] = []

    async def fetch(self, rows: Served, selection: Selection) -> tuple[Fetched, int]:
        """One message's rows, and how many frames were sent before them."""
        fetched = await self._reader.fetch(rows, selection.layers)
        first_frame = self._num_frames
        self._num_spans += len(fetched.spans)
        self._num_frames += len(fetched.frame_lengths)
        self._unread.append(fetched.unread)
        return fetched, first_frame

    def end(
        self, info: pb.TraceInfo, missing: list[pb.MissingRange], selection: Selection
    ) -> pb.ReadEnd:
        """What closes the call: what was sent, and which cells were not.

        Args:
            info: of the trace.
            missing: cells without rows; those that could not be read are added.
            selection: what was asked for.
        """
        for segment in (s for unread in self._unread for s in segments_of(unread)):
            held = self._trace.sources[segment.source].layout.column
            missing.append(
                pb.MissingRange(
                    start=segment.span.position,
                    stop=segment.span.stop,
                    layer_ids=[i for i in selection.layers if i in held],
                    reason=pb.MISSING_REASON_CORRUPT,
                )
            )
        end = pb.ReadEnd(
            info=info,
            token_start=selection.start,
            token_stop=selection.stop,
            missing=missing,
            num_spans=self._num_spans,
        )
        end.info.ClearField("token_digests")  # said before
        return end


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
