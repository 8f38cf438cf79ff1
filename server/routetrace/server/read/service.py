"""Trace service: reads, look-ups, deletion and leases of traces."""

# Over 400 lines: one class, with a method for each call.

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any

import grpc

from routetrace.common.limits import (
    MAX_BLOCK_TOKENS,
    MAX_LABELS,
    MAX_LAYERS,
    MAX_POSITION,
    check_id,
)
from routetrace.common.seals import sealed
from routetrace.server.access.admission import Admission
from routetrace.server.access.control import Access
from routetrace.server.access.lifecycle import Lifecycle
from routetrace.server.access.partition import Partition
from routetrace.server.common.rpc import Context, Unparsed, limited, streaming, unary
from routetrace.server.index.agents import Agents
from routetrace.server.index.demand import Demand
from routetrace.server.index.history import History
from routetrace.server.index.journal import Journal
from routetrace.server.read.batch import MAX_READS, Batch
from routetrace.server.read.blocks import trace_of_blocks
from routetrace.server.read.catalog import Catalog, OwnCatalog, Renewal
from routetrace.server.read.checks import Checks, at_most, check_part, check_read
from routetrace.server.read.describing import described
from routetrace.server.read.explaining import cell_of, explained
from routetrace.server.read.finding import Finder
from routetrace.server.read.following import Follower
from routetrace.server.read.locating import Search
from routetrace.server.read.parts import PartsServicer
from routetrace.server.read.peers import Peers
from routetrace.server.read.read_log import ReadLog
from routetrace.server.read.run_calls import RunCalls
from routetrace.server.read.spread_catalog import SpreadCatalog
from routetrace.server.read.status import Status
from routetrace.server.read.watching import Watch
from routetrace.server.retention.limits import Limits
from routetrace.server.retention.retention import Retention
from routetrace.server.rows import answers
from routetrace.server.rows.reader import Reader
from routetrace.server.rows.sending import Answer
from routetrace.server.rows.served import Known
from routetrace.server.rows.summaries import Summaries
from routetrace.server.settings.config import ServerConfig
from routetrace.server.spread.gathering import Gathering
from routetrace.server.spread.watching import Touched, Watching
from routetrace.server.spread.workers import Workers
from routetrace.server.store.interface import Store
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum traces of one call, and of one record: applying it holds the event loop.
MAX_TRACE_IDS = 100_000

#: Maximum size of a request, by method; of all others.
_MESSAGE_BYTES = {
    "GetTraces": 4 << 20,
    "GetBlocks": 4 << 20,
    "LocateSequences": 4 << 20,
    "RenewLease": 8 << 20,
}
_LEAST_MESSAGE_BYTES = 256 << 10

#: Bytes that a read of blocks takes for each position while it is built.
_POSITION_BYTES = 64


