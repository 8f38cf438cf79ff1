"""Assembly of the messages of a read stream, all of them checked."""

# Over 400 lines: one state of a read stream, of which every check needs all parts.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from routetrace.client._core.cells import GrowingCells, PlacedCells
from routetrace.client._ranges import clip_ranges, column_index, merge_ranges
from routetrace.client.alignment import check_layout
from routetrace.client.stat import (
    PrefixSpan,
    ProvenanceSpan,
    ReadFacts,
    TraceStat,
    TraceState,
    VersionSpan,
    facts_from_proto,
    layout_from_proto,
    version_from_wire,
)
from routetrace.client.trace import Trace, incomplete
from routetrace.codec.frame import copy_ids, decode_frames, read_header
from routetrace.codec.frame_header import Buffer, FrameHeader
from routetrace.codec.records import SPAN, U32, Provenance, unpack
from routetrace.common.errors import Corrupt, Unavailable
from routetrace.common.missing import missing_from_proto
from routetrace.v1 import routetrace_pb2 as pb

#: Limits of the memory for one stream: positions of a trace, and bytes of their ids.
MAX_ROWS = 1 << 24
MAX_BYTES = 16 << 30

# Allocated from the server's count alone; arrays beyond it grow with the rows.
_FIRST_BYTES = 1 << 30

# Times that a stream of a follower may report a cell as missing: once per unreadable frame.
_MISSING_REPORTS = 8

_PROVENANCE = {p.value: p.name.lower() for p in Provenance}


@dataclass(frozen=True)
class Want:
    """Request of a read, as its result is checked against it."""

    trace_id: str
    """The trace; "" where the server is not asked for one."""
    layer_ids: tuple[int, ...] | None
    """Absolute layer ids, ascending; None: all MoE layers."""
    token_start: int = 0
    token_stop: int | None = None
    """One past the last position; None: to the end."""
    mask: bool = False
    """Whether missing cells are to be masked; else they are an error."""
    follow: bool = False
    """Whether rows come while the request runs: the engine may take some back."""
    weight_version: int | None = None
    """The version that computed all rows; None: any did."""
    incarnation: int = 0
    """The one that is meant; 0: the server's choice, which of a running request may change."""
    nonce: int = 0
    """That of the engine request that is meant; 0: as `incarnation` says."""
    token_digests: bool = True
    """Whether the trace's token digests are of use."""
    num_tokens: int = 0
    """Tokens that the trace has at least, if it has ended."""
    num_rows: int | None = None
    """Positions that exist, where the server cannot know: reads by KV blocks."""
    pin_memory: bool = False
    """Whether new arrays are page-locked."""
    into: PlacedCells | None = None
    """Where the rows go, and which they are; None: all from `token_start` on, into new arrays."""

    @property
    def name(self) -> str:
        """Name for errors."""
        return f"trace {self.trace_id!r}" if self.trace_id else "rows of KV blocks"


class _Placed(NamedTuple):
    """A frame, and the places of its rows."""

    frame: memoryview
    layer_ids: tuple[int, ...]
    columns: slice | list[int]
    targets: list[tuple[slice, int, int]]
    """(places, first row of the frame, rows)."""
    whole: slice | None
    """The places of all its rows, if they are neighbours: it is decoded there."""
    header: FrameHeader


class _Columns(NamedTuple):
    """Requested layers of a frame."""

    layer_ids: tuple[int, ...]
    where: slice | list[int]
    """Their columns."""
    given: frozenset[int]
    """The same."""


class _Came(NamedTuple):
    """Rows of one span, or of several consecutive ones."""

    start: int
    stop: int
    columns: frozenset[int]
    version: int
    provenance: str
    origin: str
    """The trace that they stand in from; "" if they are the trace's own."""

    def joined(self, after: _Came) -> _Came | None:
        """Return the union with the rows that follow; None if they do not follow."""
        if self.stop != after.start or self[2:] != after[2:]:
            return None
        return self._replace(stop=after.stop)


