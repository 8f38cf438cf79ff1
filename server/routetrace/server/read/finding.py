"""Look-up of traces, and the wait until one meets what a read asks for."""

from __future__ import annotations

from contextlib import ExitStack
from time import monotonic

from routetrace.common.errors import NotFound
from routetrace.server.access.admission import Admission
from routetrace.server.access.control import Access
from routetrace.server.access.partition import Partition
from routetrace.server.common.rpc import Context
from routetrace.server.index.agents import Agents
from routetrace.server.index.demand import Demand, Place
from routetrace.server.index.journal import Journal
from routetrace.server.index.traces.tombstones import Fate
from routetrace.server.index.traces.trace import Trace
from routetrace.server.read.checks import Checks
from routetrace.server.rows.absence import no_trace
from routetrace.server.rows.preparing import prepare
from routetrace.server.rows.reader import Reader
from routetrace.server.rows.served import Known
from routetrace.server.rows.view import Selection
from routetrace.server.spread.gathering import Gathering
from routetrace.server.spread.parts import Places
from routetrace.server.spread.watching import Watching
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum runs in an error.
_MAX_NAMED_RUNS = 20

#: Minimum seconds after which a waiting call checks again without a change, as agents get lost
#: silently, and maximum of such checks in a second.
_LOOK_AGAIN_SECONDS = 1.0
_LOOKS_PER_SECOND = 500


