"""Frames of rows: their messages, read from the store and cut to layers, and pins on chunks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from routetrace.codec.frame_header import Buffer
from routetrace.common.errors import Corrupt, InvalidArgument, NotFound
from routetrace.server.common.metrics import Metrics
from routetrace.server.index.state import Frames as FrameTable
from routetrace.server.index.state import State
from routetrace.server.index.traces import refs
from routetrace.server.index.traces.spans import Interval
from routetrace.server.rows.cuts import Cuts
from routetrace.server.rows.remote import REMOTE, RemoteChunk, RemoteChunks
from routetrace.server.rows.served import Row, Served
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

    rows: list[Row]
    frames: list[int]
    """The number of each row's frame in this message."""
    frame_lengths: list[int]
    payload: list[Buffer]
    """Frames, in any number of pieces."""
    unread: list[Row]
    """Rows whose frames could not be read."""


#: Maximum choices of layers of a message, all layers included: a span names one by a byte.
MAX_CHOICES = 255

_Frame = tuple[int, tuple[int, ...]]
"""Reference of a frame without the row, and the layers to send; empty: all selected ones."""


class Batch(NamedTuple):
    """Rows of one message that is to be read."""

    rows: list[Row]
    frames: dict[_Frame, Interval]
    """Their (offset, length) in their chunks, in the order of their first rows."""


Read: TypeAlias = tuple[list[Buffer], list[int]]
"""Bytes of frames, in any number of pieces, and the size of each frame."""

Wanted: TypeAlias = tuple[RemoteChunk, list[int], tuple[int, ...]]
"""Chunk of another worker, frames within it, and layers to cut out."""

Bring: TypeAlias = Callable[[Sequence[Wanted]], Awaitable[Sequence["Read | None"]]]
"""Reads frames of other workers; None: those of a chunk cannot be read."""

_REMOTE_FRAME = REMOTE << refs.FRAME_BITS


async def _bring_nothing(wanted: Sequence[Wanted]) -> Sequence[Read | None]:
    return [None for _ in wanted]


