"""Store of records in files: one writer thread, one commit for all queued records.

A commit writes payloads into free blocks (`blocks.py`) and syncs; then it appends the headers and
the places of the payloads to the log (`log.py`) and syncs again. A compaction writes a snapshot
(`snapshot.py`) and frees dropped payloads. All data carries checksums that are verified at every
read, and no file is mapped into memory.
"""

from __future__ import annotations

# Over 400 lines: one lock guards the index, the queue and the snapshots, so their calls stay here.
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

from routetrace.common.errors import (
    Corrupt,
    Overloaded,
    RouteTraceError,
    Unavailable,
)
from routetrace.server.settings.config import AckMode
from routetrace.server.store.base import StoreBase
from routetrace.server.store.disk.blocks import BLOCK_BYTES
from routetrace.server.store.disk.directory import DirLock, make_directory, open_directory
from routetrace.server.store.disk.failures import explain
from routetrace.server.store.disk.frames import FrameFile
from routetrace.server.store.disk.log import drop_frames, header_of, record_frame, records
from routetrace.server.store.disk.queue import Append, Compaction, Queue
from routetrace.server.store.disk.reserve import NO_ROOM, Reserve
from routetrace.server.store.disk.snapshot import Draft, Snapshot, Stored, pieces_of
from routetrace.server.store.interface import (
    Record,
    StoreStats,
    check_ranges,
    check_snapshot,
    cut,
    full,
    gone,
    limit,
)
from routetrace.server.wire.checksums import Payload

log = logging.getLogger(__name__)

_QUEUE_BYTES = 256 << 20
_RESERVE_LEAST = 1 << 20

#: Bytes, or seconds, for which a commit waits for more records.
_COMPANY_BYTES = 4 << 20
_PATIENCE_SECONDS = 0.005


