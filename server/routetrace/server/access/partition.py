"""Partitions: the runs that one process serves, of several processes that share all runs.

A run lies in exactly one partition: all that joins rows, substitutes them, retires traces or counts
a quota looks at one run alone, so no answer needs two partitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import blake2b

from routetrace.common.errors import InvalidArgument, Moved


def place(run: str, count: int) -> int:
    """Return the partition of a run by rendezvous hashing: the one with the highest weight."""

    def weight(number: int) -> bytes:
        return blake2b(f"{number} {run}".encode(), digest_size=16).digest()

    return max(range(count), key=weight)


@dataclass(frozen=True)
class Partition:
    """One of the partitions of a server; by default the only one."""

    number: int = 0
    count: int = 1
    first_port: int = 0
    """Port of worker 0; those of the others follow."""
    pinned: Mapping[str, int] = field(default_factory=dict)
    """Partition of runs that do not go by the hash."""
    spread: tuple[str, ...] = ()
    """Names and patterns of runs that lie in all partitions, each engine in one."""

    def spreads(self, run: str) -> bool:
        """Whether a run lies in all partitions."""
        return self.count > 1 and any(fnmatchcase(run, pattern) for pattern in self.spread)

    def of(self, run: str, engine_id: str = "") -> int:
        """Return the partition of a run; of an engine's rows in a run that lies in all."""
        if self.count == 1:
            return 0
        if self.spreads(run):
            return place(f"{run}\n{engine_id}", self.count)
        at = self.pinned.get(run)
        return place(run, self.count) if at is None else at

    def check(self, run: str, engine_id: str = "") -> None:
        """Raise Moved unless a run, or an engine of a run in all partitions, lies in this one."""
        if not engine_id and self.spreads(run):
            return
        at = self.of(run, engine_id)
        if at != self.number:
            target = f":{self.first_port + at}"
            what = f"run {run!r}"
            if self.spreads(run):
                what = f"engine {engine_id!r} of {what}"
            raise Moved(
                f"worker {at} at port {target[1:]} of this server serves {what}: expected a "
                "client or agent that follows this, 0.8 or newer",
                field="run",
                value=run,
                expected=f"a run of worker {self.number}",
                target=target,
            )

    def moved(self, trace_id: str, worker: int, address: str = "") -> Moved:
        """Return the error for a read of a trace that another worker alone has rows of.

        Args:
            trace_id: the trace.
            worker: number of the worker.
            address: its host:port, if it is on another host.
        """
        target = address or f":{self.first_port + worker}"
        return Moved(
            f"worker {worker} at {target} has trace {trace_id!r}: expected a client that follows "
            "this, 0.8 or newer",
            field="trace_id",
            value=trace_id,
            expected=f"a trace of worker {self.number}",
            target=target,
        )

    def check_stored(self, run: str) -> None:
        """Raise InvalidArgument if a run of this partition's data belongs to another one."""
        at = self.of(run)
        if at != self.number and not self.spreads(run):
            raise InvalidArgument(
                field="run_workers",
                value=f"{run}={at}",
                expected=f"{run}={self.number}: worker {self.number} stores rows of this run, and "
                "rows never move",
            )


#: The partition of a server with one worker.
WHOLE = Partition()
