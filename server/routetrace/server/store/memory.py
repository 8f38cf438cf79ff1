"""Record store in memory; its content ends with the process."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future

from routetrace.server.store.base import StoreBase
from routetrace.server.store.interface import (
    Record,
    StoreStats,
    check_snapshot,
    cut,
    full,
    gone,
    limit,
)
from routetrace.server.wire.checksums import Payload


class MemoryStore(StoreBase):
    """Store in memory, lost when the process ends."""

    def __init__(self, capacity_bytes: int = 1 << 62) -> None:
        super().__init__()
        self._capacity = capacity_bytes
        self._headers: dict[int, bytes] = {}  # in ascending order
        self._payloads: dict[int, Payload] = {}
        self._payload_bytes = 0
        self._header_bytes = 0
        self._snapshot: tuple[int, list[bytes]] | None = None

    def append(self, record: Record) -> Future[None]:
        """See `Store.append`."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        size = len(record.header) + len(record.payload)
        with self._changed:
            self._check_open()
            self._numbers.check(record.number)
            if self._used_bytes() + size > limit(self._capacity, record):
                future.set_exception(full(self._capacity))
                return future
            self._numbers.last = record.number
            self._headers[record.number] = record.header
            if record.payload:
                self._payloads[record.number] = record.payload
            self._header_bytes += len(record.header)
            self._payload_bytes += len(record.payload)
        future.set_result(None)
        return future

    def read(
        self,
        number: int,
        ranges: Sequence[tuple[int, int]],
        *,
        wait: bool = True,  # noqa: ARG002
    ) -> list[Payload]:
        """See `Store.read`."""
        with self._changed:
            self._check_open()
            payload = self._payloads.get(number)
        if payload is None:
            raise gone(number)
        return cut(payload, ranges, number)

    def headers(self, after: int = 0) -> Iterator[tuple[int, bytes | None]]:
        """See `Store.headers`."""
        with self._changed:
            self._check_open()
            items: list[tuple[int, bytes | None]] = list(self._headers.items())
        return iter(items[bisect.bisect_right(items, after, key=lambda item: item[0]) :])

    def _stored(self) -> Iterable[int]:
        return self._payloads

    def load_snapshot(self) -> tuple[int, Iterator[bytes]] | None:
        """See `Store.load_snapshot`."""
        with self._changed:
            self._check_open()
            return (self._snapshot[0], iter(self._snapshot[1])) if self._snapshot else None

    def compact(self, snapshot: tuple[int, Iterable[bytes]] | None, drop: Iterable[int]) -> None:
        """See `Store.compact`."""
        pieces = list(snapshot[1]) if snapshot else []
        with self._changed:
            self._check_open()
            if snapshot is not None:
                number = snapshot[0]
                check_snapshot(number, self._snapshot[0] if self._snapshot else 0)
                self._snapshot = number, pieces
                self._numbers.last = max(self._numbers.last, number)
                for covered in [n for n in self._headers if n <= number]:
                    self._header_bytes -= len(self._headers.pop(covered))
            for dropped in drop:
                self._payload_bytes -= len(self._payloads.pop(dropped, b""))

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        with self._changed:
            self._check_open()
            return StoreStats(
                len(self._payloads), self._payload_bytes, self._used_bytes(), self._capacity
            )

    def close(self) -> None:
        """See `Store.close`."""
        with self._changed:
            self._closing = True

    def _used_bytes(self) -> int:
        snapshot = sum(map(len, self._snapshot[1])) if self._snapshot else 0
        return self._header_bytes + self._payload_bytes + snapshot
