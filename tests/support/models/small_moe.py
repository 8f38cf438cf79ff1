"""A small MoE that any engine could hold: its routers tell a callback what they choose.

In double precision, so that compilers and partial sums, which round otherwise, choose alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from routetrace.common.layout import ModelLayout

Read = Callable[[int, torch.Tensor], object]
Reduce = Callable[[torch.Tensor], torch.Tensor]

WIDTH = 16
HIDDEN = 8


class SmallMoE(nn.Module):
    """Layers of experts, [n, WIDTH] -> [n, WIDTH].

    Args:
        layout: how many layers, experts, and how many of them are chosen.
        read: gets the column and the ids int64 [n, top_k] of each layer, in the forward.
        rank, size: holds this part of the hidden columns of every expert.
        reduce: sums the parts of all ranks.
    """

    def __init__(
        self,
        layout: ModelLayout,
        read: Read,
        rank: int = 0,
        size: int = 1,
        reduce: Reduce = lambda x: x,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.read = read
        self.reduce = reduce
        generator = torch.Generator().manual_seed(7)
        num_layers, experts = len(layout.layer_ids), layout.num_experts
        part = slice(rank * HIDDEN // size, (rank + 1) * HIDDEN // size)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.gates = nn.Parameter(weights(num_layers, WIDTH, experts))
        self.up = nn.Parameter(weights(num_layers, experts, WIDTH, HIDDEN)[..., part].clone())
        self.down = nn.Parameter(weights(num_layers, experts, HIDDEN, WIDTH)[:, :, part].clone())
        self.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for column in range(len(self.layout.layer_ids)):
            scores = (x @ self.gates[column]).softmax(-1)
            weights, ids = scores.topk(self.layout.top_k)
            self.read(column, ids)
            hidden = torch.einsum("nd,nkdh->nkh", x, self.up[column][ids]).tanh()
            # Of two operands each: for more, opt_einsum (where it is installed) plans with the
            # number of tokens, and a compiled model is compiled again for every length.
            hidden = hidden * weights[..., None]
            out = torch.einsum("nkh,nkhd->nd", hidden, self.down[column][ids])
            x = torch.tanh(x + self.reduce(out))
        return x


def tokens(n: int, seed: int) -> torch.Tensor:
    """Inputs of n tokens, [n, WIDTH]."""
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def truth(layout: ModelLayout, x: torch.Tensor) -> np.ndarray:
    """Return the routers' choices for x, [n, layers, top_k], without capture."""
    seen: dict[int, torch.Tensor] = {}
    SmallMoE(layout, seen.__setitem__).to(x.device)(x)
    ids = torch.stack([seen[column] for column in range(len(layout.layer_ids))], dim=1)
    return ids.cpu().numpy()
