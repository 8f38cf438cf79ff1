"""Rows as they would come from a server, made up."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np

from routetrace.client import Trace, TraceState
from routetrace.client.plan import FetchPlan
from routetrace.client.rows import Rows
from routetrace.client.stat import ReadFacts
from routetrace.codec.records import DIGEST
from routetrace.common.layout import ModelLayout

EPOCH = datetime.fromtimestamp(0, timezone.utc)

_GARBAGE = 255


def random_choices(shape: tuple[int, ...], num_experts: int, top_k: int, seed: int) -> np.ndarray:
    """Distinct ids [*shape, top_k]."""
    keys = np.random.default_rng(seed).random((*shape, num_experts))
    dtype = np.uint8 if num_experts <= 256 else np.uint16
    return keys.argsort(axis=-1)[..., :top_k].astype(dtype)


def facts_of(layout: ModelLayout, versions: Sequence[tuple[int, int, int]] = ()) -> ReadFacts:
    """Of a request whose rows have these weight versions."""
    return ReadFacts(**_facts(layout, versions))


def rows_of(
    plan: FetchPlan,
    samples: Sequence[np.ndarray],
    missing: float = 0.0,
    reads: tuple[ReadFacts, ...] = (),
) -> Rows:
    """Return the rows that a plan gets of `samples`, ids [positions, all layers, top_k] each.

    Cells without a row hold garbage; a share of those that were planned is missing. Which ones
    depends on the sample and position, not on the rank.
    """
    layout = plan.layout
    columns = [layout.moe_layer_ids.index(layer) for layer in plan.layer_ids]
    ids = np.full(plan.shape, _GARBAGE, layout.dtype)
    valid = np.zeros(plan.shape[:2], np.bool_)
    for token in np.flatnonzero(plan.planned):
        sample, position = plan.sample_of[token], plan.position_of[token]
        draws = np.random.default_rng((sample, position)).random(len(layout.moe_layer_ids))
        valid[:, token] = draws[columns] >= missing
        ids[:, token] = samples[sample][position, columns]
    ids[~valid] = _GARBAGE
    return Rows(plan=plan, topk_ids=ids, valid=valid, layer_ids=plan.layer_ids, reads=reads)


def trace_of(
    layout: ModelLayout,
    ids: np.ndarray,
    valid: np.ndarray | None = None,
    *,
    token_start: int = 0,
    versions: Sequence[tuple[int, int, int]] = (),
) -> Trace:
    """A trace of ids [tokens, layers, top_k], and what is valid [tokens, layers]."""
    valid = np.ones(ids.shape[:2], np.bool_) if valid is None else valid
    return Trace(
        **_facts(layout, versions),
        layer_ids=layout.layer_ids,
        token_start=token_start,
        token_stop=token_start + len(ids),
        _ids=np.ascontiguousarray(ids.transpose(1, 0, 2)),
        _valid=np.ascontiguousarray(valid.T),
    )


def _facts(layout: ModelLayout, versions: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    return {
        "trace_id": "r",
        "run": "test",
        "state": TraceState.COMPLETE,
        "num_tokens": 0,
        "num_rows": 0,
        "prompt_len": 0,
        "layout": layout,
        "labels": {},
        "incarnation": 1,
        "num_incarnations": 1,
        "finish_reason": "stop",
        "engine_ids": ("e",),
        "num_attempts": 1,
        "min_weight_version": 0,
        "max_weight_version": 0,
        "created_at": EPOCH,
        "updated_at": EPOCH,
        "stored_bytes": 0,
        "expires_at": EPOCH,
        "token_digests": np.zeros(0, DIGEST),
        "prefix_trace_ids": (),
        "weight_versions": tuple(versions),
    }
