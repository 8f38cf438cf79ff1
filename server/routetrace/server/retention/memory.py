"""Memory of the process, and the counted part of it that the index takes.

Only bytes of the index cause eviction. If the process grows for another reason, such as headers
that callers without a token send, no trace is evicted: chunks are refused at the limit, until the
memory is given back.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections import Counter
from collections.abc import Callable

import psutil
from pydantic import ByteSize

from routetrace.server.common.slices import in_slices
from routetrace.server.index.owners import owner_of
from routetrace.server.index.state import Frames, State
from routetrace.server.index.traces.memory import memory_of, memory_of_chunk
from routetrace.server.retention.room import HIGH, LOW
from routetrace.server.settings.config import ServerConfig

#: Part of memory_limit that the index may take. Reads that wait may take a quarter; the rest is for
#: the process itself, and for messages.
INDEX_SHARE = 0.5

#: Seconds for which the size of the process is cached.
_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Memory:
    """Memory of one server. All calls belong to the event loop's thread.

    Args:
        state: state whose traces and chunks are counted.
        config: settings.
        now: clock, in seconds.
    """

    def __init__(self, state: State, config: ServerConfig, now: Callable[[], float]) -> None:
        self._state = state
        self._limit = limit = config.memory_limit
        self._holds_payloads = config.store == "memory"
        self._now = now
        self._process = psutil.Process()
        self._seen = (0.0, 0)  # time and bytes
        self._foreign = False  # whether the process is near the limit, and not for the index
        self.index_limit = int(INDEX_SHARE * limit)
        """Maximum bytes of the index, near which traces are evicted; 0: none."""
        self.index_bytes = 0
        """Bytes of the index when they were counted last."""

    def process_bytes(self) -> int:
        """Return the resident memory of the process, at most `_SECONDS` old."""
        now = self._now()
        if now - self._seen[0] >= _SECONDS:
            self._seen = now, int(self._process.memory_info().rss)
        return self._seen[1]

    async def look(self) -> Counter[str]:
        """Give freed memory back to the system, and count the index where it may be near its limit.

        Returns:
            Bytes of the index by owner; none while the whole process is smaller than that limit.
        """
        if not self._limit or self.process_bytes() < self.index_limit:
            return Counter()
        await asyncio.to_thread(_give_back)
        self._seen = (0.0, 0)
        held = await self._count()
        self.index_bytes = held.total()
        self._tell()
        return held

    def of_chunk(self, chunk: Frames) -> int:
        """Return the bytes of memory that a stored chunk takes."""
        payload = chunk.nbytes if self._holds_payloads else 0
        return memory_of_chunk(len(chunk.offsets)) + payload

    async def _count(self) -> Counter[str]:
        held: Counter[str] = Counter()
        async for trace in in_slices(self._state.traces.oldest_first()):
            held[owner_of(trace.token, trace.key[0])] += memory_of(trace)
        async for chunk in in_slices([*self._state.frames.values()]):
            held[owner_of(chunk.token, chunk.run)] += self.of_chunk(chunk)
        return held

    def _tell(self) -> None:
        """Log once where the process is near the limit although the index is not."""
        size = self.process_bytes()
        if size > HIGH * self._limit and self.index_bytes <= HIGH * self.index_limit:
            if not self._foreign:
                _log.warning(
                    "the process has %s of its memory_limit %s, of which the index takes %s: no "
                    "trace is evicted for the rest, and chunks are refused at the limit; callers "
                    "without a token can cause it where no proxy stands in front "
                    "(docs/security.md)",
                    *map(_text, (size, self._limit, self.index_bytes)),
                )
            self._foreign = True
        elif self._foreign and size < LOW * self._limit:
            self._foreign = False
            _log.info("the process has %s again", _text(size))


def _text(size: int) -> str:
    return ByteSize(size).human_readable()


def _give_back() -> None:
    """Return memory that was freed, and that the C library keeps, to the system: 10 ms a GiB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:  # other C libraries have none
        trim(0)
