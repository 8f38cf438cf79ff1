"""Compares what is served and stored with what was said and acknowledged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from faults.script import RUN, Said, Script
from routetrace.client import RouteClient, Trace, TraceState
from routetrace.common.errors import NotFound, RouteTraceError
from routetrace.server.index.records.record import decode_record
from routetrace.server.store.disk.store import DiskStore


class Violation(AssertionError):
    """A promise that was not kept."""


def check(holds: object, message: str) -> None:
    """Raise Violation unless it holds."""
    if not holds:
        raise Violation(message)


@dataclass
class Known:
    """Progress of a writer, by its own account."""

    acked: int = 0
    """Chunks 1 .. acked are acknowledged."""
    sent: int = 0
    """Chunks above were never sent."""
    deleted: set[int] = field(default_factory=set)
    """Requests whose deletion was acknowledged."""
    deleting: set[int] = field(default_factory=set)
    """Requests whose deletion was asked for."""


class Step(NamedTuple):
    """Progress of a writer, with its time."""

    at: float
    """Of `time.monotonic`: before what is sent or asked for, behind what is answered."""
    what: str
    """Field of `Known`."""
    number: int


def known_at(steps: Iterable[Step], at: float) -> Known:
    """Return how far a writer was at a time."""
    known = Known()
    for step in steps:
        if step.at > at:
            continue
        value = getattr(known, step.what)
        if isinstance(value, set):
            value.add(step.number)
        else:
            setattr(known, step.what, max(value, step.number))
    return known


@dataclass
class Served:
    """Counts of a comparison; `+=` adds up."""

    traces: int = 0
    rows: int = 0
    complete: int = 0
    gone: int = 0

    def __iadd__(self, other: Served) -> Served:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


def compare(
    client: RouteClient,
    script: Script,
    known: Known,
    *,
    evicted: bool = False,
    prefetch: int = 16,
) -> Served:
    """Read every trace of a writer: acknowledged is served, served was sent, and all of it exact.

    Args:
        client: whom to ask.
        script: what was said.
        known: how far the writer got.
        evicted: whether finished traces may be gone.
        prefetch: reads at a time; 0: one after the other, in this thread.

    Raises:
        Violation: naming the trace.
    """
    lower, upper = script.said(known.acked), script.said(known.sent)
    served = Served()
    names = map(script.trace_id, upper)
    answers: Iterable[Trace | RouteTraceError] = (
        client.get_many(names, concurrency=prefetch, errors="return", missing="mask")
        if prefetch
        else (_get(client, name) for name in names)
    )
    for request, answer in zip(upper, answers, strict=True):
        name = script.trace_id(request)
        at_least, at_most = lower.get(request, Said()), upper[request]
        served.traces += 1
        if isinstance(answer, NotFound):
            may_go = script.is_short(request) or request in known.deleting
            may_go |= evicted and at_most.ended
            check(may_go or not at_least.rows, f"{name}: acknowledged, and not there")
            served.gone += 1
            continue
        if isinstance(answer, RouteTraceError):
            raise Violation(f"{name}: {answer!r}")
        check(request not in known.deleted, f"{name}: deleted, and there again")
        _compare_one(name, answer, script.rows(request), at_least, at_most)
        served.rows += len(answer)
        served.complete += answer.state is TraceState.COMPLETE
    return served


def _get(client: RouteClient, name: str) -> Trace | RouteTraceError:
    try:
        return client.get(name, missing="mask")
    except RouteTraceError as error:
        return error


def _compare_one(name: str, trace: Trace, rows: np.ndarray, at_least: Said, at_most: Said) -> None:
    n = len(trace)
    check(trace.num_incarnations == 1, f"{name}: {trace.num_incarnations} incarnations: doubled")
    check(
        at_least.rows <= n <= at_most.rows,
        f"{name}: {n} rows, acknowledged {at_least.rows}, sent {at_most.rows}",
    )
    check(trace.valid.all(), f"{name}: holes: {'; '.join(map(str, trace.missing))}")
    wrong = (trace.topk_ids != rows[:n]).any(axis=(1, 2))
    check(not wrong.any(), f"{name}: row {int(wrong.argmax())} of {n} is another")
    if trace.num_tokens:
        check(at_most.ended and n == len(rows), f"{name}: {trace.num_tokens} tokens with {n} rows")
        check(trace.state is TraceState.COMPLETE, f"{name}: all there, and {trace.state.value}")
    else:
        check(not at_least.ended, f"{name}: its acknowledged end is lost")
        check(trace.state is not TraceState.COMPLETE, f"{name}: complete without an end")


def audit(data_dir: Path, *, failed: bool = False) -> int:
    """Walk through the files of a server that has ended: each chunk is there once, in its order.

    Args:
        data_dir: its data.
        failed: whether commits have failed. What was queued behind such a one may be stored without
            it, and is then no part of anything: it comes again behind it.

    Returns:
        Chunks whose headers no snapshot covers.

    Raises:
        Violation: if one is there twice, or not behind the one before it.
    """
    store = DiskStore(data_dir, capacity_bytes=1 << 34)
    try:
        last: dict[tuple[str | int, ...], int] = {}
        chunks = 0
        for number, record in store.headers():
            change = decode_record(record)
            if not change.HasField("chunk"):
                continue
            chunk, writer = change.chunk, change.chunk.writer
            chunks += 1
            # Shards of an engine may well have the same epoch.
            key = writer.run, writer.engine_id, writer.shard, chunk.epoch
            sequence = chunk.sequence
            before = last.get(key, sequence - 1)
            check(
                failed or sequence == before + 1,
                f"record {number} is chunk {sequence} of {key}, behind {before}",
            )
            if sequence == before + 1:
                last[key] = sequence
        check(not store.stats().damaged_records, "records are damaged")
    finally:
        store.close()
    return chunks


def temporary() -> TemporaryDirectory[str]:
    """A directory for one run."""
    return TemporaryDirectory(prefix="routetrace-faults-", ignore_cleanup_errors=True)


def read_all(client: RouteClient, pairs: list[tuple[Script, Known]], **options: bool) -> Served:
    """`compare` of several writers."""
    served = Served()
    for script, known in pairs:
        served += compare(client, script, known, **options)
    return served


__all__ = [
    "RUN", "Known", "Served", "Step", "Violation", "audit", "check", "compare", "known_at",
    "read_all", "temporary",
]  # fmt: skip
