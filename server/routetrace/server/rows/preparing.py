"""Traces of many engine requests, prepared step by step before they are looked up.

To join the requests of one trace, and to compare one of them with all others, takes milliseconds
for thousands of requests. Other tasks go on between two steps, and may change the trace: the join
is made anew then, a few times; after that, the look-up itself makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeAlias

from routetrace.server.index.traces.trace import Trace
from routetrace.server.rows.reader import MAX_LOOKED_AT, Reader
from routetrace.v1 import routetrace_pb2 as pb

Steps: TypeAlias = Generator[None, None, None]

#: Maximum times that a trace is prepared anew, as it has changed.
_MOST_TRIES = 3


def prepare(
    reader: Reader,
    trace: Trace,
    number: int = 0,
    prefix_rows: int = pb.PREFIX_ROWS_NEVER,
    nonce: int = 0,
) -> Steps:
    """Prepare `Reader.find`, with its arguments."""

    def relate() -> Steps:
        join = trace.join
        named = join.number_of(nonce) if nonce else number
        for each in [named] if named in join.numbers else newest_first(join.standing):
            yield from join.relate(each)
            if not trace.has(join):
                return
            incarnation = join.incarnation(each)
            if reader.known(trace, incarnation, prefix_rows).answers:
                return
            yield
            if not trace.has(join):
                return

    return _tried(trace, relate)


def prepare_standing(trace: Trace) -> Steps:
    """Prepare `Reader.standing`."""

    def relate() -> Steps:
        join = trace.join
        for each in newest_first(join.standing):
            yield from join.relate(each)

    return _tried(trace, relate)


def prepare_end(reader: Reader, trace: Trace) -> Steps:
    """Prepare `Reader.ended` and `Reader.retirable`."""

    def relate() -> Steps:
        join = trace.join
        standing = join.standing
        for each in standing if len(standing) <= MAX_LOOKED_AT else ():
            yield from join.relate(each)

    if reader.may_grow(trace):
        yield from _tried(trace, relate)


def prepared(traces: Iterable[Trace], prepare: Callable[[Trace], Steps]) -> Iterator[Trace | None]:
    """Yield each trace once it is prepared, and None at each step before that."""
    for trace in traces:
        for _ in prepare(trace):
            yield None
        yield trace


def newest_first(standing: Sequence[int]) -> Sequence[int]:
    """Return the incarnations that are looked at, of those that stand."""
    return standing[: -MAX_LOOKED_AT - 1 : -1]


def _tried(trace: Trace, relate: Callable[[], Steps]) -> Steps:
    if not trace.has_many_sources:
        return
    for _ in range(_MOST_TRIES):
        yield from trace.join_in_steps()
        if trace.is_joined:
            yield from relate()
            if trace.is_joined:
                return
