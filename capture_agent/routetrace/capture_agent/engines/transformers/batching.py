"""Rows and positions of transformers' continuous batching, where requests change between passes.

A pass is one packed row of tokens [1, tokens] of several requests. The request of each token is
read from the manager's batch, and checked against the position and token inputs of the model. The
KV cache is paged: with the blocks of the full-attention group reported to the agent, rows of a
shared prefix are those of the pass that filled its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from routetrace.capture_agent.engines.capturer import PendingRows, Rows
from routetrace.common.errors import InvalidArgument

if TYPE_CHECKING:
    from routetrace.capture_agent import CaptureAgent

_FULL_ATTENTION = "full_attention"
# Options of the manager under which hooks miss passes, or run too early.
_REFUSED = (
    "use_cuda_graph",
    "use_async_batching",
    "varlen_compile_config",
    "decode_compile_config",
    "default_compile_level",
)


def batching_config(config: Any, block_size: int) -> Any:
    """Return a `ContinuousBatchingConfig` under which every pass can be captured.

    Args:
        config: the caller's, not modified; None for the library's defaults.
        block_size: the agent's; 0 if it reports no slots. The rows of a shared block are unknown
            then, so blocks are not shared.

    Raises:
        InvalidArgument: if CUDA graphs, compilation or asynchronous batching are on, or pages and
            the agent's blocks differ in size.
    """
    from transformers import ContinuousBatchingConfig  # not in every version 5

    config = ContinuousBatchingConfig() if config is None else deepcopy(config)
    for name in _REFUSED:
        if not hasattr(config, name):  # all versions that are supported have them
            raise InvalidArgument(
                field=name,
                value=f"no option of {type(config).__name__}",
                expected="an option: without it, passes without hooks cannot be detected",
                remedy="pin a version of transformers that is documented as tested",
            )
        value = getattr(config, name)
        if value and value != (False, False):
            raise InvalidArgument(
                field=name,
                value=value,
                expected="off: hooks do not run in replayed or compiled "
                "passes, and asynchronous passes start before the results of the last one",
            )
    config.use_cuda_graph = False
    config.use_async_batching = False
    if not block_size:
        config.allow_block_sharing = False
    else:
        # `block_size` in transformers up to 5.17; in later ones that is a synonym, and None.
        name = "page_size" if hasattr(config, "page_size") else "block_size"
        if getattr(config, name) != block_size:
            expected = f"the agent's block_size {block_size}"
            raise InvalidArgument(field=name, value=getattr(config, name), expected=expected)
    return config


def _full_attention(cache: Any) -> tuple[Any, int]:
    """Return the block allocator of a cache's full-attention layers, and the number of blocks.

    None without such layers; the first of several groups.
    """
    if hasattr(cache, "cache_allocators"):
        allocator = cache.cache_allocators.get(_FULL_ATTENTION)
        sectors = cache.num_sectors + 2  # two of them serve padding
        return allocator, 0 if allocator is None else sectors * allocator.blocks_per_sector
    # Up to transformers 5.17, one for each group of layers; all take from the same blocks.
    groups = cache.group_cache_managers
    full = (group for group in groups if type(group).__name__.startswith("FullAttention"))
    return next(full, None), cache.num_blocks


@dataclass
class _Request:
    """State of a request as reported to the agent."""

    handle: int
    state: Any
    """The manager's `RequestState`."""
    end: int
    """Position after the last one that was computed."""
    block_ids: list[int] = field(default_factory=list)
    preempted: bool = False


