"""The worker's half: from what the routers chose in each step to the calls of a `CaptureAgent`.

Every rank of an engine captures, so that all of them run the same graph; one rank of each
tensor-parallel group has an agent and sends. Rows of a step are on their way to the host while the
next step runs, and are handed over when that one ends, or when the engine rests.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.agent import CaptureAgent
from routetrace.capture_agent.capturer import PendingRows, RoutingCapturer, Rows
from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.vllm.schedule import Event, StepPlan
from routetrace.v1.errors import InvalidArgument

_log = logging.getLogger(__name__)

#: Seconds without a step after which an engine rests.
_REST_S = 0.1

#: Agents that one worker may lose to faults of ours before it stops capturing.
_MAX_FAULTS = 3

_NO_HANDLE = -1

Ints = npt.NDArray[Any]


@dataclass
class _Batch:
    """Which rows of a step are whose: found once, for all steps that have the same requests."""

    lanes: bytes  # int32, in the order of the plan
    names: list[str]  # in the order of the rows
    order: list[int] | None  # the place in the plan of each of them; None: they are in order
    handles: list[int]


class WorkerSide:
    """Follows the steps of one worker.

    A step never raises: a fault of ours is logged and counted, the requests under way are left
    incomplete, and a new agent takes over.

    Args:
        capturer: what the routers write to.
        config: of the agent; None on ranks that do not send.
        late_events: takes ends of requests that no step has told of yet, where the scheduler lives
            in this process.
    """

    def __init__(
        self,
        capturer: RoutingCapturer,
        config: AgentConfig | None,
        late_events: Callable[[], list[Event]] | None = None,
    ) -> None:
        self.faults = 0
        self._capturer = capturer
        self._config = config
        self._late_events = late_events
        self._lock = threading.RLock()
        self._agent = CaptureAgent(config) if config else None
        self._handles: dict[int, int] = {}  # by lane
        self._lanes: dict[str, int] = {}
        self._names: dict[int, str] = {}  # by lane
        self._paused = False
        self._version = 0
        # Rows of the last step: with their runs, and the weights and pause of that time.
        self._pending: tuple[PendingRows, Ints, bool] | None = None
        self._batch: _Batch | None = None  # of the last step; void when a handle changes
        self._last_step = time.monotonic()
        self._stopped = threading.Event()
        if self._agent:
            name = "routetrace-rest"
            threading.Thread(target=self._rest, name=name, daemon=True).start()

    # ------------------------------------------------------------------ steps

    def begin_step(self) -> None:
        """A forward pass is about to start."""
        try:
            self._capturer.begin()
        except Exception:
            self._fault([])

    def end_step(self, plan: StepPlan, batch: Callable[[], Sequence[str]]) -> None:
        """A forward pass was launched, or a step without one is over.

        Args:
            plan: of the step.
            batch: tells its requests in the order of their rows.
        """
        with self._lock:
            if self._agent is None:
                return
            self._last_step = time.monotonic()
            try:
                self._end_step(plan, batch)
            except Exception:
                self._fault(plan.events)

    def _end_step(self, plan: StepPlan, batch: Callable[[], Sequence[str]]) -> None:
        runs = plan.table
        num_tokens = int(np.add.reduce(runs[:, 2]))
        pending = self._capturer.snapshot(num_tokens) if num_tokens else None
        self._deliver()
        self._tell(plan.events)
        if pending is None:
            return
        self._pending = pending, self._in_order(runs, batch()), self._paused
        if self._capturer.device.type == "cpu":
            self._deliver()

    def _in_order(self, runs: Ints, names: Sequence[str]) -> Ints:
        """Runs [m, 3] of a plan in the order of their rows, with handles in place of lanes."""
        lanes, batch = runs[:, 0].tobytes(), self._batch
        if batch is None or batch.lanes != lanes or batch.names != names:
            batch = self._batch = _Batch(lanes, list(names), *self._order_of(runs, names))
        if batch.order is not None:
            runs = runs[batch.order]
        table = runs.astype(np.int64)
        table[:, 0] = batch.handles
        return table

    def _order_of(self, runs: Ints, names: Sequence[str]) -> tuple[list[int] | None, list[int]]:
        """Which run each request of a batch has, None if they are in order; and its handles."""
        told = [self._lanes[name] for name in names]
        handles = [self._handles[lane] for lane in told]
        lanes: list[int] = runs[:, 0].tolist()
        if told == lanes:
            return None, handles
        row = {lane: i for i, lane in enumerate(lanes)}
        order = [row.pop(lane) for lane in told]
        if row:
            raise RuntimeError(f"the batch lacks {len(row)} requests of the plan")
        return order, handles

    def _deliver(self) -> None:
        """Hands the rows of the last step over."""
        if self._pending is None or self._agent is None:
            return
        (pending, runs, paused), self._pending = self._pending, None
        agent = self._agent

        def take(rows: Rows) -> None:
            kept = runs[:, 0] != _NO_HANDLE
            if kept.all():
                table = runs
            else:
                rows, table = rows[np.repeat(kept, runs[:, 2])], runs[kept]
            if paused:
                agent.skip(table)
            elif len(table):
                agent.step(rows, table)

        pending.hand_to(take)

    def _rest(self) -> None:
        """Hands over what the next step would, where none comes."""
        while not self._stopped.wait(_REST_S):
            if time.monotonic() - self._last_step < _REST_S:
                continue
            with self._lock:
                self._catch_up()

    def _catch_up(self) -> None:
        """Hands over the rows of the last step, and tells of ends that no step has told of."""
        if self._agent is None:
            return
        events: list[Event] = []
        try:
            self._deliver()
            events = self._late_events() if self._late_events else []
            self._tell(events)
        except Exception:
            self._fault(events)

    # ------------------------------------------------------------------ control

    def set_weight_version(self, version: int) -> None:
        """Steps from now on are computed by these weights.

        Raises:
            InvalidArgument: if it is no signed 64-bit number.
        """
        with self._lock:
            try:
                self._deliver()
            except Exception:
                self._fault([])
            if self._agent is not None:
                self._agent.set_weight_version(version)
                self._version = version

    def pause(self) -> None:
        """Rows of steps from now on are not kept: they are missing as not captured."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Rows are kept again."""
        with self._lock:
            self._paused = False

    def flush(self, timeout: float = 10.0) -> bool:
        """Sends everything; True once the server has acknowledged it, or where nothing is sent.

        What a fault of ours has cost is not in it: see `faults` of `stats`.
        """
        with self._lock:
            self._catch_up()
            agent = self._agent
        return agent is None or agent.flush(timeout)

    def stats(self) -> dict[str, Any]:
        """Counters of the agent and `faults`; empty where nothing is sent."""
        if self._agent is None:
            return {}
        return {**asdict(self._agent.stats()), "faults": self.faults, "paused": self._paused}

    def close(self) -> None:
        """Sends what is left, and ends."""
        self._stopped.set()
        with suppress(Exception):
            self.flush(0)
        with self._lock:
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def _fault(self, events: list[Event]) -> None:
        """After an exception: starts over with another agent, that knows no request and no slot.

        Args:
            events: those under way, told in part or not at all.
        """
        _log.exception("routetrace: a fault in capture; traces under way stay incomplete")
        self._start_over(events)

    def _start_over(self, events: list[Event]) -> None:
        with self._lock:
            self.faults += 1
            self._pending = None
            old, self._agent = self._agent, None
            if old is not None:
                threading.Thread(target=old.close, name="routetrace-close", daemon=True).start()
            for name, lane, *arguments in events:
                if name in {"begin", "ignore"}:
                    self._know(lane, arguments[0])
                elif name == "finish":
                    self._drop(lane)
            self._handles = dict.fromkeys(self._handles, _NO_HANDLE)
            self._batch = None
            if self._config is None or self.faults > _MAX_FAULTS:
                _log.error("routetrace: this worker captures no more")
                return
            try:
                self._agent = CaptureAgent(self._config)
            except OSError:
                _log.exception("routetrace: this worker captures no more")
            else:
                self._agent.set_weight_version(self._version)

    # ------------------------------------------------------------------ events

    def _tell(self, events: list[Event]) -> None:
        for name, lane, *arguments in events:
            _EVENTS[name](self, lane, *arguments)

    def _begin(
        self, lane: int, request_id: str, facts: dict[str, Any], blocks: bytes, prompt: bytes | None
    ) -> None:
        self._know(lane, request_id)
        try:
            self._handles[lane] = self._to.begin(
                request_id, block_ids=_ids(blocks), prompt_token_ids=_tokens(prompt), **facts
            )
        except InvalidArgument as error:
            _log.error("routetrace: request %s is not captured: %s", request_id, error)
            self._forget(blocks, facts["num_computed_tokens"] - facts["num_external_tokens"])

    def _ignore(self, lane: int, request_id: str, num_computed_tokens: int, blocks: bytes) -> None:
        """A request that is not captured: what its blocks hold is not followed."""
        self._know(lane, request_id)
        self._forget(blocks, num_computed_tokens)

    def _know(self, lane: int, request_id: str) -> None:
        self._lanes[request_id], self._names[lane] = lane, request_id
        self._handles[lane] = _NO_HANDLE
        self._batch = None

    def _blocks(self, _lane: int, lanes: bytes, blocks: bytes) -> None:
        """Requests get blocks: block i goes to lane i."""
        handles, ids = [self._handles[lane] for lane in array("i", lanes)], _ids(blocks)
        if _NO_HANDLE in handles:
            self._forget(array("I", compress(ids, (h == _NO_HANDLE for h in handles))).tobytes())
            ids = list(compress(ids, (h != _NO_HANDLE for h in handles)))
            handles = [h for h in handles if h != _NO_HANDLE]
        if handles:
            self._to.add_blocks_of(handles, ids)

    def _preempt(self, lane: int, num_computed_tokens: int) -> None:
        if (handle := self._handles[lane]) != _NO_HANDLE:
            self._to.preempt(handle, num_computed_tokens)

    def _restart(
        self, lane: int, num_computed_tokens: int, blocks: bytes, num_external_tokens: int
    ) -> None:
        if (handle := self._handles[lane]) == _NO_HANDLE:
            self._forget(blocks, num_computed_tokens - num_external_tokens)
        else:
            self._to.resume(handle, num_computed_tokens, _ids(blocks), num_external_tokens)

    def _finish(self, lane: int, num_tokens: int, reason: str, tokens: bytes | None) -> None:
        if (handle := self._handles[lane]) != _NO_HANDLE:
            self._to.finish(handle, num_tokens, reason, _tokens(tokens))
        self._drop(lane)

    def _drop(self, lane: int) -> None:
        self._handles.pop(lane, None)
        self._lanes.pop(self._names.pop(lane, ""), None)

    def _external(self, _lane: int, blocks: bytes, num_computed_tokens: int = 0) -> None:
        self._forget(blocks, num_computed_tokens)

    def _give_up(self, _lane: int) -> None:
        """The scheduler's half lost its way."""
        self._start_over([])

    def _forget(self, blocks: bytes, num_computed_tokens: int = 0) -> None:
        size = self._to.config.block_size
        if size and (new := _ids(blocks)[num_computed_tokens // size :]):
            self._to.external(new)

    @property
    def _to(self) -> CaptureAgent:
        if self._agent is None:
            raise RuntimeError("no agent")
        return self._agent


_EVENTS: dict[str, Callable[..., None]] = {
    "begin": WorkerSide._begin,
    "ignore": WorkerSide._ignore,
    "blocks": WorkerSide._blocks,
    "preempt": WorkerSide._preempt,
    "resume": WorkerSide._restart,
    "finish": WorkerSide._finish,
    "external": WorkerSide._external,
    "fault": WorkerSide._give_up,
}


def _ids(blocks: bytes) -> list[int]:
    return array("I", blocks).tolist()


def _tokens(tokens: bytes | None) -> Ints | None:
    return None if tokens is None else np.frombuffer(tokens, np.uint32)
