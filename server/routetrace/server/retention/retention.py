"""Retention: expiry of leases, eviction near a limit, and compaction.

Space is reclaimed by marking: a chunk is dropped once no trace, no live slot and no open read
points into it. Each round marks from scratch, so that no reference count can be wrong.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from routetrace.common.errors import counted
from routetrace.server.access.budget import over_shares
from routetrace.server.common.metrics import Metrics
from routetrace.server.common.slices import in_slices, result_in_slices
from routetrace.server.index.agents import Agents
from routetrace.server.index.journal import Journal
from routetrace.server.index.owners import owner_of
from routetrace.server.index.records.record import encode_delete
from routetrace.server.index.state import Frames
from routetrace.server.index.traces.memory import memory_of
from routetrace.server.index.traces.sources import TraceKey
from routetrace.server.index.traces.trace import Trace
from routetrace.server.index.writer import Writer
from routetrace.server.retention.everywhere import Everywhere
from routetrace.server.retention.memory import Memory
from routetrace.server.retention.room import HIGH, LOW, RETRY_SECONDS, Room
from routetrace.server.rows.preparing import prepare_end
from routetrace.server.rows.reader import Reader
from routetrace.server.settings.config import ServerConfig
from routetrace.server.spread.gathering import Gathering

#: Seconds without a message after which a writer is forgotten that has nothing to lose, and one
#: without known slots and running requests, whose agent may come back with the same epoch.
_IDLE_SECONDS = 60.0
_IDLE_WITHOUT_SLOTS_SECONDS = 3600.0

#: Pause between two sweeps near a limit, as a multiple of the duration of the first.
_PAUSE_SHARE = 10

#: Records after which a new snapshot shortens the replay of the next start.
_SNAPSHOT_RECORDS = 20_000

#: Maximum traces that one record deletes: applying it holds the event loop.
_MAX_DELETED = 256

#: Traces that are looked at in a step.
_LOOKED_AT = 64

#: Limit near which a trace was evicted, by the reason of its tombstone.
_NEAR = {
    "quota": "its run_quota, or its owner's token_quota, is nearly used up",
    "capacity": "the store is near store_capacity",
    "memory": "traces take nearly half of memory_limit",
}

_log = logging.getLogger(__name__)


class _Freed(NamedTuple):
    """Bytes that are freed with a trace, and with a chunk."""

    by_trace: Callable[[Trace], int]
    by_chunk: Callable[[Frames], int]


_STORED = _Freed(lambda _: 0, lambda chunk: chunk.nbytes)


class Retention:
    """Expiry, eviction and compaction. All calls belong to the event loop's thread."""

    def __init__(
        self,
        journal: Journal,
        reader: Reader,
        agents: Agents,
        config: ServerConfig,
        metrics: Metrics,
        gathering: Gathering,
    ) -> None:
        self.everywhere = Everywhere(gathering, journal, self.forget)
        """Deletion of traces of spread runs."""
        self._journal = journal
        self._state = journal.state
        self._store = journal.store
        self._reader = reader
        self._agents = agents
        self._config = config
        self._metrics = metrics
        self.memory = Memory(self._state, config, journal.clock.now)
        """Memory of the process and of the index."""
        self._short = asyncio.Event()
        self._snapshot_number = 0
        self.room = Room(config, self._state, metrics, self.memory.process_bytes, self._short.set)
        """Limits of what is kept."""
        self._took = 0.0  # duration of the last sweep in seconds
        #: What decides which chunks are garbage, as it was when there was too little of it.
        self._useless: tuple[int, int, int, set[int]] = (-1, 0, 0, set())

    def covered(self, number: int) -> None:
        """Note that the newest snapshot covers the records up to this number."""
        self._snapshot_number = number

    # ------------------------------------------------------------------ room

    def no_room(self) -> None:
        """Note that the store is full."""
        self._metrics.overloaded.labels("store_capacity").inc()
        self._short.set()

    async def due(self) -> None:
        """Wait until the next sweep is due: after the interval, or soon near a limit."""
        try:
            await asyncio.wait_for(self._short.wait(), self._config.sweep_interval_seconds)
            # A limit may stay near for long: do not sweep all the time.
            pause = max(RETRY_SECONDS, _PAUSE_SHARE * self._took)
            await asyncio.sleep(min(pause, self._config.sweep_interval_seconds))
        except asyncio.TimeoutError:
            pass

    # ------------------------------------------------------------------ rounds

    async def sweep(self) -> None:
        """Delete expired traces, evict near a limit, and reclaim space."""
        self._journal.check()
        self._short.clear()
        begun = time.monotonic()
        with self._metrics.sweep.time():
            now = self._journal.clock.now()
            # Records appended before `now` may still renew traces; later ones find them expired.
            await self._journal.settled()
            async for _ in in_slices(self._expiring(now)):
                pass
            await self.everywhere.expire(now)
            self._metrics.agents_lost.inc(self._agents.count_lost())
            self._forget_writers()
            async for _ in in_slices(self._state.traces.clean()):
                pass
            await self._compact()
            indexed = await self.memory.look()
            if self._config.when_full == "evict":
                await self._evict(indexed)
        self._took = time.monotonic() - begun

    def expire(self) -> None:
        """Delete traces whose lease has run out."""
        for _ in self._expiring(self._journal.clock.now()):
            pass

    def _expiring(self, now: float) -> Iterator[None]:
        """Delete expired traces one by one; traces may change between two steps."""
        for index, trace in enumerate(self._state.traces.oldest_first(), 1):
            expired = trace.expires <= now
            if expired and self._state.trace(trace.key, now) is None:
                self._journal.notify_touched()  # no record may be applied for long
            if expired or not index % _LOOKED_AT:
                yield
        # Also those that a record deleted as expired.
        self._count("expired", self._state.expired)
        self._state.expired = 0

    def _forget_writers(self) -> None:
        for key, writer in [*self._state.writers.items()]:
            if self._agents.idle_seconds(key) > self._kept_seconds(writer):
                del self._state.writers[key]
                self._agents.forget(key)

    def _kept_seconds(self, writer: Writer) -> float:
        """Return the seconds for which a silent writer is kept."""
        least = max(_IDLE_SECONDS, 2 * self._config.agent_timeout_seconds)
        # Rows in the cache of an engine that is silent for a whole lease have expired.
        most = self._config.default_ttl_seconds
        idle = self._agents.idle_seconds(writer.key)
        if writer.live or idle <= least or not (writer.sequence == 0 or writer.slots.empty):
            return most
        return min(most, least if writer.sequence == 0 else _IDLE_WITHOUT_SLOTS_SECONDS)

    async def _compact(self, *, at_once: bool = False) -> None:
        # The rest of a record may point into its chunk.
        await self._journal.whole()
        state, newest = self._state, self._state.number
        # A snapshot is as large as the indexes: worth it for a twentieth of the stored chunks.
        behind = newest - self._snapshot_number
        seen = newest, state.traces.changes, len(state.writers)
        pinned = self._reader.frames.pinned_chunks()
        same = (*seen, pinned) == self._useless
        if same and behind < _SNAPSHOT_RECORDS and not at_once:
            return
        live: set[int] = set()
        async for chunks in in_slices(self._state.marks()):
            live.update(chunks)
        # Chunks stored meanwhile may be pointed into by parts that were marked before.
        live |= (pinned := self._reader.frames.pinned_chunks())
        garbage = [
            number
            async for number in in_slices([*self._state.frames])
            if number <= newest and number not in live
        ]
        few = not garbage or (len(garbage) * 20 < len(self._state.frames) and not at_once)
        if few and behind < _SNAPSHOT_RECORDS:
            self._useless = *seen, pinned
            return
        for _ in range(2):  # again: those that changed meanwhile, so that no record waits for them
            async for _ in in_slices(self._state.pack()):
                pass
        dropped: dict[int, Frames] = {}
        try:
            async with self._journal.still():
                # Nothing can start to point into garbage, so it is still garbage.
                async for number in in_slices(garbage):
                    dropped[number] = self._state.release(number)
                snapshot = await result_in_slices(self._journal.snapshot())
            await asyncio.to_thread(self._store.compact, snapshot, garbage)
        except BaseException:
            # Still stored: without an entry, their space is not reclaimed before a restart.
            for number, frames in dropped.items():
                self._state.hold(number, frames)
            raise
        self.covered(snapshot[0])
        self._metrics.dropped_chunks.inc(len(garbage))
        if garbage:
            _log.info("dropped %s", counted(len(garbage), "chunk"))

    # ------------------------------------------------------------------ eviction

    async def _evict(self, indexed: Counter[str]) -> None:
        """Evict finished traces, oldest first, where a limit is near.

        Args:
            indexed: bytes of the index by owner, where it may be near its limit.
        """
        for run in [*self._state.run_bytes]:
            quota = self._config.quota_of(run)
            held = self._state.run_bytes[run]
            if quota and held > HIGH * quota:
                among = partial(_of_run, run)
                await self._make_room(among, held - int(LOW * quota), "quota")
        quota = self._config.token_quota
        for owner, held in [*self._state.owner_bytes.items()]:
            if quota and held > HIGH * quota and owner.startswith("token "):
                await self._make_room(partial(_of_owner, owner), held - int(LOW * quota), "quota")
        stats = await asyncio.to_thread(self._store.stats)
        if stats.used_bytes > HIGH * stats.capacity_bytes:
            # Payloads take headers and whole blocks.
            share = stats.payload_bytes / stats.used_bytes
            need = int(share * (stats.used_bytes - LOW * stats.capacity_bytes))
            # The largest owners give first, down to one level; owners below it lose nothing.
            for owner, part in over_shares(self._state.owner_bytes, need).items():
                await self._make_room(partial(_of_owner, owner), part, "capacity")
        limit, total = self.memory.index_limit, indexed.total()
        if total > HIGH * limit:
            freed = _Freed(memory_of, self.memory.of_chunk)
            for owner, part in over_shares(indexed, total - int(LOW * limit)).items():
                await self._make_room(partial(_of_owner, owner), part, "memory", freed)

    async def _make_room(
        self,
        among: Callable[[Trace], bool],
        need: int,
        reason: str,
        freed: _Freed = _STORED,
    ) -> None:
        """Evict finished traces until they free `need` bytes, with chunks of no other trace."""
        pointing: Counter[int] = Counter()
        async for trace in in_slices(self._state.traces.oldest_first()):
            pointing.update(set(trace.chunks()))
        # Chunks that slots or reads point into are not reclaimed by evicting traces.
        for writer in self._state.writers.values():
            pointing.update(writer.slots.chunks().tolist())
        pointing.update(self._reader.frames.pinned_chunks())

        async def evicted() -> AsyncIterator[Trace]:
            left = need
            async for trace in self._finished(among):
                if left <= 0:
                    return
                left -= freed.by_trace(trace)
                for chunk in set(trace.chunks()):
                    pointing[chunk] -= 1
                    if not pointing[chunk] and chunk in self._state.frames:
                        left -= freed.by_chunk(self._state.frames[chunk])
                yield trace

        await self._forget_oldest(evicted(), reason)

    async def _finished(self, among: Callable[[Trace], bool]) -> AsyncIterator[Trace]:
        """Yield finished traces, least recently changed first."""
        keys: list[TraceKey] = []
        updated = array("d")
        async for trace in in_slices(self._state.traces.oldest_first()):
            if among(trace):
                keys.append(trace.key)
                updated.append(trace.updated)
        order = await asyncio.to_thread(np.argsort, updated, kind="stable")
        async for at in in_slices(order):
            found = self._state.traces.traces.get(keys[at])
            if found and found.has_many_sources:
                await result_in_slices(prepare_end(self._reader, found))
                found = self._state.traces.traces.get(keys[at])
            # One that changed meanwhile has another place.
            if found and found.updated == updated[at] and self._reader.ended(found):
                yield found

    async def _forget_oldest(self, traces: AsyncIterator[Trace], reason: str) -> None:
        judged = self._journal.applied  # before the first trace is looked at
        by_run: dict[str, dict[str, tuple[int, float]]] = {}
        async for trace in traces:  # not kept: to free many at once takes long
            run, trace_id = trace.key
            by_run.setdefault(run, {})[trace_id] = trace.serial, trace.updated
        count = 0
        for run, chosen in by_run.items():
            forget = self.everywhere.evict if self._state.keeps(run) else self.forget
            count += await forget(run, [*chosen], reason, judged=judged)
            now = self._journal.clock.now()
            async for trace_id, (serial, updated) in in_slices(chosen.items()):
                left = self._state.traces.traces.get((run, trace_id))
                if left is None or left.serial != serial:
                    self._metrics.evicted_age.observe(now - updated)
        if count:
            await self._compact(at_once=True)

    async def forget(
        self,
        run: str,
        trace_ids: Sequence[str],
        reason: str,
        token: str = "",
        *,
        judged: int = 0,
        begun: tuple[float, float] = (0.0, 0.0),
    ) -> int:
        """Delete traces; return the number that were deleted.

        A chunk that is being committed may begin the next request of a trace that has ended. So
        who chooses traces by what they are passes `judged`.

        Args:
            run: namespace.
            trace_ids: the traces.
            reason: key of a tombstone's `Fate`.
            token: name of the caller's token, if any.
            judged: `Journal.applied` before the traces were looked at: those that a later record
                changed stay; 0: all are deleted.
            begun: of the traces, only requests that began in this closed interval; zeros: all.
        """
        count = 0
        try:
            for at in range(0, len(trace_ids), _MAX_DELETED):
                part = trace_ids[at : at + _MAX_DELETED]
                now = self._journal.clock.now()
                record = encode_delete(now, run, part, reason, token, judged=judged, begun=begun)
                existed: int = await self._journal.append(record)
                self._count(reason, existed)
                count += existed
        finally:  # also if the store refuses the rest
            if count:
                if why := _NEAR.get(reason):
                    traces = counted(count, "finished trace")
                    text = "evicted %s of run %r, the least recently changed: %s"
                    _log.warning(text, traces, run, why)
                else:
                    by = f" by token {token}" if token else ""
                    _log.info("%s: %s of run %r%s", reason, counted(count, "trace"), run, by)
        return count

    def _count(self, reason: str, count: int) -> None:
        self._metrics.forgotten.labels(reason).inc(count)


def _of_run(run: str, trace: Trace) -> bool:
    return trace.key[0] == run


def _of_owner(owner: str, trace: Trace) -> bool:
    return owner_of(trace.token, trace.key[0]) == owner
