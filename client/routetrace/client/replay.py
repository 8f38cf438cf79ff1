"""Makes a transformers model route as it is told: Rollout Routing Replay (R3, arXiv:2510.11370).

    ids, valid = collate(traces, token_lens, seq_len, padding_side="left")
    with replay(model, ids, layer_ids=traces[0].layer_ids, valid=valid):
        loss = loss_of(model(input_ids, attention_mask=mask))
        loss.backward()

Only the choice is replayed. While a router runs, its call of `topk` that chooses experts is
answered with the given ids and the scores at them; what the router makes of scores (softmax before
or after, sigmoid, bias, normalisation, scaling) stays its own, and gradients reach it through them.

The backward pass belongs inside the block: activation checkpointing runs the routers again there.
Compiled models are not supported, since the routers of a compiled model do not run hooks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from routetrace.v1.errors import InvalidArgument
from routetrace.v1.layout import RoutingLayout
from routetrace.v1.model_map import layout_from_config

# A module of decoder layer <i>, by its name below the decoder.
_LAYER = re.compile(r"(?:layers|blocks|h)\.(\d+)\.")
_TOPK = (torch.topk, torch.Tensor.topk)

Ids = torch.Tensor | npt.NDArray[Any]


class Trace(Protocol):
    """What `collate` needs of a `RoutingTrace`."""

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
    topk_ids: Ids,
    *,
    layer_ids: Sequence[int],
    valid: Ids | None = None,
    compare: bool = False,
    layout: RoutingLayout | None = None,
) -> Replay:
    """Makes every forward and backward pass of the block use the given experts.

    All passes of the block must be over the same tokens: old log-probabilities first and training
    next is fine, another micro-batch needs a block of its own.

    Args:
        model: a MoE model of transformers.
        topk_ids: integer ids [batch, seq, L, K], or [tokens, L, K] in the order in which routers
            see tokens: batch by batch.
        layer_ids: absolute layer ids of the L columns: all MoE layers of the model, in any order.
        valid: bool, as topk_ids without its last one or two axes. Where False, the model's own
            router decides: padding, the last token, rows that were not captured. None: all valid.
        compare: counts how often the model's own routers would have chosen otherwise
            (`Replay.disagreement`). Runs every router twice.
        layout: the model's layout; found from `model.config` if not given.

    Raises:
        InvalidArgument: naming what does not fit: the model's routers, shapes, layers, ids out of
            range or repeated within a valid cell. In a pass, if the number of its tokens is another
            or a router does not choose by one call of `topk`.
    """
    layout = layout_from_config(model.config) if layout is None else layout
    return Replay(model, layout, topk_ids, list(layer_ids), valid, compare)


class Replay:
    """The context that `replay` makes."""

    def __init__(
        self,
        model: Any,
        layout: RoutingLayout,
        topk_ids: Ids,
        layer_ids: list[int],
        valid: Ids | None,
        compare: bool,
    ) -> None:
        routers = _routers(model, layout)
        if sorted(layer_ids) != sorted(routers):
            raise InvalidArgument(
                field="layer_ids",
                value=layer_ids,
                expected=f"the layers of the model's {len(routers)} routers, {sorted(routers)}",
            )
        ids, mask = _checked(layout, topk_ids, layer_ids, valid)
        self.num_tokens = ids.shape[1]
        self._compare = compare
        self._differing: dict[torch.device, torch.Tensor] = {}
        self._compared: dict[torch.device, torch.Tensor] = {}
        self._handles: list[Any] = []
        self._forcers = [
            _Forcer(self, routers[layer], layer, layout.num_experts, ids[column], mask[column])
            for column, layer in enumerate(layer_ids)
        ]

    def __enter__(self) -> Replay:
        for forcer in self._forcers:
            self._handles += [
                forcer.router.register_forward_pre_hook(forcer.before, with_kwargs=True),
                # Also after an exception, which ends recomputation early in the usual case.
                forcer.router.register_forward_hook(forcer.after, always_call=True),
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def disagreement(self) -> float | None:
        """Share of the valid (token, layer) cells where the model's own choice is another set.

        Over all passes so far, recomputation included; None without `compare` or before a pass.
        Waits for the device.
        """
        compared = sum(int(count) for count in self._compared.values())
        return sum(int(n) for n in self._differing.values()) / compared if compared else None

    def _count(self, live: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor) -> None:
        differs = (live.sort(dim=-1).values != ids.sort(dim=-1).values).any(dim=-1) & valid
        for counts, cells in ((self._differing, differs), (self._compared, valid)):
            counts[ids.device] = counts.get(ids.device, 0) + cells.sum()


class _Forcer:
    """Makes one router choose as given."""

    def __init__(
        self,
        owner: Replay,
        router: nn.Module,
        layer: int,
        num_experts: int,
        ids: torch.Tensor,
        valid: torch.Tensor,
    ) -> None:
        self.router = router
        self._owner = owner
        self._layer = layer
        self._num_experts = num_experts
        self._ids = ids
        self._valid = valid
        # Group-limited routers first choose groups of experts.
        self._num_groups = int(getattr(router, "num_group", 0) or 0)
        self._topk_group = int(getattr(router, "topk_group", 0) or 0)
        self._mode: _AnswerTopK | None = None

    def before(self, router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        device = args[0].device if args else next(iter(kwargs.values())).device
        if self._ids.device != device:
            self._ids, self._valid = self._ids.to(device), self._valid.to(device)
        ids = self._ids.long()
        if self._owner._compare:
            with torch.no_grad():
                live = _index_tensor(router.forward(*args, **kwargs))
            if live is not None and live.shape == ids.shape:
                self._owner._count(live, ids, self._valid)
        self._mode = _AnswerTopK(self, ids, self._valid)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def after(self, _router: nn.Module, _args: Any, output: Any) -> None:
        mode, self._mode = self._mode, None
        if mode is None:
            return
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        # Hash routers look their experts up: all that matters is that these are the given ones.
        if output is not None and mode.hits != 1 and not (mode.hits == 0 and self._agrees(output)):
            raise InvalidArgument(
                field=f"layers.{self._layer}",
                value=f"{type(self.router).__name__} with {mode.hits} calls of topk over experts",
                expected="a router that chooses its experts by one call of topk, or the given ones",
            )

    def _agrees(self, output: Any) -> bool:
        ids = _index_tensor(output)
        if ids is None or ids.shape != self._ids.shape:
            return False
        return bool(((ids == self._ids) | ~self._valid[:, None]).all())

    def answers(self, scores: torch.Tensor, k: int, ids: torch.Tensor) -> bool:
        """Whether topk(scores, k) is the call that chooses experts."""
        if scores.dim() != 2 or scores.shape[1] != self._num_experts or k != ids.shape[1]:
            return False
        if scores.shape[0] != len(ids):
            raise InvalidArgument(
                field="topk_ids",
                value=f"{len(ids)} tokens",
                expected=f"{scores.shape[0]} tokens, as in the pass",
            )
        return True

    def needed_groups(self, scores: torch.Tensor, k: int, ids: torch.Tensor) -> Any:
        """Groups [tokens, groups] of the given ids, if topk(scores, k) chooses groups."""
        groups = self._num_groups
        if scores.dim() != 2 or groups < 2 or scores.shape[1] != groups or k != self._topk_group:
            return None
        group = ids // (self._num_experts // groups)
        needed = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, group, True)
        return needed & self._valid[:, None]


class _AnswerTopK(TorchFunctionMode):
    """Answers the topk of a router; every other function does what it does."""

    def __init__(self, forcer: _Forcer, ids: torch.Tensor, valid: torch.Tensor) -> None:
        super().__init__()
        self.hits = 0
        self._forcer = forcer
        self._ids = ids
        self._valid = valid

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        if self._forcer.answers(scores, k, self._ids):
            self.hits += 1
            live = func(*args, **kwargs).indices
            ids = torch.where(self._valid[:, None], self._ids, live)
        else:
            needed = self._forcer.needed_groups(scores, k, self._ids)
            if needed is None:
                return func(*args, **kwargs)
            # Experts outside of the chosen groups would lose their scores.
            ids = scores.detach().masked_fill(needed, torch.inf).topk(k, dim=-1).indices
        return torch.return_types.topk((scores.gather(-1, ids), ids))


def _index_tensor(output: Any) -> torch.Tensor | None:
    values = output if isinstance(output, (tuple, list)) else (output,)
    for value in values:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32):
            return value
    return None


def _routers(model: Any, layout: RoutingLayout) -> dict[int, nn.Module]:
    """The router of each MoE layer, by absolute layer id."""
    found: dict[int, nn.Module] = {}
    for ending in ("router", "gate"):
        seen = set(found)
        for name, module in model.get_decoder().named_modules():
            match = _LAYER.match(name)
            if match is None or not type(module).__name__.lower().endswith(ending):
                continue
            layer = int(match[1])
            # MTP layers stand behind the decoder layers, or go by another name.
            if layer in layout.moe_layer_ids and layer not in seen and "mtp" not in name.lower():
                if layer in found:
                    raise InvalidArgument(
                        field=f"layers.{layer}", value=name, expected="one router in the layer"
                    )
                found[layer] = module
    missing = sorted(set(layout.moe_layer_ids) - set(found))
    if missing:
        raise InvalidArgument(
            field="model",
            value=type(model).__name__,
            expected=f"a model with a router on each MoE layer; none found on layers {missing}",
        )
    return found


def _checked(
    layout: RoutingLayout, topk_ids: Ids, layer_ids: list[int], valid: Ids | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [L, tokens, K], narrow, 0 where invalid; and what is valid [L, tokens]."""
    if isinstance(topk_ids, np.ndarray) and topk_ids.dtype.kind == "u" and topk_ids.itemsize > 1:
        topk_ids = topk_ids.astype(np.int64)  # torch computes little on wide unsigned integers
    ids = torch.as_tensor(topk_ids)
    shape = (len(layer_ids), layout.top_k)
    if ids.dim() not in (3, 4) or ids.shape[-2:] != shape or not _is_integer(ids):
        raise InvalidArgument(
            field="topk_ids",
            value=f"{ids.dtype} {tuple(ids.shape)}",
            expected=f"integers [batch, seq, {shape[0]}, {shape[1]}] or the same without batch",
        )
    if valid is None:
        mask = torch.ones(ids.shape[:-1], dtype=torch.bool, device=ids.device)
    else:
        mask = torch.as_tensor(valid, device=ids.device)
        if mask.shape == ids.shape[:-2]:
            mask = mask[..., None].expand(ids.shape[:-1])
        if mask.shape != ids.shape[:-1] or mask.dtype != torch.bool:
            raise InvalidArgument(
                field="valid",
                value=f"{mask.dtype} {tuple(mask.shape)}",
                expected=f"bool {tuple(ids.shape[:-1])} or {tuple(ids.shape[:-2])}",
            )
    ids, mask = ids.reshape(-1, *shape), mask.reshape(-1, shape[0])
    ordered = ids.sort(dim=-1).values
    bad = (ordered[..., 0] < 0) | (ordered[..., -1] >= layout.num_experts)
    bad |= (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1)
    bad &= mask
    if bool(bad.any()):
        token, column = bad.nonzero()[0].tolist()
        raise InvalidArgument(
            field="topk_ids",
            value=f"{ids[token, column].tolist()} for token {token} at layer {layer_ids[column]}",
            expected=f"distinct ids in [0, {layout.num_experts}) in every valid cell",
        )
    ids = ids.masked_fill(~mask[..., None], 0)
    narrow = torch.uint8 if layout.num_experts <= 256 else torch.int32
    return ids.to(narrow).transpose(0, 1).contiguous(), mask.transpose(0, 1).contiguous()


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def collate(
    traces: Sequence[Trace],
    token_lens: Sequence[int],
    seq_len: int,
    *,
    padding_side: Literal["left", "right"] = "right",
    dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lays the rows of traces where their tokens are in a padded batch.

    The row of position p goes to the column of token p. Padding has no row, nor has the last token
    of a sequence, unless the trace knows of one; rows of tokens that are not in the batch are left
    out.

    Args:
        traces: one for each sequence, with the same layers.
        token_lens: tokens of each sequence in the batch, counted from position 0.
        seq_len: columns of the batch.
        padding_side: where the padding is.
        dtype: an integer dtype for the ids; a narrow one (uint8 up to 256 experts) saves memory.

    Returns:
        Ids [batch, seq_len, L, K], and bool [batch, seq_len, L] that says where they are valid.

    Raises:
        InvalidArgument: if counts, lengths, layers or top-k do not fit together.
    """
    if not traces or len(token_lens) != len(traces):
        raise InvalidArgument(
            field="token_lens", value=f"{len(token_lens)} lengths", expected=f"{len(traces)}, > 0"
        )
    if padding_side not in ("left", "right"):
        raise InvalidArgument(field="padding_side", value=padding_side, expected="left or right")
    layer_ids, shape = list(traces[0].layer_ids), traces[0].topk_ids.shape[1:]
    ids = torch.zeros((len(traces), seq_len, *shape), dtype=dtype)
    valid = torch.zeros((len(traces), seq_len, shape[0]), dtype=torch.bool)
    for i, (trace, length) in enumerate(zip(traces, token_lens, strict=True)):
        if list(trace.layer_ids) != layer_ids or trace.topk_ids.shape[1:] != shape:
            raise InvalidArgument(
                field=f"traces[{i}]",
                value=f"layers {list(trace.layer_ids)}, top-{trace.topk_ids.shape[2]}",
                expected=f"layers {layer_ids}, top-{shape[1]}, as in the first",
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
