"""Reader of traces: look-up, state, missing cells, and the frames of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import chain

import numpy as np

from routetrace.codec.records import DIGEST, UNKNOWN_VERSION, FinishReason
from routetrace.common.errors import InvalidArgument, NotFound
from routetrace.server.common.metrics import Metrics
from routetrace.server.index.agents import Agents
from routetrace.server.index.journal import Clock
from routetrace.server.index.state import State
from routetrace.server.index.traces import refs
from routetrace.server.index.traces.lineage import Incarnation
from routetrace.server.index.traces.sources import Source
from routetrace.server.index.traces.spans import merge
from routetrace.server.index.traces.trace import Trace
from routetrace.server.rows.absence import no_incarnation, no_request, no_trace
from routetrace.server.rows.frames import Frames
from routetrace.server.rows.gaps import missing
from routetrace.server.rows.served import Known, Memory, Served, segments_of
from routetrace.server.rows.view import Segment, Selection, covers
from routetrace.server.store.interface import Store
from routetrace.v1 import routetrace_pb2 as pb

#: Maximum incarnations that are searched for a complete one, newest first.
MAX_LOOKED_AT = 64

#: Maximum ranges of positions in one read.
MAX_RANGES = 1024

#: Maximum token digests in one response: those of 16 million tokens.
MAX_DIGESTS = 1 << 18


class Reader:
    """Looks up and describes traces and fetches their rows; changes nothing."""

    def __init__(
        self,
        store: Store,
        state: State,
        agents: Agents,
        clock: Clock,
        metrics: Metrics,
        forbids_prefix_rows: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._forbids_prefix_rows = forbids_prefix_rows
        self.frames = Frames(store, state, metrics)
        """Frames of rows."""
        self._state = state
        self._agents = agents
        self._clock = clock
        self._memory = Memory(state)

    # ------------------------------------------------------------------ looking up

    def find(
        self,
        run: str,
        trace_id: str,
        number: int = 0,
        prefix_rows: int = pb.PREFIX_ROWS_NEVER,
        trace: Trace | None = None,
        nonce: int = 0,
    ) -> Known:
        """Return the view of one of a trace's incarnations.

        Args:
            run: namespace.
            trace_id: the trace.
            number: number of the incarnation; 0: the newest one that is complete and was not
                aborted, else the newest.
            prefix_rows: PrefixRows policy for rows of other traces.
            trace: the trace as all workers have it; None: as this worker has it.
            nonce: that of the last request of the incarnation, in place of its number; 0: none.

        Raises:
            NotFound: if there is no such trace, incarnation or request.
        """
        if trace is None:
            trace = self._state.traces.traces.get((run, trace_id))
        if trace is None or not trace.sources:
            raise self.not_found(run, trace_id)
        join = trace.join
        if nonce:
            number = join.number_of(nonce)
            if not number:
                raise no_request(trace, nonce)
        if number:
            if number not in join.numbers:
                raise no_incarnation(trace, number)
            return self.known(trace, join.incarnation(number), prefix_rows)
        views = self.standing(trace, prefix_rows)
        newest = next(views)  # the last request of a trace stands
        return next((known for known in chain([newest], views) if known.answers), newest)

    def standing(self, trace: Trace, prefix_rows: int = pb.PREFIX_ROWS_NEVER) -> Iterator[Known]:
        """Yield the views of a trace's incarnations, newest first, as they are at each step.

        At most the last 64.
        """
        for number in trace.join.standing[: -MAX_LOOKED_AT - 1 : -1]:
            join = trace.join
            if number in join.numbers:  # else it was dropped since the first step
                yield self.known(trace, join.incarnation(number), prefix_rows)

    def not_found(self, run: str, trace_id: str, *, named: bool = False) -> NotFound:
        """Return the error for a missing trace, with its deletion if known.

        Args:
            run: namespace.
            trace_id: the trace.
            named: whether the caller may see the name of the token that deleted it.
        """
        return no_trace(run, trace_id, self._state.tombstones.fate((run, trace_id)), named=named)

    def known(
        self,
        trace: Trace,
        incarnation: Incarnation,
        prefix_rows: int = pb.PREFIX_ROWS_NEVER,
    ) -> Known:
        """Return the view of an incarnation under a PrefixRows policy."""
        return self._memory.known(trace, incarnation, self.allowed(trace, prefix_rows))

    def allowed(self, trace: Trace, prefix_rows: int) -> int:
        """Return the PrefixRows policy that the run allows a reader."""
        if trace.held or self._forbids_prefix_rows(trace.key[0]):
            return pb.PREFIX_ROWS_NEVER
        if prefix_rows == pb.PREFIX_ROWS_ANY_VERSION:  # of a client of 0.8
            return pb.PREFIX_ROWS_ANY
        return prefix_rows or pb.PREFIX_ROWS_NEVER

    def state_of(self, known: Known) -> int:
        """Return the TraceState of an incarnation."""
        if known.complete:
            return pb.TRACE_STATE_COMPLETE
        recent = self.is_recent(known.trace)
        own = known.incarnation.request.sources
        running = any(self._agents.running(s) for s in own)
        if known.num_tokens:
            # A shard whose agent is slower may not have reported the request yet.
            held = {layer for s in own for layer in s.layout.layer_ids}
            late = not held.issuperset(known.layout.layer_ids)
            others = (s for request in known.incarnation.continued for s in request.sources)
            running = running or (recent and late) or any(map(self._agents.running, others))
        elif known.incarnation.request.handed_over:
            running = recent and known.incarnation.request.successor is None
        return pb.TRACE_STATE_RUNNING if running else pb.TRACE_STATE_INCOMPLETE

    def is_recent(self, trace: Trace) -> bool:
        """Whether an agent that is slower may not have reported a change of a trace yet."""
        return self._clock.now() - trace.updated <= self._agents.timeout

    def settled(self, known: Known) -> bool:
        """Whether an incarnation has ended and no awaited row can make it complete.

        After the end, only rows of external KV are awaited: the agent of the engine that computed
        them may be slower.
        """
        state = self.state_of(known)
        loaded = any(
            s.external and (s.received_by or len(s.digests))
            for s in known.incarnation.request.sources
        )
        awaited = loaded and known.num_tokens and self.is_recent(known.trace)
        if state != pb.TRACE_STATE_INCOMPLETE or not awaited:
            return state != pb.TRACE_STATE_RUNNING
        whole = self.select(known, 0, 0, ())
        missing = self.missing(state, known, whole, self.rows(known, whole))
        return any(m.reason != pb.MISSING_REASON_KV_UNKNOWN for m in missing)

    def may_grow(self, trace: Trace) -> bool:
        """Whether some incarnation of a trace may still grow; if not, `ended` needs no join."""
        return self.is_recent(trace) or any(map(self._agents.running, trace.sources))

    def ended(self, trace: Trace) -> bool:
        """Whether no incarnation of a trace may still grow, apart from rows of other traces."""
        if not self.may_grow(trace):
            return True
        join = trace.join
        if len(join.standing) > MAX_LOOKED_AT:  # too many to look at each: it is soon not recent
            return False
        return all(self.settled(self.known(trace, join.incarnation(n))) for n in join.standing)

    def retirable(self, trace: Trace, through: int) -> bool:
        """Whether a trace has ended and none of its rows has a newer weight version."""
        newer = any(
            version > through
            for source in trace.sources
            for spans in source.attempts
            for version in spans.weight_versions[-1:]
        )
        return not newer and self.ended(trace)

    def is_covered(self, known: Known, selection: Selection) -> bool:
        """Whether every selected cell is present."""
        if _is_whole(known, selection):
            return True
        return covers(known.sources, segments_of(self.rows(known, selection)), selection)

    def select(
        self,
        known: Known,
        token_start: int,
        token_stop: int,
        layer_ids: Sequence[int],
        policy: int = pb.READ_POLICY_AS_SAMPLED,
        weight_version: int | None = None,
        ranges: Sequence[tuple[int, int]] = (),
    ) -> Selection:
        """Return the checked selection of a read.

        Raises:
            InvalidArgument: if a layer is no MoE layer of the model, or positions lie outside of
                the rows of an ended trace.
        """
        layers, rows = known.layout.layer_ids, known.num_rows
        if weight_version == UNKNOWN_VERSION:
            raise InvalidArgument(
                field="weight_version", value=weight_version, expected="a known one: above -2**63"
            )
        if layer_ids:
            known.layout.columns(list(layer_ids))
            layers = tuple(sorted(set(layer_ids)))
        if ranges:
            _check_ranges(ranges, token_start or token_stop)
            token_start, token_stop = ranges[0][0], ranges[-1][1]
        stop = token_stop or max(rows, token_start)
        if stop < token_start:
            raise InvalidArgument(
                field="token_stop",
                value=token_stop,
                expected=f"at least token_start = {token_start}",
            )
        if known.num_tokens and stop > rows:
            field, value = (
                ("token_start", token_start) if token_start > rows else ("token_stop", stop)
            )
            raise InvalidArgument(
                field=field,
                value=value,
                expected=f"at most {rows}, the number of rows of {known.num_tokens} tokens",
            )
        return Selection(token_start, stop, layers, policy, weight_version, tuple(merge(ranges)))

    # ------------------------------------------------------------------ describing

    def describe(self, known: Known, *, digests: bool = True) -> pb.TraceInfo:
        """Return the TraceInfo of an incarnation, with its token digests if wanted."""
        if known.info is None:
            known.info = self._facts(known)
        info = pb.TraceInfo()
        info.CopyFrom(known.info)
        info.state = self.state_of(known)  # type: ignore[assignment]
        info.expires_ms = int(known.trace.expires * 1000)
        if digests:
            if known.digests is None:
                all_of_them = sorted(known.incarnation.request.digests.items())
                known.digests = np.array(all_of_them[:MAX_DIGESTS], DIGEST).tobytes()
            info.token_digests = known.digests
        return info

    def _facts(self, known: Known) -> pb.TraceInfo:
        """Return the fields that are constant until the trace changes."""
        trace, incarnation, request = known.trace, known.incarnation, known.incarnation.request
        engines = {s.writer.engine_id for s in request.sources}
        sources = set(known.rows["source"].tolist())
        engines.update(known.sources[source].writer.engine_id for source in sources)
        unknown, lowest, highest = range_of({*known.rows["weight_version"].tolist()})
        frames = set((known.rows["ref"] >> refs.ROW_BITS).tolist())
        return pb.TraceInfo(
            run=trace.key[0],
            trace_id=trace.key[1],
            num_tokens=known.num_tokens,
            prompt_len=request.prompt_len,
            num_rows=known.num_rows,
            layout=known.layout.to_proto(),
            labels=incarnation.labels or None,  # an empty mapping costs as much as a full one
            incarnation=request.number,
            num_incarnations=len(trace.join.standing),
            finish_reason=finish_reason_of(request.sources),
            engine_ids=sorted(engines),
            num_attempts=max(len(s.attempts) for s in request.sources),
            min_weight_version=lowest or 0,
            max_weight_version=highest or 0,
            no_weight_versions=lowest is None,
            unknown_weight_versions=unknown,
            nonce=request.nonce,
            created_ms=int(trace.created * 1000),
            updated_ms=int(trace.updated * 1000),
            stored_bytes=sum(self.frames.range_of(frame)[1] for frame in frames),
            prefix_trace_ids=known.given.trace_ids,
        )

    def missing(
        self, state: int, known: Known, selection: Selection, rows: Served
    ) -> list[pb.MissingRange]:
        """Return the selected cells without rows, with reasons."""
        if _is_whole(known, selection):
            return []
        sources = known.incarnation.request.sources
        if state == pb.TRACE_STATE_RUNNING:
            default = pb.MISSING_REASON_NOT_YET
        elif not all(s.ended or s.closed for s in sources):
            default = pb.MISSING_REASON_AGENT_LOST
        elif any(s.closed for s in sources):
            default = pb.MISSING_REASON_AGENT_CLOSED
        else:
            default = pb.MISSING_REASON_NOT_CAPTURED
        others: list[Segment] = []
        if selection.weight_version is not None:
            any_version = replace(selection, weight_version=None)
            others = segments_of(self.rows(known, any_version))
        segments = segments_of(rows)
        return missing(known.sources, known.incarnation, segments, others, selection, default)

    def missing_cells(self, state: int, known: Known) -> list[pb.MissingCells]:
        """Return the number of missing cells of all rows, by reason."""
        if known.complete:
            return []
        whole = self.select(known, 0, 0, ())
        rows = self.rows(known, whole)
        cells: Counter[int] = Counter()
        for m in self.missing(state, known, whole, rows):
            layers = len(m.layer_ids) or len(known.layout.layer_ids)
            cells[m.reason] += (m.stop - m.start) * layers
        return [
            pb.MissingCells(reason=reason, cells=n)  # type: ignore[arg-type]
            for reason, n in sorted(cells.items())
        ]

    def rows(self, known: Known, selection: Selection) -> Served:
        """Return the served rows: ascending records, no cell twice."""
        return self._memory.served(known, selection)


def _is_whole(known: Known, selection: Selection) -> bool:
    """Whether the selection lies within a complete incarnation; rows of `latest` are others."""
    return (
        known.complete
        and selection.policy != pb.READ_POLICY_LATEST
        and selection.weight_version is None
        and selection.stop <= known.num_rows
    )


def _check_ranges(ranges: Sequence[tuple[int, int]], also: int) -> None:
    if also:
        raise InvalidArgument(
            field="token_start, token_stop",
            value=also,
            expected="0, as token_ranges are given",
        )
    if len(ranges) > MAX_RANGES:
        raise InvalidArgument(
            field="token_ranges", value=f"{len(ranges)} ranges", expected=f"at most {MAX_RANGES}"
        )
    end = 0
    for start, stop in ranges:
        if not end <= start < stop:
            raise InvalidArgument(
                field="token_ranges",
                value=f"[{start}, {stop})",
                expected=f"ascending, disjoint ranges: start >= {end}, stop above it",
            )
        end = stop


def finish_reason_of(sources: Sequence[Source]) -> str:
    """Return how a request of such sources ended: a FinishReason by name, "closed", or ""."""
    reason = max(source.finish_reason for source in sources)
    closed = not reason and all(source.closed for source in sources)
    return "closed" if closed else FinishReason(reason).name.lower() if reason else ""


def range_of(versions: Set[int]) -> tuple[bool, int | None, int | None]:
    """Return whether some of weight versions are unknown, and the lowest and highest known one."""
    known = versions - {UNKNOWN_VERSION}
    return len(known) < len(versions), min(known, default=None), max(known, default=None)


def has_unknown_version(trace: Trace) -> bool:
    """Return whether a trace has rows of an unknown weight version."""
    return any(
        UNKNOWN_VERSION in spans.weight_versions[:1]
        for source in trace.sources
        for spans in source.attempts
    )
