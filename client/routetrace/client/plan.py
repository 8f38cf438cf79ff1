"""Which rows a trainer's rank needs of a micro-batch, and where they go. Pure: no I/O.

    batch = MicroBatch.packed([Sample.of("g0-s0", 512), Sample.of("g0-s1", 300)], align=16)
    plan = FetchPlan.make(layout, batch, Rank(layer_ids=range(12, 24), cp_size=2, cp_rank=0))
    rows = client.fetch(plan)   # topk_ids [12, local tokens, top_k], valid [12, local tokens]

The micro-batch is described once, as the trainer lays it out before it is split; each rank says
which part of it, and of the model, it computes. What the trainer does to its token ids is done to
rows in the same order: padding or packing, then context parallelism, then sequence parallelism,
then flattening. Padding has no rows, nor has the last token of a sample.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client.located import Locations
from routetrace.client.micro_batch import MicroBatch, Sample, Unit
from routetrace.client.segments import Segment
from routetrace.common.errors import InvalidArgument
from routetrace.common.layout import ModelLayout
from routetrace.common.missing import MissingRange, MissingReason
from routetrace.common.values import Values

ContextLayout = Literal["zigzag", "contiguous", "ulysses"]
Flatten = Literal["sequence", "batch"]


@dataclass(frozen=True)
class Rank(Values):
    """The part of the model and of a micro-batch that a rank computes."""

    layer_ids: Sequence[int]
    """Absolute ids of its MoE layers, ascending: of its pipeline stage, all its virtual stages.
    Empty where nothing routes: then nothing is fetched."""
    cp_size: int = 1
    """Context parallel ranks."""
    cp_rank: int = 0
    cp_layout: ContextLayout = "zigzag"
    """How tokens are shared among them. "zigzag": a sequence is cut into 2 cp_size parts, and rank
    r has parts r and 2 cp_size - 1 - r (Megatron, Transformer Engine). "contiguous": a sequence is
    cut into cp_size parts. "ulysses": the whole packed batch is, wherever its sequences begin
    (Ulysses, ring attention over a packed stream); the same as "contiguous" if padded."""
    sp_size: int = 1
    """Ranks that share the tokens left by that in even parts: Megatron's tensor parallel ranks, if
    sequence parallelism is on."""
    sp_rank: int = 0
    flatten: Flatten = "sequence"
    """How [batch, seq] becomes tokens: "sequence" by sequence first (Megatron: token s of sample b
    is s * batch + b), or by "batch" first (Transformers)."""

    def __post_init__(self) -> None:
        for name in ("cp", "sp"):
            size = check.whole(f"{name}_size", getattr(self, f"{name}_size"), 1)
            check.whole(f"{name}_rank", getattr(self, f"{name}_rank"), 0, size - 1)
        check.choice("cp_layout", self.cp_layout, ("zigzag", "contiguous", "ulysses"))
        check.choice("flatten", self.flatten, ("sequence", "batch"))
        layer_ids = check.wholes("layer_ids", self.layer_ids, "() if nothing routes")
        object.__setattr__(self, "layer_ids", tuple(layer_ids))


class SampleSpan(NamedTuple):
    """Neighbouring positions of a sample, and where they are among the local tokens."""

    sample: int
    start: int
    stop: int
    at: int
    """Local token of the first."""
    stride: int
    """From one to the next."""


class Piece(NamedTuple):
    """Neighbouring rows of a request, and the local tokens that they are for."""

    start: int
    stop: int
    at: int
    stride: int

    def where(self, start: int, stop: int) -> slice:
        """The local tokens of positions [start, stop) within."""
        first = self.at + (start - self.start) * self.stride
        return slice(first, first + (stop - start - 1) * self.stride + 1, self.stride)


@dataclass(frozen=True)
class PlannedRead:
    """Rows of one request, for one segment of one sample."""

    sample: int
    segment: Segment
    pieces: tuple[Piece, ...]
    """Ascending and disjoint, never empty."""


@dataclass(frozen=True, eq=False, repr=False)
class FetchPlan:
    """The rows that a rank needs, and where they go: made by `FetchPlan.make`.

    The result is an array [layers, num_tokens, top_k] of `layer_ids` and the local tokens.
    """

    layout: ModelLayout
    """The model's: all its MoE layers."""
    layer_ids: tuple[int, ...]
    """The rank's MoE layers, ascending; none where nothing of the rank routes."""
    samples: tuple[Sample, ...]
    num_tokens: int
    """Local tokens, padding included."""
    spans: tuple[SampleSpan, ...]
    """The local tokens that are no padding."""
    reads: tuple[PlannedRead, ...]
    """Rows to fetch, and their places; none of a sample that is not located yet."""
    locations: Locations | None = None
    """Requests of the samples `to_find`, in their order; None while they are not located."""

    def __repr__(self) -> str:
        return (
            f"<FetchPlan {len(self.layer_ids)} layers x {self.num_tokens} tokens, "
            f"{self.num_rows} of them with rows, of {len(self.samples)} samples>"
        )

    @classmethod
    def make(cls, layout: ModelLayout, batch: MicroBatch, rank: Rank) -> FetchPlan:
        """Return the rows that a rank needs, and their places.

        Args:
            layout: the model's, as of `ModelLayout.from_config`.
            batch: the samples, as laid out before they are split.
            rank: the part that this rank computes.

        Raises:
            InvalidArgument: if a layer is no MoE layer of the model, or a length cannot be split
                evenly as the rank says; names it.
        """
        check.instance("layout", layout, ModelLayout)
        packing = "use MicroBatch.packed(samples)" if isinstance(batch, (list, tuple)) else ""
        check.instance("batch", batch, MicroBatch, packing)
        check.instance("rank", rank, Rank)
        model = layout.select(layout.moe_layer_ids)
        layer_ids = tuple(rank.layer_ids)
        if layer_ids:
            model.select(layer_ids)  # raises if one is wrong
        lane_len, pieces = _split_lanes(batch, rank)
        lanes = len(batch.lanes)
        by_sequence = rank.flatten == "sequence"
        spans = []
        for lane, sample, start, stop, at in pieces:
            where = (at * lanes + lane, lanes) if by_sequence else (lane * lane_len + at, 1)
            spans.append(SampleSpan(sample, start, stop, *where))
        return cls(
            model,
            layer_ids,
            batch.samples,
            lanes * lane_len,
            tuple(spans),
            _reads(
                spans if layer_ids else (),
                {number: sample.segments for number, sample in enumerate(batch.samples)},
            ),
        )

    @cached_property
    def to_find(self) -> tuple[int, ...]:
        """Indexes of the samples that are found by their tokens, and have rows."""
        return tuple(i for i, s in enumerate(self.samples) if s.find and s.num_tokens > 1)

    @property
    def sequences(self) -> list[npt.NDArray[np.integer[Any]]]:
        """Token ids of the samples `to_find`."""
        found = (self.samples[number].token_ids for number in self.to_find)
        return [ids for ids in found if ids is not None]

    def with_locations(self, locations: Locations) -> FetchPlan:
        """Return the plan with the reads of samples that are found by their tokens.

        `planned` stays: rows that no request is proven to have are planned, and missing.

        Args:
            locations: result of `RouteClient.locate(plan.sequences)`.

        Raises:
            InvalidArgument: if it is of other sequences.
        """
        check.instance("locations", locations, Locations, "use client.locate(plan.sequences)")
        if len(locations) != len(self.to_find):
            raise InvalidArgument(
                field="locations",
                value=f"{len(locations)} of them",
                expected=f"{len(self.to_find)}, one for each of plan.sequences",
            )
        segments = {
            number: [
                Segment(
                    each.trace_id,
                    0,
                    each.num_rows(self.samples[number].num_tokens),
                    incarnation=each.incarnation,
                    num_tokens=each.num_tokens,
                )
            ]
            for number, each in zip(self.to_find, locations, strict=True)
            if each is not None and each.num_rows(self.samples[number].num_tokens)
        }
        kept = [read for read in self.reads if not self.samples[read.sample].find]
        found = _reads(self.spans if self.layer_ids else (), segments)
        reads = sorted([*kept, *found], key=lambda read: read.sample)
        return replace(self, reads=tuple(reads), locations=locations)

    @cached_property
    def unproven(self) -> tuple[tuple[int, MissingRange], ...]:
        """(sample, missing cells): rows of this rank that no request is proven to have.

        Those of all samples `to_find` while they are not located.
        """
        last: dict[int, int] = {}
        for span, stop in self._found():
            last[span.sample] = max(stop, last.get(span.sample, 0))
        missing = []
        for place, number in enumerate(self.to_find):
            each = self.locations[place] if self.locations else None
            start = each.num_rows(self.samples[number].num_tokens) if each else 0
            if start < (stop := last.get(number, 0)):
                reason = MissingReason.NOT_PROVEN
                if self.locations and place in self.locations.ambiguous:
                    reason = MissingReason.AMBIGUOUS
                missing.append((number, MissingRange(start, stop, self.layer_ids, reason)))
        return tuple(missing)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the ids: (layers, local tokens, top_k)."""
        return len(self.layer_ids), self.num_tokens, self.layout.top_k

    @property
    def nbytes(self) -> int:
        """Bytes of the ids and of their validity mask."""
        cell = self.layout.top_k * self.layout.dtype.itemsize + 1
        return self.num_tokens * len(self.layer_ids) * cell

    @cached_property
    def num_rows(self) -> int:
        """Local tokens that have a row."""
        return int(np.count_nonzero(self.planned))

    @cached_property
    def planned(self) -> npt.NDArray[np.bool_]:
        """Which local tokens have a row: [num_tokens].

        Those of a sample that is found by its tokens count, wherever it is.
        """
        mask = np.zeros(self.num_tokens, np.bool_)
        for read in self.reads:
            for piece in read.pieces:
                mask[piece.where(piece.start, piece.stop)] = True
        for span, stop in self._found():
            mask[Piece(*span[1:]).where(span.start, stop)] = True
        return mask

    def _found(self) -> Iterator[tuple[SampleSpan, int]]:
        """Yield the spans of samples that are found by their tokens, and where their rows stop."""
        for span in self.spans if self.layer_ids else ():
            sample = self.samples[span.sample]
            stop = min(span.stop, sample.num_tokens - 1)
            if sample.find and span.start < stop:
                yield span, stop

    @cached_property
    def sample_of(self) -> npt.NDArray[np.int32]:
        """The sample of each local token: [num_tokens]; -1 for padding."""
        return self._spread(lambda span: span.sample)

    @cached_property
    def position_of(self) -> npt.NDArray[np.int32]:
        """The position of each local token in its sample: [num_tokens]; -1 for padding."""
        return self._spread(lambda span: np.arange(span.start, span.stop))

    def _spread(self, value: Any) -> npt.NDArray[np.int32]:
        values = np.full(self.num_tokens, -1, np.int32)
        for span in self.spans:
            values[Piece(*span[1:]).where(span.start, span.stop)] = value(span)
        return values


def _reads(
    spans: Iterable[SampleSpan], segments_of: Mapping[int, Sequence[Segment]]
) -> tuple[PlannedRead, ...]:
    """Return the rows of segments that spans have, by sample, then by segment."""
    reads: dict[tuple[int, int], list[Piece]] = {}
    for span in spans:
        for number, segment in enumerate(segments_of.get(span.sample, ())):
            shift = segment.shift
            a = max(span.start, segment.start - shift)
            b = min(span.stop, segment.stop - shift)
            if a < b:
                at = span.at + (a - span.start) * span.stride
                piece = Piece(a + shift, b + shift, at, span.stride)
                reads.setdefault((span.sample, number), []).append(piece)
    return tuple(
        PlannedRead(sample, segments_of[sample][number], tuple(sorted(found)))
        for (sample, number), found in sorted(reads.items())
    )


def _split_lanes(batch: MicroBatch, rank: Rank) -> tuple[int, list[tuple[int, int, int, int, int]]]:
    """Return the part of each lane that a rank has.

    Returns:
        The tokens that it has of each, and (lane, sample, start, stop, place in the lane) of those
        that are no padding.
    """
    found = []
    kept_len = 0
    for number, lane in enumerate(batch.lanes):
        starts = [unit.start for unit in lane]
        parts = list(_context_parts(lane, batch.lane_len, rank))
        kept_len = sum(b - a for a, b in parts)
        if kept_len % rank.sp_size:
            raise InvalidArgument(
                field="sp_size",
                value=rank.sp_size,
                expected=f"a divisor of the {kept_len} tokens that context parallelism leaves",
            )
        kept_len //= rank.sp_size
        first = kept_len * rank.sp_rank
        at = 0
        for a, b in parts:
            # The part [a, b) of the lane is at `at`; of that, this rank has [first, last).
            low, high = max(a, a + first - at), min(b, a + first + kept_len - at)
            for unit in lane[max(0, bisect_right(starts, low) - 1) : bisect_left(starts, high)]:
                if unit.sample < 0:
                    continue
                begin = unit.start + unit.offset
                end = begin + batch.samples[unit.sample].num_tokens
                x, y = max(low, begin), min(high, end)
                if x < y:
                    found.append((number, unit.sample, x - begin, y - begin, at + x - a - first))
            at += b - a
    return kept_len, found


def _context_parts(lane: tuple[Unit, ...], lane_len: int, rank: Rank) -> Iterator[tuple[int, int]]:
    """The stretches [start, stop) of a lane that a context parallel rank has, in its order."""
    size, number = rank.cp_size, rank.cp_rank
    if rank.cp_layout == "ulysses":
        lane = (Unit(0, lane_len, -1, 0),) if lane_len else ()
    parts, kept = size, [number]
    if rank.cp_layout == "zigzag" and size > 1:
        parts, kept = 2 * size, [number, 2 * size - 1 - number]
    for unit in lane:
        if unit.length % parts:
            what = f"samples[{unit.sample}]" if unit.sample >= 0 else "the batch"
            raise InvalidArgument(
                field="cp_size",
                value=f"{size} ({rank.cp_layout}) over the {unit.length} tokens of {what}",
                expected=f"a length that {parts} divides: pad or align it",
            )
        step = unit.length // parts
        for part in kept:
            yield unit.start + part * step, unit.start + (part + 1) * step
