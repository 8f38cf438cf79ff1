"""slime (read: THUDM/slime at 624b824a).

`Sample.rollout_routed_experts` is int32 [tokens - 1, num_layers, top_k]; slime refuses other shapes
and MoE layers of zeros only. It also replays last tokens and padding, with consecutive ids modulo
the experts, and cannot mark missing rows.

This field carries all layers and tokens to every rank. The lazy hook avoids that: a router's
`RoutingReplay.record` accepts any object with `materialize_for_routing_replay(stage)`, which
returns int32 [local tokens, top_k] when the router runs. In place of `fill_routing_replay`,
`LazyRouting` records objects that fetch the rows of this rank on demand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from routetrace.client import _arguments as check
from routetrace.client._shells.prefetch import Prefetch
from routetrace.client._shells.sync import RouteClient
from routetrace.client.micro_batch import MicroBatch, Sample
from routetrace.client.plan import FetchPlan
from routetrace.client.rows import Rows
from routetrace.client.samples import SampleRows
from routetrace.client.trace import Trace, ids_to_torch
from routetrace.common.errors import Incomplete, InvalidArgument
from routetrace.trainers.dialects._sample import array_of, require_valid, required

if TYPE_CHECKING:
    import torch


def rollout_routed_experts(rows: Trace | SampleRows) -> npt.NDArray[np.int32]:
    """Return `Sample.rollout_routed_experts`.

    Returns:
        int32 [N - 1, num_hidden_layers, top_k] for a sample of N tokens; zeros in dense layers.

    Raises:
        Incomplete: if a cell is missing.
    """
    sample = SampleRows.of(rows)
    require_valid(sample, "slime")
    return array_of(sample, np.int32, "hidden")


def micro_batch(
    samples: Iterable[Sample], pad_size: int, *, cp_size: int = 1, allgather_cp: bool = False
) -> MicroBatch:
    """Return a micro-batch in the layout of slime (`get_batch`).

    Args:
        samples: samples in order.
        pad_size: tensor parallel size * `data_pad_size_multiplier`.
        cp_size: context parallel ranks.
        allgather_cp: `--allgather-cp`; plan with `cp_layout="ulysses"` if set, else "zigzag".

    Raises:
        InvalidArgument: if an argument is invalid.
    """
    samples = tuple(samples)
    total = check.whole("cp_size", cp_size, 1) * check.whole("pad_size", pad_size, 1)
    align = 1 if allgather_cp or cp_size == 1 else 2 * cp_size
    length = sum(-(-sample.num_tokens // align) * align for sample in samples)
    return MicroBatch.packed(samples, align=align, total_len=-(-length // total) * total)


class LazyRouting:
    """Rows of the micro-batches of this rank, fetched as their routers run.

    A lazy resource: register it with `RoutingReplay.register_lazy_resource`, and `clear_all` closes
    it. Rows are fetched ahead, and released when every router of their micro-batch has taken them
    in the last stage that needs them; on a later request they are fetched again.
    """

    def __init__(
        self,
        client: RouteClient,
        plans: Sequence[FetchPlan],
        *,
        device: Any = None,
        max_bytes: int = 256 << 20,
    ) -> None:
        """Create a resource without fetching.

        Args:
            client: client to fetch with.
            plans: one per micro-batch in the order in which they run, of the layers and tokens of
                this rank.
            device: device of the routers; None for the CPU.
            max_bytes: limit of rows fetched ahead, as in `RouteClient.prefetch`.
        """
        self._client = client
        self._plans = list(plans)
        self._device = device
        self._max_bytes = max_bytes
        self._release_stage = "backward"
        self._rows: dict[int, Rows] = {}
        self._taken: dict[int, set[int]] = {}
        self._ahead: Prefetch | None = None
        self._queued: deque[int] = deque()

    def fill(self, replays: Sequence[Any]) -> None:
        """Record every micro-batch and start to fetch.

        Args:
            replays: `RoutingReplay.all_routing_replays`: one per MoE layer of this rank, by layer.

        Raises:
            InvalidArgument: if their number differs from the layers of a plan.
        """
        for number, plan in enumerate(self._plans):
            layers = len(plan.layer_ids)
            if len(replays) != layers:
                raise InvalidArgument(
                    field="replays",
                    value=f"{len(replays)} routers",
                    expected=f"{layers}, one per layer of the plan",
                )
            for layer, replay in enumerate(replays):
                replay.record(LazyRows(self, number, layer))
        self._fetch_ahead()

    def begin_pass(self, release_stage: str) -> None:
        """Begin a pass: fetch the rows again that the previous pass released.

        `RoutingReplay.begin_lazy_pass` calls this. slime, as read, does not: call it before the
        forward pass for log-probabilities and before training, or rows are held in between.

        Args:
            release_stage: "forward" or "backward", the stage that releases the rows of a
                micro-batch; "backward" before the first call.
        """
        self._release_stage = check.choice("release_stage", release_stage, ("forward", "backward"))
        self._taken.clear()
        self._fetch_ahead()

    def close(self) -> None:
        """Release all rows."""
        if self._ahead:
            self._ahead.close()
        self._ahead = None
        self._rows.clear()
        self._taken.clear()

    def take(self, number: int, layer: int, stage: str) -> torch.Tensor:
        """Return the ids of a router, int32 [local tokens, top_k], on the device.

        Args:
            number: number of the micro-batch.
            layer: index among the layers of the plan.
            stage: "forward" or "backward" (recomputation).

        Raises:
            Incomplete: if a row is missing.
        """
        import torch

        rows = self._get(number)
        experts = rows.plan.layout.num_experts
        ids, valid = rows.topk_ids[layer], rows.valid[layer]
        if not valid.all():
            filler = np.arange(ids.size).reshape(ids.shape) % experts
            ids = np.where(valid[:, None], ids, filler.astype(ids.dtype))
        if stage == self._release_stage:
            taken = self._taken.setdefault(number, set())
            taken.add(layer)
            if len(taken) == len(rows.layer_ids):
                del self._rows[number], self._taken[number]
        return ids_to_torch(ids, experts, self._device, torch.int32)

    def _fetch_ahead(self) -> None:
        if self._ahead:
            self._ahead.close()
        self._queued = deque(n for n in range(len(self._plans)) if n not in self._rows)
        plans = [self._plans[number] for number in self._queued]
        self._ahead = self._client.prefetch(plans, max_bytes=self._max_bytes)

    def _get(self, number: int) -> Rows:
        while self._ahead and number in self._queued:
            self._rows[self._queued.popleft()] = _complete(next(self._ahead))
        if number not in self._rows:
            self._rows[number] = _complete(self._client.fetch(self._plans[number]))
        return self._rows[number]


class LazyRows:
    """Rows of one router and micro-batch, fetched on demand."""

    __slots__ = ("_layer", "_number", "_routing")

    def __init__(self, routing: LazyRouting, number: int, layer: int) -> None:
        self._routing, self._number, self._layer = routing, number, layer

    def materialize_for_routing_replay(self, stage: str) -> torch.Tensor:
        """Return int32 [local tokens, top_k]; `stage` is "forward" or "backward"."""
        return self._routing.take(self._number, self._layer, stage)


def _complete(rows: Rows) -> Rows:
    lacking = ~rows.valid & required(rows.plan)
    if lacking.any():
        layer, token = (int(i) for i in np.argwhere(lacking)[0])
        raise Incomplete(
            f"{int(lacking.sum())} cells are missing, the first at position "
            f"{rows.plan.position_of[token]} of sample {rows.plan.sample_of[token]}, layer "
            f"{rows.layer_ids[layer]}; slime cannot mark missing rows, and would train on a filler",
            missing=tuple(missing for _, missing in rows.missing),
        )
    return rows
