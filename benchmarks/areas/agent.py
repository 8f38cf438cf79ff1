"""Rows of the table for the agent's background: its cost and its delay."""

# zstandard takes any buffer, whatever its stubs say.
# pyright: reportArgumentType=false
from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from measure import (
    DEEPSEEK,
    KIMI,
    OWN_CORE,
    PEER_CORE,
    QWEN3,
    Shape,
    Table,
    area,
    pin,
    program,
    ratios,
    rounds,
)
from relay import Relay
from routetrace.capture_agent import AgentConfig, CaptureAgent
from routetrace.capture_agent.pipeline import chunks
from routetrace.client import RouteClient
from routetrace.codec.frame import encode_frame, encode_frames, read_header
from routetrace.codec.frame_header import Codec, id_shift
from routetrace.server.testing import run_server

SHAPES = (QWEN3, DEEPSEEK, KIMI)

#: Tokens of a KV block, as most engines have it.
BLOCK = 16


#: Seconds that rows wait for their frame while a reader follows.
_FOLLOWED_S = 1.0


def measure(table: Table) -> None:
    """Add the agent's rows."""
    pin(OWN_CORE)
    with run_server() as server:
        pin(PEER_CORE, server.pid)
        for load in LOADS[: 1 if table.quick else None]:
            for shape in SHAPES[: 1 if table.quick else None]:
                background(table, server.target, shape, load)
        idle(table, server.target)
        first_row(table, server.target)
        turns(table, server.target)


# ---------------------------------------------------------------------------- background CPU


@dataclass(frozen=True)
class Load:
    """Work of an engine.

    Attributes:
        name: of the row.
        requests: that run side by side.
        rows: of each in a step.
        steps: of one round.
        step_s: seconds from one to the next.
        linger_seconds: of the agent.
        frame: rows in a frame as they come out of it.
    """

    name: str
    requests: int
    rows: int
    steps: int
    step_s: float
    linger_seconds: float
    frame: int

    @property
    def tokens(self) -> int:
        """Of one round."""
        return self.requests * self.rows * self.steps


LOADS = (
    Load("decode of 256 requests, whole frames", 256, 1, 256, 0.003, 60, 256),
    Load("decode of 256 requests, 20 ms a step", 256, 1, 100, 0.02, 1, 48),
    Load("prefill of 8 x 1024 tokens a step", 8, 1024, 8, 0.05, 1, 512),
)


def background(table: Table, target: str, shape: Shape, load: Load) -> None:
    """CPU of the worker's process per token, against zstd alone."""
    with engine(target, shape, load) as step:
        pin(OWN_CORE, step.agent.worker_pid)
        cells = {"agent": step.round, "zstd": zstd_of(shape, load)}
        found = rounds(cells, 1 if table.quick else 2)
    name, against = f"{shape.name}: {load.name}", f"bare zstd at the agent's level, {chunks.LEVEL}"
    table.add(name, ratios(found["agent"], found["zstd"]), "x", against)
    for cell, values in found.items():
        table.add(f"  {cell}", [s / load.tokens * 1e6 for s in values], "us", "a token")


