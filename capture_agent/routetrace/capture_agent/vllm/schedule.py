"""The scheduler's half: what each step of vLLM's scheduler means to the worker's half.

Reads `SchedulerOutput` and `Request` and nothing else of vLLM, and imports nothing of it. What it
finds travels to the worker with the step that it belongs to, so that nothing can overtake.

Both preemption protocols are known by what they show: a request that comes back is named in
`resumed_req_ids` (with all its blocks), or is scheduled as if it were new.
"""

from __future__ import annotations

import logging
import zlib
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from routetrace.capture_agent.vllm.options import RequestOptions, options_of
from routetrace.v1.errors import InvalidArgument

_log = logging.getLogger(__name__)

_REASONS = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_REPETITION": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
}

Event = tuple[Any, ...]


@dataclass
class StepPlan:
    """What the worker has to know of one step."""

    events: list[Event] = field(default_factory=list)
    """What happened before it, in order: (name, lane, *arguments) of `WorkerSide`."""
    runs: bytes = b""
    """int32 [m, 3]: lane, first position and number of rows of every request of the step."""

    @property
    def table(self) -> npt.NDArray[np.int32]:
        """The runs, [m, 3]."""
        return np.frombuffer(self.runs, np.int32).reshape(-1, 3)


@dataclass(slots=True)
class _Request:
    request: Any  # None: not known any more, see `_start_over`
    lane: int
    options: RequestOptions | None  # None: its routing is not kept
    prompt_len: int = 0  # as of its last input
    preempted: bool = False


