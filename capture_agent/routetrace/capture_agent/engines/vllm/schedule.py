"""Scheduler's half: from each step of vLLM's scheduler to the plan for the worker's half.

Reads vLLM's `SchedulerOutput`, `Request` and `KVCacheBlocks` alone, and imports nothing of vLLM. A
plan travels to the worker with the step it belongs to, so that nothing can overtake it.

Both preemption protocols are detected: a resumed request is named in `resumed_req_ids` (with all
its blocks), or is scheduled as if it were new.
"""

# Over 400 lines: one class, which follows one protocol of a scheduler.

from __future__ import annotations

import logging
import secrets
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, MutableSequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np

from routetrace.capture_agent.engines.vllm.inputs import Inputs
from routetrace.capture_agent.engines.vllm.options import Options, options_of
from routetrace.capture_agent.engines.vllm.plan import (
    AddBlocks,
    Begin,
    Columns,
    Event,
    External,
    Finish,
    Ignore,
    Preempt,
    Reset,
    Resume,
    StartOver,
    StepPlan,
    pack_blocks,
)
from routetrace.capture_agent.engines.vllm.transfers import Transfers, hands_over
from routetrace.common.errors import InvalidArgument
from routetrace.common.limits import MAX_NONCE

_log = logging.getLogger(__name__)

_REASONS = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_REPETITION": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
}


@dataclass(slots=True)
class _Request:
    request: Any  # None: unknown after `_start_over`
    lane: int
    options: Options | None  # None: not captured
    prompt_len: int = 0  # as of its last input
    nonce: int = 0
    preempted: bool = False


