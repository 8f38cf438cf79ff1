"""Two ways to know how a model routed, and an agent that keeps what it is told.

Independent of the code under test: hooks of their own, by module names written out here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from routetrace.common.layout import ModelLayout
from support.models.tiny_models import PAD


@dataclass
class Told:
    """Events of one request."""

    prompt_len: int
    prompt: list[int] | None
    labels: dict[str, str] | None
    blocks: list[int]
    end: int
    rows: dict[int, np.ndarray | None] = field(default_factory=dict)
    num_tokens: int | None = None
    reason: str = ""
    tokens: list[int] | None = field(default_factory=list)
    attempts: int = 1
    preemptions: int = 0
    given: list[int] = field(default_factory=list)


class RecordingAgent:
    """Has the methods of CaptureAgent, checks what it is told, and keeps slots as a server does."""

    def __init__(self, layout: ModelLayout, block_size: int = 0, num_blocks: int = 0) -> None:
        self.config = SimpleNamespace(layout=layout, block_size=block_size, num_blocks=num_blocks)
        self.requests: dict[str, Told] = {}
        self.by_handle: dict[int, Told] = {}
        self.slots: dict[int, np.ndarray] = {}
        self.rows: list[np.ndarray] = []
        self.weight_version = 0
        self.cached = 0
        self.gaps = False

    def set_weight_version(self, version: int) -> None:
        self.weight_version = version

    def reset_prefix_cache(self) -> None:
        self.slots.clear()

    def begin(
        self,
        request_id: str,
        *,
        prompt_len: int,
        labels: dict[str, str] | None = None,
        num_computed_tokens: int = 0,
        block_ids: Any = (),
        prompt_token_ids: Any = None,
    ) -> int:
        assert request_id not in self.requests or self.requests[request_id].num_tokens is not None
        assert prompt_token_ids is None or len(prompt_token_ids) == prompt_len
        told = Told(
            prompt_len, prompt_token_ids and list(prompt_token_ids), labels, [], num_computed_tokens
        )
        handle = len(self.by_handle) + 1
        self.requests[request_id] = self.by_handle[handle] = told
        self._take(told, num_computed_tokens, list(block_ids))
        return handle

    def _take(self, told: Told, computed: int, blocks: list[int]) -> None:
        size = self.config.block_size
        told.blocks, told.end = blocks, computed
        if not size:
            assert not blocks
            return
        self._give(told, blocks[-(-computed // size) :])
        for position in range(len(blocks) * size):
            slot = blocks[position // size] * size + position % size
            if position >= computed:
                self.slots.pop(slot, None)
            elif position not in told.rows:
                told.rows[position] = self.slots.get(slot)
                self.cached += 1

    def _give(self, told: Told, blocks: list[int]) -> None:
        """New blocks: nobody else may still be going to write them.

        Full blocks of others may be among them: engines swap a full block for an equal one.
        """
        told.given += blocks
        for other in self.by_handle.values():
            if other is not told:
                assert not set(other.blocks[other.end // self.config.block_size :]) & set(blocks)

    def add_blocks(self, handle: int, block_ids: Any) -> None:
        told = self.by_handle[handle]
        self._give(told, block_ids)
        told.blocks = told.blocks + block_ids
        for block in block_ids:
            for slot in range(block * self.config.block_size, (block + 1) * self.config.block_size):
                self.slots.pop(slot, None)

    def step(self, rows: np.ndarray, runs: np.ndarray) -> None:
        layout, size = self.config.layout, self.config.block_size
        assert rows.dtype == layout.dtype
        assert rows.shape[1:] == (len(layout.layer_ids), layout.top_k)
        rows = rows.copy()  # as an agent does: their memory is another pass's afterwards
        self.rows.append(rows)
        at = 0
        for handle, position, count in runs.tolist():
            told = self.by_handle[handle]
            assert told.num_tokens is None, "rows after the end"
            assert position == told.end or self.gaps, "a gap, or a row told twice"
            told.end = max(told.end, position)
            for i in range(count):
                told.rows.setdefault(position + i, rows[at + i])
                if told.blocks:
                    block = told.blocks[(position + i) // size]
                    self.slots[block * size + (position + i) % size] = rows[at + i]
            told.end += count
            at += count
        assert at == len(rows)

    def preempt(self, handle: int, num_tokens: int) -> None:
        told = self.by_handle[handle]
        assert num_tokens == told.end
        told.blocks, told.preemptions = [], told.preemptions + 1

    def resume(self, handle: int, num_computed_tokens: int, block_ids: Any) -> None:
        told = self.by_handle[handle]
        assert not told.blocks
        told.attempts += 1
        assert told.attempts == told.preemptions + 1
        self._take(told, num_computed_tokens, list(block_ids))

    def finish(
        self, handle: int, num_tokens: int, *, reason: str, token_ids: list[int] | None
    ) -> None:
        told = self.by_handle[handle]
        assert told.num_tokens is None
        assert reason in ("stop", "length", "abort")
        assert (token_ids is None) == (told.prompt is None)
        assert token_ids is None or len(token_ids) == num_tokens
        told.num_tokens, told.reason, told.tokens, told.blocks = num_tokens, reason, token_ids, []

    def trace(self, request_id: str) -> np.ndarray:
        told = self.requests[request_id]
        assert told.num_tokens is not None
        assert sorted(told.rows) == list(range(told.num_tokens - 1)), "rows missing or too many"
        assert all(row is not None for row in told.rows.values())
        return np.array([told.rows[i] for i in range(told.num_tokens - 1)])


def _of_layers(model: Any, layout: ModelLayout, name: str) -> list[torch.nn.Module]:
    found = {}
    for path, module in model.named_modules():
        match = re.search(rf"layers\.(\d+)\.{name}$", path)
        if match and int(match[1]) in layout.layer_ids:
            found[int(match[1])] = module
    return [found[layer] for layer in layout.layer_ids]


def routers(model: Any, layout: ModelLayout) -> list[torch.nn.Module]:
    return _of_layers(model, layout, r"mlp\.(gate|router)")


class Truth:
    """Records which experts every layer is made to use, pass by pass: what its experts are given.

    That call is the same in all versions of the library, where routers and the blocks around them
    divide the choice in several ways.
    """

    def __init__(self, model: Any, layout: ModelLayout) -> None:
        self.passes: list[list[np.ndarray]] = []
        self.fed: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []
        """Of each layer of the latest pass: the weights of its experts."""
        self.hidden: list[torch.Tensor] = []
        """The same: the input of its block."""
        self._handles = [model.register_forward_pre_hook(self._start, with_kwargs=True)]
        for block in _of_layers(model, layout, "mlp"):
            self._handles.append(block.register_forward_pre_hook(self._input, with_kwargs=True))
        for experts in _of_layers(model, layout, r"mlp\.experts"):
            self._handles.append(experts.register_forward_pre_hook(self._ids, with_kwargs=True))

    def _start(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self.begin()
        self.fed.append(kwargs["input_ids"].clone())

    def begin(self) -> None:
        self.passes.append([])
        self.weights, self.hidden = [], []

    def _input(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.hidden.append([*args, *kwargs.values()][0].detach())

    def _ids(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        _, ids, weights = (*args, *kwargs.values())
        self.passes[-1].append(ids.numpy().copy())
        self.weights.append(weights.detach())

    def __enter__(self) -> Truth:
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def rows(self, i: int) -> np.ndarray:
        return np.stack(self.passes[i], axis=1)

    def by_position(self, prompt_mask: np.ndarray) -> list[dict[int, np.ndarray]]:
        """For each sequence of a batch that is computed column by column, its rows."""
        found: list[dict[int, np.ndarray]] = [{} for _ in prompt_mask]
        width, column = prompt_mask.shape[1], 0
        for i, fed in enumerate(self.fed):
            batch, count = fed.shape
            rows = self.rows(i).reshape(batch, count, *self.rows(i).shape[1:])
            for c in range(column, column + count):
                for b in range(batch):
                    if c >= width or prompt_mask[b, c]:
                        found[b][len(found[b])] = rows[b, c - column]
            column += count
        return found


def chosen_again(model: Any, layout: ModelLayout, hidden: list[torch.Tensor]) -> np.ndarray:
    """The ids [tokens, L, K] that the layers themselves choose for these inputs of their blocks."""
    with Truth(model, layout) as truth, torch.no_grad():
        truth.begin()
        for block, given in zip(_of_layers(model, layout, "mlp"), hidden, strict=True):
            block(given)
    return truth.rows(0)


def reforward(model: Any, layout: ModelLayout, tokens: list[int]) -> np.ndarray:
    with Truth(model, layout) as truth, torch.no_grad():
        model(input_ids=torch.tensor([tokens[:-1]]))
    return truth.rows(0)


def padded(prompts: list[list[int]], side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        pad = [PAD] * (width - len(prompt))
        real = [1] * len(prompt)
        ids.append(pad + prompt if side == "left" else prompt + pad)
        mask.append([0] * len(pad) + real if side == "left" else real + [0] * len(pad))
    return torch.tensor(ids), torch.tensor(mask)


def assert_no_hooks(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        hooks = {**module._forward_hooks, **module._forward_pre_hooks}
        assert not hooks, f"{name}: {hooks}"