class TraceServicer(RunCalls):
    """routetrace.v1.TraceService."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        lifecycle: Lifecycle,
        access: Access,
        admission: Admission,
        agents: Agents,
        demand: Demand,
        gathering: Gathering,
        history: History,
        journal: Journal,
        reader: Reader,
        retention: Retention,
        summaries: Summaries,
        store: Store,
        started: float,
        partition: Partition,
        peers: Peers,
        workers: Workers,
    ) -> None:
        self._config = config
        self._checks = Checks(access, lifecycle, partition)
        self._access = access
        self._partition = partition
        self._gathering = gathering
        self._history = history
        self._admission = admission
        self._agents = agents
        self._journal = journal
        self._reader = reader
        self._retention = retention
        self._reads = ReadLog(journal.clock)
        self._finder = Finder(
            access=access,
            admission=admission,
            agents=agents,
            checks=self._checks,
            demand=demand,
            gathering=gathering,
            journal=journal,
            partition=partition,
            reader=reader,
            watching=Watching(journal.changes, workers),
        )
        self.parts = PartsServicer(
            access=access,
            agents=agents,
            config=config,
            demand=demand,
            finder=self._finder,
            frames=reader.frames,
            history=history,
            journal=journal,
            lifecycle=lifecycle,
            reader=reader,
            retention=retention,
            summaries=summaries,
            touched=Touched(journal.changes, partition),
        )
        """Service for the other workers."""
        self._own = OwnCatalog(
            agents=agents,
            finder=self._finder,
            history=history,
            journal=journal,
            reader=reader,
            retention=retention,
            summaries=summaries,
        )
        self._everywhere = SpreadCatalog(
            everywhere=retention.everywhere,
            gathering=gathering,
            journal=journal,
            own=self.parts,
            reader=reader,
            summaries=summaries,
        )
        self._status = Status(
            access=access,
            agents=agents,
            checks=self._checks,
            config=config,
            gathering=gathering,
            journal=journal,
            limits=Limits(
                admission=admission, config=config, room=retention.room, state=journal.state
            ),
            partition=partition,
            peers=peers,
            started=started,
            store=store,
        )
        self._follower = Follower(
            admission=admission,
            checks=self._checks,
            finder=self._finder,
            reader=reader,
            reads=self._reads,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service; messages of streams, and pages of traces, come serialized."""
        service = pb.DESCRIPTOR.services_by_name["TraceService"]
        handlers: dict[str, Any] = {}
        for method in service.methods:
            handler = getattr(self, method.name)
            most = _MESSAGE_BYTES.get(method.name, _LEAST_MESSAGE_BYTES)
            parse = limited(getattr(pb, method.input_type.name), most)
            if method.server_streaming:
                handlers[method.name] = grpc.unary_stream_rpc_method_handler(handler, parse)
            else:
                serialize = None if method.name == "ListTraces" else sealed
                handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                    handler, parse, serialize
                )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service.full_name, handlers),)
        )

    def _catalog(self, run: str) -> Catalog:
        return self._everywhere if self._partition.spreads(run) else self._own

    async def parsed(self, request: Unparsed, context: Context) -> Any:
        """Parse a long message; see `Admission.parsed`."""
        return await self._admission.parsed(self._access.owner_of(context), request)

    # ------------------------------------------------------------------ reads

    @streaming
    async def GetTrace(  # type: ignore[override] # noqa: N802, D102
        self, request: pb.GetTraceRequest, context: Context
    ) -> AsyncIterator[bytes]:
        owner = self._checks.call(context, "read", request.run)
        check_read(request)
        with self._admission.read(owner):
            await self._admission.pace.step(owner)
            if request.follow:
                async for message in self._follower.messages(request, context, owner):
                    yield message
                return
            async for message in self._send(await self._answer(request, context, owner), owner):
                yield message

    @streaming
    async def GetTraces(  # type: ignore[override] # noqa: N802, D102
        self, request: pb.GetTracesRequest, context: Context
    ) -> AsyncIterator[bytes]:
        owner = self._checks.call(context, "read", request.run)
        at_most("reads", len(request.reads), MAX_READS)

        def at_once(read: pb.GetTraceRequest) -> Answer | None:
            self._checks.call(context, "read", request.run)  # a token may be revoked meanwhile
            check_part(read)
            read.run = request.run
            known = self._finder.met(read, context, places.get(read.trace_id))
            return None if known is None else self._answer_of(known, read, context)

        async def later(read: pb.GetTraceRequest) -> Answer:
            return await self._answer(read, context, owner)

        with ExitStack() as counted:
            # Each counts; where few are allowed at all, a call takes at most a quarter of them.
            most = max(1, self._admission.max_reads // 4)
            for _ in range(min(len(request.reads), most)):
                counted.enter_context(self._admission.read(owner))
            turn = partial(self._admission.turn, owner)
            step = partial(self._admission.pace.step, owner)
            pinned = self._reader.frames.pinned
            asked = [read.trace_id for read in request.reads if not read.located]
            places = await self._gathering.locate(request.run, asked)
            batch = Batch(request.reads, at_once, later, pinned, turn, step)
            async with aclosing(batch.messages()) as messages:
                async for message in messages:
                    yield message

    @streaming
    async def GetBlocks(  # type: ignore[override] # noqa: N802, D102
        self, request: pb.GetBlocksRequest, context: Context
    ) -> AsyncIterator[bytes]:
        owner = self._checks.call(context, "read", request.run, request.engine_id)
        at_most("num_tokens", request.num_tokens, MAX_BLOCK_TOKENS)
        at_most("layer_ids", len(request.layer_ids), MAX_LAYERS)
        self._retention.room.check_memory()
        size = 4 * len(request.block_ids) + _POSITION_BYTES * request.num_tokens
        with self._admission.read(owner), self._admission.bind(owner, size):
            trace = await trace_of_blocks(self._journal, request, self._admission.pace.turns(owner))
            incarnation = trace.join.incarnation(1)
            start = min(request.token_start, request.num_tokens)
            known = self._reader.known(trace, incarnation)
            selection = self._reader.select(known, start, request.num_tokens, request.layer_ids)
            answer = Answer(self._reader, self._reader.describe(known), known, selection)
            async for message in self._send(answer, owner):
                yield message

    async def _answer(self, request: pb.GetTraceRequest, context: Context, owner: str) -> Answer:
        """Wait for the requested trace; return the answer as of then."""
        known = await self._finder.find(request, context, owner, sends_on=True)
        return self._answer_of(known, request, context)

    def _answer_of(self, known: Known, request: pb.GetTraceRequest, context: Context) -> Answer:
        """Return the answer from the view of the requested trace."""
        selection = self._finder.select(known, request)
        self._history.read(request.run)
        self._reads.note(known.trace, context)
        info = self._reader.describe(known, digests=not request.omit_token_digests)
        return Answer(self._reader, info, known, selection)

    async def _send(self, answer: Answer, owner: str) -> AsyncIterator[bytes]:
        """Yield the messages of an answer."""
        # The chunks of rows that the info counts as present must not be dropped meanwhile.
        with self._reader.frames.pinned(answer.rows):
            while not answer.done:
                async with self._admission.turn(owner) as turn:
                    piece = await answer.next()
                    await turn.sending()
                    yield turn.charged(answers.message(piece))

    # ------------------------------------------------------------------ look-ups

    @unary
    async def StatTrace(  # noqa: N802, D102
        self, request: pb.StatTraceRequest, context: Context
    ) -> pb.StatTraceResponse:
        owner = self._checks.call(context, "read", request.run)
        check_id("trace_id", request.trace_id)
        with self._admission.read(owner):
            known = await self._finder.find(
                pb.GetTraceRequest(
                    run=request.run,
                    trace_id=request.trace_id,
                    incarnation=request.incarnation,
                    wait_for=pb.WAIT_FOR_END if request.wait else pb.WAIT_FOR_UNSPECIFIED,
                ),
                context,
                owner,
            )
        selection = self._reader.select(known, 0, 0, ())
        rows = self._reader.rows(known, selection)
        info = self._reader.describe(known)
        missing = self._reader.missing(info.state, known, selection, rows)
        return pb.StatTraceResponse(info=info, missing=missing)

    @unary
    async def DescribeTrace(  # noqa: N802, D102
        self, request: pb.DescribeTraceRequest, context: Context
    ) -> pb.DescribeTraceResponse:
        owner = self._checks.call(context, "read", request.run)
        read = pb.GetTraceRequest(
            run=request.run,
            trace_id=request.trace_id,
            incarnation=request.incarnation,
            policy=request.policy,
        )
        check_read(read)
        with self._admission.read(owner):
            await self._admission.pace.step(owner)
            known = await self._finder.gathered(read, context, owner)
            selection = self._finder.select(known, read)
            reads = self._reads.of(known.trace)
            wanted = not request.omit_origins
            turns = self._admission.pace.turns(owner)
            return await described(self._reader, known, selection, reads, turns, origins=wanted)

    @unary
    async def ExplainCell(  # noqa: N802, D102
        self, request: pb.ExplainCellRequest, context: Context
    ) -> pb.ExplainCellResponse:
        owner = self._checks.call(context, "read", request.run)
        read = pb.GetTraceRequest(
            run=request.run,
            trace_id=request.trace_id,
            incarnation=request.incarnation,
            nonce=request.nonce,
            policy=request.policy,
        )
        check_read(read)
        at_most("position", request.position, MAX_POSITION - 1)
        with self._admission.read(owner):
            await self._admission.pace.step(owner)
            known = await self._finder.gathered(read, context, owner)
            cell = cell_of(self._reader, known, request)
            turns = self._admission.pace.turns(owner)
            return await explained(self._reader, known, cell, turns)

    @unary
    async def ListTraces(  # type: ignore[override] # noqa: N802, D102
        self, request: pb.ListTracesRequest, context: Context
    ) -> bytes:
        owner = self._checks.call(context, "read", request.run)
        at_most("labels", len(request.labels), MAX_LABELS)
        at_most("states", len(request.states), len(pb.TraceState.values()))
        turns = self._admission.pace.turns(owner)
        return await self._catalog(request.run).traces(request, turns)

    @unary
    async def LocateSequences(  # noqa: N802, D102
        self, request: pb.LocateSequencesRequest, context: Context
    ) -> pb.LocateSequencesResponse:
        owner = self._checks.call(context, "read", request.run)
        holders = self._catalog(request.run).holders
        with self._admission.read(owner):
            turns = self._admission.pace.turns(owner)
            return await Search(request, holders, turns).response()

    @streaming
    async def WatchTraces(  # type: ignore[override] # noqa: N802, D102
        self, request: pb.WatchTracesRequest, context: Context
    ) -> AsyncIterator[bytes]:
        check = partial(self._checks.call, context, "read", request.run)
        owner = check()
        watched = self._catalog(request.run).watched(request.run, self._admission.pace.turns(owner))
        with self._admission.watch(owner), watched as seen:
            async with aclosing(Watch(seen, check).messages()) as messages:
                async for message in messages:
                    async with self._admission.turn(owner) as turn:
                        await turn.sending()
                        yield turn.charged(sealed(message))

    # ------------------------------------------------------------------ deletion and leases

    @unary
    async def DeleteTrace(  # noqa: N802, D102
        self, request: pb.DeleteTraceRequest, context: Context
    ) -> pb.DeleteTraceResponse:
        owner = self._checks.call(context, "admin", request.run)
        await self._finder.gathered(
            pb.GetTraceRequest(run=request.run, trace_id=request.trace_id), context, owner
        )
        token = self._access.token_of(context)
        await self._catalog(request.run).delete(request.run, request.trace_id, token)
        return pb.DeleteTraceResponse()

    @unary
    async def RetireTraces(  # noqa: N802, D102
        self, request: pb.RetireTracesRequest, context: Context
    ) -> pb.RetireTracesResponse:
        owner = self._checks.call(context, "admin", request.run)
        through, token = request.through_weight_version, self._access.token_of(context)
        turns = self._admission.pace.turns(owner)
        return await self._catalog(request.run).retire(request.run, through, token, turns)

    @unary
    async def RenewLease(  # noqa: N802, D102
        self, request: pb.RenewLeaseRequest, context: Context
    ) -> pb.RenewLeaseResponse:
        owner = self._checks.call(context, "read", request.run)
        at_most("trace_ids", len(request.trace_ids), MAX_TRACE_IDS)
        ttl = request.ttl_seconds or self._config.default_ttl_seconds
        turns = self._admission.pace.turns(owner)
        async for trace_id in turns.over(request.trace_ids):
            check_id("trace_ids", trace_id)

        # A lease that ends earlier deletes.
        check = partial(self._access.check, context, "admin", request.run)
        refuse = None if self._access.may(context, "admin", request.run) else check
        renewal = Renewal(request.run, request.trace_ids, ttl, refuse)
        count = await self._catalog(request.run).renew(renewal, turns)
        return pb.RenewLeaseResponse(num_renewed=count)
