"""A ring of byte records between one producer and one consumer, in memory that both can see.

The buffer starts with two cursors, bytes ever written and bytes ever read, a cache line apart; the
rest is records. A record is a length word and its bytes, contiguous and padded to cache lines. If
a record would cross the end of the buffer, the length word is _SKIP and the record is at the front.
Once all was read, records restart at the front as well, from the cursor in a third word on: a ring
whose reader keeps up stays in the same small part of its memory, and in the caches.

Neither side ever waits for the other. A cursor is one aligned 8-byte word that one side alone
writes, after the data that it publishes; the fences keep that order on CPUs that would swap the
two, without a lock that a killed process could leave locked.

A consumer that is killed leaves a ring from which another one goes on, with the record that it had
peeked and not consumed. What it consumed is counted, exactly: a count and the cursor that it
belongs to are written, to two places in turn, before the cursor itself.
"""

from __future__ import annotations

import mmap
import platform
import threading
from collections.abc import Callable
from typing import cast

_WRITTEN, _FRONT, _READ = 0, 1, 8  # in words
_ENDS, _COUNTS = 9, 11  # of two words each
_CONTROL_BYTES = 128
_SKIP = (1 << 64) - 1

#: Padding of records; data at this distance from the length word is aligned to it. Some CPUs copy
#: ten times slower to an address a little after the source, modulo pages, and engines seldom align
#: their rows to less.
LINE = 64
_PAD = LINE - 1

#: Smallest size of a page.
_PAGE = 1 << 12

#: Bytes that are written between two looks at the other end. A ring whose reader keeps up stays in
#: its first bytes of that number: a good part of a core's own cache.
_NEAR = 1 << 18


#: Whether the CPU keeps stores, and loads, in order without fences.
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
    """One end of the ring; producer and consumer each have a Ring over the same buffer.

    Args:
        buffer: zeroed memory, the end of a mapping; its size less 128 is rounded down to
            cache lines.
        behind: called if the producer finds unread records, once for each eighth of the ring that
            it fills.
    """

    def __init__(self, buffer: memoryview, behind: Callable[[], object] = lambda: None) -> None:
        self._cursors = buffer[:_CONTROL_BYTES].cast("Q")
        size = (len(buffer) - _CONTROL_BYTES) // LINE * LINE
        self._data = buffer[_CONTROL_BYTES : _CONTROL_BYTES + size]
        #: Memory that the producer writes records into. Slices of the mapping itself take the bytes
        #: of any contiguous buffer in one call.
        self.memory = cast("mmap.mmap", buffer.obj)
        self._front = len(self.memory) - len(buffer) + _CONTROL_BYTES + 8
        self._lengths = self._data.cast("Q")
        self._behind = behind
        self.size = size
        #: Largest record that fits into an empty ring, wherever its cursors stand.
        self.max_record = size // 2 // LINE * LINE - 8
        self._near = min(_NEAR, self.max_record + 8)
        # The producer's: offset of the next record, and the limit that it may reach for certain;
        # bytes ever written, less `_at`; bytes written when the reader was last found behind; end
        # of the reserved record.
        self._at = self._limit = self._base = self._found = self._next = 0
        self._reserved = False
        # The consumer's: its cursor, the producer's cursor at the last look, and the offset of the
        # record; cursor and offset after the record; the count, and where it stands.
        self._read = self._written = self._cursors[_READ]
        self._place = (self._read - self._cursors[_FRONT]) % size
        self._end = self._after = 0
        self._turn, self._consumed = self._counted()
        self._fence = _Fence()

    # ------------------------------------------------------------------ producer

    def touch(self, size: int) -> None:
        """Page in the first `size` bytes of an unused ring."""
        pages = self._data[: min(size, self.size) : _PAGE]
        pages[:] = bytes(len(pages))

    def reserve(self, length: int) -> int:
        """Reserve room for a record of `length` bytes, to be written and committed.

        Returns:
            Its offset in `memory`; 0 without room, or while another reservation is open: a signal
            handler may run in between.
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
        """Publish the reserved record."""
        if not _ORDERED:
            self._fence()
        self._at = at = self._next
        self._cursors[_WRITTEN] = self._base + at
        self._reserved = False

    def cancel(self) -> None:
        """Cancel a reservation."""
        self._reserved = False

    def _find(self, need: int) -> bool:
        """Find that much contiguous room."""
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
        # Unread records end at `at`, and may begin after it.
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
        """Bytes of them that the consumer has read."""
        return self._cursors[_READ]

    # ------------------------------------------------------------------ consumer

    @property
    def caught_up(self) -> bool:
        """Whether the next peek() reads the producer's cursor."""
        return self._read == self._written

    def peek(self) -> memoryview | None:
        """Return the oldest record, valid until consume(); None without any."""
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

    def consume(self, count: int = 0) -> None:
        """Release the room of the peeked record, and add `count` to `consumed`."""
        turn, total = 1 - self._turn, self._consumed + count
        self._cursors[_COUNTS + turn] = total
        self._cursors[_ENDS + turn] = self._end
        if not _ORDERED:
            self._fence()
        self._place = self._after
        self._read = self._cursors[_READ] = self._end
        self._turn, self._consumed = turn, total

    @property
    def consumed(self) -> int:
        """Sum of the counts of all consumed records, of killed consumers too."""
        return self._counted()[1]

    def _counted(self) -> tuple[int, int]:
        """Return which of the two counts belongs to the cursor, and the count."""
        turn = int(self._cursors[_ENDS + 1] == self._cursors[_READ])
        return turn, self._cursors[_COUNTS + turn]
