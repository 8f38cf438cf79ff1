"""The log: objects with consecutive indexes, written by one server, fenced by put-if-absent.

Rules, each of which has lost acknowledged data where it was broken:

* Puts are serial, and a put with an unknown outcome is repeated until it is known. A writer that
  finds its own object there has succeeded; one that finds another has been fenced.
* A server that takes over puts a fence at the first free index before it reads. A fence is never
  deleted: it is the index at which the writer before stops, however late that one wakes.
* A free index with objects after it is no end, but a hole: of a compaction under way, or damage.
* A compaction counts through its own object of the log; only then does anything get deleted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from routetrace.common.errors import Corrupt, NotFound, Unavailable
from routetrace.server.store.object import format as fmt
from routetrace.server.store.object.bucket import Bucket
from routetrace.server.store.object.format import Compaction, Entry, Fixed, Kind

log = logging.getLogger("routetrace.server.store")

#: Seconds after which a put whose outcome stays unknown ends the ownership of its writer.
PUT_SECONDS = 120.0
_PAUSES = (0.05, 2.0)

#: Bytes of an object that are read at once to find its head.
_FIRST_BYTES = 256 << 10
_READERS = 16
_OPEN_ATTEMPTS = 5


class Fenced(Exception):
    """Another writer has taken the log over."""


class Damaged(NamedTuple):
    """A log object that cannot be read."""

    object: int
    reason: str


@dataclass
class Opened:
    """State of the log at its end, after the fence of this writer."""

    base: Compaction | None
    base_index: int
    objects: dict[int, int]
    """Sizes of all log objects by index."""
    heads: list[tuple[Fixed, list[Entry]] | Damaged]
    """Commits since the base, and those before it whose headers no snapshot covers; ascending."""


class Log:
    """Writer of the log, from its fence on; calls of one thread, but for `records`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.nonce = os.urandom(16)
        self.term = 0
        self.next = 0
        self.puts = 0
        self.put_bytes = 0

    # ------------------------------------------------------------------ opening

    def open(self) -> Opened:
        """Fence all earlier writers, then return what they have written.

        Raises:
            Corrupt: if a part of the log is missing, or its last compaction is damaged.
            Unavailable: if the object store does not answer, or others write at the same time.
        """
        hole = ""
        for _ in range(_OPEN_ATTEMPTS):
            sizes = self._sizes()
            base_index, base = self._base()
            end = base_index + 1
            while end in sizes:
                end += 1
            if any(index > end for index in sizes):
                # Not the end. A compaction under way has a newer base; damage has none.
                hole = f"{fmt.key(end)} is missing, and later objects are there"
                continue
            self.term = self._term(end - 1, base_index) + 1
            if not self.put(end, Kind.FENCE, until=time.monotonic() + PUT_SECONDS):
                continue  # the writer before was faster
            sizes = self._sizes()
            base_index, base = self._base()
            whole = all(index in sizes for index in range(base_index + 1, end))
            if max(sizes) != end or not whole:
                continue  # the fence is in a hole that a compaction has made since the listing
            self.next = end + 1
            kept = base.uncovered() if base else []
            replay = sorted([*kept, *(i for i in sizes if base_index < i < end)])
            return Opened(base, base_index, sizes, list(self.records(replay)))
        if hole:
            raise Corrupt(f"the log in {self._bucket.name} has a hole: {hole}")
        raise Unavailable(f"other servers write to the log in {self._bucket.name}", retry_after=1.0)

    def _sizes(self) -> dict[int, int]:
        listed = {fmt.index_of(found.key): found.size for found in self._bucket.list("log/")}
        return {index: size for index, size in listed.items() if index > 0}

    def _base(self) -> tuple[int, Compaction | None]:
        """Return the newest compaction that counts, and its index."""
        marks = sorted(fmt.index_of(found.key) for found in self._bucket.list("mark/"))
        for index in reversed(marks):
            try:
                fixed, head = self._head(index)
            except NotFound:
                continue  # the writer stopped between the mark and the compaction
            if fixed.kind is Kind.COMPACT:
                return index, Compaction.parse(fixed, head)
        return 0, None

    def _term(self, last: int, base: int) -> int:
        """Return the highest term up to the index `last`, in which terms ascend."""
        for index in range(last, max(0, base - 1), -1):
            # One that is damaged is reported when it is read; one that a compaction has deleted
            # makes a hole, which the caller sees.
            with contextlib.suppress(Corrupt, NotFound):
                return self._fixed(index).term
        return 0

    # ------------------------------------------------------------------ reading

    def _fixed(self, index: int) -> Fixed:
        return fmt.unpack_fixed(self._bucket.range(fmt.key(index), 0, fmt.FIXED_BYTES), index)

    def _head(self, index: int) -> tuple[Fixed, bytes]:
        data = self._bucket.range(fmt.key(index), 0, _FIRST_BYTES)
        fixed = fmt.unpack_fixed(data, index)
        end = fmt.FIXED_BYTES + fixed.head_bytes
        if len(data) < end and len(data) == _FIRST_BYTES:
            data += self._bucket.range(fmt.key(index), len(data), end - len(data))
        return fixed, data[fmt.FIXED_BYTES : end]

    def records(self, indexes: Iterable[int]) -> Iterable[tuple[Fixed, list[Entry]] | Damaged]:
        """Yield the commits at these indexes, in their order; several are read at a time."""

        def read(index: int) -> tuple[Fixed, list[Entry]] | Damaged | None:
            try:
                fixed, head = self._head(index)
                if fixed.kind is not Kind.RECORDS:
                    return None
                return fixed, fmt.unpack_records(fixed, head)
            except (Corrupt, NotFound) as error:
                return Damaged(index, error.message)

        with ThreadPoolExecutor(_READERS) as pool:
            yield from filter(None, pool.map(read, indexes))

    # ------------------------------------------------------------------ writing

    def put(
        self,
        index: int,
        kind: Kind,
        records: int = 0,
        head: bytes = b"",
        *payloads: bytes | memoryview,
        until: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Write an object of the log; return False if another writer has taken the index.

        Args:
            index: of the object.
            kind: of the object.
            records: number of records.
            head: after the fixed part.
            payloads: after the head.
            until: time.monotonic() after which it is not repeated.
            stop: whether not to repeat it.

        Raises:
            Unavailable: the outcome is not known.
        """
        body = fmt.pack(self.term, index, self.nonce, kind, records, head, *payloads)
        pause, most = _PAUSES
        warned = False
        while True:
            try:
                if not self._bucket.create(fmt.key(index), body) and not self._is_mine(index):
                    return False
                break
            except Unavailable as error:
                if stop() or time.monotonic() + pause > until:
                    raise
                if not warned:
                    log.warning("%s; the same commit is tried again", error)
                    warned = True
            time.sleep(pause)
            pause = min(most, 2 * pause)
        if warned:
            log.warning("the object store takes commits again")
        self.puts += 1
        self.put_bytes += len(body)
        return True

    def _is_mine(self, index: int) -> bool:
        """Whether an earlier attempt of this writer has written the object."""
        try:
            fixed = self._fixed(index)
        except (Corrupt, NotFound):
            return False
        return (fixed.term, fixed.nonce) == (self.term, self.nonce)

    def append(
        self,
        kind: Kind,
        records: int,
        head: bytes,
        *payloads: bytes | memoryview,
        until: float,
        stop: Callable[[], bool],
    ) -> int:
        """Write the next object; return its index.

        Raises:
            Fenced: if another writer has taken it.
            Unavailable: the outcome is not known.
        """
        index = self.next
        if not self.put(index, kind, records, head, *payloads, until=until, stop=stop):
            raise Fenced
        self.next = index + 1
        return index
