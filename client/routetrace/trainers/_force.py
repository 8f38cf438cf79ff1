"""Replacement of the choice of one router, for `replay`."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from routetrace.common.errors import InvalidArgument

Compare = bool | Literal["only"]

_TOPK = (torch.topk, torch.Tensor.topk)


class Given:
    """Ids to replay, copied to each device on demand.

    Args:
        ids: [layers, tokens, top_k] of uint8, or of int16 with the bits of uint16.
        valid: bool [layers, tokens]; where False, routers choose and ids are meaningless.
    """

    def __init__(self, ids: torch.Tensor, valid: torch.Tensor) -> None:
        self.source = ids, valid
        self._on = {ids.device: self.source}
        self._copied: list[torch.cuda.Event] = []

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and valid on a device, copied once; to CUDA devices without waiting."""
        if device not in self._on:
            is_cuda = device.type == "cuda"
            ids, valid = (part.to(device, non_blocking=is_cuda) for part in self.source)
            self._on[device] = ids, valid
            if is_cuda:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(device))
                self._copied.append(event)
        return self._on[device]

    def settle(self) -> None:
        """Wait until no copy reads the source memory."""
        while self._copied:
            self._copied.pop().synchronize()


class Forcer:
    """Stand-in for the function that chooses the experts of one layer.

    Args:
        owner: the module whose function chooses.
        name: name of the function, such as `forward` of a router.
        layer: absolute layer id.
        num_experts: experts of the layer.
        given: ids of all layers.
        column: index of this layer in `given`.
        compare: keep the layer's own choice as `live`; "only": replay nothing.
    """

    def __init__(
        self,
        owner: nn.Module,
        name: str,
        layer: int,
        num_experts: int,
        given: Given,
        column: int,
        compare: Compare,
    ) -> None:
        self.owner = owner
        self.layer = layer
        self.live: torch.Tensor | None = None
        self.has_run = False
        self._name = name
        self._given = given
        self._column = column
        self.ids, self.valid = (part[column] for part in given.source)
        self._compare = compare
        self._num_experts = num_experts
        self._before: Any = None
        self._original: Any = None
        self._outer: Forcer | None = None

    def attach(self) -> None:
        """Take the place of the function."""
        # An attribute of the module itself hides the method of its class.
        self._before = vars(self.owner).get(self._name)
        current = getattr(self.owner, self._name)
        holder = current.__self__ if hasattr(current, "__self__") else None
        self._outer = holder if isinstance(holder, Forcer) else None  # of a block around this one
        self._original = self._outer._original if self._outer else current
        vars(self.owner)[self._name] = self._choose

    def detach(self) -> None:
        """Put the function back."""
        if self._before is None:
            del vars(self.owner)[self._name]
        else:
            vars(self.owner)[self._name] = self._before

    def _choose(self, *args: Any, **kwargs: Any) -> Any:
        replaced: Forcer | None = self
        while replaced is not None:
            replaced.has_run, replaced = True, replaced._outer
        device = args[0].device if args else next(iter(kwargs.values())).device
        self.ids, self.valid = (part[self._column] for part in self._given.on(device))
        if self._compare:
            with (
                _TopK(self) as watched,
                torch.set_grad_enabled(self._compare == "only" and torch.is_grad_enabled()),
            ):
                output = self._original(*args, **kwargs)
            self._keep(output, watched)
            if self._compare == "only":
                return output
        with _TopK(self, self._wide()) as forced:
            output = self._original(*args, **kwargs)
        # Hash routers look experts up without topk; their ids must equal the given ones.
        if len(forced.chosen) != 1 and (forced.chosen or not self._agrees(output)):
            raise self._unlike(forced)
        return output

    def _keep(self, output: Any, watched: _TopK) -> None:
        live = _index_tensor(output)
        if live is None and len(watched.chosen) == 1:  # Llama 4 returns scores alone
            live = watched.chosen[0]
        if live is None:
            raise self._unlike(watched)
        self.fitting(live)
        if live.shape != self.ids.shape:
            raise self._unlike(watched)
        self.live = live.to(self.ids.dtype)

    def _unlike(self, topk: _TopK) -> InvalidArgument:
        calls = f" (of topk at all: {', '.join(topk.seen)})" if topk.seen else ""
        return InvalidArgument(
            field=f"layers.{self.layer}",
            value=f"{type(self.owner).__name__} with {len(topk.chosen)} calls of topk over "
            f"experts{calls}",
            expected=f"a router that chooses {self.ids.shape[1]} of {self._num_experts} by one "
            "call of topk, or chooses the given experts",
            remedy="use a layout and a version of transformers that fit the model: see the "
            "documentation of trainers",
        )

    def _wide(self) -> torch.Tensor:
        """Return the ids as int64, 0 where not valid."""
        ids = self.ids.long()
        if self.ids.dtype == torch.int16:
            ids &= 0xFFFF
        return ids.masked_fill_(~self.valid[:, None], 0)

    def _agrees(self, output: Any) -> bool:
        ids = _index_tensor(output)
        if ids is None or ids.shape != self.ids.shape:
            return False
        return bool(((ids == self._wide()) | ~self.valid[:, None]).all())

    def chooses(self, scores: torch.Tensor, k: int, dim: int) -> bool:
        """Return whether topk(scores, k, dim) is the call that chooses experts."""
        if scores.dim() != 2 or dim not in (1, -1):
            return False
        if (scores.shape[1], k) != (self._num_experts, self.ids.shape[1]):
            return False
        self.fitting(scores)
        return True

    def fitting(self, of_pass: torch.Tensor) -> None:
        """Refuse another number of tokens."""
        if len(of_pass) != len(self.ids):
            raise InvalidArgument(
                field="topk_ids",
                value=f"{len(self.ids)} tokens",
                expected=f"{len(of_pass)} tokens, as in the pass",
            )

    def needed_groups(self, scores: torch.Tensor, k: int, ids: torch.Tensor) -> Any:
        """Return groups [tokens, groups] of the ids if topk(scores, k) chooses groups.

        Group-limited routers first choose groups of experts. Versions name the groups differently;
        their number shows in the scores.
        """
        if scores.dim() != 2 or len(scores) != len(ids):
            return None
        groups = scores.shape[1]
        if not k < groups < self._num_experts or self._num_experts % groups:
            return None
        group = ids // (self._num_experts // groups)
        needed = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, group, True)
        return needed & self.valid[:, None]


