"""Capture in one scheduler of SGLang: reports of its hooks, in the order of its passes.

SGLang's own thread notes what it launches and decides. All calls of the agent happen on another
thread (see `courier`), in the same order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from routetrace.capture_agent.agent import CaptureAgent
from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.engines.courier import Courier
from routetrace.capture_agent.engines.request_options import RequestOptions
from routetrace.capture_agent.engines.sglang.disaggregation import (
    Role,
    is_synthetic,
    note_arrival,
    transfer_id,
)
from routetrace.capture_agent.engines.sglang.host_memory import HostMemory, Move, device_slots
from routetrace.capture_agent.engines.sglang.options import options_of
from routetrace.capture_agent.engines.sglang.requests import Deliveries, Plan, Requests
from routetrace.capture_agent.engines.sglang.speculation import (
    UNKNOWN_POSITION,
    accepted_part,
)
from routetrace.capture_agent.engines.sglang.tap import PassRows, Tap
from routetrace.capture_agent.engines.sglang.timeline import Timeline
from routetrace.capture_agent.engines.sglang.weights import Weights
from routetrace.common.errors import InvalidArgument

_log = logging.getLogger(__name__)

#: Agents that one scheduler may lose to internal faults before it stops capturing.
_MAX_FAULTS = 3

_NO_SPANS = np.empty((0, 3), np.int64)
#: Rows of requests that decode: one each.
_ONE = np.ones(1 << 12, np.int64)

_REASONS = {"FINISH_LENGTH": "length", "FINISH_ABORT": "abort"}


class Capture:
    """Follows the passes and requests of one scheduler.

    No method raises: an internal fault is logged and counted, the requests under way stay
    incomplete, and a new agent takes over.

    Args:
        tap: rows of the passes.
        config: of the agent.
        labels: of all requests.
        role: of the engine.
        weight_version: version that SGLang was started with.
    """

    def __init__(
        self,
        tap: Tap,
        config: AgentConfig,
        labels: Mapping[str, str] | None = None,
        role: Role = Role.WHOLE,
        weight_version: object = None,
    ) -> None:
        self.faults = 0
        self._config = config
        self._role = role
        # Of the engine's thread.
        self._ended = False
        free: list[int] = []
        self._requests = Requests(_options, free)
        self._batch: Any = None
        self._host = HostMemory(config.block_size, config.num_blocks)
        self._plans: dict[int, tuple[Plan, list[Move]]] = {}  # by id of their rows
        self._latest: PassRows | None = None
        self.weights = Weights(config.engine_id, weight_version)
        # Of the other one.
        self._agent: CaptureAgent | None = CaptureAgent(config, own_thread=True)
        self._deliveries = Deliveries(config.block_size, free, labels)
        self._checked = False
        self._courier = Courier("routetrace-passes")
        self._timeline = Timeline(self._post)
        tap.on_forward_end(self._launched)

    # ------------------------------------------------------------------ passes

    def run(self, launch: Callable[[], Any], batch: Any) -> Any:
        """Launch the pass of a batch."""
        self._batch, self._latest = batch, None
        try:
            return launch()
        finally:
            self._batch = None

    def _launched(
        self, forward_batch: Any, rows: torch.Tensor, slots: torch.Tensor, native: Any
    ) -> Any:
        batch, self._batch = self._batch, None  # one pass of the target model
        if batch is None or self._ended or forward_batch.forward_mode.is_idle():
            return native
        try:
            weights = self.weights
            weights.check_told()
            spans = _spans(batch)
            plan = self._requests.plan(batch.reqs, *spans, weights.version, weights.torn)
            indexes = [_prefixes(batch, plan)] if any(s.num_computed for s in plan.starts) else []
            moves = self._host.take()
            indexes += device_slots(moves)
            output = PassRows(rows, slots, indexes, native, self._arrived)
            self._plans[id(output)] = plan, moves
            self._timeline.launch(output)
            self._latest = output
        except Exception:
            self._fault_of_launch()
            return native
        return output

    def judged(self, accepted: torch.Tensor, firsts: torch.Tensor, counts: torch.Tensor) -> None:
        """Note which drafts of the latest pass are accepted; see `PassRows.accept`."""
        if (output := self._latest) is not None:
            self._note(lambda: output.accept(accepted, firsts, counts))

    def carry(self, result: Any) -> None:
        """Have the result of the latest pass carry its rows, where SGLang's worker does not."""
        if self._latest is not None and result.routed_experts_output is None:
            result.routed_experts_output = self._latest

    def _arrived(self, output: PassRows) -> None:
        entry = self._plans.pop(id(output), None)
        if entry is None:  # launched before a fault
            return
        try:
            output.fetch()
            self._timeline.arrive(output, lambda: self._deliver(output, *entry))
        except Exception:
            self._fault_of_launch()

    def _post(self, event: Callable[[], None]) -> None:
        """Have an event reported after those before it."""
        self._courier.post(self._report, event)

    def _report(self, event: Callable[[], None]) -> None:
        if self._agent is None:
            return
        try:
            event()
        except Exception:
            self._fault()

    def _deliver(self, output: PassRows, plan: Plan, moves: list[Move]) -> None:
        agent = self._in_use
        rows, slots, *indexes = output.arrays()
        rows = rows.view(self._config.layout.dtype)
        if (outcome := output.outcome()) is not None:
            plan, rows, slots = accepted_part(plan, rows, slots, outcome)
        if not self._checked:
            self._check(rows)
        agent.set_weight_version(None if plan.torn else plan.version)
        self._host.report(moves, indexes, agent)
        prefixes = indexes[0] if indexes else np.empty(0, np.int64)
        self._deliveries.deliver(plan, rows, slots, prefixes, agent)

    def _check(self, rows: np.ndarray[Any, Any]) -> None:
        """Check that every layer wrote its ids in the first pass."""
        self._checked = True
        layout = self._config.layout
        unwritten = (rows == np.iinfo(layout.dtype).max).all(axis=(0, 2))
        if layout.top_k > 1 and unwritten.any():
            layers = [layout.layer_ids[column] for column in np.flatnonzero(unwritten)]
            _log.error(
                "routetrace: layers %s do not show their ids: their rows are missing; "
                "docs/sglang.md lists unsupported settings",
                layers,
            )

    @property
    def _in_use(self) -> CaptureAgent:
        if self._agent is None:
            raise RuntimeError("capture has ended")
        return self._agent

    # ------------------------------------------------------------------ events

    def answered(self, reqs: Sequence[Any]) -> None:
        """Note those requests that have ended, of some whose answers are sent."""
        for req in [req for req in reqs if req.finished_reason is not None]:
            self.ended(req)

    def handles(self, req: Any) -> list[dict[str, Any]]:
        """Return the handle of the trace of a request that ends.

        It has the run, the trace id, the number of tokens, and the nonce of the request's begin.

        Returns:
            A list of one; none if the request goes on, or is not captured.
        """
        try:
            if req.finished_reason is None or self._ended:
                return []
            self._requests.enter(req)
            live = self._requests.live(req)
            if live is None or live.options is None:
                return []
            num_tokens = len(req.origin_input_ids) + len(req.output_ids_through_stop)
            trace_id, nonce = live.options.trace_id, live.nonce
        except Exception:  # the answer goes without it
            _log.exception("routetrace: no handle of the trace of a request")
            return []
        handle = {"run": self._config.run, "trace_id": trace_id, "num_tokens": num_tokens}
        return [{**handle, "nonce": nonce}]

    def ended(self, req: Any, reason: str = "") -> None:
        """Note that a request has ended; `reason` if SGLang has not set its own."""
        self._note(lambda: self._end(req, reason))

    def _end(self, req: Any, reason: str) -> None:
        self._requests.enter(req)
        live = self._requests.end(req)
        if live is None:
            return
        # Private, for another thread.
        tokens = copy(req.origin_input_ids), copy(req.output_ids_through_stop)
        why = reason or _REASONS.get(type(req.finished_reason).__name__, "stop")
        handed_over = why == "stop" and live.options is not None and live.options.handoff
        if handed_over or (self._role is Role.PREFILL and why != "abort"):
            why = "handoff"
        if self._role is Role.PREFILL and why == "handoff":
            live.sent_as = transfer_id(req)
        self._timeline.add(lambda: self._deliveries.report_end(live, tokens, why, self._in_use))

    def retracted(self, req: Any) -> None:
        """Note that a request lost its KV, and will be computed again."""
        self._note(lambda: self._retract(req))

    def _retract(self, req: Any) -> None:
        # A prefill engine computes the prompt again; it drops the token that it has sampled.
        num_sampled = 0 if self._role is Role.PREFILL else len(req.output_ids)
        noted = self._requests.retract(req, len(req.origin_input_ids) + num_sampled)
        if noted is None:
            return
        live, num_rows = noted
        self._timeline.add(lambda: self._deliveries.report_retraction(live, num_rows, self._in_use))

    def flushed(self, *, external: bool = False) -> None:
        """Note that the prefix cache was cleared; `external`: all KV outside of it, too."""
        whole = external and self._role is not Role.DECODE  # which gets KV of others
        self._note(lambda: self._timeline.add(lambda: self._reset(whole)))

    def _reset(self, external: bool) -> None:
        self._in_use.reset_prefix_cache()
        if external:
            self._in_use.reset_external_kv()

    def store_attached(self) -> None:
        """Note that the engine got a store of KV, of which nothing is known."""

        def skip() -> None:  # a pass of unknown weights
            self._in_use.skip(_NO_SPANS)

        self._note(lambda: self._timeline.add(skip))

    def follow(self, controller: Any) -> None:
        """Follow the host memory that SGLang's `HiCacheController` copies KV to.

        Call it before the first pass: another agent takes over, whose slots are those of both.
        """
        if self._role is not Role.DECODE:  # whose copies are for storage
            self._note(lambda: self._follow(controller))

    def _follow(self, controller: Any) -> None:
        pages = self._host.num_pages(controller) if self._latest is None else 0
        try:
            config = replace(self._config, num_host_blocks=pages)
        except InvalidArgument as error:  # more slots than an engine may have
            _log.warning("routetrace: rows of KV from host memory are missing: %s", error)
            return
        if pages:
            self._host.follow(controller, self._note)
            self._config = config
            self._agent = CaptureAgent(config, own_thread=True, predecessor=self._agent)

    def loaded(self, slots: torch.Tensor, host: Any = None, controller: Any = None) -> None:
        """Note that KV is written to slots before the next pass.

        Args:
            slots: of the device.
            host: slots of host memory that it comes from; None: from elsewhere.
            controller: SGLang's `HiCacheController` of those.
        """
        self._note(lambda: self._host.loaded(slots, host, controller))

    def written(self, slots: torch.Tensor, host: Any, controller: Any) -> None:
        """Note that KV of slots is copied to slots of host memory; arguments as of `loaded`."""
        self._note(lambda: self._host.written(slots, host, controller))

    def arrives(self, req: Any, num_cached: int) -> None:
        """Note that KV of a prefill engine is written to new slots of a request.

        Args:
            req: the request.
            num_cached: its leading tokens that this engine has in its own cache.
        """
        self._note(lambda: note_arrival(req, num_cached))

    def close(self) -> None:
        """Send the rest, and end."""
        self._ended = True
        self._courier.close()
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def flush(self, timeout: float = 10.0) -> bool:
        """Send everything; return whether all of it is acknowledged."""
        self._courier.catch_up()
        agent = self._agent
        return agent is None or agent.flush(timeout)

    # ------------------------------------------------------------------ faults

    def _note(self, event: Callable[[], None]) -> None:
        if self._ended:
            return
        try:
            event()
        except Exception:
            self._fault_of_launch()

    def _fault_of_launch(self) -> None:
        """Handle an exception in SGLang's thread: forget the passes under way, and start over."""
        _log.exception("routetrace: internal fault in capture; traces under way stay incomplete")
        self._plans.clear()
        events = self._timeline.clear()
        self._courier.post(self._start_over)
        for event in events:  # frees lanes; no handle is left to report
            self._post(event)

    def _fault(self) -> None:
        """Handle an exception in a report."""
        _log.exception("routetrace: internal fault in capture; traces under way stay incomplete")
        self._start_over()

    def _start_over(self) -> None:
        """Go on with an agent that knows no request and no slot.

        It is a boot of its own: nothing joins by a count of requests, of which the old one may have
        missed some.
        """
        self.faults += 1
        old, self._agent = self._agent, None
        self._deliveries.give_up()
        if self.faults > _MAX_FAULTS:
            self._ended = True
            _log.error("routetrace: capture has ended after %d faults", self.faults)
        else:
            try:
                self._agent = CaptureAgent(self._config, own_thread=True, predecessor=old)
            except OSError:
                self._ended = True
                _log.exception("routetrace: capture has ended: no new agent")
        if old is not None and self._agent is None:  # else the new one closes it
            threading.Thread(target=old.close, name="routetrace-close", daemon=True).start()


