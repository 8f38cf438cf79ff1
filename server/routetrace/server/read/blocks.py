"""Rows behind blocks of an engine, as a trace of their own."""

from __future__ import annotations

from collections import deque

from routetrace.common.errors import InvalidArgument, NotFound, Overloaded, quoted
from routetrace.server.common.slices import Turns, in_slices, numbers_in_turns
from routetrace.server.index.chunk import blocks_of, num_needed
from routetrace.server.index.journal import Journal
from routetrace.server.index.traces.sources import Source
from routetrace.server.index.traces.trace import Trace
from routetrace.server.index.writer import Writer
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum attempts to read blocks while their slots change, and seconds after which a caller may
#: try again after them.
_ATTEMPTS = 3
_RETRY_SECONDS = 1.0

#: Maximum positions for which the last attempt reads all slots at once.
_MAX_AT_ONCE = 1 << 17


async def trace_of_blocks(journal: Journal, request: pb.GetBlocksRequest, turns: Turns) -> Trace:
    """Return the rows behind blocks, as a request that ended with them.

    Raises:
        NotFound: if there is no such engine.
        InvalidArgument: if the engine reports no KV slots, or the blocks are too few, or not of it.
        Overloaded: if their slots changed during each attempt.
    """
    # Refused before the ids, which may be millions, are converted.
    writers = _writers_of(journal, request)
    most = max(num_needed(w.slots, len(request.block_ids), request.num_tokens) for w in writers)
    given = await numbers_in_turns(request.block_ids, max(most, 1), turns)
    for left in reversed(range(_ATTEMPTS)):
        writers = _writers_of(journal, request)
        now = journal.clock.now()
        trace = Trace((request.run, ""), 0, 0, now, now, now)
        before = [(writer, writer.slots.changes) for writer in writers]
        for writer in writers:
            capacity = len(request.block_ids) * writer.slots.block_size
            if request.num_tokens > capacity:
                raise InvalidArgument(
                    field="num_tokens",
                    value=request.num_tokens,
                    expected=f"at most {capacity}, the slots of the blocks",
                )
            blocks = blocks_of(writer.slots, given, request.num_tokens)
            source = Source(writer.key, writer.epoch, "", "blocks", writer.layout)
            source.ended, source.num_tokens = True, request.num_tokens + 1
            pieces = journal.state.inherit(writer, source, blocks, request.num_tokens)
            if request.num_tokens > _MAX_AT_ONCE:
                async for _ in turns.over(pieces):
                    pass
            elif left:
                async for _ in in_slices(pieces):
                    pass
            else:
                deque(pieces, maxlen=0)
            trace.sources.append(source)
        # Rows of two moments may be those of two requests.
        if all(w.slots.changes == changes for w, changes in before):
            return trace
    raise Overloaded(
        "the slots of the blocks change while they are read; retry later",
        field="block_ids",
        value=f"{len(given)} ids",
        expected="blocks that the engine does not write",
        retry_after=_RETRY_SECONDS,
    )


def _writers_of(journal: Journal, request: pb.GetBlocksRequest) -> list[Writer]:
    """Return the writers of the engine.

    Raises:
        NotFound: if there are none.
        InvalidArgument: if one of them reports no KV slots.
    """
    writers = journal.state.engine_writers(request.run, request.engine_id)
    if not writers:
        raise NotFound(
            field="engine_id",
            value=quoted(request.engine_id),
            expected=f"an engine of run {request.run!r}",
        )
    if not all(writer.slots.block_size for writer in writers):
        remedy = "set block_size and num_blocks"
        raise InvalidArgument(
            f"engine {request.engine_id!r} reports no KV slots; {remedy}",
            field="engine_id",
            value=quoted(request.engine_id),
            expected="an engine that reports KV slots",
            remedy=remedy,
        )
    return writers
