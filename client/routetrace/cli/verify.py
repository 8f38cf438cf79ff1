"""Verification of whole traces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, tee
from typing import NamedTuple

import numpy as np

from routetrace.cli.output import describe, progress, size
from routetrace.client import RouteClient, Trace, TraceState
from routetrace.common.errors import NotFound, RouteTraceError


class Finding(NamedTuple):
    """One defect of a trace."""

    trace: str
    wrong: str
    """Kind: "corrupt", "missing", "unknown end", "rows", "digests", "weights", or an error name."""
    details: str


@dataclass
class Report:
    """Amount read, and defects."""

    findings: list[Finding] = field(default_factory=list)
    traces: int = 0
    incarnations: int = 0
    running: int = 0
    cells: int = 0
    bytes: int = 0

    @property
    def summary(self) -> str:
        """One-line summary."""
        bad = len({finding.trace for finding in self.findings})
        read = f"cells {self.cells:,}, stored {size(self.bytes)}"
        return (
            f"traces {self.traces:,}, incarnations {self.incarnations:,}, "
            f"running {self.running:,}, {read}; defective traces: {bad:,}"
        )


def verify(client: RouteClient, ids: Iterable[str] | None) -> Report:
    """Read and check every incarnation of traces.

    The client itself checks checksums and completeness of each read.

    Args:
        client: client of the run.
        ids: trace ids; None for all traces of the run, where deleted ones are skipped.
    """
    report = Report()
    total = None if ids is None else len(list(ids := list(ids)))
    names = (stat.trace_id for stat in client.find()) if ids is None else iter(ids)
    requested, listed = tee(names)
    answers = client.get_many(requested, missing="mask", errors="return")
    with progress("verify", total) as done:
        for name, answer in zip(listed, answers, strict=True):
            if ids is None and isinstance(answer, NotFound):
                continue  # expired or deleted since it was listed
            report.traces += 1
            _check(report, name, answer)
            if isinstance(answer, Trace) and answer.num_incarnations > 1:
                for other in _others(client, answer):
                    _check(report, name, other)
            done()
    return report


def _others(client: RouteClient, first: Trace) -> Iterator[Trace | RouteTraceError]:
    """Yield the other incarnations of a trace.

    Their numbers are arrival numbers of engine requests, some of which continue others; the trace
    may have dropped the lowest.
    """
    seen = {first.incarnation}
    for numbers in (count(first.incarnation + 1), range(first.incarnation - 1, 0, -1)):
        for number in numbers:
            if len(seen) >= first.num_incarnations:
                return
            try:
                incarnation = client.stat(first.trace_id, incarnation=number).incarnation
                if incarnation in seen:
                    continue
                seen.add(incarnation)
                yield client.get(first.trace_id, incarnation=incarnation, missing="mask")
            except NotFound:
                break
            except RouteTraceError as error:
                yield error


def _check(report: Report, name: str, answer: Trace | RouteTraceError) -> None:
    if isinstance(answer, RouteTraceError):
        report.findings.append(Finding(name, type(answer).__name__.lower(), describe(answer)))
        return
    report.incarnations += 1
    report.running += answer.state is TraceState.RUNNING
    report.cells += answer.valid.size
    report.bytes += answer.stored_bytes
    more = f"incarnation {answer.incarnation}: " if answer.num_incarnations > 1 else ""
    report.findings += (
        Finding(name, wrong, more + details) for wrong, details in _wrong_with(answer)
    )


def _wrong_with(trace: Trace) -> Iterator[tuple[str, str]]:
    running = trace.state is TraceState.RUNNING
    try:
        trace.validate()
    except RouteTraceError as error:
        yield "corrupt", describe(error)
    # Only "not_yet" of a running request is temporary.
    lost = [m for m in trace.missing if not (running and m.reason == "not_yet")]
    if lost:
        more = f"; {len(lost) - 3} more ranges" if len(lost) > 3 else ""
        yield "missing", "; ".join(map(str, lost[:3])) + more
    if not running and not trace.num_tokens:
        yield "unknown end", f"end not reported after {trace.num_rows} rows"
    if not running and trace.num_tokens and trace.num_rows != trace.num_tokens - 1:
        yield "rows", f"{trace.num_rows} rows of {trace.num_tokens} tokens"
    at = trace.token_digests["position"]
    if at.size and (np.diff(at.astype(np.int64)).min(initial=1) < 1 or at[-1] > _max_tokens(trace)):
        yield "digests", f"positions {at[:4].tolist()} .. {at[-1]} of {_max_tokens(trace)} tokens"
    versions = {version for _, _, version in trace.weight_versions}
    low, high = trace.min_weight_version, trace.max_weight_version
    within = low is not None and high is not None and all(low <= v <= high for v in versions)
    if versions and not within:
        yield (
            "weights",
            f"rows of versions {sorted(versions)}, expected {low} to {high}",
        )


def _max_tokens(trace: Trace) -> int:
    return trace.num_tokens or trace.num_rows + 1