class Engine:
    """Steps of requests that run side by side, and began one after the other."""

    def __init__(self, agent: CaptureAgent, shape: Shape, load: Load) -> None:
        self.agent = agent
        self._load = load
        self._rows = shape.rows(4096)
        count = load.requests
        self._handles = np.array([agent.begin(f"{load.frame}-{i}") for i in range(count)])
        self._at = np.zeros(count, np.int64)
        self._firsts = np.arange(count) * 61
        self._blocks = 0  # handed out
        if load.rows == 1:
            self._stagger()

    def _step(self, counts: npt.NDArray[Any]) -> None:
        first, stop = -(-self._at // BLOCK), -(-(self._at + counts) // BLOCK)
        for i in np.flatnonzero(stop > first).tolist():
            start, self._blocks = self._blocks, self._blocks + int(stop[i] - first[i])
            self.agent.add_blocks(int(self._handles[i]), range(start, self._blocks))
        on = counts > 0
        runs = np.stack([self._handles, self._at, counts], 1)[on]
        row = np.concatenate(
            [
                np.arange(a, a + n)
                for a, n in zip((self._firsts + self._at)[on], counts[on], strict=True)
            ]
        )
        self.agent.step(self._rows[row % len(self._rows)], runs)
        self._at += counts

    def _stagger(self) -> None:
        """Frames begin at all times, as those of requests that begin at all times."""
        load = self._load
        for step in range(load.frame):
            self._step((np.arange(load.requests) * load.frame // load.requests <= step).astype(int))

    def round(self) -> float:
        """CPU seconds that the background takes for `steps`."""
        load, pid = self._load, self.agent.worker_pid
        pin(PEER_CORE)
        before = cpu_of(pid)
        counts = np.full(load.requests, load.rows)
        due = time.perf_counter()
        for _ in range(load.steps):
            self._step(counts)
            due += load.step_s
            time.sleep(max(0.0, due - time.perf_counter()))
        self._idle()
        assert not self.agent.stats().dropped_rows
        return cpu_of(pid) - before

    def _idle(self) -> None:
        """Until the background has done what it was given."""
        before = -1.0
        while (now := cpu_of(self.agent.worker_pid)) > before + 2e-3:
            before = now
            time.sleep(0.1)


@contextmanager
def engine(target: str, shape: Shape, load: Load) -> Iterator[Engine]:
    config = AgentConfig(
        target=target,
        engine_id=f"{shape.name}-{load.frame}",
        layout=shape.layout,
        linger_seconds=load.linger_seconds,
        block_size=BLOCK,
        num_blocks=1 << 16,
        queue_bytes=1 << 30,
    )
    with CaptureAgent(config) as agent:
        yield Engine(agent, shape, load)


def zstd_of(shape: Shape, load: Load) -> Callable[[], float]:
    """A cell: CPU seconds of zstd alone for the tokens of a round, in frames of the same size."""
    count = max(1, 2560 // load.frame)
    frames = [planes_of(shape, shape.rows(load.frame, i)) for i in range(count)]
    planes = [plane for frame in frames for plane in frame]
    compressor = zstandard.ZstdCompressor(level=chunks.LEVEL)

    def cell() -> float:
        pin(OWN_CORE)
        start = time.process_time()
        for _ in range(10):
            compressor.multi_compress_to_buffer(planes)
        return (time.process_time() - start) / (10 * count * load.frame) * load.tokens

    return cell


def planes_of(shape: Shape, rows: npt.NDArray[Any]) -> list[memoryview]:
    """Return the bytes of a frame that zstd compresses."""
    major = np.ascontiguousarray(rows.transpose(1, 0, 2))
    shift = id_shift(shape.layout.num_experts, Codec.LAYER_ZSTD)
    major = (major >> shift).astype(np.uint8)
    layers = read_header(encode_frame(rows, shape.layout)).group_layers
    cuts = np.cumsum((0, *layers)).tolist()
    return [major[a:b].reshape(-1).data for a, b in pairwise(cuts)]


# ---------------------------------------------------------------------------- an idle agent


def idle(table: Table, target: str) -> None:
    """CPU of a background that has nothing to do."""
    config = AgentConfig(target=target, engine_id="idle", layout=QWEN3.layout)
    with CaptureAgent(config) as agent:
        assert agent.flush(60)
        pin(OWN_CORE, agent.worker_pid)

        def cell() -> float:
            before = cpu_of(agent.worker_pid)
            time.sleep(1)
            return (cpu_of(agent.worker_pid) - before) * 1e3

        values = rounds({"idle": cell}, 1 if table.quick else 4)["idle"]
    table.add("CPU of an idle agent", values, "ms", "a second")


# ---------------------------------------------------------------------------- first row


def first_row(table: Table, target: str) -> None:
    """From the step that computes the first row of a request to its follower, in three processes.

    A busy engine: 64 requests decode all the time, those that are followed join them.
    """
    config = AgentConfig(target=target, engine_id="first", layout=QWEN3.layout, run="first")
    names = [f"first-{i}" for i in range(20 if table.quick else 100)]
    rows, rng = QWEN3.rows(1024), np.random.default_rng(0)
    given: dict[str, float] = {}
    with CaptureAgent(config) as agent:
        handles = [agent.begin(name) for name in names]
        busy = [agent.begin(f"busy-{i}") for i in range(64)]
        assert agent.flush(60)
        command = program("areas.agent", "--follow", target, *names)
        follower = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert follower.stdout is not None
        assert follower.stdout.readline() == "ready\n"
        begin = time.monotonic()
        # Not in step with any timer of the agent.
        starts = np.sort(rng.uniform(0, 2 if table.quick else 10, len(names)))
        running: list[list[int]] = [[handle, 0] for handle in busy]
        while len(given) < len(names) or time.monotonic() < begin + starts[-1] + 2:
            now = time.monotonic()
            for i in range(len(given), int(np.searchsorted(starts, now - begin))):
                running.append([handles[i], 0])
                given[names[i]] = now
            at = int((now - begin) * 50) + np.arange(len(running)) * 7
            agent.step(
                rows[at % len(rows)], [(handle, position, 1) for handle, position in running]
            )
            for one in running:
                one[1] += 1
            time.sleep(0.02)
        for handle, position in running:
            agent.finish(handle, position + 1)
        out, _ = follower.communicate(timeout=60)
    late = [float(at) - given[name] - _FOLLOWED_S for name, at in map(str.split, out.splitlines())]
    assert len(late) == len(names)
    for q in (50, 99):
        value = float(np.percentile(late, q)) * 1e3
        table.add(f"first row at a follower, p{q}", value, "ms", "behind the flush interval (1 s)")


def follow(target: str, names: list[str]) -> None:
    """Say when the first row of each of these came; a process of its own."""
    with RouteClient(target, run="first") as client, ThreadPoolExecutor(len(names)) as pool:

        def first(name: str) -> float:
            for part in client.follow(name, missing="mask"):
                if len(part.valid):
                    return time.monotonic()
            raise AssertionError(f"{name} ended without a row")

        calls = {name: pool.submit(first, name) for name in names}
        time.sleep(0.5)  # until all of them wait
        print("ready", flush=True)
        for name, call in calls.items():
            print(name, call.result(), flush=True)


# ---------------------------------------------------------------------------- turns


def turns(table: Table, target: str) -> None:
    """Bytes that an agent sends for a session, against the whole of it with every turn."""
    count = 10 if table.quick else 50
    for first in (1024, 0):
        sent, whole, encoded = session(target, count, first)
        name = f"bytes of {count} turns, first prompt of {first or 'a turn'}"
        table.add(name, sent / whole, "x", "whole prefix each turn")
        table.add("  the same", sent / encoded, "x", "whole prefix each turn, as vLLM's base64")


def session(target: str, count: int, first: int) -> tuple[int, int, int]:
    """Bytes of a session: as sent, as whole prefixes in the same encoding, and those in base64.

    As engines do it: a turn is a request whose prompt is all that was said before, and 64 to 128
    new tokens (in the first one also `first` tokens of instructions); whole blocks of 16 tokens
    whose KV was computed are found in the cache; 64 to 128 tokens are sampled.
    """
    rng = np.random.default_rng(first)
    prompts, answers = rng.integers(64, 129, (2, count))
    prompts[0] += first
    ends = np.cumsum(prompts + answers).tolist()
    rows, tokens = QWEN3.rows(ends[-1]), rng.integers(0, 150_000, ends[-1])
    whole = encoded = begin = 0
    relay = Relay(target)
    config = AgentConfig(
        target=relay.target,
        engine_id=f"turns-{first}",
        layout=QWEN3.layout,
        block_size=16,
        num_blocks=4096,
    )
    with CaptureAgent(config) as agent:
        assert agent.flush(60)
        before = relay.to_server
        for turn, end in enumerate(ends):
            prompt, cached = begin + int(prompts[turn]), max(0, begin - 1) // 16 * 16
            handle = agent.begin(
                f"turn-{turn}",
                trace_id=f"session-{first}",
                prompt_len=prompt,
                num_computed_tokens=cached,
                block_ids=range(-(-prompt // 16)),
                prompt_token_ids=tokens[:prompt],
            )
            agent.step(rows[cached:prompt], [(handle, cached, prompt - cached)])
            for at in range(prompt, end - 1):
                if at % 16 == 0:
                    agent.add_blocks(handle, [at // 16])
                agent.step(rows[at : at + 1], [(handle, at, 1)])
            agent.finish(handle, end, token_ids=tokens[:end])
            assert agent.flush(60)
            parts = [rows[a : min(a + 512, end - 1)] for a in range(0, end - 1, 512)]
            whole += sum(map(len, encode_frames(parts, QWEN3.layout)))
            encoded += -(-rows[: end - 1].nbytes // 3) * 4
            begin = end
        sent, told = relay.to_server - before, agent.stats().sent_bytes
    relay.close()
    assert told <= sent < 1.05 * told, (told, sent)
    return sent, whole, encoded


def cpu_of(pid: int) -> float:
    """CPU seconds of a process so far, in nanoseconds' resolution: its CPU clock."""
    return time.clock_gettime((~pid << 3) | 2)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--follow"]:
        follow(sys.argv[2], sys.argv[3:])
    else:
        area(measure)
