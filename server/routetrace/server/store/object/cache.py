"""Payloads in memory, least recently used first out; one request for each that is missing."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from routetrace.server.store.object.files import PayloadFiles
from routetrace.server.wire.checksums import Payload


class PayloadCache:
    """Payloads by record number, whole and checked. Thread-safe.

    Args:
        capacity_bytes: of all of them; one that is larger is not kept.
        files: take those for which memory has no room; None: nothing does.
    """

    def __init__(self, capacity_bytes: int, files: PayloadFiles | None = None) -> None:
        self._capacity = capacity_bytes
        self._files = files
        self._lock = threading.Lock()
        self._held: OrderedDict[int, Payload] = OrderedDict()
        self._bytes = 0
        self._loading: dict[int, threading.Lock] = {}

    def get(self, number: int) -> Payload | None:
        """Return a payload, if it is in memory."""
        with self._lock:
            payload = self._held.get(number)
            if payload is not None:
                self._held.move_to_end(number)
            return payload

    def put(self, number: int, payload: Payload) -> None:
        """Keep a payload; it may wait for the disk."""
        out = []
        with self._lock:
            self._drop(number)
            self._held[number] = payload
            self._bytes += len(payload)
            while self._bytes > self._capacity:
                oldest = next(iter(self._held))
                out.append((oldest, self._held[oldest]))
                self._drop(oldest)
        if self._files:
            for oldest, left in out:
                self._files.put(oldest, left)

    def drop(self, number: int) -> None:
        """Remove a payload; it may wait for the disk."""
        with self._lock:
            self._drop(number)
        if self._files:
            self._files.drop(number)

    def _drop(self, number: int) -> None:
        self._bytes -= len(self._held.pop(number, b""))

    def load(
        self, number: int, read: Callable[[], Payload], fits: Callable[[Payload], bool]
    ) -> Payload:
        """Return a payload, reading it if it is not kept; readers of one share the request.

        Args:
            number: record number.
            read: reads the payload from the object store.
            fits: whether bytes of the local disk are the payload.
        """
        with self._lock:
            loading = self._loading.setdefault(number, threading.Lock())
        try:
            with loading:
                payload = self.get(number)
                if payload is None and self._files:
                    payload = self._files.get(number, fits)
                if payload is None:
                    payload = read()
                self.put(number, payload)
                return payload
        finally:
            with self._lock:
                self._loading.pop(number, None)

    def close(self) -> None:
        """Remove what is on the disk."""
        if self._files:
            self._files.close()
