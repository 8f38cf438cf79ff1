"""What capture costs the engine's own thread.

The agent runs as it does by default: in a process of its own, over shared memory, to a real server.
Both are kept on the other core, so that what is measured is the engine's thread and not a core that
it shares. Rows are Qwen3's; they come as the narrow ids that the capturer gives, and as the int32
topk_ids that engines hold.
"""

from __future__ import annotations

import itertools
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from measure import OWN_CORE, PEER_CORE, QWEN3, Table, area, pin, ratios, rounds

from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.server.testing import run_server

Array = npt.NDArray[Any]

#: Rows of a step, runs that they belong to, and steps between two flushes: fewer bytes than the
#: ring holds.
STEPS = ((64, 64, 40), (256, 256, 20), (1024, 1024, 8), (8192, 16, 3))

#: Slots of the pool that the rival scatters into: 128 k tokens.
POOL = 1 << 17

DTYPES = (np.dtype(np.uint8), np.dtype(np.int32))


@contextmanager
def capturing() -> Iterator[CaptureAgent]:
    """An agent and its server, both on the other core."""
    with tempfile.TemporaryDirectory() as data_dir, run_server(data_dir=data_dir) as server:
        pin(PEER_CORE, server.pid)
        config = AgentConfig(target=server.target, engine_id="bench", layout=QWEN3.layout)
        with CaptureAgent(config) as agent:
            agent.flush(60)
            pin(PEER_CORE, agent.worker_pid)
            yield agent


def aligned(array: Array) -> Array:
    """A copy that begins at a page, as what engines allocate does.

    Some CPUs copy ten times slower to places that are a little behind those that they copy from,
    modulo pages; where Python puts small arrays, chance decides.
    """
    memory = np.ones(array.nbytes + mmap.PAGESIZE, np.uint8)
    start = -memory.ctypes.data % mmap.PAGESIZE
    placed: Array = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    placed[...] = array
    return placed


