"""Layers cut out of stored frames; with a cached header, only the layers are read."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from routetrace.codec.frame_header import Buffer, FrameHeader, read_header
from routetrace.server.index.traces.spans import Interval
from routetrace.server.store.interface import Store
from routetrace.server.wire.checksums import Payload

#: Maximum cached headers, of 2 KiB each with 48 layers.
MAX_HEADERS = 1 << 13


class Cut(NamedTuple):
    """Parts of a frame to send."""

    head: bytes
    """Header of a frame with the wanted layers."""
    runs: list[Interval]
    """[start, stop) of their groups in the stored frame."""
    size: int
    """Bytes of header and groups."""


class Cuts:
    """Reads frames of a store, cut to layers. Thread-safe.

    Stored frames never change and chunk numbers are never reused, so cached headers stay valid.
    Each group is sent with its stored checksum.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._headers: dict[int, FrameHeader] = {}  # by the frame's reference

    def read(
        self, chunk: int, frames: Mapping[int, Interval], layer_ids: tuple[int, ...], wait: bool
    ) -> tuple[list[Buffer], list[int]]:
        """Return the bytes of frames of a chunk, cut to layers, and their sizes.

        Args:
            chunk: number of the chunk.
            frames: (offset, length) in the chunk by reference of the frame.
            layer_ids: absolute layer ids, ascending.
            wait: whether to wait for the disk.

        Raises:
            InvalidArgument: if a frame lacks a layer.
            NotFound, Corrupt, BlockingIOError: as `Store.read`; Corrupt also for a header.
        """
        with self._lock:
            cuts = [
                cut(self._headers[frame], layer_ids) if frame in self._headers else None
                for frame in frames
            ]
        ranges: list[Interval] = []
        for known, (offset, length) in zip(cuts, frames.values(), strict=True):
            if known is None:
                ranges.append((offset, length))
            else:
                ranges += [(offset + start, stop - start) for start, stop in known.runs]
        data = iter(self._store.read(chunk, ranges, wait=wait))
        pieces: list[Buffer] = []
        sizes: list[int] = []
        for frame, known in zip(frames, cuts, strict=True):
            if known is None:
                sent, groups = self._first_cut(frame, next(data), layer_ids)
            else:
                sent, groups = known, [next(data) for _ in known.runs]
            pieces.append(sent.head)
            pieces += groups
            sizes.append(sent.size)
        return pieces, sizes

    def _first_cut(
        self, frame: int, whole: Payload, layer_ids: tuple[int, ...]
    ) -> tuple[Cut, list[Payload]]:
        """Cut a frame that was read as a whole; cache its header."""
        header, view = read_header(whole), memoryview(whole)
        with self._lock:
            self._headers[frame] = header
            if len(self._headers) > MAX_HEADERS:
                del self._headers[next(iter(self._headers))]
        sent = cut(header, layer_ids)
        return sent, [view[start:stop] for start, stop in sent.runs]


def cut(header: FrameHeader, layer_ids: tuple[int, ...]) -> Cut:
    """Return the parts of a frame with this header that hold the layers.

    Raises:
        InvalidArgument: if no layer is named, or the frame lacks one.
    """
    sliced, runs = header.cut(layer_ids)
    head = sliced.pack()
    return Cut(head, runs, len(head) + sum(sliced.group_bytes))