class Frames:
    """Stored frames of rows. All calls belong to the event loop's thread."""

    def __init__(self, store: Store, state: State, metrics: Metrics) -> None:
        self._store = store
        self._state = state
        self._metrics = metrics
        self._cuts = Cuts(store)
        self._pins: Counter[int] = Counter()
        self.remote = RemoteChunks()
        """Chunks of other workers."""
        self.bring: Bring = _bring_nothing
        """Reads frames of other workers."""

    def pinned(self, rows: Served) -> AbstractContextManager[None]:
        """Keep the chunks of rows from being dropped."""
        return self.kept(set((rows["ref"] >> refs.CHUNK_SHIFT).tolist()))

    @contextmanager
    def kept(self, chunks: Set[int]) -> Iterator[None]:
        """Keep chunks from being dropped."""
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

    def batches(self, rows: Served, layers: tuple[int, ...]) -> Iterator[Batch]:
        """Yield rows in messages of at most about MESSAGE_BYTES of the selected layers."""
        size = 0
        most = 0.0
        batch = Batch([], {})
        choices: set[tuple[int, ...]] = set()
        for row in rows.tolist():
            frame, chosen = part = row[2] >> refs.ROW_BITS, row[7]
            if part not in batch.frames:
                choices.add(chosen)
                where = self.range_of(frame)
                if batch.rows and (size + where[1] > most or len(choices) > MAX_CHOICES):
                    yield batch
                    batch, size = Batch([], {}), 0
                    choices = {chosen}
                if not batch.rows:
                    # An estimate from the first frame; frames are read whole, so the ratio is
                    # bounded.
                    most = MESSAGE_BYTES * min(MOST_READ, self._times(frame, layers))
                batch.frames[part] = where
                size += where[1]
            batch.rows.append(row)
        if batch.rows:
            yield batch

    def _times(self, frame: int, layers: tuple[int, ...]) -> float:
        """Return the ratio of all layers of a frame to the selected ones."""
        entry = self._entry(frame >> refs.FRAME_BITS)
        if entry is None or layers == entry.layout.layer_ids:
            return 1.0
        held = entry.layout.column
        return len(held) / max(1, sum([layer in held for layer in layers]))

    async def fetch(self, batch: Batch, layers: tuple[int, ...]) -> Fetched:
        """Read the frames of rows, cut to the selected layers."""
        size = sum([length for _, length in batch.frames.values()])
        if any(frame >= _REMOTE_FRAME for frame, _ in batch.frames):
            return self._counted(await self._fetch_remote(batch, layers))
        try:
            # A small read from memory is faster than the start of a thread.
            fetched = self._fetch(batch, layers, wait=False) if size <= AT_ONCE_BYTES else None
        except BlockingIOError:
            fetched = None
        if fetched is None:
            loop = asyncio.get_running_loop()
            fetched = await loop.run_in_executor(None, self._fetch, batch, layers)
        return self._counted(fetched)

    def _counted(self, fetched: Fetched) -> Fetched:
        self._metrics.read_bytes.inc(sum(fetched.frame_lengths))
        if fetched.unread:
            lost = {row[2] >> refs.ROW_BITS for row in fetched.unread}
            self._metrics.read_corrupt.inc(len(lost))
        return fetched

    async def _fetch_remote(self, batch: Batch, layers: tuple[int, ...]) -> Fetched:
        """Read the frames of rows, some of which other workers store."""
        brought: dict[_Frame, Read] = {}
        wanted: list[tuple[_Frame, Wanted]] = []
        for (alias, chosen), frames in _by_chunk(batch).items():
            if alias >= REMOTE and (chunk := self.remote.get(alias)):
                indexes = [frame & refs.MAX_FRAMES - 1 for frame in frames]
                wanted.append(((alias, chosen), (chunk, indexes, _some(layers, chosen))))
        answers = await self.bring([asked for _, asked in wanted])
        for (part, _), answer in zip(wanted, answers, strict=True):
            if answer is not None:
                brought[part] = answer
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._fetch, batch, layers, True, brought)

    def _fetch(
        self,
        batch: Batch,
        layers: tuple[int, ...],
        wait: bool = True,
        brought: Mapping[_Frame, Read] = MappingProxyType({}),
    ) -> Fetched:
        wanted = _by_chunk(batch)
        order: dict[_Frame, int] = {}  # of the frames read
        lengths: list[int] = []
        payload: list[Buffer] = []
        for (chunk, chosen), frames in wanted.items():
            try:
                pieces, sizes = brought.get((chunk, chosen)) or self._read(
                    chunk, frames, _some(layers, chosen), wait
                )
            except (NotFound, Corrupt, InvalidArgument):
                # The cells are reported as missing; the other chunks are served.
                continue
            for frame in frames:
                order[frame, chosen] = len(order)
            payload += pieces
            lengths += sizes
        rows, unread = batch.rows, []
        if len(order) < len(batch.frames):
            rows = [row for row in batch.rows if _frame_of(row) in order]
            unread = [row for row in batch.rows if _frame_of(row) not in order]
        numbers = [order[_frame_of(row)] for row in rows]
        return Fetched(rows, numbers, lengths, payload, unread)

    def _entry(self, chunk: int) -> FrameTable | None:
        if chunk < REMOTE:
            return self._state.frames.get(chunk)
        remote = self.remote.get(chunk)
        return None if remote is None else remote.frames

    def read(self, run: str, number: int, indexes: Sequence[int], layers: tuple[int, ...]) -> Read:
        """Return frames of one chunk of a run, cut to layers; it may wait for the disk.

        Raises:
            NotFound, Corrupt, InvalidArgument: if they cannot be read.
        """
        held = self._state.frames.get(number)
        if held is None or held.run != run:
            raise NotFound(field="chunk", value=number, expected=f"a stored chunk of run {run!r}")
        names = [number << refs.FRAME_BITS | index for index in indexes]
        return self._read(number, {n: self.range_of(n) for n in names}, layers, wait=True)

    def _read(
        self, number: int, frames: dict[int, Interval], layers: tuple[int, ...], wait: bool
    ) -> Read:
        """Return the bytes of frames of one chunk, cut to the layers, and their sizes."""
        held = self._state.frames.get(number)
        where = list(frames.values())
        if held is None or not all(length for _, length in where):
            raise NotFound(field="chunk", value=number, expected="a stored chunk with the frames")
        layout = held.layout
        if layers != layout.layer_ids:
            kept = tuple([i for i in layers if i in layout.column])
            if kept != layout.layer_ids:
                return self._cuts.read(number, frames, kept, wait)
        data = self._store.read(number, where, wait=wait)
        return [*data], list(map(len, data))

    def range_of(self, frame: int) -> Interval:
        """Return (offset, length) of a frame in its chunk; (0, 0) if the chunk is not known.

        Args:
            frame: a reference without its row.
        """
        entry = self._entry(frame >> refs.FRAME_BITS)
        index = frame & refs.MAX_FRAMES - 1
        if entry is None or index + 1 >= len(entry.offsets):
            return 0, 0
        offset = entry.offsets.item(index)
        return offset, entry.offsets.item(index + 1) - offset


def _by_chunk(batch: Batch) -> dict[_Frame, dict[int, Interval]]:
    """Return the frames of a batch by chunk and layers, in the order of their first rows."""
    wanted: dict[_Frame, dict[int, Interval]] = {}
    for (frame, chosen), where in batch.frames.items():
        wanted.setdefault((frame >> refs.FRAME_BITS, chosen), {})[frame] = where
    return wanted


def _some(layers: tuple[int, ...], chosen: tuple[int, ...]) -> tuple[int, ...]:
    """Return the selected layers among those that are served of a frame; all for ()."""
    return tuple([i for i in layers if i in chosen]) if chosen else layers


def _frame_of(row: Row) -> _Frame:
    return row[2] >> refs.ROW_BITS, row[7]
