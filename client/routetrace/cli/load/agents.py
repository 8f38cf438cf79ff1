"""The process of a simulated engine: paces its steps, and says what became of its rows.

    python -m routetrace.cli.load.agents NUMBER < lines

The first line is the load, the second the word to go; "stop", or the end, ends it.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from dataclasses import asdict
from typing import Any

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.cli.load.children import Parent
from routetrace.cli.load.engine import Engine
from routetrace.cli.load.plan import BLOCK_SIZE, Load
from routetrace.cli.load.rows import Rows
from routetrace.cli.load.sessions import Truth
from routetrace.cli.load.totals import Latencies
from routetrace.v1.security import Security

_SAY_SECONDS = 0.5
_LOOK_SECONDS = 0.002
_MIB = 1 << 20


class AckLag:
    """How long rows take from step() to their acknowledgement."""

    def __init__(self) -> None:
        self.latencies = Latencies()
        self._waiting: deque[tuple[int, float]] = deque()

    def look(self, now: float, offered: int, settled: int) -> None:
        """So many rows have been offered, and so many of them were acknowledged or dropped."""
        if not self._waiting or self._waiting[-1][0] < offered:
            self._waiting.append((offered, now))
        while self._waiting and self._waiting[0][0] <= settled:
            self.latencies.add(now - self._waiting.popleft()[1])

    def oldest(self, now: float) -> float:
        """Seconds that the oldest row on its way has been."""
        return now - self._waiting[0][1] if self._waiting else 0.0


class Pace:
    """When the next step may start.

    At a given rate, whatever becomes of the rows, as real engines do; else as long as no more rows
    are under way than make good frames, so that nothing is dropped.
    """

    def __init__(self, load: Load, most_in_flight: int) -> None:
        self._interval = 1 / load.steps_per_second if load.steps_per_second else 0.0
        self._most = most_in_flight
        self._next = time.monotonic()

    def wait(self, now: float, in_flight: int) -> float:
        """Seconds to wait before asking again; 0: now."""
        if not self._interval:
            return 0.0 if in_flight < self._most else _LOOK_SECONDS
        if now < self._next:
            return self._next - now
        # What was missed by more than a second is not made up for.
        self._next = max(self._next + self._interval, now - 1)
        return 0.0


def main() -> None:
    """Runs an engine until it is told to stop."""
    parent = Parent()
    load = Load.from_json(parent.lines.get() or "")
    number = int(sys.argv[1])
    model = load.shape_of()
    rows = Rows(model.layout, load.seed, model.skew)
    agent, most = _agent(load, number)
    parent.say("ready")
    parent.lines.get()
    if not parent.stopped.is_set():
        _run(parent, load, number, agent, rows, most)


def _agent(load: Load, number: int) -> tuple[CaptureAgent, int]:
    """Its agent, and how many rows may be under way before a step has to wait."""
    row_bytes = load.shape_of().layout.row_bytes
    # Requests fill frames of 256 rows side by side; what is sent meanwhile comes on top.
    most = 384 * load.batch + max(2 * load.prefill, 8 * _MIB // row_bytes)
    config = AgentConfig(
        target=load.target,
        run=load.run,
        engine_id=f"engine-{number}",
        layout=load.shape_of().layout,
        block_size=BLOCK_SIZE,
        num_blocks=load.num_blocks,
        security=Security(**load.security),
        ring_bytes=max(64 * _MIB, 2 * most * row_bytes),
        queue_bytes=max(256 * _MIB, 4 * most * row_bytes),
        attributes={"load": "routetrace bench load"},
    )
    return CaptureAgent(config), most


def _run(
    parent: Parent, load: Load, number: int, agent: CaptureAgent, rows: Rows, most: int
) -> None:
    def ended(truth: Truth) -> None:
        parent.say("ended", truth=asdict(truth))

    begin: Any = lambda name: parent.say("begun", name=name)  # noqa: E731
    engine = Engine(load, number, agent, rows, begin, ended)
    pace, lag = Pace(load, most), AckLag()
    quota = -(-load.tokens // load.agents) if load.tokens else 1 << 62
    begun = said = time.monotonic()
    updated = begun

    def say(kind: str) -> None:
        stats = asdict(agent.stats())
        oldest = lag.oldest(time.monotonic())
        parent.say(kind, stats=stats, counts=engine.counts, oldest=oldest)

    while not parent.stopped.is_set() and engine.counts["tokens"] < quota:
        now = time.monotonic()
        stats = agent.stats()
        lag.look(now, stats.offered_rows, stats.offered_rows - stats.in_flight_rows)
        if now - said >= _SAY_SECONDS:
            said = now
            say("progress")
        pause = pace.wait(now, stats.in_flight_rows)
        if pause:
            parent.stopped.wait(min(pause, _SAY_SECONDS))
            continue
        if load.update_seconds and now - updated >= load.update_seconds:
            updated = now
            engine.update_weights()
        engine.step()
    engine.stop()
    seconds = time.monotonic() - begun
    say("progress")
    cpu = time.process_time()
    agent.close(min(30.0, load.timeout))
    worker = resource.getrusage(resource.RUSAGE_CHILDREN)
    parent.say(
        "final",
        stats=asdict(agent.stats()),
        counts=engine.counts,
        seconds=seconds,
        ack=lag.latencies.to_json(),
        cpu={
            "engine": engine.telling.seconds,
            "worker": worker.ru_utime + worker.ru_stime,
            "simulation": cpu - engine.telling.seconds,
        },
        memory={"worker": worker.ru_maxrss * 1024},
    )


if __name__ == "__main__":
    main()
