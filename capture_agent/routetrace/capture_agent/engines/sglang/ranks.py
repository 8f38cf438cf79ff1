"""Place of a process among the ranks of its server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from routetrace.capture_agent.engines.sglang import seams


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks of one process."""

    attention: int
    """Among those that attend to the same tokens: the first one reports them."""
    suffix: str
    """Of the engine id: names this data-parallel rank, as each is an engine."""


def ranks_of(runner: Any) -> Ranks:
    """Return the ranks of the process of SGLang's `ModelRunner`."""
    attention = seams.found(seams.ATTENTION_RANK.places[0])()
    args = runner.server_args
    if args.dp_size == 1:
        return Ranks(attention, "")
    # Versions before 0.5.15 have no such context, and one process for each replica.
    context = seams.found(seams.PARALLEL.places[0])
    parallel: Any = None if context is None else context()
    replica = str(_replica(runner, parallel) or 0)
    if args.enable_dp_attention and parallel.attn_dp_size > 1:
        replica = f"{replica}-{parallel.attn_dp_rank}"
    return Ranks(attention, f"-dp{replica}")


def _replica(runner: Any, parallel: Any) -> int | None:
    """Return the rank among replicas, from the object in which a version keeps it."""
    holders: tuple[Any, ...] = parallel, getattr(runner, "ps", None), runner
    for holder in holders:  # of 0.5.23, 0.5.16, older ones
        if hasattr(holder, "dp_rank"):
            rank: int | None = holder.dp_rank
            return rank
    raise AttributeError("the model runner has no dp_rank")
