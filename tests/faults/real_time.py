"""Real time: a read that begins after an acknowledgement sees what was acknowledged.

The state of a request of a `Script` only moves forward: more rows, an end, a deletion. So a history
of reads is linearizable exactly if each read sees at least what was acknowledged, and what any
client had read, before it began, and at most what was sent before it ended.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from faults.check import Step, check
from faults.script import Script


class Seen(NamedTuple):
    """State of a request; later ones are greater."""

    deleted: bool = False
    rows: int = 0
    ended: bool = False


NOTHING = Seen()
_DELETED = Seen(deleted=True)


@dataclass(frozen=True)
class Read:
    """An answer.

    Attributes:
        begun: time before it was asked for; any clock that the whole history shares.
        ended: time behind the answer.
        by: the server that was asked.
        request: of the writer's script.
        seen: `NOTHING` where there is no such trace: not yet, or not any more.
    """

    begun: float
    ended: float
    by: str
    request: int
    seen: Seen


@dataclass
class _Told:
    """Progress of one request over time."""

    at: list[float] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    def add(self, at: float, seen: Seen) -> None:
        self.at.append(at)
        self.seen.append(max(seen, self.seen[-1] if self.seen else NOTHING))

    def until(self, at: float) -> Seen:
        """Return the last state that was reported before a time."""
        number = bisect.bisect_left(self.at, at)
        return self.seen[number - 1] if number else NOTHING


def check_history(script: Script, steps: Iterable[Step], reads: Iterable[Read]) -> int:
    """Check all reads of one writer's traces; return their number.

    Args:
        script: what the writer says.
        steps: its progress.
        reads: of any client, in any order.

    Raises:
        Violation: naming the reads that cannot both be right.
    """
    least, most = _told(script, steps, "acked"), _told(script, steps, "sent")
    by_request: dict[int, list[Read]] = defaultdict(list)
    for read in reads:
        by_request[read.request].append(read)
    for request, some in by_request.items():
        name, acked, sent = script.trace_id(request), least[request], most[request]
        ends = sorted(some, key=lambda read: read.ended)
        before, at = Read(0, 0, "no server", request, NOTHING), 0
        for read in sorted(some, key=lambda read: read.begun):
            while ends[at].ended < read.begun:
                if ends[at].seen == NOTHING < acked.until(ends[at].begun):
                    before = replace(ends[at], seen=_DELETED)  # it was there, and is not
                elif ends[at].seen > before.seen:
                    before = ends[at]
                at += 1
            told, known = acked.until(read.begun), sent.until(read.ended)
            seen = _DELETED if known.deleted and read.seen == NOTHING else read.seen
            check(seen >= told, f"{name}: {read}, begun after {told} was acknowledged")
            check(seen >= before.seen, f"{name}: {read}, begun after {before} had ended")
            check(seen <= known, f"{name}: {read}, ended when {known} was sent")
    return sum(map(len, by_request.values()))


def _told(script: Script, steps: Iterable[Step], what: str) -> dict[int, _Told]:
    """Return the progress of each request, by what was sent, or what was answered."""
    told: dict[int, _Told] = defaultdict(_Told)
    deletion = "deleted" if what == "acked" else "deleting"
    done = 0
    for step in sorted(steps, key=lambda step: step.at):
        if step.what == deletion:
            told[step.number].add(step.at, _DELETED)
        elif step.what == what:
            for sequence in range(done + 1, step.number + 1):
                for part in script.parts(sequence):
                    seen = Seen(rows=part.stop, ended=part.ends)
                    told[part.request].add(step.at, seen)
            done = max(done, step.number)
    return told
