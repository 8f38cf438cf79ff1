"""Chunks of other workers, under numbers by which rows refer to them here."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from weakref import WeakValueDictionary

from routetrace.server.index.state import Frames
from routetrace.server.index.traces.refs import MAX_CHUNK

#: Numbers from here on are of chunks of other workers; records of this one stay below.
REMOTE = MAX_CHUNK >> 1

#: Number of a chunk whose worker does not know it: none of its frames can be read.
UNKNOWN_CHUNK = REMOTE


@dataclass(eq=False)
class RemoteChunk:
    """Chunk that another worker stores."""

    alias: int
    """Number here, from REMOTE on."""
    worker: int
    number: int
    """Number at that worker."""
    frames: Frames


class RemoteChunks:
    """Chunks of other workers, as long as a trace holds them."""

    def __init__(self) -> None:
        self._aliases = count(UNKNOWN_CHUNK + 1)
        self._by_name: WeakValueDictionary[tuple[int, int], RemoteChunk] = WeakValueDictionary()
        self._by_alias: WeakValueDictionary[int, RemoteChunk] = WeakValueDictionary()

    def add(self, worker: int, number: int, frames: Frames) -> RemoteChunk:
        """Return the chunk of a worker; the same one while it is held."""
        chunk = self._by_name.get((worker, number))
        if chunk is None:
            chunk = RemoteChunk(next(self._aliases), worker, number, frames)
            self._by_name[worker, number] = self._by_alias[chunk.alias] = chunk
        return chunk

    def get(self, alias: int) -> RemoteChunk | None:
        """Return the chunk under a number from REMOTE on."""
        return self._by_alias.get(alias)
