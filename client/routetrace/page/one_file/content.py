"""The data of one file: facts, rectangles, tiles and rows of a trace, as bytes.

A header, JSON after its length (uint32, little-endian), and what it describes in this order: for
each zoom level its tiles of [layers, 256] bytes; for each range of rows the ids
[n, layers, top_k], little-endian, then [n, layers] bytes of 0 or 1. If another side is in the file,
its tiles and its rows of all ranges follow in the same form.
"""

from __future__ import annotations

import base64
import gzip
import json
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from routetrace.client import Trace, TraceDescription, TraceStat
from routetrace.client.description import missing_cells
from routetrace.client.stat import TraceFacts
from routetrace.common.errors import InvalidArgument
from routetrace.page.comparing import compared
from routetrace.page.facts import facts_of
from routetrace.page.segments import origins_of, segments_of
from routetrace.page.tiles import COLUMNS, Levels, changed

#: Positions that a view asks for at a time, and those with ids around each end of a hole.
_BLOCK = 64
_AROUND = 128
#: More than the trace takes compressed: base64, and rows that compress worse together.
_GROWTH = 1.2

_LENGTH = struct.Struct("<I")


class Content(NamedTuple):
    """Data of a file."""

    text: str
    """Base64 of gzip."""
    ranges: list[tuple[int, int]]
    """Positions whose ids it holds; half open."""


class Other(NamedTuple):
    """Another side of a trace."""

    name: str
    """As `comparing.SideName` reads it."""
    trace: Trace
    report: dict[str, Any] | None = None
    """Facts about a trainer's report; None if it is none."""

    @property
    def incarnation(self) -> dict[str, Any]:
        """Facts about it as an incarnation."""
        reason = self.trace.finish_reason
        return {
            "number": self.trace.incarnation,
            "state": self.trace.state.value,
            "finish_reason": reason.value if reason else None,
        }


def content_of(
    trace: Trace,
    description: TraceDescription,
    target: str,
    most: int,
    beside: int,
    other: Other | None = None,
) -> Content:
    """Return the data of a trace: all ids if they fit, else those around its holes.

    Args:
        trace: all of its rows and layers, with missing ones masked.
        description: of the same incarnation.
        target: the server, as clients name it.
        most: maximum bytes of the file.
        beside: bytes of the file without the data.
        other: side that the rows are compared with.

    Raises:
        InvalidArgument: if it takes more without any ids.
    """
    read = replace(description, stat=stat_of(trace))
    # What the server has beside this incarnation is not in the file.
    facts = facts_of(read, target) | {"expires": None, "incarnations": []}
    segments = segments_of(trace, origins_of(description, trace))
    header = {"facts": facts, "segments": segments, "written": time.time()}
    levels = changed(trace)
    sides = [_Side(b"".join(_tiles(levels)), trace.topk_ids, trace.valid)]
    if other:
        found = compared(trace, other.trace)
        header["other"] = {
            "name": other.name,
            "report": other.report,
            "incarnation": other.incarnation,
            "diff": json.loads(found.body),
        }
        sides.append(_Side(b"".join(_tiles(found.levels)), *_placed(other.trace, trace)))
    header["tiles"] = [levels.tiles(z) for z in range(len(levels))]
    room = most - beside
    if sum(one.stored_bytes for one in (trace, *([other.trace] if other else []))) * _GROWTH < room:
        ranges = [(0, len(trace))] if len(trace) else []
        text = _packed(header, sides, ranges)
        if len(text) <= room:
            return Content(text, ranges)
    without = len(_packed(header, sides, []))
    if without > room:
        raise InvalidArgument(
            field="--max-size",
            value=f"{most} bytes",
            expected=f"at least {without + beside}: scripts, facts, rectangles and tiles",
        )
    # Bytes that do not compress at all fit, too.
    row = len(sides) * len(trace.layer_ids) * (trace.top_k * trace.topk_ids.dtype.itemsize + 1)
    blocks = int((room - without) / 1.35) // (_BLOCK * row)
    ranges = _ranges(sorted(islice(_blocks(trace), blocks)), len(trace))
    return Content(_packed(header, sides, ranges), ranges)


def stat_of(trace: Trace) -> TraceStat:
    """Return the facts of a trace that was read as a whole, which are of the moment of its rows."""
    facts = {one.name: getattr(trace, one.name) for one in fields(TraceFacts)}
    return TraceStat(**facts, missing=trace.missing, missing_cells=missing_cells(trace.missing))


class _Side(NamedTuple):
    """Data of one side."""

    tiles: bytes
    ids: npt.NDArray[np.unsignedinteger[Any]]
    """[tokens, layers, top_k] of the trace's positions and layers."""
    valid: npt.NDArray[np.bool_]


def _placed(
    other: Trace, trace: Trace
) -> tuple[npt.NDArray[np.unsignedinteger[Any]], npt.NDArray[np.bool_]]:
    """Return the rows and validity of another side at the positions and layers of a trace."""
    ids, valid = np.zeros_like(trace.topk_ids), np.zeros_like(trace.valid)
    start, stop = max(0, other.token_start), min(len(trace), other.token_stop)
    columns = {layer: column for column, layer in enumerate(other.layer_ids)}
    there = slice(start - other.token_start, stop - other.token_start)
    for column, layer in enumerate(trace.layer_ids):
        if layer in columns and start < stop:
            ids[start:stop, column] = other.topk_ids[there, columns[layer]]
            valid[start:stop, column] = other.valid[there, columns[layer]]
    return ids, valid


def _tiles(levels: Levels) -> Iterator[bytes]:
    for z in range(len(levels)):
        for x in range(levels.tiles(z)):
            yield levels.tile(z, x)


def _blocks(trace: Trace) -> Iterator[int]:
    """Yield blocks around the ends of holes, each once; of a trace without holes its first ones."""
    seen: set[int] = set()
    ends = [end for m in trace.missing for end in (m.start, m.stop)] or [0]
    for end in ends:
        first, last = max(0, end - _AROUND), min(len(trace), end + _AROUND)
        for block in range(first // _BLOCK, -(-last // _BLOCK)):
            if block not in seen:
                seen.add(block)
                yield block


def _ranges(blocks: list[int], rows: int) -> list[tuple[int, int]]:
    """Return ascending blocks as ranges of positions."""
    ranges: list[tuple[int, int]] = []
    for block in blocks:
        start, stop = block * _BLOCK, min(rows, (block + 1) * _BLOCK)
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))
    return ranges


def _packed(header: dict[str, Any], sides: Sequence[_Side], ranges: list[tuple[int, int]]) -> str:
    width = sides[0].ids.dtype.itemsize
    head = json.dumps(
        header | {"columns": COLUMNS, "ranges": ranges, "width": width}, separators=(",", ":")
    ).encode()
    parts = [_LENGTH.pack(len(head)), head]
    for side in sides:
        parts.append(side.tiles)
        for start, stop in ranges:
            ids = side.ids[start:stop]
            parts.append(ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes())
            parts.append(side.valid[start:stop].astype(np.uint8).tobytes())
    return base64.b64encode(gzip.compress(b"".join(parts), 6, mtime=0)).decode()
