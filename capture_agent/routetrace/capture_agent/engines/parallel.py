"""Rows of this data-parallel rank among the rows that a router sees.

Engines with data-parallel attention and shared experts pass the tokens of a step to the routers in
one of four layouts. The number of rows determines the layout; layouts of equal size agree, see
`local_rows`.

Depends on no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from routetrace.common.errors import InvalidArgument

if TYPE_CHECKING:
    import torch


def local_rows(
    topk_ids: torch.Tensor,
    num_tokens_across_dp: Sequence[int] | torch.Tensor | None,
    dp_rank: int,
    *,
    tp_size: int = 1,
    shard_sizes: Sequence[int] | None = None,
    all_gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the rows of one step of this data-parallel rank, in the order of its tokens.

    With `own` tokens of this rank and `total` of all ranks, the N rows are one of

    1. `total`: the tokens of all ranks, one rank after the other. This rank's are cut out.
    2. `own`: the rank's own tokens, dispatched to the experts later. All are taken.
    3. `sum(shard_sizes)`: tp_size shards of ceil(tokens / tp_size) rows of each data-parallel rank
       in turn, gathered from all, with padding after the tokens of a rank. This rank's are cut out,
       without the padding.
    4. `ceil(own / tp_size)`: the shard of this tensor-parallel rank. The shards are gathered, and
       the padding after the last token is cut off.

    Two of these sizes are equal only where they mean the same rows: total is own if the other ranks
    have no tokens; sum(shard_sizes) is total (or own) if nothing is padded. The exception is a
    single token with tp_size of 2 or more: the one row is the token (1 and 2), or a shard, which is
    padding on all tensor-parallel ranks but the first (4). It is gathered if `all_gather` is given:
    the first gathered row is the token in each case.

    The sizes are read in Python: a CUDA graph keeps those of the recorded step, and fits only steps
    in which all ranks are padded to the same sizes.

    Args:
        topk_ids: [N, k] ids for the rows that the router saw.
        num_tokens_across_dp: tokens of each data-parallel rank in this step, padding of the step
            included, [dp_size] on the CPU; None without data parallelism: all rows are taken.
        dp_rank: data-parallel rank.
        tp_size: ranks that share the tokens of a data-parallel rank.
        shard_sizes: rows of each shard, [dp_size * tp_size], where shards are gathered from all
            ranks (3).
        all_gather: concatenates a tensor of every tensor-parallel rank along dim 0; given where a
            router may see a shard (4). All tensor-parallel ranks call it in the same steps.

    Returns:
        [own, k]: a view, except where rows were gathered.

    Raises:
        InvalidArgument: naming `topk_ids` if N is none of the expected sizes, or another argument
            that contradicts the rest.
    """
    if num_tokens_across_dp is None:
        return topk_ids
    tokens = [int(count) for count in num_tokens_across_dp]
    if not 0 <= dp_rank < len(tokens):
        raise InvalidArgument(field="dp_rank", value=dp_rank, expected=f"[0, {len(tokens)})")
    n, own, total = topk_ids.shape[0], tokens[dp_rank], sum(tokens)
    sizes = {"all ranks": total, "own": own}
    if shard_sizes is not None:
        sizes["gathered shards"] = sum(shard_sizes)
    if all_gather is not None and tp_size > 1:
        sizes["own shard"] = _shard(own, tp_size)
        if own and n == sizes["own shard"]:
            return _gathered(topk_ids, all_gather, tp_size)[:own]
    if n == total:
        start = sum(tokens[:dp_rank])
    elif n == own:
        start = 0
    elif shard_sizes is not None and n == sizes["gathered shards"]:
        padded = [_shard(count, tp_size) for count in tokens for _ in range(tp_size)]
        if list(shard_sizes) != padded:
            raise InvalidArgument(
                field="shard_sizes",
                value=list(shard_sizes),
                expected=f"{padded} for {tokens} tokens and tp_size = {tp_size}",
            )
        start = sum(padded[: dp_rank * tp_size])
    else:
        expected = ", ".join(f"{size} ({name})" for name, size in sizes.items())
        raise InvalidArgument(
            field="topk_ids",
            value=f"{n} rows",
            expected=f"one of {expected}, of {tokens} tokens at rank {dp_rank}, {tp_size=}",
        )
    return topk_ids[start : start + own]


def _shard(num_tokens: int, tp_size: int) -> int:
    return -(-num_tokens // tp_size)


def _gathered(
    shard: torch.Tensor, all_gather: Callable[[torch.Tensor], torch.Tensor], tp_size: int
) -> torch.Tensor:
    rows = all_gather(shard)
    if rows.shape[0] != tp_size * shard.shape[0]:
        raise InvalidArgument(
            field="all_gather",
            value=f"{rows.shape[0]} rows",
            expected=f"{shard.shape[0]} of each of {tp_size} ranks",
        )
    return rows
