"""The store that keeps records in LMDB: one writer thread, one commit for all that is queued."""

from __future__ import annotations

import logging
import shutil
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import lmdb

from routetrace.server.config import AckMode
from routetrace.server.lmdb_env import DirLock, close_database, open_database
from routetrace.server.store import Ascending, Record, StoreStats, check_snapshot, cut, full
from routetrace.v1.errors import (
    Closed,
    Corrupt,
    InvalidArgument,
    Overloaded,
    RouteTraceError,
    Unavailable,
)

log = logging.getLogger(__name__)

_GROUP_BYTES = 16 << 20
_QUEUE_BYTES = 256 << 20
_HEADERS_PER_READ = 256


@dataclass(frozen=True)
class _Append:
    record: Record
    pages: int
    future: Future[None]

    @property
    def size(self) -> int:
        return len(self.record.header) + len(self.record.payload)


@dataclass(frozen=True)
class _Compaction:
    snapshot: tuple[int, bytes] | None
    drop: list[int]
    future: Future[None]


class LmdbStore:
    """Keeps records in `data_dir`/db. See `routetrace.server.store.Store` for the calls.

    Args:
        data_dir: made if it is not there. A database in it that can not be read is set aside.
        capacity_bytes: appends fail with Overloaded beyond it. Disk is taken as it is needed.
        ack_mode: "fsync" acknowledges a record once it is on disk, "memory" once it is queued.

    Raises:
        Unavailable: if another process uses the directory.
        OSError: if the directory can not be used.
    """

    def __init__(self, data_dir: Path, *, capacity_bytes: int, ack_mode: AckMode = "fsync") -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self._file = data_dir / "db" / "data.mdb"
        self._capacity = capacity_bytes
        self._ack_early = ack_mode == "memory"
        self._lock = DirLock(data_dir)
        try:
            self._env, self._tables, contents = open_database(data_dir / "db", capacity_bytes)
        except BaseException:
            self._lock.release()
            raise
        self._changed = threading.Condition()  # guards everything below
        self._queue: deque[_Append | _Compaction] = deque()
        self._pending: dict[int, _Append] = {}  # not committed yet
        self._pending_bytes = 0
        self._pending_pages = 0
        self._numbers = Ascending(contents.last_number)
        self._durable_number = contents.last_number
        self._snapshot_number = contents.snapshot_number
        self._records = contents.records
        self._payload_bytes = contents.payload_bytes
        self._damaged: set[tuple[str, int]] = set()
        self._lost_records = 0
        self._write_error = False
        self._failed = 0  # since the last record that could be written; the writer's own
        self._readers = 0
        self._closing = False
        self._closed = False
        with self._env.begin() as txn:
            self._used_pages = self._tables.used_pages(txn)
        self._writer = threading.Thread(target=self._write_loop, name="store", daemon=True)
        self._writer.start()

    # ------------------------------------------------------------------ reading

    def read(self, number: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See `Store.read`."""
        with self._reading():
            pending = self._pending.get(number)
            if pending is not None and pending.record.payload:
                return cut(pending.record.payload, ranges, number)
            try:
                with self._env.begin(buffers=True) as txn:
                    return self._tables.read(txn, number, ranges)
            except (Corrupt, lmdb.Error) as error:
                self._note_damage("payload", number, error)
                raise Corrupt(f"record {number} can not be read: {error}") from error

    def headers(self, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """See `Store.headers`."""
        while True:
            # In pieces: a transaction that stays open keeps every page from being reused.
            try:
                with self._reading(), self._env.begin(buffers=True) as txn:
                    found = self._tables.headers(txn, after, _HEADERS_PER_READ)
            except lmdb.Error as error:
                self._note_damage("header", after + 1, f"{error}; those behind it are lost too")
                return
            for number, header in found:
                if header is None:
                    self._note_damage("header", number, "it does not match its checksum")
                else:
                    yield number, header
            if not found:
                return
            after = found[-1][0]

    def load_snapshot(self) -> tuple[int, bytes] | None:
        """See `Store.load_snapshot`. One that is damaged counts as none."""
        with self._reading(), self._env.begin(buffers=True) as txn:
            try:
                return self._tables.snapshot(txn)
            except (Corrupt, lmdb.Error) as error:
                self._note_damage("snapshot", self._snapshot_number, error)
                return None

    def last_number(self) -> int:
        """See `Store.last_number`."""
        with self._changed:
            self._check_open()
            return self._numbers.last

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        with self._changed:
            self._check_open()
            pending = [len(p.record.payload) for p in self._pending.values() if p.record.payload]
            return StoreStats(
                records=self._records + len(pending),
                payload_bytes=self._payload_bytes + sum(pending),
                used_bytes=(self._used_pages + self._pending_pages) * self._tables.page_size,
                capacity_bytes=self._capacity,
                file_bytes=self._file.stat().st_blocks * 512,
                damaged_records=len(self._damaged),
                lost_records=self._lost_records,
            )

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
                self._changed.notify_all()

    def _note_damage(self, what: str, number: int, error: object) -> None:
        with self._changed:
            known = (what, number) in self._damaged
            self._damaged.add((what, number))
        if not known:
            log.error("%s of record %d is damaged: %s", what, number, error)

    def _check_open(self) -> None:
        if self._closing:
            raise Closed("the store is closed")

    # ------------------------------------------------------------------ writing

    def append(self, record: Record) -> Future[None]:
        """See `Store.append`. Refuses what comes while 256 MiB wait to be written, too."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # a waiter who goes away must not cancel it
        item = _Append(record, self._tables.pages(record), future)
        with self._changed:
            self._check_open()
            self._numbers.check(record.number)
            pages = self._used_pages + self._pending_pages + item.pages
            if pages * self._tables.page_size > self._capacity:
                future.set_exception(full(self._capacity))
            elif self._pending_bytes + item.size > _QUEUE_BYTES:
                message = f"{self._pending_bytes} bytes wait to be written"
                future.set_exception(Overloaded(message, retry_after=1.0))
            else:
                self._numbers.last = record.number
                self._pending[record.number] = item
                self._pending_bytes += item.size
                self._pending_pages += item.pages
                self._queue.append(item)
                self._changed.notify_all()
                if self._ack_early:
                    future.set_result(None)  # in here, or else a later one could be first
        return future

    def compact(self, snapshot: tuple[int, bytes] | None, drop: Iterable[int]) -> None:
        """See `Store.compact`. Waits for all that was queued before it."""
        work = _Compaction(snapshot, list(drop), Future())
        with self._changed:
            self._check_open()
            self._queue.append(work)
            self._changed.notify_all()
        work.future.result()

    def close(self) -> None:
        """See `Store.close`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._writer.join()
        with self._changed:
            # Closing the environment unmaps what readers are looking at.
            self._changed.wait_for(lambda: not self._readers)
            if not self._closed:
                close_database(self._env, sound=not self._damaged and not self._write_error)
                self._lock.release()
            self._closed = True

    def _write_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                work = self._take()
            if isinstance(work, _Compaction):
                self._compact(work)
            else:
                self._append_group(work)

    def _take(self) -> _Compaction | list[_Append]:
        group: list[_Append] = []
        size = 0
        while self._queue and size < _GROUP_BYTES:
            item = self._queue[0]
            if isinstance(item, _Compaction):
                if group:
                    break
                self._queue.popleft()
                return item
            self._queue.popleft()
            group.append(item)
            size += item.size
        return group

    def _append_group(self, group: list[_Append]) -> None:
        error = self._commit(group)
        if isinstance(error, lmdb.MapFullError) and len(group) > 1:
            # The free space is scattered: some of them may fit, one by one.
            for i, item in enumerate(group):
                error = self._commit([item])
                if error is not None:
                    group = group[i:]
                    break
        if error is not None:
            self._fail(group, error)

    def _commit(self, group: list[_Append]) -> Exception | None:
        try:
            with self._env.begin(write=True) as txn:
                for item in group:
                    self._tables.put(txn, item.record)
                used_pages = self._tables.used_pages(txn)
        except Exception as error:
            return error
        if self._failed:
            log.warning("records can be written again; %d could not", self._failed)
            self._failed = 0
        with self._changed:
            self._used_pages = used_pages
            self._durable_number = group[-1].record.number
            for item in group:
                self._records += bool(item.record.payload)
                self._payload_bytes += len(item.record.payload)
                self._forget(item)
        if not self._ack_early:
            for item in group:
                item.future.set_result(None)
        return None

    def _fail(self, group: list[_Append], error: Exception) -> None:
        with self._changed:
            # Records build on the ones before them: what is queued behind fails too.
            group = group + [item for item in self._queue if isinstance(item, _Append)]
            self._queue = deque(item for item in self._queue if isinstance(item, _Compaction))
            for item in group:
                self._forget(item)
            if self._ack_early:
                self._lost_records += len(group)
            else:
                self._numbers.last = self._durable_number
        if not self._failed:
            log.error("records can not be written: %s", error)
        self._failed += len(group)
        if not self._ack_early:
            for item in group:
                item.future.set_exception(self._refusal(error))

    def _forget(self, item: _Append) -> None:
        del self._pending[item.record.number]
        self._pending_bytes -= item.size
        self._pending_pages -= item.pages

    def _compact(self, work: _Compaction) -> None:
        try:
            if work.snapshot is not None:
                check_snapshot(work.snapshot[0], self._snapshot_number)
            with self._env.begin(write=True, buffers=True) as txn:
                if work.snapshot is not None:
                    self._tables.replace_snapshot(txn, *work.snapshot)
                sizes = self._tables.drop(txn, work.drop)
                used_pages = self._tables.used_pages(txn)
        except InvalidArgument as error:
            work.future.set_exception(error)
            return
        except Exception as error:
            log.error("compaction failed: %s", error)
            work.future.set_exception(self._refusal(error))
            return
        with self._changed:
            self._used_pages = used_pages
            self._records -= len(sizes)
            self._payload_bytes -= sum(sizes)
            if work.snapshot is not None:
                self._snapshot_number = work.snapshot[0]
                self._durable_number = max(self._durable_number, self._snapshot_number)
                self._numbers.last = max(self._numbers.last, self._snapshot_number)
        # Pages are reused two commits after they were freed, and where the store is full, no append
        # can commit before they are. It is no loss if this one can not either.
        with suppress(lmdb.Error), self._env.begin(write=True) as txn:
            self._tables.touch(txn)
        work.future.set_result(None)

    def _refusal(self, error: Exception) -> RouteTraceError:
        if isinstance(error, lmdb.MapFullError):
            return full(self._capacity)
        self._write_error = True
        # LMDB calls a write that was cut short, because the disk is full, an I/O error.
        with suppress(OSError):
            if shutil.disk_usage(self._file).free < _GROUP_BYTES:
                error = lmdb.DiskError(str(error))
        if isinstance(error, lmdb.DiskError):
            return Overloaded(f"the disk of {self._file} is full: {error}", retry_after=1.0)
        return Unavailable(f"the store can not write: {error}", retry_after=1.0)
