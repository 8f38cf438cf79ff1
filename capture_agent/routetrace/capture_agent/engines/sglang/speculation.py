"""Passes that verify drafts: from trees of tokens to rows of those that were accepted.

SGLang's NGRAM worker has the model verify a tree of drafts for each request, and then moves the KV
of the accepted path to the front of the slots that the tree was written to. Even without branches
of its own a tree pads with children of its root, and matches of several lengths start several
branches: so the accepted rows are not the first ones of a request. They are chosen on the device,
once the tree is judged; rejected rows are not reported.

The worker also leaves the output of SGLang's capturer behind, so a pass is put into its result.

A model that drafts one token after the other (EAGLE, MTP, a model of its own) makes trees without
branches: rows are chosen in the same way, and no KV moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from routetrace.capture_agent.engines.sglang import seams
from routetrace.capture_agent.engines.sglang.requests import Ints, Plan
from routetrace.capture_agent.engines.sglang.settings import NGRAM

#: First position of a request in a plan whose drafts are not judged: an upper bound.
UNKNOWN_POSITION = 1 << 40


def hook_verifications(algorithm: str, num_drafts: int, capture: Callable[[], Any]) -> None:
    """Hook SGLang's verification of drafts, in a server that uses it.

    Args:
        algorithm: SGLang's `speculative_algorithm`.
        num_drafts: tokens that a pass verifies of one request.
        capture: returns the capture of this process, None without one.

    Raises:
        Refused: if this version of SGLang lacks a name.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def moved(_: Any, batch: Any, accepted: Any, correct: Any, *__: Any, **___: Any) -> None:
        if (current := capture()) is not None:
            current.judged(accepted, batch.seq_lens, correct + 1)

    def generated(result: Any, *_: Any, **__: Any) -> None:
        if (current := capture()) is not None:
            current.carry(result)

    def verified(result: Any, batch: Any, *_: Any, **__: Any) -> None:
        if (current := capture()) is not None:
            counts = result.accept_lens
            accepted = getattr(result, "accept_index", None)
            if accepted is None:  # SGLang 0.5.16: without branches the front of each tree
                accepted = front(counts, num_drafts)
            current.judged(accepted, batch.seq_lens, counts)

    wanted: tuple[tuple[seams.Seam, Callable[..., Any]], ...] = ((seams.VERIFIED, verified),)
    if algorithm == NGRAM:
        wanted = (seams.MOVED, moved), (seams.DRAFTED, generated)
    seams.check_found(seams.used_by(wanted[0][0].used_by))
    hooks = [(seam.places[0], hook) for seam, hook in wanted]
    for name, hook in hooks:
        HookRegistry.register(name, hook, HookType.AFTER)
    HookRegistry.apply_hooks()
    seams.check_applied([name for name, _ in hooks])


def front(counts: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """Return the rows [m, d] of the first accepted tokens of trees, -1 behind their ends."""
    steps = torch.arange(num_drafts, device=counts.device)
    roots = torch.arange(len(counts), device=counts.device)[:, None] * num_drafts
    return torch.where(steps < counts[:, None], roots + steps, -1)


def accepted_part(
    plan: Plan,
    rows: npt.NDArray[np.unsignedinteger],
    slots: Ints,
    outcome: Ints,
) -> tuple[Plan, npt.NDArray[np.unsignedinteger], Ints]:
    """Return plan, rows and slots of the accepted tokens of a pass that verified drafts.

    Args:
        plan: of the pass.
        rows: [m * d, L, K] ids.
        slots: [m * d] of the rows.
        outcome: [2, m] first positions, and numbers of accepted tokens.
    """
    positions, counts = outcome
    depth = len(rows) // len(counts)
    kept = (np.arange(depth) < counts[:, None]).ravel()
    return replace(plan, positions=positions, counts=counts), rows[kept], slots[kept]
