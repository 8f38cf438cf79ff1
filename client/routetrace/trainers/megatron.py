"""Replay in a Megatron-Core model through its RouterReplay; 0.16.1 or newer.

    batches = [MicroBatch.packed([Sample.of(token_ids=ids), ...], align=4), ...]
    with replay(model, client=client, tokens=batches):
        forward_backward_func(model=model, num_microbatches=len(batches), ...)

finds the rows by the tokens of the samples. With ids of requests at hand:

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

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from routetrace.client._shells.prefetch import Prefetch
from routetrace.client._shells.sync import RouteClient
from routetrace.client.micro_batch import MicroBatch
from routetrace.client.options import Equal, Missing
from routetrace.client.plan import ContextLayout, FetchPlan, Rank
from routetrace.client.rows import FetchStats, Rows
from routetrace.common.errors import InvalidArgument, kind_of
from routetrace.common.layout import ModelLayout
from routetrace.trainers._megatron_chunks import ReplayedChunk, RowFeed
from routetrace.trainers._megatron_model import Model, check_router, model_chunks, routers_of
from routetrace.trainers._megatron_tokens import MissingSamples, layout_of, plans_of


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


def plans(
    model: Model,
    client: RouteClient,
    tokens: Sequence[MicroBatch],
    *,
    layout: ModelLayout | None = None,
    missing: MissingSamples = "live",
    equal: Equal = "refuse",
    wait_seconds: float = 10.0,
    cp_layout: ContextLayout = "zigzag",
) -> list[FetchPlan]:
    """Return this rank's plans of micro-batches whose requests are found by their tokens.

    A collective call of all ranks of a model replica: one of them locates the requests, so that all
    mean the same ones. Use the plans for each schedule over these micro-batches.

    Args:
        model: see `local_layer_ids`.
        client: reads the rows, of its run.
        tokens: the micro-batches, as they are before context, sequence and pipeline parallelism
            split them, of samples without trace ids: `Sample.of(token_ids=ids)`.
        layout: of the model; by default from its configuration.
        missing: samples that no request is proven to have: "live" leaves them to the model's own
            routers; "raise" raises Incomplete, on all ranks.
        equal: as in `ReadOptions`; equal samples of all micro-batches get the requests in turn.
        wait_seconds: for requests whose end has not been reported yet.
        cp_layout: as in `local_rank`.

    Raises:
        InvalidArgument: naming the wrong argument.
        RouteTraceError: as `RouteClient.locate`, on all ranks.
    """
    rank = local_rank(model, cp_layout=cp_layout)
    if layout is None:
        layout = layout_of(model_chunks(model)[0].config)
    return plans_of(
        rank,
        layout,
        client,
        tokens,
        missing=missing,
        equal=equal,
        wait_seconds=wait_seconds,
    )


def replay(
    model: Model,
    rows: Iterable[Rows] | None = None,
    *,
    client: RouteClient | None = None,
    tokens: Sequence[MicroBatch] | None = None,
    compare: bool = False,
    **found: Any,
) -> Replay:
    """Return a context in which forward passes of `model` use `rows`, or those of `tokens`.

    Run one schedule (`forward_backward_func`) inside it, backward passes included. Where a row is
    not valid, the live router decides for that token.

    Args:
        model: argument of `forward_backward_func`: a model chunk or a list of them. Its modules
            must be called, not their `forward`.
        rows: rows of each micro-batch, in the order of the schedule, with all local layers; a list
            or an iterator, which is advanced as late as possible. Held until the last model chunk
            has used them. Ignored if no layer of this rank routes.
        client: with `tokens`, in place of rows: reads those of the requests that have the tokens.
        tokens: as in `plans`; a collective call of all ranks of a model replica.
        compare: count cells where the live router would choose otherwise (`Replay.disagreement`).
        found: other arguments of `plans`.

    Raises:
        InvalidArgument: if the model does not take the replay path, with the reason. In a pass: if
            rows do not fit the model or its number of tokens, if rows are used up, or if a router
            does not use them. At the end: if rows are left over.
        RouteTraceError: as `plans`.
    """
    if (rows is None) == (tokens is None) or (client is None) != (tokens is None):
        raise InvalidArgument(
            field="rows", value=kind_of(rows), expected="rows, or both client and tokens"
        )
    if client is None or tokens is None:
        if found:
            name = next(iter(found))
            raise InvalidArgument(field=name, value=found[name], expected="tokens beside it")
        assert rows is not None
        return Replay(model, rows, compare)
    chosen = plans(model, client, tokens, **found)
    mask: Missing = "raise" if found.get("missing") == "raise" else "mask"
    wait = found.get("wait_seconds", 10.0)
    fetched = client.prefetch(chosen, missing=mask, wait_for="end", timeout=wait)
    try:
        return Replay(model, fetched, compare, fetched)
    except BaseException:
        fetched.close()
        raise


class Replay:
    """Context returned by `replay`."""

    def __init__(
        self,
        model: Model,
        rows: Iterable[Rows],
        compare: bool,
        fetched: Prefetch | None = None,
    ) -> None:
        self._fetched = fetched
        modules = model_chunks(model)
        routers = routers_of(model)
        for layer, router in ((i, r) for chunk in routers for i, r in chunk.items()):
            check_router(layer, router)
        self.compares = compare
        """Whether it counts."""
        self._differing: dict[torch.device, torch.Tensor] = {}
        self._compared: dict[torch.device, torch.Tensor] = {}
        found = [(m, r) for m, r in zip(modules, routers, strict=True) if r]
        self._feed = RowFeed(rows, [r for _, r in found])
        self._chunks = [ReplayedChunk(self, self._feed, *both) for both in found]

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
        if self._fetched:
            self._fetched.close()
        if kind is None and self._chunks:
            self._feed.check_used([chunk.passes for chunk in self._chunks])

    @property
    def stats(self) -> FetchStats:
        """Cost of the rows of `tokens` so far, and how many samples were found; else empty."""
        return self._fetched.stats if self._fetched else FetchStats()

    @property
    def disagreement(self) -> float | None:
        """Share of valid cells where the live router would choose another set.

        Covers the forward passes of this rank so far; None without `compare` or before a pass.
        Waits for the device.
        """
        compared = sum(int(count) for count in self._compared.values())
        return sum(int(n) for n in self._differing.values()) / compared if compared else None

    def count(self, live: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor) -> None:
        """Count the cells of one layer in a pass where the live choice is another set."""
        differs = (live.sort(dim=-1).values != ids.sort(dim=-1).values).any(dim=-1) & valid
        for counts, cells in ((self._differing, differs), (self._compared, valid)):
            counts[ids.device] = counts.get(ids.device, 0) + cells.sum()
