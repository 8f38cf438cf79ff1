"""Rollout Routing Replay in a transformers model (R3, arXiv:2510.11370).

    batch = MicroBatch.padded(samples, seq_len, padding_side="left")
    plan = FetchPlan.make(layout, batch, Rank(layout.layer_ids, flatten="batch"))
    with replay(model, client.fetch(plan)):
        loss = loss_of(model(input_ids, attention_mask=mask))
    loss.backward()

Only the choice is replayed. While a router runs, or the function of the block around it that
chooses in its place, the call of `topk` that chooses experts returns the given ids and the scores
at them. Scores are still computed (softmax before or after, sigmoid, bias, normalisation,
scaling), so gradients reach the router through them.

The backward pass may run inside the block or after it: activation checkpointing reruns routers with
the choice of their forward pass. Under FSDP2 (`fully_shard`) each rank replays the rows of its own
tokens. Routers stay out of the graphs of compiled models.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from routetrace.client import _arguments as check
from routetrace.client._shells.sync import RouteClient
from routetrace.client.layouts import check_padding_side
from routetrace.client.options import Equal
from routetrace.client.rows import Rows
from routetrace.common.errors import InvalidArgument, kind_of
from routetrace.common.layout import ModelLayout
from routetrace.trainers._auto import (
    AutoReplay,
    MissingSamples,
    checked,
    unwrapped,
)
from routetrace.trainers._choosers import choosers_of, refuse_whole_graphs
from routetrace.trainers._force import Compare, Forcer, Given, Router
from routetrace.trainers._given import Ids, of_arrays, of_rows
from routetrace.trainers._inputs import Inputs
from routetrace.trainers._passes import Passes
from routetrace.trainers._seats import Place, checkpoints_of, leave, take
from routetrace.trainers.agreement import Agreement, of_overlap, overlap, tally


class Trace(Protocol):
    """Part of `Trace` that `collate` uses."""

    @property
    def topk_ids(self) -> npt.NDArray[Any]:
        """[tokens, layers, top_k]."""
        ...

    @property
    def valid(self) -> npt.NDArray[np.bool_]:
        """[tokens, layers]."""
        ...

    @property
    def layer_ids(self) -> Sequence[int]:
        """Absolute layer ids of the columns."""
        ...

    @property
    def token_start(self) -> int:
        """Position of the first row."""
        ...


def replay(
    model: Any,
    topk_ids: Rows | Ids | Literal["own"],
    *,
    layer_ids: Sequence[int] | None = None,
    valid: Ids | None = None,
    compare: Compare = False,
    layout: ModelLayout | None = None,
) -> Replay:
    """Make every forward pass in the block, and its backward pass, use the given experts.

    All passes in the block must process the same tokens, such as old log-probabilities, then
    training; use another block for another micro-batch.

    Ids are copied to a device when its first layer runs, in a narrow dtype, and without waiting if
    their memory is pinned. Do not write to that memory within the block.

    With rows of a plan, the token ids of each pass are compared with those of the samples, or its
    attention mask where a sample has no token ids. A mismatch, such as padding on the other side,
    raises InvalidArgument; on CUDA in a later pass or when the block ends: step the optimizer after
    it.

    Args:
        model: a MoE model of transformers.
        topk_ids: rows of a plan with `Rank(flatten="batch")`; or integer ids [batch, seq, L, K] or
            [tokens, L, K], in the token order of the routers: batch by batch. "own" replays
            nothing but the model's own choices, where activation checkpointing runs routers again,
            with any number of passes and tokens in the block.
        layer_ids: absolute layer ids of the L columns: all MoE layers of the model, in any order.
            None for rows of a plan, which have their own.
        valid: bool, shape of topk_ids without its last one or two axes. Where False, the model's
            own router decides: padding, the last token, rows not captured. None for all valid, and
            for rows of a plan.
        compare: also keep the choices of the model's own routers, see `Replay.agreement` and
            `Replay.trainer_ids`; runs every router twice. "only": keep their choices and replay
            nothing.
        layout: layout of the model; by default from `model.config`.

    Raises:
        InvalidArgument: if routers, shapes, layers or the flattening of a plan do not fit, or ids
            are out of range or repeated in a valid cell. In a pass, if its number of tokens or the
            tokens are not those of the plan, or a router does not run, does not choose by one call
            of `topk`, or is in a checkpoint of another kind. When the block ends, if layers ran
            alone or no pass was made.
    """
    if compare not in (False, True, "only"):
        raise InvalidArgument(field="compare", value=compare, expected='a bool, or "only"')
    config = getattr(model, "config", None)
    if config is None and layout is None:
        raise InvalidArgument(
            field="model", value=kind_of(model), expected="a transformers MoE model"
        )
    layout = ModelLayout.from_config(config) if layout is None else layout
    choosers = {
        layer: Router(*found, layer, layout.num_experts, layout.top_k)
        for layer, found in choosers_of(model, layout).items()
    }
    if isinstance(model, nn.Module):
        refuse_whole_graphs(model, [router.owner for router in choosers.values()])
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(topk_ids, str):
        for name, value, unset in (
            ("topk_ids", topk_ids, "own"),
            ("layer_ids", layer_ids, None),
            ("valid", valid, None),
            ("compare", compare, False),
        ):
            if value is not unset and value != unset:
                raise InvalidArgument(
                    field=name, value=value, expected=f'{unset!r}, for the "own" choice'
                )
        return Replay(model, None, [Forcer(r, None, 0, False) for r in choosers.values()], None)
    rows = topk_ids if isinstance(topk_ids, Rows) else None
    if rows is not None:
        for name, value in (("layer_ids", layer_ids), ("valid", valid)):
            if value is not None:
                raise InvalidArgument(field=name, value=value, expected="None, with rows of a plan")
        layer_ids = rows.layer_ids
    elif layer_ids is None and not isinstance(topk_ids, (np.ndarray, torch.Tensor)):
        raise InvalidArgument(
            field="topk_ids",
            value=kind_of(topk_ids),
            expected="Rows, or an array with layer_ids",
            remedy="use client.fetch(plan), or collate(traces, ...)",
        )
    columns = [] if layer_ids is None else list(layer_ids)
    if sorted(columns) != sorted(choosers):
        raise InvalidArgument(
            field="layer_ids",
            value=columns,
            expected=f"the layers of the model's {len(choosers)} routers, {sorted(choosers)}",
        )
    if isinstance(topk_ids, Rows):
        given = of_rows(layout, topk_ids)
    else:
        given = of_arrays(layout, topk_ids, columns, valid)
    forcers = [
        Forcer(choosers[layer], given, column, compare) for column, layer in enumerate(columns)
    ]
    return Replay(model, given, forcers, rows)


def auto(
    model: Any,
    client: RouteClient,
    *,
    missing: MissingSamples = "live",
    compare: bool = False,
    skip: Callable[[Mapping[str, Any]], bool] | None = None,
    equal: Equal = "refuse",
    wait_seconds: float = 10.0,
) -> AutoReplay:
    """Replay the rows of the requests whose tokens a pass gets, in all passes from now on.

        auto(model, client)

    Each pass finds its sequences in `input_ids`, with `attention_mask` or, packed, `position_ids`
    or `cu_seq_lens_q`; locates them, reads their rows and replays them, its backward pass included,
    whenever and wherever that runs. Passes of `generate` and others with a KV cache are left to the
    model, and those of a PEFT model whose adapters are disabled. A pass whose sequences are not
    known is refused.

    Args:
        model: a MoE model of transformers, or a PEFT, DDP, FSDP2 or compiled model of one. Make it
            before the first pass.
        client: reads the rows, of its run.
        missing: samples that no request is proven to have, or with missing rows: "live" leaves
            such cells to the model's own routers; "drop" does too, and the caller multiplies its
            loss by `AutoReplay.loss_mask`; "raise" raises Incomplete, or DeadlineExceeded.
        compare: also count how often the model's own routers choose otherwise; runs every router
            twice.
        skip: called with the arguments of a pass, by name: True leaves it to the model.
        equal: as in `ReadOptions`.
        wait_seconds: for requests whose end has not been reported yet, at the first pass of a
            sample, and for their rows.

    Returns:
        An `AutoReplay`: its `totals` count; `close` ends it.

    Raises:
        InvalidArgument: naming the wrong argument; if the model is replayed already. In a pass, as
            `replay`.
    """
    missing, equal, wait_seconds = checked(missing, compare, equal, wait_seconds, skip)
    found = unwrapped(model)
    return AutoReplay(
        found,
        check.instance("client", client, RouteClient),
        functools.partial(replay, found, compare=compare),
        missing=missing,
        equal=equal,
        wait_seconds=wait_seconds,
        skip=skip,
    )


def _take(taken: contextlib.ExitStack, place: Place, user: Any = None) -> None:
    take(place, user)
    taken.callback(leave, place, user)


class Replay:
    """Context returned by `replay`."""

    def __init__(
        self, model: Any, given: Given | None, forcers: list[Forcer], rows: Rows | None
    ) -> None:
        self._given = given
        self._forcers = forcers
        self._rows = rows
        inputs = None if rows is None else Inputs(rows.plan)
        self._passes = Passes(model, forcers if given else [], inputs)
        self._taken = contextlib.ExitStack()

    def __enter__(self) -> Replay:
        modules = self._passes.modules
        with contextlib.ExitStack() as taken:
            for module in modules:
                _take(taken, Place(module, "forward", "pass"), self._passes)
            for one in self._forcers:
                _take(taken, Place(one.router.owner, one.router.name, "router"), one)
            if not all(one.is_inert for one in self._forcers):
                for place in checkpoints_of(modules[-1]):
                    _take(taken, place)
            self._taken = taken.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._taken.close()
        if self._given:
            self._given.settle()
        self._passes.settle(failed=error is not None)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a pass; 0 for "own"."""
        return 0 if self._given is None else len(self._forcers[0].ids)

    @property
    def trainer_ids(self) -> torch.Tensor | None:
        """Choices of the model's own routers in the latest pass.

        A CPU tensor [L, tokens, K] of uint8 up to 256 experts, int32 above, with the layers of the
        rows or `layer_ids`. Earlier layers were replayed, unless `compare` is "only". None without
        `compare` or before a pass. Waits for the device.
        """
        live = [forcer.live.cpu() for forcer in self._forcers if forcer.live is not None]
        if len(live) < len(self._forcers):
            return None
        ids = torch.stack(live)
        return ids if ids.dtype == torch.uint8 else ids.int() & 0xFFFF

    @property
    def agreement(self) -> Agreement:
        """Agreement of the model's own routers with the given ids in the latest pass.

        Empty without `compare` or before a pass. Waits for the device. Counts of planned and
        fallback tokens need rows of a plan.
        """
        forcers = [forcer for forcer in self._forcers if forcer.live is not None]
        if not forcers:
            return Agreement()
        matched = [overlap(forcer.ids, forcer.live) for forcer in forcers]
        matched_ids = np.stack([counts.cpu().numpy() for counts in matched])
        if self._rows is not None and len(forcers) == len(self._forcers):
            return of_overlap(self._rows, matched_ids)
        valid = np.stack([forcer.valid.cpu().numpy() for forcer in forcers])
        layers = [forcer.layer for forcer in forcers]
        return tally(matched_ids, valid, layers, forcers[0].ids.shape[1])

    @property
    def disagreement(self) -> float | None:
        """Share of valid cells where the model's own choice is another set.

        Covers the latest pass; None without `compare` or before a pass. Waits for the device.
        """
        return self.agreement.disagreement


