"""The framer: steps and events of the engine in, ops and frames out.

Rows linger until they make a frame, so ops are written in another order than that in which things
happened. What keeps the outcome the same is that a run of lingering rows is flushed before any op
that could tell the difference: one that hands a block of the run to somebody, reads it, forgets
it, or ends the request. The server resolves cached blocks through its slot map at that point of the
ops.

A request that starts with cached blocks is told of as late as can be: before its own first rows,
but after those that others computed in the same step. Engines let the samples of a prompt share
blocks that are computed in the very step in which all of them start.

No I/O and no clock; the time is passed in.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.chunks import NO_BLOCKS, Blocks, ChunkBuilder, Ids
from routetrace.capture_agent.counters import Word
from routetrace.capture_agent.held import Held
from routetrace.capture_agent.linger import LANE_MASK, Bytes, Ints, Linger, Places
from routetrace.capture_agent.window import Slots, SlotWindow, as_ids
from routetrace.v1 import routetrace_pb2 as pb
from routetrace.v1.frame import invalid_rows
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.records import DIGEST, U32, OpKind, token_digests

#: Rows of one request in one frame at most. Longer frames are 1 to 4 % smaller (2048 rows), but a
#: rank that reads 4096 tokens of a request also gets the rest of the frames at their ends.
MAX_ROWS = 512

#: Rows that are checked at a time: what that takes stays in the cache.
_CHECKED_ROWS = 512

#: Traces, and ends of each, that are remembered.
MAX_TRACES, MAX_ENDS = 4096, 4

Digests = npt.NDArray[Any]  # of records.DIGEST
NO_DIGESTS: Digests = np.empty(0, DIGEST)

#: Bytes that a running request takes, beside what is counted.
_REQUEST_BYTES = 1024


@dataclass(slots=True)
class _Request:
    request_id: str
    lane: int
    trace_id: str = ""
    order: int = 0  # in which requests began; 0: the server was never told of it
    blocks: array[int] = field(default_factory=lambda: array("I"))  # those below `owned_from`
    num_blocks: int = 0
    emitted: int = 0  # the server was told of positions below
    owned_from: int = 0  # blocks from this index on are in the index of writers
    digests: Digests = field(default_factory=lambda: NO_DIGESTS)  # those that were sent
    preempted: bool = False
    lost: bool = False  # dropped: takes no rows any more
    # Tells of a request that was dropped when it began, if there was no memory even for its name.
    untold: Callable[[], None] | None = None

    nbytes: int = 0  # as they were counted


class Framer:
    """Turns what an engine reports into ops and frames.

    Args:
        layout: columns of the rows.
        block_size: tokens per KV block; 0 if slots are not told.
        num_blocks: blocks in the pool.
        frame_rows: rows that make a frame.
        out: where ops and frames go.
        drop: told of rows, or requests, that will not be told of: drop(counter, number).
    """

    def __init__(
        self,
        layout: RoutingLayout,
        block_size: int,
        num_blocks: int,
        frame_rows: int,
        out: ChunkBuilder,
        drop: Callable[[Word, int], None],
    ) -> None:
        self._layout = layout
        self._block_size = block_size
        self._frame_rows = frame_rows
        self._out = out
        self._drop = drop
        self._linger = Linger(layout.row_bytes, frame_rows)
        self._held = Held(frame_rows)
        self._runs: Ints = np.empty((3, 0), np.int64)  # of the last step, but for those held
        self._requests: dict[int, _Request] = {}  # by lane
        self._known_bytes = 0  # of all requests
        self._begun = 0
        self._starts: dict[int, Callable[[], None]] = {}  # by lane: what is yet to be told
        self._ends = TraceEnds()
        # Who was given a block to write last, and which of its blocks it is.
        self._writer = np.full(num_blocks, -1, np.int64)
        self._index = np.zeros(num_blocks, np.int64)
        self._window = SlotWindow(layout, out, drop)
        # Set where memory is too short even for events: no rows are taken; requests that begin are
        # dropped, and told by their names and ends alone; slots are forgotten before anything else
        # is told.
        self.muted = False
        # Set where it is too short for names: nothing is told of requests that begin.
        self.silent = False
        self._forgetful = False
        self.events: Mapping[str, Callable[..., None]] = {
            "begin": self.begin,
            "blocks": self.add_blocks,
            "rewind": self.rewind,
            "preempt": self.preempt,
            "resume": self.resume,
            "finish": self.finish,
            "external": self.external,
            "reset": self.reset,
            "lost": self.lost,
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that linger."""
        return self._linger.nbytes + self._window.rows * self._layout.row_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that all of this takes."""
        rows = self._linger.held_bytes + self._window.rows * self._layout.row_bytes
        return rows + self._known_bytes

    # ------------------------------------------------------------------ rows

    def step(self, now: float, step: int, version: int, runs: Ints, rows: Bytes) -> None:
        """Rows of one forward pass.

        Args:
            now: time.
            step: its number.
            version: weight version that computed them.
            runs: [3, m] handles, positions and counts.
            rows: [n, row_bytes]; copied.
        """
        self.settle()
        self._window.flush()
        self._runs = runs
        handles, positions, counts = runs
        lanes = handles & LANE_MASK
        quick = self._linger.fits(lanes, positions, counts, version)
        if self.muted:
            quick[:] = False
        if quick.all():
            self._extend(now, step, version, lanes, counts, rows)
            return
        if quick.any():
            mask = np.repeat(quick, counts)
            self._extend(now, step, version, lanes[quick], counts[quick], rows[mask])
        stops = np.cumsum(counts)
        # Rows of requests that start with them come last, as they may reuse what the others wrote.
        turns = {lane: i for i, lane in enumerate(self._starts, 1)}
        slow = np.flatnonzero(~quick).tolist()
        for i in sorted(slow, key=lambda i: turns.get(int(lanes[i]), 0)):
            run = rows[stops[i] - counts[i] : stops[i]]
            self._append(now, step, version, int(lanes[i]), int(positions[i]), run)

    def again(self, now: float, step: int, version: int, rows: Bytes) -> None:
        """As step(), of the same runs as the last one, each going on where it ended."""
        if self._held.takes(version):
            self._held.add(step, self._linger.store(rows))
            return
        self.settle()
        handles, positions, counts = self._runs
        runs = np.array([handles, positions + counts, counts])
        lanes = handles & LANE_MASK
        fits = self._linger.fits(lanes, runs[1], counts, version)
        if len(rows) > len(lanes) or self.muted or not fits.all():
            self.step(now, step, version, runs, rows)
            return
        self._window.flush()
        self._runs = runs
        self._held.begin(now, version, lanes)
        self._held.add(step, self._linger.store(rows))

    def settle(self) -> None:
        """Enters the steps that are held; to be called before anybody looks at what lingers."""
        held, linger = self._held, self._linger
        if not held:
            return
        steps, places = held.take()
        n, lanes, facts = len(steps), held.lanes, (held.since, held.version)
        self._runs[1] += n - 1
        # Some lanes may have a frame's rows in between.
        first = np.minimum(n, self._frame_rows - linger.fill[lanes])
        mine = np.arange(n) < first[:, None]
        self._enter(*facts, steps[first - 1], lanes, first, places[mine])
        late = first < n
        if late.any():
            self._enter(*facts, steps[-1], lanes[late], n - first[late], places[~mine])

    def _enter(
        self, since: float, version: int, step: Any, lanes: Ints, counts: Ints, places: Places
    ) -> None:
        self._linger.enter(since, step, version, lanes, counts, places, 1)
        self._flush(self._linger.full(lanes))

    def _start(self, lane: int) -> None:
        """Tells of a request that starts, if that is still to be done."""
        if start := self._starts.pop(lane, None):
            start()
            self._linger.open[lane] = not self._requests[lane].lost

    def _start_all(self) -> None:
        for lane in list(self._starts):
            self._start(lane)

    def _extend(
        self, now: float, step: int, version: int, lanes: Ints, counts: Ints, rows: Bytes
    ) -> None:
        """Appends runs that fit, and emits what makes a frame."""
        self._linger.extend(now, step, version, lanes, counts, rows)
        self._flush(self._linger.full(lanes))

    def _append(
        self, now: float, step: int, version: int, lane: int, position: int, rows: Bytes
    ) -> None:
        """Appends a run that does not simply continue its request, or makes more than a frame."""
        request, linger = self._requests[lane], self._linger
        self._start(lane)
        if request.preempted:
            self._drop(Word.LATE, len(rows))
            return
        if self.muted and not request.lost:
            self._shed(request)
        self._rewind(request, position)
        if request.lost:
            self._drop(Word.QUEUE_FULL, len(rows))
            return
        one = np.array([lane])
        if position != linger.end[lane] or version != linger.version[lane]:
            self._flush(one)
            linger.skip(lane, position)
        while len(rows):
            fill = int(linger.fill[lane])
            if fill + len(rows) <= self._frame_rows:
                self._extend(now, step, version, one, np.array([len(rows)]), rows)
                return
            take = MAX_ROWS - fill
            frame = rows[:take].copy()  # the memory they came in is used again
            if fill:
                frame = np.concatenate([linger.take(one), frame])
            start = int(linger.end[lane]) - fill
            linger.advance(step, lane, len(frame) - fill)
            rows = rows[take:]
            bad = self._invalid(frame)
            ids = as_ids(frame, self._layout)
            self._emit(request, start, ids, bad, step, version, int(linger.tentative[lane]))

    def step_slots(self, now: float, step: int, version: int, slots: Slots, rows: Bytes) -> None:
        """Rows [n, row_bytes] of one forward pass at `slots` [n]."""
        self.settle()
        if self.muted:
            self._drop(Word.QUEUE_FULL, len(rows))
            self._forgetful = True
            return
        self._remember()
        self._flush_all()
        self._window.add(now, step, version, slots, rows)

    @property
    def oldest(self) -> float:
        """When the first of the rows that linger came; inf without any."""
        return min(self._linger.oldest, self._window.since)

    def tick(self, before: float) -> None:
        """Flushes what came before that time."""
        self.settle()
        self._flush(self._linger.expired(before))
        if self._window.since <= before:
            self._window.flush()

    # ------------------------------------------------------------------ events

    def begin(
        self,
        handle: int,
        request_id: str,
        facts: bytes,
        index: int,
        num_computed_tokens: int,
        num_external_tokens: int,
        blocks: bytes,
        prompt: bytes | None,
    ) -> None:
        """A request begins, the `index`-th of the engine.

        `facts` is a RequestBegin, `blocks` and `prompt` are uint32.
        """
        self.settle()
        lane = handle & LANE_MASK
        block_ids = np.frombuffer(blocks, U32)
        begin = pb.RequestBegin.FromString(facts)
        trace_id = begin.trace_id or request_id
        request = _Request(request_id, lane, trace_id=trace_id, lost=self.muted)
        self._linger.begin(lane, num_computed_tokens, begin.prompt_len)
        self._linger.open[lane] = not self.muted
        self._requests[lane] = request
        self._count(request)
        ends = self._ends.of(trace_id)
        for other in list(self._starts):  # requests of a trace keep their order
            if self._requests[other].trace_id == trace_id:
                self._start(other)
        if self.muted:
            self._forgetful = True
            request.untold = self._name(request, begin, index, ends, prompt)
            self._tell(request)
            return
        self._begun += 1
        request.order = self._begun
        request.emitted = num_computed_tokens

        def start() -> None:
            self._remember()
            self._flush_writers(block_ids)
            self._out.begin(
                request_id, begin, index, num_computed_tokens, num_external_tokens, block_ids
            )
            self._give(request, block_ids, num_computed_tokens)
            if prompt:
                self._digests(request, prompt, ends)

        self._start_with(request, block_ids, num_computed_tokens - num_external_tokens, start)

    def _name(
        self,
        request: _Request,
        begin: pb.RequestBegin,
        index: int,
        ends: tuple[int, ...],
        prompt: bytes | None,
    ) -> Callable[[], None]:
        """What tells of a request that is dropped, and what it goes on from."""
        digests = NO_DIGESTS
        if prompt and ends:
            digests = token_digests(np.frombuffer(prompt, U32), ends)
            digests = digests[np.isin(digests["position"], ends)]

        def tell() -> None:
            self._out.begin(request.request_id, begin, index, 0, 0, NO_BLOCKS)
            self._out.digests(request.request_id, digests)
            self._lose(request, 0, 0, pb.MISSING_REASON_QUEUE_FULL)

        return tell

    def _tell(self, request: _Request) -> None:
        """Tells of a request that was dropped when it began, if there is memory for that."""
        if request.untold and not self.silent:
            request.untold()
            request.untold = None

    def _start_with(
        self,
        request: _Request,
        block_ids: Blocks,
        num_cached_tokens: int,
        start: Callable[[], None],
    ) -> None:
        """A request starts with so many tokens in blocks that others wrote, or are to write."""
        self._starts[request.lane] = start
        if not num_cached_tokens or not self._block_size or num_cached_tokens % self._block_size:
            self._start(request.lane)
            return
        self._linger.open[request.lane] = False  # its rows come by the slow way, see _append
        # What its other blocks held is gone at once: whoever shares them must not find it.
        new = block_ids[num_cached_tokens // self._block_size :]
        if len(new):
            self._flush_writers(new)
            self._out.op(OpKind.EXTERNAL, blocks=new)

    def add_blocks(self, handle: int, blocks: bytes) -> None:
        """A request gets more blocks."""
        block_ids = np.frombuffer(blocks, U32)
        self.add_blocks_of(np.full(len(block_ids), handle), block_ids)

    def add_blocks_of(self, handles: Ints, blocks: Ints | Blocks) -> None:
        """Requests get more blocks: block i goes to handle i."""
        block_ids = blocks.astype(U32)
        if len(set(block_ids.tolist())) == len(block_ids):
            self._add_blocks(handles & LANE_MASK, block_ids)
            return
        for i in range(len(handles)):  # a block twice: the first may have to let go of it
            self._add_blocks(handles[i : i + 1] & LANE_MASK, block_ids[i : i + 1])

    def _add_blocks(self, lanes: Ints, block_ids: Blocks) -> None:
        if self._starts or self._forgetful:
            self.settle()
        for lane in lanes.tolist() if self._starts else ():
            self._start(lane)
        self._flush_writers(block_ids)
        requests = [self._requests[lane] for lane in lanes.tolist()]
        if any(request.lost for request in requests):
            told = np.array([self._reported(lane) is not None for lane in lanes.tolist()])
            lanes, block_ids = lanes[told], block_ids[told]
            requests = [self._requests[lane] for lane in lanes.tolist()]
        index: list[int] = []  # which of its request's blocks each is
        for request, block in zip(requests, block_ids.tolist(), strict=True):
            index.append(request.num_blocks)
            if request.num_blocks < request.owned_from:
                request.blocks.append(block)
                self._count(request)
            request.num_blocks += 1
        self._out.blocks([request.request_id for request in requests], block_ids)
        places = np.array(index, np.int64)
        owned = places >= np.array([request.owned_from for request in requests], np.int64)
        self._writer[block_ids[owned]] = lanes[owned]
        self._index[block_ids[owned]] = places[owned]

    def rewind(self, handle: int, position: int, step: int = 0) -> None:
        """Rows at `position` and after were rejected; with `step`, unless later ones came."""
        self.settle()
        request = self._requests[handle & LANE_MASK]
        self._start(request.lane)
        if not step or self._linger.step[request.lane] <= step:
            self._rewind(request, position)

    def preempt(self, handle: int, num_computed_tokens: int) -> None:
        """A request gives up its blocks; rows at `num_computed_tokens` and after were not kept."""
        self.settle()
        lane = handle & LANE_MASK
        self._start(lane)
        self._requests[lane].preempted, self._linger.open[lane] = True, False
        if request := self._reported(handle):
            self._drop(Word.REWOUND, self._linger.cut(request.lane, num_computed_tokens))
            self._flush_one(request)
            self._out.op(OpKind.PREEMPT, request.request_id, position=num_computed_tokens)
            request.blocks, request.num_blocks = array("I"), 0
            self._count(request)
            request.emitted = min(request.emitted, num_computed_tokens)
        else:
            self.rewind(handle, num_computed_tokens)

    def resume(
        self, handle: int, num_computed_tokens: int, num_external_tokens: int, blocks: bytes
    ) -> None:
        """A request starts over as a new attempt."""
        self.settle()
        lane = handle & LANE_MASK
        self._requests[lane].preempted = False
        self._linger.open[lane] = not self._requests[lane].lost
        request = self._reported(handle)
        if request is None:
            return
        block_ids = np.frombuffer(blocks, U32)
        self._flush_one(request)
        self._linger.end[lane] = request.emitted = num_computed_tokens

        def start() -> None:
            self._remember()
            self._flush_writers(block_ids)
            self._out.op(
                OpKind.RESUME,
                request.request_id,
                position=num_computed_tokens,
                count=num_external_tokens,
                blocks=block_ids,
            )
            self._give(request, block_ids, num_computed_tokens)
            if request.lost:
                self._lose(request, num_computed_tokens, 0, pb.MISSING_REASON_QUEUE_FULL)

        self._start_with(request, block_ids, num_computed_tokens - num_external_tokens, start)

    def finish(self, handle: int, num_tokens: int, reason: int, tokens: bytes | None) -> None:
        """A request ends with `num_tokens` tokens; `tokens`, if told, is uint32."""
        self.settle()
        lane = handle & LANE_MASK
        request = self._requests[lane]
        self._start(lane)
        self._flush_one(request)
        if tokens:
            self._ends.add(request.trace_id, num_tokens)
        if tokens and not request.lost:
            self._digests(request, tokens)
        self._tell(request)
        if request.untold:
            self._drop(Word.UNTOLD, 1)
        else:
            self._out.op(OpKind.FINISH, request.request_id, count=num_tokens, arg=reason)
        self._linger.open[lane] = False
        self._known_bytes -= self._requests.pop(lane).nbytes

    def external(self, blocks: bytes) -> None:
        """KV of blocks was loaded from elsewhere."""
        self.settle()
        if self.muted:
            self._forgetful = True
            return
        self._start_all()
        self._remember()
        self._flush_all()
        self._window.flush()
        self._out.op(OpKind.EXTERNAL, blocks=np.frombuffer(blocks, U32))

    def reset(self) -> None:
        """The engine forgot its prefix cache."""
        self.settle()
        if self.muted:
            self._forgetful = True
            return
        self._start_all()
        self._flush_all()
        self._window.flush()
        self._forgetful = False
        self._out.op(OpKind.RESET)

    def lost(self, spans: list[tuple[int, int, int, int, int]], blocks: bytes) -> None:
        """Rows that never came here: (handle, start, stop, reason, step), and slots in `blocks`.

        The last of a span were of that step.
        """
        self.settle()
        for handle, position, stop, reason, step in spans:
            request = self._requests[handle & LANE_MASK]
            if request.preempted:
                continue  # they came too late anyway
            self._start(request.lane)
            self._rewind(request, position)
            if self.muted and not request.lost:
                self._shed(request)
            if not request.lost:
                self._flush_one(request)
                self._lose(request, position, stop - position, reason)
                self._linger.skip(request.lane, position)
                self._linger.advance(step, request.lane, stop - position)
                request.emitted = max(request.emitted, stop)
        if blocks:
            self.external(blocks)

    def close(self) -> None:
        """No more will come: flushes everything, and says so for requests that live."""
        self.settle()
        self._start_all()
        self._flush_all()
        self._window.flush()
        for lane, request in self._requests.items():
            self._tell(request)
            if request.untold:
                self._drop(Word.UNTOLD, 1)
            if not request.lost:
                end = int(self._linger.end[lane])
                self._lose(request, end, 0, pb.MISSING_REASON_AGENT_LOST)

    # ------------------------------------------------------------------ memory

    def flush(self) -> None:
        """Flushes everything that lingers, and tells of all requests."""
        self.settle()
        self._start_all()
        self._flush_all()
        self._window.flush()

    def flush_rows(self) -> None:
        """Flushes everything that lingers."""
        self.settle()
        self._flush_all()
        self._window.flush()
        self._linger.compact()

    def shed(self, nbytes: int) -> None:
        """Drops whole requests that have rows here, newest first, until `nbytes` are free."""
        self.settle()
        target = self.nbytes - nbytes
        self._window.shed()
        waiting = [self._requests[lane] for lane in self._linger.lingering().tolist()]
        for request in sorted(waiting, key=lambda r: -r.order):
            if self.nbytes <= target:
                break
            self._shed(request)
        self._linger.compact()

    def _shed(self, request: _Request) -> None:
        """Drops a request, from the first of its rows here on."""
        lane = request.lane
        start = int(self._linger.end[lane] - self._linger.fill[lane])
        self._drop(Word.QUEUE_FULL, self._linger.cut(lane, 0))
        self._linger.open[lane] = False
        request.lost = True
        self._lose(request, start, 0, pb.MISSING_REASON_QUEUE_FULL)

    def _count(self, request: _Request) -> None:
        """What is known of a request has changed."""
        nbytes = _REQUEST_BYTES + 4 * len(request.blocks) + request.digests.nbytes
        self._known_bytes += nbytes - request.nbytes
        request.nbytes = nbytes

    def _reported(self, handle: int) -> _Request | None:
        """The request, unless there is no memory to say more about it."""
        request = self._requests[handle & LANE_MASK]
        if request.lost and (self.muted or not request.order):
            self._forgetful = True
            return None
        return request

    def _remember(self) -> None:
        """Slots may have changed hands without a word: all are unknown."""
        if self._forgetful:
            self._flush_all()
            self._window.flush()
            self._forgetful = False
            self._out.op(OpKind.RESET)

    # ------------------------------------------------------------------ flushing

    def _flush_all(self) -> None:
        self._flush(self._linger.lingering())

    def _flush_one(self, request: _Request) -> None:
        if self._linger.fill[request.lane]:
            self._flush(np.array([request.lane]))

    def _flush(self, lanes: Ints) -> None:
        """Emits the rows of some lanes, some of them at a time so that memory stays in bounds."""
        linger, at = self._linger, 0
        fill = linger.fill[lanes]
        stops = np.cumsum(fill)
        while at < len(lanes):
            most = (int(stops[at - 1]) if at else 0) + self._out.max_rows
            stop = max(at + 1, int(np.searchsorted(stops, most, "right")))
            some = lanes[at:stop]
            columns = (
                some,
                linger.end[some] - fill[at:stop],
                fill[at:stop],
                linger.step[some],
                linger.version[some],
                linger.tentative[some],
            )
            rows, row = linger.take(some), 0
            ids, bad = as_ids(rows, self._layout), self._invalid(rows)
            good = not bad.any()
            for lane, position, n, *facts in zip(*(c.tolist() for c in columns), strict=True):
                request, part = self._requests[lane], slice(row, row + n)
                if good and 0 < n <= self._out.max_rows:
                    self._out.rows(request.request_id, position, ids[part], *facts)
                    request.emitted = max(request.emitted, position + n)
                elif n:
                    self._emit(request, position, ids[part], bad[part], *facts)
                row += n
            at = stop

    def _invalid(self, rows: Bytes) -> npt.NDArray[np.bool_]:
        """Which rows no router chose; bool [n]. The more at a time, the less it costs."""
        ids = as_ids(rows, self._layout)
        parts = [
            invalid_rows(ids[at : at + _CHECKED_ROWS], self._layout.num_experts)
            for at in range(0, max(1, len(ids)), _CHECKED_ROWS)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _flush_writers(self, blocks: Blocks) -> None:
        """Flushes the lingering rows in any of these blocks."""
        self._window.flush()
        if not len(blocks):
            return
        linger, size = self._linger, self._block_size
        lanes, index = self._writer[blocks], self._index[blocks]
        owned = lanes >= 0
        lanes, index = lanes[owned], index[owned]
        if not len(lanes):
            return
        if held := len(self._held):
            # At most so many rows more than those that linger: seldom any in these blocks.
            end = linger.end[lanes]
            near = (index * size < end + held) & ((index + 1) * size > end - linger.fill[lanes])
            if not near.any():
                return
            self.settle()
        end, fill = linger.end[lanes], linger.fill[lanes]
        hit = (fill > 0) & (index * size < end) & ((index + 1) * size > end - fill)
        self._flush(np.unique(lanes[hit]))

    def _give(self, request: _Request, blocks: Blocks, num_computed_tokens: int) -> None:
        """A request starts with these blocks, and writes from its first uncached token on."""
        request.num_blocks = len(blocks)
        request.owned_from = num_computed_tokens // self._block_size if self._block_size else 0
        # Those that it shares are needed again if it is to write into them.
        request.blocks = array("I", blocks[: request.owned_from].tobytes())
        self._count(request)
        self._own(request, request.owned_from, blocks[request.owned_from :])

    def _own(self, request: _Request, start: int, blocks: Blocks) -> None:
        """Enters blocks of a request, from its `start`-th on, into the index of writers."""
        self._writer[blocks] = request.lane
        self._index[blocks] = np.arange(start, start + len(blocks))

    # ------------------------------------------------------------------ ops

    def _emit(
        self,
        request: _Request,
        position: int,
        ids: Ids,
        bad: npt.NDArray[np.bool_],
        step: int,
        version: int,
        tentative: int,
    ) -> None:
        """The last rows [n, L, K], from `position` on; those that are `bad` become LOST."""
        edges = {0, len(ids), *range(0, len(ids), self._out.max_rows)}
        if bad.any():
            edges.update((np.flatnonzero(bad[1:] != bad[:-1]) + 1).tolist())
        for start, stop in pairwise(sorted(edges)):
            at, n = position + start, stop - start
            if bad[start]:
                self._drop(Word.INVALID_IDS, n)
                self._lose(request, at, n, pb.MISSING_REASON_INVALID_IDS)
            else:
                drafts = max(0, tentative - (len(ids) - stop))
                self._out.rows(request.request_id, at, ids[start:stop], step, version, drafts)
        request.emitted = max(request.emitted, position + len(ids))

    def _rewind(self, request: _Request, position: int) -> None:
        """Takes back the rows at `position` and after, if there are any."""
        linger, lane = self._linger, request.lane
        if position < request.emitted:
            self._out.op(OpKind.REWIND, request.request_id, position=position)
            request.emitted = position
            if request.lost:
                self._lose(request, position, 0, pb.MISSING_REASON_QUEUE_FULL)
        if position >= linger.end[lane]:
            return
        self._drop(Word.REWOUND, linger.cut(lane, position))
        linger.end[lane] = position
        if self._block_size and position < request.owned_from * self._block_size:
            # It will write into blocks that it shares.
            first, stop = position // self._block_size, request.owned_from
            shared = np.array(request.blocks[first:stop], U32)
            self._flush_writers(shared)
            self._own(request, first, shared)
            request.owned_from = first

    def _lose(self, request: _Request, position: int, count: int, reason: int) -> None:
        self._out.op(OpKind.LOST, request.request_id, arg=reason, position=position, count=count)

    def _digests(self, request: _Request, tokens: bytes, ends: Iterable[int] = ()) -> None:
        """Digests of tokens (uint32) that the server does not have yet."""
        digests = token_digests(np.frombuffer(tokens, U32), ends)
        known = dict(request.digests.tolist())
        new = [known.get(position) != value for position, value in digests.tolist()]
        request.digests = digests
        self._count(request)
        self._out.digests(request.request_id, digests[new])


class TraceEnds:
    """Where earlier requests of a trace ended, so that a later one can be proven to go on there."""

    def __init__(self) -> None:
        self._ends: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def of(self, trace_id: str) -> tuple[int, ...]:
        """Token counts of the last requests of a trace."""
        return self._ends.get(trace_id, ())

    def add(self, trace_id: str, num_tokens: int) -> None:
        """A request of a trace ended."""
        self._ends[trace_id] = (*self.of(trace_id), num_tokens)[-MAX_ENDS:]
        self._ends.move_to_end(trace_id)
        if len(self._ends) > MAX_TRACES:
            self._ends.popitem(last=False)
