"""A ring of byte records between one producer and one consumer, in memory that both can see.

The buffer starts with two cursors, bytes ever written and bytes ever read, a cache line apart; the
rest is records. A record is a length word and its bytes, contiguous and padded to 8 bytes; where
one would cross the end of the buffer, the length word is _SKIP and the record starts over in front.

Neither side ever waits for the other. A cursor is one aligned 8-byte word that one side alone
writes, after what it publishes; the fences keep that order on CPUs that would swap the two, without
a lock that a killed process could take along.
"""

from __future__ import annotations

import threading

_WRITTEN, _READ = 0, 8  # in words
_CONTROL_BYTES = 128
_SKIP = (1 << 64) - 1


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
        buffer: zeroed memory; its size less 128 is rounded down to 8 bytes.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._cursors = buffer[:_CONTROL_BYTES].cast("Q")
        size = (len(buffer) - _CONTROL_BYTES) // 8 * 8
        self._data = buffer[_CONTROL_BYTES : _CONTROL_BYTES + size]
        self._lengths = self._data.cast("Q")
        self.size = size
        #: Largest record that fits into an empty ring, wherever its cursors stand.
        self.max_record = size // 2 - 8
        # Each end's own cursor, and what it last saw of the other's.
        self._written = self._cursors[_WRITTEN]
        self._read = self._cursors[_READ]
        self._next = self._written
        self._end = self._read
        self._reserved = False
        self._fence = _Fence()

    # ------------------------------------------------------------------ producer

    def reserve(self, length: int) -> memoryview | None:
        """Room for a record of `length` bytes, to be filled and committed; None if there is none.

        There is none either while another reservation is open: a signal handler may have come in
        between.
        """
        need = 8 + (length + 7) // 8 * 8
        at = self._written % self.size
        skip = self.size - at if need > self.size - at else 0
        if self._reserved or length > self.max_record:
            return None
        if skip + need > self.size - (self._written - self._read):
            self._read = self._cursors[_READ]
            self._fence()
            if skip + need > self.size - (self._written - self._read):
                return None
        self._reserved = True
        if skip:
            self._lengths[at // 8] = _SKIP
            at = 0
        self._lengths[at // 8] = length
        self._next = self._written + skip + need
        return self._data[at + 8 : at + 8 + length]

    def commit(self) -> None:
        """Publishes the reserved record."""
        self._fence()
        self._written = self._cursors[_WRITTEN] = self._next
        self._reserved = False

    @property
    def written(self) -> int:
        """Bytes ever published."""
        return self._written

    # ------------------------------------------------------------------ consumer

    def peek(self) -> memoryview | None:
        """The oldest record, valid until consume(); None if there is none."""
        if self._read == self._written:
            self._written = self._cursors[_WRITTEN]
            if self._read == self._written:
                return None
            self._fence()
        at = self._read % self.size
        length = self._lengths[at // 8]
        start = self._read
        if length == _SKIP:
            start += self.size - at
            at = 0
            length = self._lengths[0]
        self._end = start + 8 + (length + 7) // 8 * 8
        return self._data[at + 8 : at + 8 + length]

    def consume(self) -> None:
        """Gives the room of the peeked record back."""
        self._fence()
        self._read = self._cursors[_READ] = self._end
