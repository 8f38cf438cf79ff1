"""Ingest service: streams of chunks in, acks out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack
from time import monotonic
from typing import Any

import grpc
import numpy as np

from routetrace.codec.records import U32
from routetrace.common.errors import InvalidArgument, NotFound, counted, quoted
from routetrace.common.layout import ModelLayout
from routetrace.common.limits import check_id, check_slots
from routetrace.common.seals import sealed
from routetrace.server.access.admission import Admission
from routetrace.server.access.control import Access
from routetrace.server.access.lifecycle import Lifecycle
from routetrace.server.access.partition import Partition
from routetrace.server.common.metrics import Metrics
from routetrace.server.common.rpc import Context, Unparsed, limited, received, streaming, unary
from routetrace.server.common.slices import numbers_in_turns
from routetrace.server.index.agents import Agents
from routetrace.server.index.chunk import MAX_BLOCKS, blocks_of
from routetrace.server.index.demand import Demand
from routetrace.server.index.history import History
from routetrace.server.index.journal import Journal
from routetrace.server.index.owners import owner_of
from routetrace.server.index.records.record import encode_bind, encode_open
from routetrace.server.index.state import engine_key
from routetrace.server.index.traces.sources import WriterKey
from routetrace.server.index.writer import Writer
from routetrace.server.ingest.binding import check_bind
from routetrace.server.ingest.fencing import Fencing
from routetrace.server.ingest.intake import IngestSession, Intake
from routetrace.server.ingest.replies import Replies
from routetrace.server.retention.retention import Retention
from routetrace.server.retention.room import Room
from routetrace.server.rows.preparing import prepare
from routetrace.server.rows.reader import Reader
from routetrace.server.settings.config import ServerConfig
from routetrace.server.spread.gathering import Gathering
from routetrace.server.wire.messages import Chunk, Request, read_request
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum uncommitted chunks of one stream; more stay in the socket.
WINDOW = 32

_HELLO_SECONDS = 10

#: Share of a call's deadline for which it waits for an agent and its rows; seconds without one.
_WAIT_SHARE = 0.9
_WAIT_SECONDS = 60.0
_LONGEST_WAIT_SECONDS = 600.0

#: Seconds after which a waiting bind is checked again without a change.
_LOOK_AGAIN_SECONDS = 1.0


#: Maximum size of a BindRequestRequest; 2^20 block ids take up to 3 MiB. A waiting one counts as
#: at least the second number of bytes.
MAX_BIND_BYTES = 4 << 20
_LEAST_BIND_BYTES = 1 << 14

_END = object()

_log = logging.getLogger(__name__)


class IngestServicer:
    """routetrace.v1.IngestService."""

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
        room: Room,
        metrics: Metrics,
        partition: Partition,
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._access = access
        self._admission = admission
        self._agents = agents
        self._demand = demand
        self._gathering = gathering
        self._history = history
        self._journal = journal
        self._state = journal.state
        self._reader = reader
        self._partition = partition
        self._room = room
        self._fencing = Fencing(journal.state, agents, metrics)
        self._restarted = metrics.restarted
        self._intake = Intake(
            config=config,
            admission=admission,
            fencing=self._fencing,
            history=history,
            journal=journal,
            retention=retention,
            room=room,
            metrics=metrics,
        )
        self._replies: set[Replies] = set()
        self._granted: dict[WriterKey, int] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service; requests are parsed by `wire/messages.py`."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Ingest": grpc.stream_stream_rpc_method_handler(
                self.Ingest, read_request, pb.IngestResponse.SerializeToString
            ),
            "BindRequest": grpc.unary_unary_rpc_method_handler(
                self.BindRequest,
                limited(pb.BindRequestRequest, MAX_BIND_BYTES),
                sealed,
            ),
        }
        name = pb.DESCRIPTOR.services_by_name["IngestService"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))

    def stop(self) -> None:
        """End the open streams after their pending replies."""
        for replies in self._replies:
            replies.end(self._lifecycle.unavailable())

    # ------------------------------------------------------------------ the stream

    @streaming
    async def Ingest(  # noqa: N802, D102
        self, _: AsyncIterator[Request], context: Context
    ) -> AsyncIterator[pb.IngestResponse]:
        requests = received(context, "IngestRequest")
        try:
            first = await asyncio.wait_for(anext(requests, _END), _HELLO_SECONDS)
        except asyncio.TimeoutError:
            raise InvalidArgument(
                field="message", value="none", expected=f"hello, within {_HELLO_SECONDS} seconds"
            ) from None
        if first is _END:
            return
        if not isinstance(first, pb.Hello):
            raise InvalidArgument(field="message", value=_name_of(first), expected="hello, first")
        owner = self._access.check(context, "ingest", first.run, first.engine_id)
        self._partition.check(first.run, first.engine_id)
        self._lifecycle.check_ready()
        with self._admission.agents.hold(owner):
            async for response in self._serve(first, requests, context):
                yield response

    async def _serve(
        self, hello: pb.Hello, requests: AsyncIterator[Request], context: Context
    ) -> AsyncIterator[pb.IngestResponse]:
        """Yield the messages to an agent, from its Welcome on."""
        session = await self._open(hello, self._access.token_of(context))
        replies = Replies(WINDOW)
        self._replies.add(replies)
        reader = asyncio.create_task(self._read(session, requests, replies, context))
        demand = ExitStack()
        try:
            self._lifecycle.check_ready()  # `stop` ends only streams that are registered
            awaited = demand.enter_context(self._demand.stream(session.writer.key, replies.pace))
            yield pb.IngestResponse(
                welcome=pb.Welcome(
                    epoch=session.writer.epoch,
                    next_sequence=session.next_sequence,
                    max_chunk_bytes=self._config.max_chunk_bytes,
                    heartbeat_ms=self._config.heartbeat_ms,
                    awaited=pb.Awaited.ValueType(awaited),
                )
            )
            while (reply := await replies.next()) is not None:
                response, count = reply
                yield response
                replies.sent(count)
        finally:
            reader.cancel()
            demand.close()
            self._replies.discard(replies)
            self._agents.closed(session)

    async def _read(
        self,
        session: IngestSession,
        requests: AsyncIterator[Request],
        replies: Replies,
        context: Context,
    ) -> None:
        """Take chunks as they arrive, while earlier ones still wait for their commit."""
        try:
            async for request in requests:
                self._fencing.check_stream(session)
                # A token may be revoked while its stream is open.
                key = session.writer.key
                self._access.check(context, "ingest", key.run, key.engine_id)
                self._agents.seen(session)
                if isinstance(request, Chunk):
                    session.hold()
                    await replies.room()
                    await self._admission.take_in(request.nbytes)
                    session.release()
                    self._agents.seen(session)
                    try:
                        parsed = await self._intake.parse(session, request)
                    except BaseException:  # the agent has left meanwhile
                        self._admission.committed(request.nbytes)
                        raise
                    self._intake.take(session, request, replies.expect(request), parsed)
                elif isinstance(request, pb.Heartbeat):
                    self._agents.heartbeat(session, request)
                    self._history.heard(key, _lost(request))
                else:
                    raise InvalidArgument(
                        field="message",
                        value=_name_of(request),
                        expected="chunk or heartbeat, after the first",
                    )
        except Exception as error:  # the stream raises it
            replies.end(error)
        else:
            replies.end()

    async def _open(self, hello: pb.Hello, token: str) -> IngestSession:
        check_id("run", hello.run)
        check_id("engine_id", hello.engine_id)
        check_id("shard", hello.shard, required=False)
        # Shards of one boot are recognized by it.
        check_id("boot_id", hello.boot_id, required=bool(hello.shard))
        layout = ModelLayout.from_proto(hello.layout)
        check_slots(hello.block_size, hello.num_blocks)
        num_slots = hello.block_size * hello.num_blocks
        key = WriterKey(hello.run, hello.engine_id, hello.shard)
        with self._agents.opening(key):
            return await self._session(key, hello, layout, num_slots, token)

    async def _session(
        self, key: WriterKey, hello: pb.Hello, layout: ModelLayout, num_slots: int, token: str
    ) -> IngestSession:
        """Open a stream of a writer, in a new epoch unless the agent knows the current one."""
        writer = self._state.writers.get(key)
        newest = self._state.epochs.get(key, 0)
        self._fencing.check_hello(key, hello)
        if writer is None or hello.epoch != writer.epoch:
            self._room.check_memory()
            self._room.check_writer(owner_of(token, key.run), writer, num_slots)
            now = self._journal.clock.now()
            # Epochs ascend even if the store was lost, if the clock is roughly right; streams that
            # open at once get different epochs before either is committed.
            epoch = max(newest + 1, self._granted.get(key, 0) + 1, int(now * 1000))
            self._granted[key] = epoch
            record = encode_open(
                now,
                key,
                epoch=epoch,
                boot_id=hello.boot_id or f"epoch {epoch}",
                layout=layout,
                block_size=hello.block_size if num_slots else 0,
                num_blocks=hello.num_blocks if num_slots else 0,
                token=token,
                model=hello.model,
                says_unknown_versions=hello.says_unknown_versions,
                restarted=hello.former_epoch > 0,
            )
            writer = await self._journal.append(record)
            if self._granted.get(key) == epoch:  # else another stream opens
                del self._granted[key]
            _log.info("%s opened epoch %d: %s", key, writer.epoch, _described(hello, layout))
            if hello.former_epoch:
                self._restarted.labels(key.run).inc()
        elif hello.boot_id and hello.boot_id != writer.boot_id:
            raise InvalidArgument(
                field="boot_id",
                value=hello.boot_id,
                expected=f"{writer.boot_id!r}, that of epoch {writer.epoch}",
            )
        elif layout != writer.layout:
            raise InvalidArgument(
                field="layout", value=layout, expected=f"that of epoch {writer.epoch}"
            )
        self._agents.opened(session := IngestSession(writer), hello.attributes)
        try:
            # Chunks of earlier streams must be applied or refused before `next_sequence` is known.
            await self._journal.settled()
        except BaseException:  # the agent has left meanwhile
            self._agents.closed(session)
            raise
        session.next_sequence = writer.sequence + 1
        return session

    # ------------------------------------------------------------------ binding

    async def parsed(self, request: Unparsed, context: Context) -> Any:
        """Parse a long message; see `Admission.parsed`."""
        return await self._admission.parsed(self._access.owner_of(context), request)

    @unary
    async def BindRequest(  # noqa: N802, D102
        self, request: pb.BindRequestRequest, context: Context
    ) -> pb.BindRequestResponse:
        owner = self._access.check(context, "ingest", request.run, request.engine_id)
        self._partition.check(request.run, request.engine_id)
        self._lifecycle.check_ready()
        self._room.check_memory()
        num_computed_tokens = check_bind(request)
        trace_id = request.begin.trace_id or request.request_id
        size = 4 * len(request.block_ids) + len(request.token_digests)
        with self._admission.bind(owner, max(size, _LEAST_BIND_BYTES)):
            most = min(request.num_tokens, MAX_BLOCKS)
            turns = self._admission.pace.turns(owner)
            given = await numbers_in_turns(request.block_ids, most, turns)
            del request.block_ids[:]  # it may wait for long
            blocks = np.zeros(0, U32)
            for writer in await self._shards(request, context):
                needed = blocks_of(writer.slots, given, request.num_tokens)
                blocks = max(blocks, needed, key=len)
            now = self._journal.clock.now()
            record = encode_bind(now, request, trace_id, blocks, num_computed_tokens)
            await self._journal.append(record)
        whole = await self._gathering.trace(request.run, trace_id)
        trace = whole.trace if whole else self._state.traces.traces.get((request.run, trace_id))
        if trace is not None:
            async for _ in turns.over(prepare(self._reader, trace)):
                pass
        known = self._reader.find(request.run, trace_id, trace=whole and whole.trace)
        return pb.BindRequestResponse(trace=self._reader.describe(known))

    async def _shards(self, request: pb.BindRequestRequest, context: Context) -> list[Writer]:
        """Wait until all shards of an engine have reported a step; return their writers.

        Raises:
            NotFound: if none of them connects, or one does not report the step, in time.
        """
        run, engine_id, step = request.run, request.engine_id, request.step
        until: float | None = None
        while True:
            writers = self._state.engine_writers(run, engine_id)
            behind = next((w for w in writers if w.step < step), None)
            if writers and behind is None:
                return writers
            if until is None:
                remaining = context.time_remaining()
                seconds = _WAIT_SECONDS if remaining is None else _WAIT_SHARE * remaining
                until = monotonic() + min(seconds, _LONGEST_WAIT_SECONDS)
            left = until - monotonic()
            if left <= 0 and behind is None:
                raise NotFound(
                    field="engine_id",
                    value=engine_id,
                    expected=f"an engine of run {run!r} whose agent has connected",
                )
            if left <= 0 and behind is not None:
                raise NotFound(
                    field="step",
                    value=step,
                    expected=f"a step that engine {engine_id!r} reports while the call lasts; its "
                    f"last one is {behind.step}",
                )
            self._lifecycle.check_ready()
            key = behind.key if behind else engine_key(run, engine_id)
            with self._demand.waiting([behind.key] if behind else [], pb.AWAITED_ROWS):
                await self._journal.changes.wait(key, min(left, _LOOK_AGAIN_SECONDS))
            # The token may be revoked meanwhile.
            self._access.check(context, "ingest", run, engine_id)


def _described(hello: pb.Hello, layout: ModelLayout) -> str:
    """Return the columns and the origin of an agent's rows, for the log."""
    layers, of = len(layout.layer_ids), len(layout.moe_layer_ids)
    captured = ("" if layers == of else f"{layers} of ") + counted(of, "MoE layer")
    text = f"{captured}, top-{layout.top_k} of {layout.num_experts} experts"
    host = hello.attributes.get("host", "")
    return f"{text}, on host {quoted(host)}" if host else text


def _name_of(request: object) -> str:
    """Return the name of a message for errors."""
    names = {pb.Hello: "hello", pb.Heartbeat: "heartbeat", Chunk: "chunk"}
    return names.get(type(request), "None")


def _lost(report: pb.Heartbeat) -> int:
    """Return the rows that an agent dropped, but for drafts that its engine took back."""
    return sum(rows for reason, rows in report.dropped_rows.items() if reason != "rewound")