class Schedule:
    """Follows one scheduler.

    Nothing raises: after an internal fault the requests under way stay incomplete, and those that
    begin later are followed again.

    Args:
        run: namespace of the traces, for the handles that clients get.
        engine_id: of the engine.
        group: index of the KV cache group whose blocks are followed; None: no group.
        drafts: whether the engine drafts tokens. Where its steps overlap as well, first positions
            in a plan are upper bounds: a step is planned before the drafts of the last one are
            judged, as if all of them were accepted.
        inputs: of its requests, for digests.
        transfers: of KV between engines; may be set before the first step.
    """

    def __init__(
        self,
        run: str,
        engine_id: str,
        group: int | None,
        *,
        drafts: bool,
        inputs: Inputs = Inputs(),  # noqa: B008 - frozen
        transfers: Transfers = Transfers(),  # noqa: B008 - frozen
    ) -> None:
        self._run = run
        self._engine_id = engine_id
        self._group = group
        self._drafts = drafts
        self._inputs = inputs
        self.transfers = transfers
        self.gives_handles = True
        """Whether answers can have handles; may be set before the first end."""
        self._live: Mapping[str, Any] = {}
        self._waiting: dict[str, tuple[Any, int]] = {}  # request, tokens in the local cache
        self._allocated: dict[str, Any] = {}  # blocks of waiting requests, since the last step
        self._requests: dict[str, _Request] = {}
        self._begun = 0  # captured requests
        self._free: list[int] = []
        self._finished: deque[Event] = deque()
        # By lane: the position after the last row that was scheduled.
        self._ends = np.zeros(64, np.int32)
        # Most steps have the requests of the one before: their ids in order, the rows of each, and
        # both as columns of the plan. Void when a request ends.
        self._order: list[str] = []
        self._counts: dict[str, int] = {}
        self._columns = Columns([], [])
        # First positions of the last step, if `_ends` does not know of it yet.
        self._latest = b""
        self._broken = False

    def follow(self, requests: Mapping[str, Any]) -> None:
        """Follow the requests of the scheduler, for `shut_down`.

        Args:
            requests: vLLM's `Request`s by id, those that wait included. The scheduler changes it.
        """
        self._live = requests

    def lookup(self, request: Any, num_local_tokens: int) -> None:
        """Note that the scheduler looks a waiting request up in its prefix cache.

        Args:
            request: vLLM's `Request`.
            num_local_tokens: leading tokens that are cached in this engine.
        """
        self._waiting[request.request_id] = request, num_local_tokens

    def allocate(self, request: Any, blocks: Any) -> None:
        """Note the blocks of a waiting request, which may wait longer for KV from elsewhere.

        Args:
            request: vLLM's `Request`.
            blocks: vLLM's `KVCacheBlocks`.
        """
        self._allocated[request.request_id] = blocks

    def step(self, output: Any, requests: Mapping[str, Any] | None = None) -> StepPlan:
        """Return the plan of a step.

        Args:
            output: vLLM's `SchedulerOutput`.
            requests: vLLM's `Request`s by id, where `lookup` is not called for them.
        """
        try:
            if self._broken:
                raise RuntimeError("a preemption was not noted")
            return self._step(output, requests or {})
        except Exception:
            _log.exception(
                "routetrace: internal fault in capture; traces under way stay incomplete"
            )
            return self._start_over(output)

    def _step(self, output: Any, requests: Mapping[str, Any]) -> StepPlan:
        events = self.take_finished() if self._finished else []
        for request_id in output.preempted_req_ids or ():
            if known := self._requests.get(request_id):
                self._preempt(known, events)
        copies = getattr(output, "kv_cache_block_copies", None)  # vLLM before 0.26 copies none
        if copies and self._group is not None:
            # Contents of copied blocks are not followed.
            events.append(External(pack_blocks(copy.dst_block_id for copy in copies)))
        if self._allocated:
            self._report_loads(output, events)
        cached = output.scheduled_cached_reqs
        updates = getattr(output, "block_table_updates", None) or {}  # 0.30 alone exchanges blocks
        if output.scheduled_new_reqs or cached.resumed_req_ids or updates:
            self._report_starts(output, requests, updates, events)
        elif self._group is not None:
            self._add_blocks(cached.req_ids, cached.new_block_ids, events)
        spans = self._spans(output)
        return StepPlan(events, spans, self._columns.num_tokens if spans else 0)

    def _report_loads(self, output: Any, events: list[Event]) -> None:
        """Report blocks of requests that wait for KV from elsewhere."""
        for request_id, blocks in self._allocated.items():
            if request_id not in output.num_scheduled_tokens and request_id in self._waiting:
                # Others may hit the loaded blocks before their request starts.
                num_local = self._waiting[request_id][1]
                events.append(External(self._blocks(blocks.get_block_ids()), num_local))
        self._allocated.clear()

    def _report_starts(
        self,
        output: Any,
        requests: Mapping[str, Any],
        updates: Mapping[str, Any],
        events: list[Event],
    ) -> None:
        """Report begins, resumes and new blocks of a step that has any of the first two."""
        starts: dict[str, list[Event]] = defaultdict(list)
        for data in output.scheduled_new_reqs:
            known = self._requests.get(data.req_id)
            if known is None:
                if data.req_id not in self._waiting and data.req_id in requests:
                    self.lookup(requests[data.req_id], data.num_computed_tokens)
                request, num_local = self._waiting.pop(data.req_id)
                blocks = self._blocks(data.block_ids)
                computed = data.num_computed_tokens
                self._begin(request, computed, num_local, blocks, starts[data.req_id])
            else:
                self._take_input(known, data.num_computed_tokens)
                self._resume(
                    data.req_id, data.num_computed_tokens, data.block_ids, starts[data.req_id]
                )
        cached = output.scheduled_cached_reqs
        ids, given = cached.req_ids, cached.new_block_ids
        if resumed := cached.resumed_req_ids:
            for request_id, computed, blocks in zip(
                ids, cached.num_computed_tokens, given, strict=True
            ):
                if request_id in resumed:
                    self._resume(request_id, computed, blocks, starts[request_id])
            given = [
                None if request_id in resumed else blocks
                for request_id, blocks in zip(ids, given, strict=True)
            ]
        if self._group is not None:
            self._add_blocks(ids, given, events)
        for request_id, blocks in updates.items():
            # Contents of exchanged blocks are not followed.
            known = self._requests[request_id]
            self._waiting[request_id] = known.request, 0
            self._resume(request_id, self._end(known), blocks, starts[request_id])
        # A request may start with blocks that others fill in this step: requests that are not
        # captured come first, the others in the order of the scheduler.
        order = {request_id: i for i, request_id in enumerate(output.num_scheduled_tokens)}
        for request_id in sorted(
            starts, key=lambda i: (self._requests[i].options is not None, order.get(i, 0))
        ):
            events += starts[request_id]

    def _add_blocks(self, ids: list[str], given: list[Any], events: list[Event]) -> None:
        """Report the new blocks of requests that go on; most get none."""
        if len(ids) != len(given):
            raise RuntimeError(f"{len(ids)} requests, {len(given)} of them with blocks")
        lanes, blocks, group, requests = array("i"), array("I"), self._group, self._requests
        for request_id, groups in compress(zip(ids, given, strict=True), given):
            new = groups[group]
            blocks.extend(new)
            lane = requests[request_id].lane
            if len(new) == 1:
                lanes.append(lane)
            else:
                lanes.extend([lane] * len(new))
        if lanes:
            events.append(AddBlocks(lanes.tobytes(), blocks.tobytes()))

    def _start_over(self, output: Any) -> StepPlan:
        """Return a plan that ends the capture of all requests under way."""
        events: list[Event] = [StartOver()]
        self._broken = False
        self._finished.clear()
        self._free, self._order, self._latest = [], [], b""
        unknown = [*self._requests, *output.num_scheduled_tokens]
        self._requests = {
            request_id: _Request(None, lane, None)
            for lane, request_id in enumerate(dict.fromkeys(unknown))
        }
        for request_id, known in self._requests.items():
            self._set_end(known, 0)
            events.append(Ignore(known.lane, request_id, 0, b""))
        table = [
            (self._requests[request_id].lane, 0, count)
            for request_id, count in output.num_scheduled_tokens.items()
        ]
        spans = np.array(table, np.int32).T.tobytes()
        return StepPlan(events, spans, sum(output.num_scheduled_tokens.values()))

    def finish(self, request: Any) -> dict[str, Any] | None:
        """Note the end of a request; one that was never scheduled begins with it.

        Returns:
            The handle for its client: run, trace id, number of tokens and nonce; None if it is not
            captured.
        """
        try:
            return self._finish(request)
        except Exception:  # its trace has no end, as if the engine had died
            _log.exception("routetrace: the end of request %s is lost", request.request_id)
            return None

    def _finish(self, request: Any) -> dict[str, Any] | None:
        self._waiting.pop(request.request_id, None)
        if request.request_id not in self._requests:  # else its reader waits for an end
            self._begin(request, 0, 0, b"", self._finished)
        known = self._requests.pop(request.request_id)
        self._order = []
        end = self._end(known)
        self._take_input(known, request.num_computed_tokens)
        if self._end(known) < end:
            self._finished.append(Preempt(known.lane, self._end(known)))
        options, tokens, reason, transfer_id = known.options, None, "abort", None
        if options is not None:
            with suppress(Exception):  # without tokens no other request can be joined to this one
                tokens = self._inputs.tokens_of(request, request.all_token_ids)
            reason = _REASONS.get(request.status.name, reason)
            if reason != "abort":  # else no connector keeps the KV
                transfer_id = self.transfers.sent(request)
                if options.handoff or hands_over(request):
                    reason, transfer_id = "handoff", options.transfer_id or transfer_id
        # Events keep their order, so that the lane is reused only after this one.
        self._finished.append(Finish(known.lane, request.num_tokens, reason, tokens, transfer_id))
        self._free.append(known.lane)
        if options is None:
            return None
        return {
            "run": self._run,
            "trace_id": options.trace_id,
            "num_tokens": request.num_tokens,
            "nonce": known.nonce,
        }

    def finish_all(self, request_ids: Iterable[str]) -> None:
        """Note the ends of requests by id."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            if (known := self._requests.get(request_id)) and known.request is not None:
                self.finish(known.request)
            elif known:
                del self._requests[request_id]
                self._order = []
                self._finished.append(Finish(known.lane, 0, "abort", None))
                self._free.append(known.lane)

    def shut_down(self) -> None:
        """Note the ends of requests that wait for their first step: the engine shuts down."""
        try:
            for request in [*self._live.values()]:
                if request.request_id not in self._requests and not request.is_finished():
                    self.finish(request)
        except Exception:  # their traces stay unknown
            _log.exception("routetrace: the ends of requests that wait are lost")

    def preempt(self, requests: Iterable[Any]) -> None:
        """Note that requests lose their blocks outside of a step, for a reset to come.

        Args:
            requests: vLLM's `Request`s.
        """
        try:
            for request in requests:
                if known := self._requests.get(request.request_id):
                    self._preempt(known, self._finished)
        except Exception:
            _log.exception("routetrace: internal fault in capture; the next step starts over")
            self._broken = True

    def reset(self, *, external: bool) -> None:
        """Note that the prefix cache is empty; `external`: every store outside of it, too."""
        self._finished.append(Reset(external))

    def take_finished(self) -> list[Event]:
        """Take the ends and resets that no plan holds yet; may be called from another thread."""
        events: list[Event] = []
        while self._finished:
            events.append(self._finished.popleft())
        return events

    # ------------------------------------------------------------------ private

    def _begin(
        self,
        request: Any,
        computed: int,
        num_local: int,
        blocks: bytes,
        events: MutableSequence[Event],
    ) -> None:
        name, params = request.request_id, request.sampling_params
        options: Options | None = None
        try:
            extra_args = params.extra_args if params is not None else None
            options = options_of(name, extra_args, self._engine_id)
        except InvalidArgument as error:
            _log.error("routetrace: request %s is not captured: %s", name, error)
        lane = self._free[-1] if self._free else len(self._requests)
        nonce = secrets.randbelow(MAX_NONCE - 1) + 1
        begin: Begin | Ignore
        if options is None or not options.capture:
            options = None
            begin = Ignore(lane, name, min(computed, num_local), blocks)
        else:
            external = max(0, computed - num_local)
            transfer_id = None
            if external:
                # That of a request which hands over is for its own KV.
                given = None if options.handoff or hands_over(request) else options.transfer_id
                transfer_id = given or self.transfers.received(request)
            begin = Begin(
                lane,
                name,
                trace_id=options.trace_id,
                prompt_len=request.num_prompt_tokens,
                labels={**options.labels, **self._inputs.labels_of(request)},
                ttl_seconds=options.ttl_seconds,
                num_computed_tokens=computed,
                num_external_tokens=external,
                blocks=blocks,
                prompt=self._inputs.tokens_of(request, request.prompt_token_ids),
                transfer_id=transfer_id,
                nonce=nonce,
                index=self._begun,
            )
            self._begun += 1
        if self._free:
            self._free.pop()
        known = _Request(request, lane, options, request.num_prompt_tokens, nonce)
        self._requests[name] = known
        self._set_end(known, computed)
        events.append(begin)

    def _preempt(self, known: _Request, events: MutableSequence[Event]) -> None:
        if known.preempted:
            return
        known.preempted = True
        end = self._end(known)
        if (request := known.request) is not None:
            delivered = _delivers(request)
            # Rows of rejected drafts do not count either, nor do those not judged yet.
            if self._drafts or not delivered:
                end = min(end, max(0, request.num_tokens - (not delivered)))
        events.append(Preempt(known.lane, end))

    def _resume(self, request_id: str, computed: int, block_ids: Any, events: list[Event]) -> None:
        known = self._requests[request_id]
        self._preempt(known, events)  # not every version of vLLM reports preemptions
        known.preempted = False
        _, num_local = self._waiting.pop(request_id, (None, computed))
        external = max(0, computed - num_local)
        # No request is scheduled again before vLLM has delivered or dropped what it sampled.
        had = known.request.num_tokens if known.request is not None else 0
        events.append(Resume(known.lane, computed, self._blocks(block_ids), external, had))

    def _take_input(self, known: _Request, computed: int) -> None:
        """Adjust the end of a session that got more input, which replaces its later tokens."""
        request = known.request
        if request is not None and request.num_prompt_tokens != known.prompt_len:
            known.prompt_len = request.num_prompt_tokens
            self._set_end(known, min(self._end(known), computed))

    def _end(self, known: _Request) -> int:
        self._note_ends()
        return int(self._ends[known.lane])

    def _note_ends(self) -> None:
        """Note the ends of the rows of the last step, before another one has other requests."""
        if self._latest:
            columns, positions = self._columns, np.frombuffer(self._latest, np.int32)
            self._ends[columns.lanes] = positions + columns.counts
            self._latest = b""

    def _set_end(self, known: _Request, end: int) -> None:
        self._note_ends()
        if known.lane >= len(self._ends):
            self._ends = np.concatenate([self._ends, np.zeros(known.lane + 1, np.int32)])
        self._ends[known.lane] = end

    def _blocks(self, block_ids: Any) -> bytes:
        return pack_blocks(block_ids[self._group]) if self._group is not None else b""

    def _spans(self, output: Any) -> bytes:
        """Return lane, position and count of every request of the step, int32 [3, m]."""
        cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
        ids, positions = cached.req_ids, cached.num_computed_tokens
        if new:
            ids = [*ids, *(data.req_id for data in new)]
            positions = [*positions, *(data.num_computed_tokens for data in new)]
        if not ids:
            return b""
        counts = output.num_scheduled_tokens
        if ids != self._order or counts != self._counts:
            self._note_ends()
            lanes = [self._requests[i].lane for i in ids]
            self._columns = Columns(lanes, [counts[i] for i in ids])
            self._order, self._counts = list(ids), dict(counts)
        columns = self._columns
        self._latest = latest = columns.pack(*positions)
        return columns.lane_bytes + latest + columns.count_bytes


def _delivers(request: Any) -> bool:
    """Whether vLLM will deliver what a step in flight samples for a preempted request.

    If not, nothing is in flight, or vLLM drops it, and samples it again in the next attempt.
    """
    if hasattr(request, "num_stale_output_tokens"):
        return request.num_stale_output_tokens > 0 and not request.drop_stale_output
    # Before 0.27: of steps that overlap. A reset of the prefix cache, which drops it, sets it to 0.
    placeholders: int = request.num_output_placeholders
    return placeholders > 0
