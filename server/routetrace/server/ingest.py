"""The ingest service: streams of chunks in, acknowledgements out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

import grpc

from routetrace.server.chunk import (
    MAX_POSITION,
    check_begin,
    check_id,
    check_payload,
    check_sums,
    parse_header,
)
from routetrace.server.record import Sums, encode_chunk, encode_control, layout_to_hex
from routetrace.server.replies import Answer, Replies
from routetrace.server.rpc import Context, streaming, unary
from routetrace.server.state import Writer
from routetrace.server.trace_index import WriterKey
from routetrace.server.wire import Chunk, Request, read_request
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.errors import (
    Corrupt,
    Fenced,
    InvalidArgument,
    NotFound,
    OutOfSequence,
    Overloaded,
    RouteTraceError,
    Unavailable,
)
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import DIGEST, unpack

if TYPE_CHECKING:
    from routetrace.server.core import Core

#: Chunks of one stream that may wait for their commit; more are left in the socket.
WINDOW = 32

#: Slots of one engine: 24 bytes each.
MAX_SLOTS = 1 << 25
MAX_BLOCK_SIZE = 1 << 16

_RESEND_MS = 50

_HELLO_SECONDS = 10

_END = object()

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Session:
    """One open stream of one writer epoch."""

    writer: Writer
    next_sequence: int
    in_flight: dict[int, list[Answer]] = field(default_factory=dict)
    """By sequence number: the answer to a chunk that is not applied yet, and those to chunks that
    came under the same number since."""
    over: bool = False
    """Whether it has ended, or another stream speaks for this writer now: nothing counts any more
    that was not on its way to the store before."""
    beats: bool = False
    """Whether it gives signs of life when there is nothing else to say."""
    held: bool = False
    """Whether we do not listen at the moment, as too much waits for its commit."""


class IngestServicer:
    """routetrace.v1.IngestService."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._state = core.state
        self._journal = core.journal
        self._replies: set[Replies] = set()
        self._granted: dict[WriterKey, int] = {}

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service; what agents send is read by `wire.py`."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Ingest": grpc.stream_stream_rpc_method_handler(
                self.Ingest, read_request, pb.IngestResponse.SerializeToString
            ),
            "BindRequest": grpc.unary_unary_rpc_method_handler(
                self.BindRequest,
                pb.BindRequestRequest.FromString,
                pb.BindRequestResponse.SerializeToString,
            ),
        }
        name = pb.DESCRIPTOR.services_by_name["IngestService"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))

    def stop(self) -> None:
        """Ends the open streams, behind the answers that are under way."""
        for replies in self._replies:
            replies.end(Unavailable("the server is draining", retry_after=0.5))

    # ------------------------------------------------------------------ the stream

    @streaming
    async def Ingest(  # noqa: N802, D102
        self, request_iterator: AsyncIterator[Request], context: Context
    ) -> AsyncIterator[pb.IngestResponse]:
        self._core.check_ready()
        self._core.admission.check_agents(len(self._replies))
        try:
            first = await asyncio.wait_for(anext(request_iterator, _END), _HELLO_SECONDS)
        except asyncio.TimeoutError:
            raise InvalidArgument(
                field="message", value="none", expected=f"hello, within {_HELLO_SECONDS} seconds"
            ) from None
        if first is _END:
            return
        if not isinstance(first, pb.Hello):
            raise InvalidArgument(field="message", value=_name_of(first), expected="hello, first")
        self._core.access.check(context, "ingest", first.run)
        session = await self._open(first)
        replies = Replies(WINDOW)
        self._replies.add(replies)
        reader = asyncio.create_task(self._read(session, request_iterator, replies, context))
        try:
            self._core.check_ready()  # who drains ends the streams that are there by then
            yield pb.IngestResponse(
                welcome=pb.Welcome(
                    epoch=session.writer.epoch,
                    next_sequence=session.next_sequence,
                    max_chunk_bytes=self._core.config.max_chunk_bytes,
                    heartbeat_ms=self._core.config.heartbeat_ms,
                )
            )
            while (reply := await replies.next()) is not None:
                response, count = reply
                yield response
                replies.sent(count)
        finally:
            reader.cancel()
            self._replies.discard(replies)
            self._close(session)

    async def _read(
        self,
        session: Session,
        requests: AsyncIterator[Request],
        replies: Replies,
        context: Context,
    ) -> None:
        """Takes chunks as they come, while earlier ones still wait for their commit."""
        try:
            async for request in requests:
                if session.over or session.writer is not self._state.writers.get(
                    session.writer.key
                ):
                    raise Fenced(
                        field="epoch",
                        value=session.writer.epoch,
                        expected="the newest epoch and stream of this engine and shard",
                    )
                # A token may be taken back while its stream is open.
                self._core.access.check(context, "ingest", session.writer.key.run)
                self._core.agents.seen(session)
                if isinstance(request, Chunk):
                    session.held = True
                    await replies.room()
                    await self._core.admission.take_in(request.nbytes)
                    session.held = False
                    self._core.agents.seen(session)
                    self._take(session, request, replies.expect(request))
                elif isinstance(request, pb.Heartbeat):
                    self._core.agents.heartbeat(session, request)
                else:
                    raise InvalidArgument(
                        field="message",
                        value=_name_of(request),
                        expected="chunk or heartbeat, after the first",
                    )
        except RouteTraceError as error:
            replies.end(error)
        else:
            replies.end()

    async def _open(self, hello: pb.Hello) -> Session:
        check_id("run", hello.run)
        check_id("engine_id", hello.engine_id)
        check_id("shard", hello.shard, required=False)
        # Without it, nothing tells the parts of one boot of an engine from those of another.
        check_id("boot_id", hello.boot_id, required=bool(hello.shard))
        layout = RoutingLayout.from_proto(hello.layout)
        if hello.block_size > MAX_BLOCK_SIZE:
            raise InvalidArgument(
                field="block_size", value=hello.block_size, expected=f"at most {MAX_BLOCK_SIZE}"
            )
        num_slots = hello.block_size * hello.num_blocks
        if num_slots > MAX_SLOTS:
            raise InvalidArgument(
                field="num_blocks", value=hello.num_blocks, expected=f"at most {MAX_SLOTS} slots"
            )
        key = WriterKey(hello.run, hello.engine_id, hello.shard)
        writer = self._state.writers.get(key)
        newest = self._state.epochs.get(key, 0)
        if hello.epoch and writer and hello.epoch < newest:
            raise Fenced(field="epoch", value=hello.epoch, expected=f"{newest}, the newest")
        if writer is None or hello.epoch != writer.epoch:
            self._core.retention.check_memory()
            if writer is None:
                self._core.admission.check_writers(len(self._state.writers))
            now = self._journal.clock.now()
            # Epochs ascend even if the store was lost, as long as the clock is roughly right; and
            # two that open at once get different ones, though neither is committed yet.
            epoch = max(newest + 1, self._granted.get(key, 0) + 1, int(now * 1000))
            self._granted[key] = epoch
            writer = await self._journal.append(
                encode_control(
                    "open",
                    now,
                    writer=key,
                    epoch=epoch,
                    boot_id=hello.boot_id or f"epoch {epoch}",
                    layout=layout_to_hex(layout),
                    block_size=hello.block_size if num_slots else 0,
                    num_blocks=hello.num_blocks if num_slots else 0,
                )
            )
            _log.info("writer %s opened epoch %d: %s", tuple(key), writer.epoch, layout)
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
        self._core.agents.opened(session := Session(writer, 0))
        try:
            # What earlier streams had under way must be in or out before this one hears where to
            # go on.
            await self._journal.settled()
        except BaseException:  # the agent has left meanwhile
            self._close(session)
            raise
        session.next_sequence = writer.sequence + 1
        return session

    def _close(self, session: Session) -> None:
        session.over = True
        self._core.agents.closed(session)

    def _take(self, session: Session, chunk: Chunk, answer: Answer) -> None:
        """Stores one chunk; it is answered once it is applied, or refused."""
        try:
            self._store(session, chunk, answer)
        except Exception as error:
            self._refuse(session, answer, error)

    def _refuse(self, session: Session, answer: Answer, error: Exception) -> None:
        if not isinstance(error, RouteTraceError):
            _log.error("chunk %d can not be taken", answer.sequence, exc_info=error)
            error = Unavailable(f"an error of the server: {error!r}", retry_after=1.0)
        detail = error.to_detail()
        if isinstance(error, (Corrupt, OutOfSequence)):
            # Damaged on the way, or too early: the same bytes are welcome again.
            detail.retry_after_ms = _RESEND_MS
        self._core.metrics.rejected.labels(_kind_name(detail)).inc()
        writer = tuple(session.writer.key)
        _log.warning("chunk %d of writer %s refused: %s", answer.sequence, writer, error)
        self._answer(answer, detail)

    def _answer(self, answer: Answer, reject: pb.ErrorDetail | None = None) -> None:
        self._core.admission.committed(answer.nbytes)
        answer.give(reject)

    def _store(self, session: Session, chunk: Chunk, answer: Answer) -> None:
        writer, sequence, sums = session.writer, chunk.sequence, answer.sums
        if pending := session.in_flight.get(sequence):
            pending.append(answer)  # what becomes of the first one decides
            return
        if sequence <= writer.sequence:
            self._know_again(session, writer.recent.get(sequence), answer)
            return
        if session.over:
            # The stream that took over was told where to go on before this could be stored.
            raise Fenced(field="epoch", value=writer.epoch, expected="the newest stream of it")
        if sequence != session.next_sequence:
            raise OutOfSequence(
                field="sequence", value=sequence, expected=str(session.next_sequence)
            )
        if chunk.nbytes > self._core.config.max_chunk_bytes:
            raise InvalidArgument(
                field="chunk",
                value=f"{chunk.nbytes} bytes",
                expected=f"at most max_chunk_bytes = {self._core.config.max_chunk_bytes}",
            )
        self._core.retention.check_room(writer.key.run)
        running = check_sums(chunk)
        parsed = parse_header(chunk.header, writer.layout, writer.slots)
        check_payload(parsed, chunk.payload, writer.layout)
        record = encode_chunk(
            writer.key, writer.epoch, sequence, sums, self._journal.clock.now(), chunk.header
        )
        begun, rows = monotonic(), sum(parsed.frame_rows.tolist())

        def done(counted: bool | None, error: Exception | None) -> None:
            self._core.metrics.commit.observe(monotonic() - begun)
            self._stored(session, sequence, rows if counted else None, error)

        try:
            self._journal.submit(record, done, chunk.payload, running, parsed)
        except Overloaded:
            self._core.retention.no_room()
            raise
        session.in_flight[sequence] = [answer]
        session.next_sequence = sequence + 1

    def _stored(
        self, session: Session, sequence: int, rows: int | None, error: Exception | None
    ) -> None:
        """A chunk and its rows are stored and applied; None: they do not count."""
        first, *others = session.in_flight.pop(sequence)
        if rows is None:
            session.next_sequence = min(session.next_sequence, sequence)
            if isinstance(error, Overloaded):
                self._core.retention.no_room()
            expected = str(session.writer.sequence + 1)
            error = error or OutOfSequence(field="sequence", value=sequence, expected=expected)
            for answer in (first, *others):
                self._refuse(session, answer, error)
            return
        metrics = self._core.metrics
        metrics.chunks.inc()
        metrics.rows.inc(rows)
        metrics.ingest_bytes.inc(first.nbytes)
        self._answer(first)
        for answer in others:
            self._know_again(session, first.sums, answer)

    def _know_again(self, session: Session, known: Sums | None, answer: Answer) -> None:
        """A chunk is stored already, with these checksums; they are forgotten after a while."""
        if known in (None, answer.sums):
            self._core.metrics.duplicates.inc()
            self._answer(answer)
            return
        self._core.metrics.conflicts.inc()
        conflict = InvalidArgument(
            field="sequence",
            value=answer.sequence,
            expected="a new number for new content; this one is stored with another",
        )
        self._refuse(session, answer, conflict)

    # ------------------------------------------------------------------ binding

    @unary
    async def BindRequest(  # noqa: N802, D102
        self, request: pb.BindRequestRequest, context: Context
    ) -> pb.BindRequestResponse:
        self._core.access.check(context, "ingest", request.run)
        self._core.check_ready()
        check_id("request_id", request.request_id)
        check_begin(request.begin)
        writers = self._state.engine_writers(request.run, request.engine_id)
        if not writers:
            raise NotFound(
                field="engine_id", value=request.engine_id, expected=f"an engine of {request.run!r}"
            )
        if request.num_tokens < 1:
            raise InvalidArgument(
                field="num_tokens", value=request.num_tokens, expected="at least 1"
            )
        num_computed_tokens = request.num_tokens - 1
        if request.HasField("num_computed_tokens"):
            num_computed_tokens = request.num_computed_tokens
        if num_computed_tokens >= request.num_tokens:
            raise InvalidArgument(
                field="num_computed_tokens",
                value=request.num_computed_tokens,
                expected=f"less than num_tokens = {request.num_tokens}",
            )
        if request.num_tokens > MAX_POSITION:
            raise InvalidArgument(
                field="num_tokens", value=request.num_tokens, expected=f"at most {MAX_POSITION}"
            )
        digests = unpack(request.token_digests, DIGEST, "token_digests")
        if len(digests) > request.num_tokens:
            raise InvalidArgument(
                field="token_digests",
                value=f"{len(digests)} digests",
                expected=f"at most num_tokens = {request.num_tokens}",
            )
        for writer in writers:
            check_blocks(writer, request.block_ids)
            strange = [b for b in request.block_ids if b >= writer.slots.num_blocks]
            if strange:
                raise InvalidArgument(
                    field="block_ids",
                    value=strange[:8],
                    expected=f"ids below num_blocks = {writer.slots.num_blocks}",
                )
            while writer.step < request.step:
                self._core.check_ready()
                await self._journal.changes.wait(writer.key, timeout=5)
        begin = pb.RequestBegin()
        begin.CopyFrom(request.begin)
        begin.trace_id = begin.trace_id or request.request_id
        await self._journal.append(
            encode_control(
                "bind",
                self._journal.clock.now(),
                run=request.run,
                engine_id=request.engine_id,
                request_id=request.request_id,
                block_ids=list(request.block_ids),
                num_tokens=request.num_tokens,
                num_computed_tokens=num_computed_tokens,
                step=request.step,
                digests=request.token_digests.hex(),
                begin=begin.SerializeToString().hex(),
            )
        )
        trace, incarnation = self._core.reader.find(request.run, begin.trace_id)
        return pb.BindRequestResponse(trace=self._core.reader.describe(trace, incarnation))


def _name_of(request: object) -> str:
    """What a message is, in words."""
    names = {pb.Hello: "hello", pb.Heartbeat: "heartbeat", Chunk: "chunk"}
    return names.get(type(request), "None")


def check_blocks(writer: Writer, block_ids: Sequence[int]) -> None:
    """Raises InvalidArgument if a request can not hold so many blocks."""
    if len(block_ids) > writer.slots.num_blocks:
        raise InvalidArgument(
            field="block_ids",
            value=f"{len(block_ids)} ids",
            expected=f"at most num_blocks = {writer.slots.num_blocks}",
        )


def _kind_name(detail: pb.ErrorDetail) -> str:
    """A label: "out_of_sequence", "corrupt", "overloaded", ..."""
    return pb.ErrorKind.Name(detail.kind).removeprefix("ERROR_KIND_").lower()
