"""Record store in an object store: a log of commits, snapshots, and a cache of payloads.

Indexes are in memory; the server that takes over rebuilds them. Payloads are read with range
requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

from routetrace.common.errors import (
    Closed,
    Corrupt,
    NotFound,
    Overloaded,
    RouteTraceError,
    Unavailable,
)
from routetrace.server.store.base import StoreBase
from routetrace.server.store.interface import (
    Owner,
    Record,
    StoreStats,
    check_ranges,
    check_snapshot,
    cut,
    full,
    gone,
    limit,
)
from routetrace.server.store.object import format as fmt
from routetrace.server.store.object import snapshots
from routetrace.server.store.object.bucket import Bucket
from routetrace.server.store.object.cache import PayloadCache
from routetrace.server.store.object.files import PayloadFiles
from routetrace.server.store.object.format import Kind, Where
from routetrace.server.store.object.index import Index
from routetrace.server.store.object.lease import Lease
from routetrace.server.store.object.log import PUT_SECONDS, Damaged, Fenced, Log, log
from routetrace.server.store.object.queue import Queue, Queued
from routetrace.server.wire.checksums import Payload

#: Most seconds that a commit waits for company while the one before took as long.
COMPANY_SECONDS = 0.25
#: Bytes of records that wait for a commit; more are refused.
QUEUE_BYTES = 256 << 20
#: Seconds for which `close` tries to write what is queued.
CLOSE_SECONDS = 10.0


class ObjectStore(StoreBase):
    """Store in a bucket, of one server at a time.

    It is empty until `take_over` has returned, and of no use once it is `lost`.

    Args:
        bucket: of the log.
        lease: of this server; None: the log's fence alone decides who writes.
        capacity_bytes: see StoreStats.
        cache_bytes: of payloads in memory.
        files: of payloads on a local disk, behind those in memory.
    """

    def __init__(
        self,
        bucket: Bucket,
        lease: Lease | None = None,
        *,
        capacity_bytes: int = 1 << 62,
        cache_bytes: int = 256 << 20,
        files: PayloadFiles | None = None,
    ) -> None:
        super().__init__()
        self.ownership = self
        self._bucket = bucket
        self._lease = lease
        self._capacity = capacity_bytes
        self._log = Log(bucket)
        self._cache = PayloadCache(cache_bytes, files)
        # All below is guarded by `_changed`.
        self._queue = Queue()
        self._index = Index()
        self._damaged = self._failed = 0
        self._open = False
        self._lost: Unavailable | None = None
        self.on_lost: Callable[[], object] = lambda: None
        """See `Ownership.on_lost`."""
        self._thread = threading.Thread(target=self._run, name="routetrace-store", daemon=True)

    # ------------------------------------------------------------------ ownership

    @property
    def owned(self) -> bool:
        """Whether this server may answer from its state and acknowledge."""
        return (
            self._open
            and self._lost is None
            and not self._closing
            and (self._lease is None or self._lease.held)
        )

    @property
    def puts(self) -> tuple[int, int]:
        """Objects of the log written by this server, and their bytes."""
        return self._log.puts, self._log.put_bytes

    def take_over(self, waiting: Callable[[Owner], None] = lambda _: None) -> None:
        """Wait for the lease, fence the writers before, and read the log's heads.

        Args:
            waiting: called with each other owner that is found meanwhile.

        Raises:
            Closed: if the store was closed meanwhile.
            Corrupt: if a part of the log is missing, or its last compaction is damaged.
            Unavailable: if the object store does not answer.
            InvalidArgument: if it refuses the credentials.
        """
        if self._lease:
            self._lease.on_lost = lambda: self._lose("another server owns the store")
            self._lease.on_heir = self.on_lost
            self._lease.acquire(waiting)
        begun = time.monotonic()
        self._damaged = self._index.load(self._log.open())
        self._numbers.last = self._index.durable
        seconds = time.monotonic() - begun
        log.info("opened the log at object %d in %.2f s", self._log.next - 1, seconds)
        with self._changed:
            if self._closing:
                raise Closed("the store was closed while it was opened")
            self._open = True
            self._thread.start()

    def _lose(self, reason: str) -> Unavailable:
        with self._changed:
            first, lost = self._lost is None, self._lost
            if lost is None:
                lost = self._lost = Unavailable(
                    f"{reason}; this server has stopped to serve", retry_after=0.5
                )
            self._changed.notify_all()
        if first:
            log.error("%s", lost)
            if self._lease:
                self._lease.lose(reason)
            self.on_lost()
        return lost

    # ------------------------------------------------------------------ writing

    def append(self, record: Record) -> Future[None]:
        """See `Store.append`."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        queued = Queued(record, future)
        with self._changed:
            self._check_open()
            self._numbers.check(record.number)
            if self._lost or not self._open:
                future.set_exception(self._lost or _not_open())
            elif self._index.used + self._queue.bytes + queued.size > limit(self._capacity, record):
                future.set_exception(full(self._capacity))
            elif self._queue.bytes + queued.size > QUEUE_BYTES:
                text = f"{self._queue.bytes} bytes wait for the object store"
                future.set_exception(Overloaded(text, retry_after=1.0))
            else:
                self._index.headers.clear()  # the recovery is over
                self._numbers.last = record.number
                self._queue.add(queued)
                self._changed.notify_all()
        return future

    def _run(self) -> None:
        patience = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                self._changed.wait_for(lambda: self._queue.is_due or self._closing, patience)
                found = self._queue.take()
            if not isinstance(found, list):
                found()
                continue
            begun = time.monotonic()
            self._commit(found)
            patience = min(time.monotonic() - begun, COMPANY_SECONDS)

    def _commit(self, group: list[Queued]) -> None:
        records = [queued.record for queued in group]
        try:
            if self._lost:
                raise self._lost
            head, sums = fmt.pack_records(records)
            payloads = [record.payload for record in records]
            index = self._append(Kind.RECORDS, len(records), head, *payloads)
        except Exception as error:
            self._fail(group, error)
            return
        for record in records:
            if record.payload:
                self._cache.put(record.number, record.payload)
        with self._changed:
            self._index.add(index, len(head), records, sums)
            for queued in group:
                self._queue.done(queued)
        for queued in group:
            queued.stored.set_result(None)

    def _append(self, kind: Kind, records: int, head: bytes, *payloads: Payload) -> int:
        """Write the next object of the log.

        Raises:
            Unavailable: this server has lost the log.
        """
        begun = time.monotonic()
        try:
            return self._log.append(
                kind,
                records,
                head,
                *payloads,
                until=begun + PUT_SECONDS,
                stop=lambda: self._closing and time.monotonic() > begun + CLOSE_SECONDS,
            )
        except Fenced:
            raise self._lose("another server has taken the log over") from None
        except Exception as error:
            # Whether the object is there is not known: only a new start can go on from it.
            raise self._lose(f"a commit has no known outcome ({error})") from error

    def _fail(self, group: list[Queued], error: Exception) -> None:
        with self._changed:
            self._failed += 1
            group = [*group, *self._queue.remove_records()]
            self._numbers.last = self._index.durable
            for queued in group:
                self._queue.done(queued)
        for queued in group:
            queued.stored.set_exception(error)

    # ------------------------------------------------------------------ compaction

    def compact(self, snapshot: tuple[int, Iterable[bytes]] | None, drop: Iterable[int]) -> None:
        """See `Store.compact`."""
        with self._changed:
            self._check_open()
            if self._lost or not self._open:
                raise self._lost or _not_open()
            dropped = {number for number in drop if number in self._index.payloads}
            old = self._index.base
        if snapshot is None and not dropped:
            return
        number, directory, parts = old.snapshot, old.directory, old.parts
        if snapshot is not None:
            number = snapshot[0]
            check_snapshot(number, old.snapshot)
            directory, parts = snapshots.write(self._bucket, self._log.next, snapshot[1])
        done: Future[list[str]] = Future()

        def work() -> None:
            try:
                done.set_result(self._compact(number, directory, parts, dropped))
            except BaseException as error:
                done.set_exception(error)

        with self._changed:
            self._check_open()
            self._queue.call(work)
            self._changed.notify_all()
        self._delete(done.result())

    def _compact(self, number: int, directory: str, parts: int, dropped: set[int]) -> list[str]:
        """Write a compaction as the next object of the log; return the keys to delete."""
        with self._changed:
            base = self._index.compacted(number, directory, parts, dropped)
        index = self._log.next
        self._bucket.put(fmt.mark_key(index), b"-")
        # From here on it counts. A fenced writer does not get past this line, and deletes nothing.
        self._append(Kind.COMPACT, 0, base.pack())
        with self._changed:
            dead = self._index.take(base, index, dropped)
        for n in dropped:
            self._cache.drop(n)
        return dead

    def _delete(self, dead: list[str]) -> None:
        """Delete objects that the last compaction has made dead, and what older ones have left."""
        index = self._index
        try:
            dead += snapshots.outdated(self._bucket, index.base_index, index.base.directory)
            self._bucket.delete(dead)
        except RouteTraceError as error:
            log.warning("%s; the next compaction deletes it", error)
            return
        with self._changed:
            gone_now = set(dead)
            index.orphans = [key for key in index.orphans if key not in gone_now]

    # ------------------------------------------------------------------ reading

    def read(
        self, number: int, ranges: Sequence[tuple[int, int]], *, wait: bool = True
    ) -> list[Payload]:
        """See `Store.read`; an owner whose lease is over serves nothing.

        Raises:
            Unavailable: if this server does not own the log at the moment, or the object store does
                not answer.
        """
        with self._changed:
            self._check_open()
            where, payload = self._index.payloads.get(number), self._queue.payloads.get(number)
        if not self.owned:
            raise self._lost or Unavailable(
                "the lease on the object store is over; retry later", retry_after=0.5
            )
        if not payload:
            if where is None:
                raise gone(number)
            check_ranges(where.size, ranges, number)
            payload = self._cache.get(number)
            if payload is None:
                if not wait:
                    raise BlockingIOError
                payload = self._cache.load(number, lambda: self._fetch(number, where), where.fits)
        return cut(payload, ranges, number)

    def _fetch(self, number: int, where: Where) -> Payload:
        try:
            payload = self._bucket.range(fmt.key(where.object), where.offset, where.size)
        except NotFound:
            raise gone(number) from None
        if not where.fits(payload):
            with self._changed:
                self._damaged += 1
            raise Corrupt(f"record {number} does not match its checksum")
        return payload

    def headers(self, after: int = 0) -> Iterator[tuple[int, bytes | None]]:
        """See `Store.headers`."""
        with self._changed:
            self._check_open()
            headers, covered = [*self._index.headers], self._index.base.snapshot
            indexes = self._index.uncovered()
        if not headers:
            headers = [
                (entry.number, entry.header)
                for found in self._log.records(indexes)
                if not isinstance(found, Damaged)
                for entry in found[1]
                if entry.number > covered
            ]
        first = max(after, covered)
        return iter([(n, h) for n, h in headers if n > first or (h is None and n == first)])

    def _stored(self) -> Iterable[int]:
        return self._index.payloads

    def load_snapshot(self) -> tuple[int, Iterator[bytes]] | None:
        """See `Store.load_snapshot`."""
        with self._changed:
            self._check_open()
            found = self._index.base
        return (found.snapshot, snapshots.read(self._bucket, found)) if found.directory else None

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        with self._changed:
            self._check_open()
            return StoreStats(
                records=len(self._index.payloads),
                payload_bytes=self._index.payload_bytes,
                used_bytes=self._index.used + self._queue.bytes,
                capacity_bytes=self._capacity,
                file_bytes=self._index.used,
                damaged_records=self._damaged,
                failed_commits=self._failed,
                writable=self.owned or not self._open,
            )

    def close(self) -> None:
        """See `Store.close`; then release the lease."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        if self._open:
            self._thread.join()
        if self._lease:
            self._lease.release()
        self._cache.close()


def _not_open() -> Unavailable:
    return Unavailable("this server does not own the store yet", retry_after=0.5)
