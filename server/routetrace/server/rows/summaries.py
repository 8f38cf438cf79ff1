"""Summaries of traces: worked out once after a change, kept with the trace.

The view of a trace takes about 0.2 ms, and lists of many traces, the metrics and watchers each ask
for the same few facts of all of them. A summary depends on

* the reports of its own trace, which `Trace.changes` counts;
* until its requests have ended: which of them may grow, and whether the last change is recent.

It does not depend on other traces, as lists do not count rows that stand in. It does not contain
the lease.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np

from routetrace.codec.records import FinishReason
from routetrace.common.layout import ModelLayout
from routetrace.server.index.agents import Agents
from routetrace.server.index.traces.lineage import MAX_TRACE_LABELS
from routetrace.server.index.traces.refs import ROW_BITS
from routetrace.server.index.traces.spans import SpanList
from routetrace.server.index.traces.trace import FINAL, Summary, Trace
from routetrace.server.rows.preparing import Steps, prepare
from routetrace.server.rows.reader import Reader, finish_reason_of, range_of
from routetrace.v1 import routetrace_pb2 as pb


class Told(NamedTuple):
    """Summary of a trace, as watchers get it."""

    message: pb.TraceSummary
    final: bool
    """Whether all of it but the lease stays until the trace changes."""


class Summaries:
    """Summaries of traces, as they are at the moment of the call."""

    def __init__(self, reader: Reader, agents: Agents) -> None:
        self._reader = reader
        self._agents = agents

    def of(self, trace: Trace) -> Summary:
        """Return the summary of a trace that has sources."""
        kept = trace.summary
        if kept is None or not self._holds(kept, trace):
            kept = trace.summary = self._worked_out(trace, listed=False)
        return kept

    def listed(self, trace: Trace) -> Summary:
        """Return the summary of a trace with its entry in lists."""
        kept = self.of(trace)
        if not kept.entry:
            kept = trace.summary = self._worked_out(trace)
        return kept

    def prepare(self, trace: Trace) -> Steps:
        """Work out the summary of a trace of many requests step by step."""
        kept = trace.summary
        if trace.has_many_sources and not (kept and kept.entry and self._holds(kept, trace)):
            with trace.joined_for_now():
                yield from prepare(self._reader, trace)
                if trace.sources and trace.is_joined:
                    self.listed(trace)

    def at_hand(self, trace: Trace) -> Summary | None:
        """Return the summary of a trace; None if it has changed too often to be prepared."""
        if trace.is_joined or (trace.summary and self._holds(trace.summary, trace)):
            return self.of(trace)
        return None

    def entry(self, trace: Trace) -> bytes:
        """Return the entry of a trace in lists, a serialized pb.TraceInfo."""
        kept = self.listed(trace)
        own = pb.TraceInfo(trace_id=trace.key[1], expires_ms=int(trace.expires * 1000))
        return b"".join((kept.shared, own.SerializeToString(), kept.entry))

    def told(self, trace: Trace) -> Told:
        """Return the summary of a trace as watchers get it."""
        kept = self.of(trace)
        if not kept.told:
            runs = kept.state == pb.TRACE_STATE_RUNNING
            message = _reported(trace, kept) if runs else _told(kept)
            kept = trace.summary = kept._replace(told=message.SerializeToString())
        message = pb.TraceSummary.FromString(kept.told)
        message.trace_id = trace.key[1]
        message.expires_ms = int(trace.expires * 1000)
        return Told(message, kept.growing == FINAL)

    # ------------------------------------------------------------------ validity

    def _holds(self, kept: Summary, trace: Trace) -> bool:
        """Whether a trace that is worked out anew would have the same summary."""
        return kept.changes == trace.changes and (
            kept.growing == FINAL or kept.growing == self._growing(trace)
        )

    def _growing(self, trace: Trace) -> int:
        """Return what the summary of a trace depends on beside its reports: `Summary.growing`."""
        bits = int(self._reader.is_recent(trace))
        for index, source in enumerate(trace.sources, 1):
            bits |= self._agents.running(source) << index
        return bits

    def _surely_runs(self, trace: Trace) -> bool:
        """Whether all sources are of one request that runs, so that its state needs no view."""
        sources = trace.sources
        if not all(map(self._agents.running, sources)):
            return False
        return len({s.name for s in sources}) == 1 and len({s.writer for s in sources}) == len(
            sources
        )

    # ------------------------------------------------------------------ working out

    def _worked_out(self, trace: Trace, *, listed: bool = True) -> Summary:
        """Return the summary of a trace, without its entry if it surely runs and is not listed."""
        rows = _all_rows(trace)
        # Before the view: what changes meanwhile makes it obsolete.
        growing = FINAL if rows and trace.sources[0].ended else self._growing(trace)
        if not listed and growing > 1 and self._surely_runs(trace):
            return Summary(trace.changes, growing, pb.TRACE_STATE_RUNNING)
        info, layout = self._plain(trace, rows, growing) if rows else self._viewed(trace)
        runs = info.state == pb.TRACE_STATE_RUNNING
        ended = info.state == pb.TRACE_STATE_COMPLETE or all(s.ended for s in trace.sources)
        if ended and not runs:  # what is complete stays so, and what has ended does not run again
            growing, trace.packed = FINAL, None  # so that the next snapshot has the entry
        return Summary.of(trace.changes, growing, trace.key[0], info, layout)

    def _viewed(self, trace: Trace) -> tuple[pb.TraceInfo, ModelLayout]:
        """Return the entry of a trace from its view, and its layout."""
        with trace.joined_for_now():
            known = self._reader.find(*trace.key, trace=trace)
            info = self._reader.describe(known, digests=False)
        info.missing_cells.extend(self._reader.missing_cells(info.state, known))
        for field in ("run", "trace_id", "layout", "expires_ms"):
            info.ClearField(field)
        return info, known.layout

    def _plain(
        self, trace: Trace, rows: list[SpanList], growing: int
    ) -> tuple[pb.TraceInfo, ModelLayout]:
        """Return the same of a trace with `_all_rows`, in a tenth of the time.

        Most traces are of this kind.
        """
        sources = trace.sources
        first = sources[0]
        frames = {ref >> ROW_BITS for spans in rows for ref in spans.refs}
        unknown, lowest, highest = range_of({v for spans in rows for v in spans.weight_versions})
        labels = {key: text for s in sources for key, text in s.labels.items()}
        state = pb.TRACE_STATE_RUNNING if growing > 1 else pb.TRACE_STATE_INCOMPLETE
        info = pb.TraceInfo(
            state=pb.TRACE_STATE_COMPLETE if first.ended else state,
            num_tokens=first.num_tokens,
            prompt_len=max([s.prompt_len for s in sources]),
            num_rows=rows[0].end,
            labels=dict(islice(labels.items(), MAX_TRACE_LABELS)) or None,
            incarnation=trace.num_dropped + 1,
            num_incarnations=1,
            finish_reason=finish_reason_of(sources),
            engine_ids=[first.writer.engine_id],
            num_attempts=1,
            min_weight_version=lowest or 0,
            max_weight_version=highest or 0,
            no_weight_versions=lowest is None,
            unknown_weight_versions=unknown,
            nonce=max([s.nonce for s in sources]),
            created_ms=int(trace.created * 1000),
            updated_ms=int(trace.updated * 1000),
            stored_bytes=sum([self._reader.frames.range_of(frame)[1] for frame in frames]),
        )
        return info, first.layout.select(first.layout.moe_layer_ids)


def _all_rows(trace: Trace) -> list[SpanList] | None:
    """Return the rows of a trace by source, if it is of one request without a missing cell.

    Its shards, if there are several, have different layers. May be None for such a trace.
    """
    first, *others = trace.sources
    rows: list[SpanList] = []
    for source in trace.sources:
        if len(source.attempts) > 1 or source.finish_reason == FinishReason.HANDOFF:
            return None
        spans = source.attempts[0]
        if source.tentative:
            spans = SpanList(spans.tobytes())
            spans.truncate(source.confirmed(0))
        if not spans.is_whole(source.num_tokens - 1 if source.ended else source.end):
            return None
        rows.append(spans)
    layers = first.layout.layer_ids
    if others:
        if len({source.writer for source in trace.sources}) < len(trace.sources):
            return None
        layers = tuple(sorted(i for source in trace.sources for i in source.layout.layer_ids))
    if layers != first.layout.moe_layer_ids:
        return None
    for other, spans in zip(others, rows[1:], strict=True):
        if (
            other.name != first.name
            or (other.ended, other.num_tokens) != (first.ended, first.num_tokens)
            or spans.end != rows[0].end
            or not np.array_equal(other.digests, first.digests)  # those of the same tokens
        ):
            return None
    return rows


def _told(kept: Summary) -> pb.TraceSummary:
    """Return what watchers get of a trace that has ended, from its entry in lists."""
    info = pb.TraceInfo.FromString(kept.entry)
    message = pb.TraceSummary(
        state=info.state,
        num_tokens=info.num_tokens,
        num_rows=info.num_rows,
        num_cells=kept.cells,
        missing_cells=info.missing_cells,
        engine_ids=info.engine_ids,
        labels=info.labels or None,
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
    return message


def _reported(trace: Trace, kept: Summary) -> pb.TraceSummary:
    """Return what watchers get of a trace that runs, from its reports as they are."""
    sources = trace.sources
    # Without an entry, it is of one request.
    info = pb.TraceInfo.FromString(kept.entry)
    own = {key: text for s in sources for key, text in s.labels.items()}
    labels = info.labels if kept.entry else dict(islice(own.items(), MAX_TRACE_LABELS))
    unknown, lowest, highest = range_of(
        {v for s in sources for a in s.attempts for v in a.weight_versions}
    )
    return pb.TraceSummary(
        state=pb.TRACE_STATE_RUNNING,
        num_rows=max(s.end for s in sources),
        engine_ids=sorted({s.writer.engine_id for s in sources if any(map(len, s.attempts))}),
        labels=labels or None,
        min_weight_version=lowest,
        max_weight_version=highest,
        unknown_weight_versions=unknown,
        num_incarnations=info.num_incarnations or 1,
        created_ms=int(trace.created * 1000),
        updated_ms=int(trace.updated * 1000),
    )
