"""Look-up of traces, and the wait until one meets what a read asks for."""

from __future__ import annotations

from time import monotonic

from routetrace.common.errors import NotFound
from routetrace.server.access.admission import Admission
from routetrace.server.access.control import Access
from routetrace.server.access.partition import Partition
from routetrace.server.common.rpc import Context
from routetrace.server.index.agents import Agents
from routetrace.server.index.demand import Demand, Place
from routetrace.server.index.journal import Journal
from routetrace.server.index.traces.trace import Trace
from routetrace.server.read.checks import Checks
from routetrace.server.rows.reader import Reader
from routetrace.server.rows.served import Known
from routetrace.server.rows.view import Selection
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
        journal: Journal,
        partition: Partition,
        reader: Reader,
    ) -> None:
        self._access = access
        self._admission = admission
        self._agents = agents
        self._checks = checks
        self._demand = demand
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

    def look_up(self, request: pb.GetTraceRequest, context: Context) -> Known:
        """Return the requested trace as it is now.

        Raises:
            NotFound: if there is no such trace or incarnation, or run; runs that the caller may
                read are named.
        """
        run, trace_id = request.run, request.trace_id
        try:
            return self._reader.find(run, trace_id, request.incarnation, request.prefix_rows)
        except NotFound as error:
            runs = self._state.runs()
            if error.field == "trace_id" and self._state.tombstones.fate((run, trace_id)):
                named = self._access.may_read(context, run)
                raise self._reader.not_found(run, trace_id, named=named) from None
            if run in runs:
                raise
            known = self._access.covered(context, runs)[:_MAX_NAMED_RUNS]
            names = ", ".join(n if n.isprintable() else repr(n) for n in known) or "none yet"
            if self._partition.count > 1:
                names += " (of its worker; GetServerInfo has those of the server)"
            text = f"no run {run!r}; runs: {names}"
            raise NotFound(text, field="run", value=run, expected=f"one of {names}") from None

    def met(self, request: pb.GetTraceRequest, context: Context) -> Known | None:
        """Return the requested trace if it meets `wait_for` now; None: it is to be waited for."""
        try:
            known = self.look_up(request, context)
        except NotFound:
            if request.wait_for == pb.WAIT_FOR_UNSPECIFIED:
                raise
            return None
        return known if self._is_met(known, request) else None

    async def find(self, request: pb.GetTraceRequest, context: Context, owner: str) -> Known:
        """Wait until the requested trace meets `wait_for`; return it. The deadline bounds it."""
        while True:
            places: list[Place] = [request.run]
            awaited = pb.AWAITED_ENDS
            try:
                known = self.look_up(request, context)
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
            key = (request.run, request.trace_id)
            with self._demand.waiting(places, awaited):
                await self._journal.changes.wait(key, self.look_again())
            await self._admission.pace.step(owner)
            self._checks.call(context, "read", request.run)  # a token may be taken back meanwhile

    async def find_to_follow(
        self, request: pb.GetTraceRequest, context: Context, owner: str
    ) -> Known:
        """Wait for the requested trace until `wait_ms` have passed; return it."""
        until = monotonic() + request.wait_ms / 1000
        while True:
            try:
                return self.look_up(request, context)
            except NotFound:
                left = until - monotonic()
                if left <= 0:
                    raise
            self._checks.ready()
            key = (request.run, request.trace_id)
            with self._demand.waiting([request.run], pb.AWAITED_ENDS):
                await self._journal.changes.wait(key, min(left, self.look_again()))
            await self._admission.pace.step(owner)
            self._checks.call(context, "read", request.run)  # a token may be taken back meanwhile

    def _is_met(self, known: Known, request: pb.GetTraceRequest) -> bool:
        if request.wait_for == pb.WAIT_FOR_UNSPECIFIED:
            return True
        if 0 < known.num_tokens < request.num_tokens:  # a later turn has not arrived
            return False
        if request.wait_for == pb.WAIT_FOR_END:
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
