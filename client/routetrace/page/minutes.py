"""The last ten minutes of a run, collected from one poll after another."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from routetrace.client import RunHistory

STEPS = 300
#: Steps of an engine that are shown, and those of its rate.
ENGINE_STEPS = 60
RATE_STEPS = 5


def _series() -> deque[int]:
    return deque([0] * STEPS, STEPS)


@dataclass
class EngineMinutes:
    """Numbers by step of all shards of an engine."""

    rows: deque[int] = field(default_factory=_series)
    dropped: deque[int] = field(default_factory=_series)


class Minutes:
    """Numbers of the last `STEPS` steps of a run, 0 where the server tells none."""

    def __init__(self) -> None:
        self.last_step = 0
        self.step_seconds = 2.0
        self.rows, self.reads = _series(), _series()
        self.engines: dict[str, EngineMinutes] = {}
        self.latest: RunHistory | None = None
        """Last poll."""

    def add(self, history: RunHistory) -> None:
        """Add the steps that have ended since the poll before."""
        if history.last_step < self.last_step:
            return  # of an answer that was overtaken
        new = history.last_step - self.last_step if self.last_step else len(history.rows)
        self.latest, self.last_step = history, history.last_step
        self.step_seconds = history.step_seconds
        told = {agent.engine_id: EngineMinutes() for agent in history.agents}
        for engine_id in told:
            self.engines.setdefault(engine_id, EngineMinutes())
        for agent in history.agents:
            sums = told[agent.engine_id]
            sums.rows = _added(sums.rows, agent.rows)
            sums.dropped = _added(sums.dropped, agent.dropped_rows)
        _extend(self.rows, history.rows, new)
        _extend(self.reads, history.reads, new)
        for engine_id, engine in self.engines.items():
            sums = told.get(engine_id, EngineMinutes())
            _extend(engine.rows, tuple(sums.rows), new)
            _extend(engine.dropped, tuple(sums.dropped), new)

    def rate(self, series: deque[int]) -> float:
        """Return the mean of the last steps, per second."""
        return sum(last(series, RATE_STEPS)) / (RATE_STEPS * self.step_seconds)

    def times(self) -> list[float]:
        """Return the Unix time at which each step begins."""
        first = self.last_step - STEPS + 1
        return [(first + step) * self.step_seconds for step in range(STEPS)]

    def dropped(self) -> list[int]:
        """Return the dropped rows of all engines by step."""
        series = [_series(), *(engine.dropped for engine in self.engines.values())]
        return [sum(step) for step in zip(*series, strict=True)]


def last(series: deque[int], count: int) -> list[int]:
    """Return the last numbers of a series."""
    return [*islice(series, len(series) - count, None)]


def _extend(series: deque[int], told: tuple[int, ...], new: int) -> None:
    """Add the last `new` of the told numbers, with zeros before those that are not told."""
    new = min(new, STEPS)
    some = told[max(0, len(told) - new) :]
    series.extend([0] * (new - len(some)))
    series.extend(some)


def _added(series: deque[int], numbers: tuple[int, ...]) -> deque[int]:
    """Return the sums of two series that end with the same step."""
    padded = [0] * (STEPS - len(numbers)) + [*numbers[-STEPS:]]
    return deque((a + b for a, b in zip(series, padded, strict=True)), STEPS)
