"""Counts of experts in the newest traces of a run, made in the background and kept for a while.

The server holds rows compressed and decompresses none, so they are read and counted here.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from itertools import islice
from typing import Any

from routetrace.page.backends import Backends
from routetrace.page.errors import busy
from routetrace.page.experts import Tally
from routetrace.page.sessions import Caller
from routetrace.page.trace_table import Filter, TraceTable

#: Most tokens and traces of a count.
MAX_TOKENS = 500_000
_MAX_TRACES = 2000
#: Seconds that a count is kept, and one of no trace, and number of them, those under way included.
_KEPT_S = 600.0
_EMPTY_KEPT_S = 2.0
_MAX_COUNTS = 16
#: Traces of one call; other reads come between two calls.
_CALL_TRACES = 16


class Count:
    """One count, under way or done; `task` has its JSON.

    Args:
        tally: the traces to count.
        backends: the server.
        caller: whose token is sent.
        run: the run.
        turn: held while it reads.
    """

    def __init__(
        self, tally: Tally, backends: Backends, caller: Caller, run: str, turn: asyncio.Semaphore
    ) -> None:
        self.tokens = tally.tokens
        """Tokens to be read."""
        self.done = 0
        """Tokens read so far."""
        self.began_at = time.time()
        """Unix time."""
        self.task = asyncio.ensure_future(self._run(tally, backends, caller, run, turn))
        self.task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        done = self.task.done()
        return done and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def kept_seconds(self) -> float:
        """Seconds after which it is too old."""
        return _KEPT_S if self.tokens else _EMPTY_KEPT_S

    async def _run(
        self, tally: Tally, backends: Backends, caller: Caller, run: str, turn: asyncio.Semaphore
    ) -> bytes:
        loop = asyncio.get_running_loop()
        async with turn:
            for some in _slices(tally.trace_ids, _CALL_TRACES):
                async with aclosing(backends.traces(caller, run, some)) as reads:
                    for trace_id in some:
                        read = await anext(reads)
                        await loop.run_in_executor(None, tally.add, trace_id, read)
                        self.done += tally.rows_of(trace_id)
            return await loop.run_in_executor(None, tally.json, self.began_at)


class ExpertCounts:
    """Counts by token, run and chosen traces; one reads at a time.

    Args:
        backends: the server.
    """

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self._counts: OrderedDict[tuple[Any, ...], Count] = OrderedDict()
        self._turn = asyncio.Semaphore(1)

    async def aclose(self) -> None:
        """End all."""
        counts = [*self._counts.values()]
        self._counts.clear()
        for count in counts:
            count.task.cancel()
            await asyncio.wait([count.task])

    def drop(self, caller: Caller) -> None:
        """End and forget the counts of a token."""
        for key in [key for key in self._counts if key[0] == caller.digest]:
            self._counts.pop(key).task.cancel()

    def of(
        self, caller: Caller, run: str, table: TraceTable, wanted: Filter, most: int, after: float
    ) -> Count:
        """Return the count of the newest traces that have ended, begun if it is not there.

        Args:
            caller: whose token is sent.
            run: the run.
            table: its traces.
            wanted: traces to count, all of which have ended.
            most: tokens from which no further trace is read.
            after: Unix time; a count that began before is made anew.

        Raises:
            Overloaded: if too many are under way.
            RouteTraceError: as a read, once, of a count that failed.
        """
        key = caller.digest, run, wanted, most
        count = self._counts.get(key)
        if count is not None and count.failed:
            del self._counts[key]
            count.task.result()
        if count is not None and count.task.done():
            if count.began_at >= max(after, time.time() - count.kept_seconds):
                self._counts.move_to_end(key)
                return count
            count = None
        if count is None:
            self._counts.pop(key, None)
            self._make_room()
            tally = Tally(table.newest(wanted, most, _MAX_TRACES))
            count = self._counts[key] = Count(tally, self._backends, caller, run, self._turn)
        return count

    def _make_room(self) -> None:
        """Forget the count that was asked for least lately, if there are too many."""
        if len(self._counts) < _MAX_COUNTS:
            return
        done = next((key for key, count in self._counts.items() if count.task.done()), None)
        if done is None:
            raise busy()
        del self._counts[done]


def _slices(items: Sequence[str], size: int) -> Iterator[list[str]]:
    left = iter(items)
    while some := [*islice(left, size)]:
        yield some
