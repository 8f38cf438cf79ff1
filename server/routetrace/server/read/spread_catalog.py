"""Traces and agents of runs that lie in all workers of the server."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.codec.records import U32
from routetrace.common.errors import InvalidArgument
from routetrace.server.common.slices import Turns
from routetrace.server.index.history import summed
from routetrace.server.index.journal import Journal
from routetrace.server.index.traces.trace import Trace
from routetrace.server.read import agreements
from routetrace.server.read.catalog import Renewal, Watched
from routetrace.server.read.checks import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, page_of
from routetrace.server.read.locating import MAX_KEYS, Held
from routetrace.server.read.paging import PAGE_BYTES, Page
from routetrace.server.read.parts import PartsServicer
from routetrace.server.read.spread_watched import SpreadWatched
from routetrace.server.retention.everywhere import Everywhere
from routetrace.server.rows.reader import Reader
from routetrace.server.rows.summaries import Summaries, Told
from routetrace.server.spread.gathering import MAX_COLLECTED, Gathering
from routetrace.server.spread.parts import Found, merged
from routetrace.stored import parts_pb2 as parts
from routetrace.v1 import routetrace_pb2 as pb

#: Traces of a worker that are listed, and located, at a time.
_LISTED = 256

#: Maximum traces of one request that renews leases: applying it holds the event loop.
_MAX_RENEWED = 1000

#: Maximum length of the number of one worker in a page token.
_LONGEST_NUMBER = 20


class SpreadCatalog:
    """Of runs that lie in all workers; a worker that does not answer makes a call Unavailable."""

    def __init__(
        self,
        *,
        everywhere: Everywhere,
        gathering: Gathering,
        journal: Journal,
        own: PartsServicer,
        reader: Reader,
        summaries: Summaries,
    ) -> None:
        self._everywhere = everywhere
        self._gathering = gathering
        self._journal = journal
        self._own = own
        self._reader = reader
        self._summaries = summaries

    # ------------------------------------------------------------------ lists

    @contextmanager
    def watched(self, run: str, turns: Turns) -> Iterator[Watched]:
        """Watch traces; see `Catalog`."""
        yield SpreadWatched(run, self._every, self._gathering, self._summaries, self._own)

    async def _every(self, run: str) -> AsyncIterator[Told]:
        """Yield the summaries of a run, newest first by the clocks of the workers."""
        request = parts.ListRequest(run=run, most=_LISTED, watched=True)
        async for _, listed, alone, trace in self._merged(request, self._places("")):
            if alone:
                yield Told(pb.TraceSummary.FromString(listed.told), listed.final)
            elif trace is not None:
                yield self._summaries.told(trace)

    async def traces(self, request: pb.ListTracesRequest, turns: Turns) -> bytes:
        """Return a page of traces, the newest first by the clocks of the workers.

        A page token holds a serial number for each worker, below which its next part is.
        """
        most = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        page = Page(self._reader, self._summaries, request, most)
        places = self._places(request.page_token)
        asked = parts.ListRequest(run=request.run, most=_LISTED)
        if request.HasField("retirable_through"):
            asked.retirable_through = request.retirable_through
        async for worker, listed, alone, trace in self._merged(asked, dict(places)):
            if alone:
                added = page.add_entry(listed.entry, retirable=listed.retirable)
            else:
                added = trace is None or page.add(trace)
            if not added:
                return page.sealed(".".join(str(places[worker]) for worker in sorted(places)))
            places[worker] = listed.serial
        return page.sealed()

    def _places(self, token: str) -> dict[int, int]:
        """Return the serial number of each worker in a page token; 0 for the first page."""
        workers = sorted([self._gathering.own, *self._gathering.others])
        numbers = token.split(".") if token else ["0"] * len(workers)
        if len(numbers) != len(workers) or not all(
            len(n) <= _LONGEST_NUMBER and n.isascii() and n.isdigit() for n in numbers
        ):
            raise InvalidArgument(
                field="page_token", value=token, expected="next_page_token of an earlier response"
            )
        return dict(zip(workers, map(int, numbers), strict=True))

    async def _merged(
        self, request: parts.ListRequest, places: dict[int, int]
    ) -> AsyncIterator[tuple[int, parts.Listed, bool, Trace | None]]:
        """Yield parts of all workers, newest first.

        Yields:
            The worker; its part; whether that is the whole trace; the trace otherwise, which comes
            once, with the part where it began.
        """
        run = request.run
        async for some in self._listed(request, places):
            located = await self._gathering.locate(run, [part.trace_id for _, part in some])
            alone = [located[part.trace_id].workers == [worker] for worker, part in some]
            several = [part.trace_id for (_, part), one in zip(some, alone, strict=True) if not one]
            found: dict[str, Found] = {}
            for at in range(0, len(several), MAX_COLLECTED):
                ids = several[at : at + MAX_COLLECTED]
                found.update(zip(ids, await self._gathering.collect(run, ids), strict=True))
            for (worker, part), one in zip(some, alone, strict=True):
                trace = None
                if not one:
                    held = found[part.trace_id].parts
                    if worker == min(held, key=lambda w: (held[w].created, w), default=-1):
                        trace = merged((run, part.trace_id), held.items())
                yield worker, part, one, trace

    async def _listed(
        self, request: parts.ListRequest, places: dict[int, int]
    ) -> AsyncIterator[list[tuple[int, parts.Listed]]]:
        """Yield parts of all workers, newest first, some at a time."""
        coming: dict[int, deque[parts.Listed]] = {worker: deque() for worker in places}
        while True:
            some: list[tuple[int, parts.Listed]] = []
            while len(some) < _LISTED:
                for worker, parts_of in [*coming.items()]:
                    if not parts_of:
                        request.before = places[worker]
                        parts_of.extend((await self._at(worker, "List", request)).listed)
                        if not parts_of:
                            del coming[worker]
                        else:
                            places[worker] = parts_of[-1].serial
                if not coming:
                    break
                worker = max(coming, key=lambda number: (coming[number][0].created, number))
                some.append((worker, coming[worker].popleft()))
            if not some:
                return
            yield some

    async def agents(self, request: pb.ListAgentsRequest) -> pb.ListAgentsResponse:
        """Return a page of the agents of all workers."""
        start, most = page_of(request)
        every = [*(await self._own.agents(request)).agents]
        asked = pb.ListAgentsRequest(run=request.run)
        answers = await self._gathering.ask("Agents", asked, pb.ListAgentsResponse)
        for _, answer in sorted(answers.items()):
            every += answer.agents
        every.sort(key=lambda agent: (agent.engine_id, agent.shard))
        known = (a.weight_version for a in every if a.connected and a.HasField("weight_version"))
        newest = max(known, default=None)
        response = pb.ListAgentsResponse()
        size = 0
        for number, agent in enumerate(every[start:], start):
            if len(response.agents) == most or size > PAGE_BYTES:
                response.next_page_token = str(number)
                break
            if newest is not None and agent.HasField("weight_version"):
                agent.weight_version_lag = max(0, newest - agent.weight_version)
            response.agents.append(agent)
            size += agent.ByteSize()
        return response

    async def history(self, request: pb.GetHistoryRequest) -> pb.GetHistoryResponse:
        """Return the last minutes in all workers."""
        answers = await self._gathering.ask("History", request, pb.GetHistoryResponse)
        return summed([await self._own.history(request), *answers.values()])

    async def agreement(self, request: pb.ListAgreementRequest) -> pb.ListAgreementResponse:
        """Return a page of the reports that all workers have."""
        answers = await self._gathering.ask("Agreement", request, pb.ListAgreementResponse)
        return agreements.merged([await self._own.agreement(request), *answers.values()])

    async def holders(self, run: str, digests: npt.NDArray[np.uint64]) -> Held:
        """Return traces of all workers by token digests."""
        request = parts.HoldersRequest(run=run, digests=digests.tobytes())
        answers = await self._gathering.ask("Holders", request, parts.HoldersResponse)
        every = [await self._own.holders(request), *answers.values()]
        ids = [*dict.fromkeys(i for answer in every for i in answer.trace_ids)]
        traces: dict[str, Trace] = {}
        for at in range(0, len(ids), MAX_COLLECTED):
            some = ids[at : at + MAX_COLLECTED]
            found = await self._gathering.collect(run, some)
            for trace_id, each in zip(some, found, strict=True):
                if each.parts:
                    traces[trace_id] = merged((run, trace_id), each.parts.items())
        held: list[dict[str, Trace]] = [{} for _ in digests]
        more = [False] * len(digests)
        for answer in every:
            for index, number in np.frombuffer(answer.pairs, U32).reshape(-1, 2).tolist():
                trace_id = answer.trace_ids[number]
                if trace_id in traces:
                    held[index][trace_id] = traces[trace_id]
            for index in answer.more:
                more[index] = True
        keys = [*dict.fromkeys(key for answer in every for key in answer.digest_keys)]
        return Held([[*each.values()] for each in held], more, keys[:MAX_KEYS])

    # ------------------------------------------------------------------ deletion and leases

    async def delete(self, run: str, trace_id: str, token: str) -> None:
        """Delete a trace in all workers."""
        await self._everywhere.forget(run, [trace_id], "deleted", token)

    async def retire(
        self, run: str, through: int, token: str, turns: Turns
    ) -> pb.RetireTracesResponse:
        """Delete the traces of which no worker has a reason to keep them."""
        request = parts.RetirableRequest(run=run, through=through)
        answers = await self._gathering.ask("Retirable", request, parts.RetirableResponse)
        answers[self._gathering.own] = await self._own.retirable(request)
        held = {worker: {*answer.trace_ids} for worker, answer in answers.items()}
        # Another part of one of them may be kept.
        retired = list(dict.fromkeys(i for answer in answers.values() for i in answer.trace_ids))
        kept: set[str] = set()
        for worker, own in held.items():
            for trace_id in await self._having(worker, run, [i for i in retired if i not in own]):
                kept.add(trace_id)
        judged = {worker: answer.judged for worker, answer in answers.items()}
        unknown = {a.trace_ids[index] for a in answers.values() for index in a.unknown}
        count = await self._everywhere.forget(
            run,
            [trace_id for trace_id in retired if trace_id not in kept],
            "retired",
            token,
            judged=judged.pop(self._gathering.own),
            others=judged,
        )
        return pb.RetireTracesResponse(num_retired=count, num_unknown=len(unknown - kept))

    async def renew(self, renewal: Renewal, turns: Turns) -> int:
        """Set the leases of traces in all workers; return their number."""
        run, trace_ids, ttl, refuse = renewal
        renewed: set[int] = set()
        for at in range(0, len(trace_ids), _MAX_RENEWED):
            some = trace_ids[at : at + _MAX_RENEWED]
            if refuse:
                glance = parts.GlanceRequest(run=run, trace_ids=some)
                answers = await self._gathering.ask("Glance", glance, parts.GlanceResponse)
                for answer in (*answers.values(), await self._own.glance(glance)):
                    if any(ttl < part.left for part in answer.glances):
                        refuse()
            request = parts.RenewRequest(
                run=run, trace_ids=some, ttl=ttl, keep_longer=renewal.keep_longer
            )
            done = await self._gathering.ask("Renew", request, parts.RenewResponse)
            for response in (*done.values(), await self._own.renew(request)):
                renewed.update(at + index for index in response.indexes)
        return len(renewed)

    # ------------------------------------------------------------------ workers

    async def _having(self, worker: int, run: str, trace_ids: Sequence[str]) -> list[str]:
        """Return those of some traces that a worker has parts of."""
        having: list[str] = []
        for at in range(0, len(trace_ids), _LISTED):
            some = trace_ids[at : at + _LISTED]
            answer = await self._at(worker, "Glance", parts.GlanceRequest(run=run, trace_ids=some))
            having += [some[glance.index] for glance in answer.glances]
        return having

    async def _at(self, worker: int, method: str, request: Any) -> Any:
        """Return the response of any worker, this one included."""
        if worker == self._gathering.own:
            handler, _ = self._own.methods[method]
            return await handler(request)
        response = getattr(parts, f"{method}Response")
        return await self._gathering.call(worker, method, request, response)
