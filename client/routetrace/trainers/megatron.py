"""Replay in a Megatron-Core model through its RouterReplay; 0.16.1 or newer.

    rank = local_rank(model)
    plans = [FetchPlan.make(layout, batch, rank) for batch in micro_batches]
    with replay(model, client.prefetch(plans)):
        forward_backward_func(model=model, num_microbatches=len(plans), ...)

Every forward pass of a model chunk takes the rows of the next micro-batch in every schedule: 1F1B,
interleaved, no pipeline, forward only. A backward pass starts at the output of a forward pass, so
recomputed activations use the choices of that pass, in any order of passes.

Megatron's routers get the top-k from their `router_replay`. Inside the context it is replaced, on
the routers of the given model alone; Megatron's process-wide list of routers, which includes other
models, is not used. Scores are those of the router, so gradients reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from routetrace.client.plan import ContextLayout, Rank
from routetrace.client.rows import Rows
from routetrace.codec.frame import invalid_rows
from routetrace.common.errors import InvalidArgument
from routetrace.trainers._megatron_model import Model, check_router, model_chunks, routers_of


def local_layer_ids(model: Model) -> tuple[int, ...]:
    """Return absolute ids of the routed layers of a model or its virtual stages.

    Layers count from 0 over all pipeline stages (Megatron's `layer_number` counts from 1). Layers
    of multi-token prediction are left out.

    Args:
        model: the model of this rank: a model chunk or a list of them; wrapped or not.

    Returns:
        Ascending ids; empty if no layer of this rank routes.

    Raises:
        InvalidArgument: if two layers have the same number.
    """
    return tuple(sorted(layer for chunk in routers_of(model) for layer in chunk))


def local_rank(model: Model, *, cp_layout: ContextLayout = "zigzag") -> Rank:
    """Return layers, context and sequence parallelism of this rank, from its routers.

    Args:
        model: see `local_layer_ids`.
        cp_layout: layout of tokens on context parallel ranks; see `Rank`.

    Raises:
        InvalidArgument: as `local_layer_ids`.
    """
    found = {layer: router for chunk in routers_of(model) for layer, router in chunk.items()}
    if not found:
        return Rank(layer_ids=())
    router = next(iter(found.values()))
    context, tensor = router.cp_group, router.tp_group
    shared = router.config.sequence_parallel
    return Rank(
        layer_ids=sorted(found),
        cp_size=context.size(),
        cp_rank=context.rank(),
        cp_layout=cp_layout,
        sp_size=tensor.size() if shared else 1,
        sp_rank=tensor.rank() if shared else 0,
    )


def replay(model: Model, rows: Iterable[Rows], *, compare: bool = False) -> Replay:
    """Return a context in which forward passes of `model` use `rows`.

    Run one schedule (`forward_backward_func`) inside it, backward passes included. Where a row is
    not valid, the live router decides for that token.

    Args:
        model: argument of `forward_backward_func`: a model chunk or a list of them. Its modules
            must be called, not their `forward`.
        rows: rows of each micro-batch, in the order of the schedule, with all local layers; a list
            or an iterator, which is advanced as late as possible. Held until the last model chunk
            has used them. Ignored if no layer of this rank routes.
        compare: count cells where the live router would choose otherwise (`Replay.disagreement`).

    Raises:
        InvalidArgument: if the model does not take the replay path, with the reason. In a pass: if
            rows do not fit the model or its number of tokens, if rows are used up, or if a router
            does not use them. At the end: if rows are left over.
    """
    return Replay(model, rows, compare)


class Replay:
    """Context returned by `replay`."""

    def __init__(self, model: Model, rows: Iterable[Rows], compare: bool) -> None:
        modules = model_chunks(model)
        routers = routers_of(model)
        for layer, router in ((i, r) for chunk in routers for i, r in chunk.items()):
            check_router(layer, router)
        self._compare = compare
        self._differing: dict[torch.device, torch.Tensor] = {}
        self._compared: dict[torch.device, torch.Tensor] = {}
        found = [(m, r) for m, r in zip(modules, routers, strict=True) if r]
        self._feed = _Feed(rows, [r for _, r in found])
        self._chunks = [_Chunk(self, self._feed, *both) for both in found]

    def __enter__(self) -> Replay:
        if any(chunk.replays for chunk in self._chunks):
            raise InvalidArgument(field="model", value="replays already", expected="one replay")
        for chunk in self._chunks:
            chunk.attach()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for chunk in self._chunks:
            chunk.detach()
        if kind is None and self._chunks:
            self._feed.check_used([chunk.passes for chunk in self._chunks])

    @property
    def disagreement(self) -> float | None:
        """Share of valid cells where the live router would choose another set.

        Covers the forward passes of this rank so far; None without `compare` or before a pass.
        Waits for the device.
        """
        compared = sum(int(count) for count in self._compared.values())
        return sum(int(n) for n in self._differing.values()) / compared if compared else None

    def _count(self, live: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor) -> None:
        differs = (live.sort(dim=-1).values != ids.sort(dim=-1).values).any(dim=-1) & valid
        for counts, cells in ((self._differing, differs), (self._compared, valid)):
            counts[ids.device] = counts.get(ids.device, 0) + cells.sum()


class _Feed:
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


class _Pass:
    """One forward pass of a model chunk, with the choices for its recomputation."""

    def __init__(self, number: int, rows: Rows) -> None:
        self.number = number
        self.rows = rows
        self.on_device: tuple[torch.Tensor, torch.Tensor] | None = None
        self.chosen: dict[int, torch.Tensor] = {}  # layer -> [tokens, top_k], narrow

    def end(self) -> None:
        """Release the rows after the forward pass; the choices remain."""
        del self.rows, self.on_device


class _Chunk:
    """Model chunk whose routers replay."""

    def __init__(
        self, owner: Replay, feed: _Feed, module: nn.Module, routers: dict[int, Any]
    ) -> None:
        self.passes = 0
        self._owner = owner
        self._feed = feed
        self._module = module
        self._routers = routers
        self._column = {layer: i for i, layer in enumerate(routers)}
        self._forward: _Pass | None = None
        self._backward: _Pass | None = None
        self._undo: list[Callable[[], None]] = []

    @property
    def replays(self) -> bool:
        return any(isinstance(r.router_replay, _ChunkReplay) for r in self._routers.values())

    def attach(self) -> None:
        for layer, router in self._routers.items():
            self._undo.append(_restore(router))
            router.router_replay = _ChunkReplay(self, layer)
        self._undo.append(self._module.register_forward_pre_hook(self._begin).remove)
        self._undo.append(self._module.register_forward_hook(self._end).remove)

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._forward = self._backward = None

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        rows = self._feed.take(self.passes).layers(list(self._routers))
        self._forward = _Pass(self.passes, rows)
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
        if self._owner._compare:
            self._owner._count(live, wide, valid)
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

    def _check_tokens(self, now: _Pass, layer: int, given: int, tokens: int) -> None:
        if given != tokens:
            raise InvalidArgument(
                field=f"rows[{now.number}]",
                value=f"rows of {given} tokens",
                expected=f"{tokens} tokens, as many as layer {layer} routes in this pass",
            )


class _ChunkReplay:
    """Replacement of the RouterReplay of a router."""

    def __init__(self, chunk: _Chunk, layer: int) -> None:
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
