"""Summaries of the traces of a run, sent as they change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from routetrace.server.read.catalog import Watched
from routetrace.server.rows.summaries import Told
from routetrace.v1 import routetrace_pb2 as pb

#: Seconds between two rounds, in which a trace is sent at most once.
ROUND_SECONDS = 1.0

#: Rounds after which traces that may change without a report of an agent are looked at again, and
#: after which a message is sent also where nothing has changed.
_AGAIN_ROUNDS = 5
_SILENT_ROUNDS = 10

#: Maximum traces of a message; clients take at most 1,024 fields.
_MOST = 500


class Watch:
    """Messages to one caller that watches a run.

    Args:
        watched: traces of the run.
        check: called in each round; raises an error if the caller may not read any more.
    """

    def __init__(self, watched: Watched, check: Callable[[], object]) -> None:
        self._watched = watched
        self._check = check
        #: Serialized summaries that were sent and may change without a change of their traces.
        self._open: dict[str, bytes] = {}
        self._response = pb.WatchTracesResponse()

    async def messages(self) -> AsyncGenerator[pb.WatchTracesResponse, None]:
        """Yield messages: with all traces, then with what has changed, without an end."""
        async for one in self._watched.every():
            self._add(one)
            if self._full:
                yield self._taken()
        self._response.whole = True
        yield self._taken()
        silent = again = 0
        while True:
            begun = asyncio.get_running_loop().time()
            self._check()
            silent, again = silent + 1, again + 1
            async for trace_id, told in self._watched.look(await self._watched.changed()):
                if told is None:
                    self._open.pop(trace_id, None)
                    self._response.gone_trace_ids.append(trace_id)
                else:
                    self._add(told)
                if self._full:
                    yield self._taken()
            if again == _AGAIN_ROUNDS:
                again = 0
                async for trace_id, told in self._watched.look([*self._open]):
                    # One that is gone is among those that have changed, as is another lease.
                    if told and _serialized(told) != self._open[trace_id]:
                        self._add(told)
                    if self._full:
                        yield self._taken()
            if self._size or silent >= _SILENT_ROUNDS:
                silent = 0
                yield self._taken()
            left = begun + ROUND_SECONDS - asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, left))

    def _add(self, told: Told) -> None:
        """Add the summary of a trace."""
        trace_id = told.message.trace_id
        self._open.pop(trace_id, None)
        if not told.final:
            self._open[trace_id] = _serialized(told)
        self._response.traces.append(told.message)

    @property
    def _size(self) -> int:
        return len(self._response.traces) + len(self._response.gone_trace_ids)

    @property
    def _full(self) -> bool:
        return self._size >= _MOST

    def _taken(self) -> pb.WatchTracesResponse:
        """Return the message so far, and begin the next one."""
        taken = self._response
        self._response = pb.WatchTracesResponse(whole=taken.whole)
        return taken


def _serialized(told: Told) -> bytes:
    return told.message.SerializeToString(deterministic=True)
