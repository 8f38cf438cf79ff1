"""The framer: steps and events of the engine in, ops and frames out.

Rows linger until they make a frame, so ops are written in another order than that of the events.
The outcome stays the same because lingering rows are flushed before every op that could tell the
difference: an op that gives one of their blocks to another request, reads it or forgets it, or that
ends the request. The server resolves cached blocks through its slot map at that point of the ops.

A request inherits the rows of its cached tokens as late as possible: before its own first rows, but
after those that other requests computed in the same step. Engines let the samples of a prompt share
blocks that are computed in the very step in which all of them start.

Late rows are dropped, but the pass has written them: their slots are forgotten, in the blocks that
the request held last, unless a block was allocated again since.

A framer that follows another one, which died, does not know the requests that began before. Their
rows are dropped. The server knows no slot that they write: the map of an epoch begins unknown, and
blocks that they get from now on are forgotten. So their late rows change nothing, unless another
request has written into a block that it shares, maybe with them.

No I/O and no clock; the time is an argument. The caller, `intake`, settles held steps first.
"""

# Over 400 lines: each method is one event of a request, and all of them share the order of the ops.

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.counters import Word
from routetrace.capture_agent.pipeline.chunks import NO_BLOCKS, Blocks, ChunkBuilder
from routetrace.capture_agent.pipeline.emitter import Emitter
from routetrace.capture_agent.pipeline.linger import LANE_MASK, Bytes, Ints, Linger, Places
from routetrace.capture_agent.pipeline.owners import BlockOwners
from routetrace.capture_agent.pipeline.pressure import Pressure
from routetrace.capture_agent.pipeline.request import NO_DIGESTS, Phase, Recording, Request
from routetrace.capture_agent.pipeline.trace_ends import MAX_CUT, TraceEnds
from routetrace.capture_agent.pipeline.window import Slots, SlotWindow
from routetrace.codec.records import U32, FinishReason, OpKind, digest_key, tail_of, token_digests
from routetrace.common.layout import ModelLayout
from routetrace.v1 import routetrace_pb2 as pb

#: Rows of one request in one frame at most. Longer frames are 1 to 4 % smaller (2048 rows), but a
#: rank that reads 4096 tokens of a request also gets the rest of the frames at their ends.
MAX_ROWS = 512

NO_BAD: npt.NDArray[np.bool_] = np.empty(0, np.bool_)


class _Requests(dict[int, Request]):
    """Requests by lane, of a framer that follows another one: one that it did not see is UNSEEN."""

    def __init__(self, linger: Linger) -> None:
        super().__init__()
        self._linger = linger

    def __missing__(self, lane: int) -> Request:
        self._linger.begin(lane, 0, 0)
        request = self[lane] = Request("", lane, recording=Recording.UNSEEN)
        self._linger.open[lane] = request.takes_rows
        return request