class _TopK(TorchFunctionMode):
    """Keep the choices of a router's topk, and replace them by ids if there are any.

    Every other function passes through.
    """

    def __init__(self, forcer: Forcer, ids: torch.Tensor | None = None) -> None:
        super().__init__()
        self.chosen: list[torch.Tensor] = []
        """The model's own choice of experts of each call over experts."""
        self.seen: list[str] = []
        """The calls of topk, in words."""
        self._forcer = forcer
        self._ids = ids

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _TOPK:
            return result
        scores, k, dim = (
            args[i] if i < len(args) else kwargs.get(name, -1)
            for i, name in enumerate(("input", "k", "dim"))
        )
        self.seen.append(f"{k} of {scores.shape[dim]}")
        if self._forcer.chooses(scores, k, dim):
            self.chosen.append(result.indices)
            if self._ids is None:
                return result
            ids = torch.where(self._forcer.valid[:, None], self._ids, result.indices)
        else:
            needed = None
            if self._ids is not None:
                needed = self._forcer.needed_groups(scores, k, self._ids)
            if needed is None:
                return result
            # Experts outside the chosen groups would lose their scores.
            ids = scores.detach().masked_fill(needed, torch.inf).topk(k, dim=-1).indices
        return torch.return_types.topk((scores.gather(-1, ids), ids))


def _index_tensor(output: Any) -> torch.Tensor | None:
    values = output if isinstance(output, (tuple, list)) else (output,)
    for value in values:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32):
            return value
    return None
