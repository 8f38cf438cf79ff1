"""Pieces of a snapshot: messages that can be written, sent and read one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from routetrace.codec.records import UNKNOWN_VERSION
from routetrace.common.version import installed_version
from routetrace.server.index.records.format import HEAD, check_format
from routetrace.server.index.traces.spans import FOREVER
from routetrace.stored import format5_pb2 as stored
from routetrace.v1 import routetrace_pb2 as pb

#: Bytes of a piece, about.
_PIECE_BYTES = 1 << 20

#: Version of this server, as it was at the start: another one may be installed meanwhile.
RELEASE = installed_version()


def to_bytes(piece: stored.Piece) -> bytes:
    """Return a part of a piece: concatenated messages are the message of all their fields."""
    return piece.SerializeToString(deterministic=True)


def pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Join parts to pieces of about 1 MiB, each with its format."""
    piece = bytearray(HEAD)
    for part in parts:
        piece += part
        if len(piece) >= _PIECE_BYTES:
            yield bytes(piece)
            piece[len(HEAD) :] = b""
    if len(piece) > len(HEAD):
        yield bytes(piece)


def upgrade(piece: stored.Piece) -> None:
    """Change a piece of 0.8 to what 0.9 reads.

    Weight version 0 becomes an unknown one: 0.8 knew no other way to say it. An attempt that is
    over ended with its rows; whether the last one is preempted is not said. Nothing proves which
    rows stand where calls are missing, and where a row was lost and none shows which attempt
    sampled.
    """
    sources = [source for trace in piece.traces for source in trace.sources]
    for writer in piece.writers:
        sources += [live.source for live in writer.live if live.HasField("source")]
        writer.slots.runs = _marked(writer.slots.runs, 5, 3)
        writer.slots.cells = _marked(writer.slots.cells, 3, 1)
        if not writer.weight_version:
            writer.ClearField("weight_version")
    for source in sources:
        source.attempts[:] = [_marked(spans, 5, 3) for spans in source.attempts]
        source.drafts = _marked(source.drafts, 5, 3)
        source.stops[:] = [FOREVER] * len(source.attempts)
        if source.unplaced:
            _empty(source)
    for trace in piece.traces:
        _end_attempts(trace.sources)
        several = [source for source in trace.sources if len(source.attempts) > 1]
        if any(_lost(s) and _end(s.attempts[0]) < s.prompt_len for s in several):
            note = np.array([0, FOREVER, pb.MISSING_REASON_NOT_CAPTURED], "<i8").tobytes()
            for source in several:
                _empty(source)
                source.stops[:], source.lost = [FOREVER] * len(source.attempts), note


def _end_attempts(sources: Iterable[stored.Source]) -> None:
    """End attempts that are over at their last row, of all shards that report a request."""
    ends: dict[tuple[str, str, str], dict[int, int]] = {}
    for source in sources:
        name = source.engine_id, source.request_id, source.occurrence
        mine = ends.setdefault(name, {})
        for attempt, spans in enumerate(source.attempts):
            mine[attempt] = max(mine.get(attempt, 0), _end(spans))
    for source in sources:
        mine = ends[source.engine_id, source.request_id, source.occurrence]
        source.stops[:-1] = [mine[attempt] for attempt in range(len(source.stops) - 1)]


def _empty(source: stored.Source) -> None:
    source.attempts[:] = [b""] * len(source.attempts)
    source.drafts, source.tentative = b"", 0


def _lost(source: stored.Source) -> bool:
    """Whether a row is lost, and not only of unknown KV."""
    reasons = np.frombuffer(source.lost, "<i8")[2::3]
    return bool((reasons != pb.MISSING_REASON_KV_UNKNOWN).any())


def _end(spans: bytes) -> int:
    """Return one past the last position of spans."""
    numbers = np.frombuffer(spans, "<i8")
    return int(numbers[-5] + numbers[-4]) if len(numbers) else 0


def _marked(numbers: bytes, fields: int, version: int) -> bytes:
    """Return records of int64 numbers whose version, one of their fields, is unknown if it is 0."""
    records = np.frombuffer(numbers, "<i8").reshape(-1, fields).copy()
    records[records[:, version] == 0, version] = UNKNOWN_VERSION
    return records.tobytes()


def read_pieces(data: Iterable[bytes]) -> Iterator[stored.Piece]:
    """Yield the pieces of a snapshot, with the entries of traces that this release worked out.

    Raises:
        UnsupportedFormat: if it has another format.
        DecodeError: if it is damaged.
    """
    has_entries = False
    for part in data:
        check_format(part, "the snapshot")
        piece = stored.Piece.FromString(part[len(HEAD) :])
        if piece.HasField("head"):
            has_entries = piece.head.release == RELEASE != "unknown"
        if not has_entries:
            for trace in piece.traces:
                trace.ClearField("entry")
        yield piece
