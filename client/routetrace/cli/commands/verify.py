"""`routetrace verify`: checks of whole traces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count, tee
from typing import Annotated, NamedTuple

import numpy as np
import typer

from routetrace.cli.arguments import AsJson, Ids
from routetrace.cli.connection import Connection
from routetrace.cli.errors import describe
from routetrace.cli.output import note, progress, size, write_json, write_table
from routetrace.client import RouteClient, Trace, TraceState
from routetrace.common.errors import NotFound, RouteTraceError, counted

# Findings of a trace that is not there, by the reason.
_FATES = {
    "deleted": "deleted",
    "retired": "retired",
    "expired": "expired",
    "quota": "evicted",
    "capacity": "evicted",
    "memory": "evicted",
}
_NOT_FOUND = "not found"
_ABSENT = (*_FATES.values(), _NOT_FOUND)


class Finding(NamedTuple):
    """One defect of a trace."""

    wrong: str
    """Kind: "corrupt", "missing", "unknown end", "rows", "digests", "weights", or an error name;
    of a trace that is not there "deleted", "retired", "expired", "evicted" or "not found"."""
    details: str


@dataclass
class Checked:
    """Amount read of a trace, or of several, and defects."""

    findings: list[Finding] = field(default_factory=list)
    incarnations: int = 0
    running: int = 0
    cells: int = 0
    bytes: int = 0

    @property
    def absent(self) -> bool:
        """Whether the trace is not there."""
        return any(finding.wrong in _ABSENT for finding in self.findings)

    def add(self, other: Checked) -> None:
        """Add the amounts of another check."""
        for name in ("incarnations", "running", "cells", "bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def verify(
    connection: Connection,
    ids: Ids = None,
    everything: Annotated[bool, typer.Option("--all", help="All traces of the run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read traces whole and check checksums, ids, coverage and digests.

    Exits with 1 if anything is wrong, permanently missing, or not there. Rows that a running trace
    lacks are none of these.
    """
    if bool(ids) == everything:
        raise typer.BadParameter("expected trace ids, or --all")
    total, traces, defective, absent = Checked(), 0, 0, 0
    rows: list[tuple[str, str, str]] = []
    with connection.client() as client:
        for name, checked in _verified(client, ids):
            total.add(checked)
            traces += 1
            absent += checked.absent
            defective += bool(checked.findings) and not checked.absent
            if as_json:
                findings = [finding._asdict() for finding in checked.findings]
                write_json({"trace_id": name, **asdict(checked), "findings": findings})
            else:
                rows += [(name, *finding) for finding in checked.findings]
        if not traces:
            connection.known_run(client)
    if rows:
        write_table(("trace", "wrong", "details"), rows)
    note(
        f"traces {traces - absent:,}, incarnations {total.incarnations:,}, "
        f"running {total.running:,}, cells {total.cells:,}, stored {size(total.bytes)}; "
        f"defective traces: {defective:,}" + (f", not there: {absent:,}" if absent else "")
    )
    if defective or absent:
        raise typer.Exit(1)


def _verified(client: RouteClient, ids: list[str] | None) -> Iterator[tuple[str, Checked]]:
    """Read and check every incarnation of traces; yield the id and the result of each trace.

    The client itself checks checksums and completeness of each read.

    Args:
        client: client of the run.
        ids: trace ids; None for all traces of the run, where deleted ones are skipped.
    """
    names = (stat.trace_id for stat in client.find()) if ids is None else iter(ids)
    requested, listed = tee(names)
    answers = client.get_many(requested, missing="mask", errors="return")
    with progress("verify", None if ids is None else len(ids)) as done:
        for name, answer in zip(listed, answers, strict=True):
            if ids is None and isinstance(answer, NotFound):
                continue  # expired or deleted since it was listed
            if isinstance(answer, NotFound) and answer.kind == "run":
                raise answer
            checked = Checked()
            _check(checked, answer)
            if isinstance(answer, Trace) and answer.num_incarnations > 1:
                for other in _others(client, answer):
                    _check(checked, other)
            yield name, checked
            done()


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


def _check(checked: Checked, answer: Trace | RouteTraceError) -> None:
    if isinstance(answer, NotFound):
        fate = _FATES.get(answer.reason, _NOT_FOUND)
        checked.findings.append(Finding(fate, describe(answer)))
        return
    if isinstance(answer, RouteTraceError):
        checked.findings.append(Finding(type(answer).__name__.lower(), describe(answer)))
        return
    checked.incarnations += 1
    checked.running += answer.state is TraceState.RUNNING
    checked.cells += answer.valid.size
    checked.bytes += answer.stored_bytes
    more = f"incarnation {answer.incarnation}: " if answer.num_incarnations > 1 else ""
    checked.findings += (Finding(wrong, more + details) for wrong, details in _wrong_with(answer))


def _wrong_with(trace: Trace) -> Iterator[tuple[str, str]]:
    running = trace.state is TraceState.RUNNING
    try:
        trace.validate()
    except RouteTraceError as error:
        yield "corrupt", describe(error)
    # Only "not_yet" of a running request is temporary.
    lost = [m for m in trace.missing if not (running and m.reason == "not_yet")]
    if lost:
        more = f"; {counted(len(lost) - 3, 'more range')}" if len(lost) > 3 else ""
        yield "missing", "; ".join(map(str, lost[:3])) + more
    if not running and not trace.num_tokens:
        yield "unknown end", f"end not reported after {counted(trace.num_rows, 'row')}"
    if not running and trace.num_tokens and trace.num_rows != trace.num_tokens - 1:
        yield "rows", f"{trace.num_rows} rows of {trace.num_tokens} tokens"
    at = trace.token_digests["position"]
    if at.size and (np.diff(at.astype(np.int64)).min(initial=1) < 1 or at[-1] > _max_tokens(trace)):
        yield "digests", f"positions {at[:4].tolist()} .. {at[-1]} of {_max_tokens(trace)} tokens"
    versions = {version for _, _, version in trace.weight_versions if version is not None}
    low, high = trace.min_weight_version, trace.max_weight_version
    within = low is not None and high is not None and all(low <= v <= high for v in versions)
    if versions and not within:
        yield (
            "weights",
            f"rows of versions {sorted(versions)}, expected {low} to {high}",
        )


def _max_tokens(trace: Trace) -> int:
    return trace.num_tokens or trace.num_rows + 1
