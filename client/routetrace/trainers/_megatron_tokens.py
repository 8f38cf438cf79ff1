"""Plans of the ranks of a Megatron-Core model whose rows are found by tokens.

One rank of a model replica locates the requests, for all: a request that ends meanwhile may turn
one that was found into one of several, and ranks must not mean different ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Literal

import torch.distributed as dist

from routetrace.client import _arguments as check
from routetrace.client._shells.sync import RouteClient
from routetrace.client.located import Locations
from routetrace.client.micro_batch import MicroBatch
from routetrace.client.options import Equal
from routetrace.client.plan import FetchPlan, Rank
from routetrace.common.errors import Incomplete, InvalidArgument
from routetrace.common.layout import ModelLayout

MissingSamples = Literal["live", "raise"]

#: Seconds between two looks for requests that have not ended, which double up to the second number.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


def plans_of(
    rank: Rank,
    layout: ModelLayout,
    client: RouteClient,
    tokens: Sequence[MicroBatch],
    *,
    missing: MissingSamples,
    equal: Equal,
    wait_seconds: float,
) -> list[FetchPlan]:
    """Return the plans of a rank, as `routetrace.trainers.megatron.plans`."""
    check.instance("client", client, RouteClient)
    batches = [
        check.instance(f"tokens[{i}]", batch, MicroBatch)
        for i, batch in enumerate(check.several("tokens", tokens, "MicroBatch"))
    ]
    check.choice("missing", missing, ("live", "raise"))
    check.choice("equal", equal, ("refuse", "any"))
    check.seconds("wait_seconds", wait_seconds)
    plans = [FetchPlan.make(layout, batch, rank) for batch in batches]
    groups = _groups()
    found: Any = None
    if all(group.rank() == 0 for group in groups):
        try:
            found = _locate(client, plans, equal, wait_seconds)
        except Exception as error:
            found = error
    for group in groups:
        held = [found]
        dist.broadcast_object_list(held, src=dist.get_global_rank(group, 0), group=group)
        found = held[0]
    if isinstance(found, Exception):
        raise found
    if missing == "raise":
        _refuse_unproven(layout, batches, found)
    return [plan.with_locations(locations) for plan, locations in zip(plans, found, strict=True)]


def layout_of(config: Any) -> ModelLayout:
    """Return the layout of a model with a Megatron configuration.

    Raises:
        InvalidArgument: if it does not say which layers route.
    """
    layers, frequency = config.num_layers, config.moe_layer_freq
    if isinstance(frequency, int) and frequency > 0:
        routed = tuple(range(0, layers, frequency))
    elif isinstance(frequency, (list, tuple)) and len(frequency) == layers:
        routed = tuple(i for i, routes in enumerate(frequency) if routes)
    else:
        raise InvalidArgument(
            field="config.moe_layer_freq",
            value=frequency,
            expected=f"an int, or {layers} of them",
            remedy="give layout=",
        )
    return ModelLayout(routed, layers, config.num_moe_experts, config.moe_router_topk)


def _groups() -> list[Any]:
    """Return the groups of this rank that share a micro-batch: tensors, context, pipeline."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    parallel_state: Any = import_module("megatron.core.parallel_state")
    if not parallel_state.model_parallel_is_initialized():
        if dist.get_world_size() == 1:
            return []
        raise InvalidArgument(
            field="tokens",
            value="groups of ranks that megatron.core.parallel_state does not know",
            expected="parallel_state.initialize_model_parallel() before",
            remedy="locate on one rank, and give each rank its rows",
        )
    return [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ]


def _locate(
    client: RouteClient, plans: Sequence[FetchPlan], equal: Equal, wait_seconds: float
) -> list[Locations]:
    """Locate the sequences of all micro-batches with one call."""
    sequences = [ids for plan in plans for ids in plan.sequences]
    until, pause = time.monotonic() + wait_seconds, _FIRST_PAUSE
    while True:
        found = client.locate(sequences, equal=equal)
        left = until - time.monotonic()
        if not found.unsettled or left <= 0:
            return list(_split(found, [len(plan.to_find) for plan in plans]))
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _split(found: Locations, counts: Sequence[int]) -> Iterator[Locations]:
    start = 0
    for count in counts:
        stop = start + count
        ambiguous, unsettled = (
            [i - start for i in indexes if start <= i < stop]
            for indexes in (found.ambiguous, found.unsettled)
        )
        yield Locations(found[start:stop], ambiguous, unsettled)
        start = stop


def _refuse_unproven(
    layout: ModelLayout, batches: Sequence[MicroBatch], found: Sequence[Locations]
) -> None:
    """Raise on all ranks alike, whichever of them needs the rows."""
    for number, (batch, locations) in enumerate(zip(batches, found, strict=True)):
        # Of a rank with all tokens: `unproven` of others may be empty.
        whole = FetchPlan.make(layout, batch, Rank(layout.moe_layer_ids))
        for sample, ranges in whole.with_locations(locations).unproven:
            raise Incomplete(
                f"tokens[{number}].samples[{sample}]: {ranges}",
                missing=(ranges,),
                remedy='use missing="live", or raise wait_seconds where requests may still run',
            )
