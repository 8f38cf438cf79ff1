"""Qwen3-MoE whose routers look their experts up: the truth that replay is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear


def hard_wire(
    model: Any,
    layer_ids: Sequence[int],
    ids: torch.Tensor,
    valid: torch.Tensor | None = None,
) -> None:
    """Make the routers of a model choose ids: the formula of Qwen3-MoE, written out.

    Args:
        model: the model; `forward` of its routers is replaced.
        layer_ids: the layers of the ids.
        ids: int64 [layers, tokens, top_k].
        valid: bool [layers, tokens]; where False, the experts with the highest logits.
    """
    for column, layer in enumerate(layer_ids):
        known = torch.ones(ids.shape[1], dtype=torch.bool) if valid is None else valid[column]
        _replace(model.model.layers[layer].mlp.gate, _Wired(ids[column], known[:, None]))


class _Wired:
    def __init__(self, ids: torch.Tensor, valid: torch.Tensor) -> None:
        self.ids, self.valid = ids, valid

    def __call__(self, chances: torch.Tensor) -> torch.Tensor:
        own = chances.argsort(-1, descending=True)[:, : self.ids.shape[1]]
        return torch.where(self.valid, self.ids, own)


class Fickle:
    """Routers that choose otherwise each time they run, as under noise; weights do not.

    Args:
        model: the model; `forward` of its routers is replaced.
        layer_ids: its MoE layers.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int], seed: int = 0) -> None:
        self.used: dict[int, list[torch.Tensor]] = {layer: [] for layer in layer_ids}
        """Of each layer and run: the ids that its experts were given."""
        # Checkpoints do not set it back.
        self._generator = torch.Generator().manual_seed(seed)
        for layer in layer_ids:
            gate = model.model.layers[layer].mlp.gate
            used = self.used[layer]
            _replace(gate, lambda chances, k=gate.top_k: self._choose(chances, k))
            gate.register_forward_hook(lambda _m, _a, out, used=used: used.append(out[2].clone()))

    def _choose(self, chances: torch.Tensor, top_k: int) -> torch.Tensor:
        noise = torch.rand(chances.shape, generator=self._generator)
        return torch.topk(chances.detach() + noise, top_k, dim=-1).indices

    def ids(self, run: int) -> torch.Tensor:
        """Return the ids [layers, tokens, top_k] of a run that all layers made."""
        return torch.stack([used[run] for used in self.used.values()])


def _replace(gate: Any, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def forward(x: torch.Tensor) -> Any:
        logits = linear(x.reshape(-1, x.shape[-1]), gate.weight)
        chances = logits.float().softmax(-1)
        chosen = choose(chances)
        weights = chances.gather(1, chosen)
        if gate.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    gate.forward = forward