class DiskStore(StoreBase):
    """Stores records in `data_dir`. See `routetrace.server.store.interface.Store` for the calls.

    Args:
        data_dir: directory, created if missing. Unreadable content is set aside.
        capacity_bytes: appends beyond it fail with Overloaded. Disk is allocated as needed.
        ack_mode: "fsync" acknowledges a record once it is on disk, "memory" once it is queued.

    Raises:
        Unavailable: if another process uses the directory, or another version made it.
        OSError: if the directory cannot be used.
    """

    def __init__(self, data_dir: Path, *, capacity_bytes: int, ack_mode: AckMode = "fsync") -> None:
        make_directory(data_dir)
        self._capacity = capacity_bytes
        self._ack_early = ack_mode == "memory"
        self._lock = DirLock(data_dir)
        try:
            contents = open_directory(data_dir, capacity_bytes)
        except BaseException:
            self._lock.release()
            raise
        self._path = contents.path
        self._blocks = contents.blocks
        self._log = contents.log
        self._reserve = Reserve(contents.path / "reserve")
        self._snapshot_lock = threading.Lock()  # one compaction at a time
        super().__init__(contents.last_number)
        self._index = contents.stored
        self._snapshots = contents.snapshots
        self._damaged = contents.damaged
        self._queue = Queue()
        self._durable_number = contents.last_number
        self._payload_bytes = sum(stored.size for stored in self._index.values())
        self._lost_records = 0
        self._failed_commits = 0
        self._failed = 0  # records that failed since the last success; for the writer thread
        self._writable = True
        self._readers = 0
        self._closed = False
        self._keep_reserve()
        self._writer = threading.Thread(target=self._write_loop, name="store", daemon=True)
        self._writer.start()

    # ------------------------------------------------------------------ reading

    def read(
        self, number: int, ranges: Sequence[tuple[int, int]], *, wait: bool = True
    ) -> list[Payload]:
        """See `Store.read`."""
        with self._reading():
            # In this order: a record enters the index before it leaves the queue.
            pending = self._queue.payload(number)
            if len(pending):
                return cut(pending, ranges, number)
            stored = self._index.get(number)
            if stored is None:
                raise gone(number)
            check_ranges(stored.size, ranges, number)
            try:
                return self._blocks.read(number, *stored, ranges, wait)
            except Corrupt as error:
                if self._index.get(number) is not stored:  # dropped, and overwritten since
                    raise gone(number) from error
                self._note_damage(f"payload of record {number}", error)
                raise

    def headers(self, after: int = 0) -> Iterator[tuple[int, bytes | None]]:
        """See `Store.headers`."""
        with self._changed:
            self._check_open()
            segments = list(self._log.segments)
            covered = self._snapshots[-1].number if self._snapshots else 0
        after = max(after, covered)
        for frame in records(segments, after):
            with self._changed:
                self._check_open()
            after = after if frame is None else frame.number
            yield after, None if frame is None else header_of(frame)

    def _stored(self) -> Iterable[int]:
        return self._index

    def load_snapshot(self) -> tuple[int, Iterator[bytes]] | None:
        """See `Store.load_snapshot`."""
        with self._changed:
            self._check_open()
            snapshot = self._snapshots[-1] if self._snapshots else None
        return (snapshot.number, self._pieces(snapshot.file)) if snapshot else None

    def _pieces(self, file: FrameFile) -> Iterator[bytes]:
        try:
            yield from pieces_of(file)
        except Corrupt as error:
            self._note_damage(file.path.name, error)
            raise

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        with self._changed:
            self._check_open()
            pending = self._queue.payload_sizes()
            return StoreStats(
                records=len(self._index) + len(pending),
                payload_bytes=self._payload_bytes + sum(pending),
                used_bytes=self._used_bytes() + self._queue.room,
                capacity_bytes=self._capacity,
                file_bytes=self._blocks.file_bytes() + self._other_bytes() + self._reserve.size,
                damaged_records=len(self._damaged),
                lost_records=self._lost_records,
                failed_commits=self._failed_commits,
                writable=self._writable,
            )

    def _used_bytes(self) -> int:
        return self._blocks.count * BLOCK_BYTES + self._other_bytes()

    def _other_bytes(self) -> int:
        return self._log.size + sum(snapshot.size for snapshot in self._snapshots)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._changed:
            self._check_open()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                if self._closing:  # each read would wake the writer
                    self._changed.notify_all()

    def _note_damage(self, where: str, why: object) -> None:
        with self._changed:
            known = where in self._damaged
            self._damaged.add(where)
        if not known:
            log.error("%s: damaged: %s", where, why)

    # ------------------------------------------------------------------ writing

    def append(self, record: Record) -> Future[None]:
        """See `Store.append`. Also refuses records while 256 MiB are queued."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # a cancelled waiter must not cancel it
        item = Append(record, future)
        with self._changed:
            self._check_open()
            self._numbers.check(record.number)
            room = self._used_bytes() + self._queue.room + item.room
            if room > limit(self._capacity, record):
                future.set_exception(full(self._capacity))
            elif self._queue.bytes + item.size > _QUEUE_BYTES:
                message = f"{self._queue.bytes} bytes are queued for the disk; retry later"
                future.set_exception(Overloaded(message, retry_after=1.0))
            else:
                self._numbers.last = record.number
                self._queue.add(item)
                # Wake the writer for the first record and for a full commit, not for each record.
                if len(self._queue) == 1 or self._queue.bytes >= _COMPANY_BYTES:
                    self._changed.notify_all()
                if self._ack_early:
                    future.set_result(None)  # under the lock, which keeps the order
        return future

    def compact(self, snapshot: tuple[int, Iterable[bytes]] | None, drop: Iterable[int]) -> None:
        """See `Store.compact`. Waits for all records queued before it."""
        with self._snapshot_lock:
            with self._changed:
                self._check_open()
                before = self._snapshots[-1] if self._snapshots else None
            if snapshot is None:
                self._queue_compaction(None, 0, drop)
                return
            check_snapshot(snapshot[0], before.number if before else 0)
            file = FrameFile.new(self._path, "snapshot", before.file.id + 1 if before else 1)
            draft = None
            done = False
            try:
                draft = Draft(file, self._reserve.with_room)
                for piece in snapshot[1]:
                    draft.add_piece(piece)
                draft.check()
                self._queue_compaction(draft, snapshot[0], drop)
                done = True
            except (OSError, Corrupt) as error:
                raise self._uncompacted(error) from error
            finally:
                if draft is not None:
                    draft.close(keep=done)

    def _queue_compaction(self, draft: Draft | None, number: int, drop: Iterable[int]) -> None:
        work = Compaction(draft, number, list(drop), Future())
        with self._changed:
            self._check_open()
            self._queue.add(work)
            self._changed.notify_all()
        work.future.result()

    def close(self) -> None:
        """See `Store.close`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._readers)
            if not self._closed:
                with suppress(OSError):  # an incomplete tail was not acknowledged
                    self._log.rotate()
                self._blocks.close()
                self._lock.release()
            self._closed = True

    def _write_loop(self) -> None:
        patience = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                # A commit costs about the same for one record as for ten: while chunks arrive, it
                # waits for more of them, at most as long as the last commit took.
                self._changed.wait_for(
                    lambda: self._queue.bytes >= _COMPANY_BYTES or self._closing, patience
                )
                if not self._queue:
                    return
                work = self._queue.take()
            if isinstance(work, Compaction):
                self._compact(work)
            else:
                begun = time.monotonic()
                self._append_group(work)
                patience = min(time.monotonic() - begun, _PATIENCE_SECONDS)

    def _append_group(self, group: list[Append]) -> None:
        self._keep_reserve()
        try:
            stored = self._commit(group)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                self._give_back(_RESERVE_LEAST)  # the log needs space
            self._fail(group, error)
            return
        self._note_success()
        with self._changed:
            self._durable_number = group[-1].record.number
            for item, where in zip(group, stored, strict=True):
                if where is not None:
                    self._index[item.record.number] = where
                    self._payload_bytes += where.size
                self._queue.done(item)
        if not self._ack_early:
            for item in group:
                item.future.set_result(None)

    def _commit(self, group: list[Append]) -> list[Stored | None]:
        stored: list[Stored | None] = []
        self._log.mend()  # first: what a failed commit left may name free blocks
        try:
            for record in [item.record for item in group]:
                size = len(record.payload)
                table = self._blocks.write(record.payload, record.sums) if size else b""
                stored.append(Stored(size, table) if size else None)
            if any(stored):
                self._blocks.sync()  # first: the log must name durable payloads only
            before = [self._durable_number, *(item.record.number for item in group)]
            frames = (
                record_frame(item.record, where, previous)
                for item, where, previous in zip(group, stored, before, strict=False)
            )
            self._log.append(frames, group[-1].record.number)
        except BaseException:
            for where in filter(None, stored):
                self._blocks.free(where.table)
            raise
        return stored

    def _note_success(self) -> None:
        if self._failed:
            log.warning("writes succeed again; %d records failed", self._failed)
            self._failed = 0
        self._writable = True

    def _fail(self, group: list[Append], error: Exception) -> None:
        with self._changed:
            self._writable = self._writable and not isinstance(error, OSError)
            # Records build on earlier ones: later queued records fail too.
            group = group + self._queue.take_appends()
            for item in group:
                self._queue.done(item)
            if self._ack_early:
                self._lost_records += len(group)
            else:
                self._numbers.last = self._durable_number
        refusal = self._refusal(error, None if self._failed else "records cannot be written")
        self._failed += len(group)
        if not self._ack_early:
            for item in group:
                item.future.set_exception(refusal)

    def _compact(self, work: Compaction) -> None:
        drop = [number for number in dict.fromkeys(work.drop) if number in self._index]
        new: Snapshot | None = None
        try:
            if work.draft is None:
                if drop or not self._writable:
                    frames = drop_frames(drop)
                    self._reserve.with_room(lambda: self._log.append(frames, self._durable_number))
                    self._note_success()
            else:
                gone_ = set(drop)
                index = {n: where for n, where in self._index.items() if n not in gone_}
                new = work.draft.finish(work.number, self._log.rotate(), index)
        except Exception as error:
            work.future.set_exception(self._uncompacted(error))
            return
        with self._changed:
            dropped = [self._index.pop(number) for number in drop]
            self._payload_bytes -= sum(where.size for where in dropped)
            if new is not None:
                old = self._snapshots[:-1]
                self._snapshots = [*self._snapshots[-1:], new]
                self._durable_number = max(self._durable_number, work.number)
                self._numbers.last = max(self._numbers.last, work.number)
                self._trim(old)
        for where in dropped:  # after the index: no new read uses these blocks
            self._blocks.free(where.table)
        self._keep_reserve(give_back=True)
        work.future.set_result(None)

    def _trim(self, old: list[Snapshot]) -> None:
        """Delete files that neither of the last two snapshots needs."""
        for snapshot in old:
            with suppress(OSError):  # the next start ignores it
                snapshot.file.path.unlink()
        if len(self._snapshots) == 2:
            self._log.trim(self._snapshots[0].number, self._snapshots[0].base)

    def _keep_reserve(self, *, give_back: bool = False) -> None:
        snapshot = self._snapshots[-1].size if self._snapshots else 0
        size = max(_RESERVE_LEAST, 1 << (2 * snapshot).bit_length())
        if not self._reserve.keep(size) and give_back:
            self._give_back(size)
            self._reserve.keep(size)

    def _uncompacted(self, error: Exception) -> RouteTraceError:
        """Count and return the error of a failed compaction, with the path and the remedy."""
        text = explain(error, self._path) if isinstance(error, OSError) else error
        refusal = Overloaded if isinstance(self._refusal(error, None), Overloaded) else Unavailable
        return refusal(f"compaction failed: {text}", retry_after=1.0)

    def _give_back(self, size: int) -> None:
        with suppress(OSError):  # as above, then nothing is given back
            self._log.mend()
            self._blocks.give_back(size)

    def _refusal(self, error: Exception, what: str | None) -> RouteTraceError:
        """Count and return the error of a failed write; log it with prefix `what`, if any."""
        if what:
            text = explain(error, self._path) if isinstance(error, OSError) else error
            log.error("%s: %s", what, text)
        with self._changed:
            self._failed_commits += 1
        if isinstance(error, Overloaded):
            return error
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return Overloaded(f"the disk is full: {error.strerror}", retry_after=1.0)
        # The log has the paths, which are not for callers.
        why = error.strerror if isinstance(error, OSError) else None
        if isinstance(error, RouteTraceError):
            why = error.message
        why = why or type(error).__name__
        return Unavailable(f"the store cannot write: {why}", retry_after=1.0)
