"""Model chunks of Megatron-Core whose routers replay, pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from routetrace.client.rows import Rows
from routetrace.codec.frame import invalid_rows
from routetrace.common.errors import InvalidArgument


class Counter(Protocol):
    """Counts where live routers would choose otherwise."""

    @property
    def compares(self) -> bool:
        """Whether it counts."""
        ...

    def count(self, live: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor) -> None:
        """Count the cells of one layer in a pass."""
        ...


class RowFeed:
    """Rows of micro-batches, each held until every model chunk has taken them."""

    def __init__(self, rows: Iterable[Rows], chunks: list[dict[int, Any]]) -> None:
        self._given = len(rows) if isinstance(rows, Sequence) else None
        self._rows: Iterator[Rows] = iter(rows)
        self._routers = {layer: router for chunk in chunks for layer, router in chunk.items()}
        self._readers = len(chunks)
        self._waiting: dict[int, tuple[Rows, int]] = {}
        self._pulled = 0

    def take(self, number: int) -> Rows:
        """Return the rows of a micro-batch, once per chunk."""
        if number == self._pulled:
            rows = next(self._rows, None)
            if rows is None:
                raise InvalidArgument(
                    field="rows",
                    value=f"rows of {number} micro-batches",
                    expected="rows for every forward pass of the model",
                )
            _check_rows(number, rows, self._routers)
            self._waiting[number] = rows, self._readers
            self._pulled += 1
        rows, readers = self._waiting.pop(number)
        if readers > 1:
            self._waiting[number] = rows, readers - 1
        return rows

    def check_used(self, passes: list[int]) -> None:
        """Raise if rows are left over."""
        given = self._pulled if self._given is None else self._given
        if any(count != given for count in passes):
            raise InvalidArgument(
                field="rows",
                value=f"rows of {given} micro-batches",
                expected=f"as many as forward passes of each model chunk: {passes}",
            )


class ChunkPass:
    """One forward pass of a model chunk, with the choices for its recomputation."""

    def __init__(self, number: int, rows: Rows) -> None:
        self.number = number
        self.rows = rows
        self.on_device: tuple[torch.Tensor, torch.Tensor] | None = None
        self.chosen: dict[int, torch.Tensor] = {}  # layer -> [tokens, top_k], narrow

    def end(self) -> None:
        """Release the rows after the forward pass; the choices remain."""
        del self.rows, self.on_device


class ReplayedChunk:
    """Model chunk whose routers replay."""

    def __init__(
        self, owner: Counter, feed: RowFeed, module: nn.Module, routers: dict[int, Any]
    ) -> None:
        self.passes = 0
        self._owner = owner
        self._feed = feed
        self._module = module
        self._routers = routers
        self._column = {layer: i for i, layer in enumerate(routers)}
        self._forward: ChunkPass | None = None
        self._backward: ChunkPass | None = None
        self._undo: list[Callable[[], None]] = []

    @property
    def replays(self) -> bool:
        return any(isinstance(r.router_replay, ChunkReplay) for r in self._routers.values())

    def attach(self) -> None:
        for layer, router in self._routers.items():
            self._undo.append(_restore(router))
            router.router_replay = ChunkReplay(self, layer)
        self._undo.append(self._module.register_forward_pre_hook(self._begin).remove)
        self._undo.append(self._module.register_forward_hook(self._end).remove)

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._forward = self._backward = None

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        rows = self._feed.take(self.passes).layers(list(self._routers))
        self._forward = ChunkPass(self.passes, rows)
        self.passes += 1

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        done, self._forward = self._forward, None
        assert done is not None
        unused = sorted(set(self._routers) - set(done.chosen))
        if unused:
            raise InvalidArgument(
                field="model",
                value=f"routers of layers {unused}, which did not use their rows",
                expected="a forward pass that runs every router, as TopKRouter without fusion",
            )
        done.end()

        # A backward pass runs this hook before it recomputes activations.
        def begin_backward(_gradient: torch.Tensor) -> None:
            if not self._undo:
                raise InvalidArgument(
                    field="backward",
                    value="a backward pass after the end of replay()",
                    expected="a backward pass inside replay(), to recompute with the same choices",
                )
            self._backward = done
            torch.autograd.Variable._execution_engine.queue_callback(end_backward)

        def end_backward() -> None:
            if self._backward is done:
                self._backward = None

        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(begin_backward)  # type: ignore[no-untyped-call]

    def choose(self, layer: int, scores: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        """Return the ids [tokens, top_k] int64 that a router uses."""
        if self._forward is None:
            return self._choose_again(layer, scores)
        now = self._forward
        if now.on_device is None:
            now.on_device = now.rows.to_torch(scores.device)
        ids, valid = (tensor[self._column[layer]] for tensor in now.on_device)
        self._check_tokens(now, layer, len(ids), len(scores))
        if layer in now.chosen:
            raise InvalidArgument(
                field=f"layers.{layer}", value="a second call", expected="one call in a pass"
            )
        wide = torch.where(valid[:, None], ids.long(), live)
        if self._owner.compares:
            self._owner.count(live, wide, valid)
        now.chosen[layer] = wide.to(ids.dtype)
        return wide

    def _choose_again(self, layer: int, scores: torch.Tensor) -> torch.Tensor:
        """Return the choice of the forward pass, as live routers may not repeat theirs."""
        if self._backward is None:
            raise InvalidArgument(
                field=f"layers.{layer}",
                value="a router called outside of a forward pass of the given model, "
                "and of a backward pass from its output",
                expected="a schedule that calls the modules passed to replay()",
            )
        chosen = self._backward.chosen[layer]
        self._check_tokens(self._backward, layer, len(chosen), len(scores))
        return chosen.long()

    def _check_tokens(self, now: ChunkPass, layer: int, given: int, tokens: int) -> None:
        if given != tokens:
            raise InvalidArgument(
                field=f"rows[{now.number}]",
                value=f"rows of {given} tokens",
                expected=f"{tokens} tokens, as many as layer {layer} routes in this pass",
            )


class ChunkReplay:
    """Replacement of the RouterReplay of a router."""

    def __init__(self, chunk: ReplayedChunk, layer: int) -> None:
        self._chunk = chunk
        self._layer = layer

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores at the ids, ids), each [tokens, topk]; Megatron's signature."""
        with torch.no_grad():
            _, live = default_compute_topk(scores, topk, num_groups, group_topk)
            ids = self._chunk.choose(self._layer, scores, live)
        return scores.gather(1, ids), ids


