"""Ranges of positions with a value, and indices of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")
_Span = TypeVar("_Span")


def column_index(columns: list[int]) -> slice | list[int]:
    """Return an index of ascending columns: a slice, which makes views, if they are neighbours."""
    if columns and columns[-1] - columns[0] + 1 == len(columns):
        return slice(columns[0], columns[-1] + 1)
    return columns


def merge_ranges(ranges: Iterable[tuple[int, int, _T]]) -> tuple[tuple[int, int, _T], ...]:
    """Join ranges (start, stop, value) that touch or overlap and have one value."""
    merged: list[tuple[int, int, _T]] = []
    last: dict[_T, int] = {}  # value -> index in merged
    for start, stop, value in sorted(ranges, key=lambda r: r[:2]):
        at = last.get(value)
        if at is not None and start <= merged[at][1]:
            merged[at] = (merged[at][0], max(stop, merged[at][1]), value)
        else:
            last[value] = len(merged)
            merged.append((start, stop, value))
    return tuple(merged)


def clip_ranges(
    ranges: Iterable[tuple[int, int, _T]],
    start: int,
    stop: int,
    kind: Callable[[int, int, _T], _Span],
) -> tuple[_Span, ...]:
    """Return the parts of ranges (start, stop, value) in [start, stop), as spans of a kind."""
    clipped = ((max(a, start), min(b, stop), value) for a, b, value in ranges)
    return tuple(kind(*part) for part in clipped if part[0] < part[1])
