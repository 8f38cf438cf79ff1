"""Requests of one worker: from the events and spans of plans to the calls of a `CaptureAgent`."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.agent import CaptureAgent
from routetrace.capture_agent.engines.vllm.plan import (
    AddBlocks,
    Begin,
    Event,
    External,
    Finish,
    Ignore,
    Preempt,
    Reset,
    Resume,
    StepPlan,
    pack_blocks,
    unpack_blocks,
    unpack_tokens,
)
from routetrace.common.errors import InvalidArgument

_log = logging.getLogger(__name__)

#: In place of the handle of a request that is not captured.
NO_HANDLE = -1

Ints = npt.NDArray[Any]


@dataclass
class _Batch:
    """Order of the rows of a step, computed once for all steps with the same requests."""

    lanes: bytes  # int32, in the order of the plan
    names: Sequence[str]  # in the order of the rows
    order: Ints | None  # index of each of them in the plan; None: they are in order
    handles: Ints


class Requests:
    """Requests under way, by lane and by id, with the agent's handles."""

    def __init__(self) -> None:
        self._handles: dict[int, int] = {}  # by lane
        self._lanes: dict[str, int] = {}
        self._names: dict[int, str] = {}  # by lane
        self._batch: _Batch | None = None  # of the last step; void when a handle changes

    def apply(self, event: Event, agent: CaptureAgent) -> None:
        """Report an event to the agent."""
        match event:
            case AddBlocks():
                self._add_blocks(event, agent)
            case Begin():
                self._begin(event, agent)
            case Finish(lane, num_tokens, reason, tokens, transfer_id):
                if (handle := self._handles[lane]) != NO_HANDLE:
                    agent.finish(
                        handle,
                        num_tokens,
                        reason=reason,
                        token_ids=unpack_tokens(tokens),
                        transfer_id=transfer_id,
                    )
                self._remove(lane)
            case Preempt(lane, num_computed_tokens):
                if (handle := self._handles[lane]) != NO_HANDLE:
                    agent.preempt(handle, num_computed_tokens)
            case Resume():
                self._resume(event, agent)
            case Ignore():
                self._add(event.lane, event.request_id)
                _forget(agent, event.blocks, event.num_computed_tokens)
            case External():
                _forget(agent, event.blocks, event.num_computed_tokens)
            case Reset(external):
                agent.reset_prefix_cache()
                if external:
                    agent.reset_external_kv()
            case _:
                raise RuntimeError(f"no request is meant by {event}")

    def give_up(self, events: Sequence[Event]) -> None:
        """Drop all handles, since their agent is lost.

        Args:
            events: those under way, of which any number has been applied.
        """
        for event in events:
            if isinstance(event, (Begin, Ignore)):
                self._add(event.lane, event.request_id)
            elif isinstance(event, Finish):
                self._remove(event.lane)
        self._handles = dict.fromkeys(self._handles, NO_HANDLE)
        self._batch = None

    def in_order(self, plan: StepPlan, names: Sequence[str]) -> Ints:
        """Return the spans [m, 3] of a plan in the order of their rows, with handles for lanes.

        Args:
            plan: of the step.
            names: of its requests in the order of their rows; not changed later.
        """
        lanes, batch = plan.spans[: len(plan.spans) // 3], self._batch
        if batch is None or batch.lanes != lanes or batch.names != names:
            batch = self._batch = _Batch(lanes, names, *self._order_of(plan, names))
        spans = plan.table
        table = np.empty(spans.shape, np.int64)
        table[...] = spans if batch.order is None else spans[batch.order]
        table[:, 0] = batch.handles
        return table

    def _order_of(self, plan: StepPlan, names: Sequence[str]) -> tuple[Ints | None, Ints]:
        """Return the index of each request's span, None if they are in order; and the handles."""
        batch = [self._lanes[name] for name in names]
        handles = np.array([self._handles[lane] for lane in batch], np.int64)
        lanes: list[int] = plan.table[:, 0].tolist()
        if batch == lanes:
            return None, handles
        row = {lane: i for i, lane in enumerate(lanes)}
        order = [row.pop(lane) for lane in batch]
        if row:
            raise RuntimeError(f"the batch lacks {len(row)} requests of the plan")
        return np.array(order), handles

    def _begin(self, event: Begin, agent: CaptureAgent) -> None:
        self._add(event.lane, event.request_id)
        try:
            self._handles[event.lane] = agent.begin(
                event.request_id,
                trace_id=event.trace_id or None,
                prompt_len=event.prompt_len,
                labels=event.labels,
                ttl_seconds=event.ttl_seconds or None,
                num_computed_tokens=event.num_computed_tokens,
                num_external_tokens=event.num_external_tokens,
                block_ids=unpack_blocks(event.blocks),
                prompt_token_ids=unpack_tokens(event.prompt),
                transfer_id=event.transfer_id,
                nonce=event.nonce,
                index=event.index,
            )
        except InvalidArgument as error:
            _log.error("routetrace: request %s is not captured: %s", event.request_id, error)
            _forget(agent, event.blocks, event.num_computed_tokens - event.num_external_tokens)

    def _add_blocks(self, event: AddBlocks, agent: CaptureAgent) -> None:
        handles = [self._handles[lane] for lane in array("i", event.lanes)]
        ids = unpack_blocks(event.blocks)
        if NO_HANDLE in handles:
            _forget(agent, pack_blocks(compress(ids, (h == NO_HANDLE for h in handles))))
            ids = list(compress(ids, (h != NO_HANDLE for h in handles)))
            handles = [h for h in handles if h != NO_HANDLE]
        if handles:
            agent.add_blocks(handles, ids)

    def _resume(self, event: Resume, agent: CaptureAgent) -> None:
        computed, external = event.num_computed_tokens, event.num_external_tokens
        if (handle := self._handles[event.lane]) == NO_HANDLE:
            _forget(agent, event.blocks, computed - external)
        else:
            blocks = unpack_blocks(event.blocks)
            agent.resume(
                handle,
                computed,
                block_ids=blocks,
                num_external_tokens=external,
                num_tokens=event.num_tokens or None,
            )

    def _add(self, lane: int, request_id: str) -> None:
        self._lanes[request_id], self._names[lane] = lane, request_id
        self._handles[lane] = NO_HANDLE
        self._batch = None

    def _remove(self, lane: int) -> None:
        self._handles.pop(lane, None)
        self._lanes.pop(self._names.pop(lane, ""), None)


def _forget(agent: CaptureAgent, blocks: bytes, num_computed_tokens: int = 0) -> None:
    """Report blocks as unknown, but for those of the first tokens."""
    size = agent.config.block_size
    if size and (new := unpack_blocks(blocks)[num_computed_tokens // size :]):
        agent.mark_external(new)