def _restore(router: Any) -> Callable[[], None]:
    before = router.router_replay
    return lambda: setattr(router, "router_replay", before)


def _check_rows(number: int, rows: Rows, routers: dict[int, Any]) -> None:
    """Raise if rows do not fit the model, or would break its dispatcher."""
    field = f"rows[{number}]"
    missing = sorted(set(routers) - set(rows.layer_ids))
    if missing:
        raise InvalidArgument(
            field=f"{field}.layer_ids",
            value=list(rows.layer_ids),
            expected=f"all layers that route here; missing are {missing}",
        )
    layout, top_k = rows.plan.layout, rows.topk_ids.shape[2]
    given = (top_k, layout.num_experts, layout.num_hidden_layers)
    for router in routers.values():
        config = router.config
        # Hybrid models may count attention and experts as separate layers.
        own = (router.topk, config.num_moe_experts, config.num_layers)
        if own != given:
            template = "top-{} of {} experts, {} decoder layers"
            raise InvalidArgument(
                field=field,
                value=template.format(*given),
                expected=f"{template.format(*own)}, as in the model",
            )
    for layer, ids, valid in zip(rows.layer_ids, rows.topk_ids, rows.valid, strict=True):
        bad = invalid_rows(ids[:, None], layout.num_experts) & valid
        if bad.any():
            token = int(bad.argmax())
            raise InvalidArgument(
                field=field,
                value=f"{ids[token].tolist()} for token {token} at layer {layer}",
                expected=f"distinct ids in [0, {layout.num_experts}) in every valid cell",
            )


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
