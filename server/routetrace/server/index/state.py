"""State of the server, derived from records.

Every change is a record in the store. `apply.py` applies records in order after their commit, and
again when the server starts; a snapshot replaces the records before it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from routetrace.codec.records import Provenance
from routetrace.common.errors import Corrupt
from routetrace.common.layout import ModelLayout
from routetrace.server.common.slices import at_once
from routetrace.server.index.agreements import Agreements
from routetrace.server.index.owners import owner_of
from routetrace.server.index.records.record import (
    key_to_stored,
    layout_from_stored,
    layout_to_stored,
)
from routetrace.server.index.records.snapshot import RELEASE, pieces, read_pieces, to_bytes, upgrade
from routetrace.server.index.traces.refs import chunk_of
from routetrace.server.index.traces.sources import Source, TraceKey, WriterKey
from routetrace.server.index.traces.spans import Span
from routetrace.server.index.traces.tombstones import Boot, Fate, Tombstones
from routetrace.server.index.traces.trace import Trace, dump_entry, dump_trace, load_trace
from routetrace.server.index.traces.trace_index import TraceIndex
from routetrace.server.index.writer import Writer, dump_writer, load_writer
from routetrace.stored import format5_pb2 as stored
from routetrace.v1 import routetrace_pb2 as pb

#: Positions that a request inherits at a time.
INHERITED = 1 << 14

#: Traces that are packed at a time, and frames of chunks that are looked at.
_PACKED = 16
_FRAMES = 1 << 12


class Frames(NamedTuple):
    """Frames of a stored chunk: frame i is at offsets[i] .. offsets[i + 1]."""

    offsets: np.ndarray[Any, np.dtype[np.uint32]]
    layout: ModelLayout
    run: str
    token: str = ""
    """Name of the token that sent it; "" without one."""

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return int(self.offsets[-1])


class State:
    """Writers with their slot maps, the trace index, and the directory of stored chunks."""

    def __init__(self, default_ttl: float, keeps: Callable[[str], bool] = lambda _: False) -> None:
        self.default_ttl = default_ttl
        self.keeps = keeps
        """Whether traces of a run stay past their lease until a record deletes them."""
        self.number = 0
        """Last applied record."""
        self.traces = TraceIndex()
        self.tombstones = Tombstones()
        self.agreements = Agreements()
        self.expired = 0
        """Expired traces that are not counted yet; `Retention` resets it."""
        self.writers: dict[WriterKey, Writer] = {}
        self.epochs: dict[WriterKey, int] = {}
        """Highest epoch ever granted, also to forgotten writers."""
        self.frames: dict[int, Frames] = {}
        """Stored chunks, by record number."""
        self.run_bytes: Counter[str] = Counter()
        """Bytes of stored chunks, by run."""
        self.owner_bytes: Counter[str] = Counter()
        """Bytes of stored chunks, by owner."""
        self._layouts: dict[ModelLayout, int] = {}
        self.touched: set[TraceKey | WriterKey] = set()
        """Changes whose waiting tasks are not woken yet; `Journal` empties it."""

    def begin(
        self, writer: Writer, request_id: str, occurrence: str, begin: pb.RequestBegin, now: float
    ) -> tuple[TraceKey, Source]:
        """Add a new source to the trace index, unless its trace was deleted already."""
        source = Source(
            writer.key,
            writer.epoch,
            request_id,
            occurrence,
            writer.layout,
            begin.prompt_len,
            dict(begin.labels),
            now,
            model=writer.model,
            nonce=begin.nonce,
            received_by=begin.transfer_id,
        )
        if begin.HasField("kv_weight_version"):
            source.kv_version = begin.kv_weight_version
        key = (writer.key.run, begin.trace_id or request_id)
        self.trace(key, now)  # an expired one must not become part of the new one
        source.forgotten = self.tombstones.hold(source)
        if not source.forgotten:
            ttl = begin.ttl_seconds or self.default_ttl
            self.traces.begin(key, source, ttl=ttl, now=now, token=writer.token)
        return key, source

    def trace(self, key: TraceKey, now: float) -> Trace | None:
        """Return a trace; delete it if its lease ran out before this time of a record.

        Sweeps delete expired traces without a record, and a replay must not depend on sweeps.
        """
        trace = self.traces.traces.get(key)
        if trace and trace.expires <= now and not self.keeps(key[0]):
            self.forget(key, Fate("expired", trace.expires))
            self.expired += 1
            return None
        return trace

    def inherit(
        self,
        writer: Writer,
        source: Source,
        block_ids: Sequence[int] | npt.NDArray[np.uint32],
        stop: int,
        last_step: int = 0,
    ) -> Iterator[None]:
        """Give a source the rows that its slots name for positions [0, stop), piece by piece.

        The slots must not change between two pieces.
        """
        spans = source.attempts[-1]
        at, unknown = 0, []
        for start in range(0, stop, INHERITED):
            end = min(start + INHERITED, stop)
            for run in writer.slots.resolve(block_ids, start, end, last_step):
                if run.position > at:
                    unknown.append((at, run.position))
                spans.append(Span(*run, Provenance.SLOT))
                at = run.position + run.length
            yield
        source.not_know([*unknown, *([(at, stop)] if at < stop else ())])

    def touch(self, trace: Trace, now: float) -> None:
        """Note a change of a trace, and extend its lease."""
        self.changed(trace)
        trace.updated, trace.last_record = now, self.number
        trace.expires = max(trace.expires, now + trace.ttl)

    def changed(self, trace: Trace) -> None:
        """Discard cached views and the packed form of a trace."""
        trace.changes += 1
        self.traces.changes += 1
        trace.packed = None
        self.touched.add(trace.key)

    def hold(self, number: int, frames: Frames) -> None:
        """Add a stored chunk."""
        self.frames[number] = frames
        self._count(frames, frames.nbytes)

    def release(self, number: int) -> Frames:
        """Remove a stored chunk; return its frames."""
        frames = self.frames.pop(number)
        self._count(frames, -frames.nbytes)
        return frames

    def _count(self, frames: Frames, nbytes: int) -> None:
        owner = owner_of(frames.token, frames.run)
        for held, name in ((self.run_bytes, frames.run), (self.owner_bytes, owner)):
            held[name] += nbytes
            if not held[name]:
                del held[name]

    def forget(self, key: TraceKey, fate: Fate) -> bool:
        """Delete a trace; its live requests continue without a trace, at all shards."""
        self.touched.add(key)
        sources = self.traces.remove(key)
        if sources is None:
            return False
        self.tombstones.add(key, sources, fate)
        return True

    def forget_begun(
        self, key: TraceKey, since: float, until: float, fate: Fate
    ) -> Generator[None, None, bool]:
        """Delete the requests of a trace that began in a closed interval; False: there are none.

        A request is that of all its shards, and began when the first of them reported it.
        """
        trace = self.traces.traces.get(key)
        if trace is None:
            return False
        yield from trace.join_in_steps()
        begun = [r for r in trace.join.requests if since <= r.began <= until]
        if len(begun) == len(trace.join.requests):
            return self.forget(key, fate)
        if begun:
            self.tombstones.bury(trace.drop(begun))
            self.changed(trace)
        return bool(begun)

    def prune_tombstones(self) -> None:
        """Forget tombstones of boots that are over, where there are many."""
        self.tombstones.prune(
            Boot(key.run, key.engine_id, w.boot_id) for key, w in self.writers.items()
        )

    def engine_writers(self, run: str, engine_id: str) -> list[Writer]:
        """Return the writers of an engine in its newest boot, in order."""
        found = [
            w
            for key, w in sorted(self.writers.items())
            if (key.run, key.engine_id) == (run, engine_id)
        ]
        # The slots of a shard that has not reported since a restart are obsolete.
        newest = max(found, key=lambda w: w.opened, default=None)
        return [w for w in found if newest and w.boot_id == newest.boot_id]

    def runs(self) -> set[str]:
        """Return the runs that have traces, writers, or reports of trainers."""
        writers = (key.run for key in self.writers)
        return {*self.traces.of_run, *writers, *self.agreements.runs}

    def marks(self) -> Iterator[Iterable[int]]:
        """Yield the chunks that live slots and traces point into, part by part.

        Records may be applied between two parts: of the chunks stored before the first part, all
        that are pointed into at the end are included. Traces take over rows from slots, and slots
        only drafts of live requests; so slots and drafts come first, then all traces of that time.
        A trace that is newer than those took its rows from slots, or from chunks stored meanwhile.
        """
        for writer in [*self.writers.values()]:
            live = [source for _, source in writer.live.values()]
            drafts = (map(chunk_of, source.drafts.refs) for source in live)
            yield chain(writer.slots.chunks().tolist(), *drafts)
        for trace in self.traces.oldest_first():
            yield trace.chunks()

    def pack(self) -> Iterator[None]:
        """Prepare the snapshot of traces that changed, or got an entry in lists, step by step."""
        for index, trace in enumerate(self.traces.oldest_first(), 1):
            if trace.packed is None:
                self._pack(trace)
            if not index % _PACKED:
                yield

    def _pack(self, trace: Trace) -> bytes:
        for source in trace.sources:
            self._layout_number(source.layout)
        piece = stored.Piece()
        message = piece.traces.add()
        dump_trace(message, trace, self._layouts)
        dump_entry(message, trace, self._layout_number)
        trace.packed = to_bytes(piece)
        return trace.packed

    def _layout_number(self, layout: ModelLayout) -> int:
        return self._layouts.setdefault(layout, len(self._layouts))

    # ------------------------------------------------------------------ snapshots

    def dump(self) -> Iterator[bytes]:
        """Return the state in pieces at once; see `dump_in_steps`."""
        return at_once(self.dump_in_steps())

    def dump_in_steps(self) -> Generator[None, None, Iterator[bytes]]:
        """Return the state in pieces, for a snapshot that covers the records up to `number`.

        Between two steps the state may be read, but not changed. Afterwards it may: the pieces hold
        the state of before, also if they are taken later, in another thread.
        """
        # In tuples, which the garbage collector does not walk, of bytes.
        traces: deque[tuple[bytes, ...]] = deque()
        every = self.traces.oldest_first()
        while part := tuple(t.packed or self._pack(t) for t in islice(every, _PACKED)):
            traces.append(part)
            yield
        numbers, frames = [*self.frames], [*self.frames.values()]
        for at in range(0, len(frames), _FRAMES):
            for layout in {id(f.layout): f.layout for f in frames[at : at + _FRAMES]}.values():
                self._layout_number(layout)
            yield
        layouts = dict(self._layouts)
        head = stored.Piece(
            head=stored.Head(
                number=self.number,
                serial=self.traces.serial,
                says_unknown_versions=True,
                release=RELEASE,
            )
        )
        head.layouts.extend(map(layout_to_stored, layouts))
        writers = []
        for writer in self.writers.values():
            piece = stored.Piece()
            dump_writer(piece.writers.add(), writer)
            writers.append(to_bytes(piece))
            yield
        tail = []
        for piece in chain(self.tombstones.dump(), self.agreements.dump()):
            tail.append(to_bytes(piece))
            yield
        last = stored.Piece()
        for key, epoch in self.epochs.items():
            last.epochs.add(writer=key_to_stored(key), epoch=epoch)
        tail.append(to_bytes(last))
        parts = chain([to_bytes(head)], _emptied(traces), writers, tail)
        return pieces(chain(parts, _dump_frames(numbers, frames, layouts)))

    def load(self, data: Iterable[bytes]) -> None:
        """Load the pieces of a snapshot; on error leave the state unchanged.

        Raises:
            Corrupt: if the pieces are no snapshot.
            UnsupportedFormat: if the snapshot has another format.
        """
        new = State(self.default_ttl, self.keeps)
        layouts: list[ModelLayout] = []
        headed = says_unknown = False
        try:
            for piece in read_pieces(data):
                if piece.HasField("head"):
                    headed, says_unknown = True, piece.head.says_unknown_versions
                if not says_unknown:
                    upgrade(piece)
                new._load_piece(piece, layouts)
        except (KeyError, IndexError, OverflowError, TypeError, ValueError, DecodeError) as error:
            raise Corrupt(f"the snapshot cannot be read: {error}") from error
        if not headed:
            raise Corrupt("the snapshot has no head")
        self.replace(new)

    def replace(self, new: State) -> None:
        """Take over everything that another state holds."""
        self.number, self.traces, self.writers = new.number, new.traces, new.writers
        self.tombstones, self.expired = new.tombstones, new.expired
        self.agreements = new.agreements
        self.epochs, self.frames = new.epochs, new.frames
        self.run_bytes, self.owner_bytes = new.run_bytes, new.owner_bytes
        self._layouts = new._layouts

    def _load_piece(self, piece: stored.Piece, layouts: list[ModelLayout]) -> None:
        if piece.HasField("head"):
            self.number, self.traces.serial = piece.head.number, piece.head.serial
        for layout in piece.layouts:
            layouts.append(layout_from_stored(layout))
            self._layout_number(layouts[-1])
        for trace in piece.traces:
            self.traces.add(load_trace(trace, layouts))
        for message in piece.writers:
            writer = load_writer(message, self.traces.traces)
            self.writers[writer.key] = writer
        self.tombstones.load(piece)
        self.agreements.load(piece)
        for known in piece.epochs:
            key = WriterKey(known.writer.run, known.writer.engine_id, known.writer.shard)
            self.epochs[key] = known.epoch
        for chunk in piece.frames:
            offsets = np.frombuffer(chunk.offsets, np.uint32)
            held = Frames(offsets, layouts[chunk.layout], chunk.run, chunk.token)
            self.hold(chunk.number, held)


def engine_key(run: str, engine_id: str) -> WriterKey:
    """Return the key of changes in which a writer of an engine opens an epoch."""
    return WriterKey(run, engine_id, "")


def _emptied(parts: deque[tuple[bytes, ...]]) -> Iterator[bytes]:
    """Yield the items of all parts, and let go of each part then."""
    while parts:
        yield from parts.popleft()


def _dump_frames(
    numbers: Sequence[int], frames: Sequence[Frames], layouts: dict[ModelLayout, int]
) -> Iterator[bytes]:
    for number, chunk in zip(numbers, frames, strict=True):
        piece = stored.Piece()
        offsets, layout = chunk.offsets.tobytes(), layouts[chunk.layout]
        piece.frames.add(
            number=number, offsets=offsets, layout=layout, run=chunk.run, token=chunk.token
        )
        yield to_bytes(piece)
