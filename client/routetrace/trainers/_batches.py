"""The micro-batch of a pass, read off the arguments of a transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from routetrace.client.micro_batch import MicroBatch
from routetrace.common.errors import InvalidArgument, kind_of


def batch_of(given: Mapping[str, Any]) -> MicroBatch:
    """Return the sequences of a pass, which are found by their tokens.

    Args:
        given: arguments by name: `input_ids` [batch, seq]; `attention_mask` [batch, seq] or None;
            of a packed batch, `cu_seq_lens_q` or `position_ids` [1, total].

    Raises:
        InvalidArgument: if they do not say where sequences begin and end.
    """
    ids = given["input_ids"]
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise InvalidArgument(
            field="input_ids", value=kind_of(ids), expected="a tensor [batch, seq]"
        )
    bounds, positions, mask = (
        given.get(name) for name in ("cu_seq_lens_q", "position_ids", "attention_mask")
    )
    if bounds is not None:
        return MicroBatch.from_cu_seqlens(ids, bounds)
    padding = mask if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else None
    if ids.shape[0] == 1 and positions is not None and (padding is None or bool(padding.all())):
        return MicroBatch.from_position_ids(ids, positions)
    if padding is not None:
        return MicroBatch.from_mask(ids, padding)
    if mask is not None:
        raise InvalidArgument(
            field="attention_mask",
            value=kind_of(mask),
            expected="a tensor [batch, seq] of 0 and 1, or None with position_ids if packed",
            remedy="pass cu_seq_lens_q, or leave these passes to the model: see skip",
        )
    return MicroBatch.from_mask(ids, np.ones(tuple(ids.shape), np.bool_))
