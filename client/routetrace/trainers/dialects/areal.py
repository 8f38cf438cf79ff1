"""AReaL (read: areal-project/AReaL at 0eb88aff, `areal/engine/r3`).

A trajectory has `routed_experts`, int32 [batch, seq, MoE layers, top_k], and `r3_routing_valid`,
bool [batch]. The last token, which has no row, repeats the row before it. AReaL replays a
micro-batch only if all its samples are valid; it takes the last layers of an array as the MoE
layers, and a row of zeros in all layers as missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from routetrace.client import _arguments as check
from routetrace.client.samples import SampleRows
from routetrace.client.trace import Trace
from routetrace.common.errors import InvalidArgument
from routetrace.trainers.dialects._sample import array_of, require_valid

if TYPE_CHECKING:
    import torch


def routed_experts(
    samples: Sequence[Trace | SampleRows],
    seq_len: int,
    *,
    missing: Literal["raise", "invalid"] = "raise",
) -> dict[str, torch.Tensor]:
    """Return the two tensors of a trajectory.

    Args:
        samples: samples in order, all of one model.
        seq_len: tokens that each sample is padded to, on the right.
        missing: "invalid" marks samples that lack a cell; AReaL routes their micro-batch anew.

    Returns:
        "routed_experts": int32 [batch, seq_len, MoE layers, top_k], zeros for padding and in cells
        that are missing; "r3_routing_valid": bool [batch].

    Raises:
        Incomplete: if a cell is missing, and `missing` is "raise".
        InvalidArgument: if there is no sample, or one does not fit.
    """
    import torch

    check.whole("seq_len", seq_len, 1)
    check.choice("missing", missing, ("raise", "invalid"))
    rows = [SampleRows.of(sample) for sample in samples]
    if not rows:
        raise InvalidArgument(field="samples", value=[], expected="at least one sample")
    shape = (len(rows[0].layout.moe_layer_ids), rows[0].layout.top_k)
    ids = np.zeros((len(rows), seq_len, *shape), np.int32)
    for number, sample in enumerate(rows):
        if missing == "raise":
            require_valid(sample, "AReaL")
        if sample.num_tokens > seq_len:
            raise InvalidArgument(
                field=f"samples[{number}].num_tokens",
                value=sample.num_tokens,
                expected=f"at most seq_len = {seq_len}",
            )
        array = array_of(sample, np.int32, "moe", missing=0)
        ids[number, : len(array)] = array
        if len(array):
            ids[number, len(array)] = array[-1]
    valid = [bool(sample.valid.all()) and sample.num_tokens > 1 for sample in rows]
    return {"routed_experts": torch.from_numpy(ids), "r3_routing_valid": torch.tensor(valid)}
