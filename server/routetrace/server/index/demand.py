"""Demand: writers whose rows or ends are awaited by readers.

Agents hold rows back until frames and chunks are full; while a reader waits, those whose rows or
ends it may be waiting for send early.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from routetrace.server.index.traces.sources import WriterKey
from routetrace.v1 import routetrace_pb2 as pb

#: Seconds after which a demand that has ended is withdrawn: waiting reads often follow each other.
CALM_SECONDS = 2.0

#: A writer; or a run, for a trace that may begin at any of its writers.
Place: TypeAlias = WriterKey | str


class Demand:
    """Waiting reads by the place that their rows come from.

    All calls belong to the event loop's thread.
    """

    def __init__(self) -> None:
        self._waiting: Counter[tuple[Place, int]] = Counter()
        # By writer: the callback of its open stream, and the last demand that it got.
        self._streams: dict[WriterKey, tuple[Callable[[int], object], int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def at(self, writer: WriterKey) -> int:
        """Return the demand for rows of a writer, a pb.Awaited."""
        for awaited in (pb.AWAITED_ROWS, pb.AWAITED_ENDS):
            if self._waiting[writer, awaited] or self._waiting[writer.run, awaited]:
                return int(awaited)
        return int(pb.AWAITED_NOTHING)

    @contextlib.contextmanager
    def waiting(self, places: Iterable[Place], awaited: int) -> Iterator[None]:
        """Count a read that waits for `awaited`, a pb.Awaited, from any of these places."""
        keys = [(place, awaited) for place in places]
        fresh = [place for place, _ in keys if not self._waiting[place, awaited]]
        self._waiting.update(keys)
        for place in fresh:
            self._raise(place)
        try:
            yield
        finally:
            self._waiting.subtract(keys)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(CALM_SECONDS, self._calm)

    @contextlib.contextmanager
    def stream(self, writer: WriterKey, changed: Callable[[int], object]) -> Iterator[int]:
        """Call `changed` with each new demand for a writer; yields the one at the start."""
        awaited = self.at(writer)
        self._streams[writer] = changed, awaited
        try:
            yield awaited
        finally:
            if writer in self._streams and self._streams[writer][0] is changed:
                del self._streams[writer]

    def _raise(self, place: Place) -> None:
        """Pass a higher demand on at once."""
        if isinstance(place, WriterKey):
            writers = [place] if place in self._streams else []
        else:
            writers = [writer for writer in self._streams if writer.run == place]
        for writer in writers:
            if self.at(writer) > self._streams[writer][1]:
                self._pass_on(writer)

    def _calm(self) -> None:
        """Pass lower demands on."""
        self._timer = None
        self._waiting = +self._waiting  # without zeros
        for writer, (_, awaited) in list(self._streams.items()):
            if self.at(writer) != awaited:
                self._pass_on(writer)

    def _pass_on(self, writer: WriterKey) -> None:
        changed, awaited = self._streams[writer][0], self.at(writer)
        self._streams[writer] = changed, awaited
        changed(awaited)
