"""Parts of traces in the messages between workers, and traces made up of parts.

A worker has the part of a trace that its engines reported. Reports are merged in the order in which
they began, as one worker would have got them; all else is derived from them as for any trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from routetrace.codec.records import U32
from routetrace.common.layout import ModelLayout
from routetrace.server.common.slices import IN_TURNS, in_slices
from routetrace.server.index.agents import Agents
from routetrace.server.index.records.record import layout_from_stored, layout_to_stored
from routetrace.server.index.state import Frames, State
from routetrace.server.index.traces.sources import Source, TraceKey
from routetrace.server.index.traces.spans import SpanList
from routetrace.server.index.traces.tombstones import Fate
from routetrace.server.index.traces.trace import Trace, dump_trace, load_trace
from routetrace.server.rows.remote import UNKNOWN_CHUNK, RemoteChunks
from routetrace.stored import parts_pb2 as parts


@dataclass
class Places:
    """Workers with parts of one trace, and its deletions in others."""

    workers: list[int] = field(default_factory=list)
    fates: list[Fate] = field(default_factory=list)
    has_run: bool = False
    """Whether any worker has traces or writers of the run."""


@dataclass
class Found:
    """Parts of one trace, by worker, and its deletions."""

    parts: dict[int, Trace] = field(default_factory=dict)
    fates: list[Fate] = field(default_factory=list)
    marks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """`mark` of each part when it was found."""

    def add(self, worker: int, part: Trace) -> None:
        """Add the part of a worker."""
        self.parts[worker], self.marks[worker] = part, mark(part)


def mark(part: Trace) -> tuple[int, ...]:
    """Return what changes only if a request of a part begins, is dropped or is deleted."""
    return part.serial, part.num_dropped, len(part.sources)


def located(state: State, request: parts.LocateRequest) -> parts.LocateResponse:
    """Return which traces this worker has parts of."""
    response = parts.LocateResponse(has_run=request.run in state.runs())
    for index, trace_id in enumerate(request.trace_ids):
        key = request.run, trace_id
        trace = state.traces.traces.get(key)
        if trace is not None and trace.sources:
            response.here.append(index)
        elif fate := state.tombstones.fate(key):
            response.deleted.add(run=request.run, trace_id=trace_id, **fate._asdict())
    return response


async def pack(
    state: State,
    agents: Agents,
    request: parts.CollectRequest,
    keep: Callable[[Set[int]], object],
) -> parts.CollectResponse:
    """Return the parts of traces that this worker has; call `keep` with the chunks of each."""
    response = parts.CollectResponse()
    layouts: dict[ModelLayout, int] = {}
    packed: set[int] = set()
    async for index, trace_id in IN_TURNS.over(enumerate(request.trace_ids)):
        key = request.run, trace_id
        trace = state.traces.traces.get(key)
        if trace is None or not trace.sources:
            if fate := state.tombstones.fate(key):
                response.deleted.add(run=request.run, trace_id=trace_id, **fate._asdict())
            continue
        for source in trace.sources:
            layouts.setdefault(source.layout, len(layouts))
        part = response.parts.add(index=index, running=map(agents.running, trace.sources))
        dump_trace(part.trace, trace, layouts)
        chunks = set(trace.chunks()) & state.frames.keys()
        keep(chunks)
        for number in chunks - packed:
            held = state.frames[number]
            layout = layouts.setdefault(held.layout, len(layouts))
            offsets = held.offsets.tobytes()
            response.chunks.add(number=number, offsets=offsets, layout=layout, run=held.run)
        packed |= chunks
    response.layouts.extend(map(layout_to_stored, layouts))
    return response


async def unpack(
    worker: int,
    request: parts.CollectRequest,
    response: parts.CollectResponse,
    chunks: RemoteChunks,
    found: Sequence[Found],
) -> None:
    """Add the parts of a worker to what was found, one for each trace of the request."""
    layouts = [layout_from_stored(layout) for layout in response.layouts]
    held = {
        chunk.number: chunks.add(
            worker,
            chunk.number,
            Frames(np.frombuffer(chunk.offsets, U32), layouts[chunk.layout], chunk.run),
        )
        for chunk in response.chunks
    }
    async for message in in_slices(response.parts):
        part = load_trace(message.trace, layouts)
        own = set(part.chunks())
        part.held = tuple(held[number] for number in own & held.keys())
        aliases = {n: held[n].alias if n in held else UNKNOWN_CHUNK for n in own}
        for source, running in zip(part.sources, message.running, strict=True):
            source.running = running
            source.drafts = SpanList()  # for the slots of its worker
            for spans in source.attempts:
                spans.refer(aliases)
        found[message.index].add(worker, part)
    at = {trace_id: index for index, trace_id in enumerate(request.trace_ids)}
    for gone in response.deleted:
        found[at[gone.trace_id]].fates.append(Fate(gone.reason, gone.time, gone.token))


def merged(key: TraceKey, of_workers: Iterable[tuple[int, Trace]]) -> Trace:
    """Return the trace that parts make up; a part alone is the trace."""
    found = sorted(of_workers)
    if len(found) == 1:
        return found[0][1]
    each = [part for _, part in found]
    sources: list[tuple[float, int, int, Source]] = []
    for worker, part in found:
        # Requests of one worker keep their order, whatever its clock did.
        times = accumulate((source.began for source in part.sources), max)
        sources += [
            (t, worker, i, s) for i, (t, s) in enumerate(zip(times, part.sources, strict=True))
        ]
    sources.sort(key=lambda s: s[:3])
    return Trace(
        key,
        0,
        max(part.ttl for part in each),
        min(part.created for part in each),
        max(part.updated for part in each),
        max(part.expires for part in each),
        [source for *_, source in sources],
        min(each, key=lambda part: part.created).token,
        num_dropped=sum(part.num_dropped for part in each),
        held=tuple(chunk for part in each for chunk in part.held),
    )