class Framer:
    """Turns steps and events into ops and frames.

    Args:
        layout: columns of the rows.
        block_size: tokens per KV block; 0 if slots are not reported.
        num_blocks: blocks in the pool.
        linger: lingering rows.
        out: ops and frames go here.
        drop: drop callback.
        follows: whether another framer took earlier steps and events, and its state is lost.
    """

    def __init__(
        self,
        layout: ModelLayout,
        block_size: int,
        num_blocks: int,
        linger: Linger,
        out: ChunkBuilder,
        drop: Callable[[Word, int], None],
        *,
        follows: bool = False,
    ) -> None:
        self._row_bytes = layout.row_bytes
        self._block_size = block_size
        self._out = out
        self._drop = drop
        self._linger = linger
        self._follows = follows
        self._unseen: set[int] = set()  # handles of ended requests whose blocks are not known
        self._shares = False  # whether a request wrote into blocks that it shares
        # By lane.
        self._requests: dict[int, Request] = _Requests(linger) if follows else {}
        self._known_bytes = 0  # of all requests
        self._begun = 0
        self._starting: dict[int, int] = {}  # by lane of phase STARTING, in order: cached tokens
        self._step = 0  # the last one that was taken
        self._bad_step, self._bad = 0, NO_BAD  # rows of a step that no id can mark
        self._ends = TraceEnds()
        self._owners = BlockOwners(block_size, num_blocks)
        self._window = SlotWindow(layout, out, drop)
        self._emitter = Emitter(layout, linger, self._requests, out, drop)
        self._pressure = Pressure.NORMAL
        # Whether changes of slots were not reported: a RESET comes before the next op on slots, and
        # before anything that lets a reader rely on them (flush, close, the end of the shortage).
        self._slots_unknown = False
        #: Events that the engine's end of the ring writes, by name.
        self.events: Mapping[str, Callable[..., None]] = {
            "begin": self.begin,
            "rewind": self.rewind,
            "preempt": self.preempt,
            "resume": self.resume,
            "finish": self.finish,
            "external": self.external,
            "copy": self.copy,
            "reset": self.reset,
            "lost": self.lost,
            "late": self.late,
            "bad": self.bad,
            "forget": self.forget,
        }

    @property
    def nbytes(self) -> int:
        """Bytes of lingering rows."""
        return self._linger.nbytes + self._window.rows * self._row_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of memory in use."""
        rows = self._linger.held_bytes + self._window.rows * self._row_bytes
        return rows + self._known_bytes

    @property
    def pressure(self) -> Pressure:
        """Memory pressure; at its end, changes of slots that were not reported are."""
        return self._pressure

    @pressure.setter
    def pressure(self, level: Pressure) -> None:
        self._pressure = level
        if not self._short:
            self.clear_unknown()

    @property
    def _short(self) -> bool:
        """Whether memory is short."""
        return self._pressure is not Pressure.NORMAL

    # ------------------------------------------------------------------ rows

    def step(self, now: float, step: int, version: int, spans: Ints, rows: Bytes) -> None:
        """Take the rows of one forward pass; arguments as for `Intake.step`."""
        self._window.flush()
        self._step = step
        handles, positions, counts = spans
        lanes = handles & LANE_MASK
        if self._follows:
            for lane in lanes.tolist():
                self._requests[lane]
        quick = self._linger.fits(lanes, positions, counts, version)
        bad = NO_BAD
        if self._bad_step == step:
            bad, self._bad_step = self._bad, 0
        if self._short or len(bad):
            quick[:] = False
        if quick.all():
            self._extend(now, step, version, lanes, counts, rows)
            return
        if quick.any():
            mask = np.repeat(quick, counts)
            self._extend(now, step, version, lanes[quick], counts[quick], rows[mask])
        stops = np.cumsum(counts)
        # Rows of requests that start come last, as they may reuse blocks of this step.
        turns = {lane: i for i, lane in enumerate(self._starting, 1)}
        slow = np.flatnonzero(~quick).tolist()
        for i in sorted(slow, key=lambda i: turns.get(int(lanes[i]), 0)):
            part = slice(int(stops[i] - counts[i]), int(stops[i]))
            handle, position = int(handles[i]), int(positions[i])
            if len(bad):
                self._append_but(now, step, version, handle, position, rows[part], bad[part])
            else:
                self._append(now, step, version, handle, position, rows[part])

    def enter(
        self, since: float, version: int, step: Any, lanes: Ints, counts: Ints, places: Places
    ) -> None:
        """Enter stored rows of held steps into their lanes, one row a step."""
        self._linger.enter(since, step, version, lanes, counts, places, 1)
        self._emitter.flush(self._linger.full(lanes))

    def _inherit(self, lane: int) -> None:
        """Have a STARTING request take the rows of its cached tokens; else do nothing."""
        known = self._starting.pop(lane, 0)
        if not known:
            return
        request = self._requests[lane]
        blocks = np.array(request.blocks[: self._owners.num_blocks_of(known)], U32)
        self.clear_unknown()
        self.flush_writers(blocks)
        self._out.op(OpKind.INHERIT, request.request_id)
        # From here on it writes into the block that it shares in part.
        self._own(request, request.owned_from, len(blocks))
        self._enter_phase(request, Phase.RUNNING)

    def _extend(
        self, now: float, step: int, version: int, lanes: Ints, counts: Ints, rows: Bytes
    ) -> None:
        """Append spans that fit, and emit full frames."""
        self._linger.extend(now, step, version, lanes, counts, rows)
        self._emitter.flush(self._linger.full(lanes))

    def _append(
        self, now: float, step: int, version: int, handle: int, position: int, rows: Bytes
    ) -> None:
        """Append a span that does not just continue its request, or makes more than a frame."""
        lane = handle & LANE_MASK
        request, linger = self._requests[lane], self._linger
        if request.phase is Phase.PREEMPTED:
            self._drop(Word.LATE, len(rows))
            self._forget_late(handle, position, position + len(rows))
            return
        self._inherit(lane)
        if self._short and request.kept:
            self._shed(request)
        self._rewind(request, position)
        self._write(request, position, position + len(rows), request.kept)
        if not request.kept:
            unseen = request.recording is Recording.UNSEEN
            self._drop(Word.UNSEEN if unseen else Word.QUEUE_FULL, len(rows))
            return
        one = np.array([lane])
        if position != linger.end[lane] or version != linger.version[lane]:
            self._emitter.flush(one)
            linger.skip(lane, position)
        while len(rows):
            fill = int(linger.fill[lane])
            if fill + len(rows) <= linger.frame_rows:
                self._extend(now, step, version, one, np.array([len(rows)]), rows)
                return
            take = MAX_ROWS - fill
            frame = rows[:take].copy()  # the ring reuses their memory
            if fill:
                frame = np.concatenate([linger.take(one), frame])
            start = int(linger.end[lane]) - fill
            linger.advance(step, lane, len(frame) - fill)
            rows = rows[take:]
            tentative = int(linger.tentative[lane])
            self._emitter.emit(request, start, frame, step, version, tentative)

    def _append_but(
        self,
        now: float,
        step: int,
        version: int,
        handle: int,
        position: int,
        rows: Bytes,
        bad: npt.NDArray[np.bool_],
    ) -> None:
        """Append a span without its bad rows, which are lost."""
        edges = [0, *(np.flatnonzero(bad[1:] != bad[:-1]) + 1).tolist(), len(bad)]
        for start, stop in pairwise(edges):
            at, n = position + start, stop - start
            if bad[start]:
                self._drop(Word.INVALID_IDS, n)
                self._miss(handle, at, at + n, pb.MISSING_REASON_INVALID_IDS, step)
            else:
                self._append(now, step, version, handle, at, rows[start:stop])

    def step_slots(self, now: float, step: int, version: int, slots: Slots, rows: Bytes) -> None:
        """Take rows [n, row_bytes] of one forward pass at `slots` [n]."""
        if self._short:
            self._drop(Word.QUEUE_FULL, len(rows))
            self._slots_unknown = True
            return
        self.clear_unknown()
        self._emitter.flush_all()
        self._step = step
        self._window.add(now, step, version, slots, rows)

    def flush_window(self) -> None:
        """Flush the rows that came with slots alone."""
        self._window.flush()

    @property
    def oldest(self) -> float:
        """Arrival of the first lingering row; inf without any."""
        return min(self._linger.oldest, self._window.since)

    @property
    def slots_since(self) -> float:
        """Arrival of the first lingering row that came with slots alone; inf without any."""
        return self._window.since

    @property
    def all_ended(self) -> bool:
        """Whether requests began, and all of them have ended."""
        return self._begun > 0 and not self._requests

    def tick(self, before: float) -> None:
        """Flush rows that arrived before that time."""
        self._emitter.flush(self._linger.expired(before))
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
        """Begin a request, the `index`-th of the engine.

        `facts` is a RequestBegin, `blocks` and `prompt` are uint32.
        """
        lane = handle & LANE_MASK
        block_ids = np.frombuffer(blocks, U32)
        begin = pb.RequestBegin.FromString(facts)
        trace_id = begin.trace_id or request_id
        recording = Recording.UNNAMED if self._short else Recording.KEPT
        key = digest_key(begin.labels)
        request = Request(request_id, lane, trace_id, key, recording=recording)
        self._linger.begin(lane, num_computed_tokens, begin.prompt_len)
        self._linger.open[lane] = request.takes_rows
        self._requests[lane] = request
        self._count(request)
        ends = self._ends.of(trace_id)
        if recording is Recording.UNNAMED:
            self._slots_unknown = True
            request.name = self._naming(request, begin, index, ends, prompt)
            self._name(request)
            return
        self._begun += 1
        request.order = self._begun
        request.emitted = num_computed_tokens
        self.clear_unknown()
        self._flush_from(block_ids, num_computed_tokens - num_external_tokens)
        self._out.begin(
            request_id, begin, index, num_computed_tokens, num_external_tokens, block_ids
        )
        self._give(request, block_ids, num_computed_tokens, num_external_tokens)
        if prompt:
            self._digests(request, prompt, ends)

    def _naming(
        self,
        request: Request,
        begin: pb.RequestBegin,
        index: int,
        ends: tuple[int, ...],
        prompt: bytes | None,
    ) -> Callable[[], None]:
        """Emit, when called, the begin and the loss of a request, and digests that join it."""
        digests = NO_DIGESTS
        if prompt and ends:
            digests = token_digests(np.frombuffer(prompt, U32), ends, request.digest_key)
            digests = digests[np.isin(digests["position"], ends)]

        def name() -> None:
            self._out.begin(request.request_id, begin, index, 0, 0, NO_BLOCKS)
            self._out.digests(request.request_id, digests)
            self._emitter.lose(request, 0, 0, pb.MISSING_REASON_QUEUE_FULL)

        return name

    def _name(self, request: Request) -> None:
        """Report an UNNAMED request if there is memory for that."""
        if request.name and self.pressure is not Pressure.EXHAUSTED:
            request.name()
            request.name = None
            request.record(Recording.NAMED)

    def _enter_phase(self, request: Request, phase: Phase) -> None:
        request.enter(phase)
        self._linger.open[request.lane] = request.takes_rows

    def add_blocks(self, lanes: Ints, block_ids: Blocks) -> None:
        """Give requests more blocks, none of them twice: block i to lane i."""
        self._window.flush()
        requests = [self._requests[lane] for lane in lanes.tolist()]
        if not all(request.kept for request in requests):
            some = np.array([self._reported(request) for request in requests])
            self._lose_blocks(block_ids[~some])
            lanes, block_ids = lanes[some], block_ids[some]
            requests = [self._requests[lane] for lane in lanes.tolist()]
        index: list[int] = []  # of each block among those of its request
        for request, block in zip(requests, block_ids.tolist(), strict=True):
            index.append(len(request.blocks))
            request.blocks.append(block)
            request.counted += 4
        self._known_bytes += 4 * len(requests)
        self._owners.allocate(block_ids)
        self._out.blocks([request.request_id for request in requests], block_ids)
        places = np.array(index, np.int64)
        owned = places >= np.array([request.owned_from for request in requests], np.int64)
        self._owners.own_each(lanes[owned], places[owned], block_ids[owned])

    def rewind(self, handle: int, position: int, step: int = 0) -> None:
        """Reject rows at `position` and after; with `step`, unless rows of a later one came."""
        request = self._requests[handle & LANE_MASK]
        self._inherit(request.lane)
        if not step or self._linger.step[request.lane] <= step:
            self._rewind(request, position)

    def preempt(self, handle: int, num_computed_tokens: int) -> None:
        """Release the blocks of a request, and reject rows at `num_computed_tokens` and after."""
        lane = handle & LANE_MASK
        request = self._requests[lane]
        self._inherit(lane)
        again = request.phase is Phase.PREEMPTED
        self._enter_phase(request, Phase.PREEMPTED)
        if self._reported(request):
            self._drop(Word.REWOUND, self._linger.cut(lane, num_computed_tokens))
            self._emitter.flush_request(request)
            self._flush_from(np.array(request.blocks, U32), num_computed_tokens)
            self._out.op(OpKind.PREEMPT, request.request_id, position=num_computed_tokens)
            request.emitted = min(request.emitted, num_computed_tokens)
        else:
            self.rewind(handle, num_computed_tokens)
        if not again:  # late rows belong to the blocks that it held
            self._release(handle, request)

    def resume(
        self,
        handle: int,
        num_computed_tokens: int,
        num_external_tokens: int,
        blocks: bytes,
        num_tokens: int = 0,
    ) -> None:
        """Start the next attempt of a request; one that holds blocks is preempted first."""
        lane = handle & LANE_MASK
        request = self._requests[lane]
        if request.phase is not Phase.PREEMPTED:
            self.preempt(handle, num_computed_tokens)
        self._enter_phase(request, Phase.RUNNING)
        self._owners.forget(handle)
        self._unseen.discard(handle)
        block_ids = np.frombuffer(blocks, U32)
        if not self._reported(request):
            size, known = self._block_size, num_computed_tokens - num_external_tokens
            shared = known // size if size else 0
            # One that it shares in part is not new.
            self._lose_blocks(block_ids[shared:], self._owners.num_blocks_of(known) - shared)
            # If it goes back into blocks that it shares, the server forgets what it writes there.
            request.blocks, request.alone = array("I", block_ids[:shared].tobytes()), False
            self._count(request)
            # The server knows of no further attempt: which one sampled is not known.
            if request.recording is Recording.DROPPED:
                self._emitter.lose(request, 0, 0, pb.MISSING_REASON_QUEUE_FULL)
                request.record(Recording.NAMED)
            return
        self._emitter.flush_request(request)
        self._linger.end[lane] = request.emitted = num_computed_tokens
        self.clear_unknown()
        self._flush_from(block_ids, num_computed_tokens - num_external_tokens)
        self._out.op(
            OpKind.RESUME,
            request.request_id,
            position=num_computed_tokens,
            count=num_external_tokens,
            blocks=block_ids,
            value=num_tokens,
        )
        self._give(request, block_ids, num_computed_tokens, num_external_tokens)
        if not request.kept:
            self._emitter.lose(request, num_computed_tokens, 0, pb.MISSING_REASON_QUEUE_FULL)

    def finish(
        self,
        handle: int,
        num_tokens: int,
        reason: int,
        tokens: bytes | None,
        unix_ms: int,
        transfer_id: str = "",
    ) -> None:
        """End a request of `num_tokens` tokens; `tokens`, if given, is uint32."""
        lane = handle & LANE_MASK
        request = self._requests[lane]
        self._inherit(lane)
        self._emitter.flush_request(request)
        self._flush_from(np.array(request.blocks, U32), max(0, num_tokens - 1))
        ends = range(num_tokens, num_tokens + 1)
        if reason == FinishReason.ABORT:
            ends = tail_of(int(self._linger.prompt_len[lane]), num_tokens)
        if tokens and request.trace_id:
            self._ends.add(request.trace_id, ends[-MAX_CUT - 1 :])
        if tokens and request.kept:
            self._digests(request, tokens, ends)
        self._name(request)
        if request.recording is Recording.UNNAMED:
            self._drop(Word.UNREPORTED, 1)
        elif request.recording is not Recording.UNSEEN:
            self._out.finish(request.request_id, num_tokens, reason, unix_ms, transfer_id)
        if request.phase is not Phase.PREEMPTED:
            self._release(handle, request)
        self._enter_phase(request, Phase.FINISHED)
        self._known_bytes -= self._requests.pop(lane).counted

    def external(self, blocks: bytes) -> None:
        """Note that the KV of blocks was loaded from elsewhere."""
        if self._short:
            self._slots_unknown = True
            return
        self.clear_unknown()
        self.flush()
        self._out.op(OpKind.EXTERNAL, blocks=np.frombuffer(blocks, U32))

    def copy(self, sources: bytes, targets: bytes) -> None:
        """Note that KV was copied from blocks to as many others (uint32)."""
        if self._short:
            self._slots_unknown = True
            return
        self.clear_unknown()
        blocks = np.frombuffer(sources + targets, U32)
        self.flush_writers(blocks)
        self._owners.copy(*np.split(blocks, 2))
        self._out.op(OpKind.COPY, blocks=blocks, step=self._step)

    def reset(self, count: int = 0) -> None:
        """Forget the slots of the first `count` blocks, 0: of all, as their cache was cleared."""
        if self._short:
            self._slots_unknown = True
            return
        self.flush()
        every, self._slots_unknown = self._slots_unknown, False
        self._out.op(OpKind.RESET, count=0 if every else count)

    def lost(self, spans: list[tuple[int, int, int, int, int]], blocks: bytes) -> None:
        """Report rows that never arrived: (handle, start, stop, reason, step of the last).

        Slots in `blocks` were written with such rows.
        """
        turns = {lane: i for i, lane in enumerate(self._starting, 1)}  # as in step()
        for span in sorted(spans, key=lambda span: turns.get(span[0] & LANE_MASK, 0)):
            self._miss(*span)
        if blocks:
            self.external(blocks)

    def _miss(self, handle: int, position: int, stop: int, reason: int, step: int) -> None:
        """Report rows [position, stop) as lost; the last of them were of that step."""
        request, linger = self._requests[handle & LANE_MASK], self._linger
        if request.phase is Phase.PREEMPTED:
            self._forget_late(handle, position, stop)
            return
        self._inherit(request.lane)
        self._rewind(request, position)
        if self._short and request.kept:
            self._shed(request)
        if request.kept:
            self._emitter.flush_request(request)
            linger.skip(request.lane, position)
            linger.advance(step, request.lane, stop - position)
            drafts = int(linger.tentative[request.lane])
            self._emitter.lose(request, position, stop - position, reason, drafts)
            request.emitted = max(request.emitted, stop)
        self._write(request, position, stop, named=False)

    def late(self, spans: bytes) -> None:
        """Forget the slots of late rows of finished requests: [3, m] of int64, as in step()."""
        for handle, position, count in np.frombuffer(spans, np.int64).reshape(3, -1).T.tolist():
            self._forget_late(handle, position, position + count)

    def bad(self, step: int, rows: bytes) -> None:
        """Mark rows of the next step that no router chose, where no id can mark them.

        Args:
            step: its number.
            rows: a bit each, as of numpy.packbits.
        """
        self._bad_step = step
        self._bad = np.unpackbits(np.frombuffer(rows, np.uint8)).view(np.bool_)

    def forget(self, slots: bytes) -> None:
        """Forget slots (uint64) that were written with rows that never arrive."""
        if self._short:
            self._slots_unknown = True
            return
        self._window.flush()
        self._out.forget(np.frombuffer(slots, np.uint64))

    def close(self) -> None:
        """Flush everything; report the agent's loss for live requests."""
        for lane in list(self._starting):
            self._inherit(lane)
        self.flush()
        self.clear_unknown()
        for lane, request in self._requests.items():
            self._name(request)
            if request.recording is Recording.UNNAMED:
                self._drop(Word.UNREPORTED, 1)
            if request.kept:
                end = int(self._linger.end[lane])
                self._emitter.lose(request, end, 0, pb.MISSING_REASON_AGENT_LOST)

    # ------------------------------------------------------------------ memory

    def flush(self) -> None:
        """Flush all lingering rows."""
        self._emitter.flush_all()
        self._window.flush()

    def shed(self, nbytes: int) -> None:
        """Drop whole requests that have rows here, newest first, until `nbytes` are free."""
        target = self.nbytes - nbytes
        self._window.shed()
        waiting = [self._requests[lane] for lane in self._linger.lingering().tolist()]
        for request in sorted(waiting, key=lambda r: -r.order):
            if self.nbytes <= target:
                break
            self._shed(request)
        self._linger.compact()

    def _shed(self, request: Request) -> None:
        """Drop a request, from its first lingering row on."""
        lane = request.lane
        start = int(self._linger.end[lane] - self._linger.fill[lane])
        self._drop(Word.QUEUE_FULL, self._linger.cut(lane, 0))
        request.record(Recording.DROPPED)
        self._linger.open[lane] = request.takes_rows
        self._emitter.lose(request, start, 0, pb.MISSING_REASON_QUEUE_FULL)

    def _count(self, request: Request) -> None:
        """Count the bytes of a request again."""
        self._known_bytes += request.nbytes - request.counted
        request.counted = request.nbytes

    def _reported(self, request: Request) -> bool:
        """Whether the server follows the blocks of a request; memory must do for that."""
        if request.kept or (request.recording is Recording.DROPPED and not self._short):
            return True
        self._slots_unknown |= self._short
        return False

    def _lose_blocks(self, blocks: Blocks, cached: int = 0) -> None:
        """Have the server forget blocks that a request writes without its following them.

        The first `cached` of them are not newly allocated.
        """
        if self._short:
            self._slots_unknown = True
        elif len(blocks):
            self.clear_unknown()
            self.flush_writers(blocks)
            self._owners.allocate(blocks[cached:])
            self._out.op(OpKind.EXTERNAL, blocks=blocks)

    def clear_unknown(self) -> None:
        """Have the server forget all slots if some changes were not reported."""
        if self._slots_unknown:
            self.flush()
            self._slots_unknown = False
            self._out.op(OpKind.RESET)

    # ------------------------------------------------------------------ blocks

    def reaches(self, blocks: Blocks, more: int = 0) -> bool:
        """Whether lingering rows, or `more` rows after them in a lane, may be in these blocks."""
        lanes, index = self._owners.of(blocks)
        return len(lanes) > 0 and bool(self._near(lanes, index, more).any())

    def flush_writers(self, blocks: Blocks) -> None:
        """Flush the lingering rows in any of these blocks."""
        self._window.flush()
        lanes, index = self._owners.of(blocks)
        held = self._linger.fill[lanes] > 0
        if held.any():  # seldom
            hit = lanes[held & self._near(lanes, index)]
            self._emitter.flush(np.unique(hit))

    def _near(self, lanes: Ints, index: Ints, more: int = 0) -> npt.NDArray[np.bool_]:
        """Mark blocks, by writer and index, that lingering rows are in or confirm drafts of."""
        linger, size = self._linger, self._block_size
        first = np.minimum(linger.end[lanes] - linger.fill[lanes], linger.sure[lanes])
        near: npt.NDArray[np.bool_] = index * size < linger.end[lanes] + more
        near &= (index + 1) * size > first
        return near

    def _flush_from(self, blocks: Blocks, position: int) -> None:
        """Flush the rows in blocks of a request from `position` on, before they are forgotten."""
        first = position // self._block_size if self._block_size else 0
        self.flush_writers(blocks[first:])

    def _give(
        self,
        request: Request,
        blocks: Blocks,
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """Start a request with these blocks; it writes from its first uncached token on."""
        owners, size, lane = self._owners, self._block_size, request.lane
        known = num_computed_tokens - num_external_tokens
        request.owned_from = num_computed_tokens // size if size else 0
        request.blocks, request.alone = array("I", blocks.tobytes()), True
        self._count(request)
        owners.allocate(blocks[owners.num_blocks_of(known) :])
        # Into a block that it shares in part, others may write before its own first rows.
        start = max(request.owned_from, owners.num_blocks_of(known))
        owners.own(lane, start, blocks[start:])
        if known:
            self._starting[lane] = known
            self._enter_phase(request, Phase.STARTING)

    def _own(self, request: Request, start: int, stop: int) -> None:
        """Enter the writer of blocks [start, stop) of a request, whoever wrote them before."""
        blocks = np.array(request.blocks[start:stop], U32)
        self._shares |= len(blocks) > 0
        self.flush_writers(blocks)
        for lane in {*self._owners.of(blocks)[0].tolist()} - {request.lane}:
            other = self._requests.get(lane)
            if other and not {*blocks.tolist()}.isdisjoint(other.blocks):
                other.alone = False
                self._linger.open[lane] = other.takes_rows
        self._owners.own(request.lane, start, blocks)

    def _write(self, request: Request, start: int, stop: int, named: bool) -> None:
        """Order rows [start, stop) behind those of others that write into the same blocks.

        Slots of rows that are not `named` may still name rows of the others: the server forgets
        what this request wrote.
        """
        if request.alone or not self._block_size:
            return
        self._own(request, start // self._block_size, self._owners.num_blocks_of(stop))
        if named:
            return
        if self._short:
            self._slots_unknown = True
        else:
            self._out.forget(self._owners.slots(np.array(request.blocks, U32), start, stop))

    def _release(self, handle: int, request: Request) -> None:
        """Take its blocks from a request."""
        if request.recording is Recording.UNSEEN and request.alone:
            self._unseen.add(handle)
        else:
            self._owners.release(handle, np.array(request.blocks, U32))
        request.blocks = array("I")
        self._count(request)

    def _forget_late(self, handle: int, start: int, stop: int) -> None:
        """Forget the slots of positions [start, stop), which were computed and came too late."""
        if not self._block_size or (handle in self._unseen and not self._shares):
            return
        slots = None if self._short else self._owners.slots_of(handle, start, stop)
        if slots is not None:
            # Rows of earlier steps that linger in these blocks were written before.
            self.flush_writers(np.unique(slots // np.uint64(self._block_size)).astype(U32))
            self._out.forget(slots)
            return
        self._slots_unknown = True
        if not self._short:
            self.clear_unknown()

    # ------------------------------------------------------------------ ops

    def _rewind(self, request: Request, position: int) -> None:
        """Reject the rows at `position` and after, if there are any."""
        linger, lane = self._linger, request.lane
        if position < request.emitted:
            self._out.op(OpKind.REWIND, request.request_id, position=position)
            request.emitted = position
            if not request.kept:
                self._emitter.lose(request, position, 0, pb.MISSING_REASON_QUEUE_FULL)
        if position >= linger.end[lane]:
            return
        self._drop(Word.REWOUND, linger.cut(lane, position))
        linger.end[lane] = position
        if self._block_size and position < request.owned_from * self._block_size:
            # It writes into blocks that it shares.
            first, stop = position // self._block_size, request.owned_from
            self._own(request, first, stop)
            request.owned_from = first

    def _digests(self, request: Request, tokens: bytes, ends: Iterable[int] = ()) -> None:
        """Emit digests of tokens (uint32) that were not emitted yet."""
        digests = token_digests(np.frombuffer(tokens, U32), ends, request.digest_key)
        known = dict(request.digests.tolist())
        new = [known.get(position) != value for position, value in digests.tolist()]
        request.digests = digests
        self._count(request)
        self._out.digests(request.request_id, digests[new])
