"""Spans: the stored rows of the positions of one attempt."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from routetrace.server.index.traces.refs import CHUNK_SHIFT, ROW_BITS

FOREVER = 1 << 32
"""Past every position."""

#: Spans up to which Python is faster than numpy.
_FEW = 64

Interval = tuple[int, int]


class Span(NamedTuple):
    """`length` positions from `position` on, whose rows are `ref`, `ref + 1`, ..."""

    position: int
    length: int
    ref: int
    weight_version: int
    provenance: int

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.position + self.length

    def cut(self, start: int, stop: int) -> Span:
        """Return the part inside [start, stop)."""
        position, length, ref, version, provenance = self
        a, b = max(start, position), min(stop, position + length)
        return Span(a, b - a, ref + a - position, version, provenance)


class SpanList:
    """Spans of one attempt in ascending, disjoint positions; 40 bytes each."""

    __slots__ = ("_data",)
    _FIELDS = 5

    def __init__(self, data: bytes = b"") -> None:
        self._data = array("q", data)

    def __iter__(self) -> Iterator[Span]:
        data = self._data
        for i in range(0, len(data), self._FIELDS):
            yield Span(*data[i : i + self._FIELDS])

    def __getitem__(self, index: int) -> Span:
        return Span(*self._data[index * self._FIELDS : (index + 1) * self._FIELDS])

    def __len__(self) -> int:
        return len(self._data) // self._FIELDS

    @property
    def refs(self) -> Sequence[int]:
        """References of the first row of each span."""
        return self._data[2 :: self._FIELDS]

    @property
    def end(self) -> int:
        """One past the last position; 0 if empty."""
        return self._data[-5] + self._data[-4] if self._data else 0

    def is_whole(self, stop: int) -> bool:
        """Whether the spans cover exactly the positions [0, stop)."""
        at, data = 0, self._data
        for i in range(0, len(data), self._FIELDS):
            if data[i] != at:
                return False
            at += data[i + 1]
        return at == stop

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Weight versions, each once, ascending: an unknown one first."""
        versions = self._data[3 :: self._FIELDS]
        if len(versions) < _FEW:
            return tuple(sorted(set(versions)))
        return tuple(np.unique(np.frombuffer(versions, np.int64)).tolist())

    def append(self, span: Span) -> None:
        """Add a span, replacing positions at and after its first."""
        data = self._data
        if span.position < self.end:
            self.truncate(span.position)
        if (
            data
            and data[-5] + data[-4] == span.position
            and data[-3] + data[-4] == span.ref
            and data[-2] == span.weight_version
            and data[-1] == span.provenance
            and span.ref >> ROW_BITS == data[-3] >> ROW_BITS
        ):
            data[-4] += span.length
        else:
            data.extend(span)

    def truncate(self, position: int) -> None:
        """Drop positions at and after `position`."""
        data = self._data
        while data and data[-5] >= position:
            del data[-5:]
        if data and data[-5] + data[-4] > position:
            data[-4] = position - data[-5]

    def _overlapping(self, start: int, stop: int) -> tuple[int, int]:
        """Return indices [first, last) of the spans with positions in [start, stop)."""
        first = bisect_right(self, start, key=lambda span: span.stop)
        return first, bisect_left(self, stop, lo=first, key=lambda span: span.position)

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether a span has positions in [start, stop)."""
        if self._data and start <= self._data[0] < stop:
            return True
        first, last = self._overlapping(start, stop)
        return first < last

    def between(self, start: int, stop: int) -> list[Span]:
        """Return the parts of spans in [start, stop)."""
        found = map(self.__getitem__, range(*self._overlapping(start, stop)))
        return [span.cut(start, stop) for span in found]

    def remove(self, start: int, stop: int) -> None:
        """Drop the positions [start, stop)."""
        first, last = self._overlapping(start, stop)
        kept = [
            part
            for span in map(self.__getitem__, range(first, last))
            for part in (span.cut(span.position, start), span.cut(stop, span.stop))
            if part.length > 0
        ]
        numbers = array("q", [number for span in kept for number in span])
        self._data[first * self._FIELDS : last * self._FIELDS] = numbers

    def refer(self, chunks: Mapping[int, int]) -> None:
        """Replace the chunks of all references; `chunks` has the new numbers."""
        data = self._data
        for i in range(2, len(data), self._FIELDS):
            chunk, rest = data[i] >> CHUNK_SHIFT, data[i] & (1 << CHUNK_SHIFT) - 1
            data[i] = chunks[chunk] << CHUNK_SHIFT | rest

    def tobytes(self) -> bytes:
        """Return the snapshot value."""
        return self._data.tobytes()


def subtract(span: Interval, claimed: list[Interval]) -> list[Interval]:
    """Return the parts of an interval that ascending, disjoint intervals do not cover."""
    start, stop = span
    rest = []
    for a, b in claimed:
        if b <= start:
            continue
        if a >= stop:
            break
        if a > start:
            rest.append((start, a))
        start = max(start, b)
    if start < stop:
        rest.append((start, stop))
    return rest


def intersect(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Return the intersection of two lists of ascending, disjoint intervals."""
    both = ((max(a, c), min(b, d)) for a, b in one for c, d in other if c < b and a < d)
    return [(start, stop) for start, stop in both if start < stop]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return ascending, disjoint intervals that cover the same positions."""
    merged: list[Interval] = []
    for a, b in sorted(intervals):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return merged