class Batch:
    """Requests that go on for as many positions in each step, and their rows.

    Args:
        agent: that they begin at.
        n: rows of a step.
        m: requests.
        dtype: of the rows.
    """

    def __init__(self, agent: CaptureAgent, n: int, m: int, dtype: npt.DTypeLike) -> None:
        self._agent = agent
        self.rows = aligned(QWEN3.rows(n).astype(dtype))
        handles = [agent.begin(f"{n}-{np.dtype(dtype)}-{i}") for i in range(m)]
        self._runs = np.stack([np.array(handles), np.zeros(m, int), np.full(m, n // m)], 1)

    def runs(self, steps: int) -> list[Array]:
        """What the next steps tell of their rows."""
        ahead = []
        for _ in range(steps):
            ahead.append(self._runs.copy())
            self._runs[:, 1] += self._runs[:, 2]
        return ahead

    def finish(self) -> None:
        """They end where they are."""
        for handle, position, _ in self._runs.tolist():
            self._agent.finish(handle, position + 1)
        self._agent.flush(60)


def per_call(function: Callable[[], Any], repeat: int) -> Callable[[], float]:
    """A cell: wall-clock seconds of one of so many calls."""

    def cell() -> float:
        start = time.perf_counter()
        for _ in range(repeat):
            function()
        return (time.perf_counter() - start) / repeat

    return cell


def hand_over(table: Table, agent: CaptureAgent, dtype: np.dtype[Any]) -> None:
    """A step to the agent, against the least that anybody could do with its rows."""
    pool = np.ones((POOL, *QWEN3.rows(1).shape[1:]), np.uint8)
    ring = np.ones((AgentConfig.ring_bytes // QWEN3.row_bytes, *pool.shape[1:]), np.uint8)
    rng = np.random.default_rng(0)
    for n, m, repeat in STEPS:
        batch = Batch(agent, n, m, dtype)
        rows, narrow = batch.rows, aligned(batch.rows.astype(np.uint8))
        count = n // m
        places = itertools.cycle(range(0, len(ring) - n, n))
        # A row each, anywhere; or a run each, in blocks of 16.
        where = rng.permutation(POOL // min(count, 16))[: n // min(count, 16)]
        slots = (where[:, None] * min(count, 16) + np.arange(min(count, 16))).reshape(-1)
        each: list[Any] = slots.tolist() if count == 1 else list(slots.reshape(m, count))

        def step(batch: Batch = batch, rows: Array = rows, repeat: int = repeat) -> float:
            ahead = batch.runs(repeat)
            start = time.perf_counter()
            for runs in ahead:
                agent.step(rows, runs)
            return (time.perf_counter() - start) / repeat

        def copy(rows: Array = rows, narrow: Array = narrow) -> None:
            np.copyto(narrow, rows, casting="unsafe")

        def away(
            rows: Array = rows, ring: Array = ring, places: Iterator[int] = places, n: int = n
        ) -> None:
            at = next(places)
            np.copyto(ring[at : at + n], rows, casting="unsafe")

        def scatter(rows: Array = rows, slots: Array = slots) -> None:
            pool[slots] = rows

        def loop(
            rows: Array = rows, each: list[Any] = each, count: int = count, many: int = n
        ) -> None:
            if count == 1:
                for i, slot in enumerate(each):
                    pool[slot] = rows[i]
            else:
                for at, some in zip(range(0, many, count), each, strict=True):
                    pool[some] = rows[at : at + count]

        found = rounds(
            {
                "step": step,
                "copy": per_call(copy, repeat),
                "away": per_call(away, repeat),
                "scatter": per_call(scatter, repeat),
                "loop": per_call(loop, max(1, repeat // 8)),
            },
            3 if table.quick else 15,
            lambda: agent.flush(60),
        )
        batch.finish()
        name = f"step of {n} rows, {m} requests, {dtype.name}"
        ours = found["step"]
        table.add(name, [1e6 * s for s in ours], "us", "")
        table.add(name, ratios(ours, found["copy"]), "x", "one np.copyto of the rows", "<= 1.3")
        table.add(name, ratios(ours, found["away"]), "x", "the same, into 64 MiB in turn")
        table.add(name, ratios(ours, found["scatter"]), "x", "slot_buffer[slots] = rows", "<= 0.8")
        goal = "<= 0.1" if n >= 256 else ""
        table.add(name, ratios(ours, found["loop"]), "x", "a scatter per request", goal)


def changing(table: Table, agent: CaptureAgent) -> None:
    """Steps none of which has the requests of the one before: what has to be checked is."""
    for n in (64, 256, 1024):
        batch, less = Batch(agent, n, n, np.uint8), np.arange(n) > 0

        def step(batch: Batch = batch, less: Array = less, n: int = n) -> float:
            ahead = [runs[less] if i % 2 else runs for i, runs in enumerate(batch.runs(8))]
            rows = [batch.rows[1:], batch.rows]
            start = time.perf_counter()
            for runs in ahead:
                agent.step(rows[len(runs) == n], runs)
            return (time.perf_counter() - start) / 8

        found = rounds({"step": step}, 3 if table.quick else 15, lambda: agent.flush(60))
        batch.finish()
        name = f"step of {n} rows, other requests than before, uint8"
        table.add(name, [1e6 * s for s in found["step"]], "us", "")


def main_loop(table: Table, agent: CaptureAgent) -> None:
    """An engine's loop, with capture and without, in turns."""
    spin = calibrated()
    batch = Batch(agent, 256, 256, np.uint8)
    steps = 25 if table.quick else 60

    def loop(busy_ms: int, wait_s: float, captures: bool) -> Callable[[], float]:
        def cell() -> float:
            took = []
            for runs in batch.runs(steps):
                start = time.perf_counter()
                spin(busy_ms)
                if wait_s:
                    time.sleep(wait_s)
                if captures:
                    agent.step(batch.rows, runs)
                took.append(time.perf_counter() - start)
            # Without the tenth at either end: others use this machine, too.
            return statistics.fmean(sorted(took)[steps // 10 : -(steps // 10)])

        return cell

    for name, busy_ms, wait_s, goal in (
        ("main loop that waits 3 ms for a device", 1, 0.003, "<= 1.01"),
        ("main loop of pure Python", 2, 0.0, "<= 1.03"),
    ):
        cells = {"with": loop(busy_ms, wait_s, True), "without": loop(busy_ms, wait_s, False)}
        found = rounds(cells, 3 if table.quick else 24, lambda: agent.flush(60))
        value = ratios(found["with"], found["without"])
        table.add(f"{name}, 256 rows a step", value, "x", "the same without capture", goal)
    batch.finish()


def calibrated() -> Callable[[int], None]:
    """What keeps Python busy for so many milliseconds: always the same work."""
    count = 10000

    def spin(ms: int) -> None:
        x = 0
        for i in range(ms * count):
            x += i

    start = time.perf_counter()
    for _ in range(20):
        spin(1)
    count = int(count * 0.02 / (time.perf_counter() - start))
    return spin


def measure(table: Table) -> None:
    pin(OWN_CORE)
    with capturing() as agent:
        for dtype in DTYPES:
            hand_over(table, agent, dtype)
        changing(table, agent)
        main_loop(table, agent)
        assert not agent.stats().dropped_rows, agent.stats()


if __name__ == "__main__":
    area(measure)
