"""Follows the continuous batching of transformers: requests that come and go between passes.

A pass is one packed row of tokens [1, tokens] of several requests. Which tokens are whose is read
from the manager's batch, and checked against the positions and tokens that the model was fed. The
KV cache is paged: with the blocks of the full-attention group told to the agent, rows of a shared
prefix are those of the pass that filled its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from routetrace.capture_agent.capturer import PendingRows, Rows
from routetrace.v1.errors import InvalidArgument

if TYPE_CHECKING:
    from routetrace.capture_agent import CaptureAgent

_FULL_ATTENTION = "full_attention"
# Options of the manager under which Python hooks do not see every pass, or see it too early.
_REFUSED = (
    "use_cuda_graph",
    "use_async_batching",
    "varlen_compile_config",
    "decode_compile_config",
    "default_compile_level",
)


def batching_config(config: Any, block_size: int) -> Any:
    """A `ContinuousBatchingConfig` under which every pass can be followed.

    Args:
        config: the caller's, left as it is; None for the library's defaults.
        block_size: the agent's; 0 if it does not tell slots. Then nobody could say whose rows a
            shared block holds, so that blocks are not shared.

    Raises:
        InvalidArgument: if it asks for CUDA graphs, compilation or asynchronous batching, or if its
            pages have another size than the agent's blocks.
    """
    from transformers import ContinuousBatchingConfig  # not in every version 5

    config = ContinuousBatchingConfig() if config is None else deepcopy(config)
    for name in _REFUSED:
        value = getattr(config, name, None)
        if value and value != (False, False):
            raise InvalidArgument(
                field=name,
                value=value,
                expected="off: hooks do not run in replayed or compiled "
                "passes, and asynchronous passes begin before the last one is known",
            )
    config.use_cuda_graph = False
    config.use_async_batching = False
    if not block_size:
        config.allow_block_sharing = False
    elif config.page_size != block_size:
        expected = f"the agent's block_size {block_size}"
        raise InvalidArgument(field="page_size", value=config.page_size, expected=expected)
    return config


@dataclass
class _Request:
    """What the agent was told of a request."""

    handle: int
    state: Any
    """The manager's `RequestState`."""
    end: int
    """Position after the last one that was computed."""
    block_ids: list[int] = field(default_factory=list)
    preempted: bool = False


class PagedRequests:
    """Follows the requests of one continuous batching manager; a `PassListener`.

    All methods but `close` run in the manager's thread.

    Args:
        agent: takes requests and rows.
        processor: the manager's batch processor.
        labels: labels by request id.
        eos_token_ids: tokens that end a request.

    Raises:
        InvalidArgument: if the agent tells slots and has fewer blocks than the manager.
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
        self._lost: set[str] = set()
        self._runs: list[tuple[str, int, int]] = []
        self._pending: tuple[PendingRows, list[tuple[str, int, int]]] | None = None
        allocators = processor.cache.cache_allocators
        self._allocator = allocators.get(_FULL_ATTENTION) if agent.config.block_size else None
        if self._allocator is not None:
            self._agent.reset_prefix_cache()  # the manager's cache is a new one
            num_blocks = (processor.cache.num_sectors + 2) * self._allocator.blocks_per_sector
            if num_blocks > agent.config.num_blocks:
                raise InvalidArgument(
                    field="agent.config.num_blocks",
                    value=agent.config.num_blocks,
                    expected=f"{num_blocks}, the blocks of the manager, or more",
                )

    def before(self, inputs: Mapping[str, Any]) -> None:
        """Tells the agent what happened since the last pass, and learns what this one is."""
        self._deliver()
        self._end_requests()
        batch = self._processor.inputs_and_outputs.requests_in_batch
        positions: list[int] = []
        tokens: list[int] = []
        runs: list[tuple[str, int, int]] = []
        for future in batch:
            state, count = future.state, future.query_length
            start = state.position_offset - count  # the offset is already that after the pass
            runs.append((state.request_id, start, count))
            positions.extend(range(start, start + count))
            tokens.extend(_tokens(state, start, start + count))
        fed = [inputs[key][0].tolist() for key in ("position_ids", "input_ids")]
        if fed != [positions, tokens]:
            raise ValueError("the pass was not fed what the manager's batch holds")
        for future, (request_id, start, _) in zip(batch, runs, strict=True):
            if request_id not in self._lost:
                self._follow(future.state, start)
        self._runs = runs

    def after(self, pending: PendingRows) -> None:
        """Keeps the rows until the manager is done with the pass."""
        self._pending = (pending, self._runs)

    def failed(self) -> None:
        """Ends what is told of the requests under way, and of slots.

        Blocks that requests now fill unseen may be shared later: no slot can be believed any more.
        """
        self._lost.update(self._requests)
        self._pending, self._runs = None, []
        if self._allocator is not None:
            self._allocator = None
            with suppress(Exception):
                self._agent.reset_prefix_cache()

    def close(self) -> None:
        """Ends what has not ended, once the manager has stopped."""
        self._deliver()
        self._end_requests()
        for request_id in list(self._requests):
            self._finish(request_id, "abort")

    def _deliver(self) -> None:
        if self._pending is None:
            return
        (pending, runs), self._pending = self._pending, None
        told = [request_id not in self._lost for request_id, _, _ in runs]
        table = [
            (self._requests[request_id].handle, start, count)
            for (request_id, start, count), ok in zip(runs, told, strict=True)
            if ok
        ]

        def step(rows: Rows) -> None:
            if not all(told):
                rows = rows[np.repeat(told, [count for _, _, count in runs])]
            self._agent.step(rows, np.array(table))

        if table:
            pending.hand_to(step)

    def _end_requests(self) -> None:
        """Notices requests that ended or lost their blocks, before others get these."""
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
        self._agent.finish(request.handle, len(tokens), reason, tokens)

    def _preempt(self, request: _Request) -> None:
        if not request.preempted:
            request.preempted = True
            self._agent.preempt(request.handle, request.end)

    def _follow(self, state: Any, start: int) -> None:
        """Tells the agent how a request of the next pass comes to be where it is."""
        request_id = state.request_id
        blocks: list[int] = []
        if self._allocator is not None:
            blocks = list(self._allocator.block_table[request_id])
        request = self._requests.get(request_id)
        if request is None:
            handle = self._agent.begin(
                request_id,
                prompt_len=len(state.initial_tokens),
                labels=self._labels.get(request_id),
                num_computed_tokens=start if blocks else 0,
                block_ids=blocks,
                prompt_token_ids=state.initial_tokens,
            )
            request = self._requests[request_id] = _Request(handle, state, start, blocks)
        # Blocks that are full may be swapped for equal ones; blocks still to be written may not.
        first = start // self._agent.config.block_size if blocks else 0
        if blocks[first : len(request.block_ids)] != request.block_ids[first:]:
            self._preempt(request)
        if request.preempted or start != request.end:
            self._preempt(request)
            self._agent.resume(request.handle, start if blocks else 0, blocks)
            request.preempted = False
        elif len(blocks) > len(request.block_ids):
            self._agent.add_blocks(request.handle, blocks[len(request.block_ids) :])
        request.state, request.block_ids, request.end = state, blocks, state.position_offset


def _tokens(state: Any, start: int, stop: int) -> list[int]:
    """Tokens start..stop of a request."""
    prompt = len(state.initial_tokens)
    head: list[int] = state.initial_tokens[start:stop]
    tail: list[int] = state.generated_tokens[max(start - prompt, 0) : max(stop - prompt, 0)]
    return head + tail
