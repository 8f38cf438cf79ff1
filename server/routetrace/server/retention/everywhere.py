"""Deletion of traces of spread runs, in all workers that have parts of them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Protocol

from routetrace.common.errors import Unavailable
from routetrace.server.common.slices import in_slices, result_in_slices
from routetrace.server.index.journal import Journal
from routetrace.server.spread.gathering import MAX_COLLECTED, Gathering
from routetrace.server.spread.parts import merged
from routetrace.stored import parts_pb2 as parts

_log = logging.getLogger(__name__)


class Forget(Protocol):
    """`Retention.forget`."""

    def __call__(  # noqa: D102
        self,
        run: str,
        trace_ids: Sequence[str],
        reason: str,
        token: str = "",
        *,
        judged: int = 0,
        begun: tuple[float, float] = (0.0, 0.0),
    ) -> Awaitable[int]: ...


class Everywhere:
    """Deletes traces in all workers.

    A trace in one worker is deleted there. One in several loses its newest requests first, worker
    by worker: whatever is left, should one of them not answer, is what the trace once was. Without
    its oldest requests, rows of later ones would stand for those that the oldest sampled.

    Args:
        gathering: traces of all workers.
        journal: changes of this worker.
        forget: deletes traces of this worker.
    """

    def __init__(self, gathering: Gathering, journal: Journal, forget: Forget) -> None:
        self._gathering = gathering
        self._journal = journal
        self._forget = forget

    # ------------------------------------------------------------------ what is due

    async def expire(self, now: float) -> None:
        """Delete traces whose lease has run out in all workers, if this one is their first."""
        state, judged = self._journal.state, self._journal.applied
        due: dict[str, list[str]] = {}
        async for trace in in_slices(state.traces.oldest_first()):
            run, trace_id = trace.key
            if trace.expires <= now and state.keeps(run):
                due.setdefault(run, []).append(trace_id)
        try:
            for run, trace_ids in due.items():
                over = [
                    trace_id
                    for trace_id, others in await self._glances(run, trace_ids)
                    if all(self._gathering.own < worker for worker in others)
                    and all(glance.left <= 0 for glance in others.values())
                ]
                await self.forget(run, over, "expired", judged=judged)
        except Unavailable as error:  # the next sweep finds them again
            _log.warning("expired traces of spread runs are kept: %s", error)

    async def evict(self, run: str, trace_ids: Sequence[str], reason: str, *, judged: int) -> int:
        """Delete finished traces of this worker unless another one has a request that may grow.

        Args:
            run: namespace.
            trace_ids: the traces.
            reason: key of a tombstone's `Fate`.
            judged: `Journal.applied` before the traces were looked at.

        Returns:
            The number of the deleted traces; 0 if a worker does not answer.
        """
        try:
            glances = await self._glances(run, trace_ids)
            ended = [i for i, others in glances if all(g.ended for g in others.values())]
            return await self.forget(run, ended, reason, judged=judged)
        except Unavailable as error:
            _log.warning("no trace of run %r is evicted: %s", run, error)
            return 0

    async def _glances(
        self, run: str, trace_ids: Sequence[str]
    ) -> list[tuple[str, dict[int, parts.Glance]]]:
        """Return each trace with its state in each other worker that has it.

        Raises:
            Unavailable: if a worker does not answer.
        """
        found: list[tuple[str, dict[int, parts.Glance]]] = []
        for at in range(0, len(trace_ids), MAX_COLLECTED):
            some = trace_ids[at : at + MAX_COLLECTED]
            request = parts.GlanceRequest(run=run, trace_ids=some)
            answers = await self._gathering.ask("Glance", request, parts.GlanceResponse)
            states: list[dict[int, parts.Glance]] = [{} for _ in some]
            for worker, response in answers.items():
                for glance in response.glances:
                    states[glance.index][worker] = glance
            found += zip(some, states, strict=True)
        return found

    # ------------------------------------------------------------------ deletion

    async def forget(
        self,
        run: str,
        trace_ids: Sequence[str],
        reason: str,
        token: str = "",
        *,
        judged: int = 0,
        others: Mapping[int, int] | None = None,
    ) -> int:
        """Delete traces in all workers; return their number.

        Args:
            run: namespace.
            trace_ids: the traces.
            reason: key of a tombstone's `Fate`.
            token: name of the caller's token, if any.
            judged: `Journal.applied` before the traces were looked at: those in this worker alone
                that a later record changed stay; 0: all are deleted.
            others: the same for other workers, by their numbers.

        Raises:
            Unavailable: if a worker does not answer; some traces may be deleted by then.
        """
        count = 0
        for at in range(0, len(trace_ids), MAX_COLLECTED):
            some = trace_ids[at : at + MAX_COLLECTED]
            alone: dict[int, list[str]] = {}
            for trace_id, glances in await self._glances(run, some):
                workers = [*glances]
                if self._gathering.has(run, trace_id):
                    workers.append(self._gathering.own)
                if len(workers) == 1:
                    alone.setdefault(workers[0], []).append(trace_id)
                elif workers:
                    await self._forget_shared(run, trace_id, reason, token)
                    count += 1
            for worker, held in alone.items():
                seen = judged if worker == self._gathering.own else (others or {}).get(worker, 0)
                count += await self._forget_at(worker, run, held, reason, token, seen)
        return count

    async def _forget_shared(self, run: str, trace_id: str, reason: str, token: str) -> None:
        """Delete a trace that several workers have, its newest requests first."""
        [found] = await self._gathering.collect(run, [trace_id])
        if not found.parts:
            return
        worker_of = {source: n for n, part in found.parts.items() for source in part.sources}
        trace = merged((run, trace_id), found.parts.items())
        await result_in_slices(trace.join_in_steps())
        requests = trace.join.requests
        newest_first = [(worker_of[r.sources[0]], r.began) for r in reversed(requests)]
        for worker, some in groupby(newest_first, lambda request: request[0]):
            began = [when for _, when in some]
            begun = min(began), max(began)
            await self._forget_at(worker, run, [trace_id], reason, token, begun=begun)

    async def _forget_at(
        self,
        worker: int,
        run: str,
        trace_ids: Iterable[str],
        reason: str,
        token: str,
        judged: int = 0,
        begun: tuple[float, float] = (0.0, 0.0),
    ) -> int:
        """Delete traces, or requests of them, at one worker."""
        if worker == self._gathering.own:
            return await self._forget(run, [*trace_ids], reason, token, judged=judged, begun=begun)
        request = parts.ForgetRequest(
            run=run, trace_ids=trace_ids, reason=reason, token=token, judged=judged
        )
        request.since, request.until = begun
        answer = await self._gathering.call(worker, "Forget", request, parts.ForgetResponse)
        return int(answer.count)
