"""Worker's half: from the routers' choices in each step to the calls of a `CaptureAgent`.

Every rank of an engine captures, so that all of them run the same graph; one rank of each
tensor-parallel group has an agent and sends. The rows of a step travel to the host while the next
step runs. They are delivered when that one was launched, or when the engine rests.

A step's own thread enqueues the copies and notes the order of the batch. All else happens on a
thread of this half (see `courier`), in the order of the steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from routetrace.capture_agent.agent import CaptureAgent
from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.engines.capturer import PendingRows, RoutingCapturer, Rows
from routetrace.capture_agent.engines.courier import Courier
from routetrace.capture_agent.engines.vllm.plan import Event, StartOver, StepPlan
from routetrace.capture_agent.engines.vllm.positions import first_positions, to_host
from routetrace.capture_agent.engines.vllm.requests import NO_HANDLE, Ints, Requests
from routetrace.capture_agent.engines.vllm.weights import Weights
from routetrace.capture_agent.step_path.checks import version_of
from routetrace.common.errors import Closed

_log = logging.getLogger(__name__)

#: Seconds without a step after which an engine rests.
_REST_S = 0.1

#: Agents that one worker may lose to internal faults before it stops capturing.
_MAX_FAULTS = 3


@dataclass(slots=True)
class _Step:
    """A step that was launched."""

    plan: StepPlan
    names: Sequence[str]  # of its requests, in the order of their rows
    rows: PendingRows | None  # None: no rows, or none that can be read
    positions: Ints | None  # of each row, where the plan could not know them
    paused: bool
    version: int | None  # of the weights; None: unknown


@dataclass(slots=True)
class _Pass:
    """A forward pass whose rows are not delivered yet."""

    rows: PendingRows
    spans: Ints  # [m, 3]: handle, first position or its upper bound, number of rows
    positions: Ints | None  # of each row, where the plan could not know them
    paused: bool  # when the pass was launched


class WorkerSide:
    """Follows the steps of one worker.

    A step never raises: an internal fault is logged and counted, the requests under way stay
    incomplete, and a new agent takes over.

    Args:
        capturer: captures the passes.
        config: of the agent; None on ranks that do not send.
        late_events: takes ends of requests that no plan holds yet, where the scheduler lives in
            this process.
        weights: of the worker.
    """

    def __init__(
        self,
        capturer: RoutingCapturer,
        config: AgentConfig | None,
        late_events: Callable[[], list[Event]] | None = None,
        weights: Weights | None = None,
    ) -> None:
        self.faults = 0
        self._weights = weights or Weights()
        self._warned = False  # of a version that nobody told
        self._capturer = capturer
        self._config = config
        self._late_events = late_events
        self._agent = CaptureAgent(config, own_thread=True) if config else None
        self._requests = Requests()
        self._paused = False
        self._version: int | None = None  # that the agent has; unknown at first
        self._pending: _Pass | None = None
        self._unread = False  # whether the pass under way cannot be read
        self._ended = config is None  # whether no step is taken any more
        self._courier = Courier("routetrace-steps", self._catch_up, _REST_S) if config else None
        self._lock = self._courier.lock if self._courier else threading.RLock()

    # ------------------------------------------------------------------ steps

    def begin_step(self, num_tokens: int | None = None) -> None:
        """Prepare for a forward pass that is about to start.

        Args:
            num_tokens: rows of the step; 0: no pass; None: not known yet.
        """
        if self._ended or num_tokens == 0:
            return
        try:
            self._capturer.begin(num_tokens)
        except Exception:
            self._fault_of_launch([])
            self._unread = True

    def end_step(
        self,
        plan: StepPlan,
        batch: Callable[[], Sequence[str]],
        positions: torch.Tensor | None = None,
    ) -> None:
        """End a step: its forward pass was launched, or it had none.

        Args:
            plan: of the step.
            batch: returns the ids of its requests in the order of their rows.
            positions: the position of each row, on the model's device; needed where the plan cannot
                know it, since drafts of the step before were judged after it was made.
        """
        if self._ended or self._courier is None:
            return
        try:
            step = self._launched(plan, batch, positions)
        except Exception:
            self._fault_of_launch(plan.events)
        else:
            self._courier.post(self._take, step)

    def _launched(
        self,
        plan: StepPlan,
        batch: Callable[[], Sequence[str]],
        positions: torch.Tensor | None,
    ) -> _Step:
        """Start the copies of a step, and note what later steps change."""
        unread, self._unread = self._unread, False
        weights = self._weights
        torn = weights.torn
        version, paused = None if torn else weights.version, self._paused or torn
        if not (num_tokens := plan.num_tokens):
            return _Step(plan, (), None, None, paused, version)
        if not self._warned and weights.untold and not weights.torn:
            self._warn()
        # Before the snapshot, whose rows arrive after all that was enqueued before them. Without
        # one no event says that the copy has arrived: it is waited for.
        fed = None if positions is None else to_host(positions[:num_tokens], wait=unread)
        rows = None if unread else self._capturer.snapshot(num_tokens)
        return _Step(plan, list(batch()), rows, fed, paused, version)

    def _take(self, step: _Step) -> None:
        """Deliver the rows of the last step; report the events of this one."""
        if self._agent is None:
            return
        try:
            self._deliver()
            if step.version != self._version:  # before the begins of the step
                self._agent.set_weight_version(step.version)
                self._version = step.version
            self._apply(step.plan.events)
            if self._agent is None or not step.plan.num_tokens:
                return  # None: capture has ended with one of the events
            spans = self._requests.in_order(step.plan, step.names)
            if step.rows is None:
                self._skip(spans, step.positions)
                return
            self._pending = _Pass(step.rows, spans, step.positions, step.paused)
            if self._capturer.device.type == "cpu":
                self._deliver()
        except Closed:
            self._end()
        except Exception:
            self._fault(step.plan.events)

    def _deliver(self) -> None:
        """Give the rows of the last pass to the agent."""
        if self._pending is None or self._agent is None:
            return
        done, self._pending = self._pending, None
        agent, spans = self._agent, done.spans

        def take(rows: Rows) -> None:
            if done.paused:
                self._skip(spans, done.positions)
                return
            if done.positions is not None:
                spans[:, 1] = first_positions(spans, done.positions)
            kept = spans[:, 0] != NO_HANDLE
            if kept.all():
                table = spans
            else:
                rows, table = rows[np.repeat(kept, spans[:, 2])], spans[kept]
            agent.step(rows, table)  # without rows, too: it has written KV

        done.rows.hand_to(take)

    def _warn(self) -> None:
        """Say once that the weights have changed, and that nobody has told their version."""
        self._warned = True
        if self._config is not None and self._config.shard in ("", "pp0"):
            _log.warning(
                "routetrace: the weights of engine %r have changed, and nobody told their version "
                "as a number: it is unknown, and their rows never stand in for others; after each "
                "update call finish_weight_update(weight_version='7'), set_weight_version('7') or "
                "collective_rpc('routetrace_set_weight_version', args=(7,)): docs/vllm.md",
                self._config.engine_id,
            )

    def _skip(self, spans: Ints, positions: Ints | None) -> None:
        """Report the rows of a pass as missing."""
        if positions is not None:
            spans[:, 1] = first_positions(spans, positions)
        self._in_use.skip(spans[spans[:, 0] != NO_HANDLE])

    def _catch_up(self) -> None:
        """Deliver the rows of the last pass and the ends that no plan holds yet."""
        self._take_all()
        if self._agent is None:
            return
        events: list[Event] = []
        try:
            self._deliver()
            events = self._late_events() if self._late_events else []
            self._apply(events)
        except Closed:
            self._end()
        except Exception:
            self._fault(events)

    def _take_all(self) -> None:
        """Take all steps that were launched."""
        if self._courier is not None:
            self._courier.catch_up()

    def _apply(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, StartOver):
                self._start_over([])
            elif self._agent is not None:
                self._requests.apply(event, self._agent)

    @property
    def _in_use(self) -> CaptureAgent:
        """The agent of this moment: a fault replaces it."""
        if self._agent is None:
            raise RuntimeError("no agent")
        return self._agent

    # ------------------------------------------------------------------ control

    def set_weight_version(self, version: int | None) -> None:
        """Set the version of the weights that compute later steps.

        Args:
            version: number that the trainer gave; None: the weights have changed, and nobody told
                their version.

        Raises:
            InvalidArgument: if it is not a signed 64-bit number above -2**63.
        """
        version_of(version)
        if version is None:
            self._weights.change()
        else:
            self._weights.tell(version)

    def pause(self) -> None:
        """Drop the rows of later steps: they are missing as not captured."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Keep rows again."""
        with self._lock:
            self._paused = False

    def flush(self, timeout: float = 10.0) -> bool:
        """Send everything; return whether all of it is acknowledged, True on ranks without agent.

        Rows lost to an internal fault do not count: see `faults` of `stats`.
        """
        with self._lock:
            self._catch_up()
            agent = self._agent
        return agent is None or agent.flush(timeout)

    def stats(self) -> dict[str, Any]:
        """Return counters of the agent, and `faults`; empty on ranks without agent."""
        with self._lock:
            self._take_all()
            if self._agent is None:
                return {}
            return {**asdict(self._agent.stats()), "faults": self.faults, "paused": self._paused}

    def close(self) -> None:
        """Send the rest, and end."""
        with suppress(Exception):
            self.flush(0)
        self._ended = True
        if self._courier is not None:
            self._courier.close()
        with self._lock:
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def _end(self) -> None:
        """End capture: the interpreter exits, and has closed the agent before the engine."""
        self._ended = True
        _log.warning("routetrace: rows and ends after the close of the agent are not sent")

    def _fault(self, events: list[Event]) -> None:
        """Handle an exception: start over with an agent that knows no request and no slot.

        Args:
            events: those under way, of which any number has been applied.
        """
        _log.exception("routetrace: internal fault in capture; traces under way stay incomplete")
        self._start_over(events)

    def _fault_of_launch(self, events: list[Event]) -> None:
        """Handle an exception in the engine's thread, after the steps that were launched."""
        with self._lock:
            self._take_all()
            self._fault(events)

    def _start_over(self, events: list[Event]) -> None:
        with self._lock:
            self.faults += 1
            self._pending = None
            old, self._agent = self._agent, None
            self._requests.give_up(events)
            self._ended = self._config is None or self.faults > _MAX_FAULTS
            if self._config is None or self._ended:
                _log.error(
                    "routetrace: capture has ended in this worker after %d faults", self.faults
                )
            else:
                try:
                    self._agent = CaptureAgent(self._config, own_thread=True, predecessor=old)
                    self._version = None
                except OSError:
                    self._ended = True
                    _log.exception("routetrace: capture has ended in this worker: no new agent")
            if old is not None and self._agent is None:  # else the new one closes it
                threading.Thread(target=old.close, name="routetrace-close", daemon=True).start()
