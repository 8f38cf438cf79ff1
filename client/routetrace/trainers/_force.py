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
    """Forward hooks that make one router choose the given ids.

    Args:
        router: the router of a MoE layer.
        layer: its absolute layer id.
        num_experts: experts of the layer.
        given: ids of all layers.
        column: index of this layer in `given`.
        compare: keep the router's own choice as `live`; "only": replay nothing.
    """

    def __init__(
        self,
        router: nn.Module,
        layer: int,
        num_experts: int,
        given: Given,
        column: int,
        compare: Compare,
    ) -> None:
        ids, valid = (part[column] for part in given.source)
        self.router = router
        self.layer = layer
        self.live: torch.Tensor | None = None
        self._given = given
        self._column = column
        self.ids, self.valid = ids, valid
        self._compare = compare
        self._num_experts = num_experts
        # Group-limited routers first choose groups of experts.
        self._num_groups = int(getattr(router, "num_group", 0) or 0)
        self._topk_group = int(getattr(router, "topk_group", 0) or 0)
        self._mode: _AnswerTopK | None = None

    def before(self, router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        device = args[0].device if args else next(iter(kwargs.values())).device
        self.ids, self.valid = (part[self._column] for part in self._given.on(device))
        if self._compare == "only":
            return
        if self._compare:
            with torch.no_grad():
                live = _index_tensor(router.forward(*args, **kwargs))
            self._keep(live)
        self._mode = _AnswerTopK(self, self._wide(), self.valid)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _keep(self, live: torch.Tensor | None) -> None:
        if live is not None and live.shape == self.ids.shape:
            self.live = live.to(self.ids.dtype)

    def _wide(self) -> torch.Tensor:
        """Return the ids as int64, 0 where not valid."""
        ids = self.ids.long()
        if self.ids.dtype == torch.int16:
            ids &= 0xFFFF
        return ids.masked_fill_(~self.valid[:, None], 0)

    def after(self, _router: nn.Module, _args: Any, output: Any) -> None:
        mode, self._mode = self._mode, None
        if mode is None:
            if output is not None and self._compare == "only":
                self._keep(self._fitting(_index_tensor(output)))
            return
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        # Hash routers look experts up without topk; their ids must equal the given ones.
        if output is not None and mode.hits != 1 and not (mode.hits == 0 and self._agrees(output)):
            raise InvalidArgument(
                field=f"layers.{self.layer}",
                value=f"{type(self.router).__name__} with {mode.hits} calls of topk over experts",
                expected="a router that chooses by one call of topk, or chooses the given experts",
            )

    def _agrees(self, output: Any) -> bool:
        ids = _index_tensor(output)
        if ids is None or ids.shape != self.ids.shape:
            return False
        return bool(((ids == self._wide()) | ~self.valid[:, None]).all())

    def answers(self, scores: torch.Tensor, k: int, ids: torch.Tensor) -> bool:
        """Return whether topk(scores, k) is the call that chooses experts."""
        if scores.dim() != 2 or scores.shape[1] != self._num_experts or k != ids.shape[1]:
            return False
        self._fitting(scores)
        return True

    def _fitting(self, of_pass: torch.Tensor | None) -> torch.Tensor | None:
        if of_pass is not None and len(of_pass) != len(self.ids):
            raise InvalidArgument(
                field="topk_ids",
                value=f"{len(self.ids)} tokens",
                expected=f"{len(of_pass)} tokens, as in the pass",
            )
        return of_pass

    def needed_groups(self, scores: torch.Tensor, k: int, ids: torch.Tensor) -> Any:
        """Return groups [tokens, groups] of the ids if topk(scores, k) chooses groups."""
        groups = self._num_groups
        if scores.dim() != 2 or groups < 2 or scores.shape[1] != groups or k != self._topk_group:
            return None
        group = ids // (self._num_experts // groups)
        needed = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, group, True)
        return needed & self.valid[:, None]


class _AnswerTopK(TorchFunctionMode):
    """Replace the result of a router's topk; pass every other function through."""

    def __init__(self, forcer: Forcer, ids: torch.Tensor, valid: torch.Tensor) -> None:
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
            # Experts outside the chosen groups would lose their scores.
            ids = scores.detach().masked_fill(needed, torch.inf).topk(k, dim=-1).indices
        return torch.return_types.topk((scores.gather(-1, ids), ids))


def _index_tensor(output: Any) -> torch.Tensor | None:
    values = output if isinstance(output, (tuple, list)) else (output,)
    for value in values:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32):
            return value
    return None
