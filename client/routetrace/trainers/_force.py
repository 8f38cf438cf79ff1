"""Replacement of the choice of one router, for `replay`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Router:
    """Function that chooses the experts of one layer."""

    owner: nn.Module
    """The module whose function chooses."""
    name: str
    """Name of the function, such as `forward` of a router."""
    layer: int
    """Absolute layer id."""
    num_experts: int
    top_k: int

    def call(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        ids: torch.Tensor | None = None,
        valid: torch.Tensor | None = None,
        *,
        is_kept: bool = False,
    ) -> tuple[Any, torch.Tensor]:
        """Call the function, and make it choose ids where they are valid, or everywhere.

        Args:
            function: the function itself.
            args: its arguments.
            kwargs: its keyword arguments.
            ids: int64 [tokens, top_k], or None for its own choice.
            valid: bool [tokens]; None for all.
            is_kept: do the same computations without ids as with them, as checkpoints compare them.

        Returns:
            Its output, and the ids that it used.
        """
        with _TopK(self, ids, valid, is_kept) as topk:
            output = function(*args, **kwargs)
        if len(topk.used) == 1:
            return output, topk.used[0]
        # Hash routers look experts up without topk; their ids must equal the given ones.
        found = _index_tensor(output)
        if topk.used or found is None or found.dim() != 2 or found.shape[1] != self.top_k:
            raise self._unlike(topk)
        if ids is not None:
            differs = found != ids if found.shape == ids.shape else torch.ones_like(found)
            if bool((differs if valid is None else differs & valid[:, None]).any()):
                raise self._unlike(topk)
        return output, found

    def again(
        self, compare: Compare, ids: torch.Tensor, function: Callable[..., Any], args: Any, kw: Any
    ) -> Any:
        """Call the function with ids that it used before, in a narrow dtype: see `Choice`."""
        if compare is True:  # the same computations as in the forward pass
            with torch.no_grad():
                self.call(function, args, kw)
        return self.call(function, args, kw, widened(ids))[0]

    def chooses(self, scores: torch.Tensor, k: int, dim: int) -> bool:
        """Return whether topk(scores, k, dim) is the call that chooses experts."""
        if scores.dim() != 2 or dim not in (1, -1):
            return False
        return (scores.shape[1], k) == (self.num_experts, self.top_k)

    def chooses_groups(self, scores: torch.Tensor, k: int) -> bool:
        """Return whether topk(scores, k) chooses groups of experts, as group-limited routers do.

        Versions name the groups differently; their number shows in the scores.
        """
        if scores.dim() != 2:
            return False
        groups = scores.shape[1]
        return k < groups < self.num_experts and self.num_experts % groups == 0

    def narrowed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids in the dtype of `Given`."""
        return ids.to(torch.uint8 if self.num_experts <= 256 else torch.int16)

    def fitting(self, of_pass: torch.Tensor, num_tokens: int) -> None:
        """Refuse another number of tokens."""
        if len(of_pass) != num_tokens:
            raise InvalidArgument(
                field="topk_ids",
                value=f"{num_tokens} tokens",
                expected=f"{len(of_pass)} tokens, as in the pass",
            )

    def _unlike(self, topk: _TopK) -> InvalidArgument:
        calls = f" (of topk at all: {', '.join(topk.seen)})" if topk.seen else ""
        return InvalidArgument(
            field=f"layers.{self.layer}",
            value=f"{type(self.owner).__name__} with {len(topk.used)} calls of topk over "
            f"experts{calls}",
            expected=f"a router that chooses {self.top_k} of {self.num_experts} by one "
            "call of topk, or chooses the given experts",
            remedy="use a layout and a version of transformers that fit the model: see the "
            "documentation of trainers",
        )


def widened(ids: torch.Tensor) -> torch.Tensor:
    """Return narrow ids as int64."""
    return ids.long() & 0xFFFF if ids.dtype == torch.int16 else ids.long()


