"""Traces and agents of a run: lists, leases and deletions, where a run lies in this worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from routetrace.server.common.slices import Turns
from routetrace.server.index.agents import Agents
from routetrace.server.index.history import History
from routetrace.server.index.journal import Journal
from routetrace.server.index.records.record import encode_renew
from routetrace.server.index.traces.trace_index import TraceIndex
from routetrace.server.read import agreements
from routetrace.server.read.checks import page_of
from routetrace.server.read.finding import Finder
from routetrace.server.read.locating import Held, held_here
from routetrace.server.read.paging import PAGE_BYTES, Page
from routetrace.server.retention.retention import Retention
from routetrace.server.rows.preparing import prepare_end, prepared
from routetrace.server.rows.reader import Reader, has_unknown_version
from routetrace.server.rows.summaries import Summaries, Told
from routetrace.v1 import routetrace_pb2 as pb

_MAX_RENEWED = 1000

_T = TypeVar("_T")

#: Maximum share of the event loop's time for the summaries of one watcher.
WATCH_SHARE = 0.2


class Watched(Protocol):
    """Traces of a run while they are watched."""

    def every(self) -> AsyncIterator[Told]:
        """Yield the summaries of all traces, newest first."""

    async def changed(self) -> list[str]:
        """Return the traces that have changed, or are gone, since the last call."""

    def look(self, trace_ids: Iterable[str]) -> AsyncIterator[tuple[str, Told | None]]:
        """Yield the summaries of traces as they are now; None for one that is gone."""


class Renewal(NamedTuple):
    """Leases of traces of a run, as a caller sets them."""

    run: str
    trace_ids: Sequence[str]
    ttl: float
    """Seconds from the renewal on."""
    refuse: Callable[[], object] | None
    """Raises the error of a lease that would end earlier; None if the caller may end leases."""

    @property
    def keep_longer(self) -> bool:
        """Whether longer leases stay: another caller may lengthen one after the check."""
        return self.refuse is not None


class Catalog(Protocol):
    """Traces and agents of runs."""

    def watched(self, run: str, turns: Turns) -> AbstractContextManager[Watched]:
        """Watch the traces of a run."""

    async def traces(self, request: pb.ListTracesRequest, turns: Turns) -> bytes:
        """Return a page of the traces of a run, newest first: a sealed pb.ListTracesResponse."""

    async def holders(self, run: str, digests: npt.NDArray[np.uint64]) -> Held:
        """Return the traces of a run that may have requests with some token digests."""

    async def delete(self, run: str, trace_id: str, token: str) -> None:
        """Delete a trace; `token` is the name of the caller's."""

    async def retire(
        self, run: str, through: int, token: str, turns: Turns
    ) -> pb.RetireTracesResponse:
        """Delete the traces that have ended with old weight versions; return their numbers."""

    async def renew(self, renewal: Renewal, turns: Turns) -> int:
        """Set the leases of traces; return their number."""

    async def agents(self, request: pb.ListAgentsRequest) -> pb.ListAgentsResponse:
        """Return a page of the agents of a run."""

    async def history(self, request: pb.GetHistoryRequest) -> pb.GetHistoryResponse:
        """Return the last minutes of a run."""

    async def agreement(self, request: pb.ListAgreementRequest) -> pb.ListAgreementResponse:
        """Return a page of the reports of trainers, by step."""


class _OwnWatched:
    """Traces of a run that lies in this worker, while they are watched."""

    def __init__(
        self, run: str, finder: Finder, traces: TraceIndex, summaries: Summaries, turns: Turns
    ) -> None:
        self._run = run
        self._turns = turns
        self._finder = finder
        self._traces = traces
        self._summaries = summaries
        self._changed: dict[str, None] = {}

    def note(self, keys: Set[Hashable]) -> None:
        """Note changes; a listener of `Changes`."""
        for key in keys:
            # Other keys are those of writers.
            if isinstance(key, tuple) and len(key) == 2 and key[0] == self._run:
                self._changed[key[1]] = None

    async def every(self) -> AsyncIterator[Told]:
        """Yield all summaries; see `Watched`."""
        newest_first = self._traces.newest_first(self._run)
        async for trace in self._in_turns(prepared(newest_first, self._summaries.prepare)):
            if trace and self._finder.exists(trace) and trace.sources:
                if self._summaries.at_hand(trace):
                    yield self._summaries.told(trace)
                else:
                    self._changed[trace.key[1]] = None

    def _in_turns(self, items: Iterable[_T]) -> AsyncIterator[_T]:
        # All watchers have their rounds at the same time.
        return self._turns.over(items, WATCH_SHARE, waits=True)

    async def changed(self) -> list[str]:
        """Return what has changed; see `Watched`."""
        changed, self._changed = [*self._changed], {}
        return changed

    async def look(self, trace_ids: Iterable[str]) -> AsyncIterator[tuple[str, Told | None]]:
        """Yield summaries as they are now; see `Watched`."""
        async for trace_id in self._in_turns(self._prepared(trace_ids)):
            if trace_id is not None:
                trace = self._traces.traces.get((self._run, trace_id))
                yield trace_id, self._summaries.told(trace) if trace and trace.sources else None

    def _prepared(self, trace_ids: Iterable[str]) -> Iterator[str | None]:
        """Yield each id once its trace is prepared, and None at each step before that.

        One that changes too often to be prepared is left to the next round.
        """
        for trace_id in trace_ids:
            if trace := self._traces.traces.get((self._run, trace_id)):
                for _ in self._summaries.prepare(trace):
                    yield None
                if trace.sources and not self._summaries.at_hand(trace):
                    self._changed[trace_id] = None
                    continue
            yield trace_id


