"""A ring of byte records between one producer and one consumer, in memory that both can see.

The buffer starts with two cursors, bytes ever written and bytes ever read, a cache line apart; the
rest is records. A record is a length word and its bytes, contiguous and padded to cache lines. If
one would cross the end of the buffer, the length word is _SKIP and the record starts over in front.
Where all was read, records start over in front as well, from the cursor on that a third word tells:
a ring whose reader keeps up stays in the same small part of its memory, and in the caches.

Neither side ever waits for the other. A cursor is one aligned 8-byte word that one side alone
writes, after what it publishes; the fences keep that order on CPUs that would swap the two, without
a lock that a killed process could take along.
"""

from __future__ import annotations

import mmap
import platform
import threading
from collections.abc import Callable
from typing import cast

_WRITTEN, _FRONT, _READ = 0, 1, 8  # in words
_CONTROL_BYTES = 128
_SKIP = (1 << 64) - 1

#: What records are padded to. What begins so many bytes behind the length word of one is aligned to
#: it: some CPUs copy ten times slower to places that are a little behind those that they copy from,
#: modulo pages, and what engines copy from is seldom aligned to less.
LINE = 64
_PAD = LINE - 1

#: No page is smaller.
_PAGE = 1 << 12

#: Bytes that are written before the other end is looked at again. A ring whose reader keeps up
#: stays in so many in front: a good part of a core's own cache.
_NEAR = 1 << 18


#: Whether the CPU shows stores, and does loads, in their order without being told to.
_ORDERED = platform.machine().lower() in {"x86_64", "amd64"}


class _Fence:
    """Orders this thread's memory accesses before a call against those after it.

    Releasing and taking a lock are atomic operations on one word, the first with release and the
    second with acquire semantics.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        self._lock.release()
        self._lock.acquire()


class Ring:
    """Single producer, single consumer; each end has a Ring of its own over the same buffer.

    Args:
        buffer: zeroed memory, the end of a mapping; its size less 128 is rounded down to
            cache lines.
        behind: called where the producer finds that not all was read, once for each eighth of the
            ring that it fills.
    """

    def __init__(self, buffer: memoryview, behind: Callable[[], object] = lambda: None) -> None:
        self._cursors = buffer[:_CONTROL_BYTES].cast("Q")
        size = (len(buffer) - _CONTROL_BYTES) // LINE * LINE
        self._data = buffer[_CONTROL_BYTES : _CONTROL_BYTES + size]
        #: What the producer writes records into. Slices of the mapping itself take the bytes of any
        #: contiguous buffer, in one call.
        self.memory = cast("mmap.mmap", buffer.obj)
        self._front = len(self.memory) - len(buffer) + _CONTROL_BYTES + 8
        self._lengths = self._data.cast("Q")
        self._behind = behind
        self.size = size
        #: Largest record that fits into an empty ring, wherever its cursors stand.
        self.max_record = size // 2 // LINE * LINE - 8
        self._near = min(_NEAR, self.max_record + 8)
        # The producer's: where the next record is, and how far it may reach for certain; bytes ever
        # written, less `_at`; those of them when the other end was last found behind; where the
        # record under way ends.
        self._at = self._limit = self._base = self._found = self._next = 0
        self._reserved = False
        # The consumer's: its cursor, what it last saw of the other's, and where the record is; the
        # same of what is behind it.
        self._read = self._written = self._place = 0
        self._end = self._after = 0
        self._fence = _Fence()

    # ------------------------------------------------------------------ producer

    def touch(self, size: int) -> None:
        """Has the first `size` bytes of an unused ring in memory, before somebody has to wait."""
        pages = self._data[: min(size, self.size) : _PAGE]
        pages[:] = bytes(len(pages))

    def reserve(self, length: int) -> int:
        """Where in `memory` a record of `length` bytes is to be written, and committed.

        Returns:
            0 if there is no room. There is none either while another reservation is open: a signal
            handler may have come in between.
        """
        if self._reserved:
            return 0
        self._reserved = True
        at = self._at
        end = at + 8 + length + _PAD & ~_PAD
        if end > self._limit:
            if not self._find(end - at):
                self._reserved = False
                return 0
            end += self._at - at
            at = self._at
        self._next = end
        self._lengths[at >> 3] = length
        return self._front + at

    def commit(self) -> None:
        """Publishes the reserved record."""
        if not _ORDERED:
            self._fence()
        self._at = at = self._next
        self._cursors[_WRITTEN] = self._base + at
        self._reserved = False

    def cancel(self) -> None:
        """Gives a reservation up."""
        self._reserved = False

    def _find(self, need: int) -> bool:
        """Looks for that much room in one piece."""
        if need > self.max_record + 8:
            return False
        at, written = self._at, self.written
        held = written - self._cursors[_READ]
        if not _ORDERED:
            self._fence()
        if not held:
            self._cursors[_FRONT] = self._base = self._found = written
            self._at = at = 0
        elif written - self._found > self.size // 8:
            self._found = written
            self._behind()
        # What is held ends at `at`, and may begin behind it.
        limit = self.size if held <= at else at + self.size - held
        if at + need > limit:
            limit = at - held
            if need > limit:
                return False
            if at < self.size:
                self._lengths[at >> 3] = _SKIP
            self._base = written + self.size - at
            self._at = at = 0
        self._limit = min(limit, at + max(need, self._near))
        return True

    @property
    def written(self) -> int:
        """Bytes ever published."""
        return self._base + self._at

    @property
    def read(self) -> int:
        """Those of them that the consumer has read."""
        return self._cursors[_READ]

    # ------------------------------------------------------------------ consumer

    @property
    def caught_up(self) -> bool:
        """Whether the next peek() looks at what was written since the last look."""
        return self._read == self._written

    def peek(self) -> memoryview | None:
        """The oldest record, valid until consume(); None if there is none."""
        if self._read == self._written:
            self._written = self._cursors[_WRITTEN]
            if self._read == self._written:
                return None
            if not _ORDERED:
                self._fence()
            if self._read == self._cursors[_FRONT]:
                self._place = 0
        at, start = self._place, self._read
        length = _SKIP if at == self.size else self._lengths[at >> 3]
        if length == _SKIP:
            start += self.size - at
            at = 0
            length = self._lengths[0]
        need = 8 + length + _PAD & ~_PAD
        self._end, self._after = start + need, at + need
        return self._data[at + 8 : at + 8 + length]

    def consume(self) -> None:
        """Gives the room of the peeked record back."""
        if not _ORDERED:
            self._fence()
        self._place = self._after
        self._read = self._cursors[_READ] = self._end
