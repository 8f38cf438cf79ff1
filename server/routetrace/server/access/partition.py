"""Partitions: the runs that one process serves, of several processes that share all runs.

A run lies in exactly one partition: all that joins rows, substitutes them, retires traces or counts
a quota looks at one run alone, so no answer needs two partitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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

    def of(self, run: str) -> int:
        """Return the partition of a run."""
        if self.count == 1:
            return 0
        at = self.pinned.get(run)
        return place(run, self.count) if at is None else at

    def check(self, run: str) -> None:
        """Raise Moved unless the run lies in this partition."""
        at = self.of(run)
        if at != self.number:
            target = f":{self.first_port + at}"
            raise Moved(
                f"worker {at} at port {target[1:]} of this server serves run {run!r}: expected a "
                "client or agent that follows this, 0.8 or newer",
                field="run",
                value=run,
                expected=f"a run of worker {self.number}",
                target=target,
            )

    def check_stored(self, run: str) -> None:
        """Raise InvalidArgument if a run of this partition's data belongs to another one."""
        at = self.of(run)
        if at != self.number:
            raise InvalidArgument(
                field="run_workers",
                value=f"{run}={at}",
                expected=f"{run}={self.number}: worker {self.number} stores rows of this run, and "
                "rows never move",
            )


#: The partition of a server with one worker.
WHOLE = Partition()