class OwnCatalog:
    """Of runs that lie in this worker."""

    def __init__(
        self,
        *,
        agents: Agents,
        finder: Finder,
        history: History,
        journal: Journal,
        reader: Reader,
        retention: Retention,
        summaries: Summaries,
    ) -> None:
        self._agents = agents
        self._finder = finder
        self._history = history
        self._journal = journal
        self._state = journal.state
        self._reader = reader
        self._retention = retention
        self._summaries = summaries

    @contextmanager
    def watched(self, run: str, turns: Turns) -> Iterator[Watched]:
        """Watch traces; see `Catalog`."""
        watched = _OwnWatched(run, self._finder, self._state.traces, self._summaries, turns)
        listeners = self._journal.changes.listeners
        listeners.append(watched.note)
        try:
            yield watched
        finally:
            listeners.remove(watched.note)

    async def traces(self, request: pb.ListTracesRequest, turns: Turns) -> bytes:
        """Return a page of traces; see `Catalog`."""
        last, most = page_of(request)
        page = Page(self._reader, self._summaries, request, most)
        newest_first = self._state.traces.newest_first(request.run, last)
        async for trace in turns.over(prepared(newest_first, page.prepare)):
            if trace and self._finder.exists(trace):
                if not page.add(trace):
                    return page.sealed(str(last))
                last = trace.serial
        return page.sealed()

    async def holders(self, run: str, digests: npt.NDArray[np.uint64]) -> Held:
        """Return traces by digests; see `Catalog`."""
        return held_here(self._state.traces, run, digests)

    async def delete(self, run: str, trace_id: str, token: str) -> None:
        """Delete a trace; see `Catalog`."""
        await self._retention.forget(run, [trace_id], "deleted", token)

    async def retire(
        self, run: str, through: int, token: str, turns: Turns
    ) -> pb.RetireTracesResponse:
        """Delete old traces; see `Catalog`."""
        judged = self._journal.applied
        newest_first = self._state.traces.newest_first(run)
        retired: list[str] = []
        response = pb.RetireTracesResponse()
        async for trace in turns.over(prepared(newest_first, partial(prepare_end, self._reader))):
            if trace and self._finder.exists(trace) and self._reader.retirable(trace, through):
                retired.append(trace.key[1])
                response.num_unknown += has_unknown_version(trace)
        if retired:
            response.num_retired = await self._retention.forget(
                run, retired, "retired", token, judged=judged
            )
        return response

    async def renew(self, renewal: Renewal, turns: Turns) -> int:
        """Set leases; see `Catalog`."""
        run, trace_ids, ttl, refuse = renewal
        if refuse:
            async for trace_id in turns.over(trace_ids):
                trace = self._state.traces.traces.get((run, trace_id))
                if trace is not None and self._journal.clock.now() + ttl < trace.expires:
                    refuse()
        count = 0
        for at in range(0, len(trace_ids), _MAX_RENEWED):
            now, part = self._journal.clock.now(), trace_ids[at : at + _MAX_RENEWED]
            record = encode_renew(now, run, part, ttl, keep_longer=renewal.keep_longer)
            count += await self._journal.append(record)
        return count

    async def agents(self, request: pb.ListAgentsRequest) -> pb.ListAgentsResponse:
        """Return a page of agents; see `Catalog`."""
        start, most = page_of(request)
        writers = [w for w in self._state.writers.values() if w.key.run == request.run]
        writers = sorted((w for w in writers if w.opened > start), key=lambda w: w.opened)
        newest = self._agents.newest_weight_version(request.run)
        response = pb.ListAgentsResponse()
        size = 0
        for writer in writers:
            if len(response.agents) == most or size > PAGE_BYTES:
                break
            response.agents.append(self._agents.describe(writer, newest))
            size += response.agents[-1].ByteSize()
        if len(response.agents) < len(writers):
            response.next_page_token = str(writers[len(response.agents) - 1].opened)
        return response

    async def history(self, request: pb.GetHistoryRequest) -> pb.GetHistoryResponse:
        """Return the last minutes; see `Catalog`."""
        return self._history.of(request.run, request.after)

    async def agreement(self, request: pb.ListAgreementRequest) -> pb.ListAgreementResponse:
        """Return a page of reports; see `Catalog`."""
        return agreements.page(self._state.agreements, request)