def collate(
    traces: Sequence[Trace],
    token_lens: Sequence[int],
    seq_len: int,
    *,
    padding_side: Literal["left", "right"] | None = None,
    dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay out the rows of traces as their tokens in a padded batch.

    The row of position p has the column of token p. Padding has no row, nor has the last token of a
    sequence, unless the trace has one; rows of tokens outside the batch are left out.

    Args:
        traces: one per sequence, with equal layers.
        token_lens: tokens of each sequence in the batch, from position 0.
        seq_len: columns of the batch.
        padding_side: side of the padding; needed where a sequence is shorter than seq_len.
        dtype: integer dtype of the ids; a narrow one (uint8 up to 256 experts) saves memory.

    Returns:
        Ids [batch, seq_len, L, K], and their validity, bool [batch, seq_len, L].

    Raises:
        InvalidArgument: if counts, lengths, layers or top-k are inconsistent.
    """
    if not traces or len(token_lens) != len(traces):
        raise InvalidArgument(
            field="token_lens", value=f"{len(token_lens)} lengths", expected=f"{len(traces)}, > 0"
        )
    check_padding_side("token_lens", padding_side, token_lens, seq_len)
    layer_ids, shape = list(traces[0].layer_ids), traces[0].topk_ids.shape[1:]
    ids = torch.zeros((len(traces), seq_len, *shape), dtype=dtype)
    valid = torch.zeros((len(traces), seq_len, shape[0]), dtype=torch.bool)
    for i, (trace, length) in enumerate(zip(traces, token_lens, strict=True)):
        if list(trace.layer_ids) != layer_ids or trace.topk_ids.shape[1:] != shape:
            raise InvalidArgument(
                field=f"traces[{i}]",
                value=f"layers {list(trace.layer_ids)}, top-{trace.topk_ids.shape[2]}",
                expected=f"layers {layer_ids}, top-{shape[1]}, as in the first trace",
            )
        if not 0 <= length <= seq_len:
            raise InvalidArgument(
                field=f"token_lens[{i}]", value=length, expected=f"a length in [0, {seq_len}]"
            )
        count = max(0, min(len(trace.topk_ids), length - trace.token_start))
        column = trace.token_start + (seq_len - length if padding_side == "left" else 0)
        rows = np.ascontiguousarray(trace.topk_ids[:count], dtype=np.int64)
        ids[i, column : column + count] = torch.from_numpy(rows).to(dtype)
        valid[i, column : column + count] = torch.from_numpy(trace.valid[:count].copy())
    return ids, valid