def _options(req: Any) -> RequestOptions | None:
    # Beams share slots, and are reordered; not before SGLang 0.5.23.
    if getattr(req, "beam_group", None) is not None or is_synthetic(req):
        return None
    return options_of(req.rid, req.sampling_params.custom_params)


def _spans(batch: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return first positions and numbers of rows of the requests of a batch."""
    if batch.forward_mode.is_target_verify():
        unknown = np.full(len(batch.reqs), UNKNOWN_POSITION)
        return unknown, np.zeros_like(unknown)
    if batch.forward_mode.is_extend():
        return np.array(batch.prefix_lens, np.int64), np.array(batch.extend_lens, np.int64)
    positions = batch.seq_lens_cpu.numpy() - 1
    n = len(positions)
    return positions, _ONE[:n] if n <= len(_ONE) else np.ones(n, np.int64)


def _prefixes(batch: Any, plan: Plan) -> torch.Tensor:
    """Return the slots of the cached tokens of all requests that start, private."""
    table = batch.req_to_token_pool.req_to_token
    rows = getattr(batch, "req_pool_indices_cpu", None)  # not in 0.5.12
    rows = [req.req_pool_idx for req in batch.reqs] if rows is None else rows
    parts = [table[int(rows[start.index]), : start.num_computed] for start in plan.starts]
    return torch.cat(parts).to(torch.int64)