@lru_cache(maxsize=128)
def _columns_of(held: tuple[int, ...], asked: tuple[int, ...]) -> _Columns:
    """Return the requested layers of a frame, and their columns here."""
    column = {layer: i for i, layer in enumerate(asked)}
    layer_ids = tuple(i for i in held if i in column)
    columns = [column[i] for i in layer_ids]
    return _Columns(layer_ids, column_index(columns), frozenset(columns))


class Assembler:
    """Turn the messages of one stream into a trace, or into consecutive parts of one.

    Any fault of the stream ends in an error, never in a wrong or shorter answer:

    * every message is the one that was sealed (`messages.py`);
    * every frame passes its checksums and has the layout's experts and top-k;
    * every span lies within its frame and within the request;
    * no cell comes twice, unless the stream follows a running request: an engine may take rows back
      (rejected speculative tokens), and later rows replace them;
    * the stream has its end, which counts the spans and accounts for every cell: sent or missing;
    * it is of the incarnation and weight version asked for, and N tokens have N - 1 rows.
    """

    def __init__(self, want: Want) -> None:
        self._want = want
        self._cells: Any = want.into
        if want.into:
            want.into.clear()
        self._info: pb.TraceInfo | None = None
        self._end: pb.ReadEnd | None = None
        self._num_spans = 0
        self._num_frames = 0
        self._came: list[_Came] = []
        # Positions: one past the last row that came, and one past the last that was handed out.
        self._filled = want.token_start
        self._handed = want.token_start

    @property
    def state(self) -> TraceState | None:
        """State of the trace in the last message; None before the first."""
        return TraceState.from_proto(self._info.state) if self._info else None

    @property
    def stat(self) -> TraceStat | None:
        """Facts about the trace in the last message; None before the first."""
        return TraceStat(**facts_from_proto(self._info)) if self._info else None

    @property
    def num_rows(self) -> int:
        """Rows of the trace in the last message."""
        return self._info.num_rows if self._info else 0

    def feed(
        self,
        message: pb.GetTraceResponse | pb.GetBlocksResponse | None,
        payload: Buffer | None = None,
    ) -> None:
        """Check and take the next message.

        Args:
            message: the message; None stands for one that does not parse as it was sealed.
            payload: its frames, where they were taken out of it.

        Raises:
            Corrupt: if it contradicts itself or the request.
            InvalidArgument: if the trace is of another model than the rows are to be placed for.
        """
        with _corrupt_if_invalid(self._want.name):
            if message is None:
                raise self._corrupt("a message that does not parse, or not as it was sealed")
            if self._end is not None:
                raise self._corrupt("a message after the end")
            if message.HasField("info"):
                self._learn(message.info)
            if self._info is None:
                raise self._corrupt("no info in the first message")
        if self._want.into:
            check_layout(self._want.name, self._layout, self._want.into.layout)
        with _corrupt_if_invalid(self._want.name):
            self._take_rows(message, message.payload if payload is None else payload)
            if message.HasField("end"):
                self._end = message.end

    def take(self) -> Trace | None:
        """Return the rows after those handed out, up to the first hole; None if there are none.

        A part that starts before the stop of the one before replaces its rows from there on.
        """
        if self._info is None or self._end is not None:
            return None
        start = self._handed
        there = self._cells.valid[:, self._cells.rows(start, self._filled)]
        whole = np.logical_and.reduce(there, axis=0)
        count = len(whole) if whole.all() else int(whole.argmin())
        if not count:
            return None
        self._handed += count
        # A copy: the engine may take rows back, and the caller's must not change.
        return self._build(self._info, start, self._handed, copy=True)

    def finish(self) -> Trace | ReadFacts:
        """Return the rows not handed out, after the stream ended; facts, where rows are placed.

        Raises:
            Unavailable: if the stream has no end.
            Corrupt: if its end contradicts the rows.
            Incomplete: if cells are missing, or may be, and the reader wants no mask.
        """
        if self._end is None:
            raise Unavailable(f"{self._want.name}: the stream broke off", retry_after=0.05)
        with _corrupt_if_invalid(self._want.name):
            read = self._finish(self._end)
        stop = self._end.token_stop
        # Only a trace of known length has no rows beyond.
        unknown_end = not read.num_tokens and self._want.token_stop != stop
        if not self._want.mask and (unknown_end or read.missing):
            unknown_from = stop if unknown_end else None
            raise incomplete(read, unknown_from, self._want.weight_version)
        return read

    def _learn(self, info: pb.TraceInfo) -> None:
        """Take facts about the trace; make room for its rows at the first."""
        if info.trace_id != self._want.trace_id:
            raise self._corrupt(f"trace {info.trace_id!r}")
        asked = self._want.incarnation
        if asked not in (0, info.incarnation):
            raise self._corrupt(f"incarnation {info.incarnation}, asked for {asked}")
        if self._want.nonce and not info.nonce:
            raise Unavailable(
                f"{self._want.name}: the server does not know nonces of requests; upgrade it to "
                "0.9, or read without nonce="
            )
        if self._want.nonce not in (0, info.nonce):
            raise self._corrupt(f"a request with nonce {info.nonce}, asked for {self._want.nonce}")
        if self._want.num_rows is not None:  # reads by blocks know of no request
            info.num_rows, info.num_tokens = self._want.num_rows, self._want.num_rows + 1
            info.state = pb.TRACE_STATE_COMPLETE
        whole = info.num_tokens or info.state == pb.TRACE_STATE_COMPLETE
        if whole and info.num_rows != info.num_tokens - 1:
            raise self._corrupt(f"{info.num_rows} rows of {info.num_tokens} tokens")
        TraceState.from_proto(info.state)  # one that we know
        if self._info is None:
            layout = self._layout = layout_from_proto(info.layout)
            if self._want.layer_ids is not None:
                layout = layout.select(self._want.layer_ids)
            self._layer_ids, self._row_bytes = layout.layer_ids, layout.row_bytes
            if self._cells is None:
                first = self._want.token_start
                self._cells = GrowingCells(
                    len(self._layer_ids), self._layout, first, self._want.pin_memory
                )
                stop = min(info.num_rows, self._want.token_stop or info.num_rows)
                self._reserve(min(stop, first + _FIRST_BYTES // self._row_bytes))
        else:
            self._check_same(info)
            if self._want.follow and info.num_rows < self._filled:
                self._drop_from(max(info.num_rows, self._want.token_start))
        self._info = info

    def _check_same(self, info: pb.TraceInfo) -> None:
        fields = ["run", "trace_id", "layout"]
        # Another engine request may go on from the one that is followed.
        if not self._want.follow:
            fields.append("incarnation")
        for field in fields:
            first, last = getattr(self._info, field), getattr(info, field)
            if first != last:
                raise self._corrupt(f"two values of {field}: {first}, {last}")

    def _take_rows(
        self, message: pb.GetTraceResponse | pb.GetBlocksResponse, frames: Buffer
    ) -> None:
        payload = memoryview(frames)
        lengths = unpack(message.frame_lengths, U32, "frame_lengths").tolist()
        if sum(lengths) != len(payload):
            raise self._corrupt(f"frames of {sum(lengths)} bytes in {len(payload)} bytes")
        spans = unpack(message.spans, SPAN, "spans").tolist()
        choices: list[tuple[int, ...] | None] = [None]
        choices += [tuple(choice.layer_ids) for choice in message.layer_choices]
        by_frame: dict[int, list[Any]] = {}
        for span in spans:
            index = span[2] - self._num_frames
            if not 0 <= index < len(lengths):
                raise self._corrupt(f"a span of frame {span[2]}, which is not in its message")
            by_frame.setdefault(index, []).append(span)
        if self._want.into:
            self._want.into.bytes_fetched += len(payload)
        self._num_frames += len(lengths)
        self._num_spans += len(spans)
        at = 0
        placed = []
        runs: list[tuple[_Came, _Columns]] = []
        for index, length in enumerate(lengths):
            if index in by_frame:
                some = by_frame[index]
                chosen = self._chosen(some, choices)
                placed.append(self._place(payload[at : at + length], some, chosen, runs))
            at += length
        for came, columns in runs:
            self._claim(came, columns)
        # After claiming, which may replace the arrays.
        ids = self._cells.ids
        wanted = [
            (p.frame, p.layer_ids, ids[p.columns, p.whole] if p.whole else None) for p in placed
        ]
        headers = [p.header for p in placed]
        for frame, rows in zip(placed, decode_frames(wanted, headers), strict=True):
            if not frame.whole:
                for places, row, count in frame.targets:
                    part = rows[:, row : row + count]
                    if isinstance(frame.columns, slice):
                        copy_ids(part, ids[frame.columns, places])
                    else:
                        ids[frame.columns, places] = part

    def _chosen(
        self, spans: list[Any], choices: list[tuple[int, ...] | None]
    ) -> tuple[int, ...] | None:
        """Return the layers that the spans of a frame give; None: all that it holds."""
        choice: int
        [choice, *others] = {span[6] for span in spans}
        if others or choice >= len(choices):
            raise self._corrupt(f"a frame with choices {choice, *others} of {len(choices)} layers")
        return choices[choice]

    def _place(
        self,
        frame: memoryview,
        spans: list[Any],
        chosen: tuple[int, ...] | None,
        runs: list[tuple[_Came, _Columns]],
    ) -> _Placed:
        """Return the places of a frame's rows; add the rows to `runs`, which are to be claimed."""
        header = read_header(frame)
        model = (self._layout.num_experts, self._layout.top_k)
        if (header.num_experts, header.top_k) != model:
            raise self._corrupt(f"a frame of other (num_experts, top_k) than {model}")
        held = header.layer_ids
        if chosen is not None:
            held = tuple(i for i in held if i in chosen)
        columns = _columns_of(held, self._layer_ids)
        if not columns.layer_ids:
            raise self._corrupt("a frame with none of the layers asked for")
        targets: list[tuple[slice, int, int]] = []
        for span in spans:
            came = self._came_with(span, header.num_rows, columns)
            targets += self._targets(came, span[3])
            joined = runs[-1][0].joined(came) if runs else None
            if joined:
                runs[-1] = joined, columns
            else:
                runs.append((came, columns))
        places, _, count = targets[0]
        whole = len(targets) == 1 and count == header.num_rows and isinstance(columns.where, slice)
        place = places if whole else None
        return _Placed(frame, columns.layer_ids, columns.where, targets, place, header)

    def _came_with(self, span: Any, num_rows: int, columns: _Columns) -> _Came:
        """Return the rows of a span, checked against its frame and the request."""
        position, count, _, row, attempt, provenance, _, version = span
        stop = position + count
        if count == 0 or row + count > num_rows:
            raise self._corrupt(f"a span of {count} rows at {row} of {num_rows}")
        if position < self._want.token_start or stop > (self._want.token_stop or MAX_ROWS):
            raise self._corrupt(f"rows [{position}, {stop}), which were not asked for")
        if self._want.weight_version not in (None, version):
            raise self._corrupt(
                f"rows of weight version {version}, asked for {self._want.weight_version}"
            )
        name = _PROVENANCE.get(provenance, "unknown")
        origin = ""
        if provenance == Provenance.PREFIX:
            origins = list(self._info.prefix_trace_ids) if self._info else []
            if attempt >= len(origins):
                raise self._corrupt(f"rows of trace {attempt} of {len(origins)} that stand in")
            origin = origins[attempt]
        return _Came(position, stop, columns.given, version, name, origin)

    def _targets(self, came: _Came, row: int) -> list[tuple[slice, int, int]]:
        """Where rows from `row` of a frame on go, as (places, first row of the frame, rows)."""
        start, stop = came.start, came.stop
        parts = self._cells.parts(start, stop)
        targets = [(places, row + a - start, b - a) for places, a, b in parts]
        if sum(rows for _, _, rows in targets) != stop - start:
            raise self._corrupt(f"rows [{start}, {stop}), which were not all asked for")
        return targets

    def _claim(self, came: _Came, columns: _Columns) -> None:
        """Mark cells as valid; if decoding them fails, so does the read."""
        self._reserve(came.stop)
        valid = self._cells.valid
        for places, _, _ in self._cells.parts(came.start, came.stop):
            if valid[columns.where, places].any():
                self._take_back(came.start, came.stop, columns.given)
            valid[columns.where, places] = True
        self._filled = max(self._filled, came.stop)
        joined = self._came[-1].joined(came) if self._came else None
        if joined:
            self._came[-1] = joined
        else:
            self._came.append(came)

    def _take_back(self, position: int, stop: int, columns: frozenset[int]) -> None:
        """Replace rows that were received before."""
        if not self._want.follow:
            raise self._corrupt(f"rows [{position}, {stop}) twice")
        self._handed = min(self._handed, position)
        self._came = [
            part
            for came in self._came
            for part in (
                came._replace(stop=min(came.stop, position)),
                came._replace(start=max(came.start, stop)),
                came._replace(
                    start=max(came.start, position),
                    stop=min(came.stop, stop),
                    columns=came.columns - columns,
                ),
            )
            if part.start < part.stop and part.columns
        ]

    def _drop_from(self, position: int) -> None:
        """Drop rows that the engine took back."""
        self._cells.valid[:, position - self._want.token_start :] = False
        self._filled = min(self._filled, position)
        self._handed = min(self._handed, position)
        self._came = [
            came._replace(stop=min(came.stop, position))
            for came in self._came
            if came.start < position
        ]

    @property
    def _versions(self) -> tuple[VersionSpan, ...]:
        spans = merge_ranges(
            (came.start, came.stop, version_from_wire(came.version)) for came in self._came
        )
        return tuple(map(VersionSpan._make, spans))

    @property
    def _provenance(self) -> tuple[ProvenanceSpan, ...]:
        spans = merge_ranges((came.start, came.stop, came.provenance) for came in self._came)
        return tuple(map(ProvenanceSpan._make, spans))

    @property
    def _prefix_sources(self) -> tuple[PrefixSpan, ...]:
        spans = merge_ranges(
            (came.start, came.stop, came.origin) for came in self._came if came.origin
        )
        return tuple(map(PrefixSpan._make, spans))

    def _reserve(self, stop: int) -> None:
        """Make room for positions before `stop`."""
        if stop > MAX_ROWS:
            raise self._corrupt(f"{stop} rows, more than {MAX_ROWS}")
        if not self._want.into:
            nbytes = max(0, stop - self._want.token_start) * self._row_bytes
            if nbytes > MAX_BYTES:
                raise self._corrupt(f"{stop} rows of {nbytes} bytes, more than {MAX_BYTES}")
            self._cells.reserve(stop)

    def _finish(self, end: pb.ReadEnd) -> Trace | ReadFacts:
        if end.num_spans != self._num_spans:
            raise self._corrupt(f"{self._num_spans} spans of {end.num_spans}")
        if self._info and not end.info.token_digests:
            end.info.token_digests = self._info.token_digests
        self._learn(end.info)
        start, stop = end.token_start, end.token_stop
        self._check_range(start, stop, end.info.num_rows)
        self._reserve(stop)
        left = (
            (stop - start) * len(self._layer_ids) * (_MISSING_REPORTS if self._want.follow else 1)
        )
        for m in end.missing:
            if not start <= m.start < m.stop <= stop:
                raise self._corrupt(f"[{m.start}, {m.stop}) missing in [{start}, {stop})")
            left -= (m.stop - m.start) * (len(m.layer_ids) or len(self._layer_ids))
            if left < 0:
                raise self._corrupt("more missing cells than were asked for")
        for places, first, _ in self._cells.parts(start, stop):
            self._account(end, self._cells.valid[:, places], first)
        if self._want.num_rows is not None and end.missing:
            end.info.state = pb.TRACE_STATE_INCOMPLETE
        missing = missing_from_proto(end.missing, self._layer_ids)
        if self._want.into:
            return ReadFacts(
                **facts_from_proto(end.info),
                missing=missing,
                weight_versions=self._versions,
                provenance=self._provenance,
                prefix_sources=self._prefix_sources,
            )
        trace = self._build(end.info, start, stop, missing=missing)
        return trace.tokens(self._handed) if start < self._handed <= stop else trace

    def _account(self, end: pb.ReadEnd, valid: Any, start: int) -> None:
        """Check that each cell [layers, positions from start on] is either there or missing."""
        if not end.missing and valid.all():
            return
        absent = np.zeros(valid.shape, np.bool_)
        column = {layer: i for i, layer in enumerate(self._layer_ids)}
        for m in end.missing:
            columns = [column[i] for i in m.layer_ids] if m.layer_ids else slice(None)
            absent[columns, max(m.start - start, 0) : max(m.stop - start, 0)] = True
        if self._want.follow and (both := valid & absent).any():
            self._handed = min(self._handed, start + int(both.any(axis=0).argmax()))
            valid &= ~absent
        wrong = np.equal(valid, absent, out=absent)
        if wrong.any():
            layer, row = divmod(int(wrong.argmax()), wrong.shape[1])
            raise self._corrupt(
                f"position {start + row} of layer {self._layer_ids[layer]} as "
                + ("both there and missing" if valid[layer, row] else "neither there nor missing")
            )

    def _check_range(self, start: int, stop: int, num_rows: int) -> None:
        """Check the range of the result against the request."""
        want = self._want
        asked = num_rows if want.token_stop is None else want.token_stop
        # A start beyond the last row may have been clamped.
        if start != want.token_start and not start == stop < want.token_start:
            raise self._corrupt(f"rows from {start} on, asked for {want.token_start}")
        if not max(start, min(asked, num_rows)) <= stop <= max(start, asked):
            raise self._corrupt(f"rows up to {stop} of {num_rows}, asked for {asked}")
        if self._filled > max(stop, want.token_start):
            raise self._corrupt(f"rows up to {self._filled} of {stop}")

    def _build(
        self, info: pb.TraceInfo, start: int, stop: int, *, copy: bool = False, **fields: Any
    ) -> Trace:
        facts = facts_from_proto(info)
        facts["num_rows"] = max(facts["num_rows"], stop)
        rows = self._cells.rows(start, stop)
        ids, valid = self._cells.ids[:, rows], self._cells.valid[:, rows]
        return Trace(
            **facts,
            **fields,
            layer_ids=self._layer_ids,
            token_start=start,
            token_stop=stop,
            weight_versions=clip_ranges(self._versions, start, stop, VersionSpan),
            provenance=clip_ranges(self._provenance, start, stop, ProvenanceSpan),
            prefix_sources=clip_ranges(self._prefix_sources, start, stop, PrefixSpan),
            _ids=ids.copy() if copy else ids,
            _valid=valid.copy() if copy else valid,
        )

    def _corrupt(self, what: str) -> Corrupt:
        return Corrupt(f"{self._want.name}: the server sent {what}")


@contextmanager
def _corrupt_if_invalid(name: str) -> Iterator[None]:
    """Turn errors about values in messages, which are no arguments, into Corrupt."""
    try:
        yield
    except (ValueError, KeyError) as error:
        raise Corrupt(f"{name}: the server sent an invalid message: {error}") from error
