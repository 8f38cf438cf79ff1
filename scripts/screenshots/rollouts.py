"""A small RL run of simulated engines whose real capture agents stream to a real server.

The engines step in turns in one thread, so that a seed gives the same traces, rows and holes each
time. Rates and latencies are those of the machine.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent import CaptureAgent
from routetrace.common.layout import ModelLayout
from routetrace.common.version import installed_version
from routetrace.simulation.engine import Engine
from routetrace.simulation.plan import BLOCK_SIZE, Lengths, Load, Mix
from routetrace.simulation.rows import Rows

RUN = "grpo-math"
LAYERS, EXPERTS, TOP_K = 32, 64, 8
LAYOUT = ModelLayout(tuple(range(LAYERS)), LAYERS, EXPERTS, TOP_K)
#: Layers of the two pipeline stages of the engine of the long trace.
STAGES = (range(LAYERS // 2), range(LAYERS // 2, LAYERS))
SEED = 7
NUM_ENGINES = 6
#: Weight version of the first step, and steps of the trainer with the same weights.
WEIGHTS, UPDATE = 385, 4
VERSIONS = 5
STEPS_A_SECOND = 25
#: Engines, by number, of which requests are aborted, and of which a ring fills.
ABORTS, FULL = 1, 3
#: Rows that the ring of the engine FULL holds at most, at 1 MiB.
RING_ROWS = (1 << 20) // LAYOUT.row_bytes

LONG = "math-1552-p04-s2"
LONG_PROMPT, LONG_TOKENS = 1_408, 6_400
#: Positions from which its rows have the next weights.
LONG_UPDATES = (2_048, 4_096)
#: Tokens of the long trace in the prefix cache, and those of them that came from another engine.
CACHED, EXTERNAL = 1_024, 128
#: Passes that were not captured: (first position, stop, stages).
UNCAPTURED = (
    (2_560, 2_752, (0, 1)),
    (3_009, 3_010, (0, 1)),
    (3_021, 3_030, (1,)),
    (3_036, 3_039, (0,)),
    (4_480, 4_864, (1,)),
)
#: Cells of which a router gave one expert twice: positions, layers.
INVALID = (range(3_014, 3_017), range(5, 8))
#: Position from which the second stage has no agent any more.
LOST = 5_600

_MIX = Mix(
    64, Lengths("lognormal", 180, 0.4), Lengths("lognormal", 420, 0.5), 4, 1, Lengths("fixed", 1)
)
_TASKS = ("math", "math", "math", "code")


class Agent(CaptureAgent):
    """A capture agent that names traces and counts weights as the trainer of an RL job does."""

    def begin(self, request_id: str, **fields: Any) -> int:
        """Begin a request; "e0-s13" of the engine becomes "math-1541-e0p03-s1"."""
        engine, _, number = (fields["trace_id"] or request_id).partition("-s")
        group, sample = divmod(int(number), _MIX.group)
        step = UPDATE * max(self._weight_version, WEIGHTS) + group % UPDATE
        task = _TASKS[group % len(_TASKS)]
        name = f"{task}-{step}-p{int(engine[1:]) * 100 + group}-s{sample}"
        labels = {"task": task, "step": str(step), "group": f"p{int(engine[1:]) * 100 + group}"}
        return super().begin(request_id, **{**fields, "trace_id": name, "labels": labels})

    def set_weight_version(self, version: int) -> None:
        """Set a version, counted from WEIGHTS on."""
        super().set_weight_version(WEIGHTS + version)


class Rollouts:
    """The engines; a thread steps them at a steady rate until `stop`.

    Args:
        target: of the server.
        seconds: until `wait` returns, on a machine that keeps up.
    """

    def __init__(self, target: str, seconds: int) -> None:
        self.num_steps = seconds * STEPS_A_SECOND
        # Steps of the weight updates and of the overrun; the page shows drops for a minute.
        self._updates = {self.num_steps * i // VERSIONS for i in range(1, VERSIONS)}
        self._overruns = self.num_steps - 8 * STEPS_A_SECOND
        self._begins_long = self.num_steps // 3
        self._load = _load(target)
        self._stack = ExitStack()
        rows = Rows(LAYOUT, SEED, 1.2)
        self._agents = [
            self._agent(
                Agent, number, LAYOUT, num_blocks=self._load.num_blocks,
                **({"ring_bytes": 1 << 20} if number == FULL else {}),
            )
            for number in range(NUM_ENGINES)
        ]  # fmt: skip
        ignore: Callable[[object], None] = lambda _: None  # noqa: E731
        self._engines = [
            Engine(self._load, number, agent, rows, ignore, ignore)
            for number, agent in enumerate(self._agents)
        ]
        for agent in self._agents:
            agent.set_weight_version(0)
        self._long = self._write_long()
        self._stopped, self._reached = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engines")

    def __enter__(self) -> Rollouts:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._stack.close()

    def wait(self, seconds: float) -> None:
        """Wait until all steps are done; the engines go on.

        Raises:
            RuntimeError: if an engine failed.
            TimeoutError: after `seconds`.
        """
        done = self._reached.wait(seconds)
        if self._error is not None:
            raise RuntimeError(f"an engine failed: {self._error!r}") from self._error
        if not done:
            raise TimeoutError(f"the engines took over {seconds:.0f} s for {self.num_steps} steps")

    def stop(self) -> None:
        """Have the engines stand still, with their requests open."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for number in self._steps():
                self._step(number)
        except BaseException as error:
            self._error = error
        finally:
            self._reached.set()

    def _steps(self) -> Iterator[int]:
        due = time.monotonic()
        for number in range(1 << 30):
            if number == self.num_steps:
                self._reached.set()
            # A machine that was late does not catch up: rates stay plausible.
            due = max(due + 1 / STEPS_A_SECOND, time.monotonic() - 0.1)
            if self._stopped.wait(max(0.0, due - time.monotonic())):
                return
            yield number

    def _step(self, number: int) -> None:
        if number >= self._begins_long:
            next(self._long, None)
        for index, engine in enumerate(self._engines):
            if number in self._updates:
                if index == ABORTS:
                    self._cancel(engine)
                engine.update_weights()
            if index == FULL and number == self._overruns:
                self._overrun(engine, self._agents[index])
            engine.step()

    def _cancel(self, engine: Engine) -> None:
        """Abort what runs, and what begins meanwhile amid its prompt."""
        for _ in range(3):
            engine.stop()
            engine.step()
        engine.stop()

    def _overrun(self, engine: Engine, agent: CaptureAgent) -> None:
        """Step until the agent's ring is full, while its process gets no CPU."""
        with _halted(agent.worker_pid):
            offered = engine.counts["rows"]
            while engine.counts["rows"] < offered + RING_ROWS + 1_500:
                engine.step()

    def _write_long(self) -> Iterator[None]:
        """Write a trace of an engine of two stages, some rows at a time."""
        rows = Rows(LAYOUT, SEED + 1, 1.2)
        authors = np.full(LONG_TOKENS, 1, np.int64)
        ids = rows.of(authors, np.arange(LONG_TOKENS, dtype=np.int64))
        positions, layers = np.ix_(*INVALID)
        ids[positions, layers, 1] = ids[positions, layers, 0]
        num_blocks = -(-LONG_TOKENS // BLOCK_SIZE)
        stages = [
            _Stage(
                self._agent(
                    CaptureAgent, NUM_ENGINES, _part(part), num_blocks=num_blocks,
                    shard=f"pp{number}", boot_id="boot-1",
                ),
                ids[:, part.start : part.stop],
                [hole[:2] for hole in UNCAPTURED if number in hole[2]],
            )
            for number, part in enumerate(STAGES)
        ]  # fmt: skip
        for stage in stages:
            stage.begin(range(num_blocks))
        for start in range(CACHED, LONG_TOKENS - 1, BLOCK_SIZE):
            if start == LOST:
                stages[1].agent.flush(10)  # so that the hole begins here
                # Not killed before close(): another process would take over.
                os.kill(stages[1].agent.worker_pid, signal.SIGSTOP)
            for stage in stages:
                stage.write(start, min(start + BLOCK_SIZE, LONG_TOKENS - 1))
            yield
        for stage in stages:
            stage.agent.finish(stage.handle, LONG_TOKENS, reason="length")

    def _agent(self, kind: type[Any], number: int, layout: ModelLayout, **more: Any) -> Any:
        return self._stack.enter_context(
            kind(
                target=self._load.target,
                run=RUN,
                engine_id=f"rollout-{number:02}",
                layout=layout,
                block_size=BLOCK_SIZE,
                attributes={"host": f"node-{number // 4}", "routetrace": installed_version()},
                linger_seconds=1.0,
                close_timeout_seconds=2.0,
                **more,
            )
        )


@dataclass
class _Stage:
    """A pipeline stage of the engine of the long trace."""

    agent: CaptureAgent
    ids: npt.NDArray[np.unsignedinteger[Any]]
    """[LONG_TOKENS, layers of the stage, TOP_K]."""
    holes: list[tuple[int, int]]
    """Positions of passes that were not captured: first, stop."""
    handle: int = -1

    def begin(self, blocks: range) -> None:
        """Write a trace, and begin the long one, which finds the same prompt in the cache."""
        self.agent.set_weight_version(WEIGHTS + 2)
        task, step, group, _ = LONG.split("-")
        same: dict[str, Any] = {
            "prompt_len": LONG_PROMPT,
            "prompt_token_ids": np.arange(LONG_PROMPT),
            "labels": {"task": task, "step": step, "group": group},
        }
        owned = blocks[: LONG_PROMPT // BLOCK_SIZE]
        first = self.agent.begin(LONG.replace("s2", "s1"), block_ids=owned, **same)
        rows = LONG_PROMPT - 1
        self.agent.step(self.ids[:rows], [(first, 0, rows)])
        self.agent.finish(first, LONG_PROMPT)
        self.handle = self.agent.begin(
            LONG, block_ids=blocks, num_computed_tokens=CACHED, num_external_tokens=EXTERNAL, **same
        )

    def write(self, start: int, stop: int) -> None:
        """Write the rows of positions [start, stop), less those that were not captured."""
        if start in LONG_UPDATES:
            self.agent.set_weight_version(WEIGHTS + 3 + LONG_UPDATES.index(start))
        ends = {end for hole in self.holes for end in hole if start < end < stop}
        for first, last in pairwise(sorted({start, stop, *ends})):
            span = [(self.handle, first, last - first)]
            if any(hole[0] <= first < hole[1] for hole in self.holes):
                self.agent.skip(span)
            else:
                self.agent.step(self.ids[first:last], span)


def _part(layers: range) -> ModelLayout:
    return ModelLayout(tuple(layers), LAYERS, EXPERTS, TOP_K, LAYOUT.layer_ids)


@contextmanager
def _halted(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _load(target: str) -> Load:
    return Load(
        target=target, run=RUN, security={}, timeout=30.0, model="", shape=(LAYERS, EXPERTS, TOP_K),
        mix=_MIX, max_tokens=4_000, agents=NUM_ENGINES, batch=20, prefill=1_024, kv_blocks=1_600,
        steps_per_second=0.0, seconds=60.0, tokens=0, drafts=0, preemptions=1.0,
        update_seconds=0.0, readers=0, reads="whole", followers=0, ttl=86_400, keep=True, seed=SEED,
    )  # fmt: skip