class Finder:
    """Finds the traces that reads name."""

    def __init__(
        self,
        *,
        access: Access,
        admission: Admission,
        agents: Agents,
        checks: Checks,
        demand: Demand,
        gathering: Gathering,
        journal: Journal,
        partition: Partition,
        reader: Reader,
        watching: Watching,
    ) -> None:
        self._watching = watching
        self._access = access
        self._admission = admission
        self._agents = agents
        self._checks = checks
        self._demand = demand
        self._gathering = gathering
        self._journal = journal
        self._state = journal.state
        self._partition = partition
        self._reader = reader

    def exists(self, trace: Trace) -> bool:
        """Whether a trace is still stored."""
        return self._state.traces.traces.get(trace.key) is trace

    def select(self, known: Known, request: pb.GetTraceRequest) -> Selection:
        """Return the checked selection of a read."""
        return self._reader.select(
            known,
            request.token_start,
            request.token_stop,
            request.layer_ids,
            request.policy or pb.READ_POLICY_AS_SAMPLED,
            request.weight_version if request.HasField("weight_version") else None,
            [(r.start, r.stop) for r in request.token_ranges],
        )

    async def gathered(
        self,
        request: pb.GetTraceRequest,
        context: Context,
        owner: str,
        *,
        sends_on: bool = False,
    ) -> Known:
        """Return the requested trace as all workers have it.

        Args:
            request: the read.
            context: its call.
            owner: of the call.
            sends_on: whether the caller can ask another worker that has all of it.

        Raises:
            NotFound: as `look_up`.
            Moved: if another worker alone has it.
            Unavailable: if a worker that may have a part does not answer.
        """
        found = await self._gathering.trace(request.run, request.trace_id, sends_on=sends_on)
        if found is None:
            trace = self._state.traces.traces.get((request.run, request.trace_id))
            await self._prepare(trace, request, owner)
            return self.look_up(request, context)
        if found.trace is None:
            raise self._absent(request, context, found.fate, has_run=found.has_run)
        await self._prepare(found.trace, request, owner)
        return self.look_up(request, context, found.trace)

    async def _prepare(self, trace: Trace | None, read: pb.GetTraceRequest, owner: str) -> None:
        """Work out what a read of a trace needs; in slices where that takes long."""
        if trace is not None and trace.has_many_sources:
            steps = prepare(self._reader, trace, read.incarnation, read.prefix_rows, read.nonce)
            async for _ in self._admission.pace.turns(owner).over(steps):
                pass

    async def again(self, trace: Trace, request: pb.GetTraceRequest, owner: str) -> Trace:
        """Return a trace that was found, as it is now.

        Raises:
            NotFound: if it was deleted.
            Unavailable: if a worker that may have a part does not answer.
        """
        found = await self._gathering.trace(*trace.key)
        if found is None:
            await self._prepare(trace, request, owner)
            if not self.exists(trace):
                raise self._reader.not_found(*trace.key, named=True)
            return trace
        if found.trace is None:
            raise no_trace(*trace.key, found.fate, named=True)
        await self._prepare(found.trace, request, owner)
        return found.trace

    def look_up(
        self, request: pb.GetTraceRequest, context: Context, trace: Trace | None = None
    ) -> Known:
        """Return the requested trace as it is now.

        Args:
            request: the read.
            context: its call.
            trace: the trace as all workers have it; None: as this worker has it.

        Raises:
            NotFound: if there is no such trace or incarnation, or run; runs that the caller may
                read are named.
        """
        number, policy = request.incarnation, request.prefix_rows
        try:
            return self._reader.find(
                request.run, request.trace_id, number, policy, trace, request.nonce
            )
        except NotFound as error:
            if error.field != "trace_id":
                raise
        # Out of the handler: the error would refer to this one, and so to the call.
        fate = self._state.tombstones.fate((request.run, request.trace_id))
        has_run = request.run in self._state.runs()
        raise self._absent(request, context, fate, has_run=has_run)

    def _absent(
        self, request: pb.GetTraceRequest, context: Context, fate: Fate | None, *, has_run: bool
    ) -> NotFound:
        """Return the error for a trace that is not there, or a run that is not known."""
        run, trace_id = request.run, request.trace_id
        if fate or has_run:
            named = fate is not None and self._access.may(context, "read", run)
            return no_trace(run, trace_id, fate, named=named)
        known = self._access.covered(context, self._state.runs())[:_MAX_NAMED_RUNS]
        names = ", ".join(n if n.isprintable() else repr(n) for n in known) or "none yet"
        if self._partition.count > 1:
            names += " (of its worker; GetServerInfo has those of the server)"
        text = f"no run {run!r}; runs: {names}"
        return NotFound(text, field="run", value=run, expected=f"one of {names}")

    def met(
        self, request: pb.GetTraceRequest, context: Context, places: Places | None = None
    ) -> Known | None:
        """Return the requested trace if it meets `wait_for` now; None: it is to be waited for.

        One of many requests may have to be joined first.

        Args:
            request: the read.
            context: its call.
            places: workers that have a trace of a spread run, which is waited for without.

        Raises:
            NotFound: as `look_up`, if it is not waited for.
            Moved: if another worker alone has it.
        """
        trace = self._state.traces.traces.get((request.run, request.trace_id))
        if trace is not None and not trace.is_joined:
            return None
        elsewhere = self._partition.spreads(request.run) and not request.located
        if elsewhere and not (places and self._gathering.only_here(request.trace_id, places)):
            return None
        try:
            known = self.look_up(request, context)
        except NotFound:
            if request.wait_for == pb.WAIT_FOR_UNSPECIFIED:
                raise
            return None
        return known if self._is_met(known, request) else None

    async def find(
        self,
        request: pb.GetTraceRequest,
        context: Context,
        owner: str,
        *,
        sends_on: bool = False,
    ) -> Known:
        """Wait until the requested trace meets `wait_for`; return it. The deadline bounds it.

        Args:
            request: the read.
            context: its call.
            owner: of the call.
            sends_on: whether the caller can ask another worker that has all of it.
        """
        if request.located and (known := self.met(request, context)):
            return known
        while True:
            places: list[Place] = [request.run]
            awaited = pb.AWAITED_ENDS
            try:
                known = await self.gathered(request, context, owner, sends_on=sends_on)
            except NotFound:
                if request.wait_for == pb.WAIT_FOR_UNSPECIFIED:
                    raise
            else:
                if self._is_met(known, request):
                    return known
                places = self.places(known.trace)
                if request.wait_for == pb.WAIT_FOR_ROWS and (
                    request.token_stop or request.token_ranges
                ):  # else they are waited for once the request has ended
                    awaited = pb.AWAITED_ROWS
            self._checks.ready()
            await self.changed(request, places, awaited, self.look_again())
            await self._admission.pace.step(owner)
            self._checks.call(context, "read", request.run)  # a token may be revoked meanwhile

    async def find_to_follow(
        self, request: pb.GetTraceRequest, context: Context, owner: str
    ) -> Known:
        """Wait for the requested trace until `wait_ms` have passed; return it."""
        until = monotonic() + request.wait_ms / 1000
        while True:
            try:
                return await self.gathered(request, context, owner)
            except NotFound:
                left = until - monotonic()
                if left <= 0:
                    raise
            self._checks.ready()
            seconds = min(left, self.look_again())
            await self.changed(request, [request.run], pb.AWAITED_ENDS, seconds)
            await self._admission.pace.step(owner)
            self._checks.call(context, "read", request.run)  # a token may be revoked meanwhile

    async def changed(
        self, request: pb.GetTraceRequest, places: list[Place], awaited: int, seconds: float
    ) -> None:
        """Wait until the requested trace changes, at most a number of seconds.

        Args:
            request: the read.
            places: where its rows come from: they are asked for early chunks meanwhile.
            awaited: what it waits for, a pb.Awaited.
            seconds: maximum time.
        """
        key = request.run, request.trace_id
        with ExitStack() as waiting:
            waiting.enter_context(self._demand.waiting(places, awaited))
            if self._partition.spreads(request.run):
                waiting.enter_context(self._watching.waiting(key, places, awaited))
            await self._journal.changes.wait(key, seconds)

    def _is_met(self, known: Known, request: pb.GetTraceRequest) -> bool:
        if request.wait_for == pb.WAIT_FOR_UNSPECIFIED:
            return True
        if 0 < known.num_tokens < request.num_tokens:  # a later turn has not arrived
            return False
        if self._reader.settled(known) or request.wait_for == pb.WAIT_FOR_END:
            return self._reader.settled(known)
        bounded = bool(request.token_stop or request.token_ranges or known.num_tokens)
        return bounded and self._reader.is_covered(known, self.select(known, request))

    def places(self, trace: Trace) -> list[Place]:
        """Return where further rows of a trace come from: its running requests, or its run."""
        running = [source.writer for source in trace.sources if self._agents.running(source)]
        return list(dict.fromkeys(running)) or [trace.key[0]]

    def look_again(self) -> float:
        """Return the seconds after which a waiting call checks again without a change."""
        return max(_LOOK_AGAIN_SECONDS, self._admission.waiting / _LOOKS_PER_SECOND)
