"""What is forgotten, and when: leases that ran out, and the oldest traces where room is short.

Space is given back by marking: a chunk goes when no trace, no live slot and no open read points
into it. It is looked for anew each time, so that there is no count that could be wrong.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

import psutil

from routetrace.server.agents import Agents
from routetrace.server.config import ServerConfig
from routetrace.server.journal import Journal
from routetrace.server.metrics import Metrics
from routetrace.server.reader import Reader
from routetrace.server.record import encode_control
from routetrace.server.trace_index import Trace
from routetrace.v1.errors import Overloaded

#: Shares of a limit: above the first one finished traces go, until the second one is reached.
_HIGH, _LOW = 0.9, 0.75

#: Share of the traces that goes in one round where memory is short: what that brings is not known.
_MEMORY_SHARE = 0.1

#: Seconds after which a refused chunk may come again; and for which the process' size is believed.
_RETRY_SECONDS = 1.0

#: Pause between two sweeps where room is short, in times of the first one.
_PAUSE_SHARE = 10

#: Records after which a new snapshot spares the next start their replay.
_SNAPSHOT_RECORDS = 20_000

#: Traces after which those that are there are taken out of the garbage collector's sight.
_FREEZE_TRACES = 10_000

#: Seconds that a sweep works before it lets others work.
_TURN_SECONDS = 0.002

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class Retention:
    """Expiry, eviction and compaction. All of it belongs to the event loop's thread."""

    def __init__(
        self,
        journal: Journal,
        reader: Reader,
        agents: Agents,
        config: ServerConfig,
        metrics: Metrics,
    ) -> None:
        self._journal = journal
        self._state = journal.state
        self._store = journal.store
        self._reader = reader
        self._agents = agents
        self._config = config
        self._metrics = metrics
        self._process = psutil.Process()
        self._memory = (0.0, 0)  # when, and bytes
        self._short = asyncio.Event()
        self._snapshot_number = 0
        self._took = 0.0  # seconds of the last sweep
        self._frozen = 0  # serial number of the newest trace that the garbage collector passes over

    def covered(self, number: int) -> None:
        """The newest snapshot covers the records up to this number."""
        self._snapshot_number = number

    # ------------------------------------------------------------------ room

    def memory_bytes(self) -> int:
        """Memory of the process, as it was a moment ago."""
        now = self._journal.clock.now()
        if now - self._memory[0] >= _RETRY_SECONDS:
            self._memory = now, int(self._process.memory_info().rss)
        return self._memory[1]

    def check_room(self, run: str) -> None:
        """Looks whether a chunk of a run may be stored. The store's capacity is its own to check.

        Raises:
            Overloaded: if the run is at its quota, or the process at its memory limit.
        """
        held = self._state.run_bytes[run]
        self._check("run_quota", held, self._config.quota_of(run), f"stored bytes of run {run!r}")
        self.check_memory()

    def check_memory(self) -> None:
        """Raises Overloaded if the process is at its memory limit."""
        limit = self._config.memory_limit
        if limit:
            self._check("memory_limit", self.memory_bytes(), limit, "bytes of the server's process")

    def _check(self, field: str, value: int, most: int, what: str) -> None:
        if most and value > _HIGH * most:
            self._short.set()
        if most and value >= most:
            self._metrics.overloaded.labels(field).inc()
            raise Overloaded(
                field=field,
                value=value,
                expected=f"less than {most} {what}",
                retry_after=_RETRY_SECONDS,
            )

    def no_room(self) -> None:
        """The store is full."""
        self._metrics.overloaded.labels("store_capacity").inc()
        self._short.set()

    async def due(self) -> None:
        """Returns when it is time to sweep: regularly, and soon where room is short."""
        try:
            await asyncio.wait_for(self._short.wait(), self._config.sweep_interval_seconds)
            # Not all the time: what is short may stay so.
            pause = max(_RETRY_SECONDS, _PAUSE_SHARE * self._took)
            await asyncio.sleep(min(pause, self._config.sweep_interval_seconds))
        except asyncio.TimeoutError:
            pass

    # ------------------------------------------------------------------ rounds

    async def sweep(self) -> None:
        """Forgets what has expired, or must go, and gives its space back."""
        self._short.clear()
        begun = time.monotonic()
        self.freeze(_FREEZE_TRACES)
        with self._metrics.sweep.time():
            async for _ in _in_turns(self._expiring()):
                pass
            self._metrics.agents_lost.inc(self._agents.count_lost())
            self._forget_writers()
            await self._compact()
            if self._config.over_quota == "evict":
                await self._evict()
        self._took = time.monotonic() - begun

    def freeze(self, least: int = 1) -> None:
        """Takes what is there out of the garbage collector's sight, if it is that many new traces.

        It looks at all objects that there are, again and again: most of a second with 100,000
        traces. What is indexed holds no cycles, so that it goes without it.
        """
        newest = self._state.traces.serial
        if newest - self._frozen >= least:
            self._frozen = newest
            gc.freeze()

    def expire(self) -> None:
        """Forgets traces whose lease has run out."""
        for _ in self._expiring():
            pass

    def _expiring(self) -> Iterator[None]:
        """The same, one trace after the other: they may change in between."""
        now = self._journal.clock.now()
        traces = self._state.traces.traces
        for trace in [*traces.values()]:
            if trace.expires <= now and traces.get(trace.key) is trace:
                self._state.forget(trace.key)
                self._journal.changes.notify(trace.key)
                self._count("expired", 1)
            yield

    def _forget_writers(self) -> None:
        # An engine that nobody heard of for the life of a trace has no cache left to hit.
        for writer in [*self._state.writers]:
            if self._agents.idle_seconds(writer) > self._config.default_ttl_seconds:
                del self._state.writers[writer]
                self._agents.forget(writer)

    async def _compact(self, *, at_once: bool = False) -> None:
        newest = self._state.number
        live: set[int] = set()
        async for chunks in _in_turns(self._state.marks()):
            live.update(chunks)
        # What came in meanwhile may be pointed into by what was looked at before.
        live |= self._reader.pinned_chunks()
        garbage = [n for n in self._state.frames if n <= newest and n not in live]
        # A snapshot is as large as the indexes: worth it for a twentieth of what is stored.
        behind = self._state.number - self._snapshot_number
        few = not garbage or (len(garbage) * 20 < len(self._state.frames) and not at_once)
        if few and behind < _SNAPSHOT_RECORDS:
            return
        async for _ in _in_turns(self._state.pack()):
            pass
        # Nobody finds a way to garbage: what had none at the look at it has none now, either.
        dropped = {number: self._state.release(number) for number in garbage}
        snapshot = self._journal.snapshot()
        try:
            await asyncio.to_thread(self._store.compact, snapshot, garbage)
        except BaseException:
            # Still stored: forgotten here, their space would not come back before a restart.
            for number, frames in dropped.items():
                self._state.hold(number, frames)
            raise
        self.covered(snapshot[0])
        self._metrics.dropped_chunks.inc(len(garbage))
        if garbage:
            _log.info("dropped %d chunks", len(garbage))

    # ------------------------------------------------------------------ eviction

    async def _evict(self) -> None:
        """Forgets finished traces, the oldest first, where a limit is near."""
        for run in [*self._state.run_bytes]:
            quota = self._config.quota_of(run)
            held = self._state.run_bytes[run]
            if quota and held > _HIGH * quota:
                await self._make_room(run, held - int(_LOW * quota), "quota")
        stats = await asyncio.to_thread(self._store.stats)
        if stats.used_bytes > _HIGH * stats.capacity_bytes:
            # Payloads come with headers, and in whole blocks.
            share = stats.payload_bytes / stats.used_bytes
            need = int(share * (stats.used_bytes - _LOW * stats.capacity_bytes))
            await self._make_room(None, need, "capacity")
        limit = self._config.memory_limit
        if limit and self.memory_bytes() > _HIGH * limit:
            most = int(_MEMORY_SHARE * len(self._state.traces.traces)) + 1
            await self._forget_oldest(None, self._take(self._finished(None), most), "memory")

    async def _make_room(self, run: str | None, need: int, reason: str) -> None:
        """Forgets finished traces until the chunks that only they point into hold `need` bytes."""
        pointing: Counter[int] = Counter()
        traces = self._state.traces.traces.values()
        for trace in traces:
            if run in (None, trace.key[0]):
                pointing.update(set(trace.chunks()))
        # What slots or readers hold does not come back by forgetting traces.
        for writer in self._state.writers.values():
            pointing.update(writer.slots.chunks().tolist())
        pointing.update(self._reader.pinned_chunks())

        def going() -> Iterator[Trace]:
            left = need
            for trace in self._finished(run):
                if left <= 0:
                    return
                for chunk in set(trace.chunks()):
                    pointing[chunk] -= 1
                    if not pointing[chunk] and chunk in self._state.frames:
                        left -= self._state.frames[chunk].nbytes
                yield trace

        await self._forget_oldest(run, list(going()), reason)

    def _finished(self, run: str | None) -> Iterator[Trace]:
        """Traces that have ended, those first that have not changed for longest."""
        traces = [t for t in self._state.traces.traces.values() if run in (None, t.key[0])]
        for trace in sorted(traces, key=lambda t: t.updated):
            if self._reader.ended(trace):
                yield trace

    @staticmethod
    def _take(traces: Iterator[Trace], most: int) -> list[Trace]:
        return [trace for trace, _ in zip(traces, range(most), strict=False)]

    async def _forget_oldest(self, run: str | None, traces: list[Trace], reason: str) -> None:
        by_run: dict[str, list[str]] = {}
        for trace in traces:
            by_run.setdefault(trace.key[0], []).append(trace.key[1])
        for name, trace_ids in by_run.items():
            await self.forget(name, trace_ids, reason)
        if traces:
            _log.warning(
                "forgot %d finished traces of %s: %s is short",
                len(traces), "all runs" if run is None else f"run {run!r}", reason,
            )  # fmt: skip
            await self._compact(at_once=True)

    async def forget(self, run: str, trace_ids: list[str], reason: str) -> int:
        """Forgets traces for good; returns how many there were."""
        now = self._journal.clock.now()
        record = encode_control("delete", now, run=run, trace_ids=trace_ids)
        count: int = await self._journal.append(record)
        self._count(reason, count)
        return count

    def _count(self, reason: str, count: int) -> None:
        self._metrics.forgotten.labels(reason).inc(count)


async def _in_turns(items: Iterator[_T]) -> AsyncIterator[_T]:
    """Items of what takes long, with pauses in which the event loop does what waits for it."""
    begun = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - begun > _TURN_SECONDS:
            await asyncio.sleep(0)
            begun = time.monotonic()
