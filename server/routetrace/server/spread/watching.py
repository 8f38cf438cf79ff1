"""Changes of spread runs in other workers, while reads wait for them.

For each run that reads wait for, one call is open at each other worker. It tells that worker which
of its writers are awaited, and returns the traces that have changed since the call before.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Set
from contextlib import contextmanager

from routetrace.common.errors import Unavailable
from routetrace.server.access.partition import Partition
from routetrace.server.index.demand import Place
from routetrace.server.index.journal import Changes
from routetrace.server.index.records.record import key_to_stored
from routetrace.server.index.traces.sources import TraceKey, WriterKey
from routetrace.server.spread.workers import Workers
from routetrace.stored import parts_pb2 as parts

#: Maximum seconds of a call, after which it is made anew with the places that are awaited then;
#: until the next one where a worker does not answer.
_CALL_SECONDS = 1.0
_AGAIN_SECONDS = 0.2

#: Maximum traces whose last change is known.
_MAX_KNOWN = 1 << 16

#: Seconds in which changes are collected for one answer.
_COLLECTED_SECONDS = 0.005


class Touched:
    """Last changes of traces of spread runs, in order, for other workers."""

    def __init__(self, changes: Changes, partition: Partition) -> None:
        self._partition = partition
        self._numbers: OrderedDict[TraceKey, int] = OrderedDict()
        self._life = secrets.randbits(64)
        self._last = 1
        self._forgotten = 1  # number of the last change that is not known any more
        self._news = asyncio.Event()
        if partition.spread:
            changes.listeners.append(self._note)

    def _note(self, keys: Set[Hashable]) -> None:
        spread = [
            key
            for key in keys
            if isinstance(key, tuple) and len(key) == 2 and self._partition.spreads(key[0])
        ]
        for key in spread:
            self._last += 1
            self._numbers[key] = self._last
            self._numbers.move_to_end(key)
            if len(self._numbers) > _MAX_KNOWN:
                _, self._forgotten = self._numbers.popitem(last=False)
        if spread:
            self._news.set()

    async def since(self, request: parts.AwaitRequest) -> parts.AwaitResponse:
        """Return what changed after a number, at once if there is something; wait for it else."""
        until = asyncio.get_running_loop().time() + request.seconds
        known = request.after if request.life == self._life else 0
        while True:
            response = self._since(request.run, known)
            left = until - asyncio.get_running_loop().time()
            if response.trace_ids or response.incomplete or left <= 0:
                return response
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except asyncio.TimeoutError:
                continue
            await asyncio.sleep(_COLLECTED_SECONDS)

    def _since(self, run: str, after: int) -> parts.AwaitResponse:
        incomplete = after < self._forgotten
        response = parts.AwaitResponse(sequence=self._last, incomplete=incomplete, life=self._life)
        if not incomplete:
            for key, number in reversed(self._numbers.items()):
                if number <= after:
                    break
                if key[0] == run:
                    response.trace_ids.append(key[1])
        return response


class Watching:
    """Wakes reads of this worker when other workers change what they wait for."""

    def __init__(self, changes: Changes, workers: Workers) -> None:
        self._changes = changes
        self._workers = workers
        # By run: what reads wait for.
        self._traces: dict[str, Counter[str]] = {}
        self._places: dict[str, Counter[tuple[Place, int]]] = {}
        self._calls: dict[tuple[str, int], asyncio.Task[None]] = {}

    @contextmanager
    def waiting(self, key: TraceKey, places: Iterable[Place], awaited: int) -> Iterator[None]:
        """Watch the other workers for a read that waits for a trace.

        Args:
            key: the trace.
            places: writers that its rows come from, or its run.
            awaited: what it waits for, a pb.Awaited.
        """
        run, trace_id = key
        demands = [(place, awaited) for place in places]
        traces = self._traces.setdefault(run, Counter())
        wanted = self._places.setdefault(run, Counter())
        traces[trace_id] += 1
        wanted.update(demands)
        for worker in self._workers.numbers:
            if (run, worker) not in self._calls:
                task = asyncio.create_task(self._watch(run, worker))
                self._calls[run, worker] = task
        try:
            yield
        finally:
            traces[trace_id] -= 1
            if not traces[trace_id]:
                del traces[trace_id]
            wanted.subtract(demands)
            for demand in demands:
                if not wanted[demand]:
                    del wanted[demand]

    async def _watch(self, run: str, worker: int) -> None:
        """Wake reads of a run as a worker changes, until none waits."""
        try:
            await self._wake(run, worker)
        finally:
            del self._calls[run, worker]

    async def _wake(self, run: str, worker: int) -> None:
        after = life = 0
        while self._traces.get(run):
            request = parts.AwaitRequest(run=run, after=after, life=life, seconds=_CALL_SECONDS)
            for place, awaited in self._places[run]:
                demand = request.demands.add(awaited=awaited)
                if isinstance(place, WriterKey):
                    demand.writer.CopyFrom(key_to_stored(place))
            try:
                answer = await self._workers.call(worker, "Await", request, parts.AwaitResponse)
            except Unavailable:  # the reads find out by themselves
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            traces = self._traces.get(run, Counter())
            # What changed between the look of a read and the first call is not known.
            changed = traces if answer.incomplete else answer.trace_ids
            for trace_id in [i for i in changed if i in traces]:
                self._changes.notify((run, trace_id))
            after, life = answer.sequence, answer.life
        self._traces.pop(run, None)
        self._places.pop(run, None)