class Forcer:
    """What a block does where a router runs.

    Args:
        router: the router.
        given: ids of all layers; None for the router's own choice.
        column: index of this layer in `given`.
        compare: keep the layer's own choice as `live`; "only": replay nothing.
    """

    def __init__(self, router: Router, given: Given | None, column: int, compare: Compare) -> None:
        self.router = router
        self.layer = router.layer
        self.live: torch.Tensor | None = None
        self.runs = 0
        """How often the router ran, without recomputation."""
        self.is_inert = compare == "only"
        self.ids: Any = None
        self.valid: Any = None
        self._given = given
        self._column = column
        self._compare = compare
        if given is not None:
            self.ids, self.valid = (part[column] for part in given.source)

    def choose(self, function: Callable[..., Any], args: Any, kwargs: Any, *, is_kept: bool) -> Any:
        """Call the router's function.

        Args:
            function: the function itself.
            args: its arguments.
            kwargs: its keyword arguments.
            is_kept: a checkpoint will run the router again.

        Returns:
            Its output; the ids that it used, in a narrow dtype; and `Choice.again` for them.
        """
        router, again = self.router, functools.partial(self.router.again, self._compare)
        if self._given is None:
            output, used = router.call(function, args, kwargs, is_kept=is_kept)
            return output, router.narrowed(used), again
        device = args[0].device if args else next(iter(kwargs.values())).device
        self.ids, self.valid = (part[self._column] for part in self._given.on(device))
        if self._compare:
            with torch.set_grad_enabled(self.is_inert and torch.is_grad_enabled()):
                output, used = router.call(function, args, kwargs, is_kept=is_kept)
            router.fitting(used, len(self.ids))
            self.live = used.to(self.ids.dtype)
            if self.is_inert:
                return output, self.live, again
        wide = widened(self.ids).masked_fill(~self.valid[:, None], 0)
        output, used = router.call(function, args, kwargs, wide, self.valid)
        return output, router.narrowed(used), again


class _TopK(TorchFunctionMode):
    """Keep the ids that a router's topk chooses, and replace them by ids if there are any.

    Every other function passes through.
    """

    def __init__(
        self, router: Router, ids: torch.Tensor | None, valid: torch.Tensor | None, is_kept: bool
    ) -> None:
        super().__init__()
        self.used: list[torch.Tensor] = []
        """The result of each call over experts."""
        self.seen: list[str] = []
        """The calls of topk, in words."""
        self._router = router
        self._ids = ids
        self._valid = valid
        self._is_kept = is_kept

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        scores, k, dim = (
            args[i] if i < len(args) else kwargs.get(name, -1)
            for i, name in enumerate(("input", "k", "dim"))
        )
        self.seen.append(f"{k} of {scores.shape[dim]}")
        result = func(*args, **kwargs)
        if self._router.chooses(scores, k, dim):
            ids = self._experts(result.indices)
            self.used.append(ids)
        elif self._router.chooses_groups(scores, k):
            ids = self._groups(scores, k, result.indices)
        else:
            return result
        if self._ids is None and not self._is_kept:
            return result
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def _experts(self, own: torch.Tensor) -> torch.Tensor:
        if self._ids is None:
            return own
        self._router.fitting(own, len(self._ids))
        return self._ids if self._valid is None else own.where(~self._valid[:, None], self._ids)

    def _groups(self, scores: torch.Tensor, k: int, own: torch.Tensor) -> torch.Tensor:
        """Return groups with those of the ids: others would lose their scores."""
        if self._ids is None or len(scores) != len(self._ids):
            return own
        group = self._ids // (self._router.num_experts // scores.shape[1])
        needed = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, group, True)
        if self._valid is not None:
            needed &= self._valid[:, None]
        return scores.detach().masked_fill(needed, torch.inf).topk(k, dim=-1).indices


def _index_tensor(output: Any) -> torch.Tensor | None:
    values = output if isinstance(output, (tuple, list)) else (output,)
    for value in values:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32):
            return value
    return None
