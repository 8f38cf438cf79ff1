"""Checks of the expert ids of a batch, and their places in tables."""

from __future__ import annotations

import torch

from routetrace.common.errors import InvalidArgument

#: Added to ids that index a table: "too low" and -1 precede the experts, "too high" follows them.
SHIFT = 2


def check_ids(topk_ids: torch.Tensor, capacity: int = 0) -> None:
    """Refuse ids that are not integers [n, K], or whose dtype cannot name every slot."""
    dtype = topk_ids.dtype
    if topk_ids.dim() != 2 or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise InvalidArgument(
            field="topk_ids",
            value=f"{dtype} of shape {tuple(topk_ids.shape)}",
            expected="integers [n, K]",
        )
    if capacity > torch.iinfo(dtype).max + 1:
        raise InvalidArgument(
            field="topk_ids", value=str(dtype), expected=f"a dtype that can name {capacity} slots"
        )


def table_index(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return ids as places in a table, int64 [n, K]: 0, "too low", to `num_experts` + SHIFT."""
    return topk_ids.to(torch.int64).clamp(-SHIFT, num_experts) + SHIFT


def needed_experts(index: torch.Tensor, num_experts: int) -> tuple[list[int], bool]:
    """Return the experts of an index, ascending, and whether -1 is in it. Waits for the device."""
    seen = torch.zeros(num_experts + SHIFT + 1, dtype=torch.bool, device=index.device)
    named = seen.index_fill_(0, index.flatten(), True).tolist()
    if named[0] or named[-1]:
        raise InvalidArgument(
            field="topk_ids",
            value="an id that is too " + ("low" if named[0] else "high"),
            expected=f"ids in [0, {num_experts}), or -1 for none",
        )
    places = range(SHIFT, num_experts + SHIFT)
    return [place - SHIFT for place in places if named[place]], named[SHIFT - 1]
