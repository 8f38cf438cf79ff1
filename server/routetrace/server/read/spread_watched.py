"""Traces of a spread run while they are watched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import islice

from routetrace.common.errors import Unavailable
from routetrace.server.read.parts import PartsServicer
from routetrace.server.rows.summaries import Summaries, Told
from routetrace.server.spread.gathering import MAX_COLLECTED, Gathering
from routetrace.server.spread.parts import merged
from routetrace.stored import parts_pb2 as parts


class SpreadWatched:
    """Traces of a spread run; see `Watched`. Each worker is asked what has changed there.

    Args:
        run: namespace.
        every: yields the summaries of all traces of a run, newest first.
        gathering: the other workers.
        summaries: summaries of traces.
        own: service of this worker for the others.

    Raises:
        Unavailable: by all methods, if a worker does not answer, or does not know any more what
            has changed since it was asked last.
    """

    def __init__(
        self,
        run: str,
        every: Callable[[str], AsyncIterator[Told]],
        gathering: Gathering,
        summaries: Summaries,
        own: PartsServicer,
    ) -> None:
        self._run = run
        self._every = every
        self._gathering = gathering
        self._summaries = summaries
        self._own = own
        self._last: dict[int, parts.AwaitResponse] = {}

    async def every(self) -> AsyncIterator[Told]:
        """Yield all summaries; see `Watched`."""
        await self._ask()  # what changes from here on is answered to the next call
        async for told in self._every(self._run):
            yield told

    async def changed(self) -> list[str]:
        """Return what has changed; see `Watched`."""
        await self._ask()
        answers = self._last.values()
        if any(answer.incomplete for answer in answers):
            raise Unavailable(
                f"run {self._run!r} changes faster than it is watched, or a worker of the server "
                "has started again; watch it anew",
                retry_after=0.1,
            )
        return [*dict.fromkeys(trace_id for answer in answers for trace_id in answer.trace_ids)]

    async def look(self, trace_ids: Iterable[str]) -> AsyncIterator[tuple[str, Told | None]]:
        """Yield summaries as they are now; see `Watched`."""
        left = iter(trace_ids)
        while some := [*islice(left, MAX_COLLECTED)]:
            found = await self._gathering.collect(self._run, some)
            for trace_id, each in zip(some, found, strict=True):
                told = None
                if each.parts:
                    trace = merged((self._run, trace_id), each.parts.items())
                    told = self._summaries.told(trace)
                yield trace_id, told

    async def _ask(self) -> None:
        """Ask all workers what has changed since they were asked last."""
        workers = [self._gathering.own, *self._gathering.others]
        answers = await asyncio.gather(*map(self._answer, workers))
        self._last = dict(zip(workers, answers, strict=True))

    async def _answer(self, worker: int) -> parts.AwaitResponse:
        request = parts.AwaitRequest(run=self._run)
        if last := self._last.get(worker):
            request.after, request.life = last.sequence, last.life
        if worker == self._gathering.own:
            return await self._own.await_changes(request)
        answer: parts.AwaitResponse = await self._gathering.call(
            worker, "Await", request, parts.AwaitResponse
        )
        return answer
