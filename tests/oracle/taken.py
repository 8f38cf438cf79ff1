"""The oracle's world in which every restart is a take-over by another server, from a bucket alone.

The server before is still alive: what it writes afterwards is refused, and it deletes nothing.
"""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from obstore.store import MemoryStore as MemoryBucket

from oracle.harness import InlineWorld
from routetrace.common.errors import RouteTraceError
from routetrace.common.layout import ModelLayout
from routetrace.server.common.slices import at_once
from routetrace.server.store.interface import Record
from routetrace.server.store.object.bucket import Bucket, open_bucket
from routetrace.server.store.object.files import PayloadFiles
from routetrace.server.store.object.store import ObjectStore

#: Chance of a restart after a step of the cluster.
_RESTART = 0.01

_numbers = itertools.count()


class TakenWorld(InlineWorld):
    """The code of every stop in one thread, over a bucket in memory or `taken_url`."""

    name = "inline"
    url = ""
    """s3:// URL of a real object store; empty: in memory."""
    endpoint = ""

    def __init__(self, layout: ModelLayout, seed: int) -> None:
        logging.getLogger("routetrace.server.store").setLevel(logging.CRITICAL)
        self._bucket = (
            open_bucket(f"{self.url}/{seed}-{next(_numbers)}", self.endpoint)
            if self.url
            else Bucket(MemoryBucket(), "memory")
        )
        self._cache = TemporaryDirectory(prefix="oracle-")
        super().__init__(layout, seed)
        names = ("zombie writes refused", "zombie compactions refused", "log objects")
        self.counts |= dict.fromkeys(names, 0)

    def _start(self) -> None:
        old: Any = self._store
        # Payloads come from the bucket, hardly ever from memory.
        files = PayloadFiles(Path(self._cache.name), self.rng.choice((1 << 12, 1 << 20)))
        self._store: Any = ObjectStore(
            self._bucket,
            cache_bytes=self.rng.choice((0, 1 << 16)),
            files=self.rng.choice((None, files)),
        )
        super()._start()
        if isinstance(old, ObjectStore):
            self._disturb_by(old)

    def _disturb_by(self, old: ObjectStore) -> None:
        number = old.last_number()
        failure = old.append(Record(number + 1, b"zombie", b"zombie")).exception(60)
        assert failure is not None, "a zombie's write was acknowledged"
        self.counts["zombie writes refused"] += 1
        try:
            old.compact((number, iter([b"zombie"])), old.numbers())
        except RouteTraceError:
            self.counts["zombie compactions refused"] += 1
        else:
            raise AssertionError("a zombie's compaction was accepted")
        self.counts["log objects"] += old.puts[0]
        old.close()

    def disturb(self) -> None:
        self._server_clock.advance(0.001)
        if self.rng.random() < _RESTART:
            self.restart(snapshot=self.rng.random() < 0.5)
        elif self.rng.random() < 0.02:
            self.server.run(self.server.core.sweep())

    def restart(self, *, snapshot: bool) -> None:
        if not snapshot and self.rng.random() < 0.3:
            # A snapshot that is older than the last records, which keep their headers.
            number, data = at_once(self.server.core.journal.snapshot())
            self._store.compact((number, data), ())
            self.counts["snapshots"] += 1
        super().restart(snapshot=snapshot)

    def close(self) -> None:
        super().close()
        self._store.close()
        self._cache.cleanup()
