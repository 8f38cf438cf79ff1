"""Frames of rows: their messages, read from the store and cut to layers, and pins on chunks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np

from routetrace.codec.frame_header import Buffer
from routetrace.common.errors import Corrupt, InvalidArgument, NotFound
from routetrace.common.layout import ModelLayout
from routetrace.server.common.metrics import Metrics
from routetrace.server.index.state import State
from routetrace.server.index.traces import refs
from routetrace.server.index.traces.spans import Interval
from routetrace.server.rows.cuts import Cuts
from routetrace.server.rows.served import Served
from routetrace.server.store.interface import Store

#: Maximum payload bytes of a message, unless one frame is larger. Doubling it makes no read faster
#: beyond noise, and a read holds two or three messages.
MESSAGE_BYTES = 1 << 19

#: Maximum ratio of bytes read to bytes sent where layers are cut out of frames.
MOST_READ = 4

#: Maximum bytes that are read from memory without a thread: they hold the event loop for 0.1 to
#: 0.4 ms, and the way to a thread and back costs more CPU than a message.
AT_ONCE_BYTES = 2 * MESSAGE_BYTES


class Fetched(NamedTuple):
    """Rows of one message."""

    spans: Served
    """Spans with the number of their frame in this message in place of `source`."""
    frame_lengths: list[int]
    payload: list[Buffer]
    """Frames, in any number of pieces."""
    unread: Served
    """Rows whose frames could not be read."""


#: Maximum choices of layers of a message, all layers included: a span names one by a byte.
MAX_CHOICES = 255

_Frame = tuple[int, tuple[int, ...]]
"""Reference of a frame without the row, and the layers to send; empty: all selected ones."""


class _Wanted(NamedTuple):
    """Frames to read from one chunk."""

    chunk: int
    layout: ModelLayout | None
    """Layout of the frames; None if the chunk is not known."""
    layers: tuple[int, ...]
    """Layers to send; empty: all selected ones."""
    frames: dict[int, Interval]
    """(offset, length) in the chunk by the reference of the frame."""


class Frames:
    """Stored frames of rows. All calls belong to the event loop's thread."""

    def __init__(self, store: Store, state: State, metrics: Metrics) -> None:
        self._store = store
        self._state = state
        self._metrics = metrics
        self._cuts = Cuts(store)
        self._pins: Counter[int] = Counter()

    @contextmanager
    def pinned(self, rows: Served) -> Iterator[None]:
        """Keep the chunks of rows from being dropped."""
        chunks = set((rows["ref"] >> refs.CHUNK_SHIFT).tolist())
        self._pins.update(chunks)
        try:
            yield
        finally:
            for chunk in chunks:
                self._pins[chunk] -= 1
                if not self._pins[chunk]:
                    del self._pins[chunk]

    def pinned_chunks(self) -> set[int]:
        """Return the chunks of open reads."""
        return set(self._pins)

    def batches(self, rows: Served, layers: tuple[int, ...]) -> Iterator[Served]:
        """Yield rows in messages of at most about MESSAGE_BYTES of the selected layers."""
        first = size = 0
        most = 0.0
        frames: set[_Frame] = set()
        choices: set[tuple[int, ...]] = set()
        for at, part in enumerate(_frames_of(rows)):
            if part in frames:
                continue
            frame, chosen = part
            choices.add(chosen)
            length = self.range_of(frame)[1]
            if frames and (size + length > most or len(choices) > MAX_CHOICES):
                yield rows[first:at]
                first, size = at, 0
                frames.clear()
                choices = {chosen}
            if not frames:
                # An estimate from the first frame; frames are read whole, so the ratio is bounded.
                most = MESSAGE_BYTES * min(MOST_READ, self._times(frame, layers))
            frames.add(part)
            size += length
        if frames:
            yield rows[first:]

    def _times(self, frame: int, layers: tuple[int, ...]) -> float:
        """Return the ratio of all layers of a frame to the selected ones."""
        entry = self._state.frames.get(frame >> refs.FRAME_BITS)
        held = entry.layout.column if entry else {}
        return len(held) / max(1, sum(layer in held for layer in layers))

    async def fetch(self, rows: Served, layers: tuple[int, ...]) -> Fetched:
        """Read the frames of rows, cut to the selected layers."""
        wanted = self._wanted(rows)
        fetch = partial(self._fetch, rows, wanted, layers)
        size = sum(length for chunk in wanted for _, length in chunk.frames.values())
        try:
            # A small read from memory is faster than the start of a thread.
            fetched = fetch(wait=False) if size <= AT_ONCE_BYTES else None
        except BlockingIOError:
            fetched = None
        if fetched is None:
            fetched = await asyncio.get_running_loop().run_in_executor(None, fetch)
        self._metrics.read_bytes.inc(sum(fetched.frame_lengths))
        if len(fetched.unread):
            lost = set((fetched.unread["ref"] >> refs.ROW_BITS).tolist())
            self._metrics.read_corrupt.inc(len(lost))
        return fetched

    def _wanted(self, rows: Served) -> list[_Wanted]:
        """Return the frames of rows by chunk and layers, in the order of their first rows."""
        by_chunk: dict[tuple[int, tuple[int, ...]], _Wanted] = {}
        for frame, layers in dict.fromkeys(_frames_of(rows)):
            number = frame >> refs.FRAME_BITS
            chunk = by_chunk.get((number, layers))
            if chunk is None:
                held = self._state.frames.get(number)
                chunk = _Wanted(number, held.layout if held else None, layers, {})
                by_chunk[number, layers] = chunk
            chunk.frames[frame] = self.range_of(frame)
        return list(by_chunk.values())

    def _fetch(
        self, rows: Served, wanted: list[_Wanted], layers: tuple[int, ...], wait: bool = True
    ) -> Fetched:
        order: dict[_Frame, int] = {}  # of the frames read
        lengths: list[int] = []
        payload: list[Buffer] = []
        for chunk in wanted:
            try:
                pieces, sizes = self._read(chunk, layers, wait)
            except (NotFound, Corrupt, InvalidArgument):
                # The cells are reported as missing; the other chunks are served.
                continue
            for frame in chunk.frames:
                order[frame, chunk.layers] = len(order)
            payload += pieces
            lengths += sizes
        numbers = _frames_of(rows)
        if len(order) == sum(len(chunk.frames) for chunk in wanted):
            spans, unread = rows.copy(), rows[:0]
        else:
            there = np.array([frame in order for frame in numbers], np.bool_)
            spans, unread = rows[there], rows[~there]
        spans["source"] = [order[frame] for frame in numbers if frame in order]
        return Fetched(spans, lengths, payload, unread)

    def _read(
        self, chunk: _Wanted, layers: tuple[int, ...], wait: bool
    ) -> tuple[list[Buffer], list[int]]:
        """Return the bytes of frames of one chunk, cut to the layers, and their sizes."""
        number, layout, chosen, frames = chunk
        if chosen:
            layers = tuple([i for i in layers if i in chosen])
        if layout is None or not all(length for _, length in frames.values()):
            raise NotFound(field="chunk", value=number, expected="a stored chunk with the frames")
        if layers != layout.layer_ids:
            kept = tuple([i for i in layers if i in layout.column])
            if kept != layout.layer_ids:
                return self._cuts.read(number, frames, kept, wait)
        data = self._store.read(number, list(frames.values()), wait=wait)
        return [*data], list(map(len, data))

    def range_of(self, frame: int) -> Interval:
        """Return (offset, length) of a frame in its chunk; (0, 0) if the chunk is not known.

        Args:
            frame: a reference without its row.
        """
        entry = self._state.frames.get(frame >> refs.FRAME_BITS)
        index = frame & refs.MAX_FRAMES - 1
        if entry is None or index + 1 >= len(entry.offsets):
            return 0, 0
        offset = entry.offsets.item(index)
        return offset, entry.offsets.item(index + 1) - offset


def _frames_of(rows: Served) -> list[_Frame]:
    """Return the frame of each row, and the layers to send of it; empty: all selected ones."""
    return list(zip((rows["ref"] >> refs.ROW_BITS).tolist(), rows["layers"].tolist(), strict=True))
