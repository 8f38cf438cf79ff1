"""Traces of spread runs, gathered from all workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from routetrace.common.errors import Moved, Unavailable
from routetrace.server.access.partition import Partition
from routetrace.server.index.journal import Journal
from routetrace.server.index.traces.tombstones import Fate
from routetrace.server.index.traces.trace import Trace
from routetrace.server.rows.frames import Read, Wanted
from routetrace.server.rows.remote import RemoteChunks
from routetrace.server.spread.parts import Found, Places, located, mark, merged, unpack
from routetrace.server.spread.workers import Workers
from routetrace.stored import parts_pb2 as parts

T = TypeVar("T")

#: Maximum traces of one request to a worker.
MAX_COLLECTED = 64

#: Times that a trace in several workers is collected while requests of it are deleted or begin.
_ATTEMPTS = 8


class Gathered(NamedTuple):
    """A trace of all workers."""

    trace: Trace | None
    """The trace; None: no worker has it."""
    fate: Fate | None = None
    """Last deletion of a trace that is gone, if known."""
    has_run: bool = True
    """Whether any worker has traces or writers of the run."""


class _Together(Generic[T]):
    """Asks for traces of a run together that are asked for in one turn of the event loop."""

    def __init__(self, ask: Callable[[str, list[str]], Awaitable[Sequence[T]]]) -> None:
        self._ask = ask
        self._asked: dict[str, dict[str, asyncio.Future[T]]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    async def one(self, run: str, trace_id: str) -> T:
        """Return the answer for one trace."""
        asked = self._asked.setdefault(run, {})
        if not asked:
            asyncio.get_running_loop().call_soon(self._begin, run)
        if trace_id not in asked:
            asked[trace_id] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(asked[trace_id])

    def _begin(self, run: str) -> None:
        asked = [*self._asked.pop(run).items()]
        for at in range(0, len(asked), MAX_COLLECTED):
            task = asyncio.create_task(self._answer(run, dict(asked[at : at + MAX_COLLECTED])))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _answer(self, run: str, asked: dict[str, asyncio.Future[T]]) -> None:
        try:
            answers = await self._ask(run, [*asked])
        except Exception as error:
            for future in asked.values():
                future.set_exception(error)
                future.exception()  # its waiter may be gone
        else:
            for future, answer in zip(asked.values(), answers, strict=True):
                future.set_result(answer)


class Gathering:
    """Traces of spread runs as all workers have them. All calls belong to the event loop."""

    def __init__(
        self, journal: Journal, partition: Partition, workers: Workers, chunks: RemoteChunks
    ) -> None:
        self._state = journal.state
        self._partition = partition
        self._workers = workers
        self.call = workers.call
        self.others = workers.numbers
        """Numbers of the other workers."""
        self.own = partition.number
        """Number of this worker."""
        self._chunks = chunks
        self._locating = _Together(self._locate)
        self._collecting = _Together(self.collect)

    async def trace(self, run: str, trace_id: str, *, sends_on: bool = False) -> Gathered | None:
        """Return a trace of a spread run as all workers have it; None for other runs.

        Every row is in it that any worker acknowledged before the call.

        Args:
            run: namespace.
            trace_id: the trace.
            sends_on: whether the caller can ask another worker that has all of it.

        Raises:
            Moved: if another worker alone has it.
            Unavailable: if a worker does not answer: no answer lacks the part of a worker.
        """
        if not self._partition.spreads(run):
            return None
        for _ in range(_ATTEMPTS):
            places = await self._locating.one(run, trace_id)
            # A trace that is deleted in several workers loses its newest requests first. To see
            # an older one deleted and a newer one there would let rows of the newer one stand for
            # those that the older one sampled.
            if len(places.workers) + len(places.fates) > 1:
                gathered = await self._several(run, trace_id)
            elif not places.workers:
                return Gathered(None, next(iter(places.fates), None), places.has_run)
            elif places.workers != [self.own]:
                if sends_on:
                    raise self._moved(trace_id, places.workers[0])
                gathered = await self._several(run, trace_id)
            else:
                own = self._state.traces.traces.get((run, trace_id))
                gathered = Gathered(own) if own is not None and own.sources else None
            if gathered is not None:
                return gathered
        raise Unavailable(
            f"trace {trace_id!r} changes in several workers while it is gathered", retry_after=0.1
        )

    async def locate(self, run: str, trace_ids: Sequence[str]) -> dict[str, Places]:
        """Return the workers that have traces of a spread run; nothing for other runs.

        Raises:
            Unavailable: if a worker does not answer.
        """
        if not trace_ids or not self._partition.spreads(run):
            return {}
        return dict(zip(trace_ids, await self._locate(run, trace_ids), strict=True))

    def _moved(self, trace_id: str, worker: int) -> Moved:
        return self._partition.moved(trace_id, worker, self._workers.address(worker))

    def only_here(self, trace_id: str, places: Places) -> bool:
        """Whether this worker alone knows of a trace.

        Raises:
            Moved: if another one alone has it.
        """
        alone = len(places.workers) + len(places.fates) == 1
        if alone and places.workers not in ([], [self.own]):
            raise self._moved(trace_id, places.workers[0])
        return alone and bool(places.workers)

    async def _several(self, run: str, trace_id: str) -> Gathered | None:
        """Return a trace from its parts; None if requests began or were deleted meanwhile."""
        before = await self._collecting.one(run, trace_id)
        found = await self._collecting.one(run, trace_id)
        own = self._state.traces.traces.get((run, trace_id))
        if found.parts.get(self.own) is not own or before.marks != found.marks:
            return None
        if own is not None and mark(own) != found.marks[self.own]:
            return None
        if not found.parts:
            return Gathered(None, max(found.fates, key=lambda fate: fate.time, default=None))
        return Gathered(merged((run, trace_id), found.parts.items()))

    def has(self, run: str, trace_id: str) -> bool:
        """Whether this worker has a part of a trace."""
        return self._state.traces.traces.get((run, trace_id)) is not None

    async def ask(self, method: str, request: Any, response: Any) -> dict[int, Any]:
        """Return the responses of all other workers, by their numbers.

        Raises:
            Unavailable: if one does not answer.
        """
        numbers = self._workers.numbers
        calls = (self._workers.call(n, method, request, response) for n in numbers)
        return dict(zip(numbers, await asyncio.gather(*calls), strict=True))

    async def bring(self, wanted: Sequence[Wanted]) -> list[Read | None]:
        """Read frames of other workers; None for a chunk of which they cannot be read.

        Raises:
            Unavailable: if one of the workers does not answer.
        """
        requests: dict[int, parts.FramesRequest] = {}
        places: dict[int, list[int]] = {}
        for at, (chunk, indexes, layers) in enumerate(wanted):
            request = requests.setdefault(chunk.worker, parts.FramesRequest(run=chunk.frames.run))
            request.chunks.add(chunk=chunk.number, frames=indexes, layer_ids=layers)
            places.setdefault(chunk.worker, []).append(at)
        responses = await asyncio.gather(
            *(
                self._workers.call(worker, "Frames", request, parts.FramesResponse)
                for worker, request in requests.items()
            )
        )
        brought: list[Read | None] = [None] * len(wanted)
        for worker, response in zip(requests, responses, strict=True):
            for at, cut in zip(places[worker], response.chunks, strict=True):
                if cut.lengths:
                    brought[at] = [cut.payload], [*cut.lengths]
        return brought

    async def _locate(self, run: str, trace_ids: Sequence[str]) -> list[Places]:
        """Return the workers that have each trace."""
        request = parts.LocateRequest(run=run, trace_ids=trace_ids)
        answers = await self.ask("Locate", request, parts.LocateResponse)
        answers[self.own] = located(self._state, request)
        has_run = any(answer.has_run for answer in answers.values())
        found = {trace_id: Places(has_run=has_run) for trace_id in trace_ids}
        for worker, answer in sorted(answers.items()):
            for trace_id in {trace_ids[index] for index in answer.here}:
                found[trace_id].workers.append(worker)
            for gone in answer.deleted:
                found[gone.trace_id].fates.append(Fate(gone.reason, gone.time, gone.token))
        return [found[trace_id] for trace_id in trace_ids]

    async def collect(self, run: str, trace_ids: list[str]) -> list[Found]:
        """Return the parts of traces that all workers have.

        Raises:
            Unavailable: if a worker does not answer.
        """
        request = parts.CollectRequest(run=run, trace_ids=trace_ids)
        found = [Found() for _ in trace_ids]
        responses = await self.ask("Collect", request, parts.CollectResponse)
        for number, response in responses.items():
            await unpack(number, request, response, self._chunks, found)
        for trace_id, each in zip(trace_ids, found, strict=True):
            own = self._state.traces.traces.get((run, trace_id))
            if own is not None and own.sources:
                each.add(self.own, own)
            elif fate := self._state.tombstones.fate((run, trace_id)):
                each.fates.append(fate)
        return found
