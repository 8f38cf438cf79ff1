"""Cost of capture in the engine's own thread.

The agent runs as it does by default: in a process of its own, over shared memory, to a real server.
Both are kept on the other core, so that what is measured is the engine's thread and not a core that
it shares. Rows are Qwen3's; they come as the narrow ids that the capturer gives, and as the int32
topk_ids that engines hold.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from measure import (
    HERE,
    OWN_CORE,
    PEER_CORE,
    QWEN3,
    Table,
    area,
    pin,
    program,
    ratios,
    rounds,
    seconds,
)
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
        """Return the spans of the next steps."""
        ahead = []
        for _ in range(steps):
            ahead.append(self._runs.copy())
            self._runs[:, 1] += self._runs[:, 2]
        return ahead

    def replace(self, i: int) -> None:
        """One ends, and another one begins in its place."""
        handle, position, _ = self._runs[i].tolist()
        self._agent.finish(handle, position + 1)
        self._runs[i, :2] = self._agent.begin(f"after {handle}"), 0

    def finish(self) -> None:
        """They end where they are."""
        for handle, position, _ in self._runs.tolist():
            self._agent.finish(handle, position + 1)
        self._agent.flush(60)


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
                "copy": seconds(copy, repeat),
                "away": seconds(away, repeat),
                "scatter": seconds(scatter, repeat),
                "loop": seconds(loop, max(1, repeat // 8)),
            },
            3 if table.quick else 15,
            lambda: agent.flush(60),
        )
        batch.finish()
        name = f"step of {n} rows, {m} requests, {dtype.name}"
        ours = found["step"]
        table.add(name, [1e6 * s for s in ours], "us", "")
        table.add(name, ratios(ours, found["copy"]), "x", "one np.copyto of the rows")
        table.add(name, ratios(ours, found["away"]), "x", "the same, into 64 MiB in turn")
        table.add(name, ratios(ours, found["scatter"]), "x", "slot_buffer[slots] = rows")
        table.add(name, ratios(ours, found["loop"]), "x", "a scatter per request")


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


def joining(table: Table, agent: CaptureAgent) -> None:
    """Every fourth step one request has ended, and another one has begun in its place."""
    every, numbers = 4, itertools.count()
    for n in (64, 256, 1024):
        batch = Batch(agent, n, n, np.uint8)

        def step(batch: Batch = batch, n: int = n) -> float:
            used = 0.0
            for i in range(2 * every):
                if i % every == 0:
                    batch.replace(next(numbers) % n)
                (runs,) = batch.runs(1)
                start = time.perf_counter()
                agent.step(batch.rows, runs)
                used += time.perf_counter() - start
            return used / (2 * every)

        found = rounds({"step": step}, 3 if table.quick else 15, lambda: agent.flush(60))
        batch.finish()
        name = f"step of {n} rows, every fourth with another request, uint8"
        table.add(name, [1e6 * s for s in found["step"]], "us", "")


#: Steps of an engine's loop, with capture and without in turns, and how often they take turns in a
#: round: so often that what else goes on in the machine meets both.
BLOCK, TURNS = 10, 20


def main_loop(table: Table, agent: CaptureAgent) -> None:
    """An engine's loop, with capture and without, in turns.

    What capture adds is CPU time of the loop's thread: of step(), and of whatever runs slower for
    it. By the clock one would mostly see what else this machine does.
    """
    spin = calibrated()
    batch = Batch(agent, 256, 256, np.uint8)
    for name, busy_ms, wait_s in (
        ("main loop that waits 3 ms for a device", 1, 0.003),
        ("main loop of pure Python", 2, 0.0),
    ):
        ratio, added, own = [], [], []
        for _ in range(2 if table.quick else 9):
            cpu: dict[bool, list[float]] = {True: [], False: []}
            period, steps = [], []
            for turn in range(2 * TURNS):
                captures = turn % 2 > 0
                for i, runs in enumerate(batch.runs(BLOCK) if captures else [None] * BLOCK):
                    start, used = time.perf_counter(), time.thread_time()
                    spin(busy_ms)
                    if wait_s:
                        time.sleep(wait_s)
                    if runs is not None:
                        before = time.perf_counter()
                        agent.step(batch.rows, runs)
                        steps.append(time.perf_counter() - before)
                    if i:  # what the first finds in the caches, the others left there
                        cpu[captures].append(time.thread_time() - used)
                        if not captures:
                            period.append(time.perf_counter() - start)
            agent.flush(60)
            more = trimmed(cpu[True]) - trimmed(cpu[False])
            # Without a wait the loop's own CPU time is what its steps would take on a free core.
            ratio.append(1 + more / (trimmed(period) if wait_s else trimmed(cpu[False])))
            added.append(1e6 * more)
            own.append(1e6 * trimmed(steps))
        title = f"{name}, 256 rows a step"
        table.add(title, ratio, "x", "the same without capture")
        table.add(title, added, "us", "CPU time that a step adds")
        table.add(title, own, "us", "step() alone, by the clock")
    batch.finish()


def trimmed(values: list[float]) -> float:
    """Their mean without the tenth at either end: others use this machine, too."""
    tenth = len(values) // 10
    return statistics.fmean(sorted(values)[tenth : len(values) - tenth])


#: Of a decode step of 256 requests, in microseconds; and the share of it that capture may take.
STEP_US, SHARE = 20_000, 0.005


class Steps:
    """A process that drives the engines' sides of capture, of this checkout or of another.

    Args:
        target: of the server.
        checkout: whose code it runs.
    """

    def __init__(self, target: str, checkout: Path) -> None:
        parts = ("capture_agent", "client", "server", "proto")
        self._process = subprocess.Popen(
            program("areas.engine_steps", target, "256"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(str(checkout / p) for p in parts)},
            text=True,
        )

    def round(self) -> dict[str, dict[str, float]]:
        """Run a round; return figures by engine."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        figures: dict[str, dict[str, float]] = json.loads(self._process.stdout.readline())
        return figures

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def engine_steps(table: Table) -> None:
    """Measure CPU time of the threads of vLLM and SGLang in a step, after other work.

    With `--beside DIR` another checkout does the same in turns.
    """
    with tempfile.TemporaryDirectory() as data_dir, run_server(data_dir=data_dir) as server:
        pin(PEER_CORE, server.pid)
        ours = Steps(server.target, HERE.parent)
        checkout = table.checkouts.get("beside")
        theirs = Steps(server.target, checkout) if checkout else None
        found: list[dict[str, dict[str, float]]] = []
        other: list[dict[str, dict[str, float]]] = []
        for number in range(3 if table.quick else 12):
            mine = ours.round()
            beside = theirs.round() if theirs else {}
            if number:  # the first one warms
                found.append(mine)
                other.append(beside)
        ours.close()
        if theirs:
            theirs.close()
    for engine in found[0]:
        name = f"{engine}, a step of 256 requests"
        for part in ("scheduler", "worker"):
            if part in found[0][engine]:
                cpu = [each[engine][part] for each in found]
                table.add(f"{name}: {part}", cpu, "us", "CPU time of the engine's thread")
        whole = [each[engine]["all"] for each in found]
        share = [us / STEP_US for us in whole]
        table.add(name, share, "x", "a step of 20 ms, CPU time", f"<= {SHARE}")
        table.add(name, [each[engine]["clock"] for each in found], "us", "by the clock")
        others = [each[engine]["others"] for each in found]
        table.add(name, others, "us", "CPU time of other threads of its process")
        if theirs:
            base = [each[engine]["all"] for each in other]
            table.add(name, ratios(whole, base), "x", "the checkout beside, the engine's thread")
            base = [each[engine]["others"] + each[engine]["all"] for each in other]
            total = [a + b for a, b in zip(whole, others, strict=True)]
            table.add(name, ratios(total, base), "x", "the checkout beside, its process")


def calibrated() -> Callable[[int], None]:
    """Return a function that keeps Python busy for this many milliseconds with constant work."""
    count = 10000

    def spin(ms: int) -> None:
        x = 0
        for i in range(ms * count):
            x += i

    used = []
    for _ in range(40):
        start = time.thread_time()  # not by the clock: others may have the core for a while
        spin(1)
        used.append(time.thread_time() - start)
    count = int(count * 0.001 / statistics.median(used))
    return spin


def measure(table: Table) -> None:
    pin(OWN_CORE)
    with capturing() as agent:
        for dtype in DTYPES:
            hand_over(table, agent, dtype)
        changing(table, agent)
        joining(table, agent)
        main_loop(table, agent)
        assert not agent.stats().dropped_rows, agent.stats()
    engine_steps(table)


if __name__ == "__main__":
    area(measure)
