"""Process of a simulated engine.

    python -m routetrace.simulation.agents NUMBER < lines

The first line is the load, the second starts it; "stop" or the end of the input stops it. The
process paces the steps and reports the state of the rows.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from dataclasses import asdict
from typing import Any

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.common.security import Security
from routetrace.simulation.children import Parent
from routetrace.simulation.engine import Engine
from routetrace.simulation.plan import BLOCK_SIZE, Load
from routetrace.simulation.rows import Rows
from routetrace.simulation.sessions import Truth
from routetrace.simulation.totals import Latencies

_REPORT_SECONDS = 0.5
_POLL_SECONDS = 0.002
_MIB = 1 << 20


class AckLag:
    """Latency of rows from step() to their acknowledgement."""

    def __init__(self) -> None:
        self.latencies = Latencies()
        self._waiting: deque[tuple[int, float]] = deque()

    def update(self, now: float, offered: int, settled: int) -> None:
        """Note the rows offered so far, and those of them acknowledged or dropped."""
        if not self._waiting or self._waiting[-1][0] < offered:
            self._waiting.append((offered, now))
        while self._waiting and self._waiting[0][0] <= settled:
            self.latencies.add(now - self._waiting.popleft()[1])

    def oldest(self, now: float) -> float:
        """Return the age in seconds of the oldest row in flight."""
        return now - self._waiting[0][1] if self._waiting else 0.0


class Pace:
    """Time of the next step.

    At a given rate steps do not wait for rows, as in real engines. Otherwise steps wait while more
    rows are in flight than fill frames, so that none is dropped.
    """

    def __init__(self, load: Load, most_in_flight: int) -> None:
        self._interval = 1 / load.steps_per_second if load.steps_per_second else 0.0
        self._most = most_in_flight
        self._next = time.monotonic()

    def wait(self, now: float, in_flight: int) -> float:
        """Return the seconds to wait before the next call; 0 to step now."""
        if not self._interval:
            return 0.0 if in_flight < self._most else _POLL_SECONDS
        if now < self._next:
            return self._next - now
        # At most one second of delay is caught up.
        self._next = max(self._next + self._interval, now - 1)
        return 0.0


def main() -> None:
    """Run an engine until the command stops it."""
    parent = Parent()
    load = Load.from_json(parent.lines.get() or "")
    number = int(sys.argv[1])
    model = load.shape_of()
    rows = Rows(model.layout, load.seed, model.skew)
    agent, most = _agent(load, number)
    parent.send("ready")
    parent.lines.get()
    if not parent.stopped.is_set():
        _run(parent, load, number, agent, rows, most)


def _agent(load: Load, number: int) -> tuple[CaptureAgent, int]:
    """Return the agent, and the maximum rows in flight before a step waits."""
    row_bytes = load.shape_of().layout.row_bytes
    # Concurrent requests fill frames of 256 rows each, while full ones are being sent.
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
        parent.send("ended", truth=asdict(truth))

    begin: Any = lambda name: parent.send("begun", name=name)  # noqa: E731
    engine = Engine(load, number, agent, rows, begin, ended)
    pace, lag = Pace(load, most), AckLag()
    quota = -(-load.tokens // load.agents) if load.tokens else 1 << 62
    begun = reported = time.monotonic()
    updated = begun

    def report(kind: str) -> None:
        stats = asdict(agent.stats())
        oldest = lag.oldest(time.monotonic())
        parent.send(kind, stats=stats, counts=engine.counts, oldest=oldest)

    while not parent.stopped.is_set() and engine.counts["tokens"] < quota:
        now = time.monotonic()
        stats = agent.stats()
        lag.update(now, stats.offered_rows, stats.offered_rows - stats.in_flight_rows)
        if now - reported >= _REPORT_SECONDS:
            reported = now
            report("progress")
        pause = pace.wait(now, stats.in_flight_rows)
        if pause:
            parent.stopped.wait(min(pause, _REPORT_SECONDS))
            continue
        if load.update_seconds and now - updated >= load.update_seconds:
            updated = now
            engine.update_weights()
        engine.step()
    engine.stop()
    seconds = time.monotonic() - begun
    report("progress")
    cpu = time.process_time()
    agent.close(min(30.0, load.timeout))
    worker = resource.getrusage(resource.RUSAGE_CHILDREN)
    parent.send(
        "final",
        stats=asdict(agent.stats()),
        counts=engine.counts,
        seconds=seconds,
        ack=lag.latencies.to_json(),
        cpu={
            "engine": engine.recording.seconds,
            "worker": worker.ru_utime + worker.ru_stime,
            "simulation": cpu - engine.recording.seconds,
        },
        memory={"worker": worker.ru_maxrss * 1024},
    )


if __name__ == "__main__":
    main()
