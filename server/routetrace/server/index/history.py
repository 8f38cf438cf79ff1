"""History of the last minutes by run: rows, bytes, reads and commit times, in steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from routetrace.server.index.journal import Clock
from routetrace.server.index.traces.sources import WriterKey
from routetrace.v1 import routetrace_pb2 as pb

#: Milliseconds of a step, and maximum steps that are kept.
STEP_MS = 2000
STEPS = 300

#: Steps whose commits are counted by their times, those counts, and the time of the first of them.
COMMIT_STEPS = 30
_TIMES = 40
_FIRST_MS = 0.5


class Series:
    """Numbers of the last steps; those of 0 take no memory."""

    __slots__ = ("_points",)

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []  # (step, number), ascending

    def add(self, step: int, number: int) -> None:
        """Add a number to that of the current step."""
        if self._points and self._points[-1][0] == step:
            number += self._points.pop()[1]
        if number:
            self._points.append((step, number))
            del self._points[:-STEPS]

    def since(self, first: int, last: int) -> list[int]:
        """Return the numbers of the steps [first, last]."""
        numbers = [0] * (last - first + 1)
        for step, number in self._points:
            if first <= step <= last:
                numbers[step - first] = number
        return numbers

    @property
    def newest(self) -> int:
        """Last step with a number; -1 if there is none."""
        return self._points[-1][0] if self._points else -1


@dataclass(slots=True)
class _Writer:
    rows: Series = field(default_factory=Series)
    dropped: Series = field(default_factory=Series)
    total: int | None = None
    """Dropped rows in its last heartbeat; None before the first one."""
    heard: int = 0
    """Step of its last report."""


@dataclass
class _Run:
    rows: Series = field(default_factory=Series)
    stored_bytes: Series = field(default_factory=Series)
    reads: Series = field(default_factory=Series)
    commits: dict[int, Series] = field(default_factory=dict)
    """By index of their time."""
    writers: dict[WriterKey, _Writer] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        heard = max((writer.heard for writer in self.writers.values()), default=-1)
        return max(self.rows.newest, self.reads.newest, heard)


class History:
    """The last `STEPS` steps of all runs. All calls belong to the event loop's thread.

    Step n begins at n * `STEP_MS` milliseconds of Unix time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._runs: dict[str, _Run] = {}
        self._pruned = 0

    def stored(self, key: WriterKey, rows: int, nbytes: int, seconds: float) -> None:
        """Note a stored chunk, and the time from its arrival to its commit."""
        step, run = self._now(key.run)
        run.rows.add(step, rows)
        run.stored_bytes.add(step, nbytes)
        run.commits.setdefault(_time_index(seconds), Series()).add(step, 1)
        writer = run.writers.setdefault(key, _Writer())
        writer.rows.add(step, rows)
        writer.heard = step

    def heard(self, key: WriterKey, dropped: int) -> None:
        """Note a heartbeat with the number of rows that the agent has dropped since it started."""
        step, run = self._now(key.run)
        writer = run.writers.setdefault(key, _Writer())
        # Rows that were dropped before the first heartbeat are of steps that are not known.
        before = dropped if writer.total is None else writer.total
        # Fewer than before: it has started again.
        writer.dropped.add(step, dropped - before if dropped >= before else dropped)
        writer.total, writer.heard = dropped, step

    def read(self, run: str) -> None:
        """Note a read of a trace."""
        step, known = self._now(run)
        known.reads.add(step, 1)

    def of(self, run: str, after: int = 0) -> pb.GetHistoryResponse:
        """Return the steps of a run that have ended, later than `after`."""
        last = self._step() - 1
        first = min(max(after, last - STEPS), last) + 1
        response = pb.GetHistoryResponse(last_step=last, step_ms=STEP_MS)
        known = self._runs.get(run, _Run())
        response.rows.extend(known.rows.since(first, last))
        response.stored_bytes.extend(known.stored_bytes.since(first, last))
        response.reads.extend(known.reads.since(first, last))
        response.commit_counts.extend(
            sum(known.commits[at].since(last - COMMIT_STEPS + 1, last))
            if at in known.commits
            else 0
            for at in range(_TIMES)
        )
        for key, writer in known.writers.items():
            response.agents.add(
                engine_id=key.engine_id,
                shard=key.shard,
                rows=writer.rows.since(first, last),
                dropped_rows=writer.dropped.since(first, last),
            )
        return response

    def _step(self) -> int:
        return int(self._clock.now() * 1000) // STEP_MS

    def _now(self, run: str) -> tuple[int, _Run]:
        """Return the current step and the history of a run."""
        step = self._step()
        if step >= self._pruned + STEPS // 10:
            self._pruned = step
            self._prune(step - STEPS)
        return step, self._runs.setdefault(run, _Run())

    def _prune(self, oldest: int) -> None:
        """Forget what has no step left."""
        for name, run in [*self._runs.items()]:
            run.writers = {k: w for k, w in run.writers.items() if w.heard >= oldest}
            if run.newest < oldest:
                del self._runs[name]


def _time_index(seconds: float) -> int:
    """Return the index of a time: the i-th holds those up to _FIRST_MS * 2^(i / 2) ms."""
    ratio = max(1.0, 1000 * seconds / _FIRST_MS)
    return min(_TIMES - 1, math.ceil(2 * math.log2(ratio)))


def summed(responses: Sequence[pb.GetHistoryResponse]) -> pb.GetHistoryResponse:
    """Add up the histories of the workers of a server, whose clocks may differ by a step."""
    last = min(response.last_step for response in responses)
    late = [response.last_step - last for response in responses]
    count = max(0, *(len(r.rows) - more for r, more in zip(responses, late, strict=True)))

    def until_last(numbers: Sequence[int], more: int) -> list[int]:
        kept = numbers[: max(0, len(numbers) - more)]
        return [0] * (count - len(kept)) + [*kept]

    total = pb.GetHistoryResponse(last_step=last, step_ms=STEP_MS)
    for name in ("rows", "stored_bytes", "reads"):
        parts = (until_last(getattr(r, name), m) for r, m in zip(responses, late, strict=True))
        getattr(total, name).extend(map(sum, zip(*parts, strict=True)))
    total.commit_counts.extend(map(sum, zip(*(r.commit_counts for r in responses), strict=True)))
    for response, more in zip(responses, late, strict=True):
        for agent in response.agents:
            total.agents.add(
                engine_id=agent.engine_id,
                shard=agent.shard,
                rows=until_last(agent.rows, more),
                dropped_rows=until_last(agent.dropped_rows, more),
            )
    return total
