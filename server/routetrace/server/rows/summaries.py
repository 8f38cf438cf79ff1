"""Summaries of traces: worked out once after a change, kept with the trace.

The view of a trace takes about 0.1 ms, and a list of many traces, the metrics and watchers each ask
for the same few facts of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np

from routetrace.codec.records import FinishReason
from routetrace.server.index.agents import Agents
from routetrace.server.index.traces.lineage import MAX_TRACE_LABELS
from routetrace.server.index.traces.refs import ROW_BITS
from routetrace.server.index.traces.trace import Summary, Trace
from routetrace.server.rows.preparing import Steps, prepare
from routetrace.server.rows.reader import Reader, range_of, reason_name
from routetrace.server.rows.served import Known
from routetrace.v1 import routetrace_pb2 as pb


class Summaries:
    """Summaries of traces, as they are at the moment of the call."""

    def __init__(self, reader: Reader, agents: Agents) -> None:
        self._reader = reader
        self._agents = agents

    def of(self, trace: Trace) -> Summary:
        """Return the summary of a trace that has sources."""
        kept = trace.summary
        if kept is None or not self._holds(kept, trace):
            kept = trace.summary = self._worked_out(trace)
        return kept

    def prepare(self, trace: Trace) -> Steps:
        """Work out step by step what the summary of a trace of many requests needs."""
        if trace.has_many_sources and not (trace.summary and self._holds(trace.summary, trace)):
            yield from prepare(self._reader, trace)

    def at_hand(self, trace: Trace) -> Summary | None:
        """Return the summary of a trace; None if it has changed too often to be prepared."""
        if trace.is_joined or (trace.summary and self._holds(trace.summary, trace)):
            return self.of(trace)
        return None

    def message(self, trace: Trace) -> pb.TraceSummary:
        """Return the summary of a trace as it is sent."""
        message = pb.TraceSummary.FromString(self.of(trace).message)
        message.expires_ms = int(trace.expires * 1000)
        return message

    # ------------------------------------------------------------------ validity

    def _holds(self, kept: Summary, trace: Trace) -> bool:
        """Whether a trace that is worked out anew would have the same summary."""
        if kept.changes != trace.changes:
            return False
        if kept.final:
            return True
        if kept.state == pb.TRACE_STATE_RUNNING:
            return self._surely_runs(trace)
        # The agent of a request without an end may come back.
        complete = kept.state == pb.TRACE_STATE_COMPLETE
        return complete or not any(map(self._agents.running, trace.sources))

    def _surely_runs(self, trace: Trace) -> bool:
        """Whether all sources are of one request that runs, so that its state needs no view."""
        sources = trace.sources
        name = sources[0].name
        return len({s.writer for s in sources}) == len(sources) and all(
            s.name == name and self._agents.running(s) for s in sources
        )

    # ------------------------------------------------------------------ working out

    def _worked_out(self, trace: Trace) -> Summary:
        if self._surely_runs(trace):
            return _running(trace, 1, _labels(trace))
        if _is_plain(trace):
            return self._plain(trace)
        known = self._reader.find(*trace.key, trace=trace)
        state = self._reader.state_of(known)
        standing = len(trace.join.standing)
        if state == pb.TRACE_STATE_RUNNING:
            return _running(trace, standing, known.incarnation.labels)
        missing = self._reader.missing_cells(state, known)
        cells = known.num_rows * len(known.layout.layer_ids)
        return Summary(
            trace.changes,
            state,
            cells,
            tuple((m.reason, m.cells) for m in missing),
            self._message(known, state, cells, missing),
            known.complete or _all_ended(trace),
        )

    def _plain(self, trace: Trace) -> Summary:
        """Return the summary of a complete trace of one request, in a fifth of the time of a view.

        Most traces qualify.
        """
        sources = trace.sources
        num_rows = sources[0].num_tokens - 1
        cells = num_rows * sum(len(source.layout.layer_ids) for source in sources)
        frames = {ref >> ROW_BITS for s in sources for ref in s.attempts[0].refs}
        versions = {v for s in sources for v in s.attempts[0].weight_versions}
        unknown, lowest, highest = range_of(versions)
        message = pb.TraceSummary(
            trace_id=trace.key[1],
            state=pb.TRACE_STATE_COMPLETE,
            num_tokens=num_rows + 1,
            num_rows=num_rows,
            num_cells=cells,
            engine_ids=sorted({source.writer.engine_id for source in sources}),
            labels=_labels(trace) or None,
            finish_reason=reason_name(max(source.finish_reason for source in sources)),
            num_incarnations=1,
            created_ms=int(trace.created * 1000),
            updated_ms=int(trace.updated * 1000),
            stored_bytes=sum(self._reader.frames.range_of(frame)[1] for frame in frames),
            min_weight_version=lowest,
            max_weight_version=highest,
            unknown_weight_versions=unknown,
        )
        data = message.SerializeToString()
        return Summary(trace.changes, pb.TRACE_STATE_COMPLETE, cells, (), data, final=True)

    def _message(
        self, known: Known, state: int, cells: int, missing: Sequence[pb.MissingCells]
    ) -> bytes:
        info = self._reader.describe(known, digests=False)
        message = pb.TraceSummary(
            trace_id=info.trace_id,
            state=state,  # type: ignore[arg-type]
            num_tokens=info.num_tokens,
            num_rows=info.num_rows,
            num_cells=cells,
            missing_cells=missing,
            engine_ids=info.engine_ids,
            labels=info.labels,
            finish_reason=info.finish_reason,
            num_incarnations=info.num_incarnations,
            created_ms=info.created_ms,
            updated_ms=info.updated_ms,
            stored_bytes=info.stored_bytes,
            unknown_weight_versions=info.unknown_weight_versions,
        )
        if not info.no_weight_versions:
            message.min_weight_version = info.min_weight_version
            message.max_weight_version = info.max_weight_version
        return message.SerializeToString()


def _is_plain(trace: Trace) -> bool:
    """Whether a trace is of one request that has ended, with all rows of its first attempt.

    Its shards, if there are several, have different layers. May be False for such a trace; its view
    then gives the same summary.
    """
    first, *others = trace.sources
    layers: list[int] = []
    for source in trace.sources:
        if (
            not source.num_tokens
            or source.finish_reason == FinishReason.HANDOFF
            or source.tentative
            or len(source.attempts) > 1
            or not source.attempts[0].is_whole(source.num_tokens - 1)
        ):
            return False
        layers += source.layout.layer_ids
    shards = {source.writer for source in trace.sources}
    if len(shards) < len(trace.sources) or sorted(layers) != [*first.layout.moe_layer_ids]:
        return False
    # Shards of one request have the same tokens.
    return all(
        other.name == first.name
        and other.num_tokens == first.num_tokens
        and np.array_equal(other.digests, first.digests)
        for other in others
    )


def _labels(trace: Trace) -> dict[str, str]:
    """Return the labels of a trace of one request."""
    labels = {key: text for s in trace.sources for key, text in s.labels.items()}
    return dict(islice(labels.items(), MAX_TRACE_LABELS))


def _all_ended(trace: Trace) -> bool:
    """Whether no source of a trace may grow, so that its agent does not matter."""
    return all(source.ended for source in trace.sources)


def _running(trace: Trace, num_incarnations: int, labels: Mapping[str, str]) -> Summary:
    """Return the summary of a trace that runs, from its reports as they are."""
    sources = trace.sources
    versions = {v for s in sources for a in s.attempts for v in a.weight_versions}
    unknown, lowest, highest = range_of(versions)
    message = pb.TraceSummary(
        trace_id=trace.key[1],
        state=pb.TRACE_STATE_RUNNING,
        num_rows=max(s.end for s in sources),
        engine_ids=sorted({s.writer.engine_id for s in sources if any(map(len, s.attempts))}),
        labels=labels or None,
        min_weight_version=lowest,
        max_weight_version=highest,
        unknown_weight_versions=unknown,
        num_incarnations=num_incarnations,
        created_ms=int(trace.created * 1000),
        updated_ms=int(trace.updated * 1000),
    )
    data = message.SerializeToString()
    return Summary(trace.changes, pb.TRACE_STATE_RUNNING, 0, (), data)