class Schedule:
    """Follows one scheduler.

    Nothing raises: after a fault of ours the requests under way stay incomplete, and those that
    begin later are followed again.

    Args:
        run: namespace of the traces; for the handles that clients get.
        engine_id: of the engine.
        group: index of the KV cache group whose blocks are followed, None if there is none to
            follow.
        drafts: whether the engine drafts tokens. Its steps must not overlap then.
    """

    def __init__(self, run: str, engine_id: str, group: int | None, *, drafts: bool) -> None:
        self._run = run
        self._engine_id = engine_id
        self._group = group
        self._drafts = drafts
        self._waiting: dict[str, tuple[Any, int]] = {}  # request, tokens in the local cache
        self._allocated: dict[str, Any] = {}  # blocks of requests that waited, since the last step
        self._requests: dict[str, _Request] = {}
        self._free: list[int] = []
        self._finished: deque[Event] = deque()
        # By lane: the position after the last row that was scheduled.
        self._ends = np.zeros(64, np.int32)
        # Most steps have the requests of the one before: their ids in order, how many rows of each,
        # and the lanes and counts that came of it. Void when a request ends.
        self._order: list[str] = []
        self._counts: dict[str, int] = {}
        self._table = np.empty((0, 3), np.int32)

    def lookup(self, request: Any, num_local_tokens: int) -> None:
        """The scheduler looks a waiting request up in its prefix cache.

        Args:
            request: vLLM's `Request`.
            num_local_tokens: leading tokens that are cached in this engine.
        """
        self._waiting[request.request_id] = request, num_local_tokens

    def allocate(self, request: Any, blocks: Any) -> None:
        """A waiting request gets blocks; it may wait on, for KV that comes from elsewhere.

        Args:
            request: vLLM's `Request`.
            blocks: vLLM's `KVCacheBlocks`.
        """
        self._allocated[request.request_id] = blocks

    def step(self, output: Any, requests: Mapping[str, Any] | None = None) -> StepPlan:
        """Makes the plan of a step.

        Args:
            output: vLLM's `SchedulerOutput`.
            requests: vLLM's `Request`s by id, where `lookup` is not told of them.
        """
        try:
            return self._step(output, requests or {})
        except Exception:
            _log.exception("routetrace: a fault in capture; traces under way stay incomplete")
            return self._start_over(output)

    def _step(self, output: Any, requests: Mapping[str, Any]) -> StepPlan:
        events = self.take_finished()
        for request_id in output.preempted_req_ids or ():
            if known := self._requests.get(request_id):
                self._preempt(known, events)
        copies = getattr(output, "kv_cache_block_copies", None)
        if copies and self._group is not None:
            # Blocks that are filled by copying others: whose rows they hold is not followed.
            events.append(("external", -1, _blocks(copy.dst_block_id for copy in copies)))
        for request_id, blocks in self._allocated.items():
            if request_id not in output.num_scheduled_tokens and request_id in self._waiting:
                # What they are filled with may be found by others before its request starts.
                num_local = self._waiting[request_id][1]
                events.append(("external", -1, self._blocks(blocks.get_block_ids()), num_local))
        self._allocated.clear()
        starts: dict[str, list[Event]] = defaultdict(list)
        for data in output.scheduled_new_reqs:
            known = self._requests.get(data.req_id)
            if known is None:
                if data.req_id not in self._waiting and data.req_id in requests:
                    self.lookup(requests[data.req_id], data.num_computed_tokens)
                self._begin(data, starts[data.req_id])
            else:
                self._take_input(known, data.num_computed_tokens)
                self._resume(
                    data.req_id, data.num_computed_tokens, data.block_ids, starts[data.req_id]
                )
        cached = output.scheduled_cached_reqs
        resumed, group = cached.resumed_req_ids, self._group
        lanes, given = array("i"), array("I")
        told = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
        # Most have nothing to tell.
        for request_id, computed, blocks in (
            told if resumed else compress(told, cached.new_block_ids)
        ):
            if request_id in resumed:
                self._resume(request_id, computed, blocks, starts[request_id])
            elif blocks and group is not None:
                given.extend(blocks[group])
                lanes.extend([self._requests[request_id].lane] * len(blocks[group]))
        if lanes:
            events.append(("blocks", -1, lanes.tobytes(), given.tobytes()))
        for request_id, blocks in (getattr(output, "block_table_updates", None) or {}).items():
            # Blocks were exchanged under way: what the new ones hold is not followed.
            known = self._requests[request_id]
            self._waiting[request_id] = known.request, 0
            self._resume(request_id, self._end(known), blocks, starts[request_id])
        # A request may start with blocks that others fill in this very step: those that are not
        # followed come first, the others in the order in which they were scheduled.
        if starts:
            order = {request_id: i for i, request_id in enumerate(output.num_scheduled_tokens)}
            for request_id in sorted(
                starts, key=lambda i: (self._requests[i].options is not None, order.get(i, 0))
            ):
                events += starts[request_id]
        return StepPlan(events, self._runs(output))

    def _start_over(self, output: Any) -> StepPlan:
        """A plan that begins anew: what is under way is not captured any more."""
        events: list[Event] = [("fault", -1)]
        self._finished.clear()
        self._free, self._order = [], []
        unknown = [*self._requests, *output.num_scheduled_tokens]
        self._requests = {
            request_id: _Request(None, lane, None)
            for lane, request_id in enumerate(dict.fromkeys(unknown))
        }
        for request_id, known in self._requests.items():
            self._set_end(known, 0)
            events.append(("ignore", known.lane, request_id, 0, b""))
        table = [
            (self._requests[request_id].lane, 0, count)
            for request_id, count in output.num_scheduled_tokens.items()
        ]
        return StepPlan(events, np.array(table, np.int32).tobytes())

    def finish(self, request: Any) -> dict[str, Any] | None:
        """A request has ended.

        Returns:
            What its client is told: run, trace id and number of tokens; None if it was never
            scheduled, or was not to be captured.
        """
        self._waiting.pop(request.request_id, None)
        known = self._requests.pop(request.request_id, None)
        if known is None:
            return None
        self._order = []
        end = self._end(known)
        self._take_input(known, request.num_computed_tokens)
        if self._end(known) < end:
            self._finished.append(("preempt", known.lane, self._end(known)))
        options, tokens, reason = known.options, None, "abort"
        if options is not None:
            with suppress(Exception):  # without them no other request can be proven to go on here
                tokens = _tokens(request, request.all_token_ids)
            reason = _REASONS.get(request.status.name, reason)
            reason = "handoff" if options.handoff else reason
        # The lane is given out again behind this event only, since events keep their order.
        self._finished.append(("finish", known.lane, request.num_tokens, reason, tokens))
        self._free.append(known.lane)
        if options is None:
            return None
        return {"run": self._run, "trace_id": options.trace_id, "num_tokens": request.num_tokens}

    def finish_all(self, request_ids: Iterable[str]) -> None:
        """Ends requests of which only the ids are told."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            if (known := self._requests.get(request_id)) and known.request is not None:
                self.finish(known.request)
            elif known:
                del self._requests[request_id]
                self._order = []
                self._finished.append(("finish", known.lane, 0, "abort", None))
                self._free.append(known.lane)

    def take_finished(self) -> list[Event]:
        """Takes the ends that no plan holds yet; may be called from another thread."""
        events = []
        while self._finished:
            events.append(self._finished.popleft())
        return events

    # ------------------------------------------------------------------ private

    def _begin(self, data: Any, events: list[Event]) -> None:
        request, num_local = self._waiting.pop(data.req_id)
        lane = self._free.pop() if self._free else len(self._requests)
        params = data.sampling_params
        options: RequestOptions | None = None
        try:
            extra_args = params.extra_args if params is not None else None
            options = options_of(data.req_id, extra_args, self._engine_id)
        except InvalidArgument as error:
            _log.error("routetrace: request %s is not captured: %s", data.req_id, error)
        kept = options if options is not None and options.capture else None
        computed = data.num_computed_tokens
        known = _Request(request, lane, kept, request.num_prompt_tokens)
        self._requests[data.req_id] = known
        self._set_end(known, computed)
        blocks = self._blocks(data.block_ids)
        if kept is None:
            events.append(("ignore", lane, data.req_id, min(computed, num_local), blocks))
            return
        facts = {
            "trace_id": kept.trace_id,
            "prompt_len": request.num_prompt_tokens,
            "labels": dict(kept.labels),
            "ttl_seconds": kept.ttl_seconds,
            "num_computed_tokens": computed,
            "num_external_tokens": max(0, computed - num_local),
        }
        prompt = _tokens(request, request.prompt_token_ids)
        events.append(("begin", lane, data.req_id, facts, blocks, prompt))

    def _preempt(self, known: _Request, events: list[Event]) -> None:
        if known.preempted:
            return
        known.preempted = True
        end = self._end(known)
        if self._drafts and known.request is not None:  # rows of rejected ones do not count
            end = min(end, max(0, known.request.num_tokens - 1))
        events.append(("preempt", known.lane, end))

    def _resume(self, request_id: str, computed: int, block_ids: Any, events: list[Event]) -> None:
        known = self._requests[request_id]
        self._preempt(known, events)  # not every version tells
        known.preempted = False
        _, num_local = self._waiting.pop(request_id, (None, computed))
        external = max(0, computed - num_local)
        events.append(("resume", known.lane, computed, self._blocks(block_ids), external))

    def _take_input(self, known: _Request, computed: int) -> None:
        """A session may have got more input: from there on its tokens are others."""
        request = known.request
        if request is not None and request.num_prompt_tokens != known.prompt_len:
            known.prompt_len = request.num_prompt_tokens
            self._set_end(known, min(self._end(known), computed))

    def _end(self, known: _Request) -> int:
        return int(self._ends[known.lane])

    def _set_end(self, known: _Request, end: int) -> None:
        if known.lane >= len(self._ends):
            self._ends = np.concatenate([self._ends, np.zeros(known.lane + 1, np.int32)])
        self._ends[known.lane] = end

    def _blocks(self, block_ids: Any) -> bytes:
        return _blocks(block_ids[self._group]) if self._group is not None else b""

    def _runs(self, output: Any) -> bytes:
        """Lane, position and count of every request of the step, int32 [m, 3]."""
        cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
        ids = [*cached.req_ids, *(data.req_id for data in new)]
        if not ids:
            return b""
        counts, table = output.num_scheduled_tokens, self._table
        if ids != self._order or counts != self._counts:
            self._table = table = np.empty((len(ids), 3), np.int32)
            table[:, 0] = [self._requests[i].lane for i in ids]
            table[:, 2] = [counts[i] for i in ids]
            self._order, self._counts = ids, dict(counts)
        table[:, 1] = [*cached.num_computed_tokens, *(data.num_computed_tokens for data in new)]
        self._ends[table[:, 0]] = table[:, 1] + table[:, 2]
        return table.tobytes()


def _blocks(block_ids: Iterable[int]) -> bytes:
    return array("I", block_ids).tobytes()


def _tokens(request: Any, token_ids: Any) -> bytes | None:
    """Tokens as uint32, for digests; None if ids do not say what the model was fed.

    What stands for an image is the same for all images: it is replaced by what identifies it.
    """
    if request.prompt_embeds is not None or token_ids is None:
        return None
    tokens = np.array(token_ids, np.uint32)
    for feature in request.mm_features or ():
        place = feature.mm_position
        identity = zlib.crc32(feature.identifier.encode())
        tokens[place.offset : place.offset + place.length] = identity
    return tokens.tobytes()
