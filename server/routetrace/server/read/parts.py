"""Parts of traces, as this worker serves them to the other workers of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Set
from contextlib import ExitStack
from functools import partial
from typing import Any

import grpc
import numpy as np

from routetrace.codec.records import U32, U64
from routetrace.common.errors import Corrupt, InvalidArgument, NotFound
from routetrace.server.access.control import Access
from routetrace.server.access.lifecycle import Lifecycle
from routetrace.server.common.rpc import Context, parser, unary
from routetrace.server.common.slices import IN_TURNS, in_slices, result_in_slices
from routetrace.server.index.agents import Agents
from routetrace.server.index.control import key_of
from routetrace.server.index.demand import Demand, Place
from routetrace.server.index.history import History
from routetrace.server.index.journal import Journal
from routetrace.server.index.records.record import encode_renew
from routetrace.server.index.traces.trace import Trace
from routetrace.server.read import agreements
from routetrace.server.read.finding import Finder
from routetrace.server.read.locating import held_here
from routetrace.server.read.paging import PAGE_BYTES
from routetrace.server.retention.retention import Retention
from routetrace.server.rows.frames import Frames
from routetrace.server.rows.preparing import Steps, prepare_end, prepared
from routetrace.server.rows.reader import Reader, has_unknown_version
from routetrace.server.rows.summaries import Summaries
from routetrace.server.settings.config import ServerConfig
from routetrace.server.spread import parts as packing
from routetrace.server.spread.watching import Touched
from routetrace.server.spread.workers import SERVICE
from routetrace.stored import parts_pb2 as parts
from routetrace.v1 import routetrace_pb2 as pb

#: Seconds for which the chunks of collected parts are kept: their frames are read meanwhile.
KEPT_SECONDS = 60.0

#: Seconds after which a list ends, before its caller gives up: the next call goes on behind it.
LIST_SECONDS = 2.0


class PartsServicer:
    """Service for the other workers: of this server, and of others that share its bucket."""

    def __init__(
        self,
        *,
        access: Access,
        agents: Agents,
        config: ServerConfig,
        demand: Demand,
        finder: Finder,
        frames: Frames,
        history: History,
        journal: Journal,
        lifecycle: Lifecycle,
        reader: Reader,
        retention: Retention,
        summaries: Summaries,
        touched: Touched,
    ) -> None:
        self._access = access
        self._config = config
        self._touched = touched
        self._reader = reader
        self._retention = retention
        self._summaries = summaries
        self._agents = agents
        self._demand = demand
        self._finder = finder
        self._frames = frames
        self._history = history
        self._journal = journal
        self._lifecycle = lifecycle

    @property
    def methods(self) -> dict[str, tuple[Callable[[Any], Awaitable[Any]], Any]]:
        """Methods and the classes of their requests, by name."""
        return {
            "Locate": (self.locate, parts.LocateRequest),
            "Holders": (self.holders, parts.HoldersRequest),
            "Collect": (self.collect, parts.CollectRequest),
            "Frames": (self.frames, parts.FramesRequest),
            "Await": (self.await_changes, parts.AwaitRequest),
            "Glance": (self.glance, parts.GlanceRequest),
            "List": (self.list, parts.ListRequest),
            "Retirable": (self.retirable, parts.RetirableRequest),
            "Forget": (self.forget, parts.ForgetRequest),
            "Renew": (self.renew, parts.RenewRequest),
            "Agents": (self.agents, pb.ListAgentsRequest),
            "History": (self.history, pb.GetHistoryRequest),
            "Agreement": (self.agreement, pb.ListAgreementRequest),
            "Info": (self.info, pb.GetServerInfoRequest),
        }

    def add_to(self, server: grpc.aio.Server, *, trusted: bool) -> None:
        """Register the service.

        Args:
            server: takes the calls.
            trusted: whether only workers of this server can reach it; others need a token with
                the scope `admin`.
        """
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._handler(method, trusted), parser(request), _serialized
            )
            for name, (method, request) in self.methods.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def _handler(
        self, method: Callable[[Any], Awaitable[Any]], trusted: bool
    ) -> Callable[..., Awaitable[Any]]:
        async def handle(_: PartsServicer, request: Any, context: Context) -> Any:
            if not trusted:
                self._access.check(context, "admin", request.run)
            return await method(request)

        handle.__name__ = f"parts, {method.__name__}"
        return partial(unary(handle), self)

    async def locate(self, request: parts.LocateRequest) -> parts.LocateResponse:
        """Return which traces this worker has parts of."""
        self._lifecycle.check_ready()
        return packing.located(self._journal.state, request)

    async def holders(self, request: parts.HoldersRequest) -> parts.HoldersResponse:
        """Return which traces this worker has that may have requests with token digests."""
        self._lifecycle.check_ready()
        digests = np.frombuffer(request.digests, U64)
        held = held_here(self._journal.state.traces, request.run, digests)
        numbers: dict[str, int] = {}
        pairs = [
            (index, numbers.setdefault(trace.key[1], len(numbers)))
            for index, traces in enumerate(held.traces)
            for trace in traces
        ]
        return parts.HoldersResponse(
            trace_ids=numbers,
            pairs=np.array(pairs, U32).tobytes(),
            more=[index for index, more in enumerate(held.more) if more],
            digest_keys=held.keys,
        )

    async def collect(self, request: parts.CollectRequest) -> parts.CollectResponse:
        """Return the parts of traces, and keep their chunks for a while."""
        self._lifecycle.check_ready()
        kept = ExitStack()

        def keep(chunks: Set[int]) -> None:
            kept.enter_context(self._frames.kept(chunks))

        try:
            return await packing.pack(self._journal.state, self._agents, request, keep)
        finally:
            asyncio.get_running_loop().call_later(KEPT_SECONDS, kept.close)

    async def frames(self, request: parts.FramesRequest) -> parts.FramesResponse:
        """Return frames of chunks; none of a chunk whose frames cannot be read."""
        self._lifecycle.check_ready()
        return await asyncio.get_running_loop().run_in_executor(None, self._frames_of, request)

    def _frames_of(self, request: parts.FramesRequest) -> parts.FramesResponse:
        response = parts.FramesResponse()
        for wanted in request.chunks:
            cut = response.chunks.add()
            try:
                pieces, lengths = self._frames.read(
                    request.run, wanted.chunk, wanted.frames, tuple(wanted.layer_ids)
                )
            except (NotFound, Corrupt, InvalidArgument):
                continue  # the caller reports the cells as missing
            cut.lengths.extend(lengths)
            cut.payload = b"".join(pieces)
        return response

    async def await_changes(self, request: parts.AwaitRequest) -> parts.AwaitResponse:
        """Wait for changes of the parts of a run; ask writers for early chunks meanwhile."""
        self._lifecycle.check_ready()
        with ExitStack() as waiting:
            for demand in request.demands:
                place: Place = request.run
                if demand.HasField("writer"):
                    place = key_of(demand.writer)
                waiting.enter_context(self._demand.waiting([place], demand.awaited))
            return await self._touched.since(request)

    # ------------------------------------------------------------------ traces of a run

    async def glance(self, request: parts.GlanceRequest) -> parts.GlanceResponse:
        """Return the state of parts of traces."""
        self._lifecycle.check_ready()
        response = parts.GlanceResponse()
        now = self._journal.clock.now()
        traces = self._journal.state.traces.traces
        async for index, trace_id in in_slices(enumerate(request.trace_ids)):
            trace = traces.get((request.run, trace_id))
            if trace and trace.has_many_sources:
                await result_in_slices(prepare_end(self._reader, trace))
                trace = traces.get((request.run, trace_id))
            if trace:
                ended = self._reader.ended(trace)
                response.glances.add(index=index, left=trace.expires - now, ended=ended)
        return response

    async def list(self, request: parts.ListRequest) -> parts.ListResponse:
        """Return the traces of a run that this worker has parts of, newest first."""
        self._lifecycle.check_ready()
        response = parts.ListResponse()
        size = 0
        through = request.retirable_through if request.HasField("retirable_through") else None

        def prepare(trace: Trace) -> Steps:
            yield from self._summaries.prepare(trace)
            if through is not None:
                yield from prepare_end(self._reader, trace)

        begun = time.monotonic()
        newest_first = self._journal.state.traces.newest_first(request.run, request.before)
        async for trace in IN_TURNS.over(prepared(newest_first, prepare)):
            if trace and self._finder.exists(trace):
                if response.listed and (
                    len(response.listed) == request.most
                    or size > PAGE_BYTES
                    or time.monotonic() - begun > LIST_SECONDS
                ):
                    break
                listed = response.listed.add(
                    trace_id=trace.key[1], serial=trace.serial, created=trace.created
                )
                if request.watched:
                    message, listed.final = self._summaries.told(trace)
                    listed.told = message.SerializeToString()
                else:
                    listed.entry = self._summaries.entry(trace)
                    listed.retirable = through is not None and self._reader.retirable(
                        trace, through
                    )
                size += len(listed.entry) + len(listed.told)
        return response

    async def retirable(self, request: parts.RetirableRequest) -> parts.RetirableResponse:
        """Return the parts of traces that may be retired."""
        self._lifecycle.check_ready()
        response = parts.RetirableResponse(judged=self._journal.applied)
        newest_first = self._journal.state.traces.newest_first(request.run)
        async for trace in IN_TURNS.over(
            prepared(newest_first, partial(prepare_end, self._reader))
        ):
            if (
                trace
                and self._finder.exists(trace)
                and self._reader.retirable(trace, request.through)
            ):
                if has_unknown_version(trace):
                    response.unknown.append(len(response.trace_ids))
                response.trace_ids.append(trace.key[1])
        return response

    async def forget(self, request: parts.ForgetRequest) -> parts.ForgetResponse:
        """Delete parts of traces."""
        self._lifecycle.check_ready()
        count = await self._retention.forget(
            request.run,
            request.trace_ids,
            request.reason,
            request.token,
            judged=request.judged,
            begun=(request.since, request.until),
        )
        return parts.ForgetResponse(count=count)

    async def renew(self, request: parts.RenewRequest) -> parts.RenewResponse:
        """Set leases of parts of traces."""
        self._lifecycle.check_ready()
        known = self._journal.state.traces.traces
        held = [i for i, t in enumerate(request.trace_ids) if (request.run, t) in known]
        some = [request.trace_ids[i] for i in held]
        now = self._journal.clock.now()
        record = encode_renew(now, request.run, some, request.ttl, keep_longer=request.keep_longer)
        await self._journal.append(record)
        return parts.RenewResponse(indexes=held)

    async def agents(self, request: pb.ListAgentsRequest) -> pb.ListAgentsResponse:
        """Return the agents of a run that feed this worker."""
        self._lifecycle.check_ready()
        writers = [w for w in self._journal.state.writers.values() if w.key.run == request.run]
        writers.sort(key=lambda writer: writer.opened)
        return pb.ListAgentsResponse(agents=[self._agents.describe(w, None) for w in writers])

    async def history(self, request: pb.GetHistoryRequest) -> pb.GetHistoryResponse:
        """Return the last minutes of a run in this worker."""
        self._lifecycle.check_ready()
        return self._history.of(request.run, request.after)

    async def agreement(self, request: pb.ListAgreementRequest) -> pb.ListAgreementResponse:
        """Return the reports of trainers that this worker has."""
        self._lifecycle.check_ready()
        return agreements.page(self._journal.state.agreements, request)

    async def info(self, request: pb.GetServerInfoRequest) -> pb.GetServerInfoResponse:
        """Return this worker's part of a run, and the runs that it has."""
        self._lifecycle.check_ready()
        state = self._journal.state
        return pb.GetServerInfoResponse(
            num_agents=sum(key.run == request.run for key in self._agents.connected),
            num_traces=len(state.traces.of_run.get(request.run, ())),
            run_bytes=state.run_bytes[request.run],
            run_quota_bytes=self._config.quota_of(request.run),
            runs=sorted(state.runs()),
        )


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())