class PagedRequests:
    """Requests of one continuous batching manager; a `PassListener`.

    All methods but `close` run in the manager's thread.

    Args:
        agent: takes requests and rows.
        processor: the manager's batch processor.
        labels: labels by request id.
        eos_token_ids: tokens that end a request.

    Raises:
        InvalidArgument: if the agent reports slots and has fewer blocks than the manager.
    """

    def __init__(
        self,
        agent: CaptureAgent,
        processor: Any,
        labels: Mapping[str, Mapping[str, str]],
        eos_token_ids: Sequence[int],
    ) -> None:
        self._agent = agent
        self._processor = processor
        self._labels = labels
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, _Request] = {}
        self._begun: set[str] = set()
        self._lost: set[str] = set()
        self._spans: list[tuple[str, int, int]] = []
        self._pending: tuple[PendingRows, list[tuple[str, int, int]]] | None = None
        self._allocator, num_blocks = _full_attention(processor.cache)
        if not agent.config.block_size:
            self._allocator = None
        if self._allocator is not None:
            self._agent.reset_prefix_cache()  # the manager's cache is a new one
            if num_blocks > agent.config.num_blocks:
                raise InvalidArgument(
                    field="agent.config.num_blocks",
                    value=agent.config.num_blocks,
                    expected=f"{num_blocks}, the blocks of the manager, or more",
                )

    def before(self, inputs: Mapping[str, Any]) -> None:
        """Report events since the last pass to the agent, and read the requests of this one."""
        self._deliver()
        self._end_requests()
        batch = self._processor.inputs_and_outputs.requests_in_batch
        positions: list[int] = []
        tokens: list[int] = []
        spans: list[tuple[str, int, int]] = []
        for future in batch:
            state, count = future.state, future.query_length
            start = state.position_offset - count  # the offset is that after the pass
            spans.append((state.request_id, start, count))
            positions.extend(range(start, start + count))
            tokens.extend(_tokens(state, start, start + count))
        fed = [inputs[key][0].tolist() for key in ("position_ids", "input_ids")]
        if fed != [positions, tokens]:
            raise ValueError("inputs of the pass differ from the manager's batch")
        for future, (request_id, start, _) in zip(batch, spans, strict=True):
            if request_id not in self._lost:
                self._follow(future.state, start)
        self._spans = spans

    def after(self, pending: PendingRows) -> None:
        """Keep the rows until the manager has processed the pass."""
        self._pending = (pending, self._spans)

    def failed(self) -> None:
        """Report no more rows of the requests under way, and no more slots.

        Requests now fill blocks unseen, which may be shared later: no slot is certain any more.
        """
        self._lost.update(self._requests)
        self._pending, self._spans = None, []
        if self._allocator is not None:
            self._allocator = None
            with suppress(Exception):
                self._agent.reset_prefix_cache()

    def close(self, prompts: Mapping[str, Sequence[int]]) -> None:
        """Finish the remaining requests after the manager has stopped.

        Args:
            prompts: of all requests; those that no pass had begin with their end.
        """
        self._deliver()
        self._end_requests()
        for request_id in list(self._requests):
            self._finish(request_id, "abort")
        for request_id, prompt in prompts.items():
            if request_id not in self._begun:
                handle = self._begin(request_id, prompt)
                self._agent.finish(handle, len(prompt), reason="abort", token_ids=prompt)

    def _deliver(self) -> None:
        if self._pending is None:
            return
        (pending, spans), self._pending = self._pending, None
        known = [request_id not in self._lost for request_id, _, _ in spans]
        table = [
            (self._requests[request_id].handle, start, count)
            for (request_id, start, count), ok in zip(spans, known, strict=True)
            if ok
        ]

        def step(rows: Rows) -> None:
            if not all(known):
                rows = rows[np.repeat(known, [count for _, _, count in spans])]
            self._agent.step(rows, np.array(table))

        if table:
            pending.hand_to(step)

    def _end_requests(self) -> None:
        """Report requests that ended or lost their blocks, before others get these."""
        scheduler = self._processor.scheduler
        for request_id, request in list(self._requests.items()):
            waiting = scheduler.waiting_requests.get(request_id)
            active = scheduler.active_requests.get(request_id)
            if waiting is None and active is None:
                self._finish(request_id, "abort")
            elif request_id in self._lost:
                request.state = active or waiting
            elif waiting is not None or active is not request.state:
                self._preempt(request)

    def _finish(self, request_id: str, otherwise: str) -> None:
        request = self._requests.pop(request_id)
        output = request.state.to_generation_output()
        tokens = [*output.prompt_ids, *output.generated_tokens]
        reason = otherwise
        if output.is_finished() and output.error is None:
            reason = "stop" if tokens[-1] in self._eos_token_ids else "length"
        self._agent.finish(request.handle, len(tokens), reason=reason, token_ids=tokens)

    def _preempt(self, request: _Request) -> None:
        if not request.preempted:
            request.preempted = True
            self._agent.preempt(request.handle, request.end)

    def _follow(self, state: Any, start: int) -> None:
        """Report begin, resume or new blocks of a request of the next pass."""
        request_id = state.request_id
        blocks: list[int] = []
        if self._allocator is not None:
            blocks = list(self._allocator.block_table[request_id])
        request = self._requests.get(request_id)
        if request is None:
            handle = self._begin(request_id, state.initial_tokens, start if blocks else 0, blocks)
            request = self._requests[request_id] = _Request(handle, state, start, blocks)
        # Full blocks may be swapped for equal ones; blocks still to be written may not.
        first = start // self._agent.config.block_size if blocks else 0
        if blocks[first : len(request.block_ids)] != request.block_ids[first:]:
            self._preempt(request)
        if request.preempted or start != request.end:
            self._preempt(request)
            self._agent.resume(request.handle, start if blocks else 0, block_ids=blocks)
            request.preempted = False
        elif len(blocks) > len(request.block_ids):
            self._agent.add_blocks(request.handle, blocks[len(request.block_ids) :])
        request.state, request.block_ids, request.end = state, blocks, state.position_offset

    def _begin(
        self, request_id: str, prompt: Sequence[int], computed: int = 0, blocks: Sequence[int] = ()
    ) -> int:
        self._begun.add(request_id)
        return self._agent.begin(
            request_id,
            prompt_len=len(prompt),
            labels=self._labels.get(request_id),
            num_computed_tokens=computed,
            block_ids=blocks,
            prompt_token_ids=prompt,
        )


def _tokens(state: Any, start: int, stop: int) -> list[int]:
    """Return tokens start..stop of a request."""
    prompt = len(state.initial_tokens)
    head: list[int] = state.initial_tokens[start:stop]
    tail: list[int] = state.generated_tokens[max(start - prompt, 0) : max(stop - prompt, 0)]
    return head + tail
